"""What the support table says of this release. The driver, tools/contract.py, compares and writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vllm
from test_register import WORDS, import_targets


def exists(module: str) -> bool:
    """Whether the installed vLLM has a module, of which nothing is imported."""
    path = Path(vllm.__file__).parent.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").exists() or path.joinpath("__init__.py").exists()


STATUS = {"affected": "applied", "right": "not needed", "absent": "not applicable"}


def test_what_the_support_table_says_of_this_release(register: Any, record_property: Any) -> None:
    from vllm_kvfix import fingerprint, plugin

    import_targets()
    stock = {fix.ID: fix.stock().word for fix in plugin.FIXES}
    register()
    status = {fix: status.word for fix, status in plugin.statuses().items()}
    assert {fix: STATUS[word] for fix, word in stock.items()} == status == WORDS
    assert {fix.ID: fix.stock().word for fix in plugin.FIXES} == stock, "a repair is not taken for vLLM's code"
    fingerprints = {fix.ID: fingerprint.of_installed(fix.STOCK_CODE) for fix in plugin.FIXES}
    for fix in plugin.FIXES:
        there = {name for name, modules in fix.STOCK_CODE.items() if any(map(exists, modules))}
        assert {name.partition(":")[2] for name in fingerprints[fix.ID]} == there
    rows = {fix: {"stock": stock[fix], "status": status[fix], "fingerprints": fingerprints[fix]} for fix in stock}
    record_property("support", json.dumps(rows))
