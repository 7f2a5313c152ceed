"""The stepper of one Accelerator: `accumulate` blocks, backward passes, and whether optimizers may step now.

The gradient of an update is the mean over all samples of the window on all ranks. A loss is taken as the mean over its batch, unless
`weight` says that it is a sum over that many samples. Strategies average gradients over ranks, so losses are weighted here only if ranks
or batches have different numbers of samples. With several models, a loss counts for the models that it reaches, and gradients are
reduced for those whose window closes. For a full batch that is an update by itself, `backward` adds a few comparisons to torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slipstream.distributed.call_site import call_site
from slipstream.distributed.gradient_state import GradientState, MicroBatch
from slipstream.distributed.pytree import local_part
from slipstream.errors import StateError
from slipstream.observability.timing.meter import BACKWARD, EVALUATION, FORWARD, LEAVE, LOG_LIMIT, OPTIMIZER, Meter
from slipstream.precision.scaler import LossScaler, NoScaler
from slipstream.training.accumulation import Accumulation
from slipstream.training.loss_checks import (
    NOT_PREPARED_MESSAGE,
    check_weight,
    find_reached_models,
    is_on_device,
    read_weights,
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
    """A model as the user passed it, as `prepare` returned it, and the state of its accumulation."""

    original: torch.nn.Module
    prepared: torch.nn.Module
    accumulation: Accumulation = field(default_factory=Accumulation)
    owned: frozenset[int] = frozenset()
    """Identities of the parameters."""
    collect: Callable[[torch.nn.Module], Iterable[tuple[torch.Tensor, torch.Tensor]]] = field(kw_only=True)
    """Returns the gradients of a model with their parameters: see `Strategy.gradients`."""
    shared: frozenset[int] = frozenset()
    """Those of them that a model prepared earlier has too; its record rescales their gradients."""

    def has_same_parameters(self) -> bool:
        """Return whether the model still has the parameters that it had when it was prepared; sharding replaces them."""
        return self.owned == frozenset(id(parameter) for parameter in self.original.parameters())

    def gradients(self) -> list[torch.Tensor]:
        """Return the present gradients, without those of shared parameters."""
        return [gradient for parameter, gradient in self.collect(self.original) if id(parameter) not in self.shared]

    def rescale(self, factor: float | torch.Tensor) -> None:
        """Multiply the present gradients by a factor; one on a device is not read."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in self.gradients():
            by_device.setdefault(gradient.device, []).append(local_part(gradient))
        for device, gradients in by_device.items():
            own = factor.to(device) if isinstance(factor, torch.Tensor) else factor
            dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
            if dense:
                torch._foreach_mul_(dense, own)
            for gradient in gradients:
                if gradient.layout != torch.strided:
                    gradient.mul_(own)


_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled

_FULL_PRECISION = (torch.float32, torch.float64)
_CHECKED_LOSSES = 2
"""How many of the first losses are checked for whether they reach a prepared model."""


def _find_batch(state: GradientState, last: MicroBatch | None, *, stays: bool = False) -> MicroBatch | None:
    """Return the batch to work on after `last`, as `GradientState.batch_after`, with a short path for plain loops.

    A block always begins the next batch. Outside of blocks the batch `stays` the same until an optimizer steps, because a script may run
    several backward passes on it; a batch that was read ahead does not replace it while it is alive.
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
    """The context manager of `with accelerator.accumulate(model):`, one batch of a window."""

    __slots__ = ("_unaffected", "_stepper", "batch", "affected", "first", "models")

    def __init__(self, stepper: Stepper, models: Sequence[PreparedModel]) -> None:
        self.models = tuple(models)
        self.first = self.models[0].accumulation
        followers = [model for model in stepper.models if not model.accumulation.named]
        self.affected = (*self.models, *followers)
        """The models of this block, and those that were never named in any block and follow this one."""
        self.batch: MicroBatch | None = None
        """The loader's batch that the block belongs to."""
        averages = stepper.strategy.averages
        self._unaffected = [model.prepared for model in stepper.models if model not in self.affected] if averages else []
        self._stepper = weakref.ref(stepper)  # the stepper keeps its blocks: a cycle would delay freeing the models

    def __enter__(self) -> None:
        stepper = self._stepper()
        assert stepper is not None
        if stepper.block is not None:
            raise StateError("accumulate inside of accumulate: one block is one batch. Name all models in one: accumulate(first, second)")
        state, first = stepper.state, self.first
        plugin = state.plugin
        self.batch = batch = _find_batch(state, first.batch) if state.reads_loaders else None
        steps = (None if batch is None else batch.steps) or plugin.num_steps or 1
        if state.reads_loaders:
            if steps > 1 and batch is None and plugin.sync_with_dataloader:
                warn_if_read_ahead(stepper.warned, first, state)
            stepper.record_batch(batch, steps)
        closing = first.begin(steps, batch, plugin.sync_with_dataloader)
        if first.closed_early:
            warn_of_late_pieces(stepper.warned)
        if first.index == 1:
            first.passes = state.passes
        if len(self.affected) > 1:
            self._begin_others(closing, steps, plugin.sync_with_dataloader)
        state.sync_gradients = closing
        state.trained += 1
        stepper.block, state.batch = self, batch  # after what may raise: then the block has not begun
        stepper.accumulates |= not closing
        if stepper.strategy.averages:
            reduces = closing or plugin.sync_each_batch
            for model in self.affected:
                stepper.strategy.set_sync(model.prepared, reduces)
            for wrapped in self._unaffected:
                stepper.strategy.defer(wrapped, True)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        stepper = self._stepper()
        assert stepper is not None
        stepper.block = stepper.state.batch = None
        for wrapped in self._unaffected:
            stepper.strategy.defer(wrapped, False)
        batch = self.batch
        if batch is not None and batch.loader_pass.batch is not batch and batch.anchor() is None:
            # The script has dropped the batch that this block was matched with, so the block used the newest batch instead.
            newest = batch.loader_pass.batch
            for model in self.models:
                model.accumulation.batch = newest
            batch.loader_pass.worked = batch.loader_pass.handed
            if newest is not None and newest.end:
                warn_if_read_ahead(stepper.warned, self.first, None)

    def _begin_others(self, closing: bool, steps: int, follows_loader: bool) -> None:
        differ = False
        for model in self.models[1:]:
            differ |= model.accumulation.begin(steps, self.batch, follows_loader) != closing
        if differ:
            positions = ", ".join(f"{type(model.original).__name__}: batch {model.accumulation.index} of {steps}" for model in self.models)
            raise StateError(
                f"accumulate got models at different positions of their windows ({positions}), because they were accumulated separately "
                "before. Use one accumulate block for each, or always name the same models together."
            )
        for model in self.affected[len(self.models) :]:
            model.accumulation.copy_position_from(self.first)


class Stepper:
    """The `accumulate` blocks and backward passes of one Accelerator."""

    def __init__(
        self,
        state: GradientState,
        strategy: Strategy,
        scaler: LossScaler | NoScaler,
        *,
        rank: int = 0,
        world_size: int = 1,
        sum_numbers: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self.state = state
        self.meter: Meter | None = state.meter
        self.strategy = strategy
        self.scaler = scaler
        self.models: list[PreparedModel] = []
        self.block: AccumulateBlock | None = None
        """The `accumulate` block that is running."""
        self.accumulates = False
        """Whether any window has had more than one batch."""
        self.backward_outside_block = False
        """Whether a backward pass has run outside of `accumulate` since the last optimizer step."""
        self._outside_batch: MicroBatch | None = None
        self._joined = False
        self.trigger_fired = False
        """Whether `check_trigger` has returned True, which is how scripts leave a loop early."""
        self.updates_may_differ = False
        """Whether ranks may have made different numbers of updates (`join_uneven_inputs`)."""
        self.guards: Any = None
        """The guards of `observability/guards/`, or None."""
        self._rank = rank
        self.world_size = world_size
        self._sum_numbers = sum_numbers
        """Returns the sums of numbers over all ranks."""
        self.blocks: dict[tuple[torch.nn.Module, ...], AccumulateBlock] = {}
        """The `accumulate` blocks by their models."""
        self.make_accumulation: Callable[[], Accumulation] = Accumulation
        """Makes the state machine of a model; the distribution that provides the name `accelerate` divides by another rule."""
        self.warned: set[str] = set()
        self._owners: dict[int, PreparedModel] = {}
        """The models by the identities of their parameters."""
        self._losses_to_check = _CHECKED_LOSSES if world_size > 1 else 0

    @property
    def joined(self) -> bool:
        """Whether ranks may run out of data at different times, so that a rank must not wait for all others."""
        return self._joined

    @joined.setter
    def joined(self, joined: bool) -> None:
        self._joined, self.updates_may_differ = joined, self.updates_may_differ or joined

    # -- models ---------------------------------------------------------------------------------------------------

    def add(self, original: torch.nn.Module, prepared: torch.nn.Module) -> PreparedModel:
        """Add a prepared model; if it is known already, reset its accumulation."""
        self.blocks.clear()
        model = next((known for known in self.models if known.original is original), None)
        if model is None:
            if self.guards is not None:
                self.guards.begin(original)
            model = PreparedModel(original, prepared, self.make_accumulation(), collect=self.strategy.gradients)
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
        """Return the prepared models that own these parameters, and the parameters that no model owns."""
        found: dict[int, PreparedModel] = {}
        unowned = []
        for parameter in parameters:
            owner = self._owners.get(id(parameter))
            if owner is None:
                unowned.append(parameter)
            else:
                found[id(owner)] = owner
        return list(found.values()), unowned

    def forget(self) -> None:
        """Drop all references to models."""
        self.models, self._owners = [], {}
        self.block = self._outside_batch = None
        self.blocks.clear()

    def set_closing(self, closing: bool) -> None:
        """Set whether the current batch ends an update of every model."""
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
                    "write `model = accelerator.prepare(model)` first, and pass the result"
                )
            records.append(record)
        return records

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        """Compute the gradients of a loss, with the divisor that the module docstring describes."""
        self.state.trained += 1
        meter = self.meter
        if meter is None or not isinstance(loss, torch.Tensor):
            self._backward(loss, weight, kwargs)
            return
        # Keep a number if the loss is on the host: small tensors kept between large ones make the heap grow and shrink in every step,
        # which costs more than all marks. On a device keep a copy, for which nobody waits: the loss itself may be memory of a graph that
        # the next replay overwrites, or be changed in place before it is read.
        kept = loss.item() if loss.is_cpu and loss.numel() == 1 else loss.detach().clone()
        run_timed(meter, BACKWARD, self._backward, loss, weight, kwargs)
        meter.losses.append((meter.step, kept))
        if meter.without_optimizer:  # an optimizer would end the step
            meter.updated = True
            if self.state.active is None:
                meter.end_step()

    def _backward(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward got a {type(loss).__name__}: pass the loss, a tensor with one value")
        if self._losses_to_check or loss.dtype not in _FULL_PRECISION:
            self._check_loss(loss)
        block = self.block
        batch = block.batch if block is not None else self._batch_outside() if self.state.reads_loaders else None
        if weight is None and (batch is None or batch.shares is None) and not self.scaler.scales:
            if block is None:
                usual = not self.accumulates and self._steps(batch) == 1
                self.backward_outside_block = True
            else:
                usual = block.first.is_whole_window
                if usual:
                    for model in block.affected:
                        model.accumulation.backward_done = True
            if usual:  # one batch, one update, equal weights: as plain PyTorch
                if self.strategy.averages:
                    self.strategy.backward(loss, None, **kwargs)
                else:
                    loss.backward(**kwargs)  # type: ignore[no-untyped-call]
                return
        if self.scaler.update_pending:
            self._update_scale()
        if block is None:
            self._backward_outside(loss, weight, batch, kwargs)
        else:
            self._backward_in_block(block, loss, weight, kwargs)

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Warn about a loss in half precision; on several processes, raise or warn if no prepared model gets gradients."""
        warn_if_low_precision(self.warned, loss)
        if not self._losses_to_check:
            return
        self._losses_to_check -= 1
        if not self.models:
            raise StateError(NOT_PREPARED_MESSAGE.format(site=call_site()))
        if loss.requires_grad:
            warn_if_unprepared(self.warned, find_reached_models(loss, self._graph_owners()))

    def _steps(self, batch: MicroBatch | None) -> int:
        return (None if batch is None else batch.steps) or self.state.plugin.num_steps or 1

    def _batch_outside(self) -> MicroBatch | None:
        """Return the batch of a backward pass outside of `accumulate`."""
        self._outside_batch = batch = _find_batch(self.state, self._outside_batch, stays=self.backward_outside_block)
        self.record_batch(batch)
        return batch

    def record_batch(self, batch: MicroBatch | None, steps: int = 1) -> None:
        """Record on its pass that training uses a batch; warn if the batch is uncertain and the result depends on it."""
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

    def _graph_owners(self) -> dict[int, PreparedModel]:
        """Return the models by the identities of what stands for their parameters in the graph of a loss."""
        aliases = self.strategy.aliases()
        if not aliases:
            return self._owners
        known = {identity: self._owners[id(parameter)] for identity, parameter in aliases.items() if id(parameter) in self._owners}
        return self._owners | known

    def _reached(self, loss: torch.Tensor, weighs: bool) -> list[PreparedModel]:
        """Return the models that a loss counts for, in the order of `prepare`; all models if the answer makes no difference."""
        if len(self.models) == 1 or not (weighs or self.accumulates):
            return self.models
        reached = find_reached_models(loss, self._graph_owners())
        return self.models if reached is None else [model for model in self.models if model in reached]

    def _backward_in_block(self, block: AccumulateBlock, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        part, count = self._share(block.batch)
        reached = self._reached(loss, weight is not None)
        affected = block.affected
        if weight is None:
            divisors = [model.accumulation.add_mean(count, model in reached) for model in affected]
            if block.first.expected > 1.0 and "division" not in self.warned:
                warn_if_divided(self.warned, loss, block.first.expected)
        else:
            divisors = self._weigh(affected, reached, weight if part > 0.0 else 0.0)
            part = float(part > 0.0)
        divisor, corrections = _choose_divisor(affected, divisors, reached, weight is not None)
        self._run(loss, part, divisor, reached, kwargs)
        for model, final in corrections:
            model.rescale(model.accumulation.change_divisor(final))

    def _share(self, batch: MicroBatch | None) -> tuple[float, float]:
        """Return the weight of this rank's mean (1 for an equal share), and the size of the global batch in full batches."""
        shares = None if batch is None else batch.shares
        if shares is None:
            return 1.0, 1.0
        counted = shares.counted
        return self.world_size * counted[self._rank] / shares.full, sum(counted) / shares.full

    def _weigh(self, affected: Sequence[PreparedModel], reached: Sequence[PreparedModel], weight: Any) -> list[float]:
        """Add the weight of a sum to the models that it reaches, and return the divisor of each model's sums.

        A weight on a device is not read before the window closes, because reading it waits for the device.
        """
        weight = weight.detach().clone() if is_on_device(weight) else check_weight(weight)  # the script may write into it
        for model in affected:
            if model in reached:
                model.accumulation.add_sum(weight)
        weighed = [model.accumulation for model in affected if model.accumulation.is_weighted]
        if affected[0].accumulation.closing:
            _read_weights(weighed)
            totals = self._sum_over_ranks([accumulation.total for accumulation in weighed])
            found = {id(own): own.sum_divisor(total) for own, total in zip(weighed, totals, strict=True)}
        else:
            new = [accumulation for accumulation in weighed if accumulation.estimate is None]
            if new:  # once: the same estimate on every rank, so that gradients can be averaged at any time
                mean = self._sum_over_ranks([check_weight(weight)])[0]
                for accumulation in new:
                    accumulation.set_estimate(mean)
            found = {id(accumulation): accumulation.estimate or 1.0 for accumulation in weighed}
        return [found.get(id(model.accumulation), 1.0) for model in affected]

    def _sum_over_ranks(self, weights: list[float]) -> list[float]:
        """Return the sum of the weights over all ranks, divided by the number of ranks."""
        if self.joined:
            raise StateError(
                "backward(weight=...) sums weights over all processes, but in join_uneven_inputs some processes may have finished: "
                "leave out the weight there, or leave out join_uneven_inputs (gradients are exact without it)"
            )
        return [total / self.world_size for total in self._sum_numbers(weights)]

    def _backward_outside(self, loss: torch.Tensor, weight: Any, batch: MicroBatch | None, kwargs: dict[str, Any]) -> None:
        """Run a backward pass outside of `accumulate`, which is a whole update for the models that it reaches."""
        reached = self._reached(loss, weight is not None)
        for model in reached:
            if model.accumulation.index:
                model.accumulation.reset()
            self.strategy.set_sync(model.prepared, True)
        self.state.sync_gradients, self.backward_outside_block = True, True
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
        if reducing or not self.strategy.replicated:
            self.strategy.backward(loss, reducing, **kwargs)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def _update_scale(self) -> None:
        """Update the loss scale, and rescale gradients that were computed with the old scale."""
        waiting = [model for model in self.models if model.gradients()]
        ratio = self.scaler.apply_pending_update(want_ratio=bool(waiting))
        for model in waiting:
            model.rescale(ratio)

    # -- saved and restored (loop_state.py) ---------------------------------------------------------------------------

    def loop_state(self) -> dict[str, Any]:
        """Return the state of the windows on this rank as plain data. Call it before reading the state of the loss scaler.

        A pending update of the loss scale is applied now, as the next loss would do, and present gradients are rescaled.
        """
        if self.scaler.update_pending:
            self._update_scale()
        _read_weights([model.accumulation for model in self.models])
        states = [model.accumulation.state() for model in self.models]
        return {"windows": states, "sync_gradients": self.state.sync_gradients, "loose": self.backward_outside_block}

    def check(self, state: Any, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raise unless this state and these gradients can be restored; change nothing."""
        from slipstream.training.loop_state import check_gradients, check_loop_state  # not needed by a training step

        check_loop_state(state, [type(model.original).__name__ for model in self.models])
        check_gradients([model.original for model in self.models], gradients)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore saved windows; `set_gradients` restores their gradients."""
        self.check(state)
        for model, saved in zip(self.models, state["windows"], strict=True):
            model.accumulation.restore(saved)
            self.strategy.set_sync(model.prepared, model.accumulation.closing)
            self.accumulates |= not model.accumulation.closing
        self.block = self._outside_batch = None
        self.blocks.clear()
        self.state.sync_gradients, self.backward_outside_block = state["sync_gradients"], state["loose"]

    def open_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return this rank's gradients of open windows by name ("0.weight" is of the first model); None if there are none."""
        from slipstream.training.loop_state import collect_gradients

        waiting = [self.backward_outside_block or (model.accumulation.pending and not model.accumulation.closing) for model in self.models]
        for model, is_open in zip(self.models, waiting, strict=True):
            if is_open:
                self.strategy.reduce_waiting(model.prepared)
        return collect_gradients([model.original if open_ else None for model, open_ in zip(self.models, waiting, strict=True)]) or None

    def reserve_gradients(self, gradients: Mapping[str, torch.Tensor] | None) -> Callable[[], None]:
        """Allocate memory for gradients that will be set; return a function that frees it."""
        from slipstream.training.loop_state import reserve_gradients

        return reserve_gradients([model.original for model in self.models], gradients)

    def set_gradients(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        """Restore gradients; clear those of all other parameters."""
        from slipstream.training.loop_state import set_gradients

        set_gradients([model.original for model in self.models], gradients)


def _read_weights(accumulations: Sequence[Accumulation]) -> None:
    """Read the weights of windows that are still on a device, all together."""
    known = {id(weight): weight for own in accumulations for weight in own.weights if isinstance(weight, torch.Tensor)}
    if known:
        numbers = dict(zip(known, read_weights(list(known.values())), strict=True))
        for own in accumulations:
            own.weights[:] = [numbers.get(id(weight), weight) for weight in own.weights]


def _choose_divisor(
    affected: Sequence[PreparedModel], divisors: Sequence[float], reached: Sequence[PreparedModel], weighs: bool
) -> tuple[float, list[tuple[PreparedModel, float]]]:
    """Return (divisor, corrections) for a loss that may count for several models at different positions of their windows.

    Accumulated gradients of the models that the loss reaches are brought to the divisor now. After the backward pass, the models in
    `corrections` must be rescaled to their own divisor. Models that the loss does not reach get their own divisor now if their losses are
    of the same kind.
    """
    if len(affected) == 1 and affected[0] in reached:  # the usual case, where the lines below come to the same
        model, divisor = affected[0], divisors[0]
        factor = model.accumulation.change_divisor(divisor)
        if factor != 1.0:
            model.rescale(factor)
        return divisor, []
    pairs = list(zip(affected, divisors, strict=True))
    reached_pairs = [pair for pair in pairs if pair[0] in reached]
    divisor = next((own for model, own in reached_pairs if model.accumulation.gradient_divisor is not None), (reached_pairs or pairs)[0][1])
    corrections = []
    for model, own in pairs:
        accumulation = model.accumulation
        is_reached = model in reached
        if not is_reached and (accumulation.gradient_divisor is None or not accumulation.closing or accumulation.is_weighted != weighs):
            continue
        factor = accumulation.change_divisor(divisor if is_reached else own)
        if factor != 1.0:
            model.rescale(factor)
        if is_reached and own != divisor and accumulation.closing:
            corrections.append((model, own))
    return divisor, corrections


def run_timed(meter: Meter | None, phase: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and record its time as one phase of the step; without a meter, only call it.

    Forward, backward and the optimizer record their times here. The call costs 0.1 microseconds more than the same lines inlined
    (measured: 0.3 instead of 0.2 per phase, five phases per step). It is in this module because every step enters it anyway.
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
    """Records how long the forward passes of a prepared model take, in the attribute where torch keeps a compiled call.

    The model keeps its class, `forward`, state and hooks. Copies and unpickled models are not timed.
    """

    __slots__ = ("_meter", "_module", "compiled_call")

    def __init__(self, module: torch.nn.Module, meter: Meter, compiled_call: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)  # the module holds this object: a cycle would delay freeing its weights
        self._meter = meter
        self.compiled_call = compiled_call
        """The compiled call of the model, if it is compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.compiled_call or self._module()._call_impl  # type: ignore[union-attr]  # it is being called
        if _is_compiling():  # a clock cannot be compiled
            return call(*args, **kwargs)
        meter, phase = self._meter, FORWARD if _is_grad_enabled() else EVALUATION
        if meter.counting is not None:
            return run_timed(meter, phase, call, *args, **kwargs)
        add, clock = meter.add, meter.clock
        add(phase)  # as `run_timed` does it: a call less in the hottest place
        add(clock())
        try:
            result = call(*args, **kwargs)
        finally:
            add(LEAVE)
            add(clock())
        if len(meter.log) > LOG_LIMIT:
            meter.attend(meter.log[-1])
        return result

    def __reduce__(self) -> Any:
        return type(None), ()


def time_forward(model: torch.nn.Module, meter: Meter | None) -> None:
    """Record the forward passes of a model on `meter`, replacing an earlier one; None stops recording."""
    # torch internals: `_compiled_call_impl` is what `nn.Module.__call__` runs instead of the hooks and `forward` (torch 2.13). Wrapping
    # `forward` would hide its signature and time the hooks apart. tests/observability/test_ledger.py notices a change; it can go when
    # torch has a hook around the whole call.
    attributes = vars(model)  # wrappers may define `__setattr__`
    present = attributes.get("_compiled_call_impl")
    compiled_call = present.compiled_call if isinstance(present, TimedForward) else present
    attributes["_compiled_call_impl"] = compiled_call if meter is None else TimedForward(model, meter, compiled_call)
