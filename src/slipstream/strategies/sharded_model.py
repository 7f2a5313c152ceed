"""A model that torch's `fully_shard` has sharded: how it is sharded, and what its gradients and parameters are.

`shard_model` replaces the parameters of a model by shards on a mesh, block by block. It goes through the meta device, so no rank needs
more memory than it had: full parameters become placeholders, `fully_shard` decides which rows each rank holds, and `fill_from_rank_zero`
scatters the weights of rank 0 one tensor at a time. Parameters that cannot be sharded (scalars) and those of ignored modules stay whole on
every rank, and their gradients are averaged by `ShardedModel.average_whole`.

All that leans on the private names of torch's FSDP2 stands in this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from slipstream.devices.table import CPU
from slipstream.distributed.pytree import flatten, map_leaves
from slipstream.parallel.mesh import MeshSizes
from slipstream.parallel.wrap_policy import BlockPlan

__all__ = [
    "ParameterSlot", "ShardedModel", "allocate", "fill_from_rank_zero", "find_slots", "initialize_parts", "is_sharded_model",
    "send_from_rank_zero", "shard_model",
]


# torch internals: the state of a sharded module, its groups of parameters, and each parameter's unsharded form and gradients have no
# public names (torch 2.13). They are needed to scale gradients that wait for their reduction, to save them, and to run submodules by
# themselves. tests/strategies/test_fsdp.py notices a change; it can go when FSDPModule shows accumulated gradients.
def _state(module: torch.nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _groups(model: torch.nn.Module) -> list[Any]:
    return [group for module in model.modules() if isinstance(module, FSDPModule) for group in _state(module)._fsdp_param_groups]


def is_sharded_model(model: torch.nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a model or its parts."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@dataclass(eq=False)
class ShardedModel:
    """One sharded model, and the parameters of it that every rank holds whole; it keeps no model alive."""

    model: weakref.ref[torch.nn.Module]
    is_current: Callable[[], bool]
    """Whether the process group is still the one that the shards belong to."""
    sizes: MeshSizes | None
    """The mesh that it is sharded over; None if the script has sharded it."""
    held_whole: list[weakref.ref[torch.nn.Parameter]] = field(default_factory=list)
    learns_statistics: bool = False
    """Whether forward passes change buffers, each rank by its own rows (BatchNorm)."""
    reduces: bool = True
    """Whether backward passes reduce gradients now."""
    waits: bool = False
    """Whether there may be gradients on this rank that have not been reduced."""
    failed: bool = False
    """Whether an exception ended the last pass."""
    handles: list[RemovableHandle] = field(default_factory=list)
    """Hooks of ours on the model and its parts."""
    held: int = 0
    """How many blocks of `no_sync` are open."""
    _statistics_differ: bool = False

    @classmethod
    def of(cls, model: torch.nn.Module, is_current: Callable[[], bool], sizes: MeshSizes | None) -> ShardedModel:
        """Return the record of a model after `fully_shard`."""
        whole = [weakref.ref(parameter) for parameter in model.parameters() if not isinstance(parameter, DTensor)]
        return cls(weakref.ref(model), is_current, sizes, whole, any(map(_learns_statistics, model.modules())))

    @property
    def whole(self) -> list[torch.nn.Parameter]:
        """The parameters that every rank holds whole."""
        return [parameter for held in self.held_whole if (parameter := held()) is not None]

    @property
    def groups(self) -> list[Any]:
        """torch's groups of parameters. They hold the modules, so they are not kept here."""
        model = self.model()
        return [] if model is None else _groups(model)

    def remove_hooks(self) -> None:
        """Remove our hooks from the model and its parts."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def set_reduces(self, reduces: bool) -> None:
        """Set whether backward passes reduce gradients, or add them up on each rank."""
        if reduces != self.reduces:
            self.reduces = reduces
            self.waits = True
            for module in self._roots():
                module.set_requires_gradient_sync(reduces)

    def _roots(self) -> Iterator[FSDPModule]:
        """Yield the outermost sharded modules."""
        model = self.model()
        queue = [] if model is None else [model]
        while queue:
            module = queue.pop()
            if isinstance(module, FSDPModule):
                yield module
            else:
                queue.extend(module.children())

    def recover(self) -> None:
        """Abandon a pass that an exception ended: free what it gathered, so that the next pass begins anew. Gradients stay."""
        self.waits = self.failed = True
        for root in self._roots():
            root.reset_iter_state()

    def begin_pass(self) -> None:
        """Begin a forward pass of the whole model: abandon one of a block that failed, and take over the statistics of rank 0."""
        for root in self._roots():
            states = _state(root)._state_ctx.all_states  # type: ignore[arg-type]
            if any(state._training_state is TrainingState.FORWARD for state in states):
                self.recover()
        if self.learns_statistics:
            model = self.model()
            modules = [module for module in model.modules() if _learns_statistics(module)] if model is not None else []
            if self._statistics_differ:
                _broadcast_buffers(modules)
            self._statistics_differ = any(module.training for module in modules)

    def begin(self) -> None:
        """Let the outermost modules know that they are, so that submodules may run by themselves before the first whole pass."""
        for module in self._roots():
            if not any(parameter.is_meta for parameter in module.parameters()):  # type: ignore[attr-defined]
                _state(module)._lazy_init()  # type: ignore[arg-type]

    def watch_communication(self, watch: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Run the waits for gathered parameters and scattered gradients in blocks of `watch`, which is told the name of the block."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter  # torch 2.9 and later

        model = self.model()
        for name, module in [] if model is None else model.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_watched(DefaultAllGather, watch, f"gather {name}"))
                module.set_custom_reduce_scatter(_watched(DefaultReduceScatter, watch, f"scatter {name}"))

    def with_gradients(self) -> list[str]:
        """Return the names of the parameters that have gradients."""
        model = self.model()
        return [] if model is None else [name for name, parameter in model.named_parameters() if parameter.grad is not None]

    def take_whole_weights(self) -> None:
        """Let `load_state_dict` take whole tensors for sharded parameters: each rank keeps its own rows of them."""
        model = self.model()
        if model is not None:
            self.handles.append(model.register_load_state_dict_pre_hook(_distribute_whole))  # type: ignore[no-untyped-call]

    def let_parts_run(self, check: Callable[[], None]) -> None:
        """Let submodules that hold parameters of an outermost module be called by themselves, as `model.head(x)`.

        While the outermost module runs, its parameters are there. Else such a call gathers them, as a pass of its own, after `check`.
        """
        for root in self._roots():
            state: Any = _state(root)  # type: ignore[arg-type]
            held = [place for group in state._fsdp_param_groups for sharded in group.fsdp_params for place in _modules_of(sharded)]
            for part in dict.fromkeys(part for part in held if not isinstance(part, FSDPModule)):
                part_call = _PartCall(root, state, check, self.recover)
                self.handles.append(part.register_forward_pre_hook(part_call.before, prepend=True, with_kwargs=True))
                self.handles.append(part.register_forward_hook(part_call.after, always_call=True))
            self.handles.append(root.register_forward_hook(_free_without_backward, always_call=True))  # type: ignore[attr-defined]

    def find_new(self) -> list[str]:
        """Return the names of trained parameters that came into the model after it was sharded."""
        model = self.model()
        known = {id(parameter) for parameter in self.whole}
        plain = [
            (name, parameter)
            for name, parameter in ([] if model is None else model.named_parameters())
            if not isinstance(parameter, DTensor) and parameter.requires_grad and id(parameter) not in known
        ]
        gathered = self.parameter_of() if plain else {}
        return [name for name, parameter in plain if id(parameter) not in gathered]

    def let_outputs_change(self) -> None:
        """Let scripts change outputs of sharded modules in place (`logits /= temperature`), also those that are views."""
        model = self.model()
        for module in [] if model is None else model.modules():
            if isinstance(module, FSDPModule):  # before torch's own hook, which follows the tensor that it gets
                self.handles.append(module.register_forward_hook(_detach_views, prepend=True))

    def parameter_of(self) -> dict[int, torch.Tensor]:
        """Return the sharded parameters by the identities of the full ones that take their places while a block runs."""
        return {
            id(sharded._unsharded_param): sharded.sharded_param
            for group in self.groups
            for sharded in group.fsdp_params
            if hasattr(sharded, "_unsharded_param")
        }

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every gradient of the model with its parameter: reduced ones, and those that this rank keeps until they are reduced."""
        for group in self.groups:
            for sharded in group.fsdp_params:
                unsharded = getattr(sharded, "_unsharded_param", None)
                waiting = (None if unsharded is None else unsharded.grad, sharded.unsharded_accumulated_grad)
                for gradient in (sharded.sharded_param.grad, *waiting):
                    if gradient is not None:
                        yield sharded.sharded_param, gradient
        for parameter in self.whole:
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def discard_waiting(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clear the gradients of these parameters that have not been reduced."""
        if not self.waits:
            return
        chosen = {id(parameter) for parameter in parameters}
        for group in self.groups:
            for sharded in group.fsdp_params:
                if id(sharded.sharded_param) in chosen:
                    sharded.unsharded_accumulated_grad = None
                    if hasattr(sharded, "_unsharded_param"):
                        sharded._unsharded_param.grad = None

    def reduce_waiting(self) -> None:
        """Reduce gradients that were added up without communication. All ranks have to call it."""
        for group in self.groups:
            for sharded in group.fsdp_params:
                unsharded = getattr(sharded, "_unsharded_param", None)
                kept = getattr(unsharded, "grad", None), sharded.unsharded_accumulated_grad
                waiting = [gradient for gradient in kept if gradient is not None]
                if not waiting:
                    continue
                parameter = sharded.sharded_param
                local = waiting[0] if len(waiting) == 1 else waiting[0] + waiting[1]
                averages = [Partial("avg")] * parameter.device_mesh.ndim
                partial = DTensor.from_local(local.to(parameter.dtype), parameter.device_mesh, averages, run_check=False)
                reduced = partial.redistribute(placements=parameter.placements).to(parameter.device)  # the host, if it is offloaded
                parameter.grad = reduced if parameter.grad is None else parameter.grad + reduced
                sharded.unsharded_accumulated_grad = None
                if unsharded is not None:
                    unsharded.grad = None

    def end_unseen_backward(self) -> None:
        """Reduce gradients of a backward pass that torch has not seen, and free the full parameters.

        torch sees a pass through the tensors that a module returns. A loss that is kept in an attribute, or in an object of another kind
        than lists, dicts and dataclasses, is none of these.
        """
        for root in self._roots():
            state: Any = _state(root)  # type: ignore[arg-type]
            parameters = (sharded for group in state._fsdp_param_groups for sharded in group.fsdp_params)
            if any(getattr(getattr(sharded, "_unsharded_param", None), "grad", None) is not None for sharded in parameters):
                state._root_post_backward_final_callback()

    def average_whole(self) -> None:
        """Average the gradients of parameters that every rank holds whole: one reduction for each dtype.

        A rank without a gradient counts as zero; where no rank has one, there is none afterwards either.
        """
        trained = [parameter for parameter in self.whole if parameter.requires_grad]
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            has_all = all(parameter.grad is not None for parameter in parameters)
            parts = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
            present = parts[0].new_ones(len(parts))
            if not has_all:
                present = torch.tensor([float(parameter.grad is not None) for parameter in parameters]).to(present)
            flat = torch.cat([present, *(part.detach().reshape(-1) for part in parts)])
            dist.all_reduce(flat)
            counts, means = flat[: len(parameters)], flat[len(parameters) :] / dist.get_world_size()
            pieces = torch.split(means, [parameter.numel() for parameter in parameters])
            found = [1.0] * len(parameters) if has_all else counts.tolist()  # looking at them waits for the device
            for parameter, count, piece in zip(parameters, found, pieces, strict=True):
                if count:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(piece.view_as(parameter))


def _learns_statistics(module: torch.nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None and not isinstance(module, torch.nn.SyncBatchNorm)


def _broadcast_buffers(modules: Sequence[torch.nn.Module]) -> None:
    """Give all ranks the buffers that these modules have on rank 0, as DistributedDataParallel does."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for module in modules:
        for buffer in module.buffers(recurse=False):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, 0)
        for buffer, piece in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(piece.view_as(buffer))


def _watched(kind: type[Any], watch: Callable[[str], AbstractContextManager[Any]], label: str) -> Any:
    """Return a collective of torch's FSDP2 that runs in a block of `watch`, which is told what it is for."""

    class Watched(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with watch(label):
                return super().__call__(*args, **kwargs)

    return Watched()


def _distribute_whole(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *details: Any) -> None:
    """Shard whole tensors of a state dict as the parameters are that they are for; nothing is communicated."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:  # else torch says that it does not fit
            whole = value.detach().to(parameter.device, parameter.dtype)
            state_dict[prefix + name] = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


class _PartCall:
    """Hooks of a submodule whose parameters belong to an outermost module: gather them, if that one does not run."""

    def __init__(self, root: Any, state: Any, check: Callable[[], None], recover: Callable[[], None]) -> None:
        self._root = weakref.ref(root)
        self._state = weakref.ref(state)
        self._check = check
        self._recover = recover
        self._is_open = False

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        state, root = self._state(), self._root()
        if state is None or root is None or state._training_state is not TrainingState.IDLE:
            return None
        self._check()
        self._is_open = True
        return state._pre_forward(root, args, kwargs)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not self._is_open:
            return None
        self._is_open = False
        state, root = self._state(), self._root()
        if state is None or root is None:
            return None
        if output is None:  # an error is on its way
            self._recover()
            return None
        output = state._post_forward(root, args, _detach_views(module, args, output))
        _free_without_backward(root, args, output)
        return output


def _free_without_backward(root: Any, args: Any, output: Any) -> None:
    """Free the full parameters of an outermost module after a pass that no backward follows; torch keeps them."""
    if not torch.is_grad_enabled():
        root.reshard()


def _detach_views(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Return an output with tensors of their own in the place of views.

    torch follows an output to know when the backward pass reaches a module. It loses sight of a view that is changed in place, and then
    the gradients of the module are silently not reduced.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not any(_is_followed_view(leaf) for leaf in flatten(output)):
        return output
    return map_leaves(lambda leaf: _detach_view(leaf) if _is_followed_view(leaf) else leaf, output)


def _is_followed_view(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view() and not isinstance(leaf, DTensor)


def _detach_view(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is no view: a copy, except of the result of a linear layer, which nobody else holds."""
    # torch internals: a linear layer with a bias returns a view of its product (torch 2.13). `_unsafe_view` shares its memory and is no
    # view; were the names of the nodes others, this would be a copy. test_sharded_scripts.py notices; it can go when torch follows views.
    node: Any = view.grad_fn
    if node.name() == "ViewBackward0" and node.next_functions[0][0].name() == "AddmmBackward0":
        return torch.ops.aten._unsafe_view(view, view.shape)  # type: ignore[no-any-return]
    return view.clone()


def _modules_of(sharded: Any) -> list[torch.nn.Module]:
    return [sharded._module_info.module, *sharded._module_info.shared_modules]


# -- sharding ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ParameterSlot:
    """A parameter that a model was given with, and every place of the model that it stands at (several, if it is tied)."""

    name: str
    parameter: torch.nn.Parameter
    places: list[tuple[torch.nn.Module, str]]

    @property
    def current(self) -> torch.nn.Parameter:
        """The parameter that stands there now."""
        module, name = self.places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter

    def put(self, parameter: torch.nn.Parameter) -> None:
        """Put another parameter at every place."""
        for module, name in self.places:
            module._parameters[name] = parameter


def find_slots(model: torch.nn.Module) -> list[ParameterSlot]:
    """Return the parameters of a model with their places, in the order of `named_parameters`."""
    slots: dict[int, ParameterSlot] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                slots.setdefault(id(parameter), ParameterSlot(full_name, parameter, [])).places.append((module, name))
    return list(slots.values())


def shard_model(
    model: torch.nn.Module,
    plan: BlockPlan,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    reshard_after_forward: bool | int,
    precision: MixedPrecisionPolicy,
    cpu_offload: bool,
) -> list[ParameterSlot]:
    """Shard a model in place, and return its slots. Afterwards its parameters have memory on this rank, and no values yet."""
    slots = find_slots(model)
    ignored = {id(parameter) for _, module in plan.ignored for parameter in module.parameters()}
    # torch shards neither scalars nor empty tensors
    whole = [slot for slot in slots if id(slot.parameter) in ignored or not slot.parameter.ndim or not slot.parameter.numel()]
    for slot in slots:
        if slot not in whole:
            empty = torch.empty(slot.parameter.shape, dtype=slot.parameter.dtype, device="meta")
            slot.put(torch.nn.Parameter(empty, slot.parameter.requires_grad))
    offload = CPUOffloadPolicy(pin_memory=device.type != CPU.type) if cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh, "mp_policy": precision, "offload_policy": offload, "ignored_params": {slot.parameter for slot in whole},
    }
    for _, block in plan.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    # torch keeps the root's parameters whole between forward and backward, which needs them again at once
    fully_shard(model, reshard_after_forward=None if reshard_after_forward is True else reshard_after_forward, **options)
    allocate(model, slots, device, torch.device(CPU.type) if cpu_offload else device)
    return slots


def allocate(model: torch.nn.Module, slots: Sequence[ParameterSlot], device: torch.device, shard_device: torch.device) -> None:
    """Give memory to the shards of a model that are on the meta device; what is whole gets memory on `device`. Values are not set."""
    for slot in slots:
        present = slot.current
        if isinstance(present, DTensor):
            if present.is_meta:
                slot.put(torch.nn.Parameter(torch.empty_like(present, device=shard_device), present.requires_grad))
        elif present.device != device:
            slot.put(torch.nn.Parameter(torch.empty(present.shape, dtype=present.dtype, device=device), present.requires_grad))
    _move_buffers(model, device)
    for group in _groups(model):
        for sharded in group.fsdp_params:
            sharded.reset_sharded_param()  # which now finds memory of this rank in the place of the placeholder


@torch.no_grad()
def fill_from_rank_zero(model: torch.nn.Module, slots: Sequence[ParameterSlot], device: torch.device) -> None:
    """Give every rank its rows of the parameters that rank 0 was given, and rank 0's buffers. One tensor is on its way at a time."""
    rank = dist.get_rank()
    for slot in slots:
        send_from_rank_zero(slot.current.detach(), slot.parameter.detach() if rank == 0 else None, device)
    for buffer in model.buffers():
        if not isinstance(buffer, DTensor):
            send_from_rank_zero(buffer.detach(), None, device)


def send_from_rank_zero(target: torch.Tensor, full: torch.Tensor | None, device: torch.device) -> None:
    """Give a tensor of every rank the values of `full` on rank 0, each rank its rows of a sharded one; None: those that rank 0 has."""
    if isinstance(target, DTensor) and _has_rows(target):
        _scatter_rows(None if full is None else full.to(target.dtype), target, target.device_mesh, device)
        return
    whole = torch.empty(target.shape, dtype=target.dtype, device=device) if isinstance(target, DTensor) else target
    if full is not None:
        whole.copy_(full)
    if dist.is_initialized():
        dist.broadcast(whole, 0)
    if isinstance(target, DTensor):
        target.to_local().copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local())


def _has_rows(target: DTensor) -> bool:
    """Whether a tensor is split by rows over the last axis of a mesh of all ranks, as `shard_model` does; a script may do otherwise."""
    *others, last = target.placements
    return last == Shard(0) and all(other.is_replicate() for other in others) and target.device_mesh.size() == dist.get_world_size()


def initialize_parts(model: torch.nn.Module, initialize: Callable[[torch.nn.Module], None] | None) -> None:
    """Call `initialize` for every module that has parameters of its own, once each."""
    if initialize is not None:
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                initialize(module)


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move buffers to the device; those on the meta device get memory there."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _scatter_rows(full: torch.Tensor | None, target: DTensor, mesh: DeviceMesh, device: torch.device) -> None:
    """Send each rank its rows of a tensor that rank 0 has; ranks of other replicas get the same rows."""
    shards = mesh.size(mesh.ndim - 1)
    rows = -(-target.shape[0] // shards)
    local = target.to_local()
    received = torch.empty((rows, *target.shape[1:]), dtype=target.dtype, device=device)
    sent = None
    if full is not None:
        padded = [_pad_rows(full[index * rows : (index + 1) * rows].to(received.device), rows) for index in range(shards)]
        order = mesh.mesh.reshape(-1, shards).tolist()  # global ranks, one line for each replica
        shard_of = {rank: index for line in order for index, rank in enumerate(line)}
        sent = [padded[shard_of[rank]] for rank in range(dist.get_world_size())]
    dist.scatter(received, sent, src=0)
    local.copy_(received[: local.shape[0]])


def _pad_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    if part.shape[0] == rows:
        return part.contiguous()
    padded = part.new_zeros((rows, *part.shape[1:]))
    padded[: part.shape[0]] = part
    return padded
