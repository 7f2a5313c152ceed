"""`Guards` runs all checks for one Accelerator, attached to the ledger, optimizers, clipper and strategy.

Without `on_nan="skip"` or `"raise"` nothing is checked inside of a step: losses, gradient norms and learning rates are examined when the
ledger settles (about once a second), times when it has an interval, and weights once in many updates. Models, optimizers and loaders are
held weakly.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from slipstream.distributed.gradient_state import GradientState
from slipstream.logging import get_logger
from slipstream.observability.guards.findings import FindingReporter, GuardFinding, RankReports
from slipstream.observability.guards.loss_spikes import LossSpikeGuard
from slipstream.observability.guards.non_finite import (
    SKIP_STREAK,
    UpdateGuard,
    exchange_alone,
    find_non_finite,
    format_value,
    make_scaler_finding,
    to_floats,
)
from slipstream.observability.guards.replicas import (
    ComparisonPoint,
    DriftGuard,
    FirstBatchHashes,
    find_shared_batches,
    next_comparison,
    select_replicated,
)
from slipstream.observability.guards.schedules import ScheduleGuard, ScheduleLength, SchedulePace, find_miscounted, find_unfinished
from slipstream.observability.guards.throughput import DataWaitGuard, StragglerGuard
from slipstream.observability.options import GuardKwargs

if TYPE_CHECKING:
    from slipstream.training.clip import GradientClipper
    from slipstream.training.optimizer import AcceleratedOptimizer, OptimizerLink
    from slipstream.training.scheduler import AcceleratedScheduler
    from slipstream.training.stepper import PreparedModel, Stepper

__all__ = ["Guards", "WatchedObjects"]

_MAX_NORMS = 4096
"""How many norms are kept between two looks."""
_PATIENCE_LOOKS = 6
"""How many looks of the main process a finding waits for ranks that tell nothing: one more than the ledger waits for them."""


def _no_store() -> None:
    return None


class WatchedObjects(Protocol):
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
        registry: WatchedObjects,
        exchange: Callable[..., list[Any]] = exchange_alone,
        store: Callable[[], Any] = _no_store,
    ) -> None:
        self.options = options
        self.voice = FindingReporter(is_main=rank == 0, world_size=world_size)
        # both lead to models, and to this: a cycle would keep them until garbage is collected
        self._stepper, self._registry = weakref.ref(stepper), weakref.ref(registry)
        self._scales = stepper.scaler.scales
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._ledger: Any = None
        self._norms: list[tuple[int, float | torch.Tensor]] = []
        self._was_bad = False
        """Whether the loss or the norm of the last step that was looked at was not finite."""
        self._spikes = None if options.loss_spike is None else LossSpikeGuard(options.loss_spike, rank)
        self._starving = None if options.starving is None else DataWaitGuard(options.starving, local_ranks=local_ranks)
        self._straggler = None if options.straggler is None else StragglerGuard(options.straggler)
        self._schedules: weakref.WeakKeyDictionary[AcceleratedOptimizer, ScheduleGuard] = weakref.WeakKeyDictionary()
        self._drifts: weakref.WeakKeyDictionary[AcceleratedOptimizer, DriftGuard] = weakref.WeakKeyDictionary()
        self._looks: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = weakref.WeakKeyDictionary()
        """How often the weights of an optimizer's models were looked at."""
        self._whole: DriftGuard | None = None
        """The comparisons of all models, at checkpoints and at the end."""
        self._batches: FirstBatchHashes | None = None
        self._batch_reports: RankReports | None = None
        self._patience = _PATIENCE_LOOKS
        self._numbers = itertools.count()
        self._stuck: weakref.WeakKeyDictionary[AcceleratedOptimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._updates: UpdateGuard | None = None
        if options.strict:
            self._updates = UpdateGuard(
                options.on_nan, self.voice, rank=rank, averages=world_size > 1, exchange=exchange, step=self._step, loss=self._last_loss
            )
        compares = options.drift_every is not None and world_size > 1
        self.refuses: Callable[..., bool] | None = None if self._updates is None else self._updates.refuses
        """Whether an update is to be left out; None where that is not looked at."""
        self.first_look: float = 1 if compares else math.inf
        """With how many updates weights are looked at first."""

    # -- where it is hung in --------------------------------------------------------------------------------------

    def attach(self, ledger: Any, clipper: GradientClipper, strategy: Any) -> None:
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
            ledger.endings.append(self.end)
            self.voice.aloud = self._rank == 0
            if self._rank:
                ledger.unheard.append(self.voice.say_alone)
            else:
                ledger.sinks.append(self.interval)
                ledger.event_sinks.append(self.voice.hear)
                ledger.admits = self.voice.admits
                if self._world_size > 1 and self._updates is None:
                    self.voice.waits = frozenset(("nan",))
                    ledger.last_words.append(self.voice.release)
                    ledger.expects = lambda: self.voice.holds
            if self.first_look != math.inf:
                self._whole = self._drift("all")
            if self.options.same_batches and self._world_size > 1:
                self._batch_reports = RankReports(
                    self._store, self._rank, self._world_size, f"batches/{ledger.number}", "first batches are compared"
                )
                report = weakref.WeakMethod(self._report_batches)  # models hold what hands them on
                self._batches = FirstBatchHashes(partial(_reads_loader, stepper.state), partial(_call_if_alive, report))
            if self._rank == 0:
                ledger.last_words.append(self._compare)
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

    def watch_inputs(self, model: torch.nn.Module) -> None:
        """Looks at the first batches of a model that was prepared for training on several processes."""
        if self._batches is not None:
            self._batches.watch(model)

    def _report_batches(self, hashes: bytes) -> None:
        if self._batch_reports is not None:
            self._batch_reports.add("first", hashes)

    def look(self, optimizer: AcceleratedOptimizer, linked: OptimizerLink) -> float:
        """Takes fingerprints of the weights after an update; with how many updates it is to be called again."""
        every = self.options.drift_every
        if every is None or linked.stepper.parted:
            return math.inf
        looks = self._looks[optimizer] = self._looks.get(optimizer, 0) + 1
        updates = linked.updates
        if named := _comparable_parameters(linked.models):
            drift = self._drifts.get(optimizer)
            if drift is None:
                drift = self._drifts[optimizer] = self._drift(str(next(self._numbers)))
            drift.look(ComparisonPoint(f"update {updates}", f"after update {updates}", updates), named)
        return next_comparison(updates, looks, every)

    def look_at_checkpoint(self, path: str) -> None:
        """Takes fingerprints of the weights that a checkpoint has. Waits for nobody: the main process may save alone."""
        name = path.rstrip("/").rpartition("/")[2]
        self._look_at_all(f"checkpoint {name}", f"in the checkpoint {name}, which has those of the main process")

    def look_at_schedule(self, scheduler: AcceleratedScheduler) -> None:
        """Compares the length of a schedule with the loader that is being read; when it first steps, as all parts are known then."""
        stepper = self._stepper()
        loader: Any = None if stepper is None else stepper.state.active
        if self._rank or not self.options.schedule or loader is None or stepper is None or not scheduler.step_with_optimizer:
            return
        total, inner = ScheduleLength.of(scheduler.scheduler).total, scheduler.scheduler
        known, moves = self._prepared("loaders"), getattr(inner, "last_epoch", None)
        if total is None or loader not in known or moves:  # a run that goes on has been told
            return
        try:
            original, batches = len(loader.original), len(loader)
        except (TypeError, NotImplementedError):  # a stream
            return
        pace = SchedulePace(
            type(inner).__name__,
            total,
            original,
            batches,
            steps=loader.steps_per_update or stepper.state.num_steps,
            processes=self._world_size,
            moves=scheduler.moves,
            made_before=known.index(loader) >= scheduler.loaders_before and not scheduler.built_on_prepared,
        )
        if finding := find_miscounted(pace):
            self.voice.say(finding)

    def end(self) -> None:
        """Looks at what can only be seen when training ends: weights, which are compared when everybody was heard, and schedules."""
        self._look_at_all("end", "at the end of training")
        if self.options.schedule and self._rank == 0:
            self._examine_ends()

    def _examine_ends(self) -> None:
        stepper = self._stepper()
        if stepper is not None and stepper.cut_short:
            return  # as early stopping does it: the rest of the schedule was not wanted
        steps = 1 if stepper is None else stepper.state.num_steps
        for scheduler in self._prepared("schedulers"):
            inner = scheduler.scheduler
            total, moves, optimizer = ScheduleLength.of(inner).total, getattr(inner, "last_epoch", None), self._optimizer_of(inner)
            if total is None or not isinstance(moves, int) or optimizer is None:
                continue
            processes = 1 if scheduler.moves > 1 else self._world_size
            if finding := find_unfinished(type(inner).__name__, total, moves, optimizer.updates, processes=processes, steps=steps):
                self.voice.say(finding)

    def _optimizer_of(self, scheduler: Any) -> AcceleratedOptimizer | None:
        own = getattr(scheduler, "optimizer", None)
        return next((known for known in self._prepared("optimizers") if own is known or own is known.optimizer), None)

    def _look_at_all(self, key: str, words: str) -> None:
        stepper = self._stepper()
        if self._whole is None or stepper is None or stepper.parted:
            return
        updates = max((optimizer.updates for optimizer in self._prepared("optimizers")), default=0) or self._step() or 0
        if updates and (named := _comparable_parameters(stepper.models)):
            self._whole.look(ComparisonPoint(f"{key} {updates}", f"{words} (after update {updates})", updates), named)

    def _drift(self, key: str) -> DriftGuard:
        return DriftGuard(self._store, self._rank, self._world_size, f"{self._ledger.number}/{key}")

    def _keep_norm(self, norm: torch.Tensor) -> None:
        if len(self._norms) < _MAX_NORMS:
            self._norms.append((self._step() or 0, norm.item() if norm.is_cpu else norm))  # small tensors that are kept make the heap grow

    def _step(self) -> int | None:
        """The number of the step under way, as the ledger counts it: also in a run that goes on from a checkpoint."""
        return None if self._ledger is None or self._ledger.meter is None else int(self._ledger.step)

    def _last_loss(self) -> float | None:
        """The loss of the step under way on this rank: of several, the first that is not finite."""
        step = self._step()
        losses = to_floats([loss for at, loss in self._ledger.losses if at == step]) if step is not None else []
        return next((loss for loss in losses if not math.isfinite(loss)), losses[-1] if losses else None)

    def _prepared(self, kind: str) -> list[Any]:
        return list(getattr(self._registry(), kind, ()))

    # -- when the ledger settles ----------------------------------------------------------------------------------

    def examine(self, window: Any) -> None:
        """Looks at what has come since it last did: losses, norms, learning rates, fingerprints. On every rank."""
        self._patience = self._patience - 1 if self.voice.holds else _PATIENCE_LOOKS
        if not self._patience:
            self.voice.release()
        steps = [step for step, _ in window.losses]
        losses = to_floats([loss for _, loss in window.losses])
        if self.options.on_nan != "off":
            self._examine_finite(steps, losses)
        if self._spikes is not None:
            for step, loss in _mean_by_step(steps, losses):
                if finding := self._spikes.look(step, loss):
                    self.voice.say(finding)
        if self.options.schedule and self._rank == 0:
            self._examine_schedules()
        if self._rank == 0:
            self._compare()

    def _compare(self) -> None:
        """Says what the reports of all ranks tell, on the main process."""
        for _, reports in self._batch_reports.take() if self._batch_reports is not None else ():
            if shared := find_shared_batches(reports):
                self.voice.say(shared)
        for drift in (*self._drifts.values(), self._whole):
            if drift is not None and (finding := drift.compare()):
                self.voice.say(finding)

    def _examine_finite(self, steps: Sequence[int], losses: Sequence[float]) -> None:
        """Tells of the step where losses or norms began not to be finite; as long as they stay so, there is nothing new to tell."""
        kept, self._norms = self._norms, []
        norms = list(zip([step for step, _ in kept], to_floats([norm for _, norm in kept]), strict=True))
        bad = {step: ("norm", norm) for step, norm in reversed(norms) if not math.isfinite(norm)}
        bad.update({step: ("loss", loss) for step, loss in zip(reversed(steps), reversed(losses), strict=True) if not math.isfinite(loss)})
        begun: int | None = None
        for step in sorted({*steps, *(step for step, _ in norms)}) if bad or self._was_bad else ():
            if step in bad and not self._was_bad and begun is None:
                begun = step
            self._was_bad = step in bad
        if begun is not None:
            self._tell_bad(begun, *bad[begun])
        elif not bad and self._scales and self._updates is None:
            self._examine_scaled(steps[-1] if steps else None)

    def _tell_bad(self, step: int, what: str, value: float) -> None:
        text = f"the loss is {format_value(value)}"
        if what == "norm":
            text = f"the norm of the gradients is {format_value(value)}, and the loss was finite until then"
        remedy = (
            "lower the learning rate, clip (accelerator.clip_grad_norm_) and look at the batch of this step; Accelerator(on_nan='raise') "
            "stops where it begins and names the parameter and the rank, on_nan='skip' leaves such updates out"
        )
        # the norm of averaged gradients is the same on every rank, while a loss is that of one rank
        details = {"consequence": True} if what == "norm" and self._world_size > 1 else {}
        finding = GuardFinding("nan", step, self._rank, f"{text}{self._where()}", remedy, details)
        if finding.kind in self.voice.waits:
            self.voice.hold(finding)
        else:
            self.voice.say(finding)

    def _where(self) -> str:
        """Which parameters are not finite now, as far as that says something."""
        named = [entry for model in getattr(self._stepper(), "models", ()) for entry in reversed(list(model.original.named_parameters()))]
        gradients = [(name, entry.grad) for name, entry in named if entry.grad is not None]
        weights: list[tuple[str, torch.Tensor]] = [(name, entry.detach()) for name, entry in named]
        for what, entries in (("gradient", gradients), ("weight", weights)):
            found = find_non_finite(entries)
            if found is not None:
                bad = sum(1 for entry in entries if find_non_finite([entry]))
                if bad == len(entries) and bad > 1:
                    return f"; by now every {what} is nan or infinite, so the parameter where it began cannot be named"
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
            elif step - since >= SKIP_STREAK and optimizer.step_was_skipped:
                self.voice.say(make_scaler_finding(step, step - since), shared=self._world_size > 1)

    def _examine_schedules(self) -> None:
        schedulers = {
            id(entry.scheduler.optimizer): entry for entry in self._prepared("schedulers") if hasattr(entry.scheduler, "optimizer")
        }
        for optimizer in self._prepared("optimizers"):
            schedule = self._schedules.get(optimizer)
            if schedule is None:
                schedule = self._schedules[optimizer] = ScheduleGuard(self._world_size)
            found = schedulers.get(id(optimizer)) or schedulers.get(id(optimizer.optimizer))
            inner = None if found is None else found.scheduler
            finding = schedule.look(
                optimizer.updates,
                [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                moves=getattr(inner, "last_epoch", None),
                course=ScheduleLength.of(inner),
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


def _reads_loader(state: GradientState) -> bool:
    return state.active is not None


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], value: bytes) -> None:
    present = method()
    if present is not None:
        present(value)


def _comparable_parameters(models: Sequence[PreparedModel]) -> list[tuple[str, torch.Tensor]]:
    """The parameters of models that are the same on every process by now, with their names; none while some are not averaged."""
    if not all(getattr(model.prepared, "require_backward_grad_sync", True) for model in models):
        return []
    several = len(models) > 1
    return select_replicated(
        (f"model {number}: {name}" if several else name, parameter)
        for number, model in enumerate(models)
        for name, parameter in model.original.named_parameters()
    )


def _mean_by_step(steps: Sequence[int], losses: Sequence[float]) -> Iterable[tuple[int, float]]:
    """The mean of the losses of each step: several batches may make one update."""
    if len(set(steps)) == len(steps):
        return zip(steps, losses, strict=True)
    totals: dict[int, list[float]] = {}
    for step, loss in zip(steps, losses, strict=True):
        totals.setdefault(step, []).append(loss)
    return [(step, sum(values) / len(values)) for step, values in totals.items()]
