"""How torch's own machinery is made to read what a plan says: a copy of the script's loader, whose positions and generator are ours.

Workers, pinned memory, `collate_fn` and whatever a subclass adds stay the user's. Workers that stay are kept from pass to pass; a second
pass while they are at work has workers of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count, repeat
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, MapDataPipe
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from slipstream.data.reading import stay
from slipstream.data.seeding import Begin, Seeding
from slipstream.errors import ConfigError

__all__ = ["Fetching", "RankBatches"]

_is_profiled = torch._C._autograd._profiler_enabled

_NOTHING = object()


class _Owner(Protocol):
    """A prepared loader of map-style data."""

    original: DataLoader[Any]

    def _preview(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def get_sampler(self) -> Any: ...

    @property
    def batch_size(self) -> int | None: ...

    @property
    def drop_last(self) -> bool: ...


class RankBatches:
    """The batch sampler of one rank: what torch's machinery reads the positions from.

    Iterating over it gives this rank's batches of the epoch that comes next. The script's own batch sampler is `batch_sampler`.
    """

    def __init__(self, loader: _Owner) -> None:
        self._loader = loader
        self.pending: Iterator[Any] | None = None
        """What an iteration reads; set while one begins."""
        self.asked = False

    def __iter__(self) -> Iterator[Any]:
        self.asked = True
        # torch's iterator with workers asks twice when it is made, and draws from the second
        return self._loader._preview() if self.pending is None else self.pending

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the script's loader."""
        return self._loader.original.batch_sampler

    @property
    def sampler(self) -> Any:
        """The sampler of the script's loader."""
        return self._loader.get_sampler()

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank; None where batches have sizes of their own."""
        return self._loader.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is dropped."""
        return self._loader.drop_last


def _unmarked(iterator: Any) -> Iterator[Any]:
    """The batches of torch's iterator; it marks each for a profiler, which takes a tenth of a small batch's time: only if there is one."""
    read = iterator._next_data
    while True:
        try:
            batch = next(iterator) if _is_profiled() else read()
        except StopIteration:
            return
        yield batch


class Fetching:
    """Copies of the script's loader that read: their positions and their generator are ours."""

    def __init__(self, original: DataLoader[Any], owner: _Owner) -> None:
        self.feed = RankBatches(weakref.proxy(owner))  # a cycle would keep workers that stay beyond the prepared loader
        self.seeds = original.num_workers > 0 and not isinstance(original.dataset, MapDataPipe)
        """Whether workers draw random numbers of each batch's own."""
        workers = {"dataset": Seeding(original.dataset), "worker_init_fn": Begin(original.worker_init_fn)} if self.seeds else {}
        self.loader = _with_feed(original, self.feed, persistent_workers=stay(original), **workers)
        self.busy = False

    def read(self, positions: Iterator[Any], seed: int, first: int) -> Iterator[Any]:
        loader, feed = self.loader, self.feed
        if self.seeds:
            positions = zip(positions, repeat(seed), count(first), strict=False)
        if loader.persistent_workers:
            if not self.busy:
                return self._read_persistently(positions, seed)
            # The workers that stay are at work for another pass: this one has workers of its own.
            loader = _with_feed(loader, feed, persistent_workers=False)
        return self._begin(loader, positions, seed)

    def _read_persistently(self, positions: Iterator[Any], seed: int) -> Iterator[Any]:
        self.busy = True
        try:
            yield from self._begin(self.loader, positions, seed)
        finally:
            self.busy = False

    def _begin(self, loader: DataLoader[Any], positions: Iterator[Any], seed: int) -> Iterator[Any]:
        loader.generator.manual_seed(seed)
        feed = self.feed
        feed.pending, feed.asked = positions, False
        iterator = iter(loader)
        if not feed.asked:
            return self._begun_late(iterator, type(loader))
        feed.pending = None
        return _unmarked(iterator) if type(iterator) is _SingleProcessDataLoaderIter else iterator

    def _begun_late(self, iterator: Iterator[Any], kind: type) -> Iterator[Any]:
        """For a subclass whose iteration begins with its first batch."""
        first = next(iterator, _NOTHING)
        self.feed.pending = None
        if first is _NOTHING:
            return
        if not self.feed.asked:
            raise ConfigError(
                f"the DataLoader given to prepare is a {kind.__name__}, whose __iter__ does not read its batch_sampler: each process would "
                "read everything. Let it call super().__iter__(), or pass a plain DataLoader."
            )
        yield first
        yield from iterator


def _with_feed(original: DataLoader[Any], feed: RankBatches, **changes: Any) -> DataLoader[Any]:
    kind = type(original)
    if any(base.__module__.startswith("torchdata.") for base in kind.__mro__):
        kind = DataLoader  # the position is kept by us; everything else of it is torch's
    loader = object.__new__(kind)
    index_sampler = "sampler" if original.batch_sampler is None else "batch_sampler"
    ours = {index_sampler: feed, "generator": torch.Generator(), "_iterator": None, "in_order": True, **changes}
    loader.__dict__.update({**original.__dict__, **ours})
    return loader
