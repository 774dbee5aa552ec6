"""What is expected of each vLLM release. The only place where the tests look at the version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vllm

VERSION: tuple[int, ...] = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:3])


def _between(first: tuple[int, ...], last: tuple[int, ...]) -> bool:
    return first <= VERSION <= last


# https://github.com/vllm-project/vllm/pull/39617
POOL_SIZE_IS_GIVEN = _between((0, 11, 0), (0, 13, 0))
POOL_SIZE_IS_WRONG = _between((0, 14, 0), (0, 19, 1))
SEVERAL_UNIFORM_GROUPS = VERSION >= (0, 20, 0)  # the planner lays out several UniformTypeKVCacheSpecs groups
ATTENTION_FREE_IS_REFUSED = VERSION >= (0, 30, 0)  # by vLLM, before there is a spec
SINGLE_COPY_OF_MLA = VERSION >= (0, 27, 0)
ROCM_HAS_NO_SHARED_REGION = VERSION >= (0, 31, 0)
ROW_ALIGNMENT = 4096 if VERSION >= (0, 27, 0) else 1
MANAGER_ASSERTS_ONE_GROUP = _between((0, 18, 0), (0, 19, 1))
COPIES_BY_HANDLERS = VERSION < (0, 25, 0)  # one a direction; then by workers, of which OffloadingWorker has one
SHARED_REGION = VERSION >= (0, 27, 0)
# https://github.com/vllm-project/vllm/pull/52596
SHARED_REGION_KEEPS_ITS_NAME = _between((0, 27, 0), (0, 28, 0))
SHARED_REGION_TRIES_ITS_FIRST_PAGE = VERSION >= (0, 28, 0)
SHARED_REGION_IS_SEVERAL_FILES = VERSION >= (0, 33, 0)  # and each rank pins its own slots only
# https://github.com/vllm-project/vllm/pull/52921
SIMPLE_OFFLOAD_IS_ABSENT = VERSION < (0, 19, 0)
SIMPLE_OFFLOAD_RANKS_DIFFER = _between((0, 19, 0), (0, 32, 0))
SIMPLE_OFFLOAD_HAS_DISK = VERSION >= (0, 28, 0)
# The worker cannot tell layers of different pages apart, unless they are packed.
SIMPLE_OFFLOAD_ONE_PAGE_SIZE = _between((0, 29, 0), (0, 29, 0))
# https://github.com/vllm-project/vllm/pull/48317
CONCURRENCY_IS_WRONG = _between((0, 11, 0), (0, 26, 0))

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("cases.json").read_text())
