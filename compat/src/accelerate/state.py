"""The processes of a run: `PartialState`, `AcceleratorState`, `GradientState`.

Each class has one dictionary for all its objects, as clients of Accelerate expect: an object made anywhere is a view of the same state,
what one assigns all see, and `_reset_state()` empties the dictionary (it does not close the process group: transformers resets the state
in every TrainingArguments, and goes on in the same group). Below it are the states of Slipstream, with ACCELERATE_* variables as
arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch

from accelerate._forwarding import forward_names
from accelerate._unsupported import raise_unsupported
from slipstream.config.sources import environment, parse_flag_from_env
from slipstream.distributed.cluster import detect
from slipstream.distributed.current import current_or_none, reset
from slipstream.distributed.state import AcceleratorState as _AcceleratorState, PartialState as _PartialState
from slipstream.distributed.wait_monitor import Limits
from slipstream.errors import ConfigError

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate._gradient_state": "GradientState",
        "accelerate.utils.dataclasses": "DistributedType DynamoBackend GradientAccumulationPlugin SageMakerDistributedType",
        "accelerate.utils.environment": """check_cuda_fp8_capability check_cuda_p2p_ib_support get_cpu_distributed_information
            get_int_from_env parse_choice_from_env parse_flag_from_env set_numa_affinity""",
        "accelerate.utils.imports": """deepspeed_required is_datasets_available is_deepspeed_available is_fp8_available
            is_habana_gaudi1 is_hpu_available is_mlu_available is_mps_available is_musa_available
            is_neuron_available is_npu_available is_sdaa_available is_torch_xla_available
            is_xccl_available is_xpu_available""",
    },
)
__all__ = ["AcceleratorState", "PartialState", "ThreadLocalSharedDict", "do_nothing", "is_initialized", *_forwarded]


def is_initialized() -> bool:
    """Return whether an Accelerator has filled `AcceleratorState`."""
    return "_runtime" in AcceleratorState._shared_state


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Return None, whatever is passed: the body of functions that do not run on this process."""
    return


class ThreadLocalSharedDict:
    """A descriptor that holds one dictionary for all objects of a class, or with `thread_local` one for each thread."""

    def __init__(self, thread_local: bool = False) -> None:
        import threading

        self._place: Any = threading.local() if thread_local else type("SharedPlace", (), {})()

    def __get__(self, owner: Any, kind: type | None = None) -> dict[str, Any]:
        if not hasattr(self._place, "value"):
            self._place.value = {}
        found: dict[str, Any] = self._place.value
        return found

    def __set__(self, owner: Any, value: dict[str, Any]) -> None:
        self._place.value = value


def _assignable(name: str, kind: type) -> Any:
    """Return a property of Slipstream's state that can be assigned: the assigned value stands in the shared dictionary."""
    original = getattr(kind, name)

    def read(self: Any) -> Any:
        return self.__dict__[name] if name in self.__dict__ else original.fget(self)

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write, doc=original.__doc__)


def _drop_stale_runtime() -> None:
    """Forget the runtime if the environment names another process by now, as in a test that changed RANK and reset the state."""
    runtime = current_or_none()
    if runtime is not None and runtime.child_of is None and runtime.process != detect(environment()):
        reset("the state was reset, and the environment names another process")


def _belongs_to_other_process(shared: dict[str, Any]) -> bool:
    """Return whether the dictionary was filled before a fork."""
    return "_runtime" in shared and shared["_runtime"].pid != os.getpid()


def _is_released(shared: dict[str, Any], mixed_precision: Any) -> bool:
    """Return whether the process group was closed since, and an Accelerator with another precision is asked for: it starts anew."""
    asked = str(getattr(mixed_precision, "value", mixed_precision)).lower()
    return bool(shared.get("_released")) and mixed_precision is not None and asked != shared["_mixed_precision"]


def _variables(cpu: bool, kwargs: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return the arguments of a state, with what ACCELERATE_* variables add."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if kwargs.pop("_use_sagemaker_dp", False) or parse_flag_from_env("ACCELERATE_USE_SAGEMAKER"):
        raise_unsupported("SageMaker's data parallelism", "sagemaker")
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE"):
        kwargs.setdefault("debug", True)
    return cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), kwargs


def _complain_after_reset(name: str, kind: str) -> AttributeError:
    return AttributeError(
        f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()` was called and no `Accelerator` or "
        "`PartialState` was made since."
    )


class _SharedView:
    """What both states add to those of Slipstream."""

    _shared_state: ClassVar[dict[str, Any]]
    _known_attributes: ClassVar[tuple[str, ...]] = (
        "_cpu", "backend", "debug", "device", "distributed_type", "fork_launched", "local_process_index", "num_processes", "process_index",
    )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in self._known_attributes and "_runtime" not in self.__dict__:
            raise _complain_after_reset(name, type(self).__name__)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def initialized(self) -> bool:
        """Whether the shared dictionary is filled."""
        return "_runtime" in self.__dict__

    @property
    def runtime(self) -> Any:
        """What all states of this process share; after a reset too, because Accelerators that were made before end later."""
        return self.__dict__.get("_runtime") or current_or_none()

    def _fill(self, fill: Callable[[], None]) -> None:
        """Fill the dictionary; one that could not be filled is left empty."""
        try:
            fill()
        except BaseException:
            self._shared_state.clear()
            raise

    def _take_limits(self, timeout: Any) -> None:
        """Honour a `timeout` that was given after the state existed."""
        if timeout is not None and not self.__dict__["_runtime"].child_of:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
            before: Limits = self.__dict__["_limits"]
            self.__dict__["_limits"] = Limits(seconds, before.barrier_timeout, before.hang_warning)

    def destroy_process_group(self, group: Any = None) -> None:
        """Close the process group; an Accelerator that is made later may have another precision, which Accelerate refuses."""
        if group is None and not self.initialized:  # after a reset: through a state that goes on in the same group
            PartialState().destroy_process_group()
            PartialState._reset_state()
            return
        super().destroy_process_group(group)  # type: ignore[misc]
        if group is None and AcceleratorState._shared_state:
            AcceleratorState._shared_state["_released"] = True

    def _place_device(self) -> None:
        """Use the device that ACCELERATE_TORCH_DEVICE names."""
        wanted = os.environ.get("ACCELERATE_TORCH_DEVICE")
        if wanted is not None and not self.__dict__["_cpu"]:
            self.__dict__["device"] = torch.device(wanted)
            module = getattr(torch, torch.device(wanted).type, None)
            if torch.device(wanted).type != "cpu" and module is not None:
                module.set_device(self.__dict__["device"])


def _of_partial_state(name: str) -> Any:
    """Return a property that `AcceleratorState` has of `PartialState`, also after a reset of the former alone."""
    original = getattr(_PartialState, name)

    def read(self: Any) -> Any:
        return getattr(PartialState(), name) if not self.initialized and PartialState._shared_state else original.fget(self)

    return property(read, doc=original.__doc__)


class PartialState(_SharedView, _PartialState):
    """Which process this is, on which device, and how it talks to the others; one state for the whole process."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if _belongs_to_other_process(self._shared_state):
            self._shared_state.clear()
        if self.initialized:
            self._take_limits(kwargs.get("timeout"))
            return
        self._shared_state.clear()  # of what was assigned after a reset
        _drop_stale_runtime()
        cpu, kwargs = _variables(cpu, kwargs)

        def fill() -> None:
            self._cpu = cpu
            super(PartialState, self).__init__(cpu, **kwargs)
            self._place_device()
            if parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
                from accelerate.utils.environment import set_numa_affinity

                set_numa_affinity(self.local_process_index)
            for name in ("num_processes", "process_index", "local_process_index", "distributed_type", "backend"):
                setattr(self, name, getattr(self, name))

        self._fill(fill)

    num_processes = _assignable("num_processes", _PartialState)
    process_index = _assignable("process_index", _PartialState)
    local_process_index = _assignable("local_process_index", _PartialState)
    distributed_type = _assignable("distributed_type", _PartialState)
    backend = _assignable("backend", _PartialState)

    @staticmethod
    def _reset_state() -> None:
        """Empty the shared dictionary; the process group stays open, and the next state goes on in it."""
        PartialState._shared_state.clear()


class AcceleratorState(_SharedView, _AcceleratorState):
    """`PartialState` with precision and plugins: the state of the Accelerators of this process."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes = (
        *_SharedView._known_attributes, "_mixed_precision", "mixed_precision", "dynamo_plugin", "fsdp_plugin", "parallelism_config",
    )  # fmt: skip

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        _refuse_engines(deepspeed_plugin, megatron_lm_plugin, torch_tp_plugin)
        cpu, kwargs = _variables(cpu, kwargs)
        if _belongs_to_other_process(self._shared_state):
            self._shared_state.clear()
        if self.initialized and _is_released(self._shared_state, mixed_precision):
            self._shared_state.clear()
        if self.initialized:
            self._check_initialized(mixed_precision, cpu)
            self._take_limits(kwargs.get("timeout"))
            PartialState(self._shared_state["_cpu"])  # one that was reset meanwhile is there again, as an Accelerator leaves it
            return
        if not _from_accelerator:
            raise ConfigError(
                "AcceleratorState() before there is an Accelerator: its precision is not known yet. Write `accelerator = Accelerator()` "
                "first, or use PartialState(), which needs none."
            )
        self._shared_state.clear()
        partial = PartialState(cpu, **{name: kwargs[name] for name in ("backend", "init_method", "timeout", "debug") if name in kwargs})
        if cpu and not partial._cpu and partial.device.type != "cpu":
            raise ConfigError(
                f"Accelerator(cpu=True), but a state on {partial.device} exists in this process: pass cpu=True where it is made first, or "
                "call PartialState._reset_state() before"
            )
        inherited = {name: value for name, value in partial._arguments.items() if name != "cpu"}
        chosen = mixed_precision if mixed_precision is not None else os.environ.get("ACCELERATE_MIXED_PRECISION")

        def fill() -> None:
            self._cpu = partial._cpu
            super(AcceleratorState, self).__init__(chosen, partial._cpu, **{**inherited, **kwargs})
            self.device = partial.device
            self._mixed_precision = self.mixed_precision
            self.dynamo_plugin, self.fsdp_plugin, self.parallelism_config = dynamo_plugin, fsdp_plugin, parallelism_config

        self._fill(fill)

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        """Raise for a precision or device other than those that the Accelerators of this process share."""
        asked = None if mixed_precision is None else str(getattr(mixed_precision, "value", mixed_precision)).lower()
        if asked is not None and asked != self.mixed_precision:
            raise ConfigError(
                f"Accelerator(mixed_precision={asked!r}), but an Accelerator with mixed_precision={self.mixed_precision!r} exists, and "
                "the state has already been initialized for both: make the first one with it, or call AcceleratorState._reset_state() "
                "before (slipstream.Accelerator has a precision of its own for each)"
            )
        if cpu and self.device.type != "cpu":
            raise ConfigError(f"Accelerator(cpu=True), but the state has already been initialized for {self.device}")

    num_processes = _assignable("num_processes", _PartialState)
    process_index = _assignable("process_index", _PartialState)
    local_process_index = _assignable("local_process_index", _PartialState)
    distributed_type = _assignable("distributed_type", _AcceleratorState)  # axolotl assigns it
    is_main_process = _of_partial_state("is_main_process")
    is_local_main_process = _of_partial_state("is_local_main_process")
    is_last_process = _of_partial_state("is_last_process")
    use_distributed = _of_partial_state("use_distributed")
    backend = _assignable("backend", _PartialState)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Empty the shared dictionary, with `reset_partial_state` also that of `PartialState`; the process group stays open."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Raise: there is no DeepSpeed plugin."""
        raise_unsupported(f"get_deepspeed_plugin({name!r})", "deepspeed")

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Raise: there is no DeepSpeed plugin."""
        raise_unsupported(f"select_deepspeed_plugin({name!r})", "deepspeed")


def _refuse_engines(deepspeed: Any, megatron: Any, tensor_parallel: Any) -> None:
    """Raise for an engine that is not supported, given as an object or by the variable of the launcher."""
    if deepspeed is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise_unsupported("Accelerator(deepspeed_plugin=...)" if deepspeed is not None else "ACCELERATE_USE_DEEPSPEED=true", "deepspeed")
    if megatron is not None or parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        raise_unsupported("Accelerator(megatron_lm_plugin=...)" if megatron is not None else "ACCELERATE_USE_MEGATRON_LM=true", "megatron")
    if tensor_parallel is not None:
        raise_unsupported("Accelerator(torch_tp_plugin=...)", "tensor_parallel")
