"""The loss scaler of fp16, and the null object for every other precision.

Several optimizers may step on gradients of one scale, so the scale does not change after the first of them: `step` leaves an update
pending, and `apply_pending_update` runs it before the next loss is scaled. Gradients are divided once per update, however often
`unscale` is called, and always by the scale that they were multiplied with. `step` returns whether the parameters were updated.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from slipstream.devices.table import CPU
from slipstream.distributed.state import AcceleratorState
from slipstream.errors import ConfigError, StateError
from slipstream.precision.policy import GradScalerKwargs

__all__ = ["LossScaler", "NoScaler", "get_grad_scaler", "make_scaler"]


def make_scaler(mixed_precision: str, device_type: str, handler: GradScalerKwargs | None = None) -> LossScaler | NoScaler:
    """Return the scaler of a precision: a real one for fp16 alone.

    >>> type(make_scaler("bf16", "cpu")).__name__, type(make_scaler("fp16", "cpu")).__name__
    ('NoScaler', 'LossScaler')
    """
    handler = handler or GradScalerKwargs()
    return LossScaler(device_type, handler) if mixed_precision == "fp16" and handler.enabled else NoScaler()


class NoScaler:
    """Losses and gradients as they are.

    >>> NoScaler().scale(torch.tensor(2.0))
    tensor(2.)
    """

    scales = False
    """Whether losses are scaled at all."""
    update_pending = False
    """Whether the scale is to be updated before the next loss is scaled."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss itself."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients have no scale."""

    def on_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients have no scale."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        """Step the optimizer, and return True."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def apply_pending_update(self, want_ratio: bool = False) -> float:
        """Return 1.0: there is nothing to update."""
        return 1.0

    def get_scale(self) -> float:
        """Return 1.0."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept an empty state; warn about one of fp16, which has no use here."""
        if state_dict:
            warnings.warn(
                f"the state of a loss scaler (scale {state_dict.get('scale')}) was loaded into a run whose precision has none: "
                "it is left out. It was saved with mixed_precision='fp16'.",
                stacklevel=2,
            )


class _OffloadedGradScaler(torch.amp.GradScaler):
    """torch's scaler, also for gradients in host memory (offloaded shards) under a scale on a device."""

    _steps_on_host = False

    # torch internals: torch copies the scale, and whether it overflowed, to the host without waiting, and uses them there at once: memory
    # that has not arrived (torch 2.13). tests/strategies/test_standin_fsdp.py notices; it can go when torch waits for them.
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if _has_host_gradients(optimizer):
            inv_scale, found_inf = inv_scale.to(CPU.type), found_inf.to(CPU.type)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer; a fused one takes the scale from the host if its gradients are there."""
        self._steps_on_host = _has_host_gradients(optimizer)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self._steps_on_host = False

    def _get_scale_async(self) -> torch.Tensor | None:
        scale: torch.Tensor | None = super()._get_scale_async()
        return scale.to(CPU.type) if scale is not None and self._steps_on_host else scale


def _has_host_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(gradient is not None and gradient.device.type == CPU.type for gradient in gradients)


class LossScaler:
    """A `torch.amp.GradScaler` whose update waits until all optimizers of a scale have stepped.

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
    >>> scaler = LossScaler("cpu", GradScalerKwargs(init_scale=4.0))
    >>> scaler.scale((parameter * 1.0).sum()).backward()
    >>> parameter.grad
    tensor([4.])
    >>> scaler.step(optimizer), parameter.detach()
    (True, tensor([0.5000]))
    """

    scales = True

    def __init__(self, device_type: str, handler: GradScalerKwargs | None = None) -> None:
        handler = handler or GradScalerKwargs()
        self._device_type = device_type
        self._scaler = _OffloadedGradScaler(
            device_type,
            init_scale=handler.init_scale,
            growth_factor=handler.growth_factor,
            backoff_factor=handler.backoff_factor,
            growth_interval=handler.growth_interval,
        )
        self._begun = False  # a loss was scaled
        self._touched = False  # gradients were divided since the last update
        self._late = False  # a loss was scaled while an update was due that could not run yet
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # since the last update
        self._cleared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # since their gradients were divided
        self._unscaled: weakref.WeakKeyDictionary[torch.optim.Optimizer, _GradientVersions | None]
        self._unscaled = weakref.WeakKeyDictionary()  # and not stepped yet; with their gradients as they were when a later loss was scaled

    @property
    def update_pending(self) -> bool:
        """Whether the scale is to be updated before the next loss is scaled."""
        return self._touched and bool(self._stepped) and not self._waiting()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale; an update that is due comes first."""
        if self._touched:
            self.apply_pending_update()
            self._late = bool(self._stepped)
            for optimizer, marks in list(self._unscaled.items()):
                if marks is None:
                    self._unscaled[optimizer] = _gradient_versions(optimizer)
        self._begun = True
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale; once per update, more calls do nothing."""
        if _has_gradients(optimizer) and self._is_scaled(optimizer):
            self._scaler.unscale_(optimizer)
            self._touched = True
            self._unscaled[optimizer] = None
            self._cleared.discard(optimizer)

    def on_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the gradients of an optimizer were cleared: new ones have the scale."""
        self._cleared.add(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        """Divide the gradients if that was not done, step unless they overflowed, and return whether the parameters were updated."""
        if closure is not None:
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure) cannot be used with mixed_precision='fp16': the closure computes gradients "
                "within the step, where they cannot be checked for overflow. Write mixed_precision='bf16' or 'no', or take an optimizer "
                "without a closure."
            )
        if not _has_gradients(optimizer):  # as in plain PyTorch, a step without gradients changes nothing
            optimizer.step()
            return True
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ConfigError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer, so it is unknown whether its step was skipped after an "
                "overflow: write mixed_precision='bf16' or 'no', or derive it from torch.optim.Optimizer"
            )
        if optimizer in self._stepped and not self._late:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called twice after one backward: in fp16 its gradients were divided by the loss "
                "scale already. Call backward before each step."
            )
        self._is_scaled(optimizer)
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda optimizer, args, kwargs: stepped.append(not _has_overflow(optimizer)))
        try:
            self._scaler.step(optimizer)
        finally:
            hook.remove()
        self._unscaled.pop(optimizer, None)
        self._touched = True
        self._stepped.add(optimizer)
        return any(stepped)

    def apply_pending_update(self, want_ratio: bool = False) -> float | torch.Tensor:
        """Run the update that is due. With `want_ratio`, return new scale over old scale, on the device, without waiting; else 1.0."""
        if not self.update_pending:
            return 1.0
        if not want_ratio:
            self._scaler.update()
            self._forget()
            return 1.0
        one = torch.ones((), device=self._device_type)
        before = self._scaler.scale(one)  # reading the number would wait for the device, twice
        self._scaler.update()
        self._forget()
        return self._scaler.scale(one) / before

    def get_scale(self) -> float:
        """Return the scale that the next loss will have. Waits for the device."""
        self.apply_pending_update()
        return self._scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, as `torch.amp.GradScaler` names them."""
        self.apply_pending_update()
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; an empty one (of another precision) leaves the scale as it is, with a warning."""
        if not state_dict:
            warnings.warn(
                f"there is no loss scale in what was loaded (it was saved with another precision): fp16 goes on with {self.get_scale():g}",
                stacklevel=2,
            )
            return
        self._keep_scale()
        self._scaler.load_state_dict(state_dict)

    def _is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether its gradients still have the scale; clear marks of an earlier update that ended without a step."""
        if not self._begun:
            raise StateError(
                "there are gradients, but no loss was scaled: backward was called on the loss itself. In fp16 write "
                "accelerator.backward(loss) instead of loss.backward()."
            )
        if optimizer in self._stepped:
            if not self._late:
                return False
            self._unscaled.pop(optimizer, None)
            self._start_over(optimizer)
        elif optimizer in self._unscaled:
            marks = self._unscaled[optimizer]
            now = _gradient_versions(optimizer)
            if marks is None or marks == now:
                self._unscaled[optimizer] = None
                return False
            if optimizer not in self._cleared and _were_added_to(marks, now):
                raise StateError(
                    f"gradients of {type(optimizer).__name__} were divided by the loss scale (by clipping), and then another backward "
                    "added gradients with the scale to them. In fp16 clip after the last backward of an update, as accumulate does."
                )
            del self._unscaled[optimizer]
            self._start_over(optimizer)
        return True

    def _start_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a new update for gradients of a new backward; torch clears its record of the last ones only in an update."""
        if waiting := self._waiting():
            others = " and ".join(type(other).__name__ for other in waiting)
            raise StateError(
                f"{type(optimizer).__name__} is to step again, but gradients of {others} were divided by the loss scale (by clipping) "
                "and not used: in fp16 call its step() or zero_grad() first"
            )
        self._keep_scale()

    def _waiting(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose gradients were divided but not used yet; the scale must not change before they step."""
        if not self._unscaled:
            return []
        for optimizer, marks in list(self._unscaled.items()):
            if not _has_gradients(optimizer) or (marks is not None and marks != _gradient_versions(optimizer)):
                del self._unscaled[optimizer]
        return list(self._unscaled)

    def _keep_scale(self) -> None:
        if self._begun:
            self._scaler.update(self._scaler.get_scale())
        self._forget()

    def _forget(self) -> None:
        self._stepped.clear()
        self._unscaled.clear()
        self._touched = self._late = False


_GradientVersions = tuple[tuple[int, int] | None, ...]


def _gradient_versions(optimizer: torch.optim.Optimizer) -> _GradientVersions:
    """Return identities and versions, which distinguish new gradients from old: a backward pass replaces a tensor or writes into it."""
    grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return tuple(None if grad is None else (id(grad), grad._version) for grad in grads)


def _were_added_to(before: _GradientVersions, now: _GradientVersions) -> bool:
    """Return whether something was written into a gradient that was there before."""
    pairs = zip(before, now, strict=False)
    return any(pair is not None and other is not None and pair[0] == other[0] and pair[1] != other[1] for pair, other in pairs)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _has_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer skipped its update: torch always calls it, and passes the overflow to it."""
    return bool(getattr(optimizer, "found_inf", None) or False)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler of torch for the device of this run; `kwargs` are its own.

    It serves one process, replicas and sharded models ("FSDP"): torch finds an overflow in the shard of any rank on all of them.

    >>> get_grad_scaler(init_scale=8.0).get_scale()
    8.0
    """
    kind = str(getattr(distributed_type, "value", distributed_type))
    if kind not in ("None", "NO", "FSDP") and not kind.startswith("MULTI_"):
        raise ConfigError(f"get_grad_scaler({kind}): there is no scaler for that here. Write 'FSDP' for sharded models, or leave it out.")
    device = AcceleratorState().device.type
    return _OffloadedGradScaler(device or CPU.type, **kwargs)
