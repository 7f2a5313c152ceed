"""`PartialState` and `AcceleratorState`: views of the one runtime of this process, each with settings of its own.

Any number of them may exist; they see the same rank, world and group, and none changes another's precision, limits or device. Creating
one opens the process group if there are several processes; after `destroy_process_group()` the next call that needs the group opens a new
one. The methods that split inputs between processes and restore the order of the results are here too.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch

from slipstream.config import Config, for_worker
from slipstream.config.resolved_config import Choice
from slipstream.config.schema import Compute, Parallelism, Sharding
from slipstream.config.sources import environment
from slipstream.devices import rng
from slipstream.devices.table import DistributedType, Family, best_family, choose_family, device_for, set_device
from slipstream.distributed import collectives
from slipstream.distributed.barriers import barrier, run_first, run_only_if
from slipstream.distributed.call_site import call_site, calling_code
from slipstream.distributed.collectives import ResultOrder, check_agreement, gather_with_gradient
from slipstream.distributed.current import current, current_or_none, reset_keeping_store
from slipstream.distributed.guard import Channel, Limits
from slipstream.distributed.process_group import GroupSettings, Runtime, torch_group_is_open
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.distributed.work_queue.work import Work

__all__ = ["AcceleratorState", "PartialState", "is_initialized"]


P = ParamSpec("P")
R = TypeVar("R")


def is_initialized() -> bool:
    """Whether this process has a runtime already.

    >>> state = PartialState()
    >>> is_initialized()
    True
    """
    return current_or_none() is not None


class PartialState:
    """Which process this is, on which device, and how it talks to the others.

    Keyword arguments: `device` (a device family, such as "cpu"), `timeout` (timedelta or seconds), `backend` and `init_method` for the
    process group, and the safety options `debug`, `hang_warning` and `barrier_timeout`.

    >>> state = PartialState()
    >>> state.num_processes, state.is_main_process, state.gather(["a"])
    (1, True, ['a'])
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self._arguments = {"cpu": cpu, **kwargs}
        backend, init_method = kwargs.pop("backend", None), kwargs.pop("init_method", None)
        self._config: Config = for_worker(_constructor_values(cpu, kwargs), caller=type(self).__name__)
        safety = self._config.safety
        self._limits = Limits(safety.timeout, safety.barrier_timeout, safety.hang_warning)
        self._runtime = current()
        self.debug: bool = safety.debug
        self.fork_launched: bool = environment().get("FORK_LAUNCHED") == "1"
        named, several = self._config.device.family, self._runtime.process.world_size > 1
        self._family = choose_family(named, self._config.describe_device(), distributed=several)
        self.device: torch.device = device_for(self._family, self._runtime.process.local_rank)
        self._settings = _group_settings(backend, init_method, self._family, self._runtime.settings)
        self._part: ResultOrder | None = None
        self._part_of: CodeType | None = None
        self._triggered = False
        self._last_channel: Channel | None = None
        self.set_device()
        if self._runtime.child_of is None:
            self._channel()

    def _channel(self) -> Channel:
        channel = self._last_channel
        if channel is None or channel.broken is not None:
            channel = self._last_channel = self._runtime.channel(self._limits, self._settings)
        return channel

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(process {self.process_index} of {self.num_processes}, local {self.local_process_index}, "
            f"device {self.device}, {self.distributed_type.value}, backend {self.backend})"
        )

    def __reduce__(self) -> Any:
        """Unpickle as a state of the process that reads it, with the settings of this one."""
        return _unpickle_state, (type(self), self._arguments)

    @staticmethod
    def _reset_state() -> None:
        """Close the process group and forget who this process is: the next state reads the environment again. For tests."""
        reset_keeping_store(f"_reset_state at {call_site()}")

    # -- who this is ----------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True: a state object exists."""
        return True

    @property
    def num_processes(self) -> int:
        """How many processes this job has, on all machines."""
        return self._runtime.process.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process among all."""
        return self._runtime.process.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return self._runtime.process.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._runtime.process.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self._runtime.process.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self._runtime.process.is_last

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of several processes these are: `NO` for one."""
        return DistributedType(self._family.multi) if self.use_distributed else DistributedType.NO

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None for one process."""
        return self._settings.backend if self.use_distributed else None

    @property
    def default_device(self) -> torch.device:
        """The best device of this machine, whatever this object was told to use."""
        return device_for(best_family(), self.local_process_index)

    def set_device(self) -> None:
        """Make `device` the current device of its type in torch."""
        if self.device.type == self._family.type:
            set_device(self.device)

    # -- barriers (distributed/barriers.py) -----------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Return when every process has called it; with `debug`, also checks that registered replicas agree."""
        barrier(self._channel(), self._limits)
        if self.debug:
            for name, values in self._runtime.replicas.items():
                check_agreement(self._channel(), self._limits, name, values())

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run the block before the others do."""
        return run_first(self._channel(), self._limits, self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each machine run the block before the others do."""
        return run_first(self._channel(), self._limits, self.is_local_main_process, "local_main_process_first")

    def on_main_process(self, function: Callable[P, R] | None = None) -> Callable[..., Any]:
        """Decorator: the function runs on the main process only; elsewhere it returns None."""
        return run_only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R] | None = None) -> Callable[..., Any]:
        """Decorator: the function runs on the first process of each machine only."""
        return run_only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R] | None = None) -> Callable[..., Any]:
        """Decorator: the function runs on the last process only."""
        return run_only_if(self.is_last_process, function)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int | None = None) -> Callable[..., Any]:
        """Decorator: the function runs on one process only (0 if none is named)."""
        return run_only_if(self.process_index == (process_index or 0), function)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int | None = None) -> Callable[..., Any]:
        """Decorator: the function runs on one process of each machine only (0 if none is named)."""
        return run_only_if(self.local_process_index == (local_process_index or 0), function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Raise a flag on this process; `check_trigger` sees it on all."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has raised its flag since the last check; all processes call it, and it lowers the flags."""
        raised = collectives.reduce(self._channel(), self._limits, int(self._triggered), "max", operation="check_trigger")
        if raised:
            self._triggered = False
        return bool(raised)

    # -- collectives (distributed/collectives.py) -----------------------------------------------------------------------

    def gather(self, tensor: Any, dst: int | None = None, with_gradient: bool = False) -> Any:
        """Return the data of all processes, joined in the order of the ranks; with `dst`, only there; see `distributed/collectives.py`.

        A list is joined entry by entry (texts, records); one that has tensors among its entries, or holds nothing but tensors, is
        structure, as dicts and tuples are: its tensors are joined along the first dimension. `gather_object` joins lists of anything.
        """
        if with_gradient:
            if dst is not None:
                raise ValueError(f"gather(with_gradient=True, dst={dst}): it needs the result on every rank; leave out dst")
            return gather_with_gradient(self._channel(), self._limits, tensor)
        return collectives.gather(self._channel(), self._limits, tensor, dst=dst, arrange=self._result_order())

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False, arrange: ResultOrder | None = None) -> Any:
        """Gather without padding; `use_gather_object` concatenates lists of any objects, tensors included.

        `arrange` says how the data was split, where that was not `split_between_processes`.
        """
        arrange = arrange or self._result_order(anywhere=True)
        if use_gather_object:
            return self._gather_objects(input_data, None, arrange)
        return collectives.gather(self._channel(), self._limits, input_data, arrange=arrange, operation="gather_for_metrics")

    def gather_object(self, object: Any, dst: int | None = None) -> Any:
        """Return the objects of all processes as one list, lists and tuples concatenated; with `dst`, only there."""
        return self._gather_objects(object, dst, self._result_order())

    def _gather_objects(self, value: Any, dst: int | None, arrange: ResultOrder | None) -> Any:
        flat = isinstance(value, (list, tuple))
        return collectives.gather_objects(self._channel(), self._limits, value, dst=dst, arrange=arrange, flat=flat)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors, arrays or numbers over the processes: sum, mean, max or min; see `distributed/collectives.py`."""
        return collectives.reduce(self._channel(), self._limits, tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Return the data of one process on all of them; all pass the same structure, types and shapes."""
        return collectives.broadcast(self._channel(), self._limits, tensor, from_process)

    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """Write the list of one process into the list that was passed, on all of them."""
        object_list[:] = collectives.broadcast_objects(self._channel(), self._limits, object_list, from_process)
        return object_list

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along `dim` to the largest size over the processes."""
        return collectives.pad(self._channel(), self._limits, tensor, dim, pad_index, pad_first)

    def verify_replicas(self, **values: Any) -> None:
        """Raise on every process unless the named values (modules, tensors, plain data) are the same on all of them.

        >>> PartialState().verify_replicas(model=torch.nn.Linear(2, 2), step=3)
        """
        for name, value in values.items():
            check_agreement(self._channel(), self._limits, name, _named_values(value))

    def verify_random_states(self, *kinds: str) -> None:
        """Raise on every process unless the random states ("python", "numpy", "torch", ...; all if none is named) are the same.

        >>> PartialState().verify_random_states("torch")
        """
        states = {kind: rng.fingerprint([kind]) for kind in kinds or rng.default_kinds()}
        check_agreement(self._channel(), self._limits, "random states", states)

    def expect_equal(self, name: str, values: Callable[[], Mapping[str, Any]]) -> None:
        """Register values that `wait_for_everyone` compares between the processes in debug mode."""
        self._runtime.replicas[name] = values

    # -- splitting inputs (distributed/split.py, distributed/work_queue/) -----------------------------------------------

    @contextmanager
    def split_between_processes(
        self,
        inputs: Any,
        apply_padding: bool = False,
        *,
        balance: Literal["static", "dynamic"] = "static",
        batch_size: int | None = None,
        key: Callable[[Any], float] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """Yield this process's part of a list, tuple, dict, tensor, array, range, dataset or iterable.

        With `apply_padding` every process gets the same count, and the last item is repeated; a `gather` of one result per item drops
        the repeated ones again, and returns the results of an iterable in the order of the input.

        With `balance="dynamic"` the block gets a `Work`: a loop over items (or lists of up to `batch_size` items) that are handed out as
        processes become free; see `distributed/work_queue/work.py`. `key` says what an item costs, `checkpoint` names the file of results.
        """
        options = {"batch_size": batch_size, "key": key, "checkpoint": checkpoint, "progress": progress}
        if balance == "static" and not any(value is not None for value in options.values()):
            from slipstream.distributed.split import split  # loaded only by who uses it

            part = split(inputs, self.process_index, self.num_processes, apply_padding)
            self._part, self._part_of = part if part.dealt or apply_padding else None, calling_code()
            yield part.value
            return
        from slipstream.distributed.work_queue.setup import check_balance

        check_balance(balance, apply_padding, options)
        with self._open_work_queue("split_between_processes", inputs, options) as work:
            self._part, self._part_of = work, calling_code()
            yield work

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
        """Return the results of a function for all inputs, on every process; items are handed out as processes become free.

        `function` gets an item, or with `batch_size` a list of up to so many, for which it returns a list of as many results. The results
        are in the order of the input, or with `order=False` in the order in which they finished. See `distributed/work_queue/work.py`.

        >>> PartialState().map_across_processes(len, ["a", "bb", "ccc"], key=len)
        [1, 2, 3]
        """
        options = {"batch_size": batch_size, "key": key, "checkpoint": checkpoint, "progress": progress}
        with self._open_work_queue("map_across_processes", inputs, options) as work:
            for item in work:
                work.done(function(item))
        return work.results(order)

    def _open_work_queue(self, operation: str, inputs: Any, options: dict[str, Any]) -> AbstractContextManager[Work]:
        from slipstream.distributed.work_queue.setup import WorkOptions, WorkTeam, open_work_queue

        team = WorkTeam(self._channel(), self._limits, lambda: self._runtime.store, operation)
        return open_work_queue(team, inputs, WorkOptions(**options))

    def _result_order(self, *, anywhere: bool = False) -> ResultOrder | None:
        """Return the order for results of the part that was split last; a plain gather has to be in the function that split it."""
        return self._part if anywhere or calling_code() is self._part_of else None

    # -- the process group (distributed/process_group.py) ---------------------------------------------------------------

    def destroy_process_group(self, group: Any = None) -> None:
        """Close the process group (or only `group`, one of the user's); the next call that needs it opens a fresh one."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
            return
        if self.use_distributed and self._runtime.is_open:
            if sys.exc_info()[0] is None:  # while an exception is raised nobody is waited for: the others learn that this rank has left
                barrier(self._channel(), self._limits, "destroy_process_group")
            self._runtime.close(f"destroy_process_group at {call_site()}")
        elif torch_group_is_open():
            torch.distributed.destroy_process_group()


class AcceleratorState(PartialState):
    """`PartialState` with the precision that was asked for.

    >>> AcceleratorState(mixed_precision="bf16").mixed_precision, AcceleratorState().mixed_precision
    ('bf16', 'no')
    """

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        if mixed_precision is not None:
            kwargs["mixed_precision"] = str(getattr(mixed_precision, "value", mixed_precision)).lower()
        super().__init__(cpu, **kwargs)
        self.dynamo_plugin: Any = None
        """How prepared models are compiled (a TorchDynamoPlugin), on the state of an Accelerator that compiles; else None."""

        self.fsdp_plugin: Any = None
        """How models are sharded (a FullyShardedDataParallelPlugin), on the state of an Accelerator that shards them; else None."""
        self.parallelism_config: Any = None
        """The sizes of the mesh, where they were given."""

    # What scripts ask to find out which engine is in use: none of these is in this version.
    deepspeed_plugin = deepspeed_plugins = megatron_lm_plugin = torch_tp_plugin = device_mesh = None

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of several processes these are: `NO` for one, `FSDP` where models are sharded."""
        return DistributedType.FSDP if self.is_fsdp2 else super().distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over several processes."""
        return self.fsdp_plugin is not None and self.use_distributed

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Nothing to do for this class, whose objects share nothing; with `reset_partial_state` that of `PartialState`. For tests."""
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision of this object: no, fp16, bf16 or fp8."""
        return self._config.compute.mixed_precision

    @property
    def sharding(self) -> Sharding:
        """The options of sharded training."""
        return self._config.sharding

    @property
    def parallelism(self) -> Parallelism:
        """The options of the mesh."""
        return self._config.parallelism

    @property
    def compute(self) -> Compute:
        """What this object was told about computing: precision, accumulation, compilation."""
        return self._config.compute

    @property
    def options(self) -> dict[str, Choice]:
        """Every option with its value and where that came from."""
        return self._config.choices()

    @property
    def runtime(self) -> Runtime:
        """What all state objects of this process share."""
        return self._runtime

    @property
    def limits(self) -> Limits:
        """How long calls of this object wait."""
        return self._limits

    def channel(self) -> Channel:
        """Return the channel to the other processes; open the group if it is not open."""
        return self._channel()


_CONSTRUCTOR_OPTIONS = ("device", "debug", "timeout", "barrier_timeout", "hang_warning", "mixed_precision", "gradient_accumulation_steps")


def _unpickle_state(kind: type[PartialState], arguments: dict[str, Any]) -> PartialState:
    return kind(**arguments)


def _constructor_values(cpu: bool, kwargs: dict[str, Any]) -> dict[str, object]:
    unknown = sorted(set(kwargs) - set(_CONSTRUCTOR_OPTIONS))
    if unknown:
        known = ", ".join(("cpu", "backend", "init_method", *_CONSTRUCTOR_OPTIONS))
        raise TypeError(f"unknown argument {', '.join(unknown)}: a state takes {known}")
    values: dict[str, object] = {name: value for name, value in kwargs.items() if value is not None}
    values = {name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in values.items()}
    if cpu:
        values["cpu"] = True
    return values


def _group_settings(backend: str | None, init_method: str | None, family: Family, present: GroupSettings | None) -> GroupSettings:
    """Return what this object wants of torch's default group; raise if that is impossible."""
    known = torch.distributed.Backend.backend_list
    if backend is not None and not {part.rpartition(":")[2] for part in backend.split(",")} <= set(known):
        raise ConfigError(f"backend={backend!r} is not one that torch.distributed has here: write one of {', '.join(known)}")
    if init_method is not None and "://" not in init_method:
        raise ConfigError(f"init_method={init_method!r} is not an address: write something like tcp://host:port or file:///path")
    if backend is not None and present is not None and present.backend != backend:
        raise ConfigError(
            f"backend={backend!r} was asked for, but the process group is open with {present.backend!r}: call destroy_process_group() first"
        )
    settings = GroupSettings.of(family, init_method)
    return GroupSettings(backend, init_method, device=settings.device) if backend else settings


def _named_values(value: Any) -> Mapping[str, Any]:
    if isinstance(value, torch.nn.Module):
        return {name: tensor.cpu() for name, tensor in value.state_dict().items()}
    return value if isinstance(value, Mapping) else {"value": value}
