"""Sharded data parallelism: torch's `fully_shard` (FSDP2), and HSDP where shards are replicated too.

Every rank holds a part of the parameters, gradients and optimizer state. A block's parameters are gathered before it runs and freed after;
its gradients are averaged and scattered in the backward pass. The model stays the user's object, with the names of its parameters; its
parameters become `DTensor`s, so optimizers that were made before are mapped to them. How a model is sharded stands in `sharded_model.py`,
which blocks it has in `parallel/wrap_policy.py`.

Gradients are what they are under DDP: the mean over ranks, weighted by the stepper. While a window of accumulation is open they are added
up on each rank without communication.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from slipstream.devices.table import CPU
from slipstream.distributed import collectives
from slipstream.distributed.collectives import check_agreement
from slipstream.distributed.guard import Limits
from slipstream.distributed.process_group import Runtime
from slipstream.distributed.pytree import local_part
from slipstream.errors import ConfigError, DistributedOperationException, StateError
from slipstream.logging import get_logger
from slipstream.observability.timing.meter import Meter
from slipstream.parallel.activation import checkpoint_activations
from slipstream.parallel.mesh import MeshSizes
from slipstream.parallel.shard_sizes import describe_shard_sizes
from slipstream.parallel.wrap_policy import BlockPlan, group_parameters, plan_blocks
from slipstream.strategies.base import Strategy, check_not_sharded
from slipstream.strategies.fsdp_options import ShardingOptions
from slipstream.strategies.shard_transfer import dismantle, find_form, gather_rows, map_optimizer, record_forms, transfer
from slipstream.strategies.sharded_model import (
    ShardedModel,
    fill_from_rank_zero,
    find_slots,
    initialize_parts,
    is_sharded_model,
    shard_model,
)

__all__ = ["FSDPStrategy", "UnshardedStrategy"]

_SAME_ON_ALL_RANKS: Final = (
    *("reshard_after_forward", "cpu_offload", "activation_checkpointing"),
    *("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
)


_UNSHARDABLE = {
    "LBFGS": "it flattens all parameters into one vector",
    "Adafactor": "it factors whole matrices",
    "Rprop": "torch has no sharded form of its kernel",
    "Muon": "it orthogonalises whole matrices",
}
"""Optimizers of torch that fail on DTensors (torch 2.13), with the reason."""


class FSDPStrategy(Strategy):
    """Several processes, each with a shard of the model."""

    name = "fsdp"
    averages = True
    replicated = False

    def __init__(
        self,
        runtime: Runtime,
        limits: Limits,
        device: torch.device,
        options: Callable[[], ShardingOptions],
        sizes: MeshSizes,
        meter: Meter | None = None,
    ) -> None:
        self.options = options
        self.sizes = sizes
        self._runtime = runtime
        self._limits = limits
        self._device = device
        self._meter = meter
        self._mesh: tuple[int, DeviceMesh] | None = None
        self._in_backward = runtime.watch("backward", limits)
        self._in_forward = runtime.watch("forward", limits)
        self._in_prepare = runtime.watch("prepare", limits)
        self._in_clip = runtime.watch("clip_grad_norm_", limits)
        self._in_state = runtime.watch("get_state_dict", limits)
        self._is_in_backward = False
        self._collectives = 0
        """A checksum of all collectives of passes so far: the same on all ranks, if they run the same blocks."""
        self._expected: list[torch.optim.Optimizer] = []
        self._models: list[ShardedModel] = []

    # -- the mesh -------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """torch's mesh of the present generation of the process group; all ranks have to ask for it the first time."""
        channel: Any = self._runtime.group_channel(self._limits, None, usable=True)
        if self._mesh is None or self._mesh[0] != channel.generation:
            with channel.recording():
                self._mesh = channel.generation, self.sizes.build(self._device.type, timedelta(seconds=self._limits.timeout))
        return self._mesh[1]

    @property
    def saves_whole_weights(self) -> bool:
        return self.options().state_dict_type == "FULL_STATE_DICT"

    def mesh_axes(self, world_size: int) -> dict[str, int]:
        sizes = self.sizes.resolve(world_size)
        return {axis: sizes.size(axis) for axis in sizes.active or ("dp_shard",)}

    # -- models ---------------------------------------------------------------------------------------------------

    def check(self, model: torch.nn.Module, device: torch.device) -> None:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            super().check(model, device)
        if not is_sharded_model(model):
            check_not_sharded(model)
        if not any(True for _ in model.parameters()):
            raise ConfigError(f"{type(model).__name__} has no parameters, so there is nothing to shard: use it without prepare")

    def move(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave the parameters where they are: each rank moves its own part when the model is sharded."""

    def prepare(self, model: torch.nn.Module, before: torch.nn.Module | None = None) -> torch.nn.Module:
        channel: Any = self._runtime.group_channel(self._limits, None, usable=True)
        known: ShardedModel | None = self._runtime.sharded_models.get(model)
        if known is not None and known.is_current() and known.sizes == self.sizes:
            self._keep(known)
            return model
        if known is None and is_sharded_model(model):
            sharded = ShardedModel.of(model, lambda: bool(channel.usable), None)  # by the script: taken as it is
        else:
            sharded = self._shard(model, channel, known)
        self._runtime.sharded_models[model] = sharded
        self._keep(sharded)
        self._install_hooks(model, sharded)
        sharded.begin()
        return model

    def _keep(self, sharded: ShardedModel) -> None:
        others = [entry for entry in self._models if entry.model() not in (None, sharded.model())]
        self._models = [*others, sharded]

    def _shard(self, model: torch.nn.Module, channel: Any, known: ShardedModel | None) -> ShardedModel:
        options = self.options()
        if known is not None:  # over another mesh, or a group that has been released: its shards move
            known.remove_hooks()
            dismantle(model)
        plan = plan_blocks(model, options)
        _check_reshard(options.reshard_after_forward, self.sizes)
        self._check_same(model, plan, options, channel)
        has_values = known is not None or self._check_values(model, channel)
        get_logger(__name__).info(describe_shard_sizes(model, plan, options, self.sizes, self._expected), main_process_only=True)
        mesh = self.mesh
        if options.activation_checkpointing:
            checkpoint_activations(plan.blocks or (("", model),), offload=options.activation_checkpointing_offload, device=self._device)
        for slot in find_slots(model):
            if not slot.parameter.is_contiguous() and not slot.parameter.is_meta:
                slot.parameter.data = slot.parameter.data.contiguous()  # torch shards rows
        precision = MixedPrecisionPolicy(
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            output_dtype=options.output_dtype,
            cast_forward_inputs=options.cast_forward_inputs,
        )
        with self._in_prepare, channel.recording():
            slots = shard_model(
                model,
                plan,
                mesh,
                self._device,
                reshard_after_forward=options.reshard_after_forward,
                precision=precision,
                cpu_offload=options.cpu_offload,
            )
            if known is not None:
                for slot in slots:
                    local_part(slot.current.detach()).copy_(local_part(transfer(slot.parameter, slot.current)))
            elif has_values:
                fill_from_rank_zero(model, slots, self._device)
            else:
                initialize_parts(model, options.param_init_fn)
        record_forms(self._runtime, slots)
        return ShardedModel.of(model, lambda: bool(channel.usable), self.sizes)

    def _check_same(self, model: torch.nn.Module, plan: BlockPlan, options: ShardingOptions, channel: Any) -> None:
        layout = {
            name: f"{list(parameter.shape)} {parameter.dtype} trained: {parameter.requires_grad}"
            for name, parameter in model.named_parameters()
        }
        layout["blocks"] = ", ".join(name for name, _ in plan.blocks)
        layout["ignored modules"] = ", ".join(name for name, _ in plan.ignored)
        layout |= {f"{name} of the fsdp_plugin": str(getattr(options, name)) for name in _SAME_ON_ALL_RANKS}
        check_agreement(channel, self._limits, f"the parameters of {type(model).__name__}", layout)
        for block, parameters in group_parameters(model, plan).items():
            dtypes = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
            if block is not None and len(dtypes) > 1:
                found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                raise ConfigError(
                    f"{block or type(model).__name__} has trained parameters of several dtypes ({found}): those of a block are reduced "
                    "together and need one. Convert them (model.float()), or make the others a block of their own."
                )

    def _check_values(self, model: torch.nn.Module, channel: Any) -> bool:
        """Return whether rank 0 has values for all parameters; raise if not, and nothing else will give them any."""
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        (count,) = collectives.broadcast_objects(channel, self._limits, [len(missing)], 0)
        if not count:
            return True
        if self.options().param_init_fn is None:
            raise ConfigError(
                f"{count} parameters of {type(model).__name__} have no values on rank 0 (they are on the meta device). Load the "
                "weights on rank 0 before prepare (cpu_ram_efficient_loading: the other ranks need none), or pass "
                "FullyShardedDataParallelPlugin(param_init_fn=...), which initialises a module, and load a checkpoint afterwards."
            )
        return False

    def _install_hooks(self, model: torch.nn.Module, sharded: ShardedModel) -> None:
        """Watch what the model waits for, and let its parts run by themselves."""
        name = type(model).__name__

        def check() -> None:
            if not sharded.is_current():
                raise StateError(
                    f"this {name} is sharded over a process group that has been released: prepare it again "
                    "(`model = accelerator.prepare(model)`), and its shards belong to the present one"
                )
            if sharded.failed:
                sharded.failed = False
                self._check_failed_alike(name)

        def begin(module: torch.nn.Module, args: Any) -> None:
            check()
            if sharded.learns_statistics:
                with self._in_forward:
                    sharded.begin_pass()
            else:
                sharded.begin_pass()

        def end(module: torch.nn.Module, args: Any, output: Any) -> None:
            if output is None and sys.exc_info()[0] is not None:
                sharded.recover()

        sharded.handles.append(model.register_forward_pre_hook(begin, prepend=True))
        sharded.handles.append(model.register_forward_hook(end, always_call=True))
        sharded.let_parts_run(check)
        sharded.let_outputs_change()
        sharded.watch_communication(self._watch_communication)
        sharded.take_whole_weights()

    def _check_failed_alike(self, name: str) -> None:
        """Raise unless all ranks have left a failed pass at the same place; else their next collectives would not match."""
        channel: Any = self._runtime.channel(self._limits)
        done = {"collectives": str(channel.count_torch_collectives())}
        try:
            check_agreement(channel, self._limits, f"how far {name} came in the pass that failed", done)
        except DistributedOperationException as error:
            channel.torch_group_desynchronized = channel.torch_group_desynchronized or str(error)
            raise

    @contextmanager
    def _watch_communication(self, label: str) -> Iterator[None]:
        """Run a collective of a pass: its time is communication; in a forward pass it is a watched section of its own."""
        self._collectives = zlib.crc32(label.encode(), self._collectives)
        meter = self._meter
        begun = meter is not None and meter.wait()
        try:
            if self._is_in_backward:  # which is watched as a whole
                yield
            else:
                with self._in_forward:
                    yield
        finally:
            if meter is not None:
                meter.end_wait(begun)

    def _find(self, model: torch.nn.Module) -> ShardedModel | None:
        return next((entry for entry in self._models if entry.model() is model), None)

    # -- optimizers -----------------------------------------------------------------------------------------------

    def expect(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._expected = list(optimizers)

    def map_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        kind = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")), "")
        if kind in _UNSHARDABLE:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot update sharded parameters ({_UNSHARDABLE[kind]}): take AdamW, Adam, SGD or another "
                "that updates each entry by itself, or train with replicas (DDP)"
            )
        with self._in_prepare:
            return map_optimizer(optimizer, partial(find_form, self._runtime))

    # -- a step ---------------------------------------------------------------------------------------------------

    def set_sync(self, model: torch.nn.Module, reduces: bool) -> None:
        if (sharded := self._find(model)) is not None:
            sharded.set_reduces(reduces)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        sharded = self._find(getattr(model, "_orig_mod", model))
        if sharded is None:
            yield
            return
        before = sharded.reduces
        sharded.held += 1
        sharded.set_reduces(False)
        try:
            yield
        finally:
            sharded.held -= 1
            sharded.set_reduces(before)

    @contextmanager
    def trigger_sync(self, model: torch.nn.Module) -> Iterator[None]:
        sharded = self._find(getattr(model, "_orig_mod", model))
        if sharded is None:
            yield
            return
        before = sharded.reduces
        sharded.set_reduces(True)
        try:
            yield
        finally:
            sharded.set_reduces(before)

    def join(self, models: list[torch.nn.Module]) -> AbstractContextManager[Any]:
        raise ConfigError(
            "join_uneven_inputs with a sharded model: every forward pass gathers parameters from all ranks, so a rank without batches "
            "cannot step aside. Leave it out: loaders of prepare give every rank as many batches, and samples are counted exactly."
        )

    def backward(
        self, loss: torch.Tensor, reducing: Sequence[torch.nn.Module] | None, run: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        models = self._models
        with self._in_backward:
            for sharded in models:
                if not sharded.held:
                    sharded.set_reduces(reducing is None or sharded.model() in reducing)
            self._is_in_backward = True
            try:
                (run or loss.backward)(**kwargs)  # type: ignore[no-untyped-call]
                for sharded in models:
                    if sharded.reduces:
                        sharded.end_unseen_backward()
                        sharded.average_whole()
            except BaseException:
                for sharded in models:
                    sharded.recover()
                raise
            finally:
                self._is_in_backward = False

    def gradients(self, model: torch.nn.Module) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        sharded = self._find(model)
        return super().gradients(model) if sharded is None else sharded.gradients()

    def current_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        aliases = self.aliases() if any(not isinstance(parameter, DTensor) for parameter in parameters) else {}
        current = []
        for parameter in parameters:
            replaced = find_form(self._runtime, parameter)
            current.append(aliases.get(id(parameter), parameter) if replaced is None else replaced)
        return current

    def aliases(self) -> dict[int, torch.Tensor]:
        return {identity: parameter for sharded in self._models for identity, parameter in sharded.parameter_of().items()}

    def discard_waiting(self, parameters: list[torch.Tensor]) -> None:
        for sharded in self._models:
            sharded.discard_waiting(parameters)

    def reduce_waiting(self, model: torch.nn.Module) -> None:
        if (sharded := self._find(model)) is not None:
            with self._in_backward:
                sharded.reduce_waiting()
                sharded.average_whole()

    def full_state(self, model: torch.nn.Module) -> dict[str, Any]:
        state, known = self.state(model), self._find(model)
        current = known is None or known.is_current()
        sharded = {name: list(value.shape) for name, value in state.items() if isinstance(value, DTensor)}
        check_agreement(self._runtime.channel(self._limits), self._limits, f"the weights of {type(model).__name__}", sharded)
        with self._in_state:
            for name in sharded:
                value = state[name].full_tensor() if current else gather_rows(state[name])
                state[name] = value.to(CPU.type)
        whole = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and name not in sharded}
        return {**state, **{name: value.detach().to(CPU.type, copy=True) for name, value in whole.items()}}

    def step(self, model: torch.nn.Module) -> None:
        sharded = self._find(model)
        if sharded is None:
            return
        self._check_same_passes(sharded, type(model).__name__)
        if new := sharded.find_new():
            raise StateError(
                f"{', '.join(new[:5])}{', ...' if len(new) > 5 else ''} of {type(model).__name__} were put in after it was sharded, so "
                "their gradients are not averaged over the ranks: change the model before it is prepared"
            )

    def _check_same_passes(self, sharded: ShardedModel, name: str) -> None:
        """Raise if ranks ran different blocks, or gave gradients to different parameters: torch then adds up what does not belong together.

        Each rank sends two checksums of all that it did so far, in one small exchange for each update.
        """
        channel = self._runtime.channel(self._limits)
        named = sharded.with_gradients()
        own = [self._collectives, zlib.crc32("\n".join(named).encode())]
        found = collectives.gather_objects(channel, self._limits, own, operation="optimizer step")
        if found is None or all(each == own for each in found):
            return
        if any(each[0] != found[0][0] for each in found):
            raise StateError(
                f"the ranks have run different blocks of {name} since its last update (or in another order), so weights and gradients of "
                "different blocks were mixed: this update cannot be used. Run the same blocks on every rank, e.g. a block that a rank "
                "does not need with a weight of 0; or choose blocks that always run (auto_wrap_policy)"
            )
        check_agreement(channel, self._limits, f"the parameters of {name} with gradients", dict.fromkeys(named, "has a gradient"))

    def clip(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with self._in_clip:
            norm = _total_norm(gradients, float(norm_type), self._device)
        parts = [part for gradient in gradients if (part := local_part(gradient)).numel()]
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for device in dict.fromkeys(part.device for part in parts):
            # torch internals: `_foreach_mul_` is one kernel for all tensors, as clip_grad_norm_ uses it. torch 2.13; test_fsdp.py notices.
            torch._foreach_mul_([part for part in parts if part.device == device], scale.to(device))
        return norm

    def clip_value(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_value, clip_value)


class UnshardedStrategy(Strategy):
    """One process with a `fsdp_plugin`: nothing to shard; blocks are found and activations checkpointed as on several."""

    def __init__(self, device: torch.device, options: Callable[[], ShardingOptions]) -> None:
        self._device = device
        self.options = options

    def prepare(self, model: torch.nn.Module, before: torch.nn.Module | None = None) -> torch.nn.Module:
        options = self.options()
        plan = plan_blocks(model, options)
        if options.activation_checkpointing:
            checkpoint_activations(plan.blocks or (("", model),), offload=options.activation_checkpointing_offload, device=self._device)
        get_logger(__name__).info(f"one process: {type(model).__name__} is not sharded", main_process_only=True)
        return model

    def full_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return copies in host memory, as where the model is sharded."""
        state = self.state(model)
        copies = {name: value.detach().to(CPU.type, copy=True) for name, value in state.items() if isinstance(value, torch.Tensor)}
        return {**state, **copies}


def _check_reshard(reshard_after_forward: bool | int, sizes: MeshSizes) -> None:
    shards = sizes.dp_shard
    if not isinstance(reshard_after_forward, bool) and shards % reshard_after_forward:
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward} says how many processes keep a copy between them: it has to divide the "
            f"{shards} that share a model, and {shards} / {reshard_after_forward} = {shards / reshard_after_forward:.2f}. "
            "Write a divisor, True or False."
        )


def _total_norm(gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients together, on every rank.

    What a rank holds of them is summed up (or the largest taken) by mesh and placements, then over the ranks that hold other parts: a
    replica counts once. Works for any mixture of meshes and of whole tensors, where `torch.nn.utils.clip_grad_norm_` fails.
    """
    largest = math.isinf(norm_type)
    parts: dict[Any, list[torch.Tensor]] = {}
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        parts.setdefault(key, []).append(local_part(gradient))
    total = torch.zeros((), dtype=dtype, device=device)
    for key, locals_ in parts.items():
        # torch internals: `_foreach_norm` is one kernel for all tensors, as clip_grad_norm_ uses it. torch 2.13; test_fsdp.py notices.
        held: dict[torch.device, list[torch.Tensor]] = {}
        for local in locals_:
            if local.numel():
                held.setdefault(local.device, []).append(local)
        norms = [torch.stack(torch._foreach_norm(those, norm_type)).to(device, dtype) for those in held.values()]  # one copy from each
        part = total.new_zeros(())
        if norms:
            part = torch.cat(norms).max() if largest else (torch.cat(norms) ** norm_type).sum()
        if key is not None:
            mesh, placements = key
            for axis, placement in enumerate(placements):
                if placement.is_shard():
                    dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(axis))
        total = torch.maximum(total, part) if largest else total + part
    return total if largest else total ** (1.0 / norm_type)
