"""Plain data comes back as it went, without pickle; foreign classes come back too, but only where they are allowed."""

from __future__ import annotations

import pickle  # noqa: TID251 - to see that it is not used
import tracemalloc
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.distributed import codec

atoms = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
)
hashables = st.recursive(atoms, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
plain = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=25,
)


def same(left: object, right: object) -> bool:
    """Equality that also looks at types, as 1 == True and (1,) != [1] do not tell enough."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        assert isinstance(right, (list, tuple))
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return left == right


@given(plain)
def test_plain_data_round_trip(value: object) -> None:
    """Plain data comes back with its types."""
    assert same(codec.decode(codec.encode(value, plain_only=True)), value)


@given(plain)
def test_transient_data_round_trip(value: object) -> None:
    """So does what another process reads at once; what is not builtin takes the usual way."""
    assert same(codec.decode(codec.encode(value, transient=True), transient=True), value)


@pytest.mark.parametrize("value", [bytearray(b"x"), numpy.float64(1.5), numpy.arange(3), [numpy.int64(2)], {"a": numpy.str_("b")}, {2}])
def test_transient_data_keeps_types(value: Any) -> None:
    """Values that the interpreter's own format would write as bare bytes keep their types."""
    data = codec.encode([value], transient=True)
    (back,) = codec.decode(data, transient=True)
    assert data[:1] == b"T"
    assert type(back) is type(value)
    assert str(back) == str(value)


def test_transient_data_is_not_shared() -> None:
    """An object that occurs twice arrives as two, and what is kept is never read in the interpreter's own format."""
    record = {"a": [1]}
    data = codec.encode([record, record], transient=True)
    first, second = codec.decode(data, transient=True)
    assert first == second == record
    assert first is not second
    assert first["a"] is not second["a"]
    with pytest.raises(ValueError, match="not written by this codec"):
        codec.decode(data)


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False)), max_size=5))
def test_records_encode_as_json(value: object) -> None:
    """Records of text and numbers take the short way."""
    data = codec.encode(value)
    assert data[:1] in (b"J", b"T")
    assert codec.decode(data) == value


def test_invalid_unicode_round_trip() -> None:
    """Text that is not valid unicode survives."""
    assert codec.decode(codec.encode("a\ud800b")) == "a\ud800b"


def test_not_a_number_survives() -> None:
    back = codec.decode(codec.encode([float("nan"), float("-inf")]))
    assert back[0] != back[0]
    assert back[1] == float("-inf")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 3)])
def test_tensors_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Tensors come back in type shape and bits."""
    tensor = torch.ones(shape).to(dtype)
    back = codec.decode(codec.encode({"x": tensor}, plain_only=True))["x"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6).reshape(2, 3),
        numpy.float32(2.5),
        numpy.array(["a", "bc"]),
        numpy.array([], dtype="int8"),
        numpy.datetime64("2026-01-02"),
    ],
)
def test_arrays_and_scalars_round_trip(array: numpy.ndarray) -> None:
    """Arrays and their scalars come back."""
    back = codec.decode(codec.encode([array], plain_only=True))[0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert numpy.array_equal(back, array)


def test_decoded_values_own_their_memory() -> None:
    """What comes back shares no memory and can be written."""
    array = numpy.zeros(3)
    back = codec.decode(codec.encode(array))
    back[0] = 1
    assert array[0] == 0


@dataclass
class Foreign:
    name: str


def test_foreign_objects_round_trip() -> None:
    """Objects of foreign classes come back among plain data."""
    value = {"plain": [1, 2], "foreign": Foreign("a"), "ordered": OrderedDict(a=1)}
    assert codec.decode(codec.encode(value)) == value


def test_cyclic_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that refer to each other are an error at once, and do not fill the memory before it."""
    monkeypatch.setattr(codec, "_DEEPEST", 12)  # enough to take 6 MB where each level holds more than the one before
    root: dict[str, Any] = {"children": []}
    root["children"] += [{"parent": root} for _ in range(30)]
    tracemalloc.start()
    try:
        for transient in (False, True):
            with pytest.raises(RecursionError):
                codec.encode(root, transient=transient)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_plain_only_refuses_foreign_classes() -> None:
    """Plain only refuses foreign classes by name."""
    with pytest.raises(TypeError, match="Foreign is not plain data"):
        codec.encode([Foreign("a")], plain_only=True)


@given(plain)
def test_decoding_plain_data_never_unpickles(value: object) -> None:
    data = codec.encode(value, plain_only=True)
    original, pickle.loads = pickle.loads, None  # type: ignore[assignment]
    try:
        codec.decode(data)
    finally:
        pickle.loads = original


@given(st.binary(max_size=200))
def test_foreign_bytes_refused(data: bytes) -> None:
    """Foreign bytes are refused and run nothing."""
    if data[:1] == b"J":
        data = b"X" + data
    with pytest.raises((ValueError, KeyError, TypeError, RecursionError)):
        codec.decode(data)
