"""Random numbers of workers, as a function of the batch that they are drawn for.

What a worker draws while it reads a batch (augmentation in the dataset, masking in `collate_fn`) is begun anew for every batch, from the
seed of the pass and the number of the batch. So it does not depend on how many workers there are, on what they read before, or on where
the pass began: a run that goes on in the middle of an epoch draws what it would have drawn.

What it cannot reach: a generator of the dataset's own, which each worker has a copy of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from slipstream.data.order import mix
from slipstream.data.randomness import reseed

__all__ = ["Begin", "Seeding"]


class Seeding(Dataset[Any]):
    """The dataset of a worker: the script's own, which is given positions, the seed of the pass and the number of the batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, wanted: tuple[Any, int, int]) -> Any:
        positions, seed, number = wanted
        reseed(mix(seed, number))
        read = getattr(self.dataset, "__getitems__", None)
        return read(positions) if read else [self.dataset[position] for position in positions]

    def __getitem__(self, wanted: tuple[Any, int, int]) -> Any:
        position, seed, number = wanted
        reseed(mix(seed, number))
        return self.dataset[position]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or (name.startswith("__") and name.endswith("__")):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Begin:
    """What a worker does first: it shows the script's dataset to the script's code, which knows nothing of ours."""

    def __init__(self, init: Callable[[int], Any] | None, roles: tuple[int, ...] = ()) -> None:
        self.init = init
        self.roles = roles
        """Which workers these are, in a pass that goes on: the one whose turn comes next is the first."""

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        ours: Any = info.dataset
        object.__setattr__(info, "dataset", ours.dataset)  # it is frozen
        if self.roles and self.roles[worker] != worker:
            role = self.roles[worker]
            object.__setattr__(info, "seed", info.seed - worker + role)
            object.__setattr__(info, "id", role)
            reseed(info.seed)
            worker = role
        if self.init is not None:
            self.init(worker)
