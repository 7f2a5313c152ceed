"""`Guards` runs all checks for one Accelerator, attached to the ledger, optimizers, clipper and strategy.

Without `on_nan="skip"` or `"raise"` nothing is checked inside of a step: losses, gradient norms and learning rates are examined when the
ledger settles (about once a second), times when it has an interval, and weights once in many updates. What a device computes is read after
it has passed it, so none of this waits for the device; `"skip"` and `"raise"` wait for it once per update, because the host decides.
Models, optimizers and loaders are held weakly.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from slipstream.logging import get_logger
from slipstream.observability.guards.findings import FindingReporter, GuardFinding, RankReports
from slipstream.observability.options import GuardKwargs

if TYPE_CHECKING:
    from slipstream.distributed.gradient_state import GradientState
    from slipstream.observability.guards.loss_spikes import LossSpikeGuard
    from slipstream.observability.guards.replicas import DriftGuard, FirstBatchHashes
    from slipstream.observability.guards.schedules import ScheduleGuard
    from slipstream.observability.guards.throughput import DataWaitGuard, StragglerGuard
    from slipstream.training.clip import GradientClipper
    from slipstream.training.optimizer import AcceleratedOptimizer, OptimizerLink
    from slipstream.training.scheduler import AcceleratedScheduler
    from slipstream.training.stepper import PreparedModel, Stepper

__all__ = ["Guards", "WatchedObjects", "call_if_alive"]

_MAX_NORMS = 4096
"""How many norms are kept between two settlements of the ledger."""
_PATIENCE = 6
"""How often the main process settles before it reports a held finding without silent ranks: once more than the ledger waits for them."""


class WatchedObjects(Protocol):
    """What was prepared."""

    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[Any]


class Guards:
    """Checks a run and reports what goes wrong; see `GuardKwargs`. Each check is imported when it is first needed."""

    def __init__(
        self,
        options: GuardKwargs,
        stepper: Stepper,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_ranks: int = 1,
        registry: WatchedObjects,
        exchange: Callable[..., list[Any]] = lambda value, reason="": [value],
        store: Callable[[], Any] = lambda: None,
    ) -> None:
        self.options = options
        self.reporter = FindingReporter(is_main=rank == 0, world_size=world_size)
        # both lead to models, and to this: a cycle would keep them until garbage is collected
        self._stepper, self._registry = weakref.ref(stepper), weakref.ref(registry)
        self._scales = stepper.scaler.scales
        self._rank, self._world_size, self._local_ranks = rank, world_size, local_ranks
        self._store = store
        self._ledger: Any = None
        self._norms: list[tuple[int, float | torch.Tensor]] = []
        self._was_bad = False
        """Whether the loss or the norm of the last step that was examined was not finite."""
        self._spikes: LossSpikeGuard | None = None
        self._throughput: tuple[DataWaitGuard | None, StragglerGuard | None] | None = None
        self._schedules: weakref.WeakKeyDictionary[AcceleratedOptimizer, ScheduleGuard] = weakref.WeakKeyDictionary()
        self._drifts: weakref.WeakKeyDictionary[AcceleratedOptimizer, DriftGuard] = weakref.WeakKeyDictionary()
        self._comparisons: weakref.WeakKeyDictionary[AcceleratedOptimizer, int] = weakref.WeakKeyDictionary()
        """How often the weights of an optimizer's models were compared."""
        self._all_models: DriftGuard | None = None
        """The comparisons of all models, at checkpoints and at the end."""
        self._batches: FirstBatchHashes | None = None
        self._batch_reports: RankReports | None = None
        self._patience = _PATIENCE
        self._numbers = itertools.count()
        self._stuck: weakref.WeakKeyDictionary[AcceleratedOptimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._updates = None
        if options.strict:
            from slipstream.observability.guards.non_finite import UpdateGuard

            self._updates = UpdateGuard(
                options.on_nan, self.reporter, rank=rank, averages=world_size > 1, exchange=exchange, step=self._step, loss=self._last_loss
            )
        self.refuses: Callable[..., bool] | None = None if self._updates is None else self._updates.refuses
        """Returns whether an update is to be skipped; None where updates are not checked."""
        self.first_look: float = 1 if options.drift_every is not None and world_size > 1 else math.inf
        """The number of updates after which weights are compared first."""

    # -- hooks ----------------------------------------------------------------------------------------------------

    def attach(self, ledger: Any, clipper: GradientClipper, strategy: Any) -> None:
        """Attach the checks to ledger, clipper and strategy, before anything is prepared."""
        if not self.options.watches:
            return
        self._ledger = ledger
        self.reporter.tell = ledger.tell
        stepper = self._stepper()
        assert stepper is not None
        stepper.guards = self
        if ledger.meter is not None:
            self._attach_to_ledger(ledger, stepper.state)
        else:
            self.first_look = math.inf  # without a ledger nothing would compare the sums
            if self.options != GuardKwargs(on_nan=self.options.on_nan):
                get_logger("slipstream.guards").warning(
                    "LedgerKwargs(enabled=False) turns off the guards too, which need the data of the ledger: of GuardKwargs only "
                    "on_nan='skip' and 'raise' have an effect. Leave the ledger on, or leave out the other settings."
                )
        if self._updates is not None:
            strategy.watch_buckets(self._updates.look_at_bucket, leaves_out=self.options.on_nan == "skip")
            if not self._scales:
                clipper.before = self._updates.before_clipping
        elif self.options.on_nan == "warn" and not self._scales:
            clipper.after = self._keep_norm

    def _attach_to_ledger(self, ledger: Any, state: GradientState) -> None:
        ledger.examiners.append(self.examine)
        ledger.endings.append(self.end)
        self.reporter.logs_own = self._rank == 0
        if self._rank:
            ledger.unheard.append(self.reporter.log_unheard)
        else:
            ledger.sinks.append(self.interval)
            ledger.event_sinks.append(self.reporter.receive)
            ledger.admits = self.reporter.accepts
            if self._world_size > 1 and self._updates is None:
                self.reporter.held_kinds = frozenset(("nan",))
                ledger.last_words.append(self.reporter.release)
                ledger.expects = lambda: self.reporter.holds
            ledger.last_words.append(self._compare)
        if self.first_look != math.inf:
            self._all_models = self._make_drift("all")
        if self.options.same_batches and self._world_size > 1:
            from slipstream.observability.guards.replicas import FirstBatchHashes

            prefix = f"batches/{ledger.number}"
            self._batch_reports = RankReports(self._store, self._rank, self._world_size, prefix, "first batches are compared")
            report = weakref.WeakMethod(self._report_batches)  # models hold what hands them on
            self._batches = FirstBatchHashes(partial(_reads_loader, state), partial(call_if_alive, report))

    def begin(self, model: torch.nn.Module) -> None:
        """Watch a model that was prepared."""
        if self._updates is not None:
            self._updates.begin(model)

    def watch_inputs(self, model: torch.nn.Module) -> None:
        """Hash the first batches of a model that was prepared for training on several processes."""
        if self._batches is not None:
            self._batches.watch(model)

    def _report_batches(self, hashes: bytes) -> None:
        if self._batch_reports is not None:
            self._batch_reports.add("first", hashes)

    def look(self, optimizer: AcceleratedOptimizer, linked: OptimizerLink) -> float:
        """Report sums of the weights after an update; return the number of updates at which to call this again."""
        from slipstream.observability.guards.replicas import ComparisonPoint, next_comparison

        every = self.options.drift_every
        if every is None or linked.stepper.updates_may_differ:
            return math.inf
        count = self._comparisons[optimizer] = self._comparisons.get(optimizer, 0) + 1
        updates = linked.updates
        if named := _comparable_parameters(linked.models):
            drift = self._drifts.get(optimizer)
            if drift is None:
                drift = self._drifts[optimizer] = self._make_drift(str(next(self._numbers)))
            drift.look(ComparisonPoint(f"update {updates}", f"after update {updates}", updates), named)
        return next_comparison(updates, count, every)

    def look_at_checkpoint(self, path: str) -> None:
        """Report sums of the weights in a checkpoint. Waits for no rank: the main process may save alone."""
        name = path.rstrip("/").rpartition("/")[2]
        self._look_at_all(f"checkpoint {name}", f"in the checkpoint {name}, which has those of the main process")

    def look_at_schedule(self, scheduler: AcceleratedScheduler) -> None:
        """Compare the length of a schedule with the active loader, when the schedule first steps and all parts are known."""
        from slipstream.observability.guards.schedules import ScheduleLength, SchedulePace, find_miscounted

        stepper = self._stepper()
        loader: Any = None if stepper is None else stepper.state.active
        if self._rank or not self.options.schedule or loader is None or stepper is None or not scheduler.step_with_optimizer:
            return
        total, inner = ScheduleLength.of(scheduler.scheduler).total, scheduler.scheduler
        known, moves = self._prepared("loaders"), getattr(inner, "last_epoch", None)
        if total is None or loader not in known or moves:  # a resumed run has reported it before
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
        self.reporter.report(find_miscounted(pace))

    def end(self) -> None:
        """Check what can only be seen at the end of training: weights, which are compared once every rank has reported, and schedules."""
        self._look_at_all("end", "at the end of training")
        for drift in self._all_drifts():  # with a device clock, the ledger waits for the device next, and `examine` reports them
            drift.publish(wait=not self._ledger.has_device_clock)
        if self.options.schedule and self._rank == 0:
            self._examine_ends()

    def _examine_ends(self) -> None:
        from slipstream.observability.guards.schedules import ScheduleLength, find_unfinished

        stepper = self._stepper()
        if stepper is not None and stepper.trigger_fired:
            return  # as early stopping does it: the rest of the schedule was not wanted
        steps = 1 if stepper is None else stepper.state.num_steps
        for scheduler in self._prepared("schedulers"):
            inner = scheduler.scheduler
            total, moves, optimizer = ScheduleLength.of(inner).total, getattr(inner, "last_epoch", None), self._optimizer_of(inner)
            if total is None or not isinstance(moves, int) or optimizer is None:
                continue
            processes = 1 if scheduler.moves > 1 else self._world_size
            self.reporter.report(
                find_unfinished(type(inner).__name__, total, moves, optimizer.updates, processes=processes, steps=steps)
            )

    def _optimizer_of(self, scheduler: Any) -> AcceleratedOptimizer | None:
        own = getattr(scheduler, "optimizer", None)
        return next((known for known in self._prepared("optimizers") if own is known or own is known.optimizer), None)

    def _look_at_all(self, key: str, words: str) -> None:
        from slipstream.observability.guards.replicas import ComparisonPoint

        stepper = self._stepper()
        if self._all_models is None or stepper is None or stepper.updates_may_differ:
            return
        updates = max((optimizer.updates for optimizer in self._prepared("optimizers")), default=0) or self._step() or 0
        if updates and (named := _comparable_parameters(stepper.models)):
            self._all_models.look(ComparisonPoint(f"{key} {updates}", f"{words} (after update {updates})", updates), named)

    def _make_drift(self, key: str) -> DriftGuard:
        from slipstream.observability.guards.replicas import DriftGuard

        return DriftGuard(self._store, self._rank, self._world_size, f"{self._ledger.number}/{key}")

    def _keep_norm(self, norm: torch.Tensor) -> None:
        if len(self._norms) < _MAX_NORMS:
            self._norms.append((self._step() or 0, norm.item() if norm.is_cpu else norm))  # small tensors that are kept make the heap grow

    def _step(self) -> int | None:
        """Return the number of the current step as the ledger counts it, also in a resumed run."""
        return None if self._ledger is None or self._ledger.meter is None else int(self._ledger.step)

    def _last_loss(self) -> float | None:
        """Return the loss of the current step on this rank: of several, the first that is not finite."""
        from slipstream.observability.guards.non_finite import to_floats

        step = self._step()
        losses = to_floats([loss for at, loss in self._ledger.losses if at == step]) if step is not None else []
        return next((loss for loss in losses if not math.isfinite(loss)), losses[-1] if losses else None)

    def _prepared(self, kind: str) -> list[Any]:
        return list(getattr(self._registry(), kind, ()))

    # -- once per interval of the ledger --------------------------------------------------------------------------

    def examine(self, window: Any) -> None:
        """Check losses, norms, learning rates and weights since the last call. On every rank."""
        self._patience = self._patience - 1 if self.reporter.holds else _PATIENCE
        if not self._patience:
            self.reporter.release()
        if window.losses or self._norms:
            self._examine_losses(window)
        for drift in self._all_drifts():
            drift.publish()
        if self._rank == 0:
            if self.options.schedule and window.steps:
                self._examine_schedules()
            self._compare()

    def _examine_losses(self, window: Any) -> None:
        from slipstream.observability.guards.loss_spikes import LossSpikeGuard
        from slipstream.observability.guards.non_finite import to_floats

        steps = [step for step, _ in window.losses]
        norms = [kept for kept in self._norms if kept[0] < window.limit]
        self._norms = self._norms[len(norms) :]
        # together, so that a device is asked once
        values = to_floats([value for _, value in (*window.losses, *norms)], passed=window.passed)
        losses = values[: len(steps)]
        if self.options.on_nan != "off":
            self._examine_finite(steps, losses, list(zip([step for step, _ in norms], values[len(steps) :], strict=True)))
        if self.options.loss_spike is not None:
            self._spikes = self._spikes or LossSpikeGuard(self.options.loss_spike, self._rank)
            for step, loss in _mean_by_step(steps, losses):
                self.reporter.report(self._spikes.look(step, loss))

    def _compare(self) -> None:
        """Compare the reports of all ranks, on the main process."""
        if self._batch_reports is not None:
            from slipstream.observability.guards.replicas import find_shared_batches

            for _, reports in self._batch_reports.take():
                self.reporter.report(find_shared_batches(reports))
        for drift in self._all_drifts():
            self.reporter.report(drift.compare())

    def _all_drifts(self) -> list[DriftGuard]:
        return [drift for drift in (*self._drifts.values(), self._all_models) if drift is not None]

    def _examine_finite(self, steps: Sequence[int], losses: Sequence[float], norms: Sequence[tuple[int, float]]) -> None:
        """Report the step at which losses or norms stopped being finite, once for each such stretch."""
        bad = {step: ("norm", norm) for step, norm in reversed(norms) if not math.isfinite(norm)}
        bad.update({step: ("loss", loss) for step, loss in zip(reversed(steps), reversed(losses), strict=True) if not math.isfinite(loss)})
        begun: int | None = None
        for step in sorted({*steps, *(step for step, _ in norms)}) if bad or self._was_bad else ():
            if step in bad and not self._was_bad and begun is None:
                begun = step
            self._was_bad = step in bad
        if begun is not None:
            self._report_bad(begun, *bad[begun])
        elif not bad and self._scales and self._updates is None:
            self._examine_scaled(steps[-1] if steps else None)

    def _report_bad(self, step: int, what: str, value: float) -> None:
        text = f"the loss is {value:.4g}"
        if what == "norm":
            text = f"the norm of the gradients is {value:.4g}, and the loss was finite until then"
        remedy = (
            "lower the learning rate, clip (accelerator.clip_grad_norm_) and look at the batch of this step; Accelerator(on_nan='raise') "
            "stops where it begins and names the parameter and the rank, on_nan='skip' leaves such updates out"
        )
        # the norm of averaged gradients is the same on every rank, while a loss is that of one rank
        details = {"consequence": True} if what == "norm" and self._world_size > 1 else {}
        finding = GuardFinding("nan", step, self._rank, f"{text}{self._where()}", remedy, details)
        if finding.kind in self.reporter.held_kinds:
            self.reporter.hold(finding)
        else:
            self.reporter.report(finding)

    def _where(self) -> str:
        """Return which parameters are not finite now, as a clause; empty if there are none."""
        from slipstream.observability.guards.non_finite import iter_non_finite

        named = [pair for model in getattr(self._stepper(), "models", ()) for pair in reversed(list(model.original.named_parameters()))]
        gradients = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
        weights: list[tuple[str, torch.Tensor]] = [(name, parameter.detach()) for name, parameter in named]
        for what, entries in (("gradient", gradients), ("weight", weights)):
            found = list(iter_non_finite(entries))
            if found:
                (name, word), bad = found[0], len(found)
                if bad == len(entries) and bad > 1:
                    return f"; by now every {what} is nan or infinite, so the parameter where it began cannot be named"
                return f"; the {what} nearest to the loss that is {word} now is {name} ({bad} of {len(entries)} are)"
        return ""

    def _examine_scaled(self, step: int | None) -> None:
        """Report a loss scaler that skips update after update, by the updates that were made since the last call."""
        from slipstream.observability.guards.non_finite import SKIP_STREAK, make_scaler_finding

        if step is None:
            return
        for optimizer in self._prepared("optimizers"):
            updates, since = self._stuck.get(optimizer, (-1, step))
            if optimizer.updates != updates:
                self._stuck[optimizer] = (optimizer.updates, step)
            elif step - since >= SKIP_STREAK and optimizer.step_was_skipped:
                self.reporter.report(make_scaler_finding(step, step - since), shared=self._world_size > 1)

    def _examine_schedules(self) -> None:
        from slipstream.observability.guards.schedules import ScheduleGuard, ScheduleLength

        schedulers = {
            id(known.scheduler.optimizer): known for known in self._prepared("schedulers") if hasattr(known.scheduler, "optimizer")
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
                length=ScheduleLength.of(inner),
                per_process=found is not None and found.moves > 1,
            )
            self.reporter.report(finding)

    def interval(self, interval: Mapping[str, Any]) -> None:
        """Check where the time of all ranks went, on the main process."""
        self.reporter.release(interval["last"])
        if self._throughput is None:
            from slipstream.observability.guards.throughput import DataWaitGuard, StragglerGuard

            starving, straggler = self.options.starving, self.options.straggler
            self._throughput = (
                None if starving is None else DataWaitGuard(starving, local_ranks=self._local_ranks),
                None if straggler is None else StragglerGuard(straggler),
            )
        data_wait, slow_rank = self._throughput
        if data_wait is not None:
            loader = next(iter(self._prepared("loaders")), None)
            pinned = bool(getattr(loader, "pin_memory", True)) or getattr(getattr(loader, "device", None), "type", "cpu") == "cpu"
            self.reporter.report(data_wait.look(interval, workers=getattr(loader, "num_workers", None), pinned=pinned))
        if slow_rank is not None:
            self.reporter.report(slow_rank.look(interval))


def _reads_loader(state: GradientState) -> bool:
    return state.active is not None


def call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    """Call a method unless its object is gone."""
    alive = method()
    if alive is not None:
        alive(*arguments)


def _comparable_parameters(models: Sequence[PreparedModel]) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of models that are the same on every process by now, with their names; none while some are not averaged."""
    from slipstream.observability.guards.replicas import select_replicated

    if not all(getattr(model.prepared, "require_backward_grad_sync", True) for model in models):
        return []
    several = len(models) > 1
    return select_replicated(
        (f"model {number}: {name}" if several else name, parameter)
        for number, model in enumerate(models)
        for name, parameter in model.original.named_parameters()
    )


def _mean_by_step(steps: Sequence[int], losses: Sequence[float]) -> Iterable[tuple[int, float]]:
    """Return the mean of the losses of each step: several batches may make one update."""
    if len(set(steps)) == len(steps):
        return zip(steps, losses, strict=True)
    totals: dict[int, list[float]] = {}
    for step, loss in zip(steps, losses, strict=True):
        totals.setdefault(step, []).append(loss)
    return [(step, sum(values) / len(values)) for step, values in totals.items()]
