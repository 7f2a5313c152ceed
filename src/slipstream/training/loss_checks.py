"""Checks of the losses that a script passes to `backward`: which prepared models a loss reaches, and warnings, each given once.

`find_reached_models` walks the autograd graph down to the parameters. It is called only where several models are trained and it matters,
takes about a microsecond per node, and stops when every model was found. It returns None where reentrant activation checkpointing hides
the graph.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.distributed.call_site import call_site, is_package_frame
from slipstream.distributed.gradient_state import GradientState, MicroBatch
from slipstream.training.accumulation import Accumulation

__all__ = [
    "NOT_PREPARED_MESSAGE", "check_weight", "find_reached_models", "is_on_device", "read_weights", "warn_if_divided",
    "warn_if_low_precision", "warn_if_read_ahead", "warn_if_share_unknown", "warn_if_unprepared", "warn_of_late_pieces",
    "warn_outside_accumulate",
]


_LOW_PRECISION = (torch.float16, torch.bfloat16)

NOT_PREPARED_MESSAGE = (
    "backward at {site} on several processes, and no model was prepared by this Accelerator: gradients would not be averaged, and every "
    "process would train a model of its own. Write `model, optimizer = accelerator.prepare(model, optimizer)` before the loop; if you "
    "average gradients yourself, call loss.backward()."
)


def _warn_once(warned: set[str], key: str, text: str) -> None:
    """Warn at the user's line, once for each key."""
    if key in warned:
        return
    warned.add(key)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_package_frame(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def warn_if_divided(warned: set[str], loss: torch.Tensor, steps: float) -> None:
    """Warn about a loss that was already divided by the number of batches. Only the first loss is checked."""
    if _is_divided_by(loss, steps):
        _warn_once(
            warned,
            "division",
            f"the loss at {call_site()} was divided by {steps:g}. If that is the number of batches per update: backward divides by it too, "
            f"so the gradient is {steps:g} times too small; pass the loss as it is. If it is something else (a batch size), all is well.",
        )
    warned.add("division")


def warn_outside_accumulate(warned: set[str], steps: int) -> None:
    """Warn about a backward pass outside of `accumulate`."""
    _warn_once(
        warned,
        "outside",
        f"backward at {call_site()} is outside of `with accelerator.accumulate(model):`, so gradients of {steps} batches are "
        "asked for, but where an update ends is not known here: each loss counts in full, and every optimizer.step() acts. Put the "
        f"batch in such a block, or leave out gradient_accumulation_steps={steps} and divide by it yourself. Accelerate divides by "
        f"{steps} here too: leave out a factor of {steps} that makes up for it",
    )


def warn_if_unprepared(warned: set[str], reached: list[Any] | None) -> None:
    """Warn about a loss that gives gradients to no prepared model."""
    if reached is None or reached:
        return
    _warn_once(
        warned,
        "unprepared",
        f"the loss at {call_site()} reaches no parameter of a prepared model: what it trains is not averaged over the processes, which "
        "train models of their own. Prepare the model and use what prepare gives back (or the very object that was prepared).",
    )


def warn_if_low_precision(warned: set[str], loss: torch.Tensor) -> None:
    """Warn about a loss in half precision, which has three digits."""
    if loss.dtype not in _LOW_PRECISION:
        return
    kind = str(loss.dtype).removeprefix("torch.")
    digits = torch.finfo(loss.dtype).resolution
    _warn_once(
        warned,
        "precision",
        f"the loss at {call_site()} is {kind}, a format in which numbers differ by {digits:g} of their size at least: what you log and "
        "compare moves in steps. Compute the loss from float32 (`loss_function(outputs.float(), targets)`), or call the prepared model "
        "itself, not a method or a part of it, and leave out outputs_to_fp32=False: its outputs are float32 then. Casting the loss "
        "afterwards does not bring the digits back.",
    )


def warn_of_late_pieces(warned: set[str]) -> None:
    """Warn about a micro-batch of the last batch after an update was already made with an earlier one."""
    _warn_once(
        warned,
        "pieces",
        f"the accumulate block at {call_site()} is for another micro-batch of the last batch of its loader, but the update was made "
        "with an earlier one: the number of micro-batches per batch is taken from the batch before, which does not exist or had fewer. Cut "
        "every batch into the same number, use a smaller batch_size, or use GradientAccumulationPlugin(sync_with_dataloader=False).",
    )


def warn_if_read_ahead(warned: set[str], accumulation: Accumulation, state: GradientState | None) -> None:
    """Warn about a block that cannot be matched with a batch of its loader, so that the end of an update is unknown.

    `state` is None if that was found out after the block.
    """
    if state is None or _is_unmatched(accumulation, state):
        _warn_of_reading_ahead(warned)


def warn_if_share_unknown(warned: set[str], batch: MicroBatch | None, state: GradientState) -> None:
    """Warn if training may use a batch with a different number of samples, and the batch is uncertain."""
    if batch is None:
        finished = state.metrics.finished_pass
        if finished is None or finished.worked or finished.gathered:
            return
        loader_pass = finished
    else:
        loader_pass = batch.loader_pass
        if not loader_pass.late or loader_pass.done != loader_pass.handed:
            return
    if loader_pass.batch is not None and loader_pass.batch.shares is not None:
        _warn_of_reading_ahead(warned)


def _warn_of_reading_ahead(warned: set[str]) -> None:
    _warn_once(
        warned,
        "read ahead",
        f"the work at {call_site()} cannot be tied to a batch of its loader: the loader was read ahead, and its batches were replaced by "
        "others (converted, copied) before they were worked on, or hold no tensors by which they could be recognised; or the first ones "
        "were left out. So the end of the data does not end an update, and a short last batch is not weighed by its samples. Keep the "
        "batches that the loader gives until they are worked on, convert them inside of the block or in the dataset, or read the loader "
        "batch by batch.",
    )


def _is_unmatched(accumulation: Accumulation, state: GradientState) -> bool:
    """Return whether this block seems to belong to a pass that was not trained on completely, or that ended inside a window."""
    last = accumulation.batch
    if last is not None and last.loader_pass is state.metrics.finished_pass:
        return accumulation.batches_trained < last.loader_pass.handed
    return not accumulation.closing and accumulation.passes != state.passes


def check_weight(weight: Any) -> float:
    """Return the weight of a loss as a number; raise if it is invalid."""
    number = float(weight)
    if not number >= 0.0 or number == float("inf"):
        raise ValueError(f"backward(loss, weight={weight!r}): it is the count of samples or tokens in the loss, a non-negative number")
    return number


def is_on_device(weight: Any) -> bool:
    """Return whether a weight is a single value that is not in host memory, so that reading it waits for a device."""
    return isinstance(weight, torch.Tensor) and not weight.is_cpu and weight.numel() == 1


def read_weights(weights: Sequence[torch.Tensor]) -> list[float]:
    """Return weights on devices as numbers, read with one wait for each device and dtype; raise if one is invalid.

    >>> read_weights([torch.tensor(3), torch.tensor([4])])
    [3.0, 4.0]
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, weight in enumerate(weights):
        groups.setdefault((weight.device, weight.dtype), []).append(number)
    found: dict[int, float] = {}
    for numbers in groups.values():
        values = torch.stack([weights[number].detach().reshape(()) for number in numbers]).tolist()
        found.update(zip(numbers, map(check_weight, values), strict=True))
    return [found[number] for number in range(len(weights))]


def _is_divided_by(loss: torch.Tensor, steps: float) -> bool:
    """Return whether the graph of a loss ends in a division by this number, or in a product with its inverse."""
    node: Any = loss.grad_fn
    name = node.name() if node is not None else ""
    if name not in ("DivBackward0", "MulBackward0"):
        return False
    # torch internals: the divisor that autograd saved (torch 2.13); without it there is no warning. See tests/training/test_gradients.py.
    other = getattr(node, "_saved_other", None)
    if other is None or other.numel() != 1:
        return False
    expected = steps if name == "DivBackward0" else 1.0 / steps
    return abs(float(other) - expected) < 1e-6


_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""Reentrant activation checkpointing: what the block computes is not in the graph before the backward pass."""


def find_reached_models(loss: torch.Tensor, owners: Mapping[int, Any]) -> list[Any] | None:
    """Return the owners (by identity of parameters) that a loss gives gradients to, in no order; None if the graph hides them.

    >>> weight, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> find_reached_models((weight * 2).sum(), {id(weight): "first", id(other): "second"})
    ['first']
    """
    if loss.grad_fn is None:
        return [owners[id(loss)]] if id(loss) in owners else []
    wanted = len({id(owner) for owner in owners.values()})
    found: dict[int, Any] = {}
    seen: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        if not following:
            variable = getattr(node, "variable", None)
            owner = None if variable is None else owners.get(id(variable))
            if owner is not None and id(owner) not in found:
                found[id(owner)] = owner
                if len(found) == wanted:
                    break
            continue
        if node.name() == _REENTRANT_CHECKPOINT:
            return None
        for child, _ in following:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return list(found.values())
