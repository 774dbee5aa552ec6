"""``vllm-kvfix pool``: the CPU offload pool's arithmetic, without a server and without vLLM.

The numbers are those of :mod:`vllm_kvfix.pool`, which the spec uses too. What stock vLLM would count is
known for the releases in ``support.json``. The answer is one object, documented in docs/pool.md; the
text is made of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from vllm_kvfix import _fix, pool
from vllm_kvfix.fixes import offload_pool_size
from vllm_kvfix.settings import human

SCHEMA = 1
LINK_LAYERS, LINK_RANKS = offload_pool_size.UPSTREAM, "https://github.com/vllm-project/vllm/issues/50821"

# What stock does, by its version, because there is no code here to ask. tests/contract asks the code of every release.
_SUMS_OWN_LAYERS = (0, 17, 0)  # before, a rank's page is summed over the layers of all pipeline stages
_SHARES_REGION = (0, 27, 0)  # on CUDA, ranks keep the pool in one region, in rows of whole pages
_PAGES = (4096, 16384, 65536)  # bytes of such a page; most machines have the first

_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40})
_MOST = 1 << 16  # ranks, or layers: more is a slip of the pen, and would take long

# Without a further pool in between: else a long line that has many takes time by the square of its length.
_LOGGED_POOL = re.compile(
    r"vllm-kvfix: CPU pool of ([0-9]{1,3}(?:,[0-9]{3}){0,6}) chunks(?:(?!CPU pool of).)*?"
    r"\bvllm-kvfix pool((?: --[a-z-]+ [0-9a-z,]+)+)"
)
_LOGGED_RELEASE = re.compile(r"vllm-kvfix [^ ]+ on vLLM ([^ :]+):")
_LONGEST_LINE = 1 << 20  # characters; ours are far shorter

_SAY_SIZE = "write for example 34359738368, 32GiB or 32GB"
_SAY_SIZES = "write for example 65536,196608 or 64KiBx4 (four times 64 KiB)"


class Question(NamedTuple):
    """A pool to be counted.

    Args:
        rank_bytes: KV bytes of one GPU block on each rank.
        stages: of each pipeline stage, the page bytes of each KV cache tensor of a rank; None if only sums are known.
        tokens_per_block: of each KV cache group.
        logged_chunks: what the server said; None if it was not asked.
    """

    rank_bytes: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...] | None
    budget: int
    blocks_per_chunk: int
    tokens_per_block: tuple[int, ...]
    row_alignment: int
    release: str | None
    logged_chunks: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # No defaults here: an option that is not given may be in the log.
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--bytes-per-block",
        type=_sizes,
        metavar="SIZES",
        help="KV bytes that each rank keeps for one GPU block: 65536,196608 or 64KiBx4",
    )
    what.add_argument(
        "--layers",
        type=_stages,
        metavar="SIZES",
        help="instead: what one GPU block takes in each KV cache tensor of a rank, the first layer first, with a / "
        "between pipeline stages: 65536x50,32768x10",
    )
    parser.add_argument(
        "--ranks", type=_count, metavar="N", help="ranks that keep the same, for each that is given (default 1)"
    )
    parser.add_argument("--budget", type=_budget, metavar="SIZE", help="cpu_bytes_to_use: 34359738368 or 32GiB")
    parser.add_argument("--blocks-per-chunk", type=_count, metavar="N", help="GPU blocks in one chunk (default 1)")
    parser.add_argument(
        "--tokens-per-block",
        type=_counts,
        metavar="NUMBERS",
        help="tokens of one GPU block; of a hybrid model, of each KV cache group (default 16)",
    )
    parser.add_argument("--release", type=_release, metavar="X.Y.Z", help="say what this vLLM would count by itself")
    parser.add_argument(
        "--row-alignment",
        type=_count,
        metavar="BYTES",
        help=f"what a chunk's bytes are rounded up to (default: {_PAGES[0]} from vLLM 0.27.0, else 1)",
    )
    parser.add_argument("--from-log", metavar="FILE", help="take all this from a server's log; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/pool.md)")


def run(options: argparse.Namespace) -> int:
    """Print the answer; the exit status."""
    try:
        question = _question(options)
    except ValueError as error:
        print(f"vllm-kvfix pool: error: {error}", file=sys.stderr)
        return 2
    result = answer(question)
    print(json.dumps(result, indent=1) if options.json else "\n".join(_lines(result)))
    return 0


def arguments(
    rank_bytes: Iterable[int], budget: int, blocks_per_chunk: int, tokens_per_block: Iterable[int], row_alignment: int
) -> str:
    """The command that counts a pool anew, for the log: ``--from-log`` reads it there."""
    given = {
        "--bytes-per-block": _runs(rank_bytes),
        "--budget": str(budget),
        "--blocks-per-chunk": str(blocks_per_chunk),
        "--tokens-per-block": _runs(tokens_per_block),
        "--row-alignment": str(row_alignment),
    }
    return " ".join(["vllm-kvfix pool", *(f"{name} {value}" for name, value in given.items() if value)])


def answer(question: Question) -> dict[str, Any]:
    """What ``--json`` prints."""
    sizes, factor = question.rank_bytes, question.blocks_per_chunk
    row = pool.row_bytes(sizes, factor, question.row_alignment)
    chunks = pool.num_chunks(question.budget, row)
    return {
        "schema": SCHEMA,
        "release": question.release,
        "budget": question.budget,
        "blocks_per_chunk": factor,
        "tokens_per_block": list(question.tokens_per_block),
        "row_alignment": question.row_alignment,
        "row_bytes": row,
        "least_budget": row,
        "chunks": chunks,
        "logged_chunks": question.logged_chunks,
        "bytes": chunks * row,
        "budget_used_percent": round(100 * chunks * row / question.budget, 1),
        "tokens": pool.tokens(chunks * factor, question.tokens_per_block),
        "ranks": [
            {"rank": rank, "bytes_per_block": size, "slot": slot, "bytes": chunks * size * factor}
            for rank, (size, slot) in enumerate(zip(sizes, pool.slots(sizes, factor)))
        ],
        "stock": _stock(question),
    }


def _stock(question: Question) -> dict[str, Any] | None:
    """What the stock spec of the release counts; None where num_cpu_blocks is given to it (to 0.13.0)."""
    if question.release is None or _verdict(question.release) == _fix.ABSENT:
        return None
    version, alike = _version(question.release), len(set(question.rank_bytes)) == 1
    scheduler, ranks = _counted(question)
    shares = version >= _SHARES_REGION
    return {
        "scheduler": scheduler,
        "ranks": ranks,
        "out_of_bounds": scheduler > min(ranks),
        "shared_region": shares,
        "writes_into_others": shares and not alike,
        "takes_layers_as_alike": question.stages is None and _verdict(question.release) == _fix.AFFECTED,
        "upstream": LINK_LAYERS if _layers_differ(question) else LINK_RANKS,
    }


def _counted(question: Question) -> tuple[int, list[int]]:
    """Chunks that stock counts in the scheduler and on each rank."""
    sizes, factor, budget = question.rank_bytes, question.blocks_per_chunk, question.budget
    world = len(sizes)
    if question.stages is None or not _layers_differ(question):  # a page times its tensors is what the rank keeps
        rows = [pool.row_bytes((size * world,), factor, question.row_alignment) for size in sizes]  # all ranks alike
        alone = [pool.num_chunks(budget, row) for row in rows]
        return alone[0], alone
    whole = None if _version(question.release or "") >= _SUMS_OWN_LAYERS else sum(map(sum, question.stages))
    of_stage = [
        pool.stock_num_chunks(budget, whole or sum(pages), len(pages), world, factor) for pages in question.stages
    ]
    first = question.stages[0]
    scheduler = pool.stock_num_chunks(budget, first[0], len(first), world, factor)
    return scheduler, _each(of_stage, world // len(of_stage))


def _layers_differ(question: Question) -> bool:
    """Whether the release counts layers of different pages wrongly, and these are."""
    pages = set(itertools.chain.from_iterable(question.stages or ()))
    return len(pages) > 1 and _verdict(question.release or "") == _fix.AFFECTED


def _question(options: argparse.Namespace) -> Question:
    """What is asked, by the options and, where they are silent, by the log.

    Raises:
        ValueError: something is missing, or the log cannot be read.
    """
    chunks, logged = _logged(options.from_log) if options.from_log is not None else (None, argparse.Namespace())
    given = argparse.Namespace(**{**vars(logged), **{k: v for k, v in vars(options).items() if v is not None}})
    if options.layers is not None or options.bytes_per_block is not None:
        given.layers, given.bytes_per_block = options.layers, options.bytes_per_block
    if options.release not in (None, getattr(logged, "release", None)):
        given.row_alignment = options.row_alignment  # the log's is that of another release

    def of(name: str, default: Any = None) -> Any:
        return getattr(given, name, None) or default

    stages, ranks = of("layers"), of("ranks", 1)
    each = of("bytes_per_block") if stages is None else tuple(map(sum, stages))
    if each is None:
        raise ValueError(f"--bytes-per-block is missing: {_SAY_SIZES}, or give --layers or --from-log")
    if of("budget") is None:
        raise ValueError(f"--budget is missing: {_SAY_SIZE}")
    if not any(each):
        raise ValueError(f"--bytes-per-block {_runs(each)} is zero on every rank, so there is no KV: {_SAY_SIZES}")
    if ranks * len(each) > _MOST:
        raise ValueError(f"--ranks {ranks} makes {ranks * len(each)} ranks: write fewer, {_MOST} at the most")
    release = of("release")
    return Question(
        rank_bytes=tuple(_each(each, ranks)),
        stages=stages,
        budget=of("budget"),
        blocks_per_chunk=of("blocks_per_chunk", 1),
        tokens_per_block=of("tokens_per_block", (16,)),
        row_alignment=_row_alignment(of("row_alignment"), release),
        release=release,
        logged_chunks=chunks,
    )


def _row_alignment(asked: int | None, release: str | None) -> int:
    """What rows are rounded up to. With a release, what it rounds to: stock does so too, and cannot be told."""
    possible = _PAGES if release is not None and _version(release) >= _SHARES_REGION else (1,)
    if release is not None and asked not in (None, *possible):
        raise ValueError(
            f"--row-alignment {asked} is not what vLLM {release} rounds to: leave it out, or write "
            f"{' or '.join(map(str, possible))}"
        )
    return asked or possible[0]


# ---- what a server logged ----


class _LoggedArguments(argparse.ArgumentParser):
    """Reads what :func:`arguments` writes, and nothing else."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--bytes-per-block", type=_sizes, required=True)
        self.add_argument("--budget", type=_budget, required=True)
        self.add_argument("--blocks-per-chunk", type=_count, required=True)
        self.add_argument("--tokens-per-block", type=_counts)  # a model without KV has none
        self.add_argument("--row-alignment", type=_count, required=True)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _logged(name: str) -> tuple[int, argparse.Namespace]:
    """The last pool in a log: its chunks, and the options that count it anew."""
    found: re.Match[str] | None = None
    release: re.Match[str] | None = None
    try:
        with open(0 if name == "-" else name, encoding="utf-8", errors="replace", closefd=name != "-") as file:
            for line in _lines_of(file):
                found = _LOGGED_POOL.search(line) or found
                release = _LOGGED_RELEASE.search(line) or release
    except OSError as error:
        raise ValueError(f"--from-log {name!r} cannot be read ({error.strerror}): write the name of a log") from None
    if found is None:
        raise ValueError(
            f"--from-log {name!r} has no line with 'vllm-kvfix: CPU pool of ... vllm-kvfix pool --bytes-per-block': "
            f"give the log of a server that offloads with {offload_pool_size.SPEC_NAME}, from its start"
        )
    try:
        options = _LoggedArguments().parse_args(found[2].split())
        if release is not None and _plain(release[1]) in _known():  # others are left to the operator
            options.release = _plain(release[1])
    except ValueError as error:
        raise ValueError(f"--from-log {name!r}, in {found[2].strip()!r}: {error}") from None
    return int(found[1].replace(",", "")), options


def _lines_of(file: TextIO) -> Iterator[str]:
    """The lines of a log, without those too long to be ours: a piece of one may end within a number."""
    begins = True
    while piece := file.readline(_LONGEST_LINE):
        ends = piece.endswith("\n") or len(piece) < _LONGEST_LINE  # the last line of a log may have no end
        if begins and ends:
            yield piece
        begins = ends


# ---- releases ----


def _known() -> dict[str, Any]:
    releases: dict[str, Any] = json.loads(Path(__file__).with_name("support.json").read_text())["releases"]
    return releases


def _verdict(release: str) -> str:
    return str(_known()[release][offload_pool_size.ID]["stock"])


def _version(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _plain(version: str) -> str:
    """0.19.1 of v0.19.1, as images are tagged, and of 0.19.1+cu129, as builds are."""
    return version.partition("+")[0].lstrip("v")


# ---- what may be written ----


def _size(text: str, example: str = _SAY_SIZE) -> int:
    found = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([kKMGT]i?B)?", text)
    unit = _UNITS.get((found[2] or "") if found else "?")
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes: {example}")
    size = Fraction(found[1]) * unit
    if size.denominator != 1 or size >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of bytes below 2**63: {example}")
    return int(size)


def _budget(text: str) -> int:
    size = _size(text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no budget, which is above zero: {_SAY_SIZE}")
    return size


def _sizes(text: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for entry in text.split(","):
        size, times, count = entry.strip().partition("x")
        number = _size(size, _SAY_SIZES)
        repeats = _count(count) if times else 1
        if len(sizes) + repeats > _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} are too many: write {_MOST} at the most")
        sizes += [number] * repeats
    return tuple(sizes)


def _stages(text: str) -> tuple[tuple[int, ...], ...]:
    stages = tuple(_sizes(stage) for stage in text.split("/"))
    if not all(map(all, stages)):
        raise argparse.ArgumentTypeError(f"{text!r} has a layer of 0 bytes: leave it out")
    return stages


def _counts(text: str) -> tuple[int, ...]:
    counts = _sizes(text)
    if not all(counts):
        raise argparse.ArgumentTypeError(f"{text!r} has a 0: write for example 16")
    return counts


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1: write for example 2")
    return int(text)


def _release(text: str) -> str:
    known = _known()
    if _plain(text) not in known:
        raise argparse.ArgumentTypeError(f"vLLM {text!r} was not measured: write one of {', '.join(known)}")
    return _plain(text)


def _runs(values: Iterable[int]) -> str:
    """65536x2,196608: what :func:`_sizes` reads."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(values)]
    return ",".join(f"{value}x{count}" if count > 1 else f"{value}" for value, count in runs)


def _each(values: Iterable[int], times: int) -> list[int]:
    return [value for value in values for _ in range(times)]


# ---- the answer as text ----


def _lines(result: dict[str, Any]) -> Iterator[str]:
    chunks, row, ranks, stock = result["chunks"], result["row_bytes"], result["ranks"], result["stock"]
    if chunks:
        per_block = ",".join(map(str, result["tokens_per_block"]))
        yield (
            f"CPU pool of {chunks:,} chunks: {result['bytes']:,} bytes ({human(result['bytes'])}), "
            f"{result['budget_used_percent']:.1f}% of the {human(result['budget'])} in cpu_bytes_to_use, "
            f"up to {result['tokens']:,} tokens ({per_block} a block)"
        )
    else:
        yield f"CPU pool of 0 chunks, nothing is offloaded: the least cpu_bytes_to_use is {result['least_budget']}"
    yield f"One chunk is {result['blocks_per_chunk']} block(s) on {len(ranks)} rank(s): {row:,} bytes"
    if result["logged_chunks"] not in (None, chunks):
        yield f"The server logged {result['logged_chunks']:,} chunks"
    yield ""
    yield from _table(result)
    if result["release"] is None:
        return
    yield ""
    if stock is None:
        yield f'vLLM {result["release"]} is told its chunks: write "num_cpu_blocks": {chunks} for this pool'
    else:
        yield from _verdicts(result["release"], chunks, stock)


def _table(result: dict[str, Any]) -> Iterator[str]:
    ranks, stock = result["ranks"], result["stock"]
    columns = [
        ["rank", *(str(one["rank"]) for one in ranks), "total"],
        ["bytes a block", *(f"{one['bytes_per_block']:,}" for one in ranks), ""],
        ["bytes", *(f"{one['bytes']:,}" for one in ranks), f"{result['bytes']:,}"],
    ]
    if result["release"] is None or (stock and stock["shared_region"]):  # else each rank keeps its part by itself
        columns.insert(2, ["place in a chunk", *(f"{one['slot']:,}" for one in ranks), ""])
    if stock is not None:
        columns.append([f"chunks, stock {result['release']}", *(f"{count:,}" for count in stock["ranks"]), ""])
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns):
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells, widths)).rstrip()


def _verdicts(release: str, chunks: int, stock: dict[str, Any]) -> Iterator[str]:
    scheduler, least, most = stock["scheduler"], min(stock["ranks"]), max(stock["ranks"])
    workers = f"the ranks {least:,} to {most:,}" if least < most else f"each rank {least:,}"
    if scheduler == least == most == chunks and not stock["writes_into_others"]:
        yield f"Stock vLLM {release} gives the scheduler and each rank {chunks:,} chunks too"
    else:
        harms = []
        if stock["out_of_bounds"]:
            harms.append("the scheduler hands out chunks that a rank does not have, and a store WRITES OUT OF BOUNDS")
        if stock["writes_into_others"]:
            harms.append("on CUDA, ranks share one region, each with rows of its own size: they WRITE OVER EACH OTHER")
        harm = "; ".join(harms) or f"{min(scheduler, least):,} chunks of {chunks:,} are used"
        counts = f"the scheduler {scheduler:,} chunks and {workers}"
        yield f"Stock vLLM {release} gives {counts}: {harm} ({stock['upstream']})"
    if stock["takes_layers_as_alike"]:
        yield "That takes all layers of a model to be alike: where they are not, give --layers"
