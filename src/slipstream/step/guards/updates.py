"""`on_nan="skip"` and `"raise"`: gradients are looked at before each update; one that is not finite is traced to its rank and parameter.

Every rank decides alike, without asking the others: averaged gradients are the same everywhere. Which rank a NaN came from cannot
be seen in an average, so each rank looks at its own part as well, in the buckets of DDP before they are reduced; what it saw is
exchanged only when an update is bad. Where gradients are not averaged (one process, `no_sync`, LocalSGD), each rank speaks and decides
for itself.

The loss scaler of fp16 leaves out updates that overflow by itself, and that is normal. Only if it leaves out many in a row, so that the
scale cannot be the reason, there is a finding.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream.errors import ConfigError, DistributedOperationException, MismatchError
from slipstream.step.guards.finding import Finding, NonFiniteError, Voice
from slipstream.step.guards.finite import BackwardOrder, all_finite, bad_word, first_bad
from slipstream.step.optimizer import AcceleratedOptimizer, Linked
from slipstream.step.prepared import PreparedModel

__all__ = ["STREAK", "Updates", "alone", "scaled_finding"]

STREAK = 20
"""How many updates in a row fp16 leaves out before it is a finding: the scale has fallen to a millionth by then."""
_REMEDY = (
    "lower the learning rate, clip (accelerator.clip_grad_norm_), and look at the batch and at divisions, logarithms and roots in the "
    "loss; `with torch.autograd.set_detect_anomaly(True):` around forward and backward names the operation"
)

_Seen = tuple[list[int], Any]
"""The identities of parameters of a bucket, and what was seen: a word for each, or their norms, still on the device."""


def _nothing() -> None:
    return None


def alone(value: Any, reason: str = "") -> list[Any]:
    """The exchange of a single process.

    >>> alone(3)
    [3]
    """
    return [value]


class Updates:
    """Looks at updates before they are made; one for each Accelerator."""

    def __init__(
        self,
        mode: str,
        voice: Voice,
        *,
        rank: int = 0,
        averages: bool = False,
        exchange: Callable[..., list[Any]] = alone,
        step: Callable[[], int | None] = _nothing,
        loss: Callable[[], float | None] = _nothing,
    ) -> None:
        self._raises = mode == "raise"
        self._voice = voice
        self._rank = rank
        self._averages = averages
        self._exchange = exchange
        """What every rank gives, on every rank, in their order; all have to call it, with a reason, which is shown if some do not."""
        self._step = step
        self._loss = loss
        self._seen: deque[_Seen] = deque(maxlen=4096)
        self._clipped: tuple[str, str] | None = None
        self._orders: weakref.WeakKeyDictionary[torch.nn.Module, BackwardOrder] = weakref.WeakKeyDictionary()
        self._streaks: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = weakref.WeakKeyDictionary()
        self.skipped = 0
        """How many updates were left out."""

    def begin(self, model: torch.nn.Module) -> None:
        """Listens to the first backward pass of a model, for the order of its parameters."""
        if model not in self._orders:
            self._orders[model] = BackwardOrder(model)

    # -- while gradients are made ---------------------------------------------------------------------------------

    def look_at_bucket(self, bucket: Any) -> None:
        """Looks at this rank's own gradients before they are averaged. Waits for no device."""
        buffer = bucket.buffer()
        if buffer.is_cpu and all_finite([buffer]):
            return
        parts = bucket.gradients() if buffer.layout == torch.strided else [buffer._values()]  # a sparse one is alone
        seen = [bad_word(one) for one in parts] if buffer.is_cpu else torch.stack(list(torch._foreach_norm(parts)))
        self._seen.append(([id(one) for one in bucket.parameters()], seen))

    def before_clipping(self, models: Sequence[PreparedModel]) -> None:
        """Clipping by a norm that is NaN makes every gradient so: what was there before is noted."""
        self._clipped = None
        if self._averaged(models):
            return
        if not all_finite([gradient for model in models for gradient in model.gradients()]):  # in fp16 nobody asks for it
            self._clipped = self._first(models)

    # -- before an update -----------------------------------------------------------------------------------------

    def refuses(self, optimizer: AcceleratedOptimizer, linked: Linked, closure: Any) -> bool:
        """Whether this update is to be left out; with `on_nan="raise"`, an error instead."""
        if closure is not None:
            raise ConfigError(
                f"{type(linked.inner).__name__}.step(closure) with on_nan={'raise' if self._raises else 'skip'!r}: the closure computes "
                "gradients within the step, where they cannot be looked at before. Write on_nan='warn', or take an optimizer without one."
            )
        if linked.scales:
            self._count_streak(optimizer)
            return False
        models = linked.models
        gradients = [one.grad for group in linked.inner.param_groups for one in group["params"] if one.grad is not None]
        finite = all_finite(gradients)
        sharded = any(type(one) is not torch.Tensor and hasattr(one, "to_local") for one in gradients)
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
            self._voice.note(finding, shared=self._averaged(models))
            raise NonFiniteError(f"{finding} on_nan='skip' leaves such updates out.")
        self._voice.say(finding, shared=self._averaged(models))
        return True

    def _trace(self, models: Sequence[PreparedModel], tried: int, alone: bool, sharded: bool) -> Finding:
        averaged = self._averaged(models)
        now = self._clipped or self._first(models)
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
            return Finding("nan", step, None, text, _REMEDY)
        if not culprits:
            text = f"gradients are not finite after averaging, although those of every rank are: they overflow when they are added up{done}"
            return Finding("nan", step, None, text, _REMEDY)
        told = [
            f"the gradient of {name} is {word}" + (f" on rank {rank}" if averaged else "") + ("" if loss is None else f" (loss {loss:.4g})")
            for rank, (name, word), loss in culprits
        ]
        rank, (name, _), _ = culprits[0]
        text = f"{', '.join(told[:4])}{', ...' if len(told) > 4 else ''}: the first in backward{done}"
        return Finding("nan", step, rank, text, _REMEDY, {"parameter": name, "ranks": [rank for rank, _, _ in culprits]})

    def _ask(self, report: Any, step: int, now: tuple[str, str] | None) -> list[Any]:
        """The reports of all ranks. Where others have found nothing they do not come to it: then this rank's own finding is the error."""
        what = "gradients are not finite" if now is None else f"the gradient of {now[0]} is {now[1]}"
        try:
            return self._exchange(report, f"step {step}: {what} on rank {self._rank}")
        except DistributedOperationException as error:
            why, remedy = "and the other ranks could not be asked where it began", _REMEDY
            if isinstance(error, MismatchError):
                why = "and other ranks go on without finding theirs so: it was changed on some ranks only, after backward had averaged it"
                remedy = "change gradients on every rank alike, or before they are averaged (in a hook of the parameter)"
            finding = Finding("nan", step, self._rank, f"{what} on rank {self._rank}, {why}", remedy, {"ranks": [self._rank]})
            self._voice.note(finding)
            raise NonFiniteError(f"{finding}\n{error}") from None

    def _averaged(self, models: Sequence[PreparedModel]) -> bool:
        """Whether gradients of these were averaged over all ranks, all of which are here."""
        return self._averages and all(getattr(model.prepared, "require_backward_grad_sync", True) for model in models)

    def _first(self, models: Sequence[PreparedModel]) -> tuple[str, str] | None:
        return first_bad((name, one.grad) for model in models for name, one in self._named(model))

    def _own_part(self, models: Sequence[PreparedModel]) -> tuple[str, str] | None:
        """The first of this rank's own gradients that was not finite, by what was seen in the buckets, the earliest pass first."""
        named = [(name, id(one)) for model in models for name, one in self._named(model)]
        for identities, seen in self._seen:
            words = seen if isinstance(seen, list) else ["" if norm < float("inf") else "not finite" for norm in seen.tolist()]
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
            kept = [one for one in self._seen if not owned.intersection(one[0])]
            self._seen.clear()
            self._seen.extend(kept)

    def _count_streak(self, optimizer: AcceleratedOptimizer) -> None:
        streak = self._streaks.get(optimizer, 0) + 1 if optimizer.step_was_skipped else 0
        self._streaks[optimizer] = streak
        if streak and streak % STREAK == 0:
            finding = scaled_finding(self._step(), streak)
            if self._raises:
                raise NonFiniteError(str(finding))
            self._voice.say(finding, shared=self._averages)


def scaled_finding(step: int | None, streak: int) -> Finding:
    """What is said of a loss scaler that leaves out update after update."""
    text = f"fp16 has left out {streak} updates in a row, so it is not the loss scale that makes gradients overflow"
    return Finding("nan", step, None, text, f"{_REMEDY}; mixed_precision='bf16' has the range of float32")
