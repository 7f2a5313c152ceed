"""Headers of safetensors files: ours are read by the original, and a false one is believed by nobody."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError, deserialize

from slipstream.errors import CheckpointError
from slipstream.files.safetensors_layout import ITEM_SIZE, SafetensorsLayout, plan_layout, read_layout

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
OF_ALL_VERSIONS = sorted(set(ITEM_SIZE) - {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "C64"})


def reading(file: bytes) -> SafetensorsLayout:
    return read_layout(lambda offset, count: file[offset : offset + count], len(file), "model.safetensors")


def a_file(content: Any, data: int = 0) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.tuples(st.sampled_from(OF_ALL_VERSIONS), SHAPES), max_size=6),
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), st.text(st.characters(codec="utf-8"), max_size=5), max_size=2),
)
def test_planned_file_is_readable(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """A planned file is read as planned and by the original."""
    items = [(name, dtype, shape) for name, (dtype, shape) in tensors.items() if name != "__metadata__"]
    header, layout = plan_layout(items, metadata)
    file = header + bytes(layout.size - len(header))
    assert len(header) % 8 == 0
    assert list(layout.entries) == [name for name, _, _ in items]
    found = reading(file)
    assert found.entries == layout.entries
    assert (found.metadata, found.data_start, found.size) == (metadata, layout.data_start, layout.size)
    theirs = {name: (entry["dtype"], tuple(entry["shape"]), len(entry["data"])) for name, entry in deserialize(file)}
    assert theirs == {name: (dtype, shape, math.prod(shape) * ITEM_SIZE[dtype]) for name, dtype, shape in items}


@pytest.mark.parametrize(("rows", "alignment"), [(254, 64), (255, 4096), (100_000, 4096)])
def test_data_of_large_files_begins_at_a_page(rows: int, alignment: int) -> None:
    """From 1 MiB on; smaller files do not grow by a part of a page."""
    header, layout = plan_layout([("weight", "F32", (rows, 1024)), ("bias", "F32", (1024,))])
    assert layout.data_start == len(header) == alignment * -(-130 // alignment)
    assert reading(header + bytes(layout.size - len(header))).entries == layout.entries


BAD = {
    "shorter than a length": (b"1234567", "a header alone takes 8"),
    "a header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "1,000 bytes, in a file of 10"),
    "a header of 2**64 - 1 bytes": (b"\xff" * 8 + b"{}", "18,446,744,073,709,551,615 bytes"),
    "no JSON": (a_file(b"hello"), "The header of model.safetensors is not JSON"),
    "a list": (a_file([]), "not a mapping"),
    "two tensors of one name": (a_file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'), "occurs twice"),
    "an unknown type": (a_file({"a": tensor("F99")}, 8), "type 'F99'"),
    "a type that is no text": (a_file({"a": tensor(["F32"])}, 8), "not supported"),  # type: ignore[arg-type]
    "a field more": (a_file({"a": {**tensor(), "x": 1}}, 8), "not described by"),
    "a field less": (a_file({"a": {"dtype": "F32"}}, 8), "not described by"),
    "no description": (a_file({"a": 3}, 8), "not described by"),
    "a negative size": (a_file({"a": tensor(shape=[-2])}, 8), "shape"),
    "a size that is a truth value": (a_file({"a": tensor(shape=[2, True])}, 8), "shape"),
    "a size with a point": (a_file({"a": tensor(shape=[2.0])}, 8), "shape"),
    "sizes whose product wraps round": (a_file({"a": tensor(shape=[2**62, 2**62, 0x10], offsets=[0, 0])}), "which is not what the shape"),
    "a size beyond 64 bits": (a_file({"a": tensor(shape=[2**64], offsets=[0, 0])}), "shape"),
    "100 dimensions": (a_file({"a": tensor(shape=[1] * 100, offsets=[0, 4])}, 4), "shape"),
    "offsets in the wrong order": (a_file({"a": tensor(offsets=[8, 0])}, 8), "offsets"),
    "three offsets": (a_file({"a": tensor(offsets=[0, 4, 8])}, 8), "offsets"),
    "a negative offset": (a_file({"a": tensor(offsets=[-8, 0])}, 8), "offsets"),
    "too few bytes for the shape": (a_file({"a": tensor(offsets=[0, 4])}, 4), "has 4 bytes"),
    "an overlap": (a_file({"a": tensor(), "b": tensor(offsets=[4, 12])}, 12), "'b' overlaps"),
    "two on the same bytes": (a_file({"a": tensor(), "b": tensor()}, 8), "overlaps"),
    "a hole": (a_file({"a": tensor(), "b": tensor(offsets=[12, 20])}, 20), "'b' leaves a hole"),
    "a hole at the start": (a_file({"a": tensor(offsets=[8, 16])}, 16), "leaves a hole"),
    "bytes that belong to nobody": (a_file({"a": tensor()}, 9), "end after 8 bytes of data, and the file has 9"),
    "tensors beyond the file": (a_file({"a": tensor()}, 7), "end after 8 bytes of data, and the file has 7"),
    "metadata that is no text": (a_file({"__metadata__": {"step": 3}}), "not a mapping of texts"),
    "metadata that is a list": (a_file({"__metadata__": ["pt"]}), "not a mapping of texts"),
    "deep nesting": (a_file(b'{"a":' * 50 + b"1" + b"}" * 50), "nested deeper"),
}


@pytest.mark.parametrize(("file", "why"), BAD.values(), ids=BAD.keys())
def test_false_header_refused(file: bytes, why: str) -> None:
    """A false header is refused."""
    with pytest.raises(CheckpointError) as caught:
        reading(file)
    assert "model.safetensors" in str(caught.value)
    assert why in str(caught.value)


def test_empty_tensors_lie_between_others() -> None:
    """Empty tensors lie between the others."""
    file = a_file({"b": tensor(shape=[0], offsets=[8, 8]), "a": tensor(), "c": tensor(shape=[1], offsets=[8, 12])}, 12)
    assert [(entry.name, entry.start, entry.end) for entry in reading(file).entries.values()] == [("a", 0, 8), ("b", 8, 8), ("c", 8, 12)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_header_refused_or_describes_file(data: st.DataObject) -> None:
    """A changed header is refused or describes the file."""
    header, layout = plan_layout([("a", "F32", (2, 2)), ("b", "I64", ()), ("c", "BOOL", (3,))], {"format": "pt"})
    file = bytearray(header + bytes(layout.size - len(header)))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = reading(bytes(file))
    except CheckpointError:
        return
    deserialize(bytes(file))  # what we accept, the original accepts too
    assert sum(entry.end - entry.start for entry in found.entries.values()) == found.size - found.data_start


@pytest.mark.parametrize("items", [[("a", "F32", (1,)), ("a", "F32", (1,))], [("__metadata__", "F32", (1,))], [("a", "F99", (1,))]])
def test_what_format_cannot_hold_not_planned(items: Any) -> None:
    """What the format cannot hold is not planned."""
    with pytest.raises(CheckpointError):
        plan_layout(items)


def test_order_rules_of_the_original() -> None:
    """The original refuses what we refuse for order."""
    for name in ("an overlap", "a hole", "bytes that belong to nobody"):
        with pytest.raises(SafetensorError):
            deserialize(BAD[name][0])
