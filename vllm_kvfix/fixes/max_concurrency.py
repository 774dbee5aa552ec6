"""``max-concurrency``: the number of requests of full length that the KV cache holds.

Symptom: "Maximum concurrency for N tokens per request: 8.00x" where 5.00x fit (or 2.00x where 5.00x
fit), from 0.20.1 the same factor in "GPU KV cache size: N tokens", from 0.24.0 also in the labels of
``vllm:cache_config_info``; and the scheduler's number differs from the worker's.
Cause: ``get_max_concurrency_for_kv_cache_config`` divides the bytes of all KV cache groups by the
page size of group 0. Groups of several page sizes exist from 0.20.0.
Upstream: https://github.com/vllm-project/vllm/pull/48317
Affected: 0.11.0-0.26.0 by its code, visibly from 0.20.0.
Recognised: by its answers for one group, and for two groups of pages 8:2 in either order.
Change: the function is replaced in its module; every caller looks it up there.
Goes when: nobody runs 0.26.0 or older any more.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm_kvfix import _imports, _releases, concurrency
from vllm_kvfix._fix import (
    AFFECTED,
    APPLIED,
    RIGHT,
    UNKNOWN,
    WAITING,
    Status,
    in_place_of,
    is_ours,
    one_line,
    original_of,
    unrepaired,
)

ID = "max-concurrency"
TITLE = "reported capacity: the number of requests that the KV cache holds"
UPSTREAM = "https://github.com/vllm-project/vllm/pull/48317"
TARGETS: tuple[str, ...] = (_releases.KV_CACHE_UTILS,)
CONNECTOR = ""

_NAME = "get_max_concurrency_for_kv_cache_config"
_PARAMETERS = ("vllm_config", "kv_cache_config")
STOCK_CODE: dict[str, tuple[str, ...]] = {_NAME: (_releases.KV_CACHE_UTILS,)}

# The answers to the three questions of _answers().
_RIGHT = (10.0, 5.0, 5.0)
_KNOWN_BUG = (10.0, 8.0, 2.0)


def settle() -> Status:
    module = _imports.imported(_releases.KV_CACHE_UTILS)
    if module is None:
        return Status(WAITING, f"until vLLM imports {_releases.KV_CACHE_UTILS}")
    function = getattr(module, _NAME, None)
    if is_ours(function):
        return Status(APPLIED, "")
    verdict = recognise(function, module)
    if verdict.word != AFFECTED:
        return unrepaired(verdict)
    setattr(module, _NAME, _fixed(function))
    return Status(APPLIED, "")


def stock() -> Status:
    module = _imports.imported(_releases.KV_CACHE_UTILS)
    if module is None:
        return Status(WAITING, f"until vLLM imports {_releases.KV_CACHE_UTILS}")
    function = getattr(module, _NAME, None)
    return recognise(original_of(function) or function, module)


def recognise(function: Any, module: ModuleType) -> Status:
    """Whether what ``module`` has for the function answers as the known bug, rightly, or neither."""
    if function is None:
        return Status(UNKNOWN, f"{module.__name__} has no {_NAME}")
    answers = _answers(function)
    if not _releases.is_vllms_own(function, module):
        name = f"{_NAME} is {_releases.name_of(function)}, as in no release"
        return Status(RIGHT, f"{name}, and right") if answers == _RIGHT else Status(UNKNOWN, name)
    if answers == _RIGHT:
        return Status(RIGHT, "right since 0.27.0, vLLM #48317")
    if answers != _KNOWN_BUG:
        return Status(UNKNOWN, f"{_NAME} answers {answers}, not {_KNOWN_BUG} or {_RIGHT}")
    parameters = inspect.signature(function).parameters.values()
    names = tuple(one.name for one in parameters)
    plain = all(one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty for one in parameters)
    if names != _PARAMETERS or not plain:  # vLLM's callers may use what ours does not take
        return Status(UNKNOWN, f"{_NAME} takes ({', '.join(map(str, parameters))})")
    return Status(AFFECTED, "")


def holds() -> bool:
    function = getattr(sys.modules.get(_releases.KV_CACHE_UTILS), _NAME, None)
    return is_ours(function) and _answers(function) == _RIGHT


def restore() -> None:
    module = sys.modules.get(_releases.KV_CACHE_UTILS)
    stock = original_of(getattr(module, _NAME, None))
    if stock is not None:
        setattr(module, _NAME, stock)


def _fixed(stock: Any) -> Any:
    @in_place_of(stock)
    def get_max_concurrency_for_kv_cache_config(vllm_config: Any, kv_cache_config: Any) -> float:
        groups = [
            (spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
            for spec in (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        ]
        return concurrency.max_concurrency(kv_cache_config.num_blocks, concurrency.blocks_per_request(groups))

    return get_max_concurrency_for_kv_cache_config


def _answers(function: Any) -> Any:
    """What ``function`` says of three small configs, or the error it raises, as text.

    Asked: one group; two groups, each of 1,000 blocks a request, with pages of 8 and 2 bytes in a
    pool of 10,000 blocks (5 requests fit); the same two the other way round.
    """
    eight, two = _group(page=8, blocks=1000, layers=8), _group(page=2, blocks=1000, layers=2)
    questions = (
        (100, [_group(page=4, blocks=10, layers=3)]),
        (10_000, [eight, two]),
        (10_000, [two, eight]),
    )
    try:
        return tuple(
            function(
                SimpleNamespace(),
                SimpleNamespace(
                    num_blocks=num_blocks,
                    kv_cache_groups=groups,
                    hisparse_host_num_blocks=None,  # read from 0.30.0
                ),
            )
            for num_blocks, groups in questions
        )
    except (Exception, SystemExit) as error:
        return one_line(error)


def _group(page: int, blocks: int, layers: int) -> SimpleNamespace:
    spec = SimpleNamespace(page_size_bytes=page, max_memory_usage_bytes=lambda vllm_config: page * blocks)
    names = [f"layer.{i}" for i in range(layers)]
    return SimpleNamespace(layer_names=names, kv_cache_spec=spec, host_resident=False)
