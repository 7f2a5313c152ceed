"""What a loader reads and in which order, as a plain dict for the receipt of a run. No data is read for it.

`order` is a short digest: it is equal for two runs if they read the same positions of their data in the same order, on any number of
processes, and different if they do not, as far as that can be known without reading: two datasets of one kind and length are taken to
be the same.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from slipstream.data.fingerprint import fingerprint
from slipstream.data.order import standard_kind
from slipstream.data.samplers import SamplerKeeper

if TYPE_CHECKING:
    from slipstream.data.loader import PreparedLoader

__all__ = ["describe"]


def describe(loader: PreparedLoader) -> dict[str, Any]:
    """What a prepared loader reads, in which order; see `PreparedLoader.describe`."""
    original: Any = loader.original
    dataset = original.dataset
    stream = isinstance(dataset, IterableDataset)
    sampler = None if stream else original.sampler if original.batch_sampler is None else _units(original.batch_sampler)
    batch_sampler = original.batch_sampler
    drop_last = bool(getattr(batch_sampler, "drop_last", original.drop_last))
    found = {
        "dataset": type(dataset).__name__,
        "length": _length_of(dataset),
        "sampler": None if sampler is None else type(sampler).__name__,
        "batch": loader.total_batch_size,
        "drop_last": drop_last,
        "even": loader.config.even_batches,
        "seed": loader.seed,
    }
    shuffled: Any = loader.seed
    if stream:
        # several workers, and processes with parts of their own, read in an order of theirs
        rules: list[Any] = ["stream", max(1, original.num_workers), loader._parts_of_their_own]
    else:
        rules = _sampler(sampler, dataset)
        shuffled = None if standard_kind(sampler) == "SequentialSampler" or _is_listed(sampler) else loader.seed
    dropped = loader._dropped if drop_last else 0
    text = repr((found["dataset"], found["length"], rules, _selected(dataset), shuffled, dropped, found["even"], loader._kind))
    return {**found, "order": blake2b(text.encode(), digest_size=8).hexdigest()}


def _length_of(dataset: Any) -> int | None:
    """How many samples there are, where the dataset says so."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _units(batch_sampler: Any) -> Any:
    return batch_sampler.sampler if standard_kind(batch_sampler) == "BatchSampler" else batch_sampler


def _is_listed(sampler: Any) -> bool:
    return isinstance(sampler, (list, tuple, range, torch.Tensor, numpy.ndarray))


def _sampler(sampler: Any, dataset: Any) -> list[Any]:
    """What tells the order of a sampler, besides the seed."""
    kind = standard_kind(sampler)
    if kind == "SequentialSampler":
        return [kind, len(sampler)]
    if kind == "RandomSampler":
        return [kind, bool(sampler.replacement), int(sampler.num_samples), len(sampler.data_source)]
    if kind == "SubsetRandomSampler":
        return [kind, _digest(sampler.indices)]
    if kind == "WeightedRandomSampler":
        return [kind, bool(sampler.replacement), int(sampler.num_samples), _digest(sampler.weights)]
    if _is_listed(sampler):
        return ["listed", _digest(sampler)]
    keeper = SamplerKeeper(sampler, dataset)
    return [[type(one).__qualname__, sorted(keeper.prints(one).items(), key=str)] for one in keeper.samplers] or [
        type(sampler).__qualname__
    ]


def _selected(dataset: Any) -> list[Any]:
    """Which samples were selected of the data (`Subset`)."""
    if isinstance(dataset, Subset):
        return [_digest(dataset.indices), *_selected(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return [(_length_of(part), _selected(part)) for part in dataset.datasets[:100]]
    return []


def _digest(values: Any) -> str:
    if isinstance(values, (list, tuple, range)) and (isinstance(values, range) or all(type(one) is int for one in values)):
        values = numpy.asarray(values, numpy.int64)
    return fingerprint([values]).hex()
