"""Dealing: each rank gets its own part as it was, in one call; a sender that fails makes every rank raise; telling reaches everyone."""

from __future__ import annotations

from collections import OrderedDict
from difflib import Match
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream import DistributedOperationException, MismatchError, PartialState
from slipstream.distributed.gradient_state import BatchShares
from slipstream.distributed.scatter import ScatterSeries, agree_or_raise, scatter

WORLDS = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]

relaxed = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def dealt(parts: Any, **options: Any) -> Any:
    """What this rank gets of `parts`, which only the sender passes."""
    state = PartialState()
    sender = options.get("sender", 0)
    return scatter(state._channel(), state._limits, parts if state.process_index == sender else None, **options)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randint(0, 2 if dtype == torch.bool else 50, shape, generator=generator).to(dtype)
    if tensor.dim() > 1 and draw(st.booleans()):
        return tensor.transpose(0, 1)
    return tensor[::2] if tensor.dim() and draw(st.booleans()) else tensor


arrays = tensors().map(lambda tensor: (tensor.real if tensor.is_complex() else tensor).float().numpy())
plain = st.text(max_size=50) | st.integers() | st.floats(allow_nan=False) | st.none() | st.binary(max_size=20)
leaves = tensors() | plain | st.lists(st.text(max_size=30), max_size=5) | arrays


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> Any:
    kind = draw(st.sampled_from(["leaf", "list", "tuple", "dict"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves)
    inner = [draw(trees(depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    if kind == "dict":
        return dict(zip(draw(st.lists(st.text(max_size=5) | st.integers(), min_size=3, max_size=3, unique=True)), inner, strict=False))
    return tuple(inner) if kind == "tuple" else inner


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, (torch.Tensor, numpy.ndarray)):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert (got == wanted).all()
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for entry, other in zip(got, wanted, strict=True):
            assert_same(entry, other)
    else:
        assert got == wanted


@pytest.mark.parametrize("world", WORLDS)
@relaxed
@given(cases=st.lists(st.lists(trees(), min_size=4, max_size=4), min_size=8, max_size=8))
def test_scatter_parts_round_trip(ranks: Any, world: int, cases: list[list[Any]]) -> None:
    """Every rank gets its part as it was."""
    results = ranks(world).run(lambda: [dealt(parts[:world], sender=number % world) for number, parts in enumerate(cases)])
    for rank, received in enumerate(results):
        for got, parts in zip(received, cases, strict=True):
            assert_same(got, parts[rank])


@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_scattered_tensors_writable(ranks: Any, size: int) -> None:
    """Tensors arrive writable and independent."""

    def run() -> bool:
        first = dealt([{"x": torch.zeros(size), "n": numpy.zeros(size)} for _ in range(2)])
        first["x"] += 1
        first["n"] += 1
        second = dealt([{"x": torch.zeros(size), "n": numpy.zeros(size)} for _ in range(2)])
        return bool((first["x"] == 1).all() and (first["n"] == 1).all() and (second["x"] == 0).all())

    assert ranks(2).run(run) == [True, True]


def test_classes_of_containers_are_kept(ranks: Any) -> None:
    def run() -> Any:
        named: Any = Match(torch.arange(3), ["a"], 7)  # type: ignore[arg-type]
        record: Any = BatchShares(torch.ones(2, 2), "one", True, 4)  # type: ignore[arg-type]
        got = dealt([(named, record, OrderedDict(b=torch.tensor(1), a="x"), [], {}, ())] * 2)
        return [type(entry).__name__ for entry in got], got[0].a.tolist(), got[1].given.sum().item(), got[1].real, list(got[2]), got[3:]

    names = ["Match", "BatchShares", "OrderedDict", "list", "dict", "tuple"]
    assert ranks(2).run(run) == [(names, [0, 1, 2], 4.0, "one", ["b", "a"], ([], {}, ()))] * 2


def test_odd_tensors_keep_their_kind(ranks: Any) -> None:
    def run() -> Any:
        sparse = torch.eye(3).to_sparse()
        odd = {"sparse": sparse, "text": numpy.array(["a", "bc"]), "grad": torch.ones(2, requires_grad=True), "long": numpy.longdouble(2)}
        got = dealt([odd, odd])
        return got["sparse"].layout is torch.sparse_coo, got["text"].tolist(), got["grad"].tolist(), float(got["long"])

    assert ranks(2).run(run) == [(True, ["a", "bc"], [1.0, 1.0], 2.0)] * 2


def test_scatter_is_one_call(ranks: Any) -> None:
    """One call whatever the number of tensors."""

    def run() -> int:
        channel: Any = PartialState()._channel()
        before = channel.sequence
        dealt([{f"t{number}": torch.ones(number) for number in range(20)}] * 2)
        return channel.sequence - before

    assert ranks(2).run(run) == [1, 1]


class Series:
    """A series of this rank, and the bytes that the sender packs for each call."""

    def __init__(self) -> None:
        self.state, self.series = PartialState(), ScatterSeries()
        self.lengths: list[int] = []
        pack = self.series._pack
        self.series._pack = lambda parts, note: self._record(pack(parts, note))  # type: ignore[method-assign]

    def _record(self, body: Any) -> Any:
        self.lengths.append(body.length)
        return body

    def __call__(self, parts: Any, note: bytes = b"") -> Any:
        given = (parts, note) if self.state.is_main_process else (None, b"")
        return self.series.transfer(self.state._channel(), self.state._limits, given[0], note=given[1])


@pytest.mark.parametrize("world", [1, 3])
@relaxed
@given(cases=st.lists(st.lists(trees(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_series_round_trip(ranks: Any, world: int, cases: list[list[Any]]) -> None:
    """In a series, parts arrive as they were, also where a structure comes again with other sizes and values, or changes."""

    def run() -> Any:
        series = Series()
        return [series(parts[:world], note=bytes([number])) for number, parts in enumerate(cases + cases[::-1])]

    for rank, received in enumerate(ranks(world).run(run)):
        for number, ((got, note), parts) in enumerate(zip(received, cases + cases[::-1], strict=True)):
            assert_same(got, parts[rank])
            assert note == bytes([number])


def test_structure_is_described_once(ranks: Any) -> None:
    """A batch like the one before costs its bytes and at most 160 more; another number of samples is not another structure."""

    def run() -> Any:
        series = Series()
        batches = [{"ids": torch.ones(rows, 16), "labels": (torch.arange(rows),), "n": numpy.ones(rows)} for rows in (32, 32, 5, 32)]
        got = [series([batch, batch])[0] for batch in batches]
        sizes = [16 * 4 * rows + 2 * 8 * rows for rows in (32, 32, 5, 32)]
        more = [length - size for length, size in zip(series.lengths, sizes, strict=False)]
        return more, [[type(batch).__name__, *batch, len(batch["ids"]), int(batch["labels"][0].sum())] for batch in got]

    (more, here), (none, there) = ranks(2).run(run)
    assert more[0] > 200
    assert all(length <= 160 for length in more[1:])
    assert here == there
    assert none == []


def test_like_structures_are_told_apart(ranks: Any) -> None:
    """What differs in a type alone is another structure: keys, containers, dtypes, arrays, leaves without tensors."""

    def run() -> Any:
        series, tensor = Series(), torch.ones(2, dtype=torch.int32)
        parts: list[Any] = [
            {"1": tensor}, {1: tensor}, {True: tensor}, [tensor], (tensor,), [tensor.numpy()], [tensor.float()], [tensor, "x"],
            [tensor, None], [tensor, ["x", 1]], [tensor[0]], ["x"], [], {}, None, {"a": tensor, "b": 1}, {"b": tensor, "a": 1},
            OrderedDict(a=tensor),
        ]  # fmt: skip
        return [[series([part, part])[0] for part in parts] for _ in range(2)]

    first, second = ranks(2).run(run)
    for here, there in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert_same(there, here)


def test_series_after_an_exception(ranks: Any) -> None:
    """After an exception of the sender the structure is described anew, so that a series can go on."""

    def run() -> Any:
        series, batch = Series(), {"x": torch.ones(3)}
        series([batch, batch])
        with pytest.raises((KeyError, DistributedOperationException)):
            series(KeyError("record 7"))
        with pytest.raises((TypeError, AttributeError, ValueError, DistributedOperationException)):
            series([batch, {"x": torch.ones(3), "unsendable": lambda: None}])
        return series([batch, batch])[0]["x"].tolist()

    assert ranks(2).run(run) == [[1.0] * 3] * 2


@pytest.mark.parametrize("size", [1, 100_000])
def test_sender_exception_raised_everywhere(ranks: Any, size: int) -> None:
    """An exception of the sender is raised everywhere and the group lives on."""

    def run() -> Any:
        try:
            dealt(KeyError("record 7" * size))
        except (KeyError, DistributedOperationException) as error:
            return type(error).__name__, "KeyError" in f"{type(error).__name__} {error}", "record 7" in str(error), dealt([0, 1, 2])
        return None

    assert ranks(3).run(run) == [
        ("KeyError", True, True, 0),
        ("DistributedOperationException", True, True, 1),
        ("DistributedOperationException", True, True, 2),
    ]


def test_unsendable_part_raises_everywhere(ranks: Any) -> None:
    """What cannot be sent is an error everywhere."""

    def run() -> str:
        try:
            dealt([None, lambda: None])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    first, second = ranks(2).run(run)
    assert "pickle" in first.lower()
    assert second.startswith("DistributedOperationException: scatter from rank 0 ended on every process because rank 0 raised")


def test_wrong_part_count_raises_everywhere(ranks: Any) -> None:
    """A wrong number of parts is an error everywhere."""
    first, second = ranks(2).outcomes(lambda: dealt([1]))
    assert "needs one part for each of 2 processes, but rank 0 has 1" in first.summary
    assert "rank 0 raised ValueError" in second.summary


@pytest.mark.parametrize("world", WORLDS)
def test_agree_or_raise_rank_order(ranks: Any, world: int) -> None:
    """Told values reach everyone in the order of the ranks."""

    def run() -> Any:
        state = PartialState()
        return agree_or_raise(state._channel(), state._limits, (state.process_index, b"x", [1.5]))

    assert ranks(world).run(run) == [[(rank, b"x", [1.5]) for rank in range(world)]] * world


def test_agree_or_raise_any_rank_exception(ranks: Any) -> None:
    """An exception of any rank is told."""

    def run() -> Any:
        state = PartialState()
        value = ValueError("bad line 3") if state.process_index == 1 else 5
        try:
            agree_or_raise(state._channel(), state._limits, value, operation="next batch", condition="batch 4")
        except (ValueError, DistributedOperationException) as error:
            return str(error), agree_or_raise(state._channel(), state._limits, "after")
        return None

    (first, after), (second, _), _ = ranks(3).run(run)
    assert first.startswith("next batch ended on every process because rank 1 raised ValueError: bad line 3")
    assert second == "bad line 3"
    assert after == ["after"] * 3


def test_condition_replaces_call_site(ranks: Any) -> None:
    """A condition stands in for the line."""

    def run() -> Any:
        state = PartialState()
        channel, limits = state._channel(), state._limits
        if state.process_index == 0:
            same = agree_or_raise(channel, limits, 0, condition="pass 0, batch 1")
        else:
            same = agree_or_raise(channel, limits, 1, condition="pass 0, batch 1")
        try:
            agree_or_raise(channel, limits, 0, operation="next batch", condition=f"pass 0, batch {2 + state.process_index}")
        except MismatchError as error:
            return same, str(error)
        return None

    for same, message in ranks(2).run(run):
        assert same == [0, 1]
        assert "rank 0: next batch (pass 0, batch 2) at test_scatter.py" in message
        assert "rank 1: next batch (pass 0, batch 3) at test_scatter.py" in message
