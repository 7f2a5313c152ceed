"""The stepper of one Accelerator: `accumulate` blocks, backward passes, and whether optimizers may step now.

The gradient of an update is the mean over all samples of the window on all ranks. A loss counts as the mean over its batch, unless
`weight` says that it is a sum over so many samples. Strategies average gradients over ranks, so a rank's loss is weighted here, and only
where ranks or batches hold different numbers of samples. With several models, a loss counts for those that it reaches, and gradients are
reduced for those of them whose window closes. `backward` decides nothing that could be decided earlier: for the usual batch it is a few
comparisons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slipstream.distributed.call_site import call_site
from slipstream.distributed.gradient_state import GradientState, MicroBatch
from slipstream.errors import StateError
from slipstream.observability.timing.meter import BACKWARD, EVALUATION, FORWARD, LEAVE, LOG_LIMIT, OPTIMIZER, Meter
from slipstream.precision.scaler import LossScaler, NoScaler
from slipstream.training.accumulation import Accumulation
from slipstream.training.loss_checks import (
    NOT_PREPARED_MESSAGE,
    check_weight,
    find_reached_models,
    warn_if_divided,
    warn_if_low_precision,
    warn_if_read_ahead,
    warn_if_share_unknown,
    warn_if_unprepared,
    warn_of_late_pieces,
    warn_outside_accumulate,
)

if TYPE_CHECKING:
    from slipstream.strategies.base import Strategy

__all__ = ["AccumulateBlock", "PreparedModel", "Stepper", "TimedForward", "run_timed", "time_forward"]


@dataclass(eq=False)
class PreparedModel:
    """A model as the user gave it, as `prepare` gave it back, and where its accumulation stands."""

    original: torch.nn.Module
    prepared: torch.nn.Module
    accumulation: Accumulation = field(default_factory=Accumulation)
    owned: frozenset[int] = frozenset()
    """Identities of the parameters."""
    shared: frozenset[int] = frozenset()
    """Of these, the ones that belong to a model prepared before: their gradients are corrected with that one."""

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are there now, without those of shared parameters."""
        return [
            parameter.grad
            for parameter in self.original.parameters()
            if parameter.grad is not None and id(parameter) not in self.shared
        ]

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that are there."""
        gradients = self.gradients()
        dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.mul_(factor)


_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled

_FULL_PRECISION = (torch.float32, torch.float64)
_CHECKED_LOSSES = 2
"""How many of the first losses are looked at for whether they reach a prepared model."""


def _find_batch(state: GradientState, last: MicroBatch | None, *, stays: bool = False) -> MicroBatch | None:
    """Return the batch that work after `last` belongs to: as `GradientState.batch_after`, with a short way for plain loops.

    A block always begins the next batch. Outside of blocks the batch `stays` the same until an optimizer steps, as a script may run
    several backward passes on it: while it is alive, a batch that was read ahead does not take its place.
    """
    loader_pass = state.only_pass
    if loader_pass is not None:
        unread, newest = loader_pass.unread, loader_pass.batch
        if len(unread) < 2 or newest is last or (not stays and len(unread) == 2 and unread[0] is last):
            return newest
    if stays and last is not None and last.anchor() is not None:
        return last
    return state.batch_after(last)


class AccumulateBlock:
    """`with accelerator.accumulate(model):`, one batch of a window."""

    __slots__ = ("_bystanders", "_stepper", "batch", "concerned", "first", "models")

    def __init__(self, stepper: Stepper, models: Sequence[PreparedModel]) -> None:
        self.models = tuple(models)
        self.first = self.models[0].accumulation
        followers = [model for model in stepper.models if not model.accumulation.named]
        self.concerned = (*self.models, *followers)
        """The models that are named, and those that were never named in any block and follow this one."""
        self.batch: MicroBatch | None = None
        """The batch that is being worked on."""
        averages = stepper.strategy.averages
        self._bystanders = [model.prepared for model in stepper.models if model not in self.concerned] if averages else []
        self._stepper = weakref.ref(stepper)  # which keeps its blocks: a cycle would keep models until garbage is collected

    def __enter__(self) -> None:
        stepper = self._stepper()
        assert stepper is not None
        if stepper.block is not None:
            raise StateError("accumulate inside of accumulate: one block is one batch. Name all models in one: accumulate(first, second)")
        state, first = stepper.state, self.first
        plugin = state.plugin
        self.batch = batch = _find_batch(state, first.batch)
        steps = (None if batch is None else batch.steps) or plugin.num_steps or 1
        if steps > 1 and batch is None and plugin.sync_with_dataloader:
            warn_if_read_ahead(stepper.warned, first, state)
        stepper.begin_work(batch, steps)
        closing = first.begin(steps, batch, plugin.sync_with_dataloader)
        if first.closed_early:
            warn_of_late_pieces(stepper.warned)
        if first.index == 1:
            first.passes = state.passes
        if len(self.concerned) > 1:
            self._begin_others(closing, steps, plugin.sync_with_dataloader)
        state.sync_gradients = closing
        state.trained += 1
        stepper.block, state.batch = self, batch  # after what may raise: then the block has not begun
        stepper.accumulates |= not closing
        if stepper.strategy.averages:
            reduces = closing or plugin.sync_each_batch
            for model in self.concerned:
                stepper.strategy.set_sync(model.prepared, reduces)
            for bystander in self._bystanders:
                stepper.strategy.defer(bystander, True)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        stepper = self._stepper()
        assert stepper is not None
        stepper.block = stepper.state.batch = None
        for bystander in self._bystanders:
            stepper.strategy.defer(bystander, False)
        batch = self.batch
        if batch is not None and batch.loader_pass.batch is not batch and batch.anchor() is None:
            # It was taken for one that was read ahead, and nobody has it any more: the block worked on the newest one.
            newest = batch.loader_pass.batch
            for model in self.models:
                model.accumulation.batch = newest
            batch.loader_pass.worked = batch.loader_pass.handed
            if newest is not None and newest.end:
                warn_if_read_ahead(stepper.warned, self.first, None)

    def _begin_others(self, closing: bool, steps: int, follows_loader: bool) -> None:
        apart = False
        for model in self.models[1:]:
            apart |= model.accumulation.begin(steps, self.batch, follows_loader) != closing
        if apart:
            places = ", ".join(f"{type(model.original).__name__}: batch {model.accumulation.index} of {steps}" for model in self.models)
            raise StateError(
                f"accumulate was given models that are at different places of their windows ({places}), as they were accumulated apart "
                "before. Give each its own accumulate block, or always the same ones together."
            )
        for model in self.concerned[len(self.models) :]:
            model.accumulation.mirror(self.first)


class Stepper:
    """Blocks of accumulation and backward passes of one Accelerator."""

    def __init__(
        self,
        state: GradientState,
        strategy: Strategy,
        scaler: LossScaler | NoScaler,
        *,
        rank: int = 0,
        world_size: int = 1,
        total: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self.state = state
        self.meter: Meter | None = state.meter
        self.strategy = strategy
        self.scaler = scaler
        self.models: list[PreparedModel] = []
        self.block: AccumulateBlock | None = None
        """The `accumulate` block that is being run."""
        self.accumulates = False
        """Whether any window ever held more than one batch."""
        self.outside = False
        """Whether there was a backward pass outside of `accumulate` since an optimizer stepped."""
        self._outside_batch: MicroBatch | None = None
        self._joined = False
        self.cut_short = False
        """Whether `check_trigger` said yes, which is how loops are left early."""
        self.parted = False
        """Whether ranks were ever allowed to make different numbers of updates."""
        self.guards: Any = None
        """What looks at updates, where somebody does: see `observability/guards/`."""
        self._rank = rank
        self.world_size = world_size
        self._total = total
        """Adds numbers up over all ranks."""
        self.blocks: dict[tuple[torch.nn.Module, ...], AccumulateBlock] = {}
        """The blocks of `accumulate` by their models."""
        self.warned: set[str] = set()
        self._owners: dict[int, PreparedModel] = {}
        """The models by the identities of their parameters."""
        self._unchecked = _CHECKED_LOSSES if world_size > 1 else 0

    @property
    def joined(self) -> bool:
        """Whether ranks may run out of data at different times, so that none may wait for all of them."""
        return self._joined

    @joined.setter
    def joined(self, joined: bool) -> None:
        self._joined, self.parted = joined, self.parted or joined

    # -- models ---------------------------------------------------------------------------------------------------

    def add(self, original: torch.nn.Module, prepared: torch.nn.Module) -> PreparedModel:
        """Add a prepared model; one that was here before begins anew."""
        self.blocks.clear()
        model = next((known for known in self.models if known.original is original), None)
        if model is None:
            if self.guards is not None:
                self.guards.begin(original)
            model = PreparedModel(original, prepared)
            self.models.append(model)
        else:
            model.prepared = prepared
            model.accumulation.reset()
        model.owned = frozenset(id(parameter) for parameter in original.parameters())
        self._owners = {}
        for known in self.models:
            known.shared = frozenset(identity for identity in known.owned if identity in self._owners)
            self._owners.update((identity, known) for identity in sorted(known.owned - known.shared))
        return model

    def find(self, model: torch.nn.Module) -> PreparedModel | None:
        """Return the record of a model, by what was given to `prepare` or returned by it, compiled or not."""
        model = getattr(model, "_orig_mod", model)
        return next((known for known in self.models if model is known.prepared or model is known.original), None)

    def owners(self, parameters: Iterable[torch.Tensor]) -> tuple[list[PreparedModel], list[torch.Tensor]]:
        """Return the prepared models that these parameters belong to, and the parameters that belong to none."""
        found: dict[int, PreparedModel] = {}
        strangers = []
        for parameter in parameters:
            owner = self._owners.get(id(parameter))
            if owner is None:
                strangers.append(parameter)
            else:
                found[id(owner)] = owner
        return list(found.values()), strangers

    def forget(self) -> None:
        """Drop every model: nothing here keeps one alive afterwards."""
        self.models, self._owners = [], {}
        self.block = self._outside_batch = None
        self.blocks.clear()

    def set_closing(self, closing: bool) -> None:
        """Set by hand whether the present batch ends an update of every model."""
        self.state.sync_gradients = closing
        for model in self.models:
            model.accumulation.closing = closing
            self.strategy.set_sync(model.prepared, closing)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def accumulate(self, models: tuple[torch.nn.Module, ...]) -> AccumulateBlock:
        """Return the block for one batch of the windows of these models (of all prepared ones if none is named)."""
        block = self.blocks.get(models)
        if block is None:
            records = self._records(models)
            for model in records:
                if not model.accumulation.named:
                    model.accumulation.named = True
                    model.accumulation.reset()
                    self.blocks.clear()
            block = self.blocks[models] = AccumulateBlock(self, records)
        return block

    def _records(self, models: Sequence[torch.nn.Module]) -> list[PreparedModel]:
        if not models:
            if not self.models:
                raise StateError("accumulate() without a prepared model: call prepare(model, ...) first")
            return self.models
        records = []
        for model in models:
            record = self.find(model)
            if record is None:
                raise StateError(
                    f"accumulate got a {type(model).__name__} that was not prepared by this Accelerator: "
                    "write `model = accelerator.prepare(model)` first, and pass what it gives back"
                )
            records.append(record)
        return records

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        """Compute the gradients of a loss; the module docstring says what they are divided by."""
        self.state.trained += 1
        meter = self.meter
        run_timed(meter, BACKWARD, self._backward, loss, weight, kwargs)
        if meter is None:
            return
        # A number where it is there already: small tensors that are kept between large ones make the heap of the process grow and
        # shrink in every step, which costs more than all marks.
        meter.losses.append((meter.step, loss.item() if loss.is_cpu and loss.numel() == 1 else loss.detach()))
        if meter.without_optimizer:  # which would end the step
            meter.updated = True
            if self.state.active is None:
                meter.end_step()

    def _backward(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward got a {type(loss).__name__}: pass the loss, a tensor with one value")
        if self._unchecked or loss.dtype not in _FULL_PRECISION:
            self._check_loss(loss)
        block = self.block
        batch = self._batch_outside() if block is None else block.batch
        if weight is None and (batch is None or batch.shares is None) and not self.scaler.scales:
            if block is None:
                usual = not self.accumulates and self._steps(batch) == 1
                self.outside = True
            else:
                usual = block.first.single
                if usual:
                    for model in block.concerned:
                        model.accumulation.touched = True
            if usual:  # one batch, one update, nothing to weigh: as plain PyTorch
                if self.strategy.averages:
                    self.strategy.backward(loss, None, **kwargs)
                else:
                    loss.backward(**kwargs)  # type: ignore[no-untyped-call]
                return
        if self.scaler.due:
            self._update_scale()
        if block is None:
            self._backward_outside(loss, weight, batch, kwargs)
        else:
            self._backward_in_block(block, loss, weight, kwargs)

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Warn of a loss in half precision; on several processes, raise or warn for a model that was not prepared."""
        warn_if_low_precision(self.warned, loss)
        if not self._unchecked:
            return
        self._unchecked -= 1
        if not self.models:
            raise StateError(NOT_PREPARED_MESSAGE.format(site=call_site()))
        if loss.requires_grad:
            warn_if_unprepared(self.warned, find_reached_models(loss, self._owners))

    def _steps(self, batch: MicroBatch | None) -> int:
        return (None if batch is None else batch.steps) or self.state.plugin.num_steps or 1

    def _batch_outside(self) -> MicroBatch | None:
        """Return the batch of a backward pass outside of `accumulate`."""
        self._outside_batch = batch = _find_batch(self.state, self._outside_batch, stays=self.outside)
        self.begin_work(batch)
        return batch

    def begin_work(self, batch: MicroBatch | None, steps: int = 1) -> None:
        """Record on its pass that a batch is worked on; warn where it matters which one that is, and is not certain."""
        if batch is None:
            uncertain = self.state.metrics.finished_pass is not None
        else:
            loader_pass = batch.loader_pass
            if not loader_pass.worked:
                loader_pass.late = batch.number > 1
            loader_pass.worked = batch.number
            uncertain = loader_pass.late
        if uncertain and (steps > 1 or self.world_size > 1):
            warn_if_share_unknown(self.warned, batch, self.state)

    def _reached(self, loss: torch.Tensor, weighs: bool) -> list[PreparedModel]:
        """Return the models that a loss counts for, in the order in which they were prepared: all where it makes no difference."""
        if len(self.models) == 1 or not (weighs or self.accumulates):
            return self.models
        reached = find_reached_models(loss, self._owners)
        return self.models if reached is None else [model for model in self.models if model in reached]

    def _backward_in_block(self, block: AccumulateBlock, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        part, count = self._share(block.batch)
        reached = self._reached(loss, weight is not None)
        concerned = block.concerned
        if weight is None:
            divisors = [model.accumulation.add_mean(count, model in reached) for model in concerned]
            if block.first.expected > 1.0 and "division" not in self.warned:
                warn_if_divided(self.warned, loss, block.first.expected)
        else:
            divisors = self._weigh(concerned, reached, check_weight(weight) if part > 0.0 else 0.0)
            part = float(part > 0.0)
        divisor, later = _choose_divisor(concerned, divisors, reached, weight is not None)
        self._run(loss, part, divisor, reached, kwargs)
        for model, final in later:
            model.rescale(model.accumulation.settle(final))

    def _share(self, batch: MicroBatch | None) -> tuple[float, float]:
        """Return how this rank's mean is weighed against an equal share, and how many full batches the global batch counts as."""
        shares = None if batch is None else batch.shares
        if shares is None:
            return 1.0, 1.0
        counted = shares.counted
        return self.world_size * counted[self._rank] / shares.full, sum(counted) / shares.full

    def _weigh(self, concerned: Sequence[PreparedModel], reached: Sequence[PreparedModel], weight: float) -> list[float]:
        """Add the weight of a sum to the models that it reaches, and return what the sums of each model are divided by."""
        for model in concerned:
            if model in reached:
                model.accumulation.add_sum(weight)
        weighed = [model.accumulation for model in concerned if model.accumulation.weighs]
        if concerned[0].accumulation.closing:
            totals = self._sum_over_ranks([accumulation.total for accumulation in weighed])
            found = {id(own): own.sum_divisor(total) for own, total in zip(weighed, totals, strict=True)}
        else:
            new = [accumulation for accumulation in weighed if accumulation.estimate is None]
            if new:  # once: the same estimate on every rank, so that gradients can be averaged at any time
                mean = self._sum_over_ranks([weight])[0]
                for accumulation in new:
                    accumulation.guess(mean)
            found = {id(accumulation): accumulation.estimate or 1.0 for accumulation in weighed}
        return [found.get(id(model.accumulation), 1.0) for model in concerned]

    def _sum_over_ranks(self, weights: list[float]) -> list[float]:
        """Return the sum of the weights over all ranks, divided by the number of ranks."""
        if self.joined:
            raise StateError(
                "backward(weight=...) adds weights up over all processes, and in join_uneven_inputs some may be done already: "
                "leave out the weight there, or leave out join_uneven_inputs: without it gradients are exact, too"
            )
        return [total / self.world_size for total in self._total(weights)]

    def _backward_outside(self, loss: torch.Tensor, weight: Any, batch: MicroBatch | None, kwargs: dict[str, Any]) -> None:
        """Run a backward pass outside of `accumulate`: an update of its own for the models that it reaches."""
        reached = self._reached(loss, weight is not None)
        for model in reached:
            if model.accumulation.index:
                model.accumulation.reset()
            self.strategy.set_sync(model.prepared, True)
        self.state.sync_gradients, self.outside = True, True
        steps = self._steps(batch)
        if steps > 1:
            warn_outside_accumulate(self.warned, steps)
        part, count = self._share(batch)
        if weight is None:
            self._run(loss, part / count if count else 0.0, 1.0, reached, kwargs)
            return
        total = self._sum_over_ranks([check_weight(weight) if part > 0.0 else 0.0])[0]
        self._run(loss, float(part > 0.0), total or 1.0, reached, kwargs)

    def _run(self, loss: torch.Tensor, part: float, divisor: float, reached: Sequence[PreparedModel], kwargs: dict[str, Any]) -> None:
        if part != 1.0:
            loss = loss * (part / divisor)
        elif divisor != 1.0:
            loss = loss / divisor
        if self.scaler.scales:
            loss = self.scaler.scale(loss)
        each = self.state.plugin.sync_each_batch
        reducing = [model.prepared for model in reached if each or model.accumulation.closing] if self.strategy.averages else []
        if reducing:
            self.strategy.backward(loss, reducing, **kwargs)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def _update_scale(self) -> None:
        """Update the loss scale, and rescale gradients that were made with the old one."""
        waiting = [model for model in self.models if model.gradients()]
        ratio = self.scaler.flush(want_ratio=bool(waiting))
        if ratio != 1.0:
            for model in waiting:
                model.rescale(ratio)

    # -- saved and restored (loop_state.py) ---------------------------------------------------------------------------

    def loop_state(self) -> dict[str, Any]:
        """Return where the windows stand, in plain data: the state of one rank. Call it before the state of the loss scaler.

        A loss scale that is due is updated now, as the next loss would do it, with the gradients that were made with the old one.
        """
        if self.scaler.due:
            self._update_scale()
        states = [model.accumulation.state() for model in self.models]
        return {"windows": states, "sync_gradients": self.state.sync_gradients, "loose": self.outside}

    def check(self, state: Any, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raise unless these can be restored here; change nothing."""
        from slipstream.training.loop_state import check_gradients, check_loop_state  # of checkpoints: a step needs none of it

        check_loop_state(state, [type(model.original).__name__ for model in self.models])
        check_gradients([model.original for model in self.models], gradients)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore saved windows; their gradients come by `set_gradients`."""
        self.check(state)
        for model, saved in zip(self.models, state["windows"], strict=True):
            model.accumulation.restore(saved)
            self.strategy.set_sync(model.prepared, model.accumulation.closing)
            self.accumulates |= not model.accumulation.closing
        self.block = self._outside_batch = None
        self.blocks.clear()
        self.state.sync_gradients, self.outside = state["sync_gradients"], state["loose"]

    def open_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return the gradients on this rank of an update still to come, named as "0.weight" (first model); None if there are none."""
        from slipstream.training.loop_state import collect_gradients

        waiting = [self.outside or (model.accumulation.pending and not model.accumulation.closing) for model in self.models]
        return collect_gradients([model.original if open_ else None for model, open_ in zip(self.models, waiting, strict=True)]) or None

    def set_gradients(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        """Restore gradients; parameters without one here have none afterwards."""
        from slipstream.training.loop_state import set_gradients

        set_gradients([model.original for model in self.models], gradients)


def _choose_divisor(
    concerned: Sequence[PreparedModel], divisors: Sequence[float], reached: Sequence[PreparedModel], weighs: bool
) -> tuple[float, list[tuple[PreparedModel, float]]]:
    """Return what a loss is divided by, which may count for several models at different places of their windows.

    The gradients that are there are brought to that divisor now; those of models that need another one in the end are told, to be
    corrected after the backward pass. Models that the loss does not reach get their own divisor at once, if it is of their kind.
    """
    pairs = list(zip(concerned, divisors, strict=True))
    taking = [pair for pair in pairs if pair[0] in reached]
    divisor = next((own for model, own in taking if model.accumulation.carried is not None), (taking or pairs)[0][1])
    later = []
    for model, own in pairs:
        accumulation = model.accumulation
        takes = model in reached
        if not takes and (accumulation.carried is None or not accumulation.closing or accumulation.weighs != weighs):
            continue
        factor = accumulation.settle(divisor if takes else own)
        if factor != 1.0:
            model.rescale(factor)
        if takes and own != divisor and accumulation.closing:
            later.append((model, own))
    return divisor, later


def run_timed(meter: Meter | None, phase: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as one phase of the step; without a meter, just call it.

    This is where forward, backward, clipping and the optimizer write their marks. The call costs 0.1 microseconds more than the same lines
    inlined (measured: 0.3 instead of 0.2 for a phase, five phases in a step). It stands here because every step enters this module anyway.
    """
    if meter is None:
        return function(*args, **kwargs)
    add, clock = meter.add, meter.clock
    add(phase)
    add(clock())
    try:
        if meter.counting is None or phase == OPTIMIZER:
            return function(*args, **kwargs)
        with meter.counting.block():
            return function(*args, **kwargs)
    finally:
        add(LEAVE)
        add(clock())


class TimedForward:
    """Marks how long the forward passes of a prepared model take; it stands where torch keeps a compiled call.

    The model stays what it is: its class, its `forward`, its state and its hooks. A copy of it, or what is read from a pickle of it, is
    without.
    """

    __slots__ = ("_meter", "_module", "beneath")

    def __init__(self, module: torch.nn.Module, meter: Meter, beneath: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)  # which holds this: a cycle would keep it until garbage is collected
        self._meter = meter
        self.beneath = beneath
        """The compiled call of the model, if it is compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.beneath or self._module()._call_impl  # type: ignore[union-attr]  # it is being called
        if _is_compiling():  # this is being compiled: a clock cannot be
            return call(*args, **kwargs)
        meter = self._meter
        result = run_timed(meter, FORWARD if _is_grad_enabled() else EVALUATION, call, *args, **kwargs)
        if len(meter.log) > LOG_LIMIT:
            meter.attend(meter.log[-1])
        return result

    def __reduce__(self) -> Any:
        return type(None), ()


def time_forward(model: torch.nn.Module, meter: Meter | None) -> None:
    """Record the forward passes of a model on this meter, in place of an earlier one; None stops recording."""
    # torch internals: `_compiled_call_impl` is what `nn.Module.__call__` runs instead of the hooks and `forward` (torch 2.13). Wrapping
    # `forward` would hide its signature and time the hooks apart. tests/observability/test_ledger.py notices a change; it can go when
    # torch has a hook around the whole call.
    own = vars(model)  # past the `__setattr__` of wrappers
    present = own.get("_compiled_call_impl")
    beneath = present.beneath if isinstance(present, TimedForward) else present
    own["_compiled_call_impl"] = beneath if meter is None else TimedForward(model, meter, beneath)
