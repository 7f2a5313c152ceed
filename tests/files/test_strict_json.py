"""JSON that means one thing only."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import CheckpointError
from slipstream.files.strict_json import dump, dump_lines, explain_too_large, parse

BAD = {
    b"": "Expecting value",
    b"{": "Expecting",
    b"[1,]": "is not JSON",
    b"{} {}": "Extra data",
    b"'a'": "Expecting value",
    b'{"a": 1, "b": {"c": 1, "c": 2}}': "the key 'c' occurs twice",
    b"[NaN]": "NaN is not a number",
    b"-Infinity": "-Infinity is not a number",
    b"1e999": "too large",
    b"-1e999": "too large",
    b"1" * 5000: "5,000 digits",
    b"0." + b"1" * 5000: "5,002 digits",
    b'"\xff"': "is not UTF-8",
    b'\xef\xbb\xbf"BOM"': "BOM",
    '{"a": "ä"}'.encode("utf-16"): "is not UTF-8",
    rb'"\ud800"': "half of a surrogate pair",
    rb'{"\udfff": 1}': "half of a surrogate pair",
    rb'[[["\uDC00x"]]]': "half of a surrogate pair",
    b"[" * 101 + b"]" * 101: "nested deeper than 100 levels",
    b"[" * 200_000: "is not JSON that can be trusted",
    b'{"a":' * 5000 + b"1" + b"}" * 5000: "nested deeper than 100 levels",
    b'"a\nb"': "control character",
}


@pytest.mark.parametrize(("text", "why"), BAD.items(), ids=lambda value: ascii(value)[:40])
def test_ambiguous_json_refused(text: bytes, why: str) -> None:
    """What could be read in two ways is refused."""
    with pytest.raises(CheckpointError) as caught:
        parse(text, "run/MANIFEST.json")
    assert str(caught.value).startswith("run/MANIFEST.json is not JSON")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300


def test_depth_and_size_limits() -> None:
    """Depth and size have limits of the callers choice."""
    assert parse(b"[[[1]]]", "x", deepest=3) == [[[1]]]
    with pytest.raises(CheckpointError, match="deeper than 2 levels"):
        parse(b"[[[1]]]", "x", deepest=2)
    with pytest.raises(CheckpointError, match="7 bytes, more than 6"):
        parse(b"[[[1]]]", "x", largest=6)


def test_width_not_depth() -> None:
    """Width is not depth."""
    assert len(parse(b"[" + b"[]," * 500 + b"[]]", "x", deepest=2)) == 501


def test_text_of_brackets_cannot_fill_memory() -> None:
    """A text of brackets cannot fill the memory."""
    bomb = b"[" + b"[]," * 9_000_000 + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="of memory, more than 355,720,"):
            parse(bomb, "x")
        assert tracemalloc.get_traced_memory()[1] < len(bomb) * 2
    finally:
        tracemalloc.stop()


def test_long_text_in_any_script() -> None:
    """A long text in any script is read again."""
    value = {"words": ["風の流れ 😀"] * 200_000}
    data = dump(value)
    assert data.isascii()
    assert parse(data, "x") == value
    assert explain_too_large(data.decode()) is None
    with pytest.raises(CheckpointError, match="surrogates"):
        dump({"words": ["風の流れ"] * 200_000 + ["\ud800"]})


def test_memory_limit_of_values() -> None:
    """Values that say something have room and those that fill the memory have not."""
    assert explain_too_large(json.dumps({f"sample {number}": number / 7 for number in range(400_000)})) is None
    assert explain_too_large("[" + "[]," * 1_000_000 + "[]]") is not None
    assert explain_too_large("[" + "[]," * 1_000_000 + "[]]", beside=300 << 20) is None


def test_whole_surrogate_pairs_characters() -> None:
    """Whole surrogate pairs are characters."""
    assert parse(rb'"\ud83d\ude00"', "x") == "😀"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_written_json_is_read(value: object) -> None:
    """What is written is read again and by others too."""
    text = dump(value)
    assert repr(parse(text, "x")) == repr(value) == repr(json.loads(text))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES, min_size=1, max_size=4))
def test_json_in_lines_is_read(value: dict[str, Any]) -> None:
    """What is written in lines is read again and by others too; a line is an entry, or a bracket around some."""
    text = dump_lines(value)
    assert repr(parse(text, "x")) == repr(value) == repr(json.loads(text))
    inner = [len(entry) + 1 for entry in value.values() if isinstance(entry, dict) and entry]
    assert len(text.split(b"\n")) == len(value) + 2 + sum(inner)


def test_numbers_as_keys_in_lines() -> None:
    """Numbers become texts, as JSON has it."""
    assert json.loads(dump_lines({"ranks": {0: "a", 1: "b"}})) == {"ranks": {"0": "a", "1": "b"}}


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": b"bytes"}, object(), "\ud800"])
def test_what_json_cannot_hold_not_written(value: object) -> None:
    """What JSON cannot hold is not written."""
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        dump(value)
