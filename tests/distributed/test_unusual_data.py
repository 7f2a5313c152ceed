"""Data that is unusual but legal travels unchanged; what cannot travel is refused on every rank, with what to write instead."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from slipstream import MismatchError, PartialState
from slipstream.distributed import codec, pytree
from slipstream.distributed.codec import PackedTensor
from slipstream.distributed.collectives import pad, reduce
from slipstream.distributed.guard import Channel, Limits

SIZES = (3, 20_000)
"""What rides in the header, and what does not."""


def refusal(act: Any) -> str:
    """The TypeError of a call, as text."""
    with pytest.raises(TypeError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_reduce_converts_unsupported_types(ranks: Any, world: int) -> None:
    """Types that a backend cannot add are reduced through one that it can."""

    def run() -> list[Any]:
        state = PartialState()
        me = state.process_index
        results = []
        for size in SIZES:
            short = torch.full((size,), 10 + me, dtype=torch.int16)
            results += [state.reduce(short, reduction) for reduction in ("sum", "max", "min")]
            wave = torch.full((size,), complex(1 + me, 2 - me), dtype=torch.complex64)
            results += [state.reduce(wave, reduction) for reduction in ("sum", "mean")]
            results += [state.reduce(wave.conj()), state.reduce(torch.full((size,), me == 0), "min")]
        return [*results, state.reduce(1j * (me + 1)), state.reduce({"big": wave, "one": torch.ones(1, 1)})["one"]]

    shorts = [10 + me for me in range(world)]
    waves = [complex(1 + me, 2 - me) for me in range(world)]
    per_size = [sum(shorts), max(shorts), min(shorts), sum(waves), sum(waves) / world, sum(waves).conjugate(), world == 1]
    for results in ranks(world).run(run):
        *tensors, number, entry = results
        for result, (size, wanted) in zip(tensors, [(size, wanted) for size in SIZES for wanted in per_size], strict=True):
            assert result.shape == (size,)
            assert set(result.tolist()) == {wanted}
        assert {str(result.dtype) for result in tensors} == {"torch.int16", "torch.complex64", "torch.bool"}
        assert number == sum(1j * (me + 1) for me in range(world))
        assert entry.tolist() == [[world]]


REFUSED = [
    (torch.uint16, "sum", ".long()"),
    (torch.uint32, "max", ".long()"),
    (torch.uint64, "min", ".long()"),
    (torch.float8_e4m3fn, "sum", ".float()"),
    (torch.float8_e5m2, "mean", ".float()"),
    (torch.complex64, "max", "no order"),
    (torch.complex128, "min", "no order"),
    (torch.int16, "mean", ".float()"),
    (torch.bool, "sum", ".long()"),
]


@pytest.mark.parametrize("world", [1, 2])
def test_irreducible_types_refused(ranks: Any, world: int) -> None:
    """Types that cannot be combined are refused at every size and number of processes."""

    def run() -> list[str]:
        state = PartialState()
        texts = [
            refusal(lambda: state.reduce(torch.zeros(size).to(dtype), reduction))  # noqa: B023
            for dtype, reduction, _ in REFUSED
            for size in SIZES
        ]
        assert state.gather([state.process_index]) == list(range(world))
        return texts

    wanted = [(str(dtype).removeprefix("torch."), word) for dtype, _, word in REFUSED for _ in SIZES]
    for texts in ranks(world).run(run):
        for text, words in zip(texts, wanted, strict=True):
            assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("value", "reduction", "advice"),
    [(3, "mean", "float(...)"), (True, "sum", "int(...)"), (numpy.ones(2, dtype=int), "mean", ".astype('float32')")],
    ids=str,
)
def test_the_advice_fits_what_was_passed(value: Any, reduction: str, advice: str) -> None:
    assert advice in refusal(lambda: reduce(Channel(), Limits(), value, reduction))


def test_oversized_number_raises_on_all(ranks: Any) -> None:
    """A number that no tensor holds on one rank is an error on all."""

    def run() -> str:
        state = PartialState()
        with pytest.raises(MismatchError) as caught:
            state.reduce(2**70 if state.process_index else 1)
        return str(caught.value)

    assert all("could not be sent" in text for text in ranks(2).run(run))


def test_reduce_none_is_guarded(ranks: Any) -> None:
    """Reduce to none is a call like the others."""

    def run() -> tuple[Any, str]:
        state = PartialState()
        me = state.process_index
        own = state.reduce({"x": torch.full((1, 1), me), "n": me}, "none")
        with pytest.raises(MismatchError) as caught:
            state.reduce(torch.ones(2), "none" if me else "sum")
        return own, str(caught.value)

    for me, (own, text) in enumerate(ranks(2).run(run)):
        assert own["x"].tolist() == [[me]]
        assert own["n"] == me
        assert "reduce(none)" in text
        assert "reduce(sum)" in text


@pytest.mark.parametrize("world", [1, 2])
def test_arrays_of_any_layout(ranks: Any, world: int) -> None:
    """Arrays of every memory layout travel."""

    def run() -> list[Any]:
        state = PartialState()
        fixed = numpy.arange(3.0)
        fixed.flags.writeable = False
        arrays = [numpy.array(2.5), fixed, numpy.arange(3.0)[::-1], numpy.arange(6.0).reshape(2, 3).T, numpy.arange(3, dtype=">f8")]
        return [(array, state.reduce(array, "max"), state.broadcast(array), state.gather(array)) for array in arrays]

    for results in ranks(world).run(run):
        for array, reduced, received, gathered in results:
            for result in (reduced, received):
                assert type(result) is numpy.ndarray
                assert result.shape == array.shape
                assert result.dtype == array.dtype.newbyteorder("=")
                assert numpy.array_equal(result, array)
            assert numpy.array_equal(gathered, numpy.concatenate([numpy.atleast_1d(array)] * world))


def test_an_array_turned_round_is_padded(ranks: Any) -> None:
    def run() -> Any:
        state = PartialState()
        return state.pad_across_processes(numpy.arange(2 + state.process_index)[::-1], pad_index=9)

    assert [result.tolist() for result in ranks(2).run(run)] == [[1, 0, 9], [2, 1, 0]]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (numpy.ma.masked_array([1.0, 2.0], mask=[True, False]), ("mask", ".filled")),
        (numpy.ones(2, dtype="longdouble"), (".astype('float64')",)),
    ],
    ids=["masked", "longdouble"],
)
def test_lossy_arrays_refused(ranks: Any, array: Any, words: tuple[str, ...]) -> None:
    """Arrays that would lose something are refused by every collective."""

    def run() -> list[str]:
        state = PartialState()
        return [refusal(lambda: act(array)) for act in (state.gather, state.reduce, state.broadcast, state.pad_across_processes)]  # noqa: B023

    for text in [text for texts in ranks(2).run(run) for text in texts]:
        assert all(word in text for word in words), text


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantized tensor:UserWarning")
@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "to_padded_tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "to_padded_tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), ".dequantize()"),
        (lambda: torch.ones(2).to_sparse(), ".to_dense()"),
    ],
    ids=["nested", "jagged", "quantized", "sparse"],
)
def test_rowless_tensor_advice(make: Any, advice: str) -> None:
    """A tensor without rows gets advice that fits."""
    tensor = make()
    assert advice in refusal(lambda: PackedTensor(tensor))
    assert advice in refusal(lambda: pad(Channel(), Limits(), tensor))


@pytest.mark.parametrize(
    "value",
    [
        numpy.str_(""),
        numpy.bytes_(b""),
        numpy.ndarray((2,), dtype="U0"),
        numpy.array(["", ""]),
        numpy.array(2.5),
        numpy.array([], dtype="U3"),
    ],
    ids=repr,
)
def test_empty_texts_and_arrays_come_back(value: Any) -> None:
    back = codec.decode(codec.encode([value]))[0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert numpy.array_equal(back, value)


def test_single_element_any_stride() -> None:
    """One element of any stride comes back."""
    for tensor in (torch.arange(6).reshape(2, 3)[:1, 0], torch.arange(6).reshape(2, 3)[1:, 2:], torch.arange(4)[::2][1]):
        back = codec.decode(codec.encode(tensor))
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


# -- values that should be the same everywhere ------------------------------------------------------------------------


@dataclass
class Settings:
    rate: float
    tags: Any


def test_equal_values_agree_in_any_order(ranks: Any) -> None:
    """Equal values agree in whatever order they were filled."""

    def run() -> str:
        state = PartialState()
        turned = slice(None, None, -1 if state.process_index else 1)
        pairs = [("a", 1), ("b", {0, 8}), ((1, 2), torch.ones(2))]
        tags = {"deep": dict(pairs[turned]), "set": set([0, 8][turned]), "sets": frozenset([frozenset([8, 0][turned]), "x"])}
        state.verify_replicas(config={"nested": dict(list(tags.items())[turned]), "settings": Settings(0.1, [tags])})
        with pytest.raises(MismatchError) as caught:
            state.verify_replicas(config={"same": 1, "set": {0, 8 + state.process_index}, "settings": Settings(state.process_index, 0)})
        return str(caught.value)

    for text in ranks(2).run(run):
        assert "2 of 3 are not" in text
        assert "set: rank 0 | rank 1" in text


def test_incomparable_value_raises_on_all(ranks: Any) -> None:
    """A value that cannot be compared on one rank is an error on all."""

    def run() -> tuple[str, list[int]]:
        state = PartialState()
        with pytest.raises(MismatchError) as caught:
            state.verify_replicas(config={"f": (lambda: 1) if state.process_index else 1})
        return str(caught.value), state.gather([state.process_index])

    for text, after in ranks(2).run(run):
        assert "check of config" in text
        assert "could not be sent" in text
        assert after == [0, 1]


# -- containers of the user's own classes -----------------------------------------------------------------------------


class Shared(MutableMapping[str, Any]):
    """A copy of it has the same dict inside."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class SharedWithName(Shared):
    def __init__(self, name: str, data: dict[str, Any]) -> None:
        super().__init__(data)


@pytest.mark.parametrize(("make", "kind"), [(Shared, Shared), (lambda data: SharedWithName("n", data), dict)], ids=["taken", "not taken"])
def test_shared_storage_mapping_not_changed(make: Any, kind: type) -> None:
    """A mapping whose copy shares its storage is not changed."""
    first, second = object(), torch.ones(2)
    mapping = make({"b": second, "a": first})
    back = pytree.map_leaves(lambda leaf: leaf if leaf is first else leaf * 2, mapping)
    assert type(back) is kind
    assert list(back) == ["b", "a"]
    assert back["a"] is first
    assert back["b"].tolist() == [2, 2]
    assert mapping["a"] is first
    assert mapping["b"] is second


class Named(list[Any]):
    def __init__(self, name: str, *items: Any) -> None:
        super().__init__(items)
        self.name = name


class Demanding(list[Any]):
    def __new__(cls, name: str) -> Any:
        return super().__new__(cls)


class Pair(tuple[Any, ...]):
    def __new__(cls, left: Any, right: Any) -> Any:
        return super().__new__(cls, (left, right))


class Wrapped(tuple[Any, ...]):
    """Takes a list of items for its only item."""

    def __new__(cls, *items: Any) -> Any:
        return super().__new__(cls, items)


class Point(namedtuple("Point", "x y")):  # noqa: PYI024
    def __new__(cls, both: Any) -> Any:
        return super().__new__(cls, both, both)


def test_custom_constructors_rebuilt() -> None:
    """Lists and tuples with a constructor of their own are rebuilt."""
    named = Named("n", 1, 2)
    back = pytree.map_leaves(str, named)
    assert (type(back), back, back.name, named) == (Named, ["1", "2"], "n", [1, 2])
    demanding = Demanding("n")
    assert pytree.rebuild(demanding, [1, 2]) == [1, 2]
    assert pytree.map_leaves(str, Pair(1, 2)) == ("1", "2")
    assert pytree.map_leaves(str, Wrapped(1, 2)) == ("1", "2")
    assert type(pytree.map_leaves(str, Point(1))) is Point
    assert pytree.map_leaves(str, Point(1)) == ("1", "1")
    assert pytree.map_leaves(str, torch.Size([2, 3])) == ("2", "3")


def test_empty_concatenate_and_slice_errors() -> None:
    """Nothing to join and nothing to slice are said in words."""
    assert "nothing to join" in refusal(lambda: pytree.concatenate([]))
    assert ".reshape(1)" in refusal(lambda: pytree.slice_tensors({"x": torch.tensor(1)}, slice(0, 1)))


def test_default_device_does_not_matter(ranks: Any) -> None:
    """Collectives on host data work under any default device, on which nothing is created."""

    def run() -> list[Any]:
        state = PartialState()
        data = torch.ones(2, requires_grad=True)
        with torch.device("meta"):
            large = len(state.gather(torch.ones(20_000, device="cpu")))
            joined = state.gather(data, with_gradient=True)
            return [state.reduce(1.5), state.gather(["a"]), large, joined.tolist(), state.broadcast_object_list([1])]

    assert ranks(2).run(run) == [[3.0, ["a", "a"], 40_000, [1.0] * 4, [1]]] * 2
