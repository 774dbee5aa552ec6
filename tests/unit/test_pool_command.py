"""``vllm-kvfix pool`` counts what is really there, and says what to write instead of what cannot be."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix import _pool_command

ROOT = Path(__file__).resolve().parents[2]
CASES = json.loads((ROOT / "tests/contract/cases.json").read_text())["offload_pool"]
RELEASES = json.loads((ROOT / "vllm_kvfix/support.json").read_text())["releases"]
PUBLIC = ["--bytes-per-block", "65536,196608", "--budget", "8000000", "--tokens-per-block", "128"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-kvfix pool")
    _pool_command.add_arguments(parser)
    return parser.parse_args(arguments)


def count(*arguments: str) -> dict:
    return _pool_command.answer(_pool_command._question(parse(*arguments)))


def text(capsys, *arguments: str) -> str:
    assert _pool_command.run(parse(*arguments)) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments: str) -> str:
    """What is said of arguments that are refused, by argparse or by us; the exit status is 2 either way."""
    try:
        status = _pool_command.run(parse(*arguments))
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    *usage, message = captured.err.splitlines()
    assert message.startswith("vllm-kvfix pool: error: ") and "Traceback" not in captured.err, usage
    return message


# ---- the numbers ----


def filled(budget: int, sizes: list[int], alignment: int) -> tuple[int, list[int]]:
    """Chunks of which one after the other is put into ``budget``, and what each rank then holds."""
    chunks, held, used = 0, [0] * len(sizes), 0
    row = sum(sizes)
    while row % alignment:
        row += 1
    while True:
        if used + row > budget:
            return chunks, held
        chunks, used = chunks + 1, used + row
        held = [before + size for before, size in zip(held, sizes)]


SMALL = {
    "sizes": st.lists(st.integers(1, 60), min_size=1, max_size=6),
    "ranks": st.integers(1, 3),
    "factor": st.integers(1, 4),
    "alignment": st.sampled_from([1, 8, 64]),
    "budget": st.integers(1, 5000),
    "tokens": st.integers(1, 64),
}


@given(**SMALL)
def test_the_pool_is_what_fits_when_chunks_are_put_in_one_by_one(sizes, ranks, factor, alignment, budget, tokens):
    result = count(
        *("--bytes-per-block", ",".join(map(str, sizes)), "--ranks", str(ranks), "--budget", str(budget)),
        *("--blocks-per-chunk", str(factor), "--row-alignment", str(alignment), "--tokens-per-block", str(tokens)),
    )
    each = [size for size in sizes for _ in range(ranks)]
    chunks, held = filled(budget, [size * factor for size in each], alignment)
    assert result["chunks"] == chunks
    assert [rank["bytes"] for rank in result["ranks"]] == held
    assert [rank["bytes_per_block"] for rank in result["ranks"]] == each
    assert result["tokens"] == sum(tokens for _ in range(chunks) for _ in range(factor))
    assert sum(held) <= result["bytes"] <= budget
    assert filled(result["least_budget"], [size * factor for size in each], alignment)[0] == 1
    assert filled(result["least_budget"] - 1, [size * factor for size in each], alignment)[0] == 0
    places = sorted((rank["slot"], rank["slot"] + rank["bytes_per_block"] * factor) for rank in result["ranks"])
    assert all(end <= begin for (_, end), (begin, _) in zip(places, places[1:])), "each rank has a place of its own"
    assert places[-1][1] <= result["row_bytes"]


@given(**SMALL, release=st.sampled_from(["0.14.0", "0.19.1", "0.20.0", "0.26.0", "0.33.0"]))
def test_stock_counts_each_rank_as_if_all_were_like_it(sizes, ranks, factor, alignment, budget, tokens, release):
    alignment, budget = (4096, budget * alignment * 8) if release == "0.33.0" else (1, budget)
    result = count(
        *("--bytes-per-block", ",".join(map(str, sizes)), "--ranks", str(ranks), "--budget", str(budget)),
        *("--blocks-per-chunk", str(factor), "--release", release),
    )
    world = len(sizes) * ranks
    alone = [filled(budget, [size * factor] * world, alignment)[0] for size in sizes for _ in range(ranks)]
    stock = result["stock"]
    assert (stock["scheduler"], stock["ranks"]) == (alone[0], alone)
    assert stock["out_of_bounds"] == any(count < alone[0] for count in alone)
    if len(set(sizes)) == 1:
        assert {result["chunks"]} == set(alone) and not stock["out_of_bounds"] and not stock["writes_into_others"]


def test_the_public_case_of_ranks_that_differ():
    result = count(*PUBLIC, "--release", "0.19.1")
    assert (result["chunks"], result["tokens"], result["budget_used_percent"]) == (30, 3840, 98.3)
    assert (result["stock"]["scheduler"], result["stock"]["ranks"]) == (61, [61, 20])
    assert result["stock"]["out_of_bounds"] and result["stock"]["takes_layers_as_alike"]
    readme = (ROOT / "README.md").read_text()
    assert "CPU pool of 30 chunks, 1 rank(s) x 64.00 KiB + 1 rank(s) x 192.00 KiB each: 7.50 MiB, 98.3%" in readme
    assert "up to 3,840 tokens; stock vLLM 0.19.1 would give the scheduler 61 chunks and the ranks 20 to 61" in readme


@pytest.mark.parametrize("release", ["0.14.0", "0.16.0", "0.17.0", "0.19.1", "0.20.0", "0.33.0"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_public_cases_of_layers_that_differ(case, release):
    layers = ",".join(f"{page}x{times}" for times, page in case["pages"])
    given = ["--layers", layers, "--ranks", str(case["world_size"]), "--budget", str(case["budget"])]
    result = count(*given, "--release", release)
    assert result["ranks"][0]["bytes_per_block"] == case["bytes_per_block"]
    assert result["chunks"] == case["right"]
    wrong = RELEASES[release]["offload-pool-size"]["stock"] == "affected"
    expected = case["stock"] if wrong else {"scheduler": case["right"], "worker": case["right"]}
    assert result["stock"]["scheduler"] == expected["scheduler"]
    assert result["stock"]["ranks"] == [expected["worker"]] * case["world_size"]
    assert result["stock"]["out_of_bounds"] == wrong


@pytest.mark.parametrize(
    ("release", "ranks"),
    [
        ("0.16.0", [8_000_000 // (229376 * 2 * 2)] * 2),  # the bytes of all four layers, for two tensors on two ranks
        ("0.17.0", [8_000_000 // (98304 * 2 * 2), 8_000_000 // (131072 * 2 * 2)]),  # those of the rank's own two
    ],
)
def test_a_stage_counted_the_layers_of_all_stages_once(release, ranks):
    stock = count("--layers", "64KiB,32KiB/64KiBx2", "--budget", "8000000", "--release", release)["stock"]
    assert (stock["scheduler"], stock["ranks"]) == (8_000_000 // (65536 * 2 * 2), ranks)


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_of_the_table_has_an_answer(release):
    result = count(*PUBLIC, "--release", release)
    assert result["release"] == release
    assert (result["stock"] is None) == (RELEASES[release]["offload-pool-size"]["stock"] == "absent")


@pytest.mark.parametrize(("release", "alignment", "chunks"), [("0.26.0", 1, 24), ("0.27.0", 4096, 2)])
def test_rows_are_whole_pages_in_a_region_that_ranks_share(release, alignment, chunks):
    result = count("--bytes-per-block", "100,200,40", "--budget", "8192", "--release", release)
    assert (result["row_alignment"], result["chunks"]) == (alignment, chunks)
    assert result["stock"]["shared_region"] == result["stock"]["writes_into_others"] == (alignment == 4096)
    assert [rank["slot"] for rank in result["ranks"]] == [240, 0, 200]


@pytest.mark.parametrize("page", [4096, 16384, 65536])
def test_stock_rounds_to_the_memory_page_of_the_machine_too(page):
    given = ["--bytes-per-block", "100,200", "--budget", "1MiB", "--release", "0.27.0"]
    result = count(*given, "--row-alignment", str(page))
    assert (result["row_alignment"], result["chunks"]) == (page, (1 << 20) // page)
    assert (result["stock"]["scheduler"], result["stock"]["ranks"]) == (result["chunks"], [result["chunks"]] * 2)


@pytest.mark.parametrize("more", [[], ["--release", "0.27.0"]], ids=["ours", "and stock"])
def test_as_many_ranks_as_may_be_written_are_soon_counted(more):
    command = [sys.executable, "-m", "vllm_kvfix", "pool", "--bytes-per-block", "1x65536", "--budget", "1TB", *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=10)


def test_a_hybrid_model_takes_blocks_for_each_group():
    result = count("--bytes-per-block", "1kB", "--budget", "10kB", "--tokens-per-block", "16x2,32")
    assert result["tokens"] == 10 // 3 * 16


# ---- what may be written ----


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("34359738368", 34359738368),
        ("32GiB", 32 << 30),
        ("32 GiB", 32 << 30),
        ("0.5KiB", 512),
        ("1.5TiB", 3 << 39),
        ("64KiB", 65536),
        ("3MiB", 3 << 20),
        ("2kB", 2000),
        ("2MB", 2_000_000),
        ("2.5GB", 2_500_000_000),
        ("1TB", 10**12),
    ],
)
def test_sizes(written, size):
    assert count("--bytes-per-block", "1", "--budget", written)["budget"] == size


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20))
def test_runs_are_read_as_they_are_written(sizes):
    assert list(_pool_command._sizes(_pool_command._runs(sizes))) == sizes


BAD = {
    "a bare unit": (["--budget", "32G"], "argument --budget: '32G' is no number of bytes: write", "32GiB"),
    "kubernetes": (["--budget", "32Gi"], "argument --budget: '32Gi'", "32GiB"),
    "a power": (["--budget", "1e9"], "argument --budget: '1e9'", "34359738368"),
    "nothing": (["--budget", ""], "argument --budget: ''", "32GiB"),
    "zero": (["--budget", "0"], "argument --budget: '0' is no budget", "32GiB"),
    "below zero": (["--budget=-1"], "argument --budget: '-1'", "32GiB"),
    "too much": (["--budget", "9999999TiB"], "argument --budget: '9999999TiB'", "2**63"),
    "more digits than int() takes": (["--budget", "9" * 5000], "argument --budget: '999", "32GiB"),
    "a part of a byte": (["--budget", "0.3KiB"], "argument --budget: '0.3KiB' is no whole number", "32GiB"),
    "no budget": (["--bytes-per-block", "1"], "--budget is missing", "32GiB"),
    "no bytes": (["--budget", "1"], "--bytes-per-block is missing", "65536,196608"),
    "a hole": (["--bytes-per-block", "1,,2"], "argument --bytes-per-block: '' is no number", "64KiBx4"),
    "no KV": (["--bytes-per-block", "0,0", "--budget", "1"], "--bytes-per-block 0x2 is zero", "65536"),
    "too often": (
        ["--bytes-per-block", "1x999999999"],
        "argument --bytes-per-block: '1x999999999'",
        "65536 at the most",
    ),
    "times 0": (["--bytes-per-block", "1x0"], "argument --bytes-per-block: '0' is no whole number", "from 1"),
    "times nothing": (["--bytes-per-block", "1x"], "argument --bytes-per-block: ''", "from 1"),
    "too many ranks": (["--bytes-per-block", "1x9", "--ranks", "9999", "--budget", "1"], "--ranks 9999", "65536"),
    "no ranks": (["--ranks", "0"], "argument --ranks: '0' is no whole number", "from 1"),
    "half a block": (["--blocks-per-chunk", "1.5"], "argument --blocks-per-chunk: '1.5'", "write for example 2"),
    "no tokens": (["--tokens-per-block", "0"], "argument --tokens-per-block: '0' has a 0", "16"),
    "an empty layer": (["--layers", "65536,0"], "argument --layers: '65536,0' has a layer of 0 bytes", "leave it out"),
    "an empty stage": (["--layers", "65536/"], "argument --layers: '' is no number of bytes", "65536"),
    "both": (["--layers", "1", "--bytes-per-block", "1"], "--bytes-per-block: not allowed with", "--layers"),
    "a release to come": (["--release", "9.9.9"], "argument --release: vLLM '9.9.9' was not measured", "0.19.1"),
    "no release": (["--release", "latest"], "argument --release: vLLM 'latest'", "0.33.0"),
    "an alignment of our own": (
        ["--bytes-per-block", "1", "--budget", "1TB", "--row-alignment", "3", "--release", "0.27.0"],
        "--row-alignment 3 is not what vLLM 0.27.0 rounds to",
        "leave it out, or write 4096 or 16384 or 65536",
    ),
    "pages before there were": (
        ["--bytes-per-block", "1", "--budget", "1TB", "--row-alignment", "4096", "--release", "0.26.0"],
        "--row-alignment 4096 is not what vLLM 0.26.0 rounds to",
        "leave it out, or write 1",
    ),
    "no log": (
        ["--bytes-per-block", "1", "--budget", "1", "--from-log", ""],
        "--from-log '' cannot be read",
        "write the",
    ),
    "no such file": (["--from-log", "/nowhere/log"], "--from-log '/nowhere/log' cannot be read", "No such file"),
    "a folder": (["--from-log", "/"], "--from-log '/' cannot be read", "write the name of a log"),
}


@pytest.mark.parametrize(("arguments", "begin", "advice"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused_by_name_and_value_with_what_to_write(capsys, arguments, begin, advice):
    message = refusal(capsys, *arguments)
    assert message.startswith(f"vllm-kvfix pool: error: {begin}") or begin in message
    assert advice in message


# ---- what a server logged ----

PREFIX = "\x1b[0;36m(EngineCore pid=14802)\x1b[0;0m INFO 11-30 18:31:05 [_log.py:71] "


def log_of(tmp_path: Path, *said: str) -> str:
    path = tmp_path / "log"
    path.write_bytes(b"\xff no UTF-8\n" + "".join(f"{PREFIX}{line}\n" for line in said).encode())
    return str(path)


def pool_line(chunks: str, **changes) -> str:
    counted = {"rank_bytes": (65536, 196608), "budget": 8000000, "blocks_per_chunk": 1, "tokens_per_block": (128,)}
    command = _pool_command.arguments(**{**counted, "row_alignment": 1, **changes})
    return (
        f"vllm-kvfix: CPU pool of {chunks} chunks, 1 rank(s) x 64.00 KiB + 1 rank(s) x 192.00 KiB each: 7.50 MiB, "
        f"98.3% of the 7.63 MiB in cpu_bytes_to_use, up to 3,840 tokens; stock vLLM 0.19.1 would give the scheduler 61 "
        f"chunks and the ranks 20 to 61; counted by: {command}"
    )


REGISTERED = "vllm-kvfix 0.1.0 on vLLM {}: offload-pool-size applied (spec FixedCPUOffloadingSpec)"


@given(
    sizes=st.lists(st.integers(1, 1 << 24), min_size=1, max_size=12),
    budget=st.integers(1, (1 << 63) - 1),
    factor=st.integers(1, 1000),
    tokens=st.lists(st.integers(1, 1024), min_size=1, max_size=3),
    alignment=st.sampled_from([1, 4096, 65536]),
)
def test_a_log_has_every_byte(tmp_path_factory, sizes, budget, factor, tokens, alignment):
    line = pool_line(
        "1,234",
        **{"rank_bytes": sizes, "budget": budget, "blocks_per_chunk": factor},
        **{"tokens_per_block": tokens, "row_alignment": alignment},
    )
    result = count("--from-log", log_of(tmp_path_factory.mktemp("log"), line))
    assert [rank["bytes_per_block"] for rank in result["ranks"]] == sizes
    assert (result["budget"], result["blocks_per_chunk"]) == (budget, factor)
    assert (result["tokens_per_block"], result["row_alignment"]) == (tokens, alignment)
    assert (result["logged_chunks"], result["release"]) == (1234, None)


@pytest.mark.parametrize(
    ("version", "release"), [("0.19.1", "0.19.1"), ("0.19.1+cu129", "0.19.1"), ("0.19.2rc1.dev3+g0a1b2c3", None)]
)
def test_a_log_says_which_vllm_it_is_of_and_the_last_pool_counts(tmp_path, version, release):
    before = pool_line("7", rank_bytes=(1,))
    log = log_of(
        tmp_path, REGISTERED.format(version), before, "Capturing CUDA graphs", pool_line("30"), "vllm-kvfix pool"
    )
    result = count("--from-log", log)
    if release is None:
        assert result["release"] is result["stock"] is None
        result, release = count("--from-log", log, "--release", "0.19.1"), "0.19.1"
    assert result == {**count(*PUBLIC, "--release", release), "logged_chunks": 30}


def test_options_ask_what_would_be(tmp_path):
    log = log_of(tmp_path, REGISTERED.format("0.19.1"), pool_line("30"))
    bigger = count("--from-log", log, "--budget", "16MB", "--release", "0.32.0")
    assert (bigger["chunks"], bigger["tokens"], bigger["row_alignment"]) == (61, 61 * 128, 4096)
    assert count("--from-log", log, "--layers", "512x2")["ranks"][0]["bytes_per_block"] == 1024


def test_a_pool_that_the_server_counted_otherwise_is_said(tmp_path, capsys):
    assert "The server logged 29 chunks" in text(capsys, "--from-log", log_of(tmp_path, pool_line("29")))
    assert "logged" not in text(capsys, "--from-log", log_of(tmp_path, pool_line("30")))


def test_standard_input_of_any_encoding(tmp_path):
    log = Path(log_of(tmp_path, pool_line("30"))).read_bytes()
    command = [sys.executable, "-m", "vllm_kvfix", "pool", "--from-log", "-", "--json"]
    done = subprocess.run(command, input=log, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["chunks"] == 30


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vllm-kvfix: CPU pool of 37 chunks a rank, as num_cpu_blocks says", "has no line with"),
        ("Capturing CUDA graphs", "has no line with"),
        (pool_line("1").replace("65536", "a"), "argument --bytes-per-block: 'a' is no number"),
        (pool_line("1").replace("--budget", "--help"), "required: --budget"),
        (pool_line("1").replace("--budget", "--b"), "required: --budget"),
        (pool_line("1") + " --help 1", "unrecognized arguments: --help 1"),
        (pool_line("1") + " --from-log foo", "unrecognized arguments: --from-log foo"),
        (pool_line("1") + " --release latest", "unrecognized arguments: --release latest"),
        (pool_line("1").replace("--blocks-per-chunk", "--json --blocks-per-chunk"), "required: --blocks-per-chunk"),
        (pool_line("1").replace("8000000", "8GB"), "required: --blocks-per-chunk"),
        *((pool_line(no_number), "has no line with") for no_number in [",,,", ",1", "1,", "1,,2", "1,23", "1" * 5000]),
    ],
)
def test_a_log_without_a_pool_or_with_a_broken_one(tmp_path, capsys, line, words):
    message = refusal(capsys, "--from-log", log_of(tmp_path, line))
    assert f"--from-log {str(tmp_path / 'log')!r}" in message and words in message


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("longer", range(-2, 3))
def test_a_line_too_long_to_be_ours_is_left_out_whole(tmp_path, monkeypatch, longer, end):
    """Its last number would else be cut, or its beginning be read as another line's."""
    monkeypatch.setattr(_pool_command, "_LONGEST_LINE", len(pool_line("30", row_alignment=4096) + end) - longer)
    path = tmp_path / "log"
    path.write_text(f"{pool_line('7')}\n{pool_line('30', row_alignment=4096)}{end}")
    result = count("--from-log", str(path))
    found = (result["logged_chunks"], result["row_alignment"])
    assert found == ((7, 1) if longer > 0 or (longer, end) == (0, "") else (30, 4096))


@given(before=st.integers(0, 2000), after=st.integers(0, 2000))
def test_what_is_on_a_long_line_is_no_pool_wherever_it_is(tmp_path_factory, before, after):
    path = tmp_path_factory.mktemp("log") / "log"
    line = f"{'x' * before} {pool_line('30')} {'x' * after}"
    path.write_text(f"{pool_line('7')}\n{line}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pool_command, "_LONGEST_LINE", 1000)
        assert count("--from-log", str(path))["logged_chunks"] == (30 if len(line) < 1000 else 7)


def test_a_line_without_end_takes_no_memory(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, 2)
        file.write(f"\n{pool_line('30')}".encode())
    tracemalloc.start()
    try:
        assert count("--from-log", str(path))["logged_chunks"] == 30
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_line_of_many_pools_is_soon_read(tmp_path):
    log = log_of(tmp_path, "vllm-kvfix: CPU pool of 1 chunks " * 30000, pool_line("30"))
    command = [sys.executable, "-m", "vllm_kvfix", "pool", "--from-log", log]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=10)


# ---- how it is said ----


def test_the_json_has_the_documented_form(capsys):
    assert json.loads(text(capsys, *PUBLIC, "--release", "0.32.0", "--json")) == {
        "schema": 1,
        "release": "0.32.0",
        "budget": 8000000,
        "blocks_per_chunk": 1,
        "tokens_per_block": [128],
        "row_alignment": 4096,
        "row_bytes": 262144,
        "least_budget": 262144,
        "chunks": 30,
        "logged_chunks": None,
        "bytes": 7864320,
        "budget_used_percent": 98.3,
        "tokens": 3840,
        "ranks": [
            {"rank": 0, "bytes_per_block": 65536, "slot": 0, "bytes": 1966080},
            {"rank": 1, "bytes_per_block": 196608, "slot": 65536, "bytes": 5898240},
        ],
        "stock": {
            "scheduler": 61,
            "ranks": [61, 20],
            "out_of_bounds": True,
            "shared_region": True,
            "writes_into_others": True,
            "takes_layers_as_alike": False,
            "upstream": "https://github.com/vllm-project/vllm/issues/50821",
        },
    }


def test_every_name_of_the_json_is_documented():
    page = (ROOT / "docs/pool.md").read_text()
    result = count(*PUBLIC, "--release", "0.32.0")
    names = [*result, *result["ranks"][0], *result["stock"]]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_example_of_the_documentation_is_what_is_printed(capsys):
    page = (ROOT / "docs/pool.md").read_text()
    example = text(capsys, *PUBLIC, "--release", "0.19.1")
    assert "".join(f"    {line}".rstrip() + "\n" for line in example.splitlines()) in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--bytes-per-block", "64KiBx4", "--budget", "1kB"],
            ["nothing is offloaded", "least cpu_bytes_to_use is 262144"],
        ),
        ([*PUBLIC, "--release", "0.13.0"], ['"num_cpu_blocks": 30']),
        ([*PUBLIC, "--release", "0.26.0"], ["the ranks 20 to 61", "WRITES OUT OF BOUNDS"]),
        ([*PUBLIC, "--release", "0.32.0"], ["place in a chunk", "WRITES OUT OF BOUNDS", "WRITE OVER EACH OTHER"]),
        (
            ["--bytes-per-block", "3,1", "--budget", "600", "--release", "0.26.0"],
            ["the ranks 100 to 300", "100 chunks of 150 are used"],
        ),
        (["--bytes-per-block", "64x4", "--budget", "1kB", "--release", "0.26.0"], ["each rank 3 chunks too"]),
    ],
)
def test_the_text_says_what_matters(capsys, arguments, words):
    said = text(capsys, *arguments)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize("release", ["0.26.0", "0.19.1"])
def test_what_is_right_is_not_called_wrong(capsys, release):
    said = text(capsys, "--layers", "65536x4", "--ranks", "2", "--budget", "1GiB", "--release", release)
    assert "WRITE" not in said and "alike" not in said


def test_no_vllm_is_needed():
    code = "import sys; sys.modules['vllm'] = None; from vllm_kvfix import _pool_command"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
