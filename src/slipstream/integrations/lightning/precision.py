"""Slipstream's mixed precision as precision plugins of Lightning: autocast, loss scale, float8.

They take the place of Lightning's `MixedPrecision` for `precision="bf16-mixed"` and `"16-mixed"`, compute the same, and keep the loss scale
under the same name in a checkpoint, so that either reads what the other saved. Other plugins (true half and double precision,
quantization) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from slipstream.distributed.pytree import convert_to_fp32
from slipstream.errors import ConfigError
from slipstream.integrations.lightning.options import PRECISIONS
from slipstream.precision.fp8 import convert_to_fp8, has_ao_layers
from slipstream.precision.model_precision import ModelPrecision
from slipstream.precision.policy import check_parameters

__all__ = ["SlipstreamFabricPrecision", "SlipstreamPrecision", "replace_precision"]

_NAMES = {ours: theirs for theirs, ours in PRECISIONS.items()} | {"fp8": "fp8"}
_STATE_KEY = MixedPrecision.__qualname__
"""Where Lightning keeps the loss scale in a checkpoint."""


def _convert(precision: ModelPrecision, module: torch.nn.Module) -> torch.nn.Module:
    check_parameters(precision.policy, module, scales=precision.scaler.scales)
    if precision.policy.mixed_precision == "fp8" and not has_ao_layers(module):
        convert_to_fp8(module, precision.fp8)
    return module


class SlipstreamPrecision(Precision):  # type: ignore[misc]  # Lightning's classes are not checked
    """Mixed precision for the `Trainer`."""

    def __init__(self, mixed_precision: str, device_type: str, scale: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.mixed = ModelPrecision(mixed_precision, device_type)
        self.precision = _NAMES[mixed_precision]
        if scale and self.mixed.scaler.scales:
            self.mixed.scaler.load_state_dict(scale)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Check the parameters, and convert layers for float8."""
        return _convert(self.mixed, module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The autocast of a step."""
        with self.mixed.context():
            yield

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Scale the loss, where gradients could underflow."""
        scaled: torch.Tensor = super().pre_backward(self.mixed.scaler.scale(tensor), module)
        return scaled

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step, unless gradients overflowed."""
        scaler = self.mixed.scaler
        if not scaler.scales:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS computes gradients within its step, where the loss cannot be scaled: write precision='bf16-mixed'")
        result = closure()
        left_out = result is None and model.automatic_optimization
        if not left_out:
            scaler.unscale(optimizer)
        self._after_closure(model, optimizer)
        if not left_out:
            scaler.step(optimizer)
        return result

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the loss scale where Lightning's own plugin has it."""
        if self.mixed.scaler.scales:
            checkpoint[_STATE_KEY] = self.mixed.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the loss scale from where Lightning's own plugin has it."""
        if self.mixed.scaler.scales and checkpoint.get(_STATE_KEY):
            self.mixed.scaler.load_state_dict(checkpoint[_STATE_KEY])


class SlipstreamFabricPrecision(FabricPrecision):  # type: ignore[misc]
    """Mixed precision for `Fabric`."""

    def __init__(self, mixed_precision: str, device_type: str, scale: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.mixed = ModelPrecision(mixed_precision, device_type)
        self.precision = _NAMES[mixed_precision]
        if scale and self.mixed.scaler.scales:
            self.mixed.scaler.load_state_dict(scale)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Check the parameters, and convert layers for float8."""
        return _convert(self.mixed, module)

    def forward_context(self) -> AbstractContextManager[Any]:
        """The autocast of a forward pass."""
        return self.mixed.context()

    def convert_output(self, data: Any) -> Any:
        """Return outputs in the default type, as Lightning's own plugin does."""
        return convert_to_fp32(data) if torch.get_default_dtype() == torch.float32 else data

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and compute gradients."""
        super().backward(self.mixed.scaler.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless gradients overflowed."""
        if not self.mixed.scaler.scales:
            return super().optimizer_step(optimizer, **kwargs)
        return self.mixed.scaler.step(optimizer, kwargs.get("closure"))

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide gradients by the scale, before they are clipped."""
        self.mixed.scaler.unscale(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale."""
        return self.mixed.scaler.state_dict() if self.mixed.scaler.scales else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loss scale."""
        if self.mixed.scaler.scales:
            self.mixed.scaler.load_state_dict(state_dict)


def replace_precision(plugin: Any, asked: str | None, device_type: str) -> Any:
    """Return our plugin for one of Lightning's that computes in mixed precision, or where ours was asked for; others as they are."""
    ours = SlipstreamFabricPrecision if not isinstance(plugin, Precision) else SlipstreamPrecision
    if type(plugin) in (MixedPrecision, FabricMixedPrecision):
        scale = plugin.scaler.state_dict() if plugin.scaler is not None else None
        return ours(PRECISIONS[plugin.precision], device_type, scale)  # Lightning takes every accelerator that it does not know for CUDA
    if asked not in (None, "no") and type(plugin) in (Precision, FabricPrecision):
        return ours(asked, device_type)
    return plugin
