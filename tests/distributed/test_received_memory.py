"""What comes from other processes lies in memory as what a process makes itself: at multiples of 64 bytes, in storages of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from own_memory import misplaced
from slipstream import Accelerator, DataLoaderConfiguration, PartialState
from slipstream.utils import broadcast, broadcast_object_list, concatenate, gather, gather_object, pad_across_processes, reduce

Ranks = Any


def odd(rows: int = 3) -> dict[str, Any]:
    """Tensors of which no two would begin at a multiple of 64 if they lay side by side, small and too large for a header."""
    return {
        "scalar": torch.tensor(1.0),
        "odd": torch.randn(rows, 3),
        "half": torch.ones(rows, dtype=torch.bfloat16),
        "flags": [torch.ones(rows, 5, dtype=torch.bool), (torch.arange(rows),)],
        "large": torch.randn(rows, 50_001),
    }


def plain() -> dict[str, Any]:
    return {"text": "a", "tensor": torch.randn(7), "inner": [(torch.arange(3, dtype=torch.int16),)]}


def from_main(state: PartialState) -> list[Any]:
    values = [plain(), torch.randn(5)]
    broadcast_object_list(values)
    return values


COLLECTIVES: dict[str, Callable[[PartialState], Any]] = {
    "gather": lambda state: gather(odd()),
    "gather of other lengths": lambda state: gather(odd(state.process_index + 1)),
    "gather_object": lambda state: gather_object([plain()]),
    "broadcast": lambda state: broadcast(odd()),
    "broadcast_object_list": from_main,
    "reduce, sum": lambda state: reduce({"a": torch.randn(3), "b": torch.randn(50_001)}, "sum"),
    "reduce, mean": lambda state: reduce({"a": torch.randn(3), "b": torch.randn(50_001)}, "mean"),
    "reduce, none": lambda state: reduce({"a": torch.randn(3)}, "none"),
    "pad_across_processes": lambda state: pad_across_processes(torch.randn(state.process_index + 2, 3)),
    "concatenate": lambda state: concatenate([odd()["odd"], gather(odd()["odd"])]),
    "map_across_processes": lambda state: state.map_across_processes(lambda number: torch.full((3,), float(number)), range(5)),
    "split, gathered": lambda state: _split(state),
}


def _split(state: PartialState) -> Any:
    with state.split_between_processes(torch.randn(5, 3), apply_padding=True) as part:
        return state.gather(part * 2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(ranks: Ranks, name: str, world: int) -> None:
    """The results of every collective have memory of their own."""

    def check() -> dict[str, str]:
        return misplaced(COLLECTIVES[name](PartialState()))

    assert ranks(world).run(check) == [{}] * world


@pytest.mark.parametrize("kind", ["gather_for_metrics", "dispatched batches"])
def test_loops(ranks: Ranks, kind: str) -> None:
    """So have results that are gathered in a loop, and batches that the main process deals out."""

    def check() -> list[dict[str, str]]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatched batches"))
        data = TensorDataset(torch.randn(10, 3), torch.arange(10))
        loader = accelerator.prepare(DataLoader(data, batch_size=3))
        found = [batch if kind == "dispatched batches" else accelerator.gather_for_metrics(batch) for batch in loader]
        received = found if accelerator.process_index or kind == "gather_for_metrics" else []  # the main process has its own part
        return [faults for batch in received if (faults := misplaced(batch))]

    assert ranks(2).run(check) == [[], []]


def test_lists_of_samples(ranks: Ranks) -> None:
    """Samples as lists of tensors, too."""

    def check() -> dict[str, str]:
        accelerator = Accelerator(cpu=True)
        data = [{"x": torch.randn(3)} for _ in range(8)]
        loader = accelerator.prepare(DataLoader(data, batch_size=2, collate_fn=list))  # type: ignore[arg-type]
        return misplaced([accelerator.gather_for_metrics(batch) for batch in loader])

    assert ranks(2).run(check) == [{}, {}]
