"""Asking an iterable dataset how it shares itself out.

Three answers. It is shared out already (each process made its own part): then nothing is shared a second time, which would lose data.
It can give the part of a rank: `num_shards` and `shard(num_shards=, index=)`, `split_by_rank(rank, world_size)`, or a
pipeline of torch with a `sharding_filter`. Or it cannot, and says nothing. Nothing here reads an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

__all__ = ["Answer", "ask", "settle_pipeline"]

_RANK_NAMES = ("rank", "process_index")
_WORLD_NAMES = ("world_size", "num_replicas", "num_processes")


@dataclass(frozen=True)
class Answer:
    """What a dataset said."""

    dataset: Any
    """What this rank reads: its own part, or everything where `own` is False."""
    own: bool
    reason: str
    """Why, for a message; it goes on after the name of the dataset."""
    doubt: str = ""
    """What looks wrong or costs time, for a warning."""


def ask(dataset: Any, rank: int, world_size: int) -> Answer:
    """What this rank reads of a dataset, as far as the dataset says.

    >>> ask(iter([1, 2]), 0, 2)
    Answer(dataset=<list_iterator object at ...>, own=False, reason='does not say how to share it out', doubt='')
    """
    return _shared_already(dataset, rank, world_size) or _by_protocol(dataset, rank, world_size)


def _shared_already(dataset: Any, rank: int, world_size: int) -> Answer | None:
    split = getattr(dataset, "_distributed", None)  # left by datasets.distributed.split_dataset_by_node
    if split is not None:
        place = getattr(split, "rank", None), getattr(split, "world_size", None)
        return _checked(dataset, "was split by node already", place, (rank, world_size))
    own = _first_number(dataset, _RANK_NAMES)
    world = _first_number(dataset, _WORLD_NAMES)
    if own is None or world is None or world[1] <= 1:
        return None
    reason = f"has {own[0]}={own[1]} and {world[0]}={world[1]}, so it is shared out already"
    return _checked(dataset, reason, (own[1], world[1]), (rank, world_size))


def _checked(dataset: Any, reason: str, found: tuple[Any, Any], here: tuple[int, int]) -> Answer:
    doubt = f"it is set up for rank {found[0]} of {found[1]}, but this is rank {here[0]} of {here[1]}: data may be read twice, or never"
    return Answer(dataset, True, reason, "" if found == here else doubt)


def _first_number(dataset: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = getattr(dataset, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def _by_protocol(dataset: Any, rank: int, world_size: int) -> Answer:
    if callable(getattr(dataset, "split_by_rank", None)):
        part = dataset.split_by_rank(rank, world_size)
        return Answer(dataset if part is None else part, True, "gives each process its part (split_by_rank)")
    count = _first_number(dataset, ("num_shards", "n_shards"))
    if count is not None and callable(getattr(dataset, "shard", None)):
        name, shards = count
        if shards >= world_size:
            part = dataset.shard(num_shards=world_size, index=rank)
            return Answer(part, True, f"has {name}={shards}: each process reads its own shards")
        doubt = f"it has {name}={shards} for {world_size} processes: stored in {world_size} shards or more, each process would read its own"
        return Answer(dataset, False, "has too few shards", doubt)
    if _has_sharding_filter(dataset):
        return Answer(dataset, True, "is a pipeline with a sharding_filter")
    return Answer(dataset, False, "does not say how to share it out")


def _has_sharding_filter(dataset: Any) -> bool:
    if not isinstance(dataset, IterDataPipe):
        return False
    waiting = [traverse_dps(dataset)]
    while waiting:
        for pipe, inner in waiting.pop().values():
            if callable(getattr(pipe, "apply_sharding", None)):
                return True
            waiting.append(inner)
    return False


def settle_pipeline(dataset: Any, seed: int, rank: int, world_size: int) -> None:
    """Before a pass over a pipeline of torch: its shuffling is seeded and its filter told who reads; other datasets are left alone.

    Ranks come first and their workers second, so that an item is read by the same rank however many workers there are.
    """
    if not isinstance(dataset, IterDataPipe):
        return
    apply_random_seed(dataset, torch.Generator().manual_seed(seed))
    worker = get_worker_info()
    if worker is None:
        apply_sharding(dataset, world_size, rank)
    else:
        apply_sharding(dataset, world_size * worker.num_workers, worker.id * world_size + rank)
