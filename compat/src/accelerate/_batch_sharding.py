"""Samplers and streams that give each process its part, by the rules of Accelerate.

Without `split_batches` the batches of the script are dealt in rounds: batch k of a round goes to process k. With it, every batch is cut
into as many slices as there are processes. If the last round (or batch) is not complete, `even_batches` fills it with samples from the
start of the pass, so that all processes get equally many; without it the processes get what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from slipstream.errors import ConfigError

__all__ = [
    "BatchSamplerShard", "IterableDatasetShard", "SeedableRandomSampler", "SkipBatchSampler", "find_batch_sampler", "find_sampler_holder",
    "get_sampler",
]  # fmt: skip


def _check_split(batch_size: int | None, num_processes: int, what: str) -> None:
    """Raise if batches of this size cannot be cut into equal slices."""
    if batch_size is None:
        raise ConfigError(
            f"split_batches=True with {what} that does not say its batch_size: batches of varying sizes cannot be cut into equal slices. "
            "Leave split_batches out, or give the batch sampler an attribute batch_size."
        )
    if batch_size % num_processes:
        raise ConfigError(
            f"split_batches=True, and the batch size {batch_size} of {what} is not a round multiple of the {num_processes} processes: "
            f"write batch_size={(batch_size // num_processes + 1) * num_processes}, or leave split_batches out"
        )


class BatchSamplerShard(BatchSampler):
    """The batches of one process out of those of a batch sampler. All attributes can be assigned; the next pass reads them.

    >>> inner = BatchSampler(range(7), batch_size=2, drop_last=False)
    >>> list(BatchSamplerShard(inner, num_processes=2, process_index=1))
    [[2, 3], [6, 0]]
    >>> list(BatchSamplerShard(inner, num_processes=2, process_index=1, even_batches=False))
    [[2, 3], [6]]
    """

    is_share_of_batches = True
    """Read by Slipstream where it describes the data of a run."""

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if split_batches:
            _check_split(getattr(batch_sampler, "batch_size", None), num_processes, f"a {type(batch_sampler).__name__}")
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # None: sizes vary
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """How many batches the wrapped batch sampler has."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        rounds, rest = divmod(len(self.batch_sampler), self.num_processes)
        if not rest or self.drop_last:
            return rounds
        return rounds + 1 if self.even_batches or self.process_index < rest else rounds

    def __iter__(self) -> Iterator[list[Any]]:
        return self._slices() if self.split_batches else self._dealt()

    last_round: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Of the round (or batch) that was handed out last: the samples that each process got, and how many of them are not repeated."""

    def _slices(self) -> Iterator[list[Any]]:
        """Yield this process's slice of every batch."""
        size, own = self.batch_size, self.batch_size // self.num_processes
        begin = self.process_index * own
        first: list[Any] | None = None
        for batch in self.batch_sampler:
            first = list(batch) if first is None else first
            real = tuple(min(own, max(0, len(batch) - process * own)) for process in range(self.num_processes))
            given = real
            if len(batch) < size:
                if self.drop_last:
                    continue
                if self.even_batches and first:
                    batch, given = [*batch, *islice(cycle(first), size - len(batch))], (own,) * self.num_processes
            self.last_round = given, real
            part = batch[begin : begin + own]
            if part:
                yield part

    def _dealt(self) -> Iterator[list[Any]]:
        """Yield the batch of this process of every round."""
        start: list[list[Any]] = []
        batches = iter(self.batch_sampler)
        while present := list(islice(batches, self.num_processes)):
            start = start or present
            real = [len(batch) for batch in present]
            if self._is_whole(present) or (following := next(batches, None)) is not None:
                if not self._is_whole(present):  # a batch sampler with short batches in the middle
                    batches = chain([following], batches)
            elif self.drop_last and len(present) < self.num_processes:
                return
            elif self.even_batches:
                present = self._filled(present, start)
            given = [len(batch) for batch in present]
            absent = (0,) * self.num_processes
            self.last_round = (*given, *absent)[: self.num_processes], (*real, *absent)[: self.num_processes]
            if self.process_index < len(present):
                yield present[self.process_index]

    def _is_whole(self, present: list[list[Any]]) -> bool:
        """Return whether every process gets a full batch of a round."""
        if len(present) < self.num_processes:
            return False
        return self.batch_size is None or all(len(batch) >= self.batch_size for batch in present)

    def _filled(self, present: list[list[Any]], start: list[list[Any]]) -> list[list[Any]]:
        """Return the last round with a full batch for every process."""
        if self.batch_size is None:
            return [*present, *islice(cycle(start), self.num_processes - len(present))]
        if self.drop_last:
            return present
        samples = cycle(chain.from_iterable([list(batch) for batch in start]))
        batches = [*present, *([] for _ in range(self.num_processes - len(present)))]
        return [[*batch, *islice(samples, self.batch_size - len(batch))] if len(batch) < self.batch_size else batch for batch in batches]


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process out of a stream that every process reads in the same order.

    >>> stream = IterableDatasetShard(range(7), batch_size=2, num_processes=2, process_index=1)
    >>> list(stream)
    [2, 3, 6, 0]
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1:
            _check_split(batch_size, num_processes, f"a loader of {type(dataset).__name__}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch it is."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    last_round: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Of the batch that was handed out last in this process: as in `BatchSamplerShard`; empty where workers read."""

    def _sizes(self) -> tuple[int, int]:
        """Return how many samples a batch of all processes has, and how many of them are for each."""
        if self.split_batches:
            return self.batch_size, self.batch_size // self.num_processes
        return self.batch_size * self.num_processes, self.batch_size

    def __len__(self) -> int:
        total, own = self.batch_size * self.num_processes, self.batch_size
        length = len(self.dataset)  # type: ignore[arg-type]  # a stream without a length says so itself
        return (length // total if self.drop_last else -(-length // total)) * own

    def __iter__(self) -> Iterator[Any]:
        self._seed_generator()
        total, own = self._sizes()
        place = range(self.process_index * own, (self.process_index + 1) * own)
        first: Sequence[Any] = ()
        samples = iter(self.dataset)
        while batch := list(islice(samples, total)):
            first = first or batch
            if len(batch) < total and self.drop_last:
                return
            real = tuple(min(own, max(0, len(batch) - process * own)) for process in range(self.num_processes))
            self.last_round = (own,) * self.num_processes, real
            if len(batch) < total:
                batch = [*batch, *islice(cycle(first), total - len(batch))]
            for number in place:
                yield batch[number]

    def _seed_generator(self) -> None:
        """Seed the generator of a dataset that does not take epochs, so that all processes draw the same in an epoch."""
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator) and hasattr(self, "epoch"):
            generator.manual_seed(self.epoch)


class SeedableRandomSampler(RandomSampler):
    """A random order that is a function of a seed and the epoch, the same on every process.

    >>> sampler = SeedableRandomSampler(range(8), data_seed=3)
    >>> first = list(sampler)
    >>> sampler.set_epoch(0)
    >>> list(sampler) == first, sampler.epoch
    (True, 1)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if seed is None else seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, in every pass.

    >>> list(SkipBatchSampler(BatchSampler(range(6), 2, False), skip_batches=2))
    [[4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name in ("sampler", "batch_size", "drop_last") and "batch_sampler" in self.__dict__:  # of the wrapped one
            return getattr(self.batch_sampler, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """How many batches the wrapped batch sampler has."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


def find_batch_sampler(dataloader: Any) -> Any:
    """Return what gives the batches of a loader: its batch sampler, or one that it has as its sampler (`batch_size=None`); or None."""
    if dataloader.batch_sampler is None and isinstance(dataloader.sampler, BatchSampler):
        return dataloader.sampler
    return dataloader.batch_sampler


def find_sampler_holder(dataloader: Any) -> Any:
    """Return the innermost batch sampler of a loader, whose `sampler` says the order; the loader itself without batch sampler."""
    outer = find_batch_sampler(dataloader)
    holder = dataloader if outer is None else outer
    while hasattr(holder, "batch_sampler") and holder is not dataloader:
        holder = holder.batch_sampler
    return holder


def get_sampler(dataloader: Any) -> Any:
    """Return the innermost sampler of a loader; None if its batch sampler has none.

    >>> from torch.utils.data import DataLoader
    >>> type(get_sampler(DataLoader(range(4), batch_size=2, shuffle=True))).__name__
    'RandomSampler'
    """
    return getattr(find_sampler_holder(dataloader), "sampler", None)
