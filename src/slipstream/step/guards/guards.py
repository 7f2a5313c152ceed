"""`Guards`: what watches one Accelerator, joined: it hangs itself where the ledger, the optimizers and the strategy let it look.

Without `on_nan="skip"` or `"raise"` nothing is looked at in a step: losses, norms and learning rates are looked at when the ledger
settles (about once a second), times when it has an interval, and weights once in so many updates.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from slipstream.logging import get_logger
from slipstream.step.clip import Clipper
from slipstream.step.guards.drift import Drift, replicated
from slipstream.step.guards.finding import Finding, Voice
from slipstream.step.guards.finite import first_bad, spell_value, to_numbers
from slipstream.step.guards.options import GuardKwargs
from slipstream.step.guards.schedule import Course, Schedule
from slipstream.step.guards.spikes import Spikes
from slipstream.step.guards.starving import Starving, Straggler
from slipstream.step.guards.updates import STREAK, Updates, alone, scaled_finding
from slipstream.step.optimizer import AcceleratedOptimizer, Linked
from slipstream.step.scheduler import AcceleratedScheduler
from slipstream.step.stepper import Stepper

__all__ = ["Guards", "Registry"]

_NORMS = 4096
"""How many norms are kept between two looks."""
_PATIENCE = 6
"""How many looks of the main process a finding waits for ranks that tell nothing: one more than the ledger waits for them."""


def _nothing() -> None:
    return None


class Registry(Protocol):
    """What was prepared."""

    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[Any]


class Guards:
    """Watches a run, and says what goes wrong; see `GuardKwargs`."""

    def __init__(
        self,
        options: GuardKwargs,
        stepper: Stepper,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_ranks: int = 1,
        registry: Registry,
        exchange: Callable[..., list[Any]] = alone,
        store: Callable[[], Any] = _nothing,
    ) -> None:
        self.options = options
        self.voice = Voice(is_main=rank == 0)
        # both lead to models, and to this: a cycle would keep them until garbage is collected
        self._stepper, self._registry = weakref.ref(stepper), weakref.ref(registry)
        self._scales = stepper.scaler.scales
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._ledger: Any = None
        self._norms: list[tuple[int | None, float | torch.Tensor]] = []
        self._spikes = None if options.loss_spike is None else Spikes(options.loss_spike, rank)
        self._starving = None if options.starving is None else Starving(options.starving, local_ranks=local_ranks)
        self._straggler = None if options.straggler is None else Straggler(options.straggler)
        self._schedules: weakref.WeakKeyDictionary[AcceleratedOptimizer, Schedule] = weakref.WeakKeyDictionary()
        self._drifts: weakref.WeakKeyDictionary[AcceleratedOptimizer, Drift] = weakref.WeakKeyDictionary()
        self._patience = _PATIENCE
        self._numbers = itertools.count()
        self._stuck: weakref.WeakKeyDictionary[AcceleratedOptimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._updates: Updates | None = None
        if options.strict:
            self._updates = Updates(
                options.on_nan, self.voice, rank=rank, averages=world_size > 1, exchange=exchange, step=self._step, loss=self._last_loss
            )
        compares = options.drift_every is not None and world_size > 1
        self.refuses: Callable[..., bool] | None = None if self._updates is None else self._updates.refuses
        """Whether an update is to be left out; None where that is not looked at."""
        self.first_look: float = 1 if compares else math.inf
        """With how many updates weights are looked at first."""

    # -- where it is hung in --------------------------------------------------------------------------------------

    def attach(self, ledger: Any, clipper: Clipper, strategy: Any) -> None:
        """Hangs itself in; before anything is prepared."""
        if not self.options.watches:
            return
        self._ledger = ledger
        self.voice.tell = ledger.tell
        stepper = self._stepper()
        assert stepper is not None
        stepper.guards = self
        if ledger.meter is None:
            self.first_look = math.inf  # nobody would compare
            if self.options != GuardKwargs(on_nan=self.options.on_nan):
                get_logger("slipstream.guards").warning(
                    "LedgerKwargs(enabled=False) turns off the guards too, which look at what the ledger has: of GuardKwargs only "
                    "on_nan='skip' and 'raise' have an effect. Leave the ledger on, or leave out the other settings."
                )
        else:
            ledger.examiners.append(self.examine)
            self.voice.aloud = self._rank == 0
            if self._rank == 0:
                ledger.sinks.append(self.interval)
                ledger.event_sinks.append(self.voice.hear)
                ledger.admits = self.voice.admits
                if self._world_size > 1 and self._updates is None:
                    self.voice.waits = frozenset(("nan",))
                    ledger.last_words.append(self.voice.release)
                    weakref.finalize(self, _release, weakref.ref(self.voice))  # a script that ends otherwise
        if self._updates is not None:
            strategy.watch_buckets(self._updates.look_at_bucket, leaves_out=self.options.on_nan == "skip")
            if not self._scales:
                clipper.before = self._updates.before_clipping
        elif self.options.on_nan == "warn" and not self._scales:
            clipper.after = self._keep_norm

    def begin(self, model: torch.nn.Module) -> None:
        """A model was prepared."""
        if self._updates is not None:
            self._updates.begin(model)

    def look(self, optimizer: AcceleratedOptimizer, linked: Linked) -> float:
        """Takes fingerprints of the weights after an update; with how many updates it is to be called again."""
        every = self.options.drift_every
        if every is None or linked.stepper.parted:
            return math.inf
        if all(getattr(model.prepared, "require_backward_grad_sync", True) for model in linked.models):
            named = replicated(entry for model in linked.models for entry in model.original.named_parameters())
            if not named:
                return math.inf
            drift = self._drifts.get(optimizer)
            if drift is None:
                key = f"{self._ledger.number}/{next(self._numbers)}"
                drift = self._drifts[optimizer] = Drift(self._store, self._rank, self._world_size, key)
            drift.look(linked.updates, named)
        return (linked.updates // every + 1) * every

    def _keep_norm(self, norm: torch.Tensor) -> None:
        if len(self._norms) < _NORMS:
            self._norms.append((self._step(), norm.item() if norm.is_cpu else norm))  # small tensors that are kept make the heap grow

    def _step(self) -> int | None:
        meter = None if self._ledger is None else self._ledger.meter
        return None if meter is None else int(meter.step)

    def _last_loss(self) -> float | None:
        """The loss of the step under way on this rank: of several, the first that is not finite."""
        step = self._step()
        losses = to_numbers([loss for at, loss in self._ledger.losses if at == step]) if step is not None else []
        return next((loss for loss in losses if not math.isfinite(loss)), losses[-1] if losses else None)

    def _prepared(self, kind: str) -> list[Any]:
        return list(getattr(self._registry(), kind, ()))

    # -- when the ledger settles ----------------------------------------------------------------------------------

    def examine(self, window: Any) -> None:
        """Looks at what has come since it last did: losses, norms, learning rates, fingerprints. On every rank."""
        self._patience = self._patience - 1 if self.voice.holds else _PATIENCE
        if not self._patience:
            self.voice.release()
        steps = [step for step, _ in window.losses]
        losses = to_numbers([loss for _, loss in window.losses])
        if self.options.on_nan != "off":
            self._examine_finite(steps, losses)
        if self._spikes is not None:
            for step, loss in _by_step(steps, losses):
                if finding := self._spikes.look(step, loss):
                    self.voice.say(finding)
        if self.options.schedule and self._rank == 0:
            self._examine_schedules()
        if self._rank == 0:
            for drift in self._drifts.values():
                if finding := drift.compare():
                    self.voice.say(finding)

    def _examine_finite(self, steps: Sequence[int], losses: Sequence[float]) -> None:
        kept, self._norms = self._norms, []
        norms = list(zip([step for step, _ in kept], to_numbers([norm for _, norm in kept]), strict=True))
        bad_loss = next(((step, loss) for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)), None)
        bad_norm = next(((step, norm) for step, norm in norms if not math.isfinite(norm)), None)
        if bad_norm is not None and (bad_loss is None or (bad_norm[0] or 0) < bad_loss[0]):
            self._tell_bad(bad_norm[0], f"the norm of the gradients is {spell_value(bad_norm[1])}, and the loss was finite until then")
        elif bad_loss is not None:
            self._tell_bad(bad_loss[0], f"the loss is {spell_value(bad_loss[1])}")
        elif self._scales and self._updates is None:
            self._examine_scaled(steps[-1] if steps else None)

    def _tell_bad(self, step: int | None, text: str) -> None:
        remedy = (
            "lower the learning rate, clip (accelerator.clip_grad_norm_) and look at the batch of this step; Accelerator(on_nan='raise') "
            "stops where it begins and names the parameter and the rank, on_nan='skip' leaves such updates out"
        )
        finding = Finding("nan", step, self._rank, f"{text}{self._where()}", remedy)
        if finding.kind in self.voice.waits:
            self.voice.hold(finding)
        else:
            self.voice.say(finding)

    def _where(self) -> str:
        """Which parameters are not finite now, as far as that says something."""
        named = [entry for model in getattr(self._stepper(), "models", ()) for entry in reversed(list(model.original.named_parameters()))]
        gradients = [(name, one.grad) for name, one in named if one.grad is not None]
        weights: list[tuple[str, torch.Tensor]] = [(name, one.detach()) for name, one in named]
        for what, entries in (("gradient", gradients), ("weight", weights)):
            found = first_bad(entries)
            if found is not None:
                bad = sum(1 for entry in entries if first_bad([entry]))
                if bad == len(entries) and bad > 1:
                    return f"; by now every {what} is nan or infinite, so where it began cannot be told"
                return f"; the {what} nearest to the loss that is {found[1]} now is {found[0]} ({bad} of {len(entries)} are)"
        return ""

    def _examine_scaled(self, step: int | None) -> None:
        """A loss scaler that leaves out one update after the other, by the updates that were made since the last look."""
        if step is None:
            return
        for optimizer in self._prepared("optimizers"):
            updates, since = self._stuck.get(optimizer, (-1, step))
            if optimizer.updates != updates:
                self._stuck[optimizer] = (optimizer.updates, step)
            elif step - since >= STREAK and optimizer.step_was_skipped:
                self.voice.say(scaled_finding(step, step - since), shared=self._world_size > 1)

    def _examine_schedules(self) -> None:
        schedulers = {id(one.scheduler.optimizer): one for one in self._prepared("schedulers") if hasattr(one.scheduler, "optimizer")}
        for optimizer in self._prepared("optimizers"):
            schedule = self._schedules.get(optimizer)
            if schedule is None:
                schedule = self._schedules[optimizer] = Schedule(self._world_size)
            found = schedulers.get(id(optimizer)) or schedulers.get(id(optimizer.optimizer))
            inner = None if found is None else found.scheduler
            finding = schedule.look(
                optimizer.updates,
                [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                moves=getattr(inner, "last_epoch", None),
                course=Course.of(inner),
                per_process=found is not None and found.moves > 1,
            )
            if finding:
                self.voice.say(finding)

    # -- when the ledger has an interval --------------------------------------------------------------------------

    def interval(self, interval: Mapping[str, Any]) -> None:
        """Looks at where the time of all ranks went; on the main process, after it has heard them."""
        self.voice.release(interval["last"])
        if self._starving is not None:
            loader = next(iter(self._prepared("loaders")), None)
            workers = getattr(loader, "num_workers", None)
            pinned = bool(getattr(loader, "pin_memory", True)) or getattr(getattr(loader, "device", None), "type", "cpu") == "cpu"
            if finding := self._starving.look(interval, workers=workers, pinned=pinned):
                self.voice.say(finding)
        if self._straggler is not None and (finding := self._straggler.look(interval)):
            self.voice.say(finding)


def _release(voice: weakref.ref[Voice]) -> None:
    present = voice()
    if present is not None:
        present.release()


def _by_step(steps: Sequence[int], losses: Sequence[float]) -> Iterable[tuple[int, float]]:
    """The mean of the losses of each step: several batches may make one update."""
    if len(set(steps)) == len(steps):
        return zip(steps, losses, strict=True)
    totals: dict[int, list[float]] = {}
    for step, loss in zip(steps, losses, strict=True):
        totals.setdefault(step, []).append(loss)
    return [(step, sum(values) / len(values)) for step, values in totals.items()]
