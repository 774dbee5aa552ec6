"""Fingerprints tell changed code from changed comments, on every Python alike."""

from __future__ import annotations

import textwrap

import pytest

from vllm_kvfix import fingerprint

CODE = '''
class Spec(Base):
    """Docstring."""

    def __init__(self, config, *more, size: int = 4, **named) -> None:
        """Docstring."""
        self.size = config.pages[0].size * len(config.tensors)  # bytes
        self.name = f"{size!r:>{config.width}} of {more}" "."
        async def inner(): return [x async for x in named if x is not ... and -1.5 < x <= 0x10]
'''


def of(source, name="Spec.__init__"):
    return fingerprint.of(textwrap.dedent(source), name)


def test_it_is_the_same_on_every_python():
    """Each Python has empty fields of its own in a syntax tree; the table must hold on all of them."""
    assert of(CODE) == "91b1e6df6bf4bcbc"
    assert of(CODE, "Spec") == "1ffa2d97eb2dec94"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Docstring."""', '"""Another,\n    longer."""'),
        ('        """Docstring."""\n', ""),
        ("  # bytes", ""),
        ("config, *more, size: int = 4", "config,\n            *more,\n            size: int = 4"),
        ('" "."', '."'),
        ("0x10", "16"),
    ],
)
def test_layout_comments_and_docstrings_are_no_change(old, new):
    assert old in CODE
    assert of(CODE.replace(old, new)) == of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pages[0]", "pages[1]"),
        (".size * len", ".size + len"),
        ("= 4", "= 5"),
        (", size: int", ", size: float"),
        ("<= 0x10", "< 0x10"),
        ("async for", "for"),
        ("!r", "!s"),
        ("self.name", "self.names"),
    ],
)
def test_every_change_of_the_code_is_a_change(old, new):
    assert old in CODE
    assert of(CODE.replace(old, new)) != of(CODE)


def test_only_the_code_of_that_name_counts():
    other = CODE + "\n\ndef elsewhere():\n    pass\n"
    assert of(other) == of(CODE)
    assert of(other, "elsewhere") not in (None, of(CODE))
    assert of(CODE.replace("Base", "Other")) == of(CODE)
    assert of(CODE.replace("Base", "Other"), "Spec") != of(CODE, "Spec")


@pytest.mark.parametrize("name", ["missing", "Spec.missing", "Spec.__init__.missing", "Spec.size"])
def test_what_is_not_defined_has_none(name):
    assert of(CODE, name) is None


def test_what_is_defined_twice_is_what_it_is_in_the_end():
    assert of("def a(): return 1\ndef a(): return 2", "a") == of("def a(): return 2", "a")


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    for module, source in {"__init__": "raise ImportError", "v1/one": "def a(): pass", "v1/two/__init__": CODE}.items():
        path = tmp_path / f"vllm/{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


def test_installed_code_is_read_and_not_imported(vllm):
    stock_code = {"a": ("vllm.v1.none", "vllm.v1.one"), "Spec.__init__": ("vllm.v1.two",), "gone": ("vllm.v1.one",)}
    assert fingerprint.of_installed(stock_code) == {
        "vllm.v1.one:a": of("def a(): pass", "a"),
        "vllm.v1.two:Spec.__init__": of(CODE),
    }


def test_without_vllm_there_is_nothing():
    assert fingerprint.of_installed({"a": ("vllm.v1.one",)}) == {}
