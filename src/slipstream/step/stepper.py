"""The stepper: windows of accumulation, backward passes, and what optimizers may do now. One for each Accelerator.

The gradient of an update is that of one big batch: the mean over all samples of the window on all ranks. A loss is taken to be the mean
over the samples of its batch, unless `weight` says that it is a sum over so many of them. Strategies average gradients
over the ranks; so a rank's part is weighed here, and only where ranks or batches hold different numbers of samples.

`backward` decides nothing that could be decided before: for the usual batch it is a few comparisons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from slipstream.comm.meter import BACKWARD, EVALUATION, FORWARD, FULL, LEAVE, Meter
from slipstream.comm.sites import call_site
from slipstream.errors import StateError
from slipstream.runtime.gradient_state import ActiveLoader, GradientState
from slipstream.step.engines import Engine, Scaler
from slipstream.step.gradients import check_gradients, open_gradients, set_gradients
from slipstream.step.loop_state import check_state
from slipstream.step.notices import notice_alone, notice_division, number_of
from slipstream.step.prepared import PreparedModel
from slipstream.step.window import Change, Window

__all__ = ["ForwardPass", "Section", "Stepper", "watch_forward"]

_is_compiling = torch.compiler.is_dynamo_compiling
_takes_gradients = torch.is_grad_enabled


class Section:
    """`with accelerator.accumulate(model):`, one batch of a window."""

    __slots__ = ("_paused", "_stepper", "models", "together", "window", "windows")

    def __init__(self, stepper: Stepper, models: Sequence[PreparedModel]) -> None:
        self.models = tuple(models)
        self.windows = tuple(model.window for model in models)
        self.window = self.windows[0]
        self.together = len(self.windows) > 1
        self._stepper = weakref.ref(stepper)  # which keeps its sections: a cycle would keep models until garbage is collected
        self._paused: Sequence[tuple[PreparedModel, bool]] = ()

    def __enter__(self) -> None:
        stepper = self._stepper()
        assert stepper is not None
        if stepper.section is not None:
            raise StateError("accumulate inside of accumulate: one block is one batch. Name all models in one: accumulate(first, second)")
        state = stepper.state
        plugin, loader = state.plugin, state.pacing() if state.nested else state.active
        steps, end, left, batch = plugin.num_steps or 1, False, None, 0
        if loader is not None:
            steps, batch = loader.steps_per_update or steps, loader.handed
            if plugin.sync_with_dataloader:
                end, left = loader.end_of_dataloader, loader.batches_left
        closing = self.window.begin(steps, end, left, batch)
        if self.together:
            self._begin_others(closing, steps, end, left, batch)
        state.sync_gradients = closing
        stepper.loader, stepper.section = loader, self
        stepper.latest = self.window
        if not closing and stepper.engine.averages and not plugin.sync_each_batch:
            self._paused = [(model, stepper.engine.set_sync(model.prepared, False)) for model in stepper.concerned(self)]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        stepper = self._stepper()
        assert stepper is not None
        stepper.section = stepper.loader = None
        if self._paused:
            for model, before in self._paused:  # which may stand in a `no_sync` block
                stepper.engine.set_sync(model.prepared, before)
            self._paused = ()

    def _begin_others(self, closing: bool, steps: int, end: bool, left: int | None, batch: int) -> None:
        if all([window.begin(steps, end, left, batch) == closing for window in self.windows[1:]]):  # noqa: C419  # all of them begin
            return
        places = ", ".join(f"{type(model.original).__name__}: batch {model.window.index} of {steps}" for model in self.models)
        raise StateError(
            f"accumulate was given models that are at different places of their windows ({places}), as they were accumulated apart "
            "before. Give each its own accumulate block, or always the same ones together."
        )


class Stepper:
    """Windows and backward passes of one Accelerator."""

    def __init__(
        self,
        state: GradientState,
        engine: Engine,
        scaler: Scaler,
        *,
        rank: int = 0,
        world_size: int = 1,
        total: Callable[[float], float] = float,
    ) -> None:
        self.state = state
        self.meter: Meter | None = state.meter
        self.engine = engine
        self.scaler = scaler
        self.models: list[PreparedModel] = []
        self.section: Section | None = None
        """The `accumulate` block that is being run."""
        self.loader: ActiveLoader | None = None
        """The loader that sets its pace."""
        self.latest: Window | None = None
        """The window that was begun last."""
        self.loose = False
        """Whether there was a backward pass outside of `accumulate` since an optimizer stepped."""
        self._joined = False
        self.parted = False
        """Whether ranks were ever allowed to make different numbers of updates."""
        self.guards: Any = None
        """What looks at updates, where somebody does: see `step/guards/`."""
        self._rank = rank
        self._world_size = world_size
        self._total = total
        """Adds a number up over all ranks."""
        self.sections: dict[tuple[torch.nn.Module, ...], Section] = {}
        """The blocks of `accumulate` by their models."""
        self._warned: set[str] = set()

    @property
    def joined(self) -> bool:
        """Whether ranks may run out of data at different times, so that none may wait for all of them."""
        return self._joined

    @joined.setter
    def joined(self, joined: bool) -> None:
        self._joined, self.parted = joined, self.parted or joined

    # -- models ---------------------------------------------------------------------------------------------------

    def add(self, original: torch.nn.Module, prepared: torch.nn.Module) -> PreparedModel:
        """Takes a prepared model in; one that was here before gets a fresh window."""
        owned = frozenset(id(parameter) for parameter in original.parameters())
        self.sections.clear()
        for model in self.models:
            if model.original is original:
                model.prepared, model.owned = prepared, owned
                model.window.reset()
                return model
        if self.guards is not None:
            self.guards.begin(original)
        self.models.append(PreparedModel(original, prepared, owned=owned))
        return self.models[-1]

    def find(self, model: torch.nn.Module) -> PreparedModel | None:
        """The record of a model, by what was given or what was given back, compiled or not."""
        model = getattr(model, "_orig_mod", model)
        return next((one for one in self.models if model is one.prepared or model is one.original), None)

    def owners(self, parameters: Iterable[torch.Tensor]) -> tuple[list[PreparedModel], list[torch.Tensor]]:
        """The prepared models that these parameters belong to, and those that belong to none."""
        found: dict[int, PreparedModel] = {}
        strangers = []
        for parameter in parameters:
            owner = next((model for model in self.models if id(parameter) in model.owned), None)
            if owner is None:
                strangers.append(parameter)
            else:
                found[id(owner)] = owner
        return list(found.values()), strangers

    def forget(self) -> None:
        """Drops every model: nothing here keeps one alive afterwards."""
        self.models = []
        self.section = self.loader = self.latest = None
        self.sections.clear()

    def window_of(self, model: PreparedModel) -> Window:
        """The window that a model follows: its own, or, if it was never named in `accumulate`, the one that was begun last."""
        own = model.window
        return own if own.index or self.latest is None else self.latest

    def concerned(self, section: Section) -> Sequence[PreparedModel]:
        """The models of a section, and those that follow it because they were never named in `accumulate`."""
        if len(section.models) == len(self.models):
            return section.models
        return [model for model in self.models if model in section.models or not model.window.index]

    # -- windows --------------------------------------------------------------------------------------------------

    def accumulate(self, models: tuple[torch.nn.Module, ...]) -> Section:
        """One batch of the windows of these models (of all prepared ones if none is named)."""
        section = self.sections.get(models)
        if section is None:
            section = self.sections[models] = Section(self, self._records(models))
        return section

    def _records(self, models: Sequence[torch.nn.Module]) -> list[PreparedModel]:
        if not models:
            if not self.models:
                raise StateError("accumulate() without a prepared model: call prepare(model, ...) first")
            return self.models
        records = [self.find(model) for model in models]
        for model, record in zip(models, records, strict=True):
            if record is None:
                raise StateError(
                    f"accumulate got a {type(model).__name__} that was not prepared by this Accelerator: "
                    "write `model = accelerator.prepare(model)` first, and pass what it gives back"
                )
        return [record for record in records if record is not None]

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        """The gradients of a loss; see the head of this module for what they are divided by."""
        meter = self.meter
        if meter is None:
            self._backward(loss, weight, kwargs)
            return
        add, clock = meter.add, meter.clock
        add(BACKWARD)
        add(clock())
        try:
            if meter.counting is None:
                self._backward(loss, weight, kwargs)
            else:
                with meter.counting.block():
                    self._backward(loss, weight, kwargs)
            # A number where it is there already: small tensors that are kept between large ones make the heap of the process grow and
            # shrink in every step, which costs more than all marks.
            meter.losses.append((meter.step, loss.item() if loss.is_cpu and loss.numel() == 1 else loss.detach()))
        finally:
            add(LEAVE)
            add(clock())
        if meter.without_optimizer:  # which would end the step
            meter.updated = True
            if self.state.active is None:
                meter.end_step()

    def _backward(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward got a {type(loss).__name__}: pass the loss, a tensor with one value")
        section = self.section
        loader = self.state.active if section is None else self.loader
        if weight is None and (loader is None or loader.shares is None) and not self.scaler.scales:
            if section is None:
                usual = (self.latest is None or self.latest.closing) and self._steps() == 1
                self.loose = True
            else:
                usual = section.window.single and not section.together
                section.window.touched = True
            if usual:  # one batch, one update, nothing to weigh: as plain PyTorch
                if self.engine.averages:
                    self.engine.backward(loss, **kwargs)
                else:
                    loss.backward(**kwargs)  # type: ignore[no-untyped-call]
                return
        if self.scaler.due:
            self._update_scale()
        if section is None:
            self._alone(loss, weight, kwargs)
        else:
            self._in_window(section, loss, weight, kwargs)

    def _steps(self) -> int:
        loader = self.state.active
        return (None if loader is None else loader.steps_per_update) or self.state.plugin.num_steps or 1

    def _in_window(self, section: Section, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        window, (part, count) = section.window, self._share()
        change = window.add_mean(count) if weight is None else self._weighted(window, part, weight)
        for other in section.windows[1:]:
            other.follow(window)
        if change.existing != 1.0:
            for model in self.concerned(section):
                model.rescale(change.existing)
        if window.expected > 1.0 and weight is None and "division" not in self._warned:
            notice_division(self._warned, loss, window.expected)
        if weight is not None:
            part = float(part > 0.0)
        self._run(loss, part, change.divisor, window.closing or self.state.plugin.sync_each_batch, kwargs)

    def _share(self) -> tuple[float, float]:
        """How this rank's mean is weighed against an equal share, and how many full batches the global batch counts as."""
        loader = self.state.active if self.section is None else self.loader
        shares = None if loader is None else loader.shares
        if shares is None or not shares.weighed:
            return 1.0, 1.0
        return self._world_size * shares.real[self._rank] / shares.full, shares.total / shares.full

    def _weighted(self, window: Window, part: float, weight: Any) -> Change:
        total = window.add_sum(number_of(weight) if part > 0.0 else 0.0, alike=self.state.plugin.sync_each_batch)
        return window.settle_sum(self._everywhere(total) if window.closing else 0.0)

    def _everywhere(self, weight: float) -> float:
        """The weight of all ranks, divided by their number."""
        if self.joined:
            raise StateError(
                "backward(weight=...) adds weights up over all processes, and in join_uneven_inputs some may be done already: "
                "leave out the weight there, or use even_batches=False, which keeps gradients exact without join_uneven_inputs"
            )
        return self._total(weight) / self._world_size

    def _alone(self, loss: torch.Tensor, weight: Any, kwargs: dict[str, Any]) -> None:
        """A backward pass outside of `accumulate`: the batch is a window of its own, as far as we can know."""
        for model in self.models:
            if model.window.index:
                model.window.reset()
        self.state.sync_gradients, self.latest, self.loose = True, None, True
        steps = self._steps()
        if steps > 1:
            notice_alone(
                self._warned,
                f"backward at {call_site()} is outside of `with accelerator.accumulate(model):`, so gradients of {steps} batches are "
                f"asked for, but where an update ends is not known here: each loss is divided by {steps}, and every optimizer.step() acts"
            )
            notice_division(self._warned, loss, float(steps))
        part, count = self._share()
        if weight is None:
            self._run(loss, part / count if count else 0.0, float(steps), True, kwargs)
            return
        total = self._everywhere(number_of(weight) if part > 0.0 else 0.0)
        self._run(loss, float(part > 0.0), (total or 1.0) * steps, True, kwargs)

    def _run(self, loss: torch.Tensor, part: float, divisor: float, reduces: bool, kwargs: dict[str, Any]) -> None:
        if part != 1.0:
            loss = loss * (part / divisor)
        elif divisor != 1.0:
            loss = loss / divisor
        if self.scaler.scales:
            loss = self.scaler.scale(loss)
        if reduces and self.engine.averages:
            self.engine.backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def _update_scale(self) -> None:
        """A new loss scale; gradients that are there were made with the old one, also those of a window whose last batch this is."""
        waiting = [model for model in self.models if model.gradients()]
        ratio = self.scaler.flush(want_ratio=bool(waiting))
        if ratio != 1.0:
            for model in waiting:
                model.rescale(ratio)

    # -- saved and restored (loop_state.py, gradients.py) -----------------------------------------------------------

    def loop_state(self) -> dict[str, Any]:
        """Where the windows stand, in plain data: the state of one rank. To be asked before the state of the loss scaler.

        A loss scale that is due is updated now, as the next loss would do it, with the gradients that were made with the old one.
        """
        if self.scaler.due:
            self._update_scale()
        windows = [model.window for model in self.models]
        latest = next((place for place, window in enumerate(windows) if window is self.latest), None)
        states = [window.state() for window in windows]
        return {"windows": states, "latest": latest, "sync_gradients": self.state.sync_gradients, "loose": self.loose}

    def check(self, state: Any, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raises unless these can be restored here; changes nothing."""
        check_state(state, [type(model.original).__name__ for model in self.models])
        check_gradients([model.original for model in self.models], gradients)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where saved windows stood; their gradients come by `set_gradients`."""
        self.check(state)
        for model, saved in zip(self.models, state["windows"], strict=True):
            model.window.restore(saved)
        self.section = self.loader = None
        self.latest = None if state["latest"] is None else self.models[state["latest"]].window
        self.state.sync_gradients, self.loose = state["sync_gradients"], state["loose"]

    def open_gradients(self) -> dict[str, torch.Tensor] | None:
        """The gradients on this rank that belong to an update still to come, as "0.weight": of the first model. None if there are none."""
        waiting = [self.loose or _is_open(self.window_of(model)) for model in self.models]
        return open_gradients([model.original if open_ else None for model, open_ in zip(self.models, waiting, strict=True)]) or None

    def set_gradients(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        """Puts gradients back; parameters without one here have none afterwards."""
        set_gradients([model.original for model in self.models], gradients)


def _is_open(window: Window) -> bool:
    return window.pending and not window.closing


class ForwardPass:
    """What stands before the passes of a prepared model, in the place where torch keeps a compiled call: it marks how long they take.

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
        add, clock = meter.add, meter.clock
        add(FORWARD if _takes_gradients() else EVALUATION)
        add(clock())
        try:
            if meter.counting is None:
                return call(*args, **kwargs)
            with meter.counting.block():
                return call(*args, **kwargs)
        finally:
            add(LEAVE)
            add(clock())
            if len(meter.log) > FULL:
                meter.attend(meter.log[-1])

    def __reduce__(self) -> Any:
        return type(None), ()


def watch_forward(model: torch.nn.Module, meter: Meter | None) -> None:
    """Marks the passes of a model on this meter, and on no other; on none at all without one."""
    own = vars(model)  # past the `__setattr__` of wrappers
    present = own.get("_compiled_call_impl")
    beneath = present.beneath if isinstance(present, ForwardPass) else present
    own["_compiled_call_impl"] = beneath if meter is None else ForwardPass(model, meter, beneath)
