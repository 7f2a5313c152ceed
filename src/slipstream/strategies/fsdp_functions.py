"""The single steps of sharded training as functions, under the names of Accelerate: `fsdp2_prepare_model`, `fsdp2_apply_ac`, ...

`Accelerator.prepare` does all of it. These are for scripts that shard a model, fill it or point an optimizer at it themselves. What a
function does to a model is what `prepare` does, with the plugin and the mesh of the same Accelerator, so a model that went through them
may be prepared afterwards. Functions that send weights have to be called on all processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slipstream.config.resolve import for_worker
from slipstream.devices.table import CPU
from slipstream.distributed.collectives import check_agreement
from slipstream.distributed.scatter import agree_or_raise
from slipstream.errors import ConfigError
from slipstream.parallel.activation import checkpoint_activations
from slipstream.parallel.compile import compile_in_place
from slipstream.parallel.unwrap import plain_name
from slipstream.parallel.wrap_policy import find_modules, plan_blocks
from slipstream.precision.scaler import get_grad_scaler
from slipstream.strategies.fsdp import FSDPStrategy, UnshardedStrategy
from slipstream.strategies.fsdp_options import FullyShardedDataParallelPlugin, resolve_sharding
from slipstream.strategies.shard_transfer import map_optimizer, record_forms
from slipstream.strategies.sharded_model import allocate, find_slots, send_from_rank_zero

__all__ = [
    "ensure_weights_retied",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_parameters_from_modules",
]


# -- models -----------------------------------------------------------------------------------------------------------


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Shard a model in place as the `fsdp_plugin` of this Accelerator says, and return it. All processes have to call it.

    Rank 0's weights count; one that is sharded already stays as it is. The Accelerator does not save the model until `prepare` got it.

    >>> from slipstream import Accelerator
    >>> accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
    >>> model = torch.nn.Linear(2, 2)
    >>> fsdp2_prepare_model(accelerator, model) is model
    True
    """
    strategy = _sharding_strategy(accelerator, "fsdp2_prepare_model")
    original = compile_in_place(strategy.unwrap(model))
    strategy.check(original, accelerator.device)
    strategy.move(original, accelerator.device)
    return strategy.prepare(original)


def fsdp2_apply_ac(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Let the blocks of a model compute their activations again in the backward pass, and return it.

    The blocks are those that the `fsdp_plugin` of this Accelerator shards; with its `activation_checkpointing_offload` their inputs wait in
    host memory. The fields decide how, this call that it is done.

    >>> from slipstream import Accelerator
    >>> accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
    >>> model = fsdp2_apply_ac(accelerator, torch.nn.Linear(2, 2))
    >>> model(torch.ones(1, 2)).sum().backward()
    """
    strategy = _sharding_strategy(accelerator, "fsdp2_apply_ac")
    options = strategy.options()
    original = strategy.unwrap(model)
    plan = plan_blocks(original, options)
    blocks = plan.blocks or (("", original),)
    checkpoint_activations(blocks, offload=options.activation_checkpointing_offload, device=accelerator.device)
    return model


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool] | None:
    """Return a function that says of a module of this model whether the plugin makes it a block; None if the root alone is sharded.

    >>> plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"])
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    >>> is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
    >>> [is_block(module) for module in model]
    [True, False]
    """
    if not isinstance(fsdp2_plugin, FullyShardedDataParallelPlugin):
        raise ConfigError(
            f"fsdp2_prepare_auto_wrap_policy got a {type(fsdp2_plugin).__name__} for the plugin.\n"
            "Write FullyShardedDataParallelPlugin(...), or take accelerator.state.fsdp_plugin."
        )
    options = resolve_sharding(fsdp2_plugin, for_worker().sharding, "no")
    assert options is not None, "there is a plugin"
    blocks = weakref.WeakSet(module for _, module in plan_blocks(model, options).blocks)
    return (lambda module: module in blocks) if blocks else None


def _sharding_strategy(accelerator: Any, function: str) -> FSDPStrategy | UnshardedStrategy:
    strategy = accelerator._components.strategy
    if not isinstance(strategy, (FSDPStrategy, UnshardedStrategy)):
        raise ConfigError(
            f"{function} with an Accelerator that does not shard: there is no plugin that says how.\n"
            "Write Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(...)), or launch with --use_fsdp."
        )
    return strategy


# -- parameters -------------------------------------------------------------------------------------------------------


def ensure_weights_retied(
    param_init_fn: Callable[[torch.nn.Module], Any], model: torch.nn.Module, device: torch.device | str
) -> Callable[[torch.nn.Module], Any]:
    """Return `param_init_fn` with a second step: parameters that `model` ties now are tied again, on `device`.

    A function that gives a module memory (`module.to_empty(...)`) makes a new parameter for each of its places. The first one counts.

    >>> model = torch.nn.ModuleList([torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2, device="meta")])
    >>> model[1].weight = model[0].weight
    >>> initialize = ensure_weights_retied(lambda module: module.to_empty(device="cpu"), model, "cpu")
    >>> for module in model:
    ...     _ = initialize(module)
    >>> model[1].weight is model[0].weight, model[0].weight.device
    (True, device(type='cpu'))
    """
    tied = [slot for slot in find_slots(model) if len(slot.places) > 1]
    if not tied:
        return param_init_fn
    target = torch.device(device)

    def initialize(module: torch.nn.Module) -> Any:
        before = [slot.current for slot in tied]
        result = param_init_fn(module)
        for slot, old in zip(tied, before, strict=True):
            present = [owner._parameters[name] for owner, name in slot.places]
            new = next((parameter for parameter in present if parameter is not None and parameter is not old), None)
            if new is not None:
                slot.put(_on_device(new, target))
        return result

    return initialize


def _on_device(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    if parameter.device.type == device.type and device.index in (None, parameter.device.index):
        return parameter
    moved = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
    return torch.nn.Parameter(moved, parameter.requires_grad)


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping by the names of the user's model: without what torch's wrappers for compilation, checkpointing and FSDP add.

    >>> fsdp2_canonicalize_names({"_orig_mod.layer._checkpoint_wrapped_module.weight": 1})
    {'layer.weight': 1}
    """
    plain = {plain_name(name): value for name, value in named_params.items()}
    if len(plain) < len(named_params):
        names = [plain_name(name) for name in named_params]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two of the names are {twice!r} without the parts that wrappers add. Pass the names of one model.")
    return plain


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: torch.device | str
) -> set[torch.nn.Parameter]:
    """Return the parameters of some modules of a model, and move these modules to `device`.

    `modules` may be a regular expression that matches their whole names. Parameters on the meta device stay there: they have no values
    to move, and get some in `prepare`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> get_parameters_from_modules("1", model, "cpu") == set(model[1].parameters())
    True
    """
    found = find_modules(model, modules, argument="modules")
    for module in found:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
    return {parameter for module in found for parameter in module.parameters()}


@torch.no_grad()
def fsdp2_load_full_state_dict(accelerator: Any, model: torch.nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False) -> None:
    """Give a sharded model the weights that rank 0 has in `full_sd`; other ranks may pass `{}`. All processes have to call it.

    Parameters on the meta device get memory first: on the device of the Accelerator, or in host memory with `cpu_offload`. Tensors are
    sent one at a time. A name or a shape that does not fit is an error on every rank, before anything changes.

    >>> from slipstream import Accelerator
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> fsdp2_load_full_state_dict(Accelerator(cpu=True), model, {"weight": torch.ones(1, 2)})
    >>> model.weight.tolist()
    [[1.0, 1.0]]
    """
    operation, state, device = "fsdp2_load_full_state_dict", accelerator._components.state, accelerator.device
    original = accelerator.unwrap_model(model, keep_torch_compile=False)
    targets = _find_targets(original)
    slots = find_slots(original)
    layout = {names[0]: f"{list(tensor.shape)} {tensor.dtype} {isinstance(tensor, DTensor)}" for names, tensor in targets}
    check_agreement(state.channel(), state.limits, "the parameters of the model", layout)
    source: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        if cpu_offload:
            _check_offloaded(targets)
        if accelerator.is_main_process:
            source = _match(original, targets, full_sd)
    except ConfigError as error:
        failure = error
    agree_or_raise(state.channel(), state.limits, failure, operation=operation, remote_error=_remote_error)
    if any(tensor.is_meta for _, tensor in targets):
        allocate(original, slots, device, torch.device(CPU.type) if cpu_offload else device)
        record_forms(state.runtime, slots)
        targets = _find_targets(original)
    with state.runtime.watch(operation, state.limits):
        for names, target in targets:
            send_from_rank_zero(target.detach(), source.get(names[0]), device)


def _remote_error(rank: int, text: str) -> ConfigError:
    return ConfigError(f"{text.removeprefix('ConfigError: ')} (on rank {rank})")


def _find_targets(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return the parameters and saved buffers of a model, each with its plain names."""
    persistent = {plain_name(name) for name in model.state_dict(keep_vars=True)}  # which frees what a forward pass has gathered
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if plain_name(name) in persistent:
            found.setdefault(id(tensor), ([], tensor))[0].append(plain_name(name))
    return list(found.values())


def _check_offloaded(targets: Iterable[tuple[list[str], torch.Tensor]]) -> None:
    for names, tensor in targets:
        if isinstance(tensor, DTensor) and tensor.device.type not in (CPU.type, "meta"):
            raise ConfigError(
                f"fsdp2_load_full_state_dict(cpu_offload=True), but {names[0]} is on {tensor.device}: where shards are is decided "
                "when a model is sharded.\nWrite FullyShardedDataParallelPlugin(cpu_offload=True), or leave it out here."
            )


def _match(model: torch.nn.Module, targets: Iterable[tuple[list[str], torch.Tensor]], full: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what rank 0 was given for each target, by the first of its names; raise if something is missing, left over or does not fit."""
    given, source = fsdp2_canonicalize_names(full), {}
    for names, target in targets:
        value = next((given[name] for name in names if name in given), None)
        if value is None:
            raise ConfigError(f"full_sd has no {names[0]!r}, which the model needs; it has {len(given)} entries. Pass a full state dict.")
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.is_meta:
            what = "a shard" if isinstance(value, DTensor) else "on the meta device" if isinstance(value, torch.Tensor) else "no tensor"
            raise ConfigError(f"full_sd[{names[0]!r}] is {what}: whole tensors are needed, such as accelerator.get_state_dict(model).")
        if value.shape != target.shape:
            raise ConfigError(f"full_sd[{names[0]!r}] has the shape {list(value.shape)}, but the model needs {list(target.shape)}.")
        source[names[0]] = value.detach()
    known = {name for names, _ in targets for name in names}
    strange = [name for name in given if name not in known]
    if strange:
        raise ConfigError(f"full_sd has {', '.join(strange[:5])}, which is no parameter or saved buffer of the model. Leave it out.")
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta and plain_name(name) not in known]
    if empty:
        raise ConfigError(f"the buffer {empty[0]} is on the meta device and in no state dict: give it a value first.")
    return source


# -- optimizers -------------------------------------------------------------------------------------------------------


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, torch.nn.Parameter]) -> None:
    """Let an optimizer work on other parameters, with its groups and its state: `mapping` gives the new one for each old one.

    Its keys are the old parameters, or what their `data_ptr()` was. Parameters that are among the new ones stay; all others have to be
    keys, or nothing changes and a ConfigError says which is missing.

    >>> old, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([old], lr=0.1)
    >>> fsdp2_switch_optimizer_parameters(optimizer, {old: new})
    >>> optimizer.param_groups[0]["params"][0] is new
    True
    """
    present = {id(parameter) for parameter in mapping.values()}
    by_identity = {id(key): parameter for key, parameter in mapping.items() if isinstance(key, torch.Tensor)}
    by_address = {key: parameter for key, parameter in mapping.items() if not isinstance(key, torch.Tensor)}

    def find(parameter: torch.Tensor) -> torch.nn.Parameter | None:
        if id(parameter) in present:
            return None
        return by_identity.get(id(parameter), by_address.get(_address(parameter)))

    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in present and find(parameter) is None:
                raise ConfigError(
                    f"fsdp2_switch_optimizer_parameters: group {number} of {type(optimizer).__name__} has a parameter of the shape "
                    f"{list(parameter.shape)} that is no key of the mapping. Its keys are the parameters that the optimizer was made "
                    "with, or their data_ptr()."
                )
    map_optimizer(optimizer, find)


def _address(parameter: Any) -> int | None:
    """The key that a script may have put down for a parameter; None for one without memory, which all such parameters would share."""
    address = parameter.data_ptr  # a number, where the script has replaced the method by what it returned before the model was sharded
    return (address if isinstance(address, int) else address()) or None


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for a loop of the script's own: torch's, which handles gradients of sharded parameters. See `get_grad_scaler`.

    >>> get_fsdp2_grad_scaler(init_scale=8.0).get_scale()
    8.0
    """
    return get_grad_scaler("FSDP", **kwargs)
