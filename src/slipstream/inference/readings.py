"""Which tensors of a call have a row for each entry of the batch, where their sizes alone do not say so.

A mask of shape (T, T) looks like one with a row per entry when the batch happens to have T entries. So where several tensors have as many
rows as the batch, the model runs on tensors without memory, with another number of rows in all or some of them: readings under which it
does not run are wrong. Where several are left, they are tried with real weights, on a part of the example: what it gives has to be the
same rows of the output for all of it. `check` asks that of every model: what does not agree cannot be computed in pieces, and is an error.
Nothing here talks to another process, and no model is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from slipstream.comm import tree
from slipstream.errors import ConfigError
from slipstream.inference.batches import Batch
from slipstream.inference.tracing import misfit
from slipstream.logging import get_logger

__all__ = ["check", "settled"]

_ALL_TRIED = 5
"""Of so many tensors every choice is tried; of more, all but one or two."""
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far outputs may be apart, as a part of the largest number, by the coarsest type that takes part; others than these may 0.1."""


def settled(model: torch.nn.Module, batch: Batch, device: torch.device, *, silent: bool = False) -> Batch:
    """The batch, with those tensors whole that have no row per entry although their first dimension is that of the batch.

    >>> batch = Batch((torch.ones(4, 2), torch.ones(4, 2)), None)
    >>> settled(torch.nn.Bilinear(2, 2, 1), batch, torch.device("cpu")).is_cut
    (True, True)
    """
    if sum(batch.is_cut) < 2:
        return batch
    rows = _other_number(model, batch)
    fitting = _left(model, map(batch.read_as, _readings(batch)), lambda tried: misfit(model, tried, rows, device))
    if not fitting:
        return batch  # none that is better: the tracer says why, or `check` does
    if len(fitting) > 1 and not _can_run(model):
        ways = zip(*(one.is_cut for one in fitting), strict=True)
        names = [name for name, cut in zip(batch.labels(model), ways, strict=True) if len(set(cut)) > 1]
        raise ConfigError(
            f"it cannot be told whether {' and '.join(names)} has a row for each of the {batch.rows} entries of the batch: the model runs "
            "either way, and the weights that would tell are with other processes. Prepare it with an example that has this argument."
        )
    agreeing = _left(model, fitting, lambda tried: _disagrees(model, tried)) if len(fitting) > 1 else fitting
    chosen = (agreeing or fitting)[0]  # where none agrees, `check` says how
    whole = [name for name, was, cut in zip(batch.labels(model), batch.is_cut, chosen.is_cut, strict=True) if was and not cut]
    if whole and not silent:
        get_logger(__name__).warning(
            f"{' and '.join(whole)}: the first dimension is {batch.rows}, as that of the batch, but has no entry per row of it: "
            f"{'it goes' if len(whole) == 1 else 'they go'} to every piece of the batch whole"
        )
    return chosen


def _left(model: torch.nn.Module, tried: Iterable[Batch], objection: Callable[[Batch], str | None]) -> list[Batch]:
    """The readings that nothing speaks against; what speaks against the others is logged for those who want to know."""
    left = []
    for one in tried:
        why = objection(one)
        if why is None:
            left.append(one)
        else:
            cut = [name for name, is_cut in zip(one.labels(model), one.is_cut, strict=True) if is_cut]
            get_logger(__name__).debug("not read with rows in %s alone: %s", ", ".join(cut), why)
    return left


def _readings(batch: Batch) -> Iterator[tuple[bool, ...]]:
    """Which of the tensors may be cut: more before fewer."""
    places = [place for place, cut in enumerate(batch.is_cut) if cut]
    count = len(places)
    for size in range(count, 0, -1) if count <= _ALL_TRIED else (count, count - 1, count - 2, 1):
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
    apart = _difference(model, batch) if _can_run(model) else None
    if apart is None:
        return
    names = batch.labels(model)
    cut = [name for name, is_cut in zip(names, batch.is_cut, strict=True) if is_cut]
    others = [name for name, is_cut in zip(names, batch.is_cut, strict=True) if not is_cut]
    raise ConfigError(
        f"{type(model).__name__} gives other numbers for a part of the example than for all of it ({apart}), so a batch cannot go through "
        f"its stages in pieces. Taken as rows of the batch: {', '.join(cut)} ({batch.rows} of them); as whole: "
        f"{', '.join(others) or 'nothing'}. If that is not so, give an example whose number of rows is no other size in it; if it is, the "
        "model mixes rows of its first dimension: call it with a batch dimension in front."
    )


def _can_run(model: torch.nn.Module) -> bool:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return len(devices) == 1 and devices != {torch.device("meta")}


def _disagrees(model: torch.nn.Module, batch: Batch) -> str | None:
    """Why this is not how the batch is to be read."""
    try:
        return _difference(model, batch)
    except Exception as error:  # of any kind: a part that does not run is no part
        return f"{type(error).__name__}: {error}"


def _difference(model: torch.nn.Module, batch: Batch) -> str | None:
    """How the output for the last half of the rows differs from these rows of the output for all; None if it does not."""
    tensors = [*model.parameters(), *model.buffers()]
    here, rows = tensors[0].device, batch.rows // 2
    if not rows:
        return None
    given = [_told_apart(tensor.to(here)) if cut else tensor.to(here) for tensor, cut in zip(batch.tensors(), batch.is_cut, strict=True)]
    part = [tensor[-rows:] if cut else tensor for tensor, cut in zip(given, batch.is_cut, strict=True)]
    whole = _outputs(model, batch, given)
    types = {one.dtype for one in (*tensors, *whole) if one.is_floating_point() or one.dtype is torch.int8}
    close = 0.1 if torch.is_autocast_enabled(here.type) else max((_CLOSE.get(dtype, 0.1) for dtype in types), default=0.1)
    apart = _apart([one[-rows:] for one in whole], _outputs(model, batch, part), close)
    if apart is None or _apart(whole, _outputs(model, batch, given), close) is not None:
        return None  # the same; or a model that gives something else each time
    return apart


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


def _apart(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], close: float) -> str | None:
    """How two outputs differ by more than rounding; None if they do not."""
    for one, other in zip(whole, part, strict=True):
        if one.shape != other.shape:
            return f"shape {tuple(other.shape)} where {tuple(one.shape)} was expected"
        if not one.is_floating_point() or not one.numel():
            continue
        wide = one.double().nan_to_num(0.0, 0.0, 0.0)
        difference = float((wide - other.double().nan_to_num(0.0, 0.0, 0.0)).abs().max())
        if difference > close * max(float(wide.abs().max()), 1e-12):
            return f"apart by {difference:.3g}"
    return None
