"""Process information and collectives of `Accelerator`.

Each property and method is the one of the same name of its `AcceleratorState`, with the same signature and docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from slipstream.accelerator.components import AcceleratorBase
from slipstream.devices.table import CPU, DistributedType
from slipstream.distributed.state import PartialState

__all__ = ["ProcessesMixin"]

P = ParamSpec("P")
R = TypeVar("R")


def _delegate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of `Accelerator` that calls this method of its state, with the same signature and docstring."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self.state, name)(*args, **kwargs)
        return result

    return call


class ProcessesMixin(AcceleratorBase):
    """Which process this is, taking turns, and collectives."""

    @property
    def device(self) -> torch.device:
        """See `PartialState.device`."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """See `PartialState.distributed_type`."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """See `PartialState.num_processes`."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """See `PartialState.process_index`."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """See `PartialState.local_process_index`."""
        return self.state.local_process_index

    @property
    def use_distributed(self) -> bool:
        """See `PartialState.use_distributed`."""
        return self.state.use_distributed

    @property
    def is_main_process(self) -> bool:
        """See `PartialState.is_main_process`."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """See `PartialState.is_local_main_process`."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """See `PartialState.is_last_process`."""
        return self.state.is_last_process

    @property
    def multi_device(self) -> bool:
        """Whether several processes compute on devices other than the CPU."""
        return self.use_distributed and self.device.type != CPU.type

    @property
    def mixed_precision(self) -> str:
        """See `AcceleratorState.mixed_precision`."""
        return self.state.mixed_precision

    wait_for_everyone = _delegate(PartialState.wait_for_everyone)
    main_process_first = _delegate(PartialState.main_process_first)
    local_main_process_first = _delegate(PartialState.local_main_process_first)
    on_main_process = _delegate(PartialState.on_main_process)
    on_local_main_process = _delegate(PartialState.on_local_main_process)
    on_last_process = _delegate(PartialState.on_last_process)
    on_process = _delegate(PartialState.on_process)
    on_local_process = _delegate(PartialState.on_local_process)
    print = _delegate(PartialState.print)
    set_trigger = _delegate(PartialState.set_trigger)
    map_across_processes = _delegate(PartialState.map_across_processes)
    gather = _delegate(PartialState.gather)
    reduce = _delegate(PartialState.reduce)
    pad_across_processes = _delegate(PartialState.pad_across_processes)
    destroy_process_group = _delegate(PartialState.destroy_process_group)

    def check_trigger(self) -> bool:
        """See `PartialState.check_trigger`."""
        is_set = self.state.check_trigger()
        self._components.stepper.trigger_fired |= is_set
        return is_set

    def split_between_processes(self, inputs: Any, apply_padding: bool = False, **dynamic: Any) -> AbstractContextManager[Any]:
        """See `PartialState.split_between_processes`."""
        state = self._components.gradient_state
        state.metrics.record_split(state.active)
        return self.state.split_between_processes(inputs, apply_padding, **dynamic)
