"""Process information and collectives of `Accelerator`.

Each method calls the method of the same name of its `AcceleratorState`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

from slipstream.accelerator.components import AcceleratorBase
from slipstream.devices.table import CPU, DistributedType

__all__ = ["ProcessesMixin"]

P = ParamSpec("P")
R = TypeVar("R")


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

    def wait_for_everyone(self) -> None:
        """See `PartialState.wait_for_everyone`."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """See `PartialState.main_process_first`."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """See `PartialState.local_main_process_first`."""
        return self.state.local_main_process_first()

    def on_main_process(self, function: Callable[P, R] | None = None) -> Callable[..., Any]:
        """See `PartialState.on_main_process`."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[P, R] | None = None) -> Callable[..., Any]:
        """See `PartialState.on_local_main_process`."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, R] | None = None) -> Callable[..., Any]:
        """See `PartialState.on_last_process`."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int | None = None) -> Callable[..., Any]:
        """See `PartialState.on_process`."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int | None = None) -> Callable[..., Any]:
        """See `PartialState.on_local_process`."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """See `PartialState.print`."""
        self.state.print(*args, **kwargs)

    def set_trigger(self) -> None:
        """See `PartialState.set_trigger`."""
        self.state.set_trigger()

    def check_trigger(self) -> bool:
        """See `PartialState.check_trigger`."""
        is_set = self.state.check_trigger()
        self._components.stepper.trigger_fired |= is_set
        return is_set

    def split_between_processes(self, inputs: Any, apply_padding: bool = False, **dynamic: Any) -> AbstractContextManager[Any]:
        """See `PartialState.split_between_processes`."""
        state = self._components.gradient_state
        state.metrics.note_split(state.active)
        return self.state.split_between_processes(inputs, apply_padding, **dynamic)

    def map_across_processes(
        self,
        function: Callable[[Any], Any],
        inputs: Any,
        batch_size: int | None = None,
        order: bool = True,
        key: Callable[[Any], float] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> list[Any]:
        """See `PartialState.map_across_processes`."""
        return self.state.map_across_processes(function, inputs, batch_size, order, key, checkpoint, progress)

    def gather(self, tensor: Any, dst: int | None = None, with_gradient: bool = False) -> Any:
        """See `PartialState.gather`."""
        return self.state.gather(tensor, dst, with_gradient)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `PartialState.reduce`."""
        return self.state.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """See `PartialState.pad_across_processes`."""
        return self.state.pad_across_processes(tensor, dim, pad_index, pad_first)

    def destroy_process_group(self) -> None:
        """See `PartialState.destroy_process_group`."""
        self.state.destroy_process_group()
