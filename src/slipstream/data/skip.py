"""`skip_first_batches`: a loader whose first pass begins later, by seeking rather than by reading.

For a prepared loader and for plain map-style ones no data is read to get there. A plain loader of an iterable dataset uses the
dataset's own `skip` where it has one; else it has to read, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from slipstream.data.loader import PreparedLoader
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["skip_first_batches"]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader that begins after `num_batches` batches of the present epoch in its first pass, and from the start in later ones.

    The present epoch is the one being read or left by `break`, if it got that far; else the next one. A pass of which only one batch
    was read, and not trained on, is not left: that was a look at the data.

    After `load_state` the present epoch is that of the loaded position, and `num_batches` counts from its start, not from the position:
    the number of batches that the checkpoint stands at leads to the position itself, exactly. At the end of an epoch, 0 means the next.

    >>> list(skip_first_batches(DataLoader(range(6), batch_size=2), 2))
    [tensor([4, 5])]
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise ConfigError(f"skip_first_batches(num_batches={num_batches!r}): how many batches to skip is a whole number from 0")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"skip_first_batches was given a {type(dataloader).__name__}; it takes a DataLoader, prepared or not. "
            f"Write itertools.islice(..., {num_batches}, None) to skip items of another iterable."
        )
    return _skipping(dataloader, num_batches)


def _skipping(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    """A copy of a plain loader, of a class that is its own but for where the first pass begins."""
    twin = object.__new__(type(loader))
    twin.__dict__.update({**loader.__dict__, "_iterator": None})
    if num_batches == 0:
        return twin
    if isinstance(loader.dataset, IterableDataset):
        return _SkippingStream(loader, num_batches)
    index_sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    twin.__dict__[index_sampler] = _Later(getattr(loader, index_sampler), num_batches)
    return twin


class _Later:
    """A sampler or batch sampler without its first items, once."""

    def __init__(self, inner: Any, skipped: int) -> None:
        self._inner = inner
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self._inner), skipped, None)

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._skipped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._inner, name)


class _SkippingStream(DataLoader[Any]):
    """A plain loader of an iterable dataset without its first batches, once."""

    _original: DataLoader[Any]
    _skipped: int

    def __init__(self, loader: DataLoader[Any], skipped: int) -> None:
        # that of DataLoader is not called: the attributes are those of the loader
        self.__dict__.update({**loader.__dict__, "_iterator": None})
        self.__dict__.update({"_original": loader, "_skipped": skipped})

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # an iterator of ours where batches are skipped
        skipped, self._skipped = self._skipped, 0
        if not skipped:
            return iter(self._original)
        skip = getattr(self._original.dataset, "skip", None)
        if callable(skip) and self._original.num_workers == 0:  # what several workers share is the dataset's affair
            later = object.__new__(type(self._original))
            dataset = skip(skipped * (self._original.batch_size or 1))
            later.__dict__.update({**self._original.__dict__, "_iterator": None, "dataset": dataset})
            return iter(later)
        get_logger(__name__).warning(
            f"skip_first_batches reads {skipped} batches to skip them: {type(self._original.dataset).__name__} has no skip(n) to seek with"
        )
        return islice(iter(self._original), skipped, None)

    def __len__(self) -> int:
        return max(0, len(self._original) - self._skipped)
