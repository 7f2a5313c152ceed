"""Collectives over nested data equal what one process would compute from everyone's data: on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream import PartialState
from slipstream.distributed.transport import _Peer
from slipstream.testing import RankPool

WORLDS = [1, 2, 3, 4]
Point = namedtuple("Point", "x y")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]

relaxed = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Each example holds several cases, as opening a group costs more than a collective."""
CASES = 6


@dataclass
class Output:
    logits: Any
    text: Any


def everyone(pool: RankPool, function: Any) -> list[Any]:
    """What each rank got from `function(state)`."""
    return pool.run(lambda: function(PartialState()))


@st.composite
def tensors_of_ranks(draw: st.DrawFn, same_rows: bool = False) -> list[torch.Tensor]:
    """One tensor for each of four ranks: types and trailing shapes agree, first dimensions need not."""
    dtype = draw(st.sampled_from(DTYPES))
    trailing = draw(st.lists(st.integers(0, 3), max_size=2))
    rows = [draw(st.integers(0, 700 if draw(st.booleans()) else 3)) for _ in range(4)]
    if same_rows:
        rows = [rows[0]] * 4
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [torch.randint(0, 2 if dtype == torch.bool else 50, (count, *trailing), generator=generator).to(dtype) for count in rows]


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=CASES, max_size=CASES)


@pytest.mark.parametrize("world", WORLDS)
@relaxed
@given(cases=several(st.lists(tensors_of_ranks(), min_size=1, max_size=4)))
def test_gather_equals_concatenation(ranks: Any, world: int, cases: list[list[list[torch.Tensor]]]) -> None:
    def gather(state: PartialState) -> Any:
        return [state.gather([leaf[state.process_index] for leaf in leaves]) for leaves in cases]

    expected = [[torch.cat(leaf[:world]) for leaf in leaves] for leaves in cases]
    for results in everyone(ranks(world), gather):
        for got, wanted in zip(sum(results, []), sum(expected, []), strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


items = st.text(max_size=200) | st.integers() | st.dictionaries(st.text(), st.floats(allow_nan=False))


@pytest.mark.parametrize("world", WORLDS)
@relaxed
@given(cases=several(st.lists(st.lists(items, max_size=6), min_size=4, max_size=4)))
def test_gather_objects_order(ranks: Any, world: int, cases: list[list[list[Any]]]) -> None:
    """Gather of texts and objects keeps their order."""

    def gather(state: PartialState) -> Any:
        me = state.process_index
        return [(state.gather(parts[me]), state.gather_object(parts[me])) for parts in cases]

    whole = [[item for part in parts[:world] for item in part] for parts in cases]
    for results in everyone(ranks(world), gather):
        assert results == [(part, part) for part in whole]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min"])
@relaxed
@given(cases=several(tensors_of_ranks(same_rows=True)))
def test_reduce_equals_stack(ranks: Any, world: int, reduction: str, cases: list[list[torch.Tensor]]) -> None:
    """Reduce equals the same over a stack."""
    unordered = (torch.bool, torch.complex64)
    kept = [leaf for leaf in cases if leaf[0].dtype not in unordered and (reduction != "mean" or leaf[0].is_floating_point())]
    combine = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[reduction]
    expected = [combine(torch.stack(leaf[:world]), dim=0).to(leaf[0].dtype) for leaf in kept]

    def reduce(state: PartialState) -> Any:
        own = [leaf[state.process_index] for leaf in kept]
        return state.reduce(own, reduction), [state.reduce(tensor, reduction) for tensor in own]

    for together, apart in everyone(ranks(world), reduce):
        for got, alone, wanted in zip(together, apart, expected, strict=True):
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(alone, wanted)


@pytest.mark.parametrize("world", WORLDS)
def test_the_structure_is_kept(ranks: Any, world: int) -> None:
    def run(state: PartialState) -> Any:
        me = state.process_index
        data = {
            "p": Point(torch.tensor([me]), [f"t{me}"]),
            "o": Output(torch.tensor(float(me)), ("a", "b")),
            "n": numpy.array([[me]]),
            "one": f"rank {me}",
        }
        got = state.gather(data)
        assert type(got["p"]) is Point
        assert type(got["o"]) is Output
        assert isinstance(got["n"], numpy.ndarray)
        return got["p"].x.tolist(), got["p"].y, got["o"].logits.tolist(), got["o"].text, got["n"].tolist(), got["one"], list(got)

    numbers = list(range(world))
    for result in everyone(ranks(world), run):
        assert result == (
            numbers,
            [f"t{rank}" for rank in numbers],
            [float(rank) for rank in numbers],
            ("a", "b") * world,
            [[rank] for rank in numbers],
            [f"rank {rank}" for rank in numbers],
            ["p", "o", "n", "one"],
        )


def test_nested_text_lists_joined(ranks: Any) -> None:
    """Accelerate loses the values of a dict and interleaves a tuple of lists."""

    def run(state: PartialState) -> Any:
        me = state.process_index
        return state.gather_for_metrics({"a": [f"x{me}"]}), state.gather_for_metrics(([f"p{me}"], [f"r{me}"]))

    assert ranks(2).run(lambda: run(PartialState())) == [({"a": ["x0", "x1"]}, (["p0", "p1"], ["r0", "r1"]))] * 2


def test_dict_order_does_not_matter(ranks: Any) -> None:
    """Dicts that were filled in another order still match."""

    def run(state: PartialState) -> Any:
        pairs = [("a", torch.tensor([1])), ("b", torch.tensor([2]))]
        return {key: value.tolist() for key, value in state.gather(dict(pairs if state.is_main_process else pairs[::-1])).items()}

    assert everyone(ranks(2), run) == [{"a": [1, 1], "b": [2, 2]}] * 2


@pytest.mark.parametrize("size", [3, 100_000])
def test_gather_to_one_rank(ranks: Any, size: int) -> None:
    """Gather to one rank gives it only there."""

    def run(state: PartialState) -> Any:
        got = state.gather({"x": torch.full((size,), state.process_index), "t": [f"r{state.process_index}"]}, dst=1)
        return None if got is None else (got["x"].sum().item(), len(got["x"]), got["t"])

    assert everyone(ranks(3), run) == [None, (size * 3, size * 3, ["r0", "r1", "r2"]), None]


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("sender", [0, 2])
def test_broadcast_reaches_all(ranks: Any, size: int, sender: int) -> None:
    """Broadcast gives the data of one rank to all."""

    def run(state: PartialState) -> Any:
        me = state.process_index
        data = {"x": torch.full((size,), me), "scalar": torch.tensor(me), "n": numpy.array([me]), "name": f"rank {me}"}
        got = state.broadcast(data, from_process=sender)
        assert data["x"][0] == me, "the argument is not changed"
        return got["x"].unique().tolist(), got["scalar"].shape, got["scalar"].item(), got["n"].tolist(), got["name"]

    assert everyone(ranks(3), run) == [([sender], (), sender, [sender], f"rank {sender}")] * 3


@pytest.mark.parametrize("size", [1, 5000])
def test_broadcast_object_list_in_place(ranks: Any, size: int) -> None:
    """Broadcast of an object list writes into the list."""

    def run(state: PartialState) -> Any:
        values = [state.process_index, "x" * size * state.process_index]
        back = state.broadcast_object_list(values, from_process=1)
        return back is values, values

    assert everyone(ranks(2), run) == [(True, [1, "x" * size])] * 2


@pytest.mark.parametrize("world", WORLDS)
def test_pad_to_largest_size(ranks: Any, world: int) -> None:
    """Padding brings every rank to the largest size."""

    def run(state: PartialState) -> Any:
        me = state.process_index
        data = {"rows": torch.ones(me + 1, 2), "columns": torch.ones(2, world - me), "text": "a", "scalar": torch.tensor(1.0)}
        first = state.pad_across_processes(data, dim=0, pad_index=7)
        last = state.pad_across_processes(data, dim=1, pad_first=True)
        return first["rows"].tolist(), last["columns"].tolist(), first["text"], first["scalar"].shape

    for rank, (rows, columns, text, scalar) in enumerate(everyone(ranks(world), run)):
        assert rows == [[1.0, 1.0]] * (rank + 1) + [[7.0, 7.0]] * (world - rank - 1)
        assert columns == [[0.0] * rank + [1.0] * (world - rank)] * 2
        assert (text, scalar) == ("a", ())


def test_bool_and_half_keep_types(ranks: Any) -> None:
    """Bool and half tensors keep their types."""

    def run(state: PartialState) -> Any:
        return (
            state.gather(torch.tensor([True])).dtype,
            state.reduce(torch.tensor([state.is_main_process]), "max").tolist(),
            state.gather(torch.ones(1).half()).dtype,
        )

    assert everyone(ranks(2), run) == [(torch.bool, [True], torch.float16)] * 2


@pytest.mark.parametrize("world", WORLDS)
def test_gather_gradient_equals_one_process(ranks: Any, world: int) -> None:
    """Every rank computes a loss from everyone's rows; the gradient is that of the sum of the losses."""

    def run(state: PartialState) -> Any:
        me = state.process_index
        own = torch.arange(float(me + 1)).requires_grad_()
        scalar = torch.tensor(2.0, requires_grad=True)
        rows, scalars = state.gather((own, scalar), with_gradient=True)
        (((me + 1) * rows**2).sum() + (me + 1) * scalars.sum()).backward()
        return own.grad.tolist(), scalar.grad.item()

    weight = world * (world + 1) / 2
    for rank, result in enumerate(everyone(ranks(world), run)):
        assert result == ([2 * weight * row for row in range(rank + 1)], weight)


def test_gradient_beside_masks(ranks: Any) -> None:
    """Masks, ids and fixed rows that are gathered with what has a gradient take no part in the backward pass."""

    def run(state: PartialState) -> Any:
        own = torch.ones(state.process_index + 1, requires_grad=True)
        mask = torch.tensor([True, False])
        ids = torch.tensor([3], dtype=torch.uint16)
        fixed = torch.tensor([2.0])
        rows, masks, every_id, weights = state.gather((own, mask, ids, fixed), with_gradient=True)
        ((rows**2).sum() * weights.sum()).backward()
        return own.grad.tolist(), masks.tolist(), every_id.tolist(), fixed.grad

    assert everyone(ranks(2), run) == [([16.0] * (rank + 1), [True, False] * 2, [3, 3], None) for rank in range(2)]


def test_reduce_python_numbers(ranks: Any) -> None:
    """Python numbers are reduced to python numbers."""
    assert (
        everyone(ranks(2), lambda state: state.reduce({"loss": 0.5, "count": state.process_index + 1})) == [{"loss": 1.0, "count": 3}] * 2
    )


def test_scale_multiplies_after_reducing(ranks: Any) -> None:
    assert everyone(ranks(2), lambda state: state.reduce(torch.ones(2), "mean", scale=3.0).tolist()) == [[3.0, 3.0]] * 2


def test_one_process_is_no_special_case(ranks: Any) -> None:
    def run(state: PartialState) -> Any:
        return (
            state.gather(torch.tensor(1.0)).shape[0],
            state.gather("a"),
            state.gather(["a"]),
            state.reduce(torch.ones(1), "mean").tolist(),
        )

    assert everyone(ranks(1), run) == [(1, ["a"], ["a"], [1.0])]


class Counted:
    """Counts what a rank does in a block: messages and bytes on its sockets, and collectives of torch's group."""

    def __init__(self, channel: Any) -> None:
        self._count = channel.count_torch_collectives
        self.messages = self.size = 0

    def __enter__(self) -> Counted:
        self._send, self._before = _Peer.send, self._count()

        def send(peer: Any, views: list[memoryview]) -> int:
            size: int = self._send(peer, views)
            self.messages += size > 0
            self.size += size
            return size

        _Peer.send = send  # type: ignore[method-assign]
        return self

    def __exit__(self, *details: object) -> None:
        _Peer.send = self._send  # type: ignore[method-assign]
        self.collectives = self._count() - self._before


CALLS: dict[str, tuple[Any, int, int]] = {
    # the call, and how many bytes of rank 0 reach every other rank, of the others each
    "barrier": (lambda state: state.wait_for_everyone(), 0, 0),
    "gather": (lambda state: state.gather(torch.ones(16)), 16 + 32 + 64, 16 + 32 + 64),
    "gather of a tree": (lambda state: state.gather([torch.ones(4)] * 20), 16 + 192 + 320, 16 + 192 + 320),
    "gather_object": (lambda state: state.gather_object(["x" * 250] * 64), 16 + 16352, 16 + 16352),
    "reduce": (lambda state: state.reduce(torch.ones(16)), 16 + 64, 16 + 64),
    "broadcast": (lambda state: state.broadcast(torch.ones(16)), 16 + 16 + 16 + 64, 0),
}
"""An entry of the table takes 16 bytes; what leads a gather 8 for each tensor and 24 more, a broadcast 8; all parts are aligned to 16."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_counts(ranks: Any, name: str, world: int) -> None:
    """A call is as many messages as the number of ranks has binary digits, with every body once, and no collective of torch."""
    call, first, others = CALLS[name]

    def run(state: PartialState) -> tuple[int, int, int]:
        call(state)
        with Counted(state._channel()) as counted:
            call(state)
        return counted.messages, counted.size, counted.collectives

    found = everyone(ranks(world), run)
    hops = (world - 1).bit_length()
    assert [(messages, collectives) for messages, _, collectives in found] == [(hops, 0)] * world
    assert sum(size for _, size, _ in found) == world * hops * 48 + (world - 1) * (first + (world - 1) * others)


def test_large_bodies_on_the_ring(ranks: Any) -> None:
    """Megabytes follow a small exchange, as few as can be, without a collective of torch."""

    def run(state: PartialState) -> list[tuple[int, int]]:
        data = torch.ones(3 << 20)
        found = []
        for call in (
            lambda: state.gather(data),
            lambda: state.broadcast(data),
            lambda: state.gather(data, dst=1),
            lambda: state.reduce(data),
            lambda: state.reduce([data, torch.ones(3)], "max"),
        ):
            with Counted(state._channel()) as counted:
                call()
            found.append((counted.size - counted.size % (1 << 20), counted.collectives))
        return found

    sent = 12 << 20
    reduced = [(sent // 3 * 4, 0)] * 2  # two thirds of it to be added, two thirds of the sum
    assert everyone(ranks(3), run) == [
        [(2 * sent, 0), (sent, 0), (sent, 0), *reduced],
        [(2 * sent, 0), (0, 0), (0, 0), *reduced],
        [(2 * sent, 0), (sent, 0), (2 * sent, 0), *reduced],  # passes on what rank 0 sends to rank 1
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dst", [None, 1])
def test_large_and_small_together(ranks: Any, world: int, dst: int | None) -> None:
    """One rank has megabytes, the others little or nothing: rows, objects and texts arrive as from one process."""

    def run(state: PartialState) -> Any:
        me = state.process_index
        rows = torch.full((200_000 if me == 1 else me, 3), float(me))
        return state.gather({"rows": rows, "ids": [f"{me} {number}" for number in range(3 * me)], "me": me}, dst=dst)

    for rank, found in enumerate(everyone(ranks(world), run)):
        if dst not in (None, rank):
            assert found is None
            continue
        rows = torch.cat([torch.full((200_000 if me == 1 else me, 3), float(me)) for me in range(world)])
        assert torch.equal(found["rows"], rows)
        assert found["ids"] == [f"{me} {number}" for me in range(world) for number in range(3 * me)]
        assert found["me"] == list(range(world))


@pytest.mark.parametrize("world", [2, 3])
def test_large_reductions(ranks: Any, world: int) -> None:
    """Every reduction and type gives what one process computes, in a size that no number of ranks divides; all get the same bits."""
    kinds = [(torch.float32, "sum"), (torch.float64, "mean"), (torch.int64, "max"), (torch.bfloat16, "sum"), (torch.int16, "min")]
    size = 1_500_001

    def data(rank: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randint(-100, 100, (size,), generator=torch.Generator().manual_seed(rank))
        return values.to(dtype)

    def run(state: PartialState) -> list[torch.Tensor]:
        return [state.reduce(data(state.process_index, dtype), reduction)[::1009].clone() for dtype, reduction in kinds]

    found = everyone(ranks(world), run)
    for index, (dtype, reduction) in enumerate(kinds):
        stacked = torch.stack([data(rank, dtype) for rank in range(world)])
        combined = getattr(stacked, {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[reduction])(dim=0)[::1009]
        assert all(torch.equal(results[index], found[0][index]) for results in found)
        torch.testing.assert_close(found[0][index], combined.to(dtype))


@pytest.mark.parametrize("size", [3, 300_001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(ranks: Any, dtype: torch.dtype, size: int) -> None:
    """Sums and means of a half type are those of one process in every size: partial sums neither overflow nor lose small terms."""
    rows = [[40000.0, 256.0], [40000.0, 1.0], [-40000.0, 1.0]]

    def run(state: PartialState) -> list[list[float]]:
        data = torch.tensor(rows[state.process_index], dtype=dtype).repeat(size)
        found = [state.reduce(data, "sum"), state.reduce(data, "mean")]
        assert {tensor.dtype for tensor in found} == {dtype}
        return [tensor.unique().tolist() for tensor in found]

    stacked = torch.tensor(rows).to(dtype).float()
    expected = [sorted(combined.to(dtype).tolist()) for combined in (stacked.sum(dim=0), stacked.mean(dim=0))]
    assert everyone(ranks(3), run) == [expected] * 3


@pytest.mark.parametrize("world", [2, 3])
def test_reduce_of_large_and_small(ranks: Any, world: int) -> None:
    """Large tensors are combined in their results and small ones together, and nothing that was passed changes."""

    def run(state: PartialState) -> Any:
        data = {"large": torch.full((1 << 20,), 1.0 + state.process_index), "small": [torch.ones(200_000), torch.ones(3)], "number": 2}
        before = [leaf.clone() for leaf in (data["large"], *data["small"])]  # type: ignore[misc]
        found = state.reduce(data, "sum")
        assert all(map(torch.equal, before, (data["large"], *data["small"])))
        return found["large"].unique().tolist(), [tensor.unique().tolist() for tensor in found["small"]], found["number"]

    assert everyone(ranks(world), run) == [([sum(range(1, world + 1))], [[world], [world]], 2 * world)] * world


def test_device_memory_uses_data_group(ranks: Any) -> None:
    """Forced onto the path of device tensors: one flat payload over the data group, ragged rows included."""

    def run(state: PartialState) -> Any:
        from slipstream.distributed import codec

        original = codec._CPU
        codec._CPU = "elsewhere"
        try:
            me = state.process_index
            data = {"a": torch.full((me + 1, 2), me), "b": torch.tensor([1.5 * me]), "t": [f"r{me}"]}
            got = state.gather(data)
            to_one = state.gather(torch.tensor([me]), dst=1)
            total = state.reduce(torch.tensor([float(me + 1)]))
            sent = state.broadcast(torch.tensor([me]), from_process=1)
            return (
                got["a"].tolist(),
                got["b"].tolist(),
                got["t"],
                None if to_one is None else to_one.tolist(),
                total.tolist(),
                sent.tolist(),
            )
        finally:
            codec._CPU = original

    both = ([[0, 0], [1, 1], [1, 1]], [0.0, 1.5], ["r0", "r1"])
    assert everyone(ranks(2), run) == [(*both, None, [3.0], [1]), (*both, [0, 1], [3.0], [1])]


def test_the_plain_functions_of_utils(ranks: Any) -> None:
    def run() -> Any:
        from slipstream import utils

        me = PartialState().process_index
        shared = utils.copy_tensor_to_devices(torch.arange(3) if me == 1 else None)
        shape = utils.gather_tensor_shape(torch.ones(2, 5) if me == 0 else None)
        utils.wait_for_everyone()
        return (
            utils.gather(torch.tensor([me])).tolist(),
            utils.gather_object([me]),
            utils.reduce(torch.tensor(float(me))).item(),
            utils.broadcast(torch.tensor([me]), 1).tolist(),
            utils.broadcast_object_list([me], 1),
            utils.pad_across_processes(torch.ones(me + 1)).shape[0],
            shared.tolist(),
            tuple(shape),
        )

    assert ranks(2).run(run) == [([0, 1], [0, 1], 0.5, [1], [1], 2, [0, 1, 2], (2, 5))] * 2


def test_seeds_are_equal_or_offset_by_rank(ranks: Any) -> None:
    def run() -> Any:
        from slipstream.utils import set_seed

        set_seed(7)
        same = torch.rand(1).item()
        set_seed(7, device_specific=True)
        return same, torch.rand(1).item()

    (a, own_a), (b, own_b) = ranks(2).run(run)
    assert a == b
    assert own_a != own_b
