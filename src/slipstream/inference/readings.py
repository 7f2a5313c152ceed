"""Which tensors of a call have a row for each entry of the batch, where their sizes alone do not say so.

A mask of shape (T, T) looks like one with a row per entry when the batch happens to have T entries. So where several tensors have as many
rows as the batch, the model runs on tensors without memory, with another number of rows in some of them: a tensor that may keep its rows
while those of the others change has none of the batch's, and goes to every piece whole. `check` then holds the output for a part of the
example against the same rows of the output for all of it, with real weights: what they do not agree on cannot be computed in pieces,
and that is an error. Nothing here talks to another process, and no model is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from slipstream.comm import tree
from slipstream.errors import ConfigError
from slipstream.inference.batches import Batch
from slipstream.inference.tracing import fits
from slipstream.logging import get_logger

__all__ = ["check", "settled"]

_ALL_TRIED = 5
"""Of so many tensors every choice is tried; of more, all but one or two."""
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far outputs may be apart, of the whole; types of fewer bits may 0.1."""


def settled(model: torch.nn.Module, batch: Batch, device: torch.device) -> Batch:
    """The batch, with those tensors whole that have no row per entry although their first dimension is that of the batch.

    >>> batch = Batch((torch.ones(4, 2), torch.ones(4, 2)), None)
    >>> settled(torch.nn.Bilinear(2, 2, 1), batch, torch.device("cpu")).is_cut
    (True, True)
    """
    if sum(batch.is_cut) < 2:
        return batch
    rows = _other_number(model, batch)
    for reading in _readings(batch):
        tried = batch.read_as(reading)
        if fits(model, tried, rows, device):
            whole = [name for name, was, cut in zip(batch.labels(model), batch.is_cut, reading, strict=True) if was and not cut]
            if whole:
                get_logger(__name__).warning_once(
                    f"{' and '.join(whole)}: the first dimension is {batch.rows}, as that of the batch, but has no entry per row of it: "
                    f"{'it goes' if len(whole) == 1 else 'they go'} to every piece of the batch whole"
                )
            return tried
    return batch  # none that is better: the tracer says why, or `check` does


def _readings(batch: Batch) -> Iterator[tuple[bool, ...]]:
    """Which of the tensors may be cut: fewer before more, as one that can stay whole does; of a single row all, as nothing is lost."""
    places = [place for place, cut in enumerate(batch.is_cut) if cut]
    count = len(places)
    sizes = list(range(1, count + 1)) if count <= _ALL_TRIED else [1, count - 2, count - 1, count]
    for size in reversed(sizes) if batch.rows == 1 else sizes:
        for chosen in combinations(places, size):
            yield tuple(place in chosen for place in range(len(batch.is_cut)))


def _other_number(model: torch.nn.Module, batch: Batch) -> int:
    """A number of rows above the batch's that is no size of anything here, nor a multiple of one."""
    sizes = {size for tensor in (*batch.tensors(), *model.parameters(), *model.buffers()) for size in tensor.shape if size > 1}
    number = batch.rows + 1
    while number < 3 or any(number % size == 0 for size in sizes):
        number += 1
    return number


# -- with values ------------------------------------------------------------------------------------------------------


def check(model: torch.nn.Module, batch: Batch) -> None:
    """Refuses a model that gives something else for the last rows of a batch than it gives for them in the whole batch.

    A model of which a part has no memory, or that is on several devices, is not run.
    """
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors}
    if batch.rows < 2 or len(devices) != 1 or devices == {torch.device("meta")}:
        return
    here = tensors[0].device
    given = [_told_apart(tensor.to(here)) if cut else tensor.to(here) for tensor, cut in zip(batch.tensors(), batch.is_cut, strict=True)]
    part = [tensor[-(batch.rows // 2) :] if cut else tensor for tensor, cut in zip(given, batch.is_cut, strict=True)]
    whole, rows = _outputs(model, batch, given), batch.rows // 2
    apart = _apart([one[-rows:] for one in whole], _outputs(model, batch, part))
    if apart is None or _apart(whole, _outputs(model, batch, given)) is not None:
        return  # the same; or a model that gives something else each time
    names = batch.labels(model)
    cut = [name for name, is_cut in zip(names, batch.is_cut, strict=True) if is_cut]
    others = [name for name, is_cut in zip(names, batch.is_cut, strict=True) if not is_cut]
    raise ConfigError(
        f"{type(model).__name__} gives other numbers for a part of the example than for all of it ({apart}), so a batch cannot go through "
        f"its stages in pieces. Taken as rows of the batch: {', '.join(cut)} ({batch.rows} of them); as whole: "
        f"{', '.join(others) or 'nothing'}. If that is not so, give an example whose number of rows is no other size in it; if it is, the "
        "model mixes rows of its first dimension: call it with a batch dimension in front."
    )


def _told_apart(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that are all the same, as in an example of zeros, hide that they are mixed: they get something to differ in."""
    if not tensor.is_floating_point() or not bool((tensor == tensor[:1]).all()):
        return tensor
    steps = torch.linspace(0.0, 0.5, tensor.shape[0], dtype=tensor.dtype, device=tensor.device)
    return tensor + steps.view(-1, *[1] * (tensor.dim() - 1))


def _outputs(model: torch.nn.Module, batch: Batch, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = batch.build()([tensor.clone() for tensor in tensors])
    with torch.no_grad():
        output: Any = model(*args, **kwargs)
    return [leaf for leaf in tree.flatten(output) if isinstance(leaf, torch.Tensor)]


def _apart(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> str | None:
    """How two outputs differ by more than rounding; None if they do not."""
    for one, other in zip(whole, part, strict=True):
        if one.shape != other.shape:
            return f"shape {tuple(other.shape)} where {tuple(one.shape)} was expected"
        if not one.is_floating_point() or not one.numel():
            continue
        wide = one.double().nan_to_num(0.0, 0.0, 0.0)
        difference = float((wide - other.double().nan_to_num(0.0, 0.0, 0.0)).abs().max())
        if difference > _CLOSE.get(one.dtype, 0.1) * max(float(wide.abs().max()), 1e-12):
            return f"apart by {difference:.3g}"
    return None
