"""`ShardedLoader`: the data loaders of a Lightning run, shared between the processes sample by sample.

Lightning gives a loader a `DistributedSampler`, which this module lets draw the order of the whole dataset (one replica). Global batches
are consecutive samples of that order, and rank r reads every `world_size`-th of them: full batches are those that each rank has with
Lightning's own DDP strategy, bit for bit. The position is a count of samples, so a pass resumes in the middle of an epoch, exactly, and on
another number of processes.

They differ in a short last batch, where Lightning repeats samples. Here a training batch is shared without repeats, and `weight` says how
much the loss of this rank counts, so that the gradient is the mean over the samples; in evaluation every sample is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from slipstream.data.map_loader import iterate_unprofiled
from slipstream.data.order import draw_order, torch_sampler_kind
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["LastBatch", "ShardedLoader", "find_global_sampler", "global_batches"]

LastBatch = Literal["weigh", "once", "pad"]
"""What happens to a short last batch: weigh the losses of ranks, read each sample once (evaluation), or repeat some as Lightning does."""

_Span = tuple[int, int]
"""Where a global batch begins and ends in the order."""


def global_batches(length: int, size: int, world_size: int, last: LastBatch, drop_last: bool = False, start: int = 0) -> list[_Span]:
    """Return the global batches of an order, from a position on.

    With "once", a last batch with fewer samples than ranks is evened out with the one before it, where both can have one for every rank.

    >>> global_batches(10, 4, 2, "weigh")
    [(0, 4), (4, 8), (8, 10)]
    >>> global_batches(9, 4, 2, "once"), global_batches(9, 4, 2, "weigh", drop_last=True, start=2)
    ([(0, 4), (4, 7), (7, 9)], [(2, 4), (4, 8)])
    """
    stops = list(range(size, length + 1, size))
    left = length % size
    if left and not drop_last:
        stops.append(length)
        if last == "once" and left < world_size and len(stops) > 1 and size + left >= 2 * world_size:
            stops[-2] = length - (size + left) // 2
    begins = [0, *stops]
    return [(max(begin, start), stop) for begin, stop in zip(begins, stops, strict=False) if stop > start]


def find_global_sampler(loader: Any, world_size: int) -> DistributedSampler[Any] | None:
    """Return the sampler of one replica that Lightning put into a loader; None if the loader is not to be shared here."""
    if not isinstance(loader, DataLoader) or isinstance(loader, ShardedLoader):
        return None
    holder = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(holder, "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) and sampler.num_replicas == 1 else None


class _RankFeed:
    """What the copy of the script's loader reads: the batches (or, without batching, the samples) of one rank."""

    def __init__(self, owner: ShardedLoader, original: DataLoader[Any]) -> None:
        self._owner = owner
        self.sampler: Any = owner.global_sampler
        """Lightning calls its `set_epoch`."""
        self.batch_sampler: Any = original.batch_sampler
        self.batch_size: int | None = original.batch_size
        self.drop_last: bool = original.drop_last

    def __iter__(self) -> Iterator[Any]:
        return self._owner.rank_items()

    def __len__(self) -> int:
        return len(self._owner)


class ShardedLoader(DataLoader[Any]):
    """The part of a loader that one rank reads.

    >>> sampler = DistributedSampler(range(10), num_replicas=1, rank=0, shuffle=False)
    >>> loader = DataLoader(range(10), batch_size=2, sampler=sampler)
    >>> [batch.tolist() for batch in ShardedLoader(loader, 1, 2, lambda: "weigh")]
    [[1, 3], [5, 7], [9]]
    """

    def __init__(
        self,
        original: DataLoader[Any],
        rank: int,
        world_size: int,
        last: Callable[[], LastBatch],
        is_over: Callable[[], bool] = lambda: False,
        at_start: Callable[[], None] = lambda: None,
    ) -> None:
        # DataLoader.__init__ is not called: the attributes are those of the original.
        self.__dict__.update(original.__dict__)
        sampler = find_global_sampler(original, world_size)
        if sampler is None:
            raise ConfigError("a ShardedLoader is made of a DataLoader with a DistributedSampler of one replica")
        own: dict[str, Any] = {"original": original, "rank": rank, "world_size": world_size, "global_sampler": sampler, "weight": 1.0}
        self.__dict__.update(own, _last=last, _is_over=is_over, _at_start=at_start, _position=0, _resume=None, _warned=False)
        self.__dict__["_inner"] = _copy_loader(original, _RankFeed(self, original))

    original: DataLoader[Any]
    rank: int
    world_size: int
    global_sampler: DistributedSampler[Any]
    weight: float
    """How much the loss of the batch that was handed out last counts on this rank; 1.0 for a full batch."""
    _last: Callable[[], LastBatch]
    _is_over: Callable[[], bool]
    _at_start: Callable[[], None]
    """Called when a pass begins: before torch draws the seed of its workers, or in the middle of an epoch, where it was drawn, behind."""
    _position: int
    """Samples (rounds of batches, with a batch sampler of the user) that were handed out to all ranks in this pass."""
    _resume: _Span | None
    """The epoch and the position in it where a pass continues."""
    _warned: bool
    _inner: DataLoader[Any]

    @property
    def _iterator(self) -> Any:  # Lightning shuts down workers that it finds here
        return self._inner._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._inner._iterator = iterator

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """What this rank reads; that of the script is its `batch_sampler`. None where batching is off."""
        return None if self.original.batch_sampler is None else self._inner.batch_sampler

    # -- the order and its batches --------------------------------------------------------------------------------

    @property
    def _is_dealt(self) -> bool:
        """Whether a batch sampler of the user makes batches, which go to the ranks in rounds."""
        batch_sampler = self.original.batch_sampler
        return batch_sampler is not None and torch_sampler_kind(batch_sampler) != "BatchSampler"

    @property
    def _size(self) -> int:
        """Units of a full global batch: samples, or batches of the user's batch sampler."""
        batch_sampler: Any = self.original.batch_sampler
        return self.world_size * (1 if self._is_dealt or batch_sampler is None else int(batch_sampler.batch_size))

    def _length(self) -> int:
        return len(self.original.batch_sampler) if self._is_dealt else len(self.global_sampler)  # type: ignore[arg-type]

    def _policy(self) -> LastBatch:
        return self._last() if self._has_batches else "pad"

    def _spans(self, start: int = 0) -> list[_Span]:
        drop = not self._is_dealt and self.original.batch_sampler is not None and self.original.drop_last
        drop = drop or (self._is_dealt and bool(getattr(self.original.batch_sampler, "drop_last", False)))
        return global_batches(self._length(), self._size, self.world_size, self._policy(), drop, start)

    @property
    def _has_batches(self) -> bool:
        """Whether this rank reads lists of samples, and not single samples or batches of the user's batch sampler."""
        return self.original.batch_sampler is not None and not self._is_dealt

    def _order(self) -> list[Any]:
        """Return the units of this epoch in order, the same on every rank."""
        if self._is_dealt:
            return list(self.original.batch_sampler)  # type: ignore[arg-type]
        sampler = self.global_sampler
        drawn = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # Lightning's wrapper of a sampler of the user
        if drawn is None:
            return list(sampler)
        return list(draw_order(drawn, seed=sampler.seed, epoch=sampler.epoch, block=self._size, version=1))  # as the sampler itself draws

    def rank_items(self) -> Iterator[Any]:
        """Yield what this rank reads of the pass that begins: lists of positions, or positions where batching is off."""
        order, rank, ranks, has_batches = self._order(), self.rank, self.world_size, self._has_batches
        for begin, stop in self._spans(self._position):
            own = order[begin + rank : stop : ranks]
            missing = (rank - stop + begin) % ranks
            if (stop - begin) % ranks and len(own) == (stop - begin) // ranks and (not own or self._policy() == "pad"):
                own = [*own, order[missing % len(order)]]  # the sample that Lightning's sampler repeats here
            yield own if has_batches else own[0]

    def __len__(self) -> int:
        """Return how many batches a whole pass has, the same on every rank."""
        return len(self._spans())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator: nothing happens before the first batch is asked for
        state, policy, ranks = self.__dict__, self._policy(), self.world_size
        epoch, position = self._resume or (0, 0)
        state["_resume"] = None
        state["_position"] = position if epoch == self.global_sampler.epoch else 0
        spans = self._spans(self._position)
        self._tell_repeats(spans, policy)
        state["weight"] = 1.0
        if not self._position:
            self._at_start()
        iterator = iter(self._inner)
        if self._position:
            self._at_start()
        batches = iterate_unprofiled(iterator) if type(iterator) is _SingleProcessDataLoaderIter else iterator
        for (begin, stop), batch in zip(spans, batches, strict=True):
            state["_position"] = stop
            if (stop - begin) % ranks and policy == "weigh":
                state["weight"] = max(0, (stop - begin - self.rank + ranks - 1) // ranks) * ranks / (stop - begin)
            yield batch

    def _tell_repeats(self, spans: list[_Span], policy: LastBatch) -> None:
        """Say which samples are evaluated twice, where a rank would have none."""
        missing = sum(max(0, self.world_size - (stop - begin)) for begin, stop in spans)
        if policy == "once" and missing and not self._warned:
            self.__dict__["_warned"] = True
            get_logger(__name__).warning(
                f"{missing} of {self._length()} samples of {type(self.dataset).__name__} are evaluated twice: the last batch has fewer "
                f"samples than the {self.world_size} processes, and each has to have one. Results count them twice."
            )

    # -- the position ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position: how many samples of the epoch's order all ranks together were given; 0 at the end of an epoch."""
        length = self._length()
        position = self._position if self._resume is None else self._resume[1]
        over = position >= length or self._is_over()
        return {"samples": 0 if over else position, "length": length, "epoch": self.global_sampler.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at a saved position, if it is of the same epoch."""
        samples, length = state.get("samples"), state.get("length")
        if not isinstance(samples, int) or not isinstance(length, int):
            raise ConfigError(
                f"the checkpoint has a loader's position {dict(state)!r}, which is not one of Slipstream: it was saved with another "
                "strategy or loader. Resume with that one, or from a checkpoint at the end of an epoch."
            )
        if samples and length != self._length():
            raise ConfigError(
                f"the checkpoint was saved after {samples} of {length} samples of an epoch, and {type(self.dataset).__name__} has "
                f"{self._length()} now: in the middle of an epoch the data has to be the same"
            )
        epoch = int(state.get("epoch", 0))
        self.__dict__["_resume"] = (epoch, samples) if samples else None
        self.global_sampler.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or "original" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.original, name)


def _copy_loader(original: DataLoader[Any], feed: _RankFeed) -> DataLoader[Any]:
    """Return a copy of the script's loader, of its own class, that reads what the feed gives."""
    loader: DataLoader[Any] = object.__new__(type(original))
    index_sampler = "sampler" if original.batch_sampler is None else "batch_sampler"
    loader.__dict__.update({**original.__dict__, index_sampler: feed, "_iterator": None})
    if isinstance(original.generator, torch.Generator):
        loader.__dict__["generator"] = original.generator
    return loader
