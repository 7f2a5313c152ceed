"""The precision of one Accelerator: its policy, its loss scale, and how a model gets it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from slipstream.facade.handlers import Handlers
from slipstream.precision import autocast
from slipstream.precision.fp8 import convert, has_ao_layers
from slipstream.precision.options import AORecipeKwargs, AutocastKwargs
from slipstream.precision.policy import check_device, check_parameters, policy_for
from slipstream.precision.scaler import LossScaler, NoScaler, scaler_for
from slipstream.strategies.options import DDPCommunicationHookType, DistributedDataParallelKwargs

__all__ = ["Precision"]


class Precision:
    """What `mixed_precision` means for the models of one Accelerator."""

    def __init__(
        self,
        mixed_precision: str,
        device_type: str,
        handlers: Handlers,
        *,
        outputs_to_fp32: bool | None,
        distributed: bool,
        pad_inner_dim: bool = False,
    ) -> None:
        check_device(mixed_precision, device_type)
        self.device_type = device_type
        self.handler = handlers.autocast
        self.fp8 = handlers.fp8 or AORecipeKwargs(pad_inner_dim=pad_inner_dim or None)
        self.policy = policy_for(
            mixed_precision,
            outputs_to_fp32=outputs_to_fp32,
            reduce=_reduced_in(handlers.ddp) if distributed else None,
            autocast=self.handler is None or self.handler.enabled,
        )
        self.scaler: LossScaler | NoScaler = scaler_for(mixed_precision, device_type, handlers.scaler)

    def apply(self, model: torch.nn.Module) -> None:
        """Makes a model compute as the policy says; once is enough, and twice does no harm."""
        check_parameters(self.policy, model, scales=self.scaler.scales)
        if self.policy.mixed_precision == "fp8" and not has_ao_layers(model):
            convert(model, self.fp8)
        autocast.install(model, self.policy, self.device_type, self.handler)

    def context(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block that computes as the policy says, or as `handler` does."""
        return autocast.autocast_context(self.policy, self.device_type, handler or self.handler)


def _reduced_in(options: DistributedDataParallelKwargs | None) -> torch.dtype | None:
    """The number format in which a communication hook sends gradients."""
    if options is None:
        return None
    formats = {DDPCommunicationHookType.FP16: torch.float16, DDPCommunicationHookType.BF16: torch.bfloat16}
    return formats.get(options.comm_wrapper) or formats.get(options.comm_hook)
