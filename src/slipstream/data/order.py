"""The order of samples, as a function of (seed, epoch): the user's sampler, iterated with random numbers of ours.

What it promises: the same (seed, epoch) gives the same order on every rank and in every run; the user's random states (Python's,
numpy's, torch's, and generators handed to samplers) are where they were. Samplers of torch whose length is certain are
laid out at once; any other is drawn while it is read, a global batch at a time, so endless ones work and those that watch
the training do not run ahead of it.

What it never does: replace a sampler by another, or seed a device.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import length_hint
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DistributedSampler

from slipstream.data.plan import Order
from slipstream.data.randomness import OwnRandom
from slipstream.errors import ConfigError

__all__ = ["announce_epoch", "certain_length", "inner_samplers", "mix", "order_of", "refuse_sharded", "standard_kind"]

_STANDARD = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
_KINDS = ("BatchSampler", "RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_OF_CONTAINERS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_LAID_OUT = 10_000_000
"""Orders longer than this that are drawn with replacement are not laid out at once."""


def mix(seed: int, *parts: int | str) -> int:
    """A seed from a seed and what tells its uses apart: neighbouring seeds and epochs give unrelated ones.

    >>> mix(42, 0) == mix(42, 0), mix(42, 1) == mix(43, 0), 0 <= mix(42, 0) < 2**63
    (True, False, True)
    """
    text = repr((int(seed), *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class _Record(Protocol):
    """Hears of what was drawn; see `ordering.py`."""

    def lay_out(self, values: Sequence[Any]) -> None: ...

    def note(self, items: list[Any], ended: bool) -> None: ...


def order_of(
    sampler: Any, *, seed: int, epoch: int, block: int, record: _Record | None = None, begun: int = 0, stop: int = 0
) -> Order | Iterator[Any]:
    """The order in which a sampler (or batch sampler) gives its items in this epoch; laid out, or drawn `block` items at a time.

    `record` hears of an order that is not torch's own. `begun` items of the first block were drawn before; a block ends at `stop`.

    >>> order_of(torch.utils.data.SequentialSampler(range(5)), seed=0, epoch=0, block=2).take(3, 9)
    [3, 4]
    """
    generator_seed = mix(seed, epoch, "order")
    kind = standard_kind(sampler)
    if kind == "SequentialSampler":
        return _Listed(range(len(sampler)))
    if isinstance(sampler, (Sequence, torch.Tensor, numpy.ndarray)):
        return _listed(list(sampler), record)
    if kind == "RandomSampler" and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        count = len(sampler.data_source)
        return _Array(torch.randperm(count, generator=_torch_generator(generator_seed)).numpy())
    holders = [one for one in inner_samplers(sampler) if _has_generator(one)]
    if certain_length(sampler) is None:
        return _begun(sampler, _Scope(holders, generator_seed, process_too=True), block, record, begun, stop)
    if len(sampler) > _LAID_OUT and kind == "RandomSampler":
        return _begun(sampler, _Scope(holders, generator_seed), block)
    with _Scope(holders, generator_seed):
        return _Listed(list(sampler))


def certain_length(sampler: Any) -> int | None:
    """How many items a sampler gives, where that is certain: torch's own and sequences. Others may promise what they do not keep."""
    if isinstance(sampler, (Sequence, torch.Tensor, numpy.ndarray)):
        return len(sampler)
    return None if standard_kind(sampler) in (None, "BatchSampler") else len(sampler)


def standard_kind(sampler: Any) -> str | None:
    """The name of the class of torch (or of its equal in torchdata) as which a sampler iterates and counts, whatever else it adds.

    >>> standard_kind(torch.utils.data.SequentialSampler(range(3))), standard_kind([0, 1, 2])
    ('SequentialSampler', None)
    """
    bases = type(sampler).__mro__
    iterates = next((one for one in bases if "__iter__" in vars(one)), object)
    counts = next((one for one in bases if "__len__" in vars(one)), object)
    own = iterates.__module__ in _STANDARD and counts.__module__ in _STANDARD and iterates.__name__ == counts.__name__
    return iterates.__name__ if own and iterates.__name__ in _KINDS else None


def inner_samplers(sampler: Any) -> list[Any]:
    """A sampler, batch sampler or loader and the samplers inside it, outermost first."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is one for one in found):
        found.append(sampler)
        sampler = _inside(sampler)
    return found


def _inside(holder: Any) -> Any:
    batch_sampler = getattr(holder, "batch_sampler", None)  # an empty one counts as false, an endless one has no length
    return getattr(holder, "sampler", None) if batch_sampler is None else batch_sampler


def announce_epoch(objects: Iterable[Any], epoch: int) -> None:
    """Tells the epoch to those that want to know it."""
    for one in objects:
        tell = getattr(one, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def refuse_sharded(loader: Any) -> None:
    """A `DistributedSampler` shares out what is shared out here already."""
    for one in inner_samplers(loader):
        if isinstance(one, DistributedSampler):
            raise ConfigError(
                f"the DataLoader given to prepare has a {type(one).__name__} (for {one.num_replicas} processes): prepare shares the data "
                f"between the processes itself, so each would read a part of a part. Write DataLoader(dataset, batch_size=..., "
                f"shuffle={one.shuffle}) without the sampler; set_epoch works on the prepared loader."
            )


# An order that is laid out ----------------------------------------------------------------------------------------------


class _Listed:
    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def take(self, start: int, stop: int) -> list[Any]:
        return list(self.values[start:stop])


class _Array:
    """Eight bytes per sample; numbers of Python are made when a batch is cut."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def take(self, start: int, stop: int) -> list[Any]:
        taken: list[Any] = self.values[start:stop].tolist()
        return taken


# An order that is drawn -------------------------------------------------------------------------------------------------


def _begun(
    sampler: Iterable[Any], scope: _Scope, block: int, record: _Record | None = None, begun: int = 0, stop: int = 0
) -> Order | Iterator[Any]:
    with scope:
        iterator = iter(sampler)
        if type(iterator) in _OF_CONTAINERS and length_hint(iterator) <= _LAID_OUT:  # the whole order is there already
            return _listed(list(iterator), record)
    return _drawn(iterator, scope, _sizes(block, begun, stop), record)


def _listed(values: Sequence[Any], record: _Record | None) -> _Listed:
    if record is not None:
        record.lay_out(values)
    return _Listed(values)


def _sizes(block: int, begun: int, stop: int) -> Iterator[int]:
    """How many items are drawn at a time: those of a block, and no more than up to a place where drawing stopped before."""
    position = begun
    while True:
        size = block - position % block
        if position < stop < position + size:
            size = stop - position
        yield size
        position += size


def _drawn(iterator: Iterator[Any], scope: _Scope, sizes: Iterator[int], record: _Record | None) -> Iterator[Any]:
    for wanted in sizes:
        with scope:
            items = [_kept(item) for item in islice(iterator, wanted)]
        if record is not None:
            record.note(items, len(items) < wanted)
        yield from items
        if len(items) < wanted:
            return


def _kept(item: Any) -> Any:
    """A batch of positions as it is now: a batch sampler may fill the same list or array again, and orders are drawn ahead of reading."""
    return copy.copy(item) if isinstance(item, (list, numpy.ndarray)) else item.clone() if isinstance(item, torch.Tensor) else item


class _Scope:
    """While it is entered, samplers draw from generators of ours, and if they may draw from the process's random states, those are
    ours too. Afterwards everything is as it was, and ours go on where they were when it is entered again."""

    def __init__(self, holders: Sequence[Any], seed: int, *, process_too: bool = False) -> None:
        self.holders = holders
        self.ours = [_like(one.generator, mix(seed, position) if position else seed) for position, one in enumerate(holders)]
        self.theirs: list[Any] = []
        self.process: AbstractContextManager[None] = OwnRandom(seed) if process_too else nullcontext()

    def __enter__(self) -> None:
        self.theirs = [one.generator for one in self.holders]
        for one, generator in zip(self.holders, self.ours, strict=True):
            one.generator = generator
        self.process.__enter__()

    def __exit__(self, *details: object) -> None:
        self.process.__exit__(None, None, None)
        for one, generator in zip(self.holders, self.theirs, strict=True):
            one.generator = generator


def _torch_generator(seed: int, device: Any = None) -> torch.Generator:
    return torch.Generator(device if device is not None else "cpu").manual_seed(seed)


def _like(theirs: Any, seed: int) -> Any:
    """A generator of the kind that a sampler has."""
    if isinstance(theirs, numpy.random.Generator):
        return numpy.random.default_rng(seed)
    if isinstance(theirs, random.Random):
        return random.Random(seed)
    return _torch_generator(seed, None if theirs is None else theirs.device)


def _has_generator(sampler: Any) -> bool:
    kinds = (torch.Generator, numpy.random.Generator, random.Random)
    return hasattr(sampler, "generator") and (sampler.generator is None or isinstance(sampler.generator, kinds))
