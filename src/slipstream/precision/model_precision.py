"""`ModelPrecision`: what `mixed_precision` means for the models of one Accelerator.

It joins the policy, autocast, the loss scaler and float8. `apply` makes a model compute as the policy says; `context` does so for a block
of the script's own code. Float8 is imported when a model is converted to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from slipstream.precision.autocast import autocast_context, install_autocast
from slipstream.precision.policy import AORecipeKwargs, AutocastKwargs, GradScalerKwargs, check_device, check_parameters, make_policy
from slipstream.precision.scaler import make_scaler

__all__ = ["ModelPrecision"]


class ModelPrecision:
    """The policy, the autocast handler and the loss scaler of one Accelerator.

    >>> ModelPrecision("bf16", "cpu").policy.autocast_dtype
    torch.bfloat16
    """

    def __init__(
        self,
        mixed_precision: str,
        device_type: str,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        fp8: AORecipeKwargs | None = None,
        reduce_dtype: torch.dtype | None = None,
        outputs_to_fp32: bool | None = None,
    ) -> None:
        check_device(mixed_precision, device_type)
        self.device_type = device_type
        self.handler = autocast
        self.fp8 = fp8
        self.policy = make_policy(
            mixed_precision, outputs_to_fp32=outputs_to_fp32, reduce=reduce_dtype, autocast=autocast is None or autocast.enabled
        )
        self.scaler = make_scaler(mixed_precision, device_type, scaler)

    def apply(self, model: torch.nn.Module) -> None:
        """Make a model compute as the policy says. Applying it twice changes nothing."""
        check_parameters(self.policy, model, scales=self.scaler.scales)
        if self.policy.mixed_precision == "fp8":
            from slipstream.precision.fp8 import convert_to_fp8, has_ao_layers

            if not has_ao_layers(model):
                convert_to_fp8(model, self.fp8)
        install_autocast(model, self.policy, self.device_type, self.handler)

    def context(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a block that computes as the policy says, or as `handler` does."""
        return autocast_context(self.policy, self.device_type, handler or self.handler)
