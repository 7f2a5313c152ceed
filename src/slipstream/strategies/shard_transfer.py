"""Carry a sharded model over to another mesh, or back to a plain one; also after the process group of its shards was released.

`dismantle` takes torch's FSDP2 off a model, which leaves the shards as they are. `transfer` gives a tensor the form of another: rows that
this rank holds stay here, others are gathered over the present process group. So a script may train under FSDP, release the group, and go
on under FSDP, HSDP or DDP, with the state of its optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slipstream.devices.table import CPU
from slipstream.distributed.process_group import Runtime
from slipstream.logging import get_logger
from slipstream.strategies.sharded_model import ParameterSlot, find_slots

__all__ = ["dismantle", "find_form", "gather_rows", "make_plain", "map_optimizer", "record_forms", "transfer"]


def dismantle(model: torch.nn.Module) -> list[ParameterSlot]:
    """Take FSDP2 off a model in place, and return its slots: their parameters are still sharded, and hooks are gone."""
    # torch internals: `fully_shard` has no inverse. This undoes what it did to the modules (torch 2.13): hooks, the class, the records of
    # the module. tests/strategies/test_switching.py notices a change; it can go when torch can undo it.
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            group._to_sharded()
            for handle in (
                *group._module_to_pre_save_state_dict_hook_handle.values(),
                *group._module_to_pre_load_state_dict_hook_handle.values(),
                *(sharded._post_load_hook_handle for sharded in group.fsdp_params),
            ):
                handle.remove()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        _module_state_mapping.pop(module, None)
        module.__class__ = type(module).__mro__[module._orig_cls_mro_index]
    for module in model.modules():
        for name in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(name, None)
    return find_slots(model)


@torch.no_grad()
def make_plain(model: torch.nn.Module, device: torch.device) -> list[ParameterSlot]:
    """Put whole parameters into a sharded model, on every rank; all ranks have to call it. Return the slots, with the shards."""
    slots = dismantle(model)
    for slot in slots:
        if isinstance(slot.parameter, DTensor):
            slot.put(torch.nn.Parameter(gather_rows(slot.parameter).to(device), slot.parameter.requires_grad))
    return slots


@torch.no_grad()
def transfer(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form of another one: sharded like it, or whole. Where rows have to move, all ranks have to call it."""
    if not isinstance(value, DTensor):
        return value if not isinstance(target, DTensor) else _distribute(value, target, target.placements)
    if isinstance(target, DTensor) and value.placements == target.placements and _same_ranks(value, target):
        local = value.to_local().to(target.device)
        return DTensor.from_local(
            local, target.device_mesh, target.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    full = gather_rows(value)
    if not isinstance(target, DTensor):
        return full
    return _distribute(full, target, target.placements if value.shape == target.shape else value.placements)


def _same_ranks(value: DTensor, target: DTensor) -> bool:
    return torch.equal(value.device_mesh.mesh, target.device_mesh.mesh)


def _distribute(full: torch.Tensor, target: DTensor, placements: Any) -> DTensor:
    return distribute_tensor(full.to(target.device), target.device_mesh, placements, src_data_rank=None)  # of what this rank has


def gather_rows(value: DTensor) -> torch.Tensor:
    """Return the whole of a tensor that is sharded by rows, gathered over the default group: its own mesh may have been released."""
    local: torch.Tensor = value.to_local().detach().contiguous()
    if not any(placement.is_shard() for placement in value.placements):
        return local.clone()
    grid = value.device_mesh.mesh.reshape(-1, value.device_mesh.mesh.shape[-1])  # a line of ranks for each replica
    rows = -(-value.shape[0] // grid.shape[1])
    padded = local.new_zeros((rows, *value.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat([parts[rank] for rank in grid[0].tolist()])[: value.shape[0]].clone()


# -- optimizers -------------------------------------------------------------------------------------------------------


def record_forms(runtime: Runtime, slots: Sequence[ParameterSlot]) -> None:
    """Record what has taken the place of the parameters of these slots: an optimizer may hold the old ones."""
    forms = runtime.parameter_forms
    _follow_optimizers(runtime)
    for slot in slots:
        if slot.current is not slot.parameter:  # an entry lives as long as somebody holds the old parameter
            gone = partial(forms.pop, id(slot.parameter))
            forms[id(slot.parameter)] = weakref.ref(slot.parameter, gone), slot.current


def _follow_optimizers(runtime: Runtime) -> None:
    """Map optimizers that were never prepared when they step: else they would train parameters that are in no model any more."""
    if runtime.follows_optimizers:
        return
    runtime.follows_optimizers = True
    present = weakref.ref(runtime)

    def follow(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        known = present()
        if known is not None and known.parameter_forms:  # somebody holds replaced parameters
            map_optimizer(optimizer, partial(find_form, known))

    weakref.finalize(runtime, register_optimizer_step_pre_hook(follow).remove)


def find_form(runtime: Runtime, parameter: torch.Tensor) -> torch.nn.Parameter | None:
    """Return what has taken the place of a parameter, in as many steps as there were; None if nothing has."""
    found: torch.Tensor = parameter
    while (pair := runtime.parameter_forms.get(id(found))) is not None and pair[0]() is found:
        found = pair[1]
    return None if found is parameter else found  # type: ignore[return-value]


@torch.no_grad()
def map_optimizer(optimizer: torch.optim.Optimizer, find: Callable[[torch.Tensor], torch.nn.Parameter | None]) -> bool:
    """Let an optimizer work on the present forms of its parameters, with its groups and its state; return whether any changed.

    `find` returns what has taken the place of a parameter, or None. State of a parameter's shape gets the parameter's form.
    """
    changed = False
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            new = find(parameter)
            if new is None:
                continue
            changed = True
            group["params"][index] = new
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[new] = {
                    key: transfer(value, new) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
                    for key, value in state.items()
                }
        if changed:
            _avoid_mixed_kernels(optimizer, group)
    return changed


def _avoid_mixed_kernels(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Take the plain loop for a group of sharded and whole parameters: kernels for many tensors refuse to mix the two."""
    kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
    if len(kinds) < 2 or not (group.get("foreach") or group.get("fused") or group["params"][0].device.type != CPU.type):
        return
    given = [name for name in ("foreach", "fused") if name in group]
    for name in given:
        group[name] = False
    if given:
        get_logger(__name__).warning_once(
            f"a group of {type(optimizer).__name__} has sharded parameters and some that every rank holds whole (scalars, ignored "
            f"modules): it runs with {' and '.join(f'{name}=False' for name in given)}. Put those into a group of their own to avoid that."
        )
