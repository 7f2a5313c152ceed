"""The order of samples in an epoch, as a function of (seed, epoch): the user's sampler, iterated with our own generators.

The same (seed, epoch) gives the same order on every rank and in every run, and the user's random states and generators are left as they
were. The orders of torch's `RandomSampler` and `SubsetRandomSampler` are computed from their positions (`permutation.py`), in the
way of a version that is saved with positions; its other samplers of known length are listed at once. Any other sampler is drawn one
global batch at a time, so that endless samplers work and a sampler that depends on the training is not drawn far ahead. No sampler is
replaced and no device is seeded.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import length_hint
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DistributedSampler

from slipstream.data.epoch_state import ORDER_VERSION
from slipstream.data.plan import ComputedOrder, SampleOrder
from slipstream.data.random_state import RandomStateScope, default_device, derive_seed
from slipstream.errors import ConfigError

__all__ = [
    "COMPUTED_SAMPLERS", "announce_epoch", "draw_order", "known_length", "list_samplers", "refuse_distributed_sampler",
    "torch_sampler_kind",
]


_TORCH_SAMPLER_MODULES = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
_TORCH_SAMPLERS = ("BatchSampler", "RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")
COMPUTED_SAMPLERS = ("RandomSampler", "SubsetRandomSampler")
"""Samplers of torch whose order is computed from its second version on."""
_CONTAINER_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_MAX_LISTED = 10_000_000
"""Orders longer than this that a sampler draws while it is read are not laid out at once."""


class _OrderRecorder(Protocol):
    """Records what was drawn; see `sampler_state.py`."""

    def lay_out(self, values: Sequence[Any]) -> None: ...

    def note(self, items: list[Any], ended: bool) -> None: ...


def draw_order(
    sampler: Any,
    *,
    seed: int,
    epoch: int,
    block: int,
    version: int = ORDER_VERSION,
    record: _OrderRecorder | None = None,
    begun: int = 0,
    stop: int = 0,
) -> SampleOrder | Iterator[Any]:
    """Return the order in which a sampler (or batch sampler) gives its items in this epoch; known, or drawn `block` items at a time.

    `version` is one of `ORDER_VERSIONS`. `record` is told of an order that is not torch's own. `begun` items of the first block were drawn
    before; a block ends at `stop`.

    >>> draw_order(torch.utils.data.SequentialSampler(range(5)), seed=0, epoch=0, block=2).take(3, 9)
    [3, 4]
    """
    generator_seed = derive_seed(seed, epoch, "order")
    kind = torch_sampler_kind(sampler)
    if kind == "SequentialSampler":
        return SampleOrder(range(len(sampler)))
    if isinstance(sampler, (Sequence, torch.Tensor, numpy.ndarray)):
        return _record_list(list(sampler), record)
    if version > 1 and kind in COMPUTED_SAMPLERS:
        return SampleOrder(_compute_order(sampler, kind, generator_seed))
    if kind == "RandomSampler" and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        count = len(sampler.data_source)
        return SampleOrder(torch.randperm(count, generator=_torch_generator(generator_seed), device="cpu").numpy())
    holders = [holder for holder in list_samplers(sampler) if _has_generator(holder)]
    if known_length(sampler) is None:
        return _begin_order(sampler, _GeneratorScope(holders, generator_seed, process_too=True), block, record, begun, stop)
    if len(sampler) > _MAX_LISTED and kind == "RandomSampler":
        return _begin_order(sampler, _GeneratorScope(holders, generator_seed), block)
    with _GeneratorScope(holders, generator_seed):
        return SampleOrder(list(sampler))


def _compute_order(sampler: Any, kind: str, key: int) -> ComputedOrder:
    """Return the order of a sampler that torch shuffles; the key stands for its generator."""
    from slipstream.data.permutation import Draws, Permutation, RepeatedPermutation, Selection  # which most evaluations do without

    if kind == "SubsetRandomSampler":
        return Selection(sampler.indices, key)
    count, length = len(sampler.data_source), int(sampler.num_samples)
    if length and not count:
        raise ConfigError(
            f"the DataLoader given to prepare has a RandomSampler(num_samples={length}) over a {type(sampler.data_source).__name__} "
            "without samples: there is nothing to draw. Give it a dataset with samples, or leave out this loader."
        )
    if sampler.replacement:
        return Draws(count, length, key)
    return Permutation(count, key) if count == length else RepeatedPermutation(count, length, key)


def known_length(sampler: Any) -> int | None:
    """Return how many items a sampler gives, where that is certain: torch's own and sequences. The length of others may be wrong."""
    if isinstance(sampler, (Sequence, torch.Tensor, numpy.ndarray)):
        return len(sampler)
    return None if torch_sampler_kind(sampler) in (None, "BatchSampler") else len(sampler)


def torch_sampler_kind(sampler: Any) -> str | None:
    """Return the name of the class of torch (or torchdata) whose iteration and length a sampler has; None for any other.

    >>> torch_sampler_kind(torch.utils.data.SequentialSampler(range(3))), torch_sampler_kind([0, 1, 2])
    ('SequentialSampler', None)
    """
    bases = type(sampler).__mro__
    iterates = next((base for base in bases if "__iter__" in vars(base)), object)
    counts = next((base for base in bases if "__len__" in vars(base)), object)
    own = (
        iterates.__module__ in _TORCH_SAMPLER_MODULES
        and counts.__module__ in _TORCH_SAMPLER_MODULES
        and iterates.__name__ == counts.__name__
    )
    return iterates.__name__ if own and iterates.__name__ in _TORCH_SAMPLERS else None


def list_samplers(sampler: Any) -> list[Any]:
    """Return a sampler, batch sampler or loader and the samplers inside it, outermost first."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is other for other in found):
        found.append(sampler)
        batch_sampler = getattr(sampler, "batch_sampler", None)  # an empty one counts as false, an endless one has no length
        sampler = getattr(sampler, "sampler", None) if batch_sampler is None else batch_sampler
    return found


def announce_epoch(objects: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` of those that have it."""
    for thing in objects:
        set_epoch = getattr(thing, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def refuse_distributed_sampler(loader: Any) -> None:
    """Raise for a loader with a `DistributedSampler`: `prepare` shares the data out already."""
    for sampler in list_samplers(loader):
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                f"the DataLoader given to prepare has a {type(sampler).__name__} (for {sampler.num_replicas} processes): prepare shares "
                f"the data between the processes itself, so each would read a part of a part. Write DataLoader(dataset, batch_size=..., "
                f"shuffle={sampler.shuffle}) without the sampler; set_epoch works on the prepared loader."
            )


# An order that is drawn -------------------------------------------------------------------------------------------------


def _begin_order(
    sampler: Iterable[Any], scope: _GeneratorScope, block: int, record: _OrderRecorder | None = None, begun: int = 0, stop: int = 0
) -> SampleOrder | Iterator[Any]:
    with scope:
        iterator = iter(sampler)
        if type(iterator) in _CONTAINER_ITERATORS and length_hint(iterator) <= _MAX_LISTED:  # the whole order is there already
            return _record_list(list(iterator), record)
    return _draw_blocks(iterator, scope, _block_sizes(block, begun, stop), record)


def _record_list(values: Sequence[Any], record: _OrderRecorder | None) -> SampleOrder:
    if record is not None:
        record.lay_out(values)
    return SampleOrder(values)


def _block_sizes(block: int, begun: int, stop: int) -> Iterator[int]:
    """Yield how many items are drawn at a time: those of a block, and no more than up to a position where drawing stopped before."""
    position = begun
    while True:
        size = block - position % block
        if position < stop < position + size:
            size = stop - position
        yield size
        position += size


def _draw_blocks(iterator: Iterator[Any], scope: _GeneratorScope, sizes: Iterator[int], record: _OrderRecorder | None) -> Iterator[Any]:
    for wanted in sizes:
        with scope:
            items = [_copy_item(item) for item in islice(iterator, wanted)]
        if record is not None:
            record.note(items, len(items) < wanted)
        yield from items
        if len(items) < wanted:
            return


def _copy_item(item: Any) -> Any:
    """Copy a batch of positions: a batch sampler may fill the same list or array again, and orders are drawn ahead of reading."""
    return copy.copy(item) if isinstance(item, (list, numpy.ndarray)) else item.clone() if isinstance(item, torch.Tensor) else item


class _GeneratorScope:
    """While it is entered, samplers draw from generators of ours, and with `process_too` the process's random states are ours too.

    Afterwards everything is as it was. Entered again, our generators continue where they were.
    """

    def __init__(self, holders: Sequence[Any], seed: int, *, process_too: bool = False) -> None:
        self.holders = holders
        self.ours = [
            _generator_like(holder.generator, derive_seed(seed, position) if position else seed) for position, holder in enumerate(holders)
        ]
        self.theirs: list[Any] = []
        self.process: AbstractContextManager[None] = RandomStateScope(seed) if process_too else nullcontext()

    def __enter__(self) -> None:
        self.theirs = [holder.generator for holder in self.holders]
        for holder, generator in zip(self.holders, self.ours, strict=True):
            holder.generator = generator
        self.process.__enter__()

    def __exit__(self, *details: object) -> None:
        self.process.__exit__(None, None, None)
        for holder, generator in zip(self.holders, self.theirs, strict=True):
            holder.generator = generator


def _torch_generator(seed: int, device: Any = None) -> torch.Generator:
    return torch.Generator(device if device is not None else "cpu").manual_seed(seed)


def _generator_like(theirs: Any, seed: int) -> Any:
    """Return a generator of the kind that a sampler has."""
    if isinstance(theirs, numpy.random.Generator):
        return numpy.random.default_rng(seed)
    if isinstance(theirs, random.Random):
        return random.Random(seed)
    # A sampler without one draws on the device that `torch.set_default_device` names.
    return _torch_generator(seed, default_device() if theirs is None else theirs.device)


def _has_generator(sampler: Any) -> bool:
    kinds = (torch.Generator, numpy.random.Generator, random.Random)
    return hasattr(sampler, "generator") and (sampler.generator is None or isinstance(sampler.generator, kinds))
