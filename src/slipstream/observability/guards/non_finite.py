"""Detect NaN and infinity in losses and gradients; check updates for `on_nan="skip"` and `"raise"`.

Every rank decides alike without communication, because averaged gradients are equal everywhere. To name the rank where a NaN began, each
rank also looks at its own part in the DDP buckets before they are reduced; the ranks exchange what they saw only for a bad update. The
first non-finite gradient in backward order is reported, since every gradient below it is non-finite as well. Without gradient averaging
(one process, `no_sync`, LocalSGD) each rank decides for itself. The fp16 loss scaler skips overflowing updates by itself; only a long
streak of skipped updates is a finding.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slipstream.devices.late_read import beside_queue
from slipstream.distributed.pytree import local_part
from slipstream.errors import ConfigError, DistributedOperationException, MismatchError
from slipstream.observability.guards.findings import FindingReporter, GuardFinding, NonFiniteError

if TYPE_CHECKING:
    from slipstream.training.optimizer import AcceleratedOptimizer, OptimizerLink
    from slipstream.training.stepper import PreparedModel

__all__ = [
    "BackwardOrder", "SKIP_STREAK", "UpdateGuard", "all_finite", "classify_non_finite", "find_non_finite", "iter_non_finite",
    "make_scaler_finding", "to_floats",
]


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether every entry of these is finite. Waits for the device.

    >>> all_finite([torch.ones(2), torch.zeros(0)]), all_finite([torch.tensor([1.0, float("nan")])]), all_finite([torch.full((2,), 3e38)])
    (True, False, True)
    """
    dense = [tensor for tensor in map(_local_entries, tensors) if tensor.numel()]
    if not dense:
        return True
    # torch internals: `_foreach_norm` is one kernel for all tensors, as clip_grad_norm_ uses it. torch 2.13; test_guard_non_finite.py.
    norms = torch._foreach_norm(dense)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = tuple(norm.to(dense[0].device, torch.float64) for norm in norms)
    # a sum of squares overflows long before an entry does: then the entries themselves are looked at
    return bool(torch.stack(list(norms)).isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in dense)


def find_non_finite(named: Iterable[tuple[str, torch.Tensor | None]]) -> tuple[str, str] | None:
    """Return the first name whose tensor is not finite, and "nan" or "infinite".

    >>> find_non_finite([("weight", torch.ones(1)), ("bias", torch.tensor([float("inf")]))])
    ('bias', 'infinite')
    """
    return next(iter_non_finite(named), None)


def iter_non_finite(named: Iterable[tuple[str, torch.Tensor | None]]) -> Iterator[tuple[str, str]]:
    """Yield each name whose tensor is not finite, with "nan" or "infinite". A device is asked once for all of its tensors.

    >>> [name for name, _ in iter_non_finite([("weight", torch.tensor([float("nan")])), ("bias", torch.ones(1)), ("none", None)])]
    ['weight']
    """
    entries = [(name, _local_entries(tensor)) for name, tensor in named if tensor is not None]
    on_device = [(name, tensor) for name, tensor in entries if not tensor.is_cpu]
    words = iter(list(map(_word_of, to_floats(_largest([tensor for _, tensor in on_device])))) if on_device else ())
    for name, tensor in entries:
        word = classify_non_finite(tensor) if tensor.is_cpu else next(words)
        if word:
            yield name, word


def classify_non_finite(tensor: torch.Tensor) -> str:
    """"nan" or "infinite" for a tensor that is so somewhere, else "".

    >>> classify_non_finite(torch.tensor([float("nan"), float("inf")])), classify_non_finite(torch.ones(1))
    ('nan', '')
    """
    entries = _local_entries(tensor)
    if bool(entries.isfinite().all()):
        return ""
    return "nan" if bool(entries.isnan().any()) else "infinite"


def to_floats(values: Sequence[Any], *, passed: bool = False) -> list[float]:
    """Return tensors, or numbers, as numbers: the mean of one with several values. Those on a device are fetched together.

    `passed`: the device has computed them, so reading them does not wait for what is queued there.

    >>> to_floats([torch.tensor(1.0), 2.5, torch.tensor([1.0, 2.0])])
    [1.0, 2.5, 1.5]
    """
    numbers = [math.nan if isinstance(value, torch.Tensor) else float(value) for value in values]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            alike.setdefault((value.device, value.dtype), []).append(place)
    for (device, _), places in alike.items():
        with beside_queue(device) if passed else nullcontext():
            found = torch.stack([values[place].mean() if values[place].ndim else values[place] for place in places]).tolist()
        for place, number in zip(places, found, strict=True):
            numbers[place] = number
    return numbers


class BackwardOrder:
    """Records the order of a model's gradients in its first backward pass.

    It holds names alone, so that it keeps no model alive.

    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    >>> order = BackwardOrder(model)
    >>> model(torch.ones(1)).backward()
    >>> [name for name, _ in order.named(model)]
    ['1.weight', '0.weight']
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._came: dict[str, int] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_record_order, self._came, name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]

    def end(self) -> None:
        """Remove the hooks once the order is known."""
        if self._handles and self._came:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def named(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters, the one nearest to the loss first; those that had no gradient last."""
        return sorted(reversed(list(model.named_parameters())), key=lambda pair: self._came.get(pair[0], math.inf))


def _record_order(came: dict[str, int], name: str, parameter: torch.Tensor) -> None:
    came.setdefault(name, len(came))


def _local_entries(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_part(tensor.detach())
    # torch internals: `_values` of an uncoalesced sparse gradient has no public name. torch 2.13; test_sparse_gradients notices a change.
    return tensor if tensor.layout == torch.strided else tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def _largest(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the largest absolute entry of each, NaN where one is. Waits for no device."""
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    # torch internals: see `all_finite`. Unlike a sum of squares, the largest entry does not overflow.
    return list(torch._foreach_norm(filled, ord=math.inf))


def _word_of(largest: float) -> str:
    return "" if math.isfinite(largest) else "nan" if math.isnan(largest) else "infinite"


SKIP_STREAK = 20
"""Consecutive updates that fp16 skips before it is a finding: the scale has fallen to a millionth by then."""
_REMEDY = (
    "lower the learning rate, clip (accelerator.clip_grad_norm_), and look at the batch and at divisions, logarithms and roots in the "
    "loss; `with torch.autograd.set_detect_anomaly(True):` around forward and backward names the operation"
)

_BucketFindings = tuple[list[int], Any]
"""The identities of parameters of a bucket, and what was seen: a word for each, or their norms, still on the device."""


class UpdateGuard:
    """Checks gradients before each update."""

    def __init__(
        self,
        mode: str,
        reporter: FindingReporter,
        *,
        rank: int = 0,
        averages: bool = False,
        exchange: Callable[..., list[Any]],
        step: Callable[[], int | None],
        loss: Callable[[], float | None],
    ) -> None:
        self._raises = mode == "raise"
        self._reporter = reporter
        self._rank = rank
        self._averages = averages
        self._exchange = exchange
        """Gathers a value of every rank; all ranks have to call it. The reason is shown if some do not."""
        self._step = step
        self._loss = loss
        self._seen: deque[_BucketFindings] = deque(maxlen=4096)
        self._clipped: tuple[list[str], Sequence[torch.Tensor]] | None = None
        """The names of gradients before clipping, the one nearest to the loss first, and the largest entry of each, on their devices."""
        self._orders: weakref.WeakKeyDictionary[torch.nn.Module, BackwardOrder] = weakref.WeakKeyDictionary()
        self._streaks: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = weakref.WeakKeyDictionary()
        self.skipped = 0
        """How many updates were skipped."""

    def begin(self, model: torch.nn.Module) -> None:
        """Record the order of a model's gradients in its first backward pass."""
        if model not in self._orders:
            self._orders[model] = BackwardOrder(model)

    # -- while gradients are made ---------------------------------------------------------------------------------

    def look_at_bucket(self, bucket: Any) -> None:
        """Check this rank's own gradients before they are averaged. Does not wait for the device."""
        buffer = bucket.buffer()
        if buffer.is_cpu and all_finite([buffer]):
            return
        # torch internals: see `_local_entries`
        parts = bucket.gradients() if buffer.layout == torch.strided else [buffer._values()]  # a sparse one is alone
        seen = [classify_non_finite(part) for part in parts] if buffer.is_cpu else torch.stack(_largest(parts))
        self._seen.append(([id(parameter) for parameter in bucket.parameters()], seen))

    def before_clipping(self, models: Sequence[PreparedModel]) -> None:
        """Keep what tells the first non-finite gradient, since clipping by a NaN norm makes every gradient NaN. Waits for no device."""
        self._clipped = None
        if self._averaged(models):
            return
        found = [(name, parameter.grad) for model in models for name, parameter in self._named(model) if parameter.grad is not None]
        parts = [(name, entries) for name, gradient in found if (entries := _local_entries(gradient)).numel()]  # not called in fp16
        if all(entries.is_cpu for _, entries in parts):
            if not all_finite([entries for _, entries in parts]):
                self._clipped = [name for name, _ in parts], [_largest([entries])[0] for _, entries in parts]
        else:
            self._clipped = [name for name, _ in parts], _largest([entries for _, entries in parts])

    # -- before an update -----------------------------------------------------------------------------------------

    def refuses(self, optimizer: AcceleratedOptimizer, linked: OptimizerLink, closure: Any) -> bool:
        """Return whether to skip this update; with `on_nan="raise"`, raise an error instead."""
        if closure is not None:
            raise ConfigError(
                f"{type(linked.optimizer).__name__}.step(closure) with on_nan={'raise' if self._raises else 'skip'!r}: the closure "
                "computes gradients within the step, where they cannot be checked before. Write on_nan='warn', or take an optimizer "
                "without one."
            )
        if linked.scales:
            self._count_streak(optimizer)
            return False
        models = linked.models
        groups = linked.optimizer.param_groups
        gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
        finite = all_finite(gradients)
        sharded = any(type(gradient) is not torch.Tensor and hasattr(gradient, "to_local") for gradient in gradients)
        if sharded:
            finite = all(self._exchange(finite))  # each rank has seen its own part alone
        if finite:
            self._forget(models)
            for model in models:
                if (order := self._orders.get(model.original)) is not None:
                    order.end()
            return False
        finding = self._trace(models, linked.updates + self.skipped, alone=linked.stepper.joined, sharded=sharded)
        self._forget(models)
        self.skipped += 1
        if self._raises:
            self._reporter.record(finding, shared=self._averaged(models))
            raise NonFiniteError(f"{finding} on_nan='skip' leaves such updates out.")
        self._reporter.report(finding, shared=self._averaged(models))
        return True

    def _trace(self, models: Sequence[PreparedModel], tried: int, alone: bool, sharded: bool) -> GuardFinding:
        averaged = self._averaged(models)
        now = self._first_before_clipping() or self._first(models)
        own = self._own_part(models) if averaged and not sharded else now
        loss = self._loss()
        report = (self._rank, own, None if loss is None else float(loss))
        step = self._step()
        step = tried if step is None else step
        reports = self._ask(report, step, now) if averaged and not alone else [report]
        culprits = [(rank, found, loss) for rank, found, loss in reports if found is not None]
        done = "" if self._raises else "; this update is left out, with its optimizer and scheduler as they were"
        if not culprits and alone:
            text = f"the gradient of another rank is not finite (inside of join_uneven_inputs ranks are not asked which){done}"
            return GuardFinding("nan", step, None, text, _REMEDY)
        if not culprits:
            text = f"gradients are not finite after averaging, although those of every rank are: they overflow when they are added up{done}"
            return GuardFinding("nan", step, None, text, _REMEDY)
        reasons = [
            f"the gradient of {name} is {word}" + (f" on rank {rank}" if averaged else "") + ("" if loss is None else f" (loss {loss:.4g})")
            for rank, (name, word), loss in culprits
        ]
        rank, (name, _), _ = culprits[0]
        text = f"{', '.join(reasons[:4])}{', ...' if len(reasons) > 4 else ''}: the first in backward{done}"
        return GuardFinding("nan", step, rank, text, _REMEDY, {"parameter": name, "ranks": [rank for rank, _, _ in culprits]})

    def _ask(self, report: Any, step: int, now: tuple[str, str] | None) -> list[Any]:
        """Return the reports of all ranks. If others found nothing and do not report, this rank's own finding is the error."""
        what = "gradients are not finite" if now is None else f"the gradient of {now[0]} is {now[1]}"
        try:
            return self._exchange(report, f"step {step}: {what} on rank {self._rank}")
        except DistributedOperationException as error:
            why, remedy = "and the other ranks could not be asked where it began", _REMEDY
            if isinstance(error, MismatchError):
                why = "but not on other ranks, which continue: it was changed on some ranks only, after backward had averaged it"
                remedy = "change gradients on every rank alike, or before they are averaged (in a hook of the parameter)"
            finding = GuardFinding("nan", step, self._rank, f"{what} on rank {self._rank}, {why}", remedy, {"ranks": [self._rank]})
            self._reporter.record(finding)
            raise NonFiniteError(f"{finding}\n{error}") from None

    def _averaged(self, models: Sequence[PreparedModel]) -> bool:
        """Return whether gradients of these were averaged over all ranks, all of which are here."""
        return self._averages and all(getattr(model.prepared, "require_backward_grad_sync", True) for model in models)

    def _first(self, models: Sequence[PreparedModel]) -> tuple[str, str] | None:
        return find_non_finite((name, parameter.grad) for model in models for name, parameter in self._named(model))

    def _first_before_clipping(self) -> tuple[str, str] | None:
        """Return the first gradient that was not finite before clipping, by what was kept then."""
        names, largest = self._clipped or ((), ())
        return next(((name, word) for name, value in zip(names, to_floats(largest), strict=True) if (word := _word_of(value))), None)

    def _own_part(self, models: Sequence[PreparedModel]) -> tuple[str, str] | None:
        """Return the first of this rank's own gradients that was not finite, by what was seen in the buckets, the earliest pass first."""
        named = [(name, id(parameter)) for model in models for name, parameter in self._named(model)]
        for identities, seen in self._seen:
            words = seen if isinstance(seen, list) else list(map(_word_of, seen.tolist()))
            bad = {identity: word for identity, word in zip(identities, words, strict=True) if word}
            for name, identity in named:
                if identity in bad:
                    return name, bad[identity]
        return None

    def _named(self, model: PreparedModel) -> list[tuple[str, torch.nn.Parameter]]:
        order = self._orders.get(model.original)
        return order.named(model.original) if order is not None else list(reversed(list(model.original.named_parameters())))

    def _forget(self, models: Sequence[PreparedModel]) -> None:
        self._clipped = None
        if self._seen:
            owned = frozenset().union(*(model.owned for model in models))
            kept = [bucket for bucket in self._seen if not owned.intersection(bucket[0])]
            self._seen.clear()
            self._seen.extend(kept)

    def _count_streak(self, optimizer: AcceleratedOptimizer) -> None:
        streak = self._streaks.get(optimizer, 0) + 1 if optimizer.step_was_skipped else 0
        self._streaks[optimizer] = streak
        if streak and streak % SKIP_STREAK == 0:
            finding = make_scaler_finding(self._step(), streak)
            if self._raises:
                raise NonFiniteError(str(finding))
            self._reporter.report(finding, shared=self._averages)


def make_scaler_finding(step: int | None, streak: int) -> GuardFinding:
    """Return the finding for a loss scaler that skips update after update."""
    text = f"fp16 has left out {streak} updates in a row, so it is not the loss scale that makes gradients overflow"
    return GuardFinding("nan", step, None, text, f"{_REMEDY}; mixed_precision='bf16' has the range of float32")
