"""`HostedRuntime`: Slipstream's process group, strategies and collectives inside of a run that Lightning drives.

Lightning (or `slipstream launch`) starts the processes and says which rank this one is; from there on the process group, its guard and
wait monitor, DDP and FSDP2 are those of an `Accelerator`. Both strategies of this folder own a `HostedRuntime` and translate Lightning's
calls into calls of it. Before `open`, and for one process, collectives return what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from slipstream.accelerator.accelerator import Accelerator
from slipstream.accelerator.components import Components
from slipstream.config import for_worker
from slipstream.devices.table import CPU
from slipstream.distributed import collectives
from slipstream.distributed.barriers import barrier
from slipstream.distributed.cluster import Process
from slipstream.distributed.current import adopt, current
from slipstream.distributed.state import AcceleratorState
from slipstream.errors import ConfigError, StateError
from slipstream.integrations.lightning.options import StrategyOptions
from slipstream.logging import get_logger
from slipstream.observability.options import GuardKwargs, LedgerKwargs

__all__ = ["ForwardModule", "HostedRuntime", "describe_processes"]

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
_OPERATIONS: tuple[tuple[Any, str], ...] = (
    (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.MIN, "min"),
)


class _HostedAccelerator(Accelerator):
    """An Accelerator on the device that Lightning chose."""

    def __init__(self, device: torch.device, **arguments: Any) -> None:
        self._chosen_device = device
        super().__init__(**arguments)

    def _make_state(self, mixed_precision: str | None, cpu: bool, **options: Any) -> AcceleratorState:
        state = super()._make_state(mixed_precision, cpu, **options)
        state.device = self._chosen_device
        state.set_device()
        return state


class ForwardModule(torch.nn.Module):
    """Stands before a model that was sharded in place: Lightning sends its step methods through the `forward` of a wrapper."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **kwargs)


def describe_processes(environment: Any, num_processes: int, num_nodes: int) -> Process:
    """Return the process that a cluster environment of Lightning describes."""
    return Process(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        local_rank=environment.local_rank(),
        local_world_size=num_processes,
        node_rank=environment.node_rank(),
        num_nodes=num_nodes,
        cluster="lightning",
        master_addr=environment.main_address,
        master_port=environment.main_port,
    )


class HostedRuntime:
    """The Accelerator behind a strategy, and what Lightning asks of it."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.accelerator: Accelerator | None = None
        """From `open` on."""

    @property
    def components(self) -> Components:
        """The parts of the Accelerator; `StateError` before Lightning has started the processes."""
        if self.accelerator is None:
            raise StateError("Lightning has not set up the processes yet: call this from a hook of the run, or after fabric.launch()")
        return self.accelerator._components

    @property
    def communicates(self) -> bool:
        """Whether there are other processes to talk to by now."""
        return self.accelerator is not None and self.accelerator.state.use_distributed

    # -- the start ------------------------------------------------------------------------------------------------

    def open(self, environment: Any, device: torch.device, num_processes: int, num_nodes: int, mixed_precision: str) -> None:
        """Open the process group for the rank that Lightning's environment names; a second call, for the next stage, changes nothing."""
        if self.accelerator is not None and self.accelerator.state.mixed_precision == mixed_precision:
            self.accelerator.state.channel()
            return
        named = describe_processes(environment, num_processes, num_nodes)
        starts = type(environment).__name__ == "LightningEnvironment"  # else a launcher or a cluster did, whose variables we read ourselves
        runtime = adopt(named) if starts else current()
        found = runtime.process
        if (found.rank, found.world_size) != (named.rank, named.world_size):
            raise ConfigError(
                f"Lightning takes this process for rank {named.rank} of {named.world_size} ({type(environment).__name__}), and its "
                f"variables say rank {found.rank} of {found.world_size} ({found.cluster}). Start it with `slipstream launch`, torchrun, or "
                "by itself (then Lightning starts the others)."
            )
        _check_configuration(mixed_precision)
        self.accelerator = self._make_accelerator(device, mixed_precision)

    def _make_accelerator(self, device: torch.device, mixed_precision: str) -> Accelerator:
        options = self.options
        handlers: list[Any] = [LedgerKwargs(enabled=False), GuardKwargs.off()]  # these watch loops of `Accelerator`
        handlers += [] if options.ddp is None else [options.ddp]
        return _HostedAccelerator(
            device,
            cpu=device.type == CPU.type,
            mixed_precision=mixed_precision,
            fsdp_plugin=options.sharding,
            parallelism_config=options.parallelism_config,
            kwargs_handlers=handlers,
            **options.safety,
        )

    # -- models ---------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> bool:
        """Whether models are sharded."""
        return not self.components.strategy.replicated

    def prepare(self, model: torch.nn.Module, *, trains: bool = True) -> torch.nn.Module:
        """Move a model to the device and wrap it; without `trains` replicas are only made equal."""
        components = self.components
        strategy, device = components.strategy, components.state.device
        known = components.stepper.find(model)
        strategy.check(model, next((parameter.device for parameter in model.parameters()), device))
        strategy.move(model, device)
        if not trains and strategy.replicated:
            self._send_weights(model)
            return model
        prepared = strategy.prepare(model, None if known is None else known.prepared)
        components.stepper.add(model, prepared)
        return ForwardModule(model) if not strategy.replicated else prepared

    def _send_weights(self, model: torch.nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0."""
        if not self.communicates:
            return
        state = self.components.state
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        if tensors:
            sent = collectives.broadcast(state.channel(), state.limits, tensors)
            with torch.no_grad():
                for tensor, value in zip(tensors, sent, strict=True):
                    tensor.copy_(value)

    def backward(self, loss: torch.Tensor, run: Callable[[], Any], model: torch.nn.Module | None = None) -> None:
        """Run a backward pass: watched, and with gradients averaged for the models that it reaches."""
        components = self.components
        reducing = None if model is None else [components.strategy.unwrap(model) if self.shards else model]
        components.strategy.backward(loss, reducing, run)

    def check_reduced(self, models: Sequence[torch.nn.Module] | None = None) -> None:
        """Raise if gradients were not averaged, before an optimizer steps."""
        strategy = self.components.strategy
        if not strategy.averages:
            return
        for prepared in [known.prepared for known in self.components.stepper.models] if models is None else models:
            try:
                strategy.step(prepared)
            except StateError as error:
                told = str(error).replace("before prepare", "before the run").replace(
                    "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]",
                    "find_unused_parameters=True to the strategy",
                )
                raise StateError(told) from error

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """A block whose backward passes leave gradients on each rank."""
        with self.components.strategy.no_sync(model.module if isinstance(model, ForwardModule) else model):
            yield

    def clip_norm(self, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of an optimizer together to a norm, and return the norm that they had."""
        return self.components.strategy.clip(_parameters_of(optimizer), float(max_norm), float(norm_type))

    def clip_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each entry of the gradients of an optimizer."""
        self.components.strategy.clip_value(_parameters_of(optimizer), float(clip_val))

    # -- collectives ----------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.communicates:
            state = self.components.state
            barrier(state.channel(), state.limits, "barrier")

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the object of one rank on all of them."""
        if not self.communicates:
            return value
        state = self.components.state
        return collectives.broadcast_objects(state.channel(), state.limits, [value], source, operation="broadcast")[0]

    def reduce(self, tensor: torch.Tensor, group: Any, operation: Any) -> torch.Tensor:
        """Combine a tensor over the ranks, in place, and return it; a mean of whole numbers that is none is returned as a new tensor."""
        if not self.communicates:
            return tensor
        if not _is_world(group):
            raise ConfigError("a reduction over a group other than all processes: call torch.distributed.all_reduce for that group")
        state = self.components.state
        reduction = _reduction_name(operation)
        whole_number = reduction == "mean" and not tensor.is_floating_point() and not tensor.is_complex()
        result = collectives.reduce(state.channel(), state.limits, tensor.detach(), "sum" if whole_number else reduction)
        if whole_number:
            # Lightning logs the mean of a batch size, which ranks with different ones need exactly: cut off, metrics would be wrong.
            mean: torch.Tensor = result / state.num_processes
            if not torch.equal(mean, mean.trunc()):
                return mean
            result = mean
        with torch.no_grad():
            return tensor.copy_(result)

    def all_gather(self, tensor: torch.Tensor, group: Any, with_gradient: bool) -> torch.Tensor:
        """Return the tensors of all ranks, stacked."""
        if not self.communicates:
            return tensor
        if not _is_world(group):
            raise ConfigError("a gather over a group other than all processes: call torch.distributed.all_gather for that group")
        state = self.components.state
        row = tensor.unsqueeze(0)
        if with_gradient:
            stacked: torch.Tensor = collectives.gather_with_gradient(state.channel(), state.limits, row)
        else:
            stacked = collectives.gather(state.channel(), state.limits, row.detach(), operation="all_gather")
        return stacked

    def run_together(self, operation: str, step: Callable[[], Any]) -> None:
        """Run a step on every rank that may fail on one of them, such as writing a file: then all raise, and none waits for it."""
        if self.communicates:
            assert self.accelerator is not None
            self.accelerator._saver.run_and_agree(operation, step)
        else:
            step()

    def decide(self, decision: bool, *, all_ranks: bool) -> bool:
        """Return whether all ranks decided so, or any."""
        if not self.communicates:
            return bool(decision)
        state = self.components.state
        numbers = collectives.reduce(
            state.channel(), state.limits, int(bool(decision)), "min" if all_ranks else "max", operation="reduce_boolean_decision"
        )
        return bool(numbers)


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_configuration(mixed_precision: str) -> None:
    """Raise or warn where the configuration (of `slipstream launch`, say) asks for what Lightning decides."""
    config = for_worker()
    if config.compute.mixed_precision not in ("no", mixed_precision):
        raise ConfigError(
            f"{config.describe('mixed_precision')}, but this run of Lightning computes in {mixed_precision!r}: write "
            "precision='bf16-mixed' (or '16-mixed') where the Trainer or Fabric is made, or leave the option out"
        )
    if config.compute.gradient_accumulation_steps != 1:
        get_logger(__name__).warning_once(
            f"{config.describe('gradient_accumulation_steps')} has no effect here: write Trainer(accumulate_grad_batches=...)"
        )


def _is_world(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


def _reduction_name(operation: Any) -> str:
    if operation is None:
        return "sum"
    if isinstance(operation, str):
        name = _REDUCTIONS.get(operation.lower())
    else:
        name = next((name for known, name in _OPERATIONS if operation == known), None)
    if name is None:
        raise ConfigError(f"reduce_op={operation!r}: write one of {', '.join(_REDUCTIONS)}, or call torch.distributed.all_reduce")
    return name
