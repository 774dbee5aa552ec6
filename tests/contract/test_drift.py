"""A vLLM that no release is: what its code does decides, not its version.

The installed vLLM is imported from changed copies of its own files: each drift is one edit of the syntax
tree of a module. The fixes then say the right word, raise nothing, warn in one line where they do not
know the code, and leave vLLM as its source made it, unless it has exactly the known bug.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import CodeType, ModuleType
from typing import Any

import pytest
import vllm
import vllm.version
from facts import (
    CASES,
    CONCURRENCY_IS_WRONG,
    POOL_SIZE_IS_GIVEN,
    POOL_SIZE_IS_WRONG,
    SIMPLE_OFFLOAD_IS_ABSENT,
    SIMPLE_OFFLOAD_RANKS_DIFFER,
)
from geometry import chunks, create_spec, vllm_config
from test_concurrency import NAME, T22, configs_of_case, reported
from test_pool_size import FIXED, both_forms
from test_register import FACTORY, INFO, SIMPLE_OFFLOAD, UTILS, WARNING, WORDS, words

POOL_SIZE, CONCURRENCY = "offload-pool-size", "max-concurrency"
E01 = CASES["offload_pool"]["E01"]
APPLIED, NOT_NEEDED, UNKNOWN, FAILED, WAITING = "applied", "not needed", "unknown", "failed", "waiting"


def file_of(module: str) -> Path:
    return Path(vllm.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")


SPEC = next(name for name in ("vllm.v1.kv_offload.cpu.spec", "vllm.v1.kv_offload.cpu") if file_of(name).exists())
ELSEWHERE = {UTILS: "vllm.v1.core.elsewhere", SPEC: "vllm.v1.kv_offload.elsewhere"}


def definition(tree: Any, path: str) -> Any:
    for name in path.split("."):
        (tree,) = (node for node in tree.body if getattr(node, "name", None) == name)
    return tree


# ---- the installed vLLM, drifted ----

# Parsed and compiled once, before the tests fork.
TREES = {module: ast.parse(file_of(module).read_text()) for module in (UTILS, FACTORY, SPEC)}
CODES = {module: compile(tree, str(file_of(module)), "exec") for module, tree in TREES.items()}


class Drifted:
    """A finder that takes the modules that the fixes are for from other files, and notes what they were at first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path | None] = {name: file_of(name) for name in (UTILS, FACTORY, SPEC)}
        self.codes: dict[str, CodeType] = {}
        self.made: dict[str, dict[str, Any]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.files:
            return None
        file = self.files[name]
        if file is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(self, name, str(file)))

    def edit(self, module: str, name: str, edit: Callable[[ast.Module, Any], None]) -> None:
        """Import ``module`` changed; ``edit`` is given the syntax tree of its file, and what defines ``name``."""
        tree = TREES[module]  # this test's own: it runs in a fork
        edit(tree, definition(tree, name))
        self.codes[module] = compile(tree, str(self.files[module]), "exec")
        assert self.codes[module] != CODES[module], "a drift that changes nothing"

    def write(self, module: str, source: str) -> None:
        self.files[module] = self.folder / f"{module}.py"
        (self.folder / f"{module}.py").write_text(source)

    def move(self, module: str) -> None:
        self.files[ELSEWHERE[module]] = file_of(module)

    def changed(self) -> set[str]:
        """Names in those modules, of classes and registries too, that are not what vLLM's source made them."""
        missing = object()
        found = set()
        for module, before in self.made.items():
            now = contents(sys.modules[module])
            for name in before.keys() | now.keys():
                one, other = before.get(name, missing), now.get(name, missing)
                if one is not other and not (isinstance(one, list) and one == other):
                    found.add(name)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, drifted: Drifted, name: str, file: str) -> None:
        super().__init__(name, file)
        self.drifted = drifted

    def get_code(self, fullname: str) -> CodeType | None:
        return self.drifted.codes.get(fullname) or super().get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.drifted.made[module.__name__] = contents(module)


def contents(module: ModuleType) -> dict[str, Any]:
    found = dict(vars(module))
    for thing in vars(module).values():
        if isinstance(thing, type) and thing.__module__ == module.__name__:
            found |= {f"{thing.__name__}.{name}": value for name, value in vars(thing).items()}
    for name, value in list(found.items()):
        if isinstance(value, Mapping):
            found |= {f"{name}[{key}]": one for key, one in value.items()}
        elif isinstance(value, list):
            found[name] = list(value)
    return found


@pytest.fixture
def drifted(tmp_path: Path) -> Drifted:
    finder = Drifted(tmp_path)
    sys.meta_path.insert(0, finder)
    return finder


def import_all() -> None:
    for name in (UTILS, FACTORY, SPEC, *(() if SIMPLE_OFFLOAD_IS_ABSENT else SIMPLE_OFFLOAD)):
        importlib.import_module(name)


def import_and_register(register: Any, order: str) -> None:
    if order == "import, then register":
        import_all()
    register()
    import_all()
    register()


ORDERS = ["import, then register", "register, then import"]
in_both_orders = pytest.mark.parametrize("order", ORDERS)


def pool_sizes(extra_config: dict[str, Any]) -> tuple[int, int]:
    """Chunks that the scheduler and a worker count in case E01; to 0.13.0, where the operator says it, 37."""
    if POOL_SIZE_IS_GIVEN:
        size = chunks(create_spec(vllm_config(extra_config | {"num_cpu_blocks": 37}), None))
        return size, size
    scheduler, worker = both_forms(E01, extra_config)
    return chunks(scheduler), chunks(worker)


RIGHT_SIZES = (37, 37) if POOL_SIZE_IS_GIVEN else (E01["right"], E01["right"])
STOCK_SIZES = (E01["stock"]["scheduler"], E01["stock"]["worker"]) if POOL_SIZE_IS_WRONG else RIGHT_SIZES
STOCK_NUMBER = T22["stock"]["worker"] if CONCURRENCY_IS_WRONG else T22["right"]


# ---- another version ----

VERSIONS = ["0.34.0", "0.34.0.dev12+gabc1234", "0.19.1rc2", "0.19.1+cu129", "2026.11.1+acme", "dev", None]


@in_both_orders
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_that_no_release_has_is_only_said(
    register: Any, log: Any, monkeypatch: pytest.MonkeyPatch, version: str | None, order: str
) -> None:
    for module in (vllm, vllm.version):
        if version is None:
            monkeypatch.delattr(module, "__version__")
        else:
            monkeypatch.setattr(module, "__version__", version)
    import_and_register(register, order)
    assert words() == WORDS
    assert log.ours(WARNING) == []
    assert f" on vLLM {version or 'unknown'}: " in log.ours(INFO)[-1]
    assert reported(*configs_of_case(T22)) == T22["right"]
    assert pool_sizes({"spec_name": FIXED}) == RIGHT_SIZES


# ---- edits of a function, for either fix ----

Edit = Callable[[ast.Module, Any], None]


@dataclass(frozen=True)
class Drift:
    edit: Edit  # given the module and the function in it
    word: str
    answer: Any = None  # what vLLM itself says then; None where it cannot be asked as before
    named: str = ""  # in the warning
    warnings: int | None = None  # if not one where the word is unknown or failed, and none elsewhere
    only_if: bool = True

    @property
    def expected_warnings(self) -> int:
        return int(self.word in (UNKNOWN, FAILED)) if self.warnings is None else self.warnings


def drifts(table: dict[str, Drift]) -> Any:
    rows = [pytest.param(drift, id=name, marks=pytest.mark.only_if(drift.only_if)) for name, drift in table.items()]
    return pytest.mark.parametrize("drift", rows)


def statements(source: str) -> list[ast.stmt]:
    return ast.parse(dedent(source)).body


def expression(source: str) -> Any:
    return ast.parse(source, mode="eval").body


def define(tree: ast.Module, source: str) -> None:
    """Put statements before the first function or class of a module."""
    first = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef | ast.ClassDef))
    tree.body[first:first] = statements(source)


def parameters(function: Any) -> list[ast.arg]:
    return [one for one in function.args.args if one.arg != "self"]


def rename_all(tree: ast.AST, names: set[str]) -> None:
    """Rename variables, parameters, functions and classes; attributes and keywords of calls stay."""
    for node in ast.walk(tree):
        for field, kind in (("id", ast.Name), ("arg", ast.arg), ("name", ast.FunctionDef), ("name", ast.ClassDef)):
            if isinstance(node, kind) and getattr(node, field) in names:
                setattr(node, field, f"renamed_{getattr(node, field)}")


def renamed(tree: ast.Module, function: Any) -> None:
    function.name = "renamed"


def required_parameter_added(tree: ast.Module, function: Any) -> None:
    function.args.args.append(expression("lambda margin: 0").args.args[0])


def optional_parameter_added(tree: ast.Module, function: Any) -> None:
    function.args.args.append(expression("lambda margin: 0").args.args[0])
    function.args.defaults.append(expression("0"))


def last_parameter_optional(tree: ast.Module, function: Any) -> None:
    function.args.defaults.append(expression("None"))


def last_parameter_removed(tree: ast.Module, function: Any) -> None:
    last = function.args.args.pop()
    function.body[:0] = statements(f"{last.arg} = {function.args.args[-1].arg}")


def keyword_only(tree: ast.Module, function: Any) -> None:
    function.args.kwonlyargs = parameters(function)
    function.args.kw_defaults = [None] * len(function.args.kwonlyargs)
    function.args.args = [one for one in function.args.args if one.arg == "self"]


def parameters_renamed(tree: ast.Module, function: Any) -> None:
    rename_all(function, {one.arg for one in parameters(function)})


def refactored(tree: ast.Module, function: Any) -> None:
    """Other names of variables, and a log line."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    rename_all(function, {node.id for node in names if isinstance(node.ctx, ast.Store)})
    function.body[:0] = statements("import logging\nlogging.getLogger(__name__).debug('%s', __name__)")


def reordered(tree: ast.Module, function: Any) -> None:
    """The first two statements in a row that do not need each other change places."""

    def mentioned(node: ast.stmt) -> set[str]:
        return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}

    def assigned(node: ast.stmt) -> set[str]:
        return {ast.unparse(target) for target in getattr(node, "targets", None) or [getattr(node, "target", node)]}

    for place, (one, other) in enumerate(pairwise(function.body)):
        if all(isinstance(node, ast.Assign | ast.AnnAssign) for node in (one, other)) and not (
            assigned(one) & mentioned(other) or assigned(other) & mentioned(one)
        ):
            function.body[place : place + 2] = [other, one]
            return


def wrapped(tree: ast.Module, function: Any) -> None:
    """Decorated with a decorator of vLLM's own."""
    define(
        tree,
        """
        import functools
        def logged(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)
            return wrapper
        """,
    )
    function.decorator_list.append(expression("logged"))


def cached(tree: ast.Module, function: Any) -> None:
    define(tree, "import functools")
    function.decorator_list.append(expression("functools.cache"))


# ---- max-concurrency ----


def body(source: str) -> Edit:
    def edit(tree: ast.Module, function: Any) -> None:
        function.body = statements(source)

    return edit


def bound_instead(source: str, import_: str = "") -> Edit:
    """The name is bound to something else, made of the function under another name."""

    def edit(tree: ast.Module, function: Any) -> None:
        function.name = "renamed"
        define(tree, import_)
        tree.body.append(*statements(f"{NAME} = {source}"))

    return edit


def last_group_for_the_first(tree: ast.Module, function: Any) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and ast.unparse(node).endswith("kv_cache_groups[0]"):
            node.slice = expression("-1")


PICKED = """
    in_group = (one.kv_cache_spec for one in kv_cache_config.kv_cache_groups)
    blocks = sum(cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) for spec in in_group)
    return kv_cache_config.num_blocks / blocks
"""
RIGHT_OTHERWISE = """
    needed = 0
    for one in kv_cache_config.kv_cache_groups:
        needed -= -one.kv_cache_spec.max_memory_usage_bytes(vllm_config) // one.kv_cache_spec.page_size_bytes
    return kv_cache_config.num_blocks / needed
"""
OVER_PAGE_OF = """
    specs = [one.kv_cache_spec for one in kv_cache_config.kv_cache_groups]
    needed = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs)
    page = {}(spec.page_size_bytes for spec in specs)
    return kv_cache_config.num_blocks / -(-needed // page)
"""
UNKNOWN_IF_WRONG = UNKNOWN if CONCURRENCY_IS_WRONG else NOT_NEEDED
CONCURRENCY_DRIFTS = {
    "renamed": Drift(renamed, UNKNOWN, named=NAME),
    "required parameter added": Drift(required_parameter_added, UNKNOWN, named="TypeError"),
    "last parameter removed": Drift(last_parameter_removed, UNKNOWN, named="TypeError"),
    "keyword-only": Drift(keyword_only, UNKNOWN, named="TypeError"),
    # The number is known, but vLLM's callers may use what our function would not take.
    "optional parameter added": Drift(optional_parameter_added, UNKNOWN_IF_WRONG, STOCK_NUMBER, NAME),
    "parameters renamed": Drift(parameters_renamed, UNKNOWN_IF_WRONG, STOCK_NUMBER, NAME),
    "parameter made optional": Drift(last_parameter_optional, UNKNOWN_IF_WRONG, STOCK_NUMBER, NAME),
    "refactored": Drift(refactored, WORDS[CONCURRENCY], STOCK_NUMBER),
    "reordered": Drift(reordered, APPLIED, only_if=CONCURRENCY_IS_WRONG),
    "known bug in other words": Drift(body(OVER_PAGE_OF.format("next")), APPLIED),
    "upstream fix picked": Drift(body(PICKED), NOT_NEEDED, T22["right"], only_if=CONCURRENCY_IS_WRONG),
    "right in other words": Drift(body(RIGHT_OTHERWISE), NOT_NEEDED, T22["right"]),
    "wrong in another way": Drift(body(OVER_PAGE_OF.format("max")), UNKNOWN, 8.0, "(10.0, 8.0, 8.0)"),
    "known bug, of the last group": Drift(
        last_group_for_the_first, UNKNOWN, 2.0, "(10.0, 2.0, 8.0)", only_if=CONCURRENCY_IS_WRONG
    ),
    "constant": Drift(body("return 3.0"), UNKNOWN, 3.0, "(3.0, 3.0, 3.0)"),
    "no number": Drift(body("return None"), UNKNOWN, named="None"),
    "raises": Drift(body("raise ZeroDivisionError('no\\ngroups')"), UNKNOWN, named="ZeroDivisionError: no groups"),
    "exits": Drift(body("raise SystemExit(3)"), UNKNOWN, named="SystemExit: 3"),
    "reads what is new": Drift(body("return kv_cache_config.num_pages / 2"), UNKNOWN, named="num_pages"),
    "no function": Drift(bound_instead("'no function'"), UNKNOWN, named="str"),
    "a partial": Drift(
        bound_instead("functools.partial(renamed)", "import functools"), UNKNOWN_IF_WRONG, STOCK_NUMBER, "partial"
    ),
    "wrapped in vLLM's source": Drift(wrapped, UNKNOWN_IF_WRONG, STOCK_NUMBER, NAME),
    "cached in vLLM's source": Drift(cached, UNKNOWN, named="_lru_cache_wrapper"),
    "moved and bound again": Drift(
        bound_instead("elsewhere", f"from {ELSEWHERE[UTILS]} import {NAME} as elsewhere"),
        UNKNOWN_IF_WRONG,
        STOCK_NUMBER,
        NAME,
    ),
}


@drifts(CONCURRENCY_DRIFTS)
def test_max_concurrency(register: Any, log: Any, drifted: Drifted, drift: Drift) -> None:
    drifted.move(UTILS)
    drifted.edit(UTILS, NAME, drift.edit)
    import_and_register(register, ORDERS[list(CONCURRENCY_DRIFTS.values()).index(drift) % 2])  # in turn
    assert words() == WORDS | {CONCURRENCY: drift.word}
    assert_warned(log, CONCURRENCY, drift)
    repaired = {NAME} if drift.word == APPLIED else set()
    assert drifted.changed() == repaired | changes_of_the_pool_size(WORDS[POOL_SIZE])
    if drift.word == APPLIED:
        assert reported(*configs_of_case(T22)) == T22["right"]
    elif drift.answer is not None:
        assert reported(*configs_of_case(T22)) == drift.answer


def assert_warned(log: Any, fix: str, drift: Drift) -> None:
    warnings = log.ours(WARNING)
    assert len(warnings) == drift.expected_warnings, warnings
    for warning in warnings:
        assert warning.startswith("vllm-kvfix") and "\n" not in warning
        assert drift.named in warning
        assert fix in warning or drift.word not in (UNKNOWN, FAILED)


# ---- offload-pool-size: the stock spec ----

STOCK_NAME = "CPUOffloadingSpec"
REGISTRY = "OffloadingSpecFactory._registry"
PLANNER = "get_kv_cache_configs"
WAYS = [ORDERS[0], "KVFIX_STOCK_SPEC=1"]  # the second: register, then import
SIZED_BY_CONFIG = "kv_cache_config" in file_of(SPEC).read_text()  # 0.14.0-0.25.1, so the formula can be another


def bytes_per_block(formula: str) -> Edit:
    """Another formula for the bytes of a block on all ranks; ``{}`` in it is the one that was there."""

    def edit(tree: ast.Module, init: Any) -> None:
        for node in ast.walk(init):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "kv_bytes_per_block":
                node.value = expression(formula.format(ast.unparse(node.value)))

    return edit


def upstream_fix(formula: str) -> Edit:
    """On 0.14.0-0.19.1: the right formula, and away with what computed the one page size."""

    def edit(tree: ast.Module, init: Any) -> None:
        bytes_per_block(formula)(tree, init)
        init.body = [node for node in init.body if not {"page_sizes", "page_size_bytes"} & names_in(node)]

    return edit


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def divided_otherwise(tree: ast.Module, init: Any) -> None:
    class Divide(ast.NodeTransformer):
        def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
            self.generic_visit(node)
            if not isinstance(node.op, ast.FloorDiv):
                return node
            return expression(f"divmod({ast.unparse(node.left)}, {ast.unparse(node.right)})[0]")

    Divide().visit(init)


def read_only_number(tree: ast.Module, init: Any) -> None:
    for node in ast.walk(init):
        if isinstance(node, ast.Attribute) and node.attr == "num_blocks" and ast.unparse(node.value) == "self":
            node.attr = "counted"
    definition(tree, STOCK_NAME).body += statements("num_blocks = property(lambda self: self.counted)")


def class_moved_and_bound_again(tree: ast.Module, init: Any) -> None:
    rename_all(tree, {STOCK_NAME})
    tree.body.append(*statements(f"from {ELSEWHERE[SPEC]} import {STOCK_NAME}"))


def class_split_in_two(tree: ast.Module, init: Any) -> None:
    rename_all(tree, {STOCK_NAME})
    tree.body.append(*statements(f"class {STOCK_NAME}(renamed_{STOCK_NAME}): pass"))


def base_called_by_name(tree: ast.Module, init: Any) -> None:
    base = ast.unparse(definition(tree, STOCK_NAME).bases[0])
    for node in ast.walk(init):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            node.func = expression(f"{base}.__init__")
            node.args.insert(0, expression("self"))


def another_base(tree: ast.Module, init: Any) -> None:
    define(tree, "class Mixin: pass")
    definition(tree, STOCK_NAME).bases.insert(0, expression("Mixin"))


RANKS = "vllm_config.parallel_config.world_size"
TENSORS = "kv_cache_config.kv_cache_tensors"
SUM_OF_TENSORS = f"sum(one.size for one in {TENSORS}) // kv_cache_config.num_blocks * {RANKS}"
SUM_OF_SHARES = f"sum(one.size // kv_cache_config.num_blocks for one in {TENSORS}) * {RANKS}"
PAGE_TIMES_TENSORS = (
    f"{RANKS} * len({TENSORS}) * max(one.kv_cache_spec.page_size_bytes for one in kv_cache_config.kv_cache_groups)"
)
LARGEST = f"{RANKS} * len({TENSORS}) * max(one.size for one in {TENSORS}) // kv_cache_config.num_blocks"
POOL_SIZE_DRIFTS = {
    "inherited": Drift(renamed, UNKNOWN, named="no attribute"),
    "required parameter added": Drift(required_parameter_added, UNKNOWN, named="another constructor"),
    "last parameter removed": Drift(last_parameter_removed, UNKNOWN),
    "keyword-only": Drift(keyword_only, UNKNOWN, named=STOCK_NAME),
    "optional parameter added": Drift(optional_parameter_added, UNKNOWN, STOCK_SIZES, "another constructor"),
    "parameters renamed": Drift(parameters_renamed, UNKNOWN, STOCK_SIZES, "another constructor"),
    "refactored": Drift(refactored, WORDS[POOL_SIZE], STOCK_SIZES),
    "reordered": Drift(reordered, WORDS[POOL_SIZE], STOCK_SIZES),
    "divided otherwise": Drift(divided_otherwise, WORDS[POOL_SIZE], STOCK_SIZES, only_if=not POOL_SIZE_IS_GIVEN),
    "another base": Drift(another_base, WORDS[POOL_SIZE], STOCK_SIZES),
    "base called by name": Drift(base_called_by_name, UNKNOWN, STOCK_SIZES),
    # From 0.22.0 the size of a row in the pool follows from the formula too, and our spec repairs the number only.
    "known bug in other words": Drift(bytes_per_block(PAGE_TIMES_TENSORS), APPLIED, (7, 3), only_if=SIZED_BY_CONFIG),
    "upstream fix picked": Drift(upstream_fix(SUM_OF_TENSORS), NOT_NEEDED, RIGHT_SIZES, only_if=POOL_SIZE_IS_WRONG),
    "right in other words": Drift(bytes_per_block(SUM_OF_SHARES), NOT_NEEDED, RIGHT_SIZES, only_if=SIZED_BY_CONFIG),
    "wrong in another way": Drift(
        bytes_per_block("2 * ({})"), UNKNOWN, (3, 1) if POOL_SIZE_IS_WRONG else (6, 6), only_if=not POOL_SIZE_IS_GIVEN
    ),
    "wrapped in vLLM's source": Drift(
        wrapped,
        WORDS[POOL_SIZE],
        STOCK_SIZES,
        "as in no release: a stock spec gets no warning",
        int(POOL_SIZE_IS_WRONG),
    ),
    "cached in vLLM's source": Drift(cached, UNKNOWN, named="TypeError", only_if=not POOL_SIZE_IS_GIVEN),
    "split in two": Drift(class_split_in_two, UNKNOWN, STOCK_SIZES),
    "moved and bound again": Drift(class_moved_and_bound_again, UNKNOWN, STOCK_SIZES, ELSEWHERE[SPEC]),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == WAYS[-1]:
        monkeypatch.setenv(*WAYS[-1].split("="))
    return str(request.param)


def changes_of_the_pool_size(word: str, way: str = "") -> set[str]:
    """What the fix may have changed: nothing where it failed."""
    changes = {f"{REGISTRY}[{FIXED}]"}
    if word == APPLIED:
        changes.add(f"{STOCK_NAME}.__init__")
    if way == WAYS[-1]:
        changes.add(f"{REGISTRY}[{STOCK_NAME}]")
    planner = {PLANNER} if hasattr(sys.modules[UTILS], PLANNER) else set()  # to 0.32.0
    if word == FAILED:
        return planner if SIMPLE_OFFLOAD_RANKS_DIFFER else set()  # that fix has the planner stamp too
    return changes | planner


@drifts(POOL_SIZE_DRIFTS)
def test_pool_size(register: Any, log: Any, drifted: Drifted, drift: Drift, way: str) -> None:
    drifted.move(SPEC)
    drifted.edit(SPEC, f"{STOCK_NAME}.__init__", drift.edit)
    import_and_register(register, way)
    assert words() == WORDS | {POOL_SIZE: drift.word}
    assert_warned(log, POOL_SIZE, drift)
    expected = changes_of_the_pool_size(drift.word, way)
    if drift.edit is wrapped:
        expected.discard(f"{STOCK_NAME}.__init__")
    assert drifted.changed() - {NAME} == expected
    fixed_by_name, known = way == WAYS[-1], drift.word != UNKNOWN
    if drift.answer is not None:
        assert pool_sizes({}) == (RIGHT_SIZES if fixed_by_name and known else drift.answer)
    try:
        sizes = pool_sizes({"spec_name": FIXED})
    except Exception as refusal:
        assert not known
        if drift.answer is not None:  # vLLM's own class can be made, so it is for ours to refuse
            assert isinstance(refusal, RuntimeError) and "ake spec_name back" in str(refusal)
    else:
        assert sizes == RIGHT_SIZES


# ---- offload-pool-size: the factory ----


class _Registry(ast.NodeTransformer):
    """Edits how ``OffloadingSpecFactory`` keeps what it registers."""

    def __init__(self, empty: str = "", entry: str = "", store: str = "", all_: str = "", load: str = "") -> None:
        self.empty, self.entry, self.store, self.all, self.load = empty, entry, store, all_, load

    def __call__(self, tree: ast.Module, factory: Any) -> None:
        self.visit(factory)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if self.empty:
            node.value = expression(self.empty)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if not ast.unparse(node.targets[0]).startswith("cls._registry["):
            return self.generic_visit(node)
        if self.entry:
            node.value = expression(self.entry)
        return statements(self.store)[0] if self.store else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        self.generic_visit(node)
        return expression(self.load.format(called)) if self.load and called.startswith("cls._registry[") else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return expression(self.all) if self.all and ast.unparse(node) == "cls._registry" else node


def rename_attribute(name: str) -> Edit:
    def edit(tree: ast.Module, factory: Any) -> None:
        rename_all(factory, {name})
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == name:
                node.attr = f"renamed_{name}"

    return edit


def factory_renamed(tree: ast.Module, factory: Any) -> None:
    """Other modules can still import the old name."""
    rename_all(tree, {"OffloadingSpecFactory"})
    tree.body.append(*statements("OffloadingSpecFactory = None"))


def registrations(tree: ast.Module) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "register_spec" in ast.unparse(node.func)]


def register_spec_asks_for_more(tree: ast.Module, factory: Any) -> None:
    required_parameter_added(tree, definition(factory, "register_spec"))
    for call in registrations(tree):
        call.args.append(expression("'more'"))


def stock_name_renamed(tree: ast.Module, factory: Any) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and STOCK_NAME in ast.unparse(node):
            at = next(i for i, argument in enumerate(node.args) if ast.unparse(argument) == repr(STOCK_NAME))
            node.args[at] = expression("'TheCPUOffloadingSpec'")


def stock_spec_elsewhere(tree: ast.Module, factory: Any) -> None:
    for call in registrations(tree):
        if call.args[0].value == STOCK_NAME:
            call.args[1] = expression(repr(ELSEWHERE[SPEC]))


USER_DICT = _Registry(empty="__import__('collections').UserDict()")
PARTIALS = _Registry(
    entry="__import__('functools').partial(lambda *at: getattr(importlib.import_module(at[0]), at[1]), module_path, "
    "class_name)"
)
PLACES = _Registry(entry="(module_path, class_name)", load="getattr(importlib.import_module({0}[0]), {0}[1])")
LIST = _Registry(empty="[]", store="cls._registry.append((name, loader))", all_="dict(cls._registry)")
FACTORY_DRIFTS = {
    "a mapping": Drift(USER_DICT, WORDS[POOL_SIZE], STOCK_SIZES),
    "partials": Drift(PARTIALS, WORDS[POOL_SIZE], STOCK_SIZES),
    "places": Drift(PLACES, FAILED, STOCK_SIZES),
    "a list": Drift(LIST, FAILED, STOCK_SIZES, "list"),
    "registry renamed": Drift(rename_attribute("_registry"), FAILED, STOCK_SIZES, "_registry"),
    "factory renamed": Drift(factory_renamed, FAILED, named="_registry"),
    "register_spec renamed": Drift(rename_attribute("register_spec"), FAILED, STOCK_SIZES, "register_spec"),
    "register_spec asks for more": Drift(register_spec_asks_for_more, FAILED, STOCK_SIZES, "margin"),
    "stock name renamed": Drift(stock_name_renamed, FAILED, STOCK_SIZES, STOCK_NAME),
    "stock spec elsewhere": Drift(stock_spec_elsewhere, UNKNOWN, STOCK_SIZES, ELSEWHERE[SPEC]),
}


@drifts(FACTORY_DRIFTS)
def test_factory(register: Any, log: Any, drifted: Drifted, drift: Drift, way: str) -> None:
    drifted.move(SPEC)
    drifted.edit(FACTORY, "OffloadingSpecFactory", drift.edit)
    import_and_register(register, way)
    assert words() == WORDS | {POOL_SIZE: drift.word}
    expected = changes_of_the_pool_size(drift.word, way)
    fixed_by_name = way == WAYS[-1] and drift.word not in (UNKNOWN, FAILED)
    if fixed_by_name and drift.edit is PARTIALS:
        drift = replace(drift, named="KVFIX_STOCK_SPEC does nothing", warnings=1)
        expected.discard(f"{REGISTRY}[{STOCK_NAME}]")
        fixed_by_name = False
    assert_warned(log, POOL_SIZE, drift)
    assert drifted.changed() - {NAME} == expected
    if drift.answer is not None:
        assert pool_sizes({}) == (RIGHT_SIZES if fixed_by_name else drift.answer)


# ---- modules that are not there, or cannot be imported ----


@in_both_orders
@pytest.mark.parametrize("module", [UTILS, FACTORY, SPEC])
def test_a_module_that_is_gone_is_waited_for(
    register: Any, log: Any, drifted: Drifted, module: str, order: str
) -> None:
    drifted.files[module] = None
    others = [name for name in (UTILS, FACTORY, SPEC) if name != module]
    if order == ORDERS[1]:
        register()
    for name in others:
        with contextlib.suppress(ModuleNotFoundError):  # it may need the one that is gone
            importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError, match=module):
        importlib.import_module(module)
    register()
    assert words()[CONCURRENCY if module == UTILS else POOL_SIZE] == WAITING
    if module != UTILS:
        assert words()[CONCURRENCY] == WORDS[CONCURRENCY]
    assert log.ours(WARNING) == []
    if module == SPEC:
        with pytest.raises(ImportError, match=STOCK_NAME):
            pool_sizes({"spec_name": FIXED})


def test_a_module_without_the_stock_spec_is_waited_for(register: Any, log: Any, drifted: Drifted, way: str) -> None:
    drifted.edit(SPEC, STOCK_NAME, lambda tree, spec: rename_all(tree, {STOCK_NAME}))
    import_and_register(register, way)
    assert words() == WORDS | {POOL_SIZE: WAITING}
    assert log.ours(WARNING) == []
    assert drifted.changed() - {NAME} == changes_of_the_pool_size(WAITING, way)
    with pytest.raises(ImportError, match=STOCK_NAME):
        pool_sizes({"spec_name": FIXED})
    with pytest.raises(AttributeError, match=STOCK_NAME):
        pool_sizes({})


BROKEN = {
    "a syntax error": ("def (", SyntaxError),
    "an error": ("raise OSError('no such device')", OSError),
    "a missing module": ("import missing_dependency", ModuleNotFoundError),
}


@in_both_orders
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("module", [UTILS, FACTORY, SPEC])
def test_an_import_that_fails_fails_as_without_us(
    register: Any, log: Any, drifted: Drifted, module: str, broken: str, order: str
) -> None:
    """And when the next import of the module succeeds, the fix is settled."""
    source = file_of(module).read_text()
    line, error = BROKEN[broken]
    drifted.write(module, f"{source}\n{line}\n")
    if order == ORDERS[1]:
        register()
    with pytest.raises(error) as raised:
        importlib.import_module(module)
    assert type(raised.value) is error and raised.value.__cause__ is None and raised.value.__context__ is None
    where = raised.value.filename if error is SyntaxError else traceback.extract_tb(raised.value.__traceback__)[-1][0]
    assert where == str(drifted.files[module])
    assert module not in sys.modules
    register()
    assert words()[CONCURRENCY if module == UTILS else POOL_SIZE] == WAITING
    assert log.ours(WARNING) == []
    drifted.files[module] = file_of(module)
    import_all()
    assert words() == WORDS
    assert log.ours(WARNING) == []
