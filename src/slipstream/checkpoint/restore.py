"""`load_state` of one Accelerator: compare a checkpoint with what is prepared, agree across ranks, and restore it.

Everything is read, verified, resharded and compared on every rank before anything changes. A rank that cannot load makes all ranks raise.
Optimizers, schedulers and the loss scale, which may reject a state, are restored first: if one fails on any rank, every rank undoes them
and raises. Registered objects follow; changes by them and by hooks are not undone. Loaders, weights, accumulation and gradients, which
were checked before, come last and have no undo: if one still fails, every rank raises an error that says that the state is not usable.
"""

from __future__ import annotations

import copy
import hashlib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint.capture import count_updates, current_settings, describe_changes
from slipstream.checkpoint.garbage import paused_collection
from slipstream.checkpoint.locate import SavedModel, SavedState, is_one_of_several, locate_checkpoint
from slipstream.checkpoint.optimizer_names import goes_by_names, number_parameters, parameter_names
from slipstream.checkpoint.sharded import BrokenShardError, TensorPlaceholders, is_sharded, local_box, reshard
from slipstream.checkpoint.weights import arrange_state_dict, check_fit, load_into
from slipstream.devices import rng
from slipstream.devices.memory import should_reduce_batch_size
from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.logging import get_logger
from slipstream.training.loop_state import redistribute_loop_state

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components
    from slipstream.checkpoint.saver import Saver

__all__ = ["LoadOptions", "reshard_model", "reshard_optimizer", "restore"]


_PARAMETER_SHAPED_STATE = (
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev", "square_avg", "sum",
)  # fmt: skip
"""Entries of the states of torch's optimizers that have the shape of their parameter."""
_BROKEN = "broken"
"""Reported instead of a stamp by a rank whose shards are damaged."""


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is to be loaded."""

    strict: bool | None = None
    """True: changed settings are an error. False: missing and unexpected weights are left out."""
    allow_pickle: bool = False
    resume: Any = None


@dataclass
class _RestorePlan:
    """The state that will be restored once every rank has it."""

    saved: SavedState
    own: Mapping[str, Any] | None
    """The state that this rank saved."""
    loop: Mapping[str, Any] | None
    gradients: Mapping[str, torch.Tensor] | None
    warnings: list[str] = field(default_factory=list)


def restore(saver: Saver, input_dir: Any, options: LoadOptions) -> str:
    """Load a checkpoint into everything that is prepared, and return the path of what was loaded."""
    saver.run_and_agree("load_state", saver.settle)  # all ranks see the same once none is saving
    with paused_collection():
        plan = _agree_on_plan(saver, input_dir, options)
        _apply_plan(saver, plan, options)
    for line in plan.warnings:
        get_logger(__name__).warning(line)
    get_logger(__name__).info(f"loaded {plan.saved.where} (step {plan.saved.step})")
    saver.components.ledger.count_from(count_updates(saver.components))
    return plan.saved.where


def _agree_on_plan(saver: Saver, input_dir: Any, options: LoadOptions) -> _RestorePlan:
    """Return the plan once all ranks have found the same checkpoint. If shards are damaged on one rank, all ranks try an older one."""
    unusable: dict[str, str] = {}
    plans: list[_RestorePlan] = []

    def find() -> tuple[Any, Any, str]:
        try:
            plan = _make_plan(saver, locate_checkpoint(saver, input_dir, options.allow_pickle, unusable), options)
        except BrokenShardError as error:
            if error.folder in unusable or not is_one_of_several(saver, input_dir, error.folder):
                raise
            return (_BROKEN, error.folder, str(error))
        except SlipstreamError:
            raise
        except Exception as error:
            raise _as_checkpoint_error(error, str(input_dir)) from error
        plans.append(plan)
        return (plan.saved.stamp, plan.saved.step, _window_state(plan, saver.components.state.num_processes))

    while True:
        reports = saver.run_and_agree("load_state", find)
        broken = {folder: why for kind, folder, why in reports if kind == _BROKEN}
        if not broken:
            break
        unusable |= broken
    plan = plans[-1]
    if len({(stamp, step) for stamp, step, _ in reports}) > 1:
        found = ", ".join(f"rank {rank}: step {step} ({stamp})" for rank, (stamp, step, _) in enumerate(reports))
        raise CheckpointError(f"the processes found different checkpoints at {plan.saved.where} ({found}): they do not see the same folder")
    _agree_on_windows(plan, [window for _, _, window in reports])
    return plan


# -- before anything changes ------------------------------------------------------------------------------------------


def _make_plan(saver: Saver, saved: SavedState, options: LoadOptions) -> _RestorePlan:
    components, registry = saver.components, saver.components.registry
    warnings = list(saved.warnings)
    if not components.stepper.models and not registry.optimizers and not registry.loaders and not saver.objects:
        raise CheckpointError("load_state() was called before prepare(): there is nothing to load a checkpoint into. Prepare first.")
    warnings += _check_counts(saver, saved, options)
    if saved.loaders is not None and len(saved.loaders) != len(registry.loaders):
        warnings.append(
            f"{saved.where} holds the positions of {len(saved.loaders)} loaders, and {len(registry.loaders)} are prepared: they are "
            "matched in order, and the rest is ignored"
        )
    _check_models(saver, saved, options)
    saved = _number_optimizers(components, saved)
    for number, (stored, optimizer) in enumerate(zip(saved.optimizers or [], registry.optimizers, strict=False)):
        _check_optimizer(saved.where, number, stored, optimizer)
    saved = _reshard_saved_state(components, saver.objects, saved, strict=options.strict is not False)
    own = saved.rank(components.state.process_index)
    loop, gradients, notes = _loop_state(saver, saved, own)
    if loop is not None and len(loop["windows"]) != len(components.stepper.models):
        loop = gradients = None  # saved for other models; `_check_counts` added a warning
    try:
        if loop is not None:
            components.stepper.check(loop, gradients)
            if saved.clipping is not None:
                components.clipper.check(saved.clipping)
        for loader, position in _loader_states(registry.loaders, saved, own):
            loader.check_position(position)
    except ConfigError as error:
        raise _as_checkpoint_error(error, saved.where) from error
    _check_random_states((own or {}).get("random"), saved.where)
    warnings += notes + _compare_settings(saver, saved, options)
    return _RestorePlan(saved, own, loop, gradients, warnings)


def _check_counts(saver: Saver, saved: SavedState, options: LoadOptions) -> list[str]:
    """Raise if the numbers of prepared objects differ from those saved, or return warnings where that can be intended."""
    registry, models, warnings = saver.components.registry, saver.components.stepper.models, []
    saved_models = max([len(models), *(number + 1 for number in saved.models)])  # hooks may load models without weights in it
    for what, stored, present, remedy in (
        ("model", range(saved_models), models, "prepare"),
        ("optimizer", saved.optimizers, registry.optimizers, "prepare"),
        ("scheduler", saved.schedulers, registry.schedulers, "prepare"),
        ("registered object", set(saved.objects) | saved.objects_missing, saver.objects, "register (register_for_checkpointing)"),
    ):
        if stored is None or len(stored) == len(present):
            continue
        kinds = f" ({', '.join(_kind(entry) for entry in present)})" if present else ""
        difference = f"{saved.where} holds {_counted(len(stored), what)}, and this run has {len(present) or 'none'}{kinds}"
        same = f"{remedy} the same ones in the same order before load_state"
        if options.strict is True or (present and options.strict is None):
            raise CheckpointError(f"{difference}: {same}, or load what fits with strict=False")
        left_out = f"it is ignored, which is fine for evaluation; to continue training, {same}"
        warnings.append(f"{difference}: {'they are matched in order, and the rest is ignored' if present else left_out}")
    return warnings


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _kind(value: Any) -> str:
    """Return the class name of the user's object inside a prepared one."""
    for name in ("original", "scheduler", "optimizer"):
        if name in vars(value):
            return type(vars(value)[name]).__name__
    return type(value).__name__


def _check_models(saver: Saver, saved: SavedState, options: LoadOptions) -> None:
    models = saver.components.stepper.models
    for number, stored in saved.models.items():
        if number >= len(models):
            break  # `_check_counts` added a warning
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()}
        report = check_fit(models[number].original, shapes, stored.aliases, stored.extra)
        report.demand(saved.where, type(models[number].original).__name__, strict=options.strict is not False)


def _number_optimizers(components: Components, saved: SavedState) -> SavedState:
    """Return the same with numbers in states of optimizers that go by names of parameters, as those of FSDP do."""
    if not any(map(goes_by_names, saved.optimizers or [])):
        return saved
    names = parameter_names(model.original for model in components.stepper.models)
    groups = [optimizer.param_groups for optimizer in components.registry.optimizers]
    return replace(
        saved,
        optimizers=[
            number_parameters(stored, groups[number], names, f"{saved.where}: optimizer {number}")
            if goes_by_names(stored) and number < len(groups)
            else stored
            for number, stored in enumerate(saved.optimizers or [])
        ],
    )


def _check_optimizer(where: str, number: int, stored: Any, optimizer: Any) -> None:
    groups = stored.get("param_groups") if isinstance(stored, Mapping) else None
    if not isinstance(groups, list) or not isinstance(stored.get("state"), Mapping):
        raise CheckpointError(f"{where}: the state of optimizer {number} has no parameter groups")
    then, now = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if then != now:
        raise CheckpointError(
            f"{where}: optimizer {number} ({type(optimizer.optimizer).__name__}) was saved with groups of {then} parameters and has "
            f"{now} now: build it from the same parameters, in the same groups"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [index for group in groups for index in group["params"]]
    for index, parameter in zip(order, parameters, strict=True):
        entries = stored["state"].get(index, {})
        for name in _PARAMETER_SHAPED_STATE:
            value = entries.get(name) if isinstance(entries, Mapping) else None
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{where}: optimizer {number} has {name} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}: the parameters or their order have changed"
                )


def _loop_state(saver: Saver, saved: SavedState, own: Mapping[str, Any] | None) -> tuple[Any, Any, list[str]]:
    """Return the accumulation windows and their gradients for this rank, and warnings about them."""
    world = saver.components.state.num_processes
    if saved.world is None:
        return None, None, []
    sharded = not saver.components.strategy.replicated
    if saved.world == world and own is not None and not (sharded and own["gradients"] is not None):
        return own["loop"], own["gradients"] if saved.gradients is None else saved.gradients, []
    found = [entry for rank in range(saved.world) if (entry := saved.rank(rank)) is not None]
    if not found:
        return None, None, []
    is_open = any(not window["closing"] for window in found[0]["loop"]["windows"])
    if not is_open and found[0]["gradients"] is None and saved.gradients is None:
        return found[0]["loop"], None, []
    if len(found) < saved.world:
        if saved.world == world:  # `_agree_on_windows` adds the warning, on all ranks
            return None, None, []
        return None, None, [_lost_batches_message(saved.where, [rank for rank in range(saved.world) if saved.rank(rank) is None])]
    loop, gradients = redistribute_loop_state(
        [(entry["loop"], entry["gradients"]) for entry in found],
        saved_by=saved.world,
        world_size=world,
        batch_ratio=_batch_ratio(saver, saved, world),
        reduced=saved.gradients,
    )
    if sharded and gradients is not None and saved.gradients is None:
        gradients = _reshard_gradients(saver.components, gradients, saved.placeholders)
    return loop, gradients, []


def _window_state(plan: _RestorePlan, world: int) -> str:
    """Return what this rank has of an unfinished update: "a part", "nothing" if it did not save, or ""."""
    if plan.saved.world != world:
        return ""
    if plan.own is None:
        return "nothing"
    return "a part" if plan.gradients is not None or any(not window["closing"] for window in plan.own["loop"]["windows"]) else ""


def _agree_on_windows(plan: _RestorePlan, windows: list[str]) -> None:
    """Continue an unfinished update on all ranks or on none, so that they reduce gradients at the same batch."""
    missing = [rank for rank, window in enumerate(windows) if window == "nothing"]
    if missing and "a part" in windows:
        plan.loop = plan.gradients = None
        plan.warnings.append(_lost_batches_message(plan.saved.where, missing))


def _lost_batches_message(where: str, ranks: list[int]) -> str:
    return (
        f"{where} was saved in the middle of an update, and gradients of rank {', '.join(map(str, ranks))} are not in it, because "
        "save_state was not called there, or did not finish: the batches of that update so far are lost. Call save_state on every "
        "process, or where accelerator.sync_gradients is True."
    )


def _batch_ratio(saver: Saver, saved: SavedState, world: int) -> float:
    """Return the ratio of the saved to the present global batch size."""
    loaders = saver.components.registry.loaders
    before = (saved.receipt.get("loaders") or [{}])[0].get("batch")
    if loaders and before and loaders[0].batch_size is not None:
        return float(before) / loaders[0].total_batch_size
    return (saved.world or world) / world  # a batch sampler decides, and sizes are unknown until batches are read


def _compare_settings(saver: Saver, saved: SavedState, options: LoadOptions) -> list[str]:
    """Return the settings that differ from those of the checkpoint; with `strict=True`, raise."""
    if not saved.receipt:
        return []
    found = describe_changes(saved.receipt, current_settings(saver.components))
    if found and options.strict:
        raise CheckpointError(
            f"{saved.where} was saved by a run with different settings:\n" + "\n".join(f"  {difference}" for difference in found)
            + "\nMake them agree, or leave out strict=True to continue with warnings."
        )
    return [f"{saved.where}: {difference}" for difference in found]


def _reshard_saved_state(components: Components, objects: Sequence[Any], saved: SavedState, *, strict: bool) -> SavedState:
    """Return the saved state with every tensor sharded like its target; unchanged if nothing was or is sharded."""
    if components.strategy.replicated and not saved.placeholders:
        return saved
    models, optimizers, placeholders = components.stepper.models, components.registry.optimizers, saved.placeholders
    return replace(
        saved,
        models={
            number: reshard_model(models[number].original, model, placeholders, strict=strict) if number < len(models) else model
            for number, model in saved.models.items()
        },
        optimizers=None
        if saved.optimizers is None
        else [
            reshard_optimizer(state, optimizers[number].param_groups, placeholders) if number < len(optimizers) else state
            for number, state in enumerate(saved.optimizers)
        ],
        objects={
            number: reshard(state, objects[number].state_dict(), placeholders) if number < len(objects) else state
            for number, state in saved.objects.items()
        },
        gradients=None if saved.gradients is None else _reshard_gradients(components, saved.gradients, placeholders),
    )


def _reshard_gradients(components: Components, gradients: Mapping[str, Any], placeholders: TensorPlaceholders) -> dict[str, Any]:
    """Return gradients of an unfinished update, each sharded like its parameter."""
    targets = {
        f"{number}.{name}": parameter
        for number, model in enumerate(components.stepper.models)
        for name, parameter in model.original.named_parameters()
    }
    return {name: reshard(gradient, targets.get(name), placeholders) for name, gradient in gradients.items()}


def reshard_model(model: torch.nn.Module, stored: SavedModel, placeholders: TensorPlaceholders, *, strict: bool) -> SavedModel:
    """Return the weights of a model with every tensor sharded like its target; raise if they do not fit."""
    targets = dict(model.state_dict())
    report = check_fit(model, stored.tensors, stored.aliases, stored.extra)
    tensors = {
        name: reshard(value, targets[known], placeholders)
        for name, value in stored.tensors.items()
        if (known := report.renamed.get(name, name)) in targets
    }
    aliases = {}
    for name, kept in stored.aliases.items():
        if kept in tensors and _hold_same_part(targets.get(name), targets[report.renamed.get(kept, kept)]):
            aliases[name] = kept
        elif name in targets:
            tensors[name] = reshard(stored.tensors[kept], targets[name], placeholders)
    arrange_state_dict(model, tensors, aliases, stored.extra, report, strict=strict)  # raises if weights that are tied only here differ
    return replace(stored, tensors=tensors, aliases=aliases)


def _hold_same_part(value: Any, other: Any) -> bool:
    """Whether two targets hold the same box of a tensor on this rank."""
    return is_sharded(value) == is_sharded(other) and (not is_sharded(value) or local_box(value) == local_box(other))


def reshard_optimizer(stored: Any, groups: Sequence[Mapping[str, Any]], placeholders: TensorPlaceholders) -> Any:
    """Return the state of an optimizer with entries of the shape of a parameter sharded like the parameter."""
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    parameters = dict(zip(numbers, (parameter for group in groups for parameter in group["params"]), strict=True))
    state = {
        number: {name: reshard(value, None if name == "step" else parameters.get(number), placeholders) for name, value in entries.items()}
        if isinstance(entries, Mapping)
        else reshard(entries, parameters.get(number), placeholders)
        for number, entries in stored["state"].items()
    }
    return {**reshard({name: value for name, value in stored.items() if name != "state"}, None, placeholders), "state": state}


# -- restoring --------------------------------------------------------------------------------------------------------


def _apply_plan(saver: Saver, plan: _RestorePlan, options: LoadOptions) -> None:
    """Restore everything on every rank; if a rank fails, raise on every rank. See the module docstring for what is undone."""
    numbers: list[int] = []
    undo: list[Callable[[], object]] = []

    def restore_fallible() -> None:
        numbers.extend(_run_load_hooks(saver, plan, options))
        _restore_fallible(saver, plan, undo)

    def restore_objects() -> None:
        for number, stored in plan.saved.objects.items():
            if number < len(saver.objects):
                with _explain_refusal(plan.saved.where, f"registered object {number}", saver.objects[number]):
                    saver.objects[number].load_state_dict(stored)
                    if isinstance(saver.objects[number], torch.optim.Optimizer):
                        _match_strides(saver.objects[number])

    try:
        for step in (restore_fallible, restore_objects):
            saver.run_and_agree("load_state", partial(_run_explained, step, plan.saved.where))
    except BaseException:
        for revert in reversed(undo):
            revert()
        raise
    saver.run_and_agree("load_state", partial(_restore_rest, saver, plan, options, numbers))
    saver.note_loaded(plan.saved.where)
    state = saver.components.state
    plan.warnings += _restore_random_states(state.process_index, state.num_processes, plan)


def _run_explained(step: Callable[[], None], where: str) -> None:
    try:
        step()
    except Exception as error:
        raise _as_checkpoint_error(error, where) from error


def _as_checkpoint_error(error: Exception, where: str) -> SlipstreamError:
    """Return any error that a state caused as a `CheckpointError` that names the checkpoint."""
    if isinstance(error, CheckpointError):
        return error
    kind = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
    return CheckpointError(f"{where} cannot be loaded: {kind}{str(error)[:1000]}")


def _check_random_states(state: Any, where: str) -> None:
    """Raise if these random states cannot be restored; the present ones are put back."""
    if not state:
        return
    kept = rng.capture()
    try:
        rng.restore(state)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{where} cannot be loaded: its random states cannot be restored ({why})") from error
    finally:
        rng.restore(kept)


def _loader_states(loaders: Iterable[Any], saved: SavedState, own: Mapping[str, Any] | None) -> Iterator[tuple[Any, Any]]:
    """Yield each loader with the state that it will be given."""
    for number, (loader, state) in enumerate(zip(loaders, saved.loaders or [], strict=False)):
        same = own is not None and saved.world == loader.data_rank.world_size
        yield loader, own["loaders"][number] if same and own is not None and "loaders" in own else state


def _restore_fallible(saver: Saver, plan: _RestorePlan, undo: list[Callable[[], object]]) -> None:
    registry, saved = saver.components.registry, plan.saved
    for number, (stored, optimizer) in enumerate(zip(saved.optimizers or [], registry.optimizers, strict=False)):
        with _explain_refusal(saved.where, f"optimizer {number}", optimizer.optimizer):
            undo.append(_optimizer_undo(optimizer.optimizer))
            optimizer.load_state_dict(_with_ranges(stored, optimizer.optimizer))
            _match_strides(optimizer.optimizer)
    for counted, optimizer in zip(saved.updates, registry.optimizers, strict=False):
        undo.append(partial(_set_counts, optimizer, optimizer.updates, optimizer.step_was_skipped))
        _set_counts(optimizer, counted["updates"], bool(counted["skipped"]))
    for number, (stored, scheduler) in enumerate(zip(saved.schedulers or [], registry.schedulers, strict=False)):
        with _explain_refusal(saved.where, f"scheduler {number}", scheduler.scheduler):
            undo.append(_state_undo(scheduler))
            scheduler.load_state_dict(stored)
    scaler = saver.components.precision.scaler
    if saved.scaler is not None and (bool(saved.scaler) == scaler.scales or not saved.receipt):  # else `_compare_settings` warns
        with _explain_refusal(saved.where, "the loss scale", scaler):
            undo.append(_state_undo(scaler))
            scaler.load_state_dict(saved.scaler)
    if plan.loop is not None:
        with _explain_refusal(saved.where, "the gradients of an unfinished update", None):
            undo.append(saver.components.stepper.reserve_gradients(plan.gradients))


def _with_ranges(stored: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer with the numbers of the parameters of each group as a range, where they are consecutive.

    torch internals: for every tensor `Optimizer.load_state_dict` looks for its parameter in the groups, from the first number on: with
    12,500 parameters that is half of the time of a load, and grows with their square (torch 2.13). In a range it is found at once.
    Code of others, which may rely on lists, never sees it. tests/checkpoint/test_save_cost.py notices; it can go when torch no longer
    searches.
    """
    is_plain = getattr(optimizer.load_state_dict, "__func__", None) is torch.optim.Optimizer.load_state_dict
    if not is_plain or optimizer._optimizer_load_state_dict_pre_hooks:
        return stored
    return {**stored, "param_groups": [{**group, "params": _as_range(group["params"])} for group in stored["param_groups"]]}


def _match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Lay state of the shape of its parameter out as the parameter is, where that is not row by row, as in a file.

    torch makes it so, and fused optimizers rely on it: the one for the CPU pairs elements by their place in memory (torch 2.13).
    """
    for parameter, entries in optimizer.state.items():
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter) or parameter.layout is not torch.strided or parameter.is_contiguous():
            continue
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if type(value) is torch.Tensor and value.layout is torch.strided and value.shape == parameter.shape:
                entries[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _as_range(numbers: Sequence[Any]) -> Sequence[Any]:
    if not numbers or type(numbers[0]) is not int:
        return numbers
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return consecutive if list(consecutive) == list(numbers) else numbers


@contextmanager
def _explain_refusal(where: str, what: str, value: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # its variables hold memory of a device that the undo needs
        kind = "" if value is None else f" ({type(value).__name__})"
        why = f"{type(error).__name__}: {str(error)[:300]}"
        if should_reduce_batch_size(error):
            raise CheckpointError(
                f"{where} cannot be loaded: memory ran out while {what}{kind} was loaded ({why}). The state of this run is as it was "
                "before: free memory, or load where there is more"
            ) from error
        raise CheckpointError(f"{where} cannot be loaded: {what}{kind} rejected its state ({why})") from error


def _optimizer_undo(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return a function that restores an optimizer. Loading replaces its state and groups, so no copy of the old ones is needed.

    On a device, where the old and the new state together may not fit, the old one is moved to the host meanwhile.
    """
    attributes, groups = dict(vars(optimizer)), [(group, dict(group)) for group in optimizer.param_groups]
    devices: list[tuple[dict[str, Any], str, torch.device]] = []
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        held = {
            parameter: {name: _to_host(value) for name, value in entries.items()} if isinstance(entries, dict) else entries
            for parameter, entries in optimizer.state.items()
        }
        devices = [
            (kept, name, optimizer.state[parameter][name].device)
            for parameter, kept in held.items()
            for name, value in (kept.items() if isinstance(kept, dict) else ())
            if value is not optimizer.state[parameter][name]
        ]
        if devices:
            attributes["state"] = defaultdict(dict, held)
            optimizer.state = defaultdict(dict)

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, entries in groups:
            group.clear()
            group.update(entries)
        for kept, name, device in devices:
            kept[name] = kept[name].to(device)

    return undo


def _to_host(value: Any) -> Any:
    return value.cpu() if type(value) is torch.Tensor and not value.is_cpu else value


def _set_counts(optimizer: Any, updates: int, skipped: bool) -> None:
    optimizer.updates, optimizer.step_was_skipped = updates, skipped


def _state_undo(value: Any) -> Callable[[], object]:
    kept = copy.deepcopy(value.state_dict())
    return lambda: value.load_state_dict(kept)


def _restore_rest(saver: Saver, plan: _RestorePlan, options: LoadOptions, numbers: list[int]) -> None:
    """Restore what was checked before and has no undo: a copy of the weights for it would take as much memory as the model."""
    components, saved = saver.components, plan.saved
    try:
        for loader, state in _loader_states(components.registry.loaders, saved, plan.own):
            loader.restore_position(state, **({} if options.resume is None else {"resume": options.resume}))
        for number in numbers:
            if (stored := saved.models.get(number)) is not None:
                original = components.stepper.models[number].original
                load_into(original, stored.tensors, stored.aliases, stored.extra, strict=options.strict is not False)
        if plan.loop is not None:
            components.stepper.restore(plan.loop)
            if saved.clipping is not None:
                components.clipper.restore(saved.clipping)
            components.stepper.set_gradients(plan.gradients)
    except Exception as error:
        raise CheckpointError(
            f"{saved.where} was loaded in part ({type(error).__name__}: {str(error)[:1000]}). The state of this run is now a mixture and "
            "cannot be used: call load_state again with a checkpoint that loads, or end the run."
        ) from error


def _run_load_hooks(saver: Saver, plan: _RestorePlan, options: LoadOptions) -> list[int]:
    """Run the load hooks and return the indices of the models that they did not load."""
    models = [model.prepared for model in saver.components.stepper.models]
    everything = list(models)
    for hook in saver.load_hooks.values():
        hook(models, str(plan.saved.folder))
    wanted = {id(model) for model in models}  # hooks remove the models that they load
    numbers = [number for number, prepared in enumerate(everything) if id(prepared) in wanted]
    plan.warnings += [_without_weights(saver, plan.saved, number, options) for number in numbers if number not in plan.saved.models]
    return numbers


def _without_weights(saver: Saver, saved: SavedState, number: int, options: LoadOptions) -> str:
    """Return the warning for a model without weights in the checkpoint; raise unless `strict=False`."""
    kind = type(saver.components.stepper.models[number].original).__name__
    text = f"{saved.where} has no weights of model {number} ({kind})"
    if options.strict is False:
        return f"{text}: it keeps its present weights"
    raise CheckpointError(
        f"{text}: it was not prepared when that was saved, or a save hook removed them. Prepare the same models in the same order, "
        "register the hook that loads them and removes the model from its list (register_load_state_pre_hook), or pass "
        "strict=False to keep its weights"
    )


def _restore_random_states(rank: int, world: int, plan: _RestorePlan) -> list[str]:
    """Restore the random states of this rank; return warnings about those of devices that differ from the ones when it was saved."""
    saved = plan.saved
    seed = int.from_bytes(hashlib.blake2b(f"{saved.seed}/{saved.step}/{rank}".encode(), digest_size=7).digest(), "little")
    rng.set_seed(seed)  # for what has no state in the checkpoint
    if plan.own is not None and (states := plan.own.get("random")):
        return [
            *(
                f"rank {rank}: the random state of {kind} devices in {saved.where} is left out: there is no such device here, or fewer"
                for kind in rng.restore(states)
            ),
            *(
                f"{saved.where} was not saved on a {kind} device and has no random state of it: rank {rank} derives one from the seed, so "
                "random numbers differ from those of a run without interruption"
                for kind in rng.default_kinds()
                if kind not in states
            ),
        ]
    if saved.world is not None and rank >= saved.world:
        why = f"it was saved by {saved.world} processes and there are {world} now"
    else:
        why = "this rank did not call save_state, or did not finish it"
    get_logger(__name__).warning(
        f"{saved.where} has no random state of rank {rank} ({why}): it is derived from the seed, so random numbers differ from those of a "
        "run without interruption",
        main_process_only=False,
    )
    return []
