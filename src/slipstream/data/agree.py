"""Whether the ranks are about to read the same pass over the same data: one small guarded call before the first batch of a pass.

What it promises: ranks that are in different epochs (one of them read a batch alone), whose samplers draw different positions, or whose
data was shared out before, do not go on to read some samples twice and others never: every rank raises an error that says which it is.
Samples that differ although everything else agrees may be meant (random data for a test), and so may passes that begin at different
lines: these are warnings of the main process, one line each, once in a run.

What it never does: run for a single process or for a loader whose place among the processes was given by hand; read samples of a dataset
of the user's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from slipstream.comm.deal import tell
from slipstream.comm.sites import is_of_the_user, spell
from slipstream.data.fingerprint import fingerprint
from slipstream.data.plan import Order
from slipstream.errors import MismatchError
from slipstream.logging import get_logger
from slipstream.runtime.current import current_or_none

if TYPE_CHECKING:
    from slipstream.data.loader import PreparedLoader

__all__ = ["Opened", "agreed_order", "selection_and_samples"]

_PLAIN = (str, int, float, bool, bytes, complex, type(None))
_MOST_PARTS = 100
"""Of a dataset that is made of more parts than this, the first ones are looked at."""


Opened = tuple["Order | Iterator[Any]", "Sequence[Any] | None"]
"""An order, and its first positions if it stands further on already."""


def agreed_order(loader: PreparedLoader, epoch: int, start: int, make: Callable[[], Opened]) -> Opened:
    """The order of a pass that begins (and its head, if it stands further on), after all ranks found that theirs is the same."""
    place = loader.place
    if not place.compares or place.world_size == 1:
        return make()
    order: Any = None
    head: Any = None
    found: Any
    first_time = loader.compared is None
    try:
        order, head = make()
        length, positions, order = _beginning(order, start, max(1, loader._stride))
        if loader.compared is None:
            loader.compared = selection_and_samples(loader.original.dataset)
        found = (epoch, start, length, positions, *loader.compared, _line())
    except Exception as error:  # whatever a sampler raises: every rank raises
        found = error
    name = type(loader.original.dataset).__name__
    told = tell(place.channel(), place.limits, found, operation="begin of a pass", condition=f"over a loader of {name}")
    for column, complaint in enumerate(_COMPLAINTS):
        values = [one[column] for one in told]
        if len(set(values)) > 1:
            spelled = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values) if not isinstance(value, bytes))
            raise MismatchError(complaint.format(name=name, values=spelled, rank=place.rank))
    lines = [one[-1] for one in told]
    if first_time and len({one[-2] for one in told}) > 1:
        _warn_once("samples", _SAMPLES.format(name=name), lines[0])
    if len(set(lines)) > 1:
        spelled = ", ".join(f"rank {rank} at {line}" for rank, line in enumerate(lines))
        _warn_once("lines", _LINES.format(name=name, lines=spelled), lines[0])
    return order, head


def _warn_once(kind: str, text: str, line: str) -> None:
    """One line on the main process, with the level and the user's line before it, as Python's own warnings have them."""
    runtime = current_or_none()
    if runtime is None or kind not in runtime.told:
        get_logger(__name__).warning(f"WARNING: {line}: {text}")
    if runtime is not None:
        runtime.told.add(kind)


def _line() -> str:
    """The innermost line of the user's program: not that of a progress bar around the loader."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_the_user(frame.f_code.co_filename):
        frame = frame.f_back
    return "unknown place" if frame is None else spell(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _beginning(order: Order | Iterator[Any], start: int, block: int) -> tuple[int, bytes, Order | Iterator[Any]]:
    """How long an order is (-1 for not known), a digest of its first global batch, and the order."""
    if isinstance(order, Iterator):
        first = list(islice(order, block))
        return -1, _digest(first), chain(first, order)
    return len(order), _digest(order.take(start, start + block)), order


def _digest(values: Any) -> bytes:
    if isinstance(values, (list, range)) and (isinstance(values, range) or all(type(one) is int for one in values)):
        values = numpy.asarray(values)
    return fingerprint([values])


def selection_and_samples(dataset: Any) -> tuple[bytes, bytes]:
    """Digests of which samples were selected of the data (`Subset`), and of the first and last of those that can be read without harm.

    >>> whole, part = selection_and_samples(range(8)), selection_and_samples(Subset(range(8), range(0, 8, 2)))
    >>> whole[0] == part[0], whole[0] == selection_and_samples(list(range(8)))[0]
    (False, True)
    """
    selected: list[Any] = []
    samples: list[Any] = []
    _look(dataset, selected, samples)
    return fingerprint(selected), fingerprint(samples)


def _look(dataset: Any, selected: list[Any], samples: list[Any]) -> None:
    if isinstance(dataset, Subset):
        selected.append(_digest(dataset.indices))
        _look(dataset.dataset, selected, samples)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets[:_MOST_PARTS]:
            _look(part, selected, samples)
    elif type(dataset) is TensorDataset:
        samples.extend(one[place] for one in dataset.tensors for place in (0, -1) if len(one))
    elif type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "with_format") and len(dataset):
        stored = dataset.with_format(None)  # what is stored, without transforms
        samples.extend(_plain(stored[place]) for place in (0, len(dataset) - 1))
    elif type(dataset) in (list, tuple, range, numpy.ndarray, torch.Tensor) and len(dataset):
        samples.extend(_plain(dataset[place]) for place in (0, -1))


def _plain(value: Any) -> Any:
    """Data that is the same in two processes if it was made alike; of anything else, its kind."""
    if type(value) in (torch.Tensor, numpy.ndarray) or isinstance(value, (*_PLAIN, numpy.generic)):
        return value
    if type(value) is dict:
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if type(value) in (list, tuple) else type(value).__qualname__


_COMPLAINTS = (
    "the processes begin different epochs of a loader of {name} ({values}), so some samples would be read twice and others never. A "
    "prepared loader is read by all processes together: one of them has read it alone (as in `if accelerator.is_main_process: "
    "next(iter(loader))`; look at a batch on all of them, or of the loader that was not prepared), or set_epoch was called "
    "with different numbers. (raised on rank {rank})",
    "the processes begin a loader of {name} at different positions ({values}): skip as many batches on each, or load the same saved "
    "position. (raised on rank {rank})",
    "the processes have different numbers of samples in a loader of {name} ({values}): the data was shared out already, or each selected "
    "its own. prepare shares it out itself: give every process the whole dataset, and the same sampler. (raised on rank {rank})",
    "the samplers of a loader of {name} draw different positions on the processes, so some samples would be read twice and others never. "
    "prepare shares the data out itself, and needs the same order everywhere: a sampler that takes a part for its process has to give all "
    "positions, and one with random numbers of its own has to draw from a `generator` attribute, from Python's, numpy's or torch's global "
    "state, or from a seed that is the same on every process. (raised on rank {rank})",
    "the processes selected different samples of the data for a loader of {name} (a Subset with other indices on each), so prepare, which "
    "shares the data out itself, would give each a part of its part. Leave out a selection like indices[rank::world_size]; call set_seed, "
    "or give a seeded generator, before random_split. (raised on rank {rank})",
)
"""What differs, in the order in which it is told."""

_LINES = (
    "processes begin a pass over a loader of {name} at different lines ({lines}). If one of them reads a batch alone, as under "
    "`if accelerator.is_main_process:`, it is ahead of the others from then on: read the loader on all of them."
)

_SAMPLES = (
    "processes hold different samples in {name}. Give every process the whole data (prepare shares it out), and call set_seed before you "
    "draw data at random."
)
