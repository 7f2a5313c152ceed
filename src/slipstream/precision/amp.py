"""Autocast and loss scaling as plain functions, for loops that do by hand what `Accelerator` does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.precision.autocast import autocast_context
from slipstream.precision.options import AutocastKwargs
from slipstream.precision.policy import policy_for
from slipstream.runtime.state import AcceleratorState

__all__ = ["get_grad_scaler", "get_mixed_precision_context_manager"]


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Autocast in the precision that the launcher or the environment gave, if `native_amp`; else a block in which nothing changes.

    >>> with get_mixed_precision_context_manager():
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    return autocast_context(policy_for(state.mixed_precision), state.device.type, autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A loss scaler of torch for the device of this run; `kwargs` are its own. One for sharded models is not there yet.

    >>> get_grad_scaler(init_scale=8.0).get_scale()
    8.0
    """
    kind = str(getattr(distributed_type, "value", distributed_type))
    if kind != "None" and kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(f"get_grad_scaler({kind}): scalers for that are not in this version. Leave it out where nothing is sharded.")
    device = AcceleratorState().device.type
    return torch.amp.GradScaler(device or CPU.type, **kwargs)
