"""Data-parallel replicas: torch's DistributedDataParallel, through which the user's model is visible.

`Replicated` differs from DistributedDataParallel in four ways. Parameters have the names of the user's model, and attributes and methods
that the wrapper lacks are the model's. Every backward pass averages the gradients of the replicas that it reaches: after `forward`, after
a method or a submodule was called, and in a second pass. Errors name parameters instead of numbers. Gradients lie in the same buckets in
every pass: the order in which an all-reduce of three or more ranks adds a number depends on its place, so that a resumed run would
otherwise differ in the last bits from one that went on. The collectives are torch's.

Timing marks where the local part of a backward pass ends. The autograd engine runs callbacks in the order in which they were queued, and
DistributedDataParallel queues its own with the last gradient, so one that is queued with an earlier gradient runs just before the wait
for communication. It is queued by a hook on the parameter that was registered last, which costs two microseconds per averaging pass; a hook
on the loss costs ten and is used where a pass left that parameter out, and a communication hook costs tens per bucket and takes the user's
place.
"""

from __future__ import annotations

import copy
import operator
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from slipstream.distributed.collectives import check_agreement
from slipstream.distributed.guard import Limits
from slipstream.distributed.process_group import Runtime
from slipstream.errors import ConfigError, StateError
from slipstream.observability.timing.meter import LOCAL_END, Meter
from slipstream.strategies.base import Strategy
from slipstream.strategies.ddp_options import BucketObserver, DistributedDataParallelKwargs, observe_bucket

__all__ = ["DDPStrategy", "LocalBackwardTimer", "Replicated", "TimedWait"]


# torch internals: callbacks at the end of a backward pass, as torch's own DDP and FSDP queue them (torch 2.13).
# tests/observability/test_ledger_ranks.py notices a change; it can go when torch has a public hook there.
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class LocalBackwardTimer:
    """Marks the ends of the local parts of backward passes on a meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._was_missed = False
        self._is_awaited = False

    def watch(self, replicated: Replicated) -> None:
        """Mark the passes of a model, as long as it is wrapped like this."""
        replicated.__dict__["_on_last_gradient"] = self._begun

    def backward(self, loss: torch.Tensor, run: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        """Run a pass that reduces gradients."""
        if self._was_missed and loss.requires_grad:
            loss.register_hook(self._begun)  # type: ignore[no-untyped-call]
        self._is_awaited = True
        try:
            run(**kwargs)
            self._was_missed |= self._is_awaited
        finally:
            self._is_awaited = False

    def _begun(self, tensor: torch.Tensor) -> None:
        if self._is_awaited:  # and not in a pass that accumulates, which waits for nobody
            _queue_callback(self._ended)

    def _ended(self) -> None:
        if self._is_awaited:  # and not in a backward that somebody else runs, nor for a second time
            self._is_awaited = False
            meter = self._meter
            meter.add(LOCAL_END)
            meter.add(meter.clock())


class TimedWait:
    """A watched section (see `distributed/watchdog.py`) whose time is communication."""

    def __init__(self, watch: AbstractContextManager[Any], meter: Meter) -> None:
        self._watch = watch
        self._meter = meter
        self._begun = False

    def __enter__(self) -> None:
        self._watch.__enter__()
        self._begun = self._meter.wait()

    def __exit__(self, *details: Any) -> None:
        self._meter.end_wait(self._begun)
        self._watch.__exit__(*details)


_PREFIX = "module."
# torch internals: whether a profiler runs (torch 2.13). There is no public way to ask. tests/training/test_replicas.py notices a change.
_is_profiled = torch._C._autograd._profiler_enabled


class Replicated(DistributedDataParallel):
    """A model whose replicas average their gradients; made by `prepare`."""

    def __init__(
        self,
        module: torch.nn.Module,
        is_current: Callable[[], bool],
        watch: AbstractContextManager[Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("static_graph"):  # which finds unused parameters in its first pass; torch would warn, and regroup its buckets
            options["find_unused_parameters"] = False
        super().__init__(module, **options)
        self._buffer_watch: AbstractContextManager[Any] = watch or nullcontext()
        self._keeps_buckets = self.find_unused_parameters or self.static_graph
        self._fix_buckets()
        self._is_ready = False
        """Whether the coming backward averages gradients, since the last forward."""
        self._is_armed = False
        """Whether torch's reducer expects gradients: the next backward that reaches the model averages them, wanted or not."""
        self._reduces = True
        """Whether updates end with the present batch, so that gradients are to be averaged."""
        self._held = 0
        """How many blocks of `no_sync` are open."""
        self._defers = False
        """Whether `backward` decides about averaging, and not the forward pass."""
        self.frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        """The parameters that took none when it was made."""
        self.trained = _trained_identities(module)
        """Identities of the parameters that took gradients when it was made: only these are averaged."""
        self._is_current = is_current
        self._on_last_gradient: Callable[[torch.Tensor], None] | None = None
        """Called in every backward pass with the parameter that was registered last, when its gradient is there."""
        last = [parameter for parameter in module.parameters() if parameter.requires_grad][-1]
        handle = last.register_post_accumulate_grad_hook(_LastGradientHook(self))  # type: ignore[no-untyped-call]
        weakref.finalize(self, handle.remove).atexit = False

    # -- the user's model shows through ---------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_modules", {}).get("module")
        if name == "module" and module is not None:  # every forward asks for it
            return module
        try:
            return super().__getattr__(name)
        except AttributeError:
            if module is None or name.startswith("_ddp"):
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"{type(module).__name__} has no attribute {name!r}, and neither has the wrapper around it; "
                "accelerator.unwrap_model(model) gives the model itself"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if type(value) is bool and name in own:  # flags that torch sets in every forward: its own way takes microseconds
            own[name] = value
            return
        module = own.get("_modules", {}).get("module")
        if "_is_current" in own and name not in own and name != "module" and _has_own_attribute(module, name):
            setattr(module, name, value)  # else the model would go on with the old value
            own["frozen"] += _parameters_in(value)  # which are not averaged: `check_reduced` tells
        else:
            super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # of a Sequential, say; others raise as they do by themselves

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True  # whatever the length

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters under the names of the user's model."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Return the buffers under the names of the user's model."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Return the modules under the names of the user's model."""
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights under the names of the user's model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load weights under the names of the user's model, or those that a bare DistributedDataParallel would give them."""
        if state_dict and all(name.startswith(_PREFIX) for name in state_dict) and not hasattr(self.module, "module"):
            state_dict = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What was pickled is read back as the user's own module, also where Slipstream or the process group is not.
        return operator.getitem, ((self.module,), 0)

    def __copy__(self) -> Replicated:
        return self._copied({}, copy.copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicated:
        return self._copied(memo, lambda state: copy.deepcopy(state, memo))

    def _copied(self, memo: dict[int, Any], copied: Callable[[dict[str, Any]], dict[str, Any]]) -> Replicated:
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__setstate__(copied(self.__getstate__()))
        return made

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("_is_current", "_buffer_watch", "_on_last_gradient", "_shown", "_reduced"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._is_current = lambda: True
        self._buffer_watch = nullcontext()
        self._on_last_gradient = None
        self._fix_buckets()

    # -- buckets ----------------------------------------------------------------------------------------------------

    # torch internals: torch puts all gradients into one bucket in the first pass, and those of later passes into buckets in the order in
    # which they came, about which the next forward asks rank 0. Here they are in buckets in the reverse order of the parameters from the
    # first pass on, which every rank knows (torch 2.13): so a forward of one rank alone waits for nobody. Where unused parameters are
    # looked for, torch keeps its first buckets. tests/checkpoint/test_exact_resume.py and tests/training/test_replicas.py notice a change.
    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if not self.find_unused_parameters:
            parameters, sparse = parameters[::-1], sparse[::-1]
        self.__dict__["_reduced"] = parameters
        return parameters, sparse

    def _fix_buckets(self) -> None:
        """Let torch form the buckets of all passes now, instead of after the first one that averages."""
        if self.find_unused_parameters:
            return
        self.reducer._push_all_rebuilt_params()
        alone = _GroupOfOne(0, 1)  # type: ignore[call-arg]  # torch declares one of its two forms
        self.reducer._update_process_group(alone)
        try:
            self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        finally:
            self.reducer._update_process_group(self.process_group)

    # -- a step ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run as torch's own forward, which marks itself for a profiler also where there is none."""
        if torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self._delay_all_reduce_all_params or _is_profiled():
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
            self.__dict__["_is_armed"] |= self.require_forward_param_sync
            return output
        # torch internals: the parts of DistributedDataParallel.forward (torch 2.13), without the profiler mark that it always makes. The
        # decision about averaging is left to `backward`. tests/training/test_replicas.py and test_several_models.py notice a change.
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        output = self._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        own = self.__dict__
        if own["_defers"] and not own["_keeps_buckets"]:
            if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
                self._sync_buffers()
            own["require_forward_param_sync"] = own["require_backward_grad_sync"] and torch.is_grad_enabled()
            return output
        output = self._post_forward(output)  # type: ignore[no-untyped-call]
        own["_is_ready"] = own["require_forward_param_sync"] and not own["find_unused_parameters"]
        own["_is_armed"] |= own["require_forward_param_sync"]
        return output

    def _outdated(self) -> StateError:
        """Return the error for a model whose group is gone: a device would compute on, with gradients that are not averaged."""
        return StateError(
            f"this {type(self.module).__name__} was prepared before the process group was released: prepare it again "
            "(`model = accelerator.prepare(model)`), and it is wrapped for the present group"
        )

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._is_current():
            raise self._outdated()
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self.explained(error) from error

    def ready(self, loss: torch.Tensor) -> None:
        """Let the coming backward average the gradients of this model, whatever led to the loss."""
        own = self.__dict__
        if own["require_backward_grad_sync"] and not self._is_current():
            if own["_is_ready"] or own["_is_armed"]:  # the loss may come from this one; else it was wrapped anew, and has no part in it
                raise self._outdated()
            return
        if own["_is_ready"]:  # since the forward
            own["_is_ready"] = False
            return
        if not self.require_backward_grad_sync or self.static_graph:
            return
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:  # an earlier pass left parameters out, and this one may bring them; if not, `check_reduced` tells
            return
        # torch internals: what `_post_forward` does with the reducer (torch 2.13), for passes that began elsewhere.
        # tests/training/test_everyday.py notices a change.
        self.reducer.prepare_for_backward([loss] if self.find_unused_parameters else [])
        own["_is_armed"] = True

    def set_sync(self, reduces: bool) -> None:
        """Set whether the coming backward passes average gradients, unless a block of `no_sync` is open."""
        own = self.__dict__
        own["_reduces"] = reduces
        own["require_backward_grad_sync"] = reduces and not own["_held"]
        if own["_is_armed"] and not own["require_backward_grad_sync"]:
            self._disarm()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a block in which backward passes do not average gradients, also if a forward pass before it was made for averaging."""
        own = self.__dict__
        own["_held"] += 1
        self.set_sync(own["_reduces"])
        try:
            yield
        finally:
            own["_held"] -= 1
            self.set_sync(own["_reduces"])

    def _disarm(self) -> None:
        """Let torch's reducer expect nothing, where a forward pass or an earlier loss prepared it and no gradient came."""
        own = self.__dict__
        own["_is_armed"] = own["_is_ready"] = False
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:  # some gradients came: `check_reduced` will tell which did not
            return
        # torch internals: `_reset_state` is how torch recovers from failures (torch 2.13); there is no public way to disarm the reducer.
        # tests/training/test_several_models.py notices a change.
        self.reducer._reset_state()
        self._fix_buckets()

    def _sync_buffers(self) -> None:
        """Make the buffers those of rank 0, in every forward after an averaged one: all ranks have to come, so the wait is watched."""
        with self._buffer_watch:
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def check_reduced(self) -> None:
        """Raise if there are gradients that were not averaged, naming the parameters."""
        own = self.__dict__
        new: list[str] = []
        for frozen in own["frozen"]:
            if frozen.requires_grad:
                new = [
                    name
                    for name, parameter in self.module.named_parameters()
                    if parameter.requires_grad and id(parameter) not in self.trained
                ]
                break
        if new:
            raise StateError(
                f"{', '.join(new[:5])}{', ...' if len(new) > 5 else ''} of {type(self.module).__name__} did not take gradients when the "
                "model was prepared (or were put in since), so theirs are not averaged over the ranks: prepare it again after such a change"
            )
        try:
            own["reducer"]._check_reducer_finalized()
        except RuntimeError as error:
            raise self.explained(error) from None

    def show_buckets(self, look: Callable[[Any], None]) -> None:
        """Show gradients to `look` before they are averaged; see `ddp_options.py`."""
        shown = self.__dict__["_shown"] = BucketObserver(look, self.process_group)
        super().register_comm_hook(
            shown, lambda shown, bucket: observe_bucket(shown, bucket)
        )  # torch reads annotations, of its own kinds only

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Register as torch does; an observer of buckets comes first."""
        shown: BucketObserver | None = self.__dict__.get("_shown")
        if shown is not None and shown.is_usual:
            shown.put(state, hook)
        else:
            super().register_comm_hook(state, hook)

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error with names of parameters, if it is about parameters without gradients; else as it was."""
        found = re.search(r"did not receive grad for rank \d+:([\d ,]*)", str(error).replace("\n", " "))
        if found is None:
            return error
        named = {id(parameter): name for name, parameter in self.module.named_parameters()}
        numbers = sorted((int(number) for number in re.findall(r"\d+", found.group(1))), reverse=not self.find_unused_parameters)
        names = ", ".join(named[id(self._reduced[number])] for number in numbers if number < len(self._reduced))
        return StateError(
            f"the loss does not depend on every parameter of {type(self.module).__name__}, so gradients cannot be averaged over the ranks: "
            f"{names} got none in the last backward. Use them in the loss, freeze them (requires_grad_(False)) before prepare, or pass "
            "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]."
        )


class _Done(dist.Work):
    """A collective that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class _GroupOfOne(dist.ProcessGroup):
    """A process group of this process alone: it has what it broadcasts."""

    def broadcast(self, *tensors_and_options: Any) -> Any:
        return _Done()


class _LastGradientHook:
    """A hook on the last parameter of a model: gradients came, so torch's reducer expects none any more. One hook, as each costs time."""

    def __init__(self, replicated: Replicated) -> None:
        self._replicated = weakref.ref(replicated)  # which has the parameter

    def __call__(self, parameter: torch.Tensor) -> None:
        replicated = self._replicated()
        if replicated is not None:
            own = replicated.__dict__
            own["_is_armed"] = False
            if own["_on_last_gradient"] is not None:
                own["_on_last_gradient"](parameter)


def _has_own_attribute(module: Any, name: str) -> bool:
    """Return whether a module has an attribute, a parameter, a buffer or a submodule of this name itself."""
    return any(name in vars(module).get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")) or name in vars(module)


def _parameters_in(value: Any) -> list[torch.nn.Parameter]:
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    return [value] if isinstance(value, torch.nn.Parameter) else []


def _trained_identities(module: torch.nn.Module) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in module.parameters() if parameter.requires_grad)


class DDPStrategy(Strategy):
    """Several processes, each with a replica of the whole model."""

    name = "ddp"
    averages = True

    def __init__(
        self,
        runtime: Runtime,
        limits: Limits,
        device: torch.device,
        options: DistributedDataParallelKwargs | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._runtime = runtime
        self._limits = limits
        self._device = device
        self._options = options or DistributedDataParallelKwargs()
        # Waits in torch's own collectives are watched: see `distributed/watchdog.py`.
        self._in_backward = runtime.watch("backward", limits)
        buffers = runtime.watch("forward", limits)
        self._in_forward = buffers if meter is None else TimedWait(buffers, meter)
        self._timer = None if meter is None else LocalBackwardTimer(meter)
        self._replicas: list[weakref.ref[Replicated]] = []
        """In the order in which they were prepared, which all ranks share: what is done for each of them may communicate."""
        self._in_prepare = runtime.watch("prepare", limits)
        self._look: Callable[[Any], None] | None = None

    def check(self, model: torch.nn.Module, device: torch.device) -> None:
        if model in self._runtime.sharded_models:
            return  # by another Accelerator: `prepare` puts it together
        super().check(model, device)
        spread = getattr(model, "hf_device_map", None)
        if spread and len(set(map(str, spread.values()))) > 1:
            raise ConfigError(
                f"this {type(model).__name__} is spread over {', '.join(sorted(set(map(str, spread.values()))))} (its device map) and "
                "cannot be replicated on every process too: run it on one process, or load it on one device"
            )

    def move(self, model: torch.nn.Module, device: torch.device) -> None:
        if model not in self._runtime.sharded_models:  # else `prepare` puts it together, on the device
            super().move(model, device)

    def map_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self._runtime.parameter_forms:  # no model of this script was ever sharded
            return False
        from slipstream.strategies.shard_transfer import find_form, map_optimizer

        with self._in_prepare:
            return map_optimizer(optimizer, partial(find_form, self._runtime))

    def _put_together(self, model: torch.nn.Module) -> None:
        """Put whole parameters into a model that another Accelerator has sharded."""
        known = self._runtime.sharded_models.pop(model, None)
        if known is None:
            return
        from slipstream.strategies.shard_transfer import make_plain, record_forms

        self._runtime.channel(self._limits)
        known.remove_hooks()
        with self._in_prepare:
            record_forms(self._runtime, make_plain(model, self._device))

    def prepare(self, model: torch.nn.Module, before: torch.nn.Module | None = None) -> torch.nn.Module:
        self._put_together(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # nothing to average: torch refuses to wrap it
        if isinstance(before, Replicated) and before._is_current() and before.trained == _trained_identities(model):
            return before
        self._check_device(model)
        devices = [self._device.index] if self._device.index is not None else None
        layout = {
            name: f"{list(parameter.shape)} {parameter.dtype} trained: {parameter.requires_grad}"
            for name, parameter in model.named_parameters()
        }
        check_agreement(self._runtime.channel(self._limits), self._limits, f"the parameters of {type(model).__name__}", layout)
        channel: Any = self._runtime.channel()
        with self._in_prepare:
            replicated = Replicated(
                model, partial(getattr, channel, "usable"), self._in_forward, device_ids=devices, **self._options.to_kwargs()
            )
        self._replicas = [known for known in self._replicas if known() is not None] + [weakref.ref(replicated)]
        if self._timer is not None:
            self._timer.watch(replicated)
        if self._look is not None:
            replicated.show_buckets(self._look)
        self._options.register_comm_hook(replicated)
        return replicated

    def _check_device(self, model: torch.nn.Module) -> None:
        """Raise for a model on another device than that of this process, to which torch brings the inputs."""
        for name, parameter in model.named_parameters():
            if parameter.device != self._device:
                raise ConfigError(
                    f"parameter {name} of {type(model).__name__} is on {parameter.device}, but this process computes on {self._device}: "
                    "leave device_placement on, or move the whole model there before prepare"
                )

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        model = getattr(model, "_orig_mod", model)
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    @contextmanager
    def trigger_sync(self, model: torch.nn.Module) -> Iterator[None]:
        model = getattr(model, "_orig_mod", model)
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    def join(self, models: list[torch.nn.Module]) -> AbstractContextManager[Any]:
        bare = [getattr(model, "_orig_mod", model) for model in models]
        replicated = [model for model in bare if isinstance(model, DistributedDataParallel)]
        return Join(list(replicated)) if replicated else nullcontext()

    def set_sync(self, model: torch.nn.Module, reduces: bool) -> None:
        if isinstance(model, Replicated):
            model.set_sync(reduces)

    def defer(self, model: torch.nn.Module, defers: bool) -> None:
        if isinstance(model, Replicated):
            model.__dict__["_defers"] = defers

    def backward(
        self, loss: torch.Tensor, reducing: Sequence[torch.nn.Module] | None, run: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        with self._in_backward:
            for model in [known() for known in self._replicas] if reducing is None else reducing:
                if isinstance(model, Replicated):
                    model.ready(loss)
            if self._timer is None:
                (run or loss.backward)(**kwargs)  # type: ignore[no-untyped-call]
            else:
                self._timer.backward(loss, run or loss.backward, kwargs)

    def step(self, model: torch.nn.Module) -> None:
        if isinstance(model, Replicated):
            model.check_reduced()
        elif any(parameter.requires_grad for parameter in model.parameters()):
            raise StateError(
                f"{type(model).__name__} had no parameter that takes gradients when it was prepared, and now has some that are not "
                "averaged over the ranks: prepare the model again"
            )

    def watch_buckets(self, look: Callable[[Any], None], *, leaves_out: bool) -> None:
        if leaves_out and "power" in self._options.comm_hook.value:
            raise ConfigError(
                f"on_nan='skip' with DistributedDataParallelKwargs(comm_hook={self._options.comm_hook.value!r}): what that hook loses it "
                "adds to the gradients of the next update, so a NaN would stay in all of them. Write on_nan='raise', or leave out the hook."
            )
        self._look = look

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, Replicated) else model
