"""Where a model is cut: blocks stay whole, stages are contiguous, and no other cut has a smaller largest stage."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.errors import ConfigError
from slipstream.inference.stage_plan import StageBlock, generate_device_map, order_blocks, partition_evenly


def size(blocks: list[StageBlock]) -> int:
    return sum({tensor: length for block in blocks for tensor, length in block.held.items()}.values())


def stages(blocks: list[StageBlock], starts: list[int]) -> list[list[StageBlock]]:
    return [blocks[start:end] for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True)]


def smallest_largest(blocks: list[StageBlock], count: int) -> int:
    """The slow twin: every way to cut."""
    ways = itertools.combinations(range(1, len(blocks)), count - 1)
    return min(max(map(size, stages(blocks, [0, *way]))) for way in ways)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[StageBlock], int]:
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    shared = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    blocks = [StageBlock(str(n), {n: size, **({-1: 7} if tied else {})}) for n, (size, tied) in enumerate(zip(sizes, shared, strict=True))]
    return blocks, draw(st.integers(1, len(sizes)))


@settings(max_examples=150, deadline=None)
@given(sequences())
def test_partition_is_optimal(case):
    """No other cut has a smaller largest stage."""
    blocks, count = case
    starts = partition_evenly(blocks, count)
    made = stages(blocks, starts)
    assert starts[0] == 0
    assert len(made) == count
    assert all(made)
    assert max(map(size, made)) == smallest_largest(blocks, count)


class Layer(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(width, width)
        self.feed = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.body = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer() for _ in range(3)])})
        self.drop = torch.nn.Dropout()
        self.head = torch.nn.Linear(4, 5)


def names(*args: object, **kwargs: object) -> list[str]:
    return [block.name for block in order_blocks(*args, **kwargs)]


def test_list_layers_stay_whole():
    """Layers of a list stay whole and what holds nothing is no block."""
    assert names(Network(), ()) == ["embedding", "body.layers.0", "body.layers.1", "body.layers.2", "head"]


def test_named_classes_stay_whole():
    """Named classes stay whole."""
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2))
    assert names(model, ()) == ["0.0", "0.1", "1"]
    assert names(model, ("Sequential",)) == ["0", "1"]


def test_largest_blocks_divided():
    """The largest blocks are divided where there are fewer than processes."""
    model = torch.nn.ModuleDict({"one": Layer(8), "two": Layer(2)})
    assert names(model, (), at_least=2) == ["one", "two"]
    assert names(model, (), at_least=4) == ["one.attention", "one.feed.0", "one.feed.2", "two"]


def test_blocks_in_call_order():
    """Blocks are in the order in which they are called."""
    called = {"head": 0, "body.layers.1": 1, "embedding": 2}
    assert names(Network(), (), called=called) == ["head", "body.layers.1", "embedding"]


def test_weights_outside_blocks():
    """Weights outside of blocks count with the first."""
    model = Network()
    model.positions = torch.nn.Parameter(torch.zeros(1000))
    assert order_blocks(model, ())[0].size == 4000 + 5 * 4 * 4
    assert generate_device_map(model, 2) == {"positions": 0, "embedding": 0, **{f"body.layers.{n}": 1 for n in range(3)}, "head": 1}


def test_device_map_of_stages():
    """A device map has the stage of every block."""
    assert generate_device_map(Network(), 2) == {"embedding": 0, "body.layers.0": 0, "body.layers.1": 0, "body.layers.2": 1, "head": 1}
    assert generate_device_map(torch.nn.Linear(2, 2)) == {"": 0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": 9}, "5 blocks cannot be cut into 9 stages"),
        ({"num_processes": 2, "max_memory": {0: "70B"}}, "0: 70 bytes.*give them more"),
        ({"num_processes": 2, "max_memory": {"cpu": 1}}, "'cpu', which is not a stage"),
        ({"num_processes": 2, "max_memory": {1: "a lot"}}, r"max_memory\[1\]='a lot'"),
    ],
)
def test_wrong_arguments_on_all_ranks(arguments, told):
    """What cannot be is refused."""
    arguments.setdefault("no_split_module_classes", ["Layer"])
    with pytest.raises(ConfigError, match=told):
        generate_device_map(Network(), **arguments)


def test_limits_of_stages_are_kept():
    """Limits of stages are kept."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(4)])
    assert list(generate_device_map(model, 2, max_memory={0: 64, 1: "1MB"}).values()) == [0, 1, 1, 1]
