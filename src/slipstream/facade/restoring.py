"""Loading for an Accelerator: what a checkpoint holds is compared with what is prepared, agreed on by all ranks, and put back.

Everything is read, verified and compared before anything changes, on every rank; one that cannot load makes all of them raise.
Random states come last, so that what loading draws does not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.checkpoint.receipt import changes
from slipstream.checkpoint.saved import Saved, SavedModel
from slipstream.checkpoint.weights import check_fit, load_into
from slipstream.comm.deal import tell
from slipstream.devices import rng
from slipstream.errors import CheckpointError
from slipstream.facade.finding import find
from slipstream.facade.fitting import fitted
from slipstream.facade.saving import Saver
from slipstream.facade.taking import present_receipt
from slipstream.logging import get_logger
from slipstream.step.loop_state import redistribute

__all__ = ["Wishes", "restore"]


@dataclass(frozen=True)
class Wishes:
    """How a checkpoint is to be loaded."""

    strict: bool | None = None
    """True: what changed the meaning of the run is an error; False: weights that are missing or unknown are left out."""
    allow_pickle: bool = False
    resume: Any = None


@dataclass
class _Plan:
    """What will be put back, once every rank has it."""

    saved: Saved
    own: Mapping[str, Any] | None
    """What belonged to this rank."""
    loop: Mapping[str, Any] | None
    gradients: Mapping[str, torch.Tensor] | None
    said: list[str] = field(default_factory=list)


def restore(saver: Saver, input_dir: Any, wishes: Wishes) -> str:
    """Loads a checkpoint into everything that is prepared; the path of what was loaded."""
    state = saver.parts.state
    _settle(saver)
    plan: _Plan | None = None
    outcome: Any
    try:
        plan = _plan(saver, find(saver, input_dir, wishes.allow_pickle), wishes)
        outcome = (plan.saved.stamp, plan.saved.step, _window(plan, state.num_processes))
    except Exception as error:  # every rank has to hear of it, and raises
        outcome = error
    told = tell(state.channel(), state.limits, outcome, operation="load_state")
    assert plan is not None
    if len({(stamp, step) for stamp, step, _ in told}) > 1:
        found = ", ".join(f"rank {rank}: step {step} ({stamp})" for rank, (stamp, step, _) in enumerate(told))
        raise CheckpointError(f"the processes found different checkpoints at {plan.saved.where} ({found}): they do not see the same folder")
    _agree_on_windows(plan, [window for _, _, window in told])
    _apply(saver, plan, wishes)
    for line in plan.said:
        get_logger(__name__).warning(line)
    get_logger(__name__).info(f"loaded {plan.saved.where} (step {plan.saved.step})")
    return plan.saved.where


def _settle(saver: Saver) -> None:
    """Returns when every rank has come and none is still saving: what they look at is the same then."""
    outcome: Exception | None = None
    try:
        saver.background.wait()
    except Exception as error:  # every rank has to hear of it, and raises
        outcome = error
    tell(saver.parts.state.channel(), saver.parts.state.limits, outcome, operation="load_state")


# -- before anything changes ------------------------------------------------------------------------------------------


def _plan(saver: Saver, saved: Saved, wishes: Wishes) -> _Plan:
    parts, registry = saver.parts, saver.parts.registry
    said = list(saved.said)
    if not parts.stepper.models and not registry.optimizers and not registry.loaders and not saver.objects:
        raise CheckpointError("load_state() was called before prepare(): there is nothing to load a checkpoint into. Prepare first.")
    said += _check_counts(saver, saved, wishes)
    if saved.loaders is not None and len(saved.loaders) != len(registry.loaders):
        said.append(
            f"{saved.where} holds the positions of {len(saved.loaders)} loaders, and {len(registry.loaders)} are prepared: they are taken "
            "over in order as far as they go"
        )
    _check_models(saver, saved, wishes)
    for number, (stored, optimizer) in enumerate(zip(saved.optimizers or [], registry.optimizers, strict=False)):
        _check_optimizer(saved.where, number, stored, optimizer)
    saved = fitted(parts, saver.objects, saved, strict=wishes.strict is not False)
    own = saved.rank(parts.state.process_index)
    loop, gradients, notes = _loop(saver, saved, own)
    if loop is not None and len(loop["windows"]) != len(parts.stepper.models):
        loop = gradients = None  # of other models, as was said
    if loop is not None:
        parts.stepper.check(loop, gradients)
    said += notes + _meaning(saver, saved, wishes)
    return _Plan(saved, own, loop, gradients, said)


def _check_counts(saver: Saver, saved: Saved, wishes: Wishes) -> list[str]:
    """An error if there are other numbers of things than were saved, unless that can be meant: then what is done about it, in words."""
    registry, models, said = saver.parts.registry, saver.parts.stepper.models, []
    saved_models = max([len(models), *(number + 1 for number in saved.models)])  # those that have no weights there may be loaded by hooks
    for what, stored, present, remedy in (
        ("model", range(saved_models), models, "prepare"),
        ("optimizer", saved.optimizers, registry.optimizers, "prepare"),
        ("scheduler", saved.schedulers, registry.schedulers, "prepare"),
        ("registered object", set(saved.objects) | saved.objects_missing, saver.objects, "register (register_for_checkpointing)"),
    ):
        if stored is None or len(stored) == len(present):
            continue
        kinds = f" ({', '.join(_kind(one) for one in present)})" if present else ""
        difference = f"{saved.where} holds {_counted(len(stored), what)}, and this run has {len(present) or 'none'}{kinds}"
        same = f"{remedy} the same ones in the same order before load_state"
        if wishes.strict is True or (present and wishes.strict is None):
            raise CheckpointError(f"{difference}: {same}, or take over what fits with strict=False")
        left_out = f"that is left out, which is fine for evaluation; to train on, {same}"
        said.append(f"{difference}: {'they are taken over in order as far as they go' if present else left_out}")
    return said


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _kind(one: Any) -> str:
    """The class of the script's own object inside a prepared one."""
    for name in ("original", "scheduler", "optimizer"):
        if name in vars(one):
            return type(vars(one)[name]).__name__
    return type(one).__name__


def _check_models(saver: Saver, saved: Saved, wishes: Wishes) -> None:
    models = saver.parts.stepper.models
    for number, stored in saved.models.items():
        if number >= len(models):
            break  # as was said
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()}
        report = check_fit(models[number].original, shapes, stored.aliases, stored.extra)
        report.demand(saved.where, type(models[number].original).__name__, strict=wishes.strict is not False)


def _check_optimizer(where: str, number: int, stored: Any, optimizer: Any) -> None:
    groups = stored.get("param_groups") if isinstance(stored, Mapping) else None
    if not isinstance(groups, list) or not isinstance(stored.get("state"), Mapping):
        raise CheckpointError(f"{where}: the state of optimizer {number} has no groups of parameters")
    then, now = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if then != now:
        raise CheckpointError(
            f"{where}: optimizer {number} ({type(optimizer.optimizer).__name__}) was saved with groups of {then} parameters, and has "
            f"{now} now: make it of the same parameters, in the same groups"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [index for group in groups for index in group["params"]]
    for index, parameter in zip(order, parameters, strict=True):
        entries = stored["state"].get(index, {})
        for name in ("exp_avg", "momentum_buffer", "square_avg"):  # those that are like their parameter in every optimizer of torch
            value = entries.get(name) if isinstance(entries, Mapping) else None
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{where}: optimizer {number} has {name} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}: the parameters are other ones, or in another order"
                )


def _loop(saver: Saver, saved: Saved, own: Mapping[str, Any] | None) -> tuple[Any, Any, list[str]]:
    """Windows of accumulation and their gradients for this rank, and what has to be said about them."""
    world = saver.parts.state.num_processes
    if saved.world is None:
        return None, None, []
    if saved.world == world and own is not None:
        return own["loop"], own["gradients"], []
    found = [one for rank in range(saved.world) if (one := saved.rank(rank)) is not None]
    if not found:
        return None, None, []
    is_open = any(not window["closing"] for window in found[0]["loop"]["windows"])
    if not is_open and found[0]["gradients"] is None:
        return found[0]["loop"], None, []
    if len(found) < saved.world:
        if saved.world == world:  # the others do not know yet that this rank has nothing: see _agree_on_windows
            return None, None, []
        return None, None, [_lost(saved.where, [rank for rank in range(saved.world) if saved.rank(rank) is None])]
    batch = saved.receipt.get("loaders") or [{}]
    now = present_receipt(saver.parts)["loaders"] or [{}]
    ratio = (batch[0].get("batch") or 1) / (now[0].get("batch") or 1) if batch[0].get("batch") and now[0].get("batch") else 1.0
    loop, gradients = redistribute(
        [(one["loop"], one["gradients"]) for one in found], saved_by=saved.world, world_size=world, batch_ratio=ratio
    )
    return loop, gradients, []


def _window(plan: _Plan, world: int) -> str:
    """What this rank has of the update that was under way, for the others to know."""
    if plan.saved.world != world:
        return ""
    if plan.own is None:
        return "nothing"
    return "a part" if plan.gradients is not None or any(not window["closing"] for window in plan.own["loop"]["windows"]) else ""


def _agree_on_windows(plan: _Plan, windows: list[str]) -> None:
    """An update that was under way goes on for all ranks or for none: else they would not send gradients at the same batch."""
    missing = [rank for rank, window in enumerate(windows) if window == "nothing"]
    if missing and "a part" in windows:
        plan.loop = plan.gradients = None
        plan.said.append(_lost(plan.saved.where, missing))


def _lost(where: str, ranks: list[int]) -> str:
    return (
        f"{where} was saved in the middle of an update, and gradients of rank {', '.join(map(str, ranks))} are not in it, because "
        "save_state was not called there: the batches of that update so far are lost. Call save_state on every process, or where "
        "accelerator.sync_gradients is True."
    )


def _meaning(saver: Saver, saved: Saved, wishes: Wishes) -> list[str]:
    """What means something else in this run than in the one that saved."""
    if not saved.receipt:
        return []
    found = changes(saved.receipt, present_receipt(saver.parts))
    if found and wishes.strict:
        raise CheckpointError(
            f"{saved.where} comes from a run that means something else:\n" + "\n".join(f"  {one}" for one in found)
            + "\nMake them agree, or leave out strict=True to go on with warnings."
        )
    return [f"{saved.where}: {one}" for one in found]


# -- putting it back --------------------------------------------------------------------------------------------------


def _apply(saver: Saver, plan: _Plan, wishes: Wishes) -> None:
    parts, saved = saver.parts, plan.saved
    models = [model.prepared for model in parts.stepper.models]
    everything = list(models)
    for hook in saver.load_hooks.values():
        hook(models, str(saved.folder))
    wanted = {id(model) for model in models}  # hooks take out what they loaded themselves
    numbers = [number for number, prepared in enumerate(everything) if id(prepared) in wanted]
    plan.said += [_without_weights(saver, saved, number, wishes) for number in numbers if number not in saved.models]
    for number, loader in enumerate(parts.registry.loaders):
        _load_loader(loader, number, plan, wishes)
    for number in numbers:
        if number in saved.models:
            _load_model(parts.stepper.models[number].original, saved.models[number], wishes)
    for stored, optimizer in zip(saved.optimizers or [], parts.registry.optimizers, strict=False):
        optimizer.load_state_dict(stored)
    for counted, optimizer in zip(saved.updates, parts.registry.optimizers, strict=False):
        optimizer.updates, optimizer.step_was_skipped = counted["updates"], counted["skipped"]
    for stored, scheduler in zip(saved.schedulers or [], parts.registry.schedulers, strict=False):
        scheduler.load_state_dict(stored)
    scaler = parts.precision.scaler
    if saved.scaler is not None and (bool(saved.scaler) == scaler.scales or not saved.receipt):  # else the receipt has said it already
        scaler.load_state_dict(saved.scaler)
    if plan.loop is not None:
        parts.stepper.restore(plan.loop)
        parts.stepper.set_gradients(plan.gradients)
    for number, stored in saved.objects.items():
        if number < len(saver.objects):
            saver.objects[number].load_state_dict(stored)
    saver.loaded(saved.where)
    plan.said += _random(parts.state.process_index, parts.state.num_processes, plan)


def _load_loader(loader: Any, number: int, plan: _Plan, wishes: Wishes) -> None:
    stored = plan.saved.loaders or []
    if number >= len(stored):
        return
    same = plan.own is not None and plan.saved.world == loader.place.world_size
    states = plan.own["loaders"] if same and plan.own is not None and "loaders" in plan.own else stored
    loader.load_state_dict(states[number], **({} if wishes.resume is None else {"resume": wishes.resume}))


def _without_weights(saver: Saver, saved: Saved, number: int, wishes: Wishes) -> str:
    """A model that has no weights in the checkpoint: an error, or with `strict=False` what is said."""
    kind = type(saver.parts.stepper.models[number].original).__name__
    text = f"{saved.where} has no weights of model {number} ({kind})"
    if wishes.strict is False:
        return f"{text}: it keeps those it has"
    raise CheckpointError(
        f"{text}: it was not prepared when that was saved, or a hook took them out. Prepare the same models in the same order, or register "
        "the hook that loads them and takes the model out of its list (register_load_state_pre_hook), or leave it as it is by strict=False"
    )


def _load_model(model: torch.nn.Module, stored: SavedModel, wishes: Wishes) -> None:
    load_into(model, stored.tensors, stored.aliases, stored.extra, strict=wishes.strict is not False)


def _random(rank: int, world: int, plan: _Plan) -> list[str]:
    saved = plan.saved
    if plan.own is not None and plan.own.get("random"):
        left_out = rng.restore(plan.own["random"])
        return [f"rank {rank}: there is no {kind} here for the random state in {saved.where}" for kind in left_out]
    seed = int.from_bytes(hashlib.blake2b(f"{saved.seed}/{saved.step}/{rank}".encode(), digest_size=7).digest(), "little")
    rng.set_seed(seed)
    if saved.world is not None and rank >= saved.world:
        why = f"it was saved by {saved.world} processes, and there are {world} now"
    else:
        why = "this rank did not call save_state, or did not come to the end of it"
    get_logger(__name__).warning(
        f"{saved.where} has no random state of rank {rank} ({why}): it was derived from the seed, so draws differ from a run that never "
        "stopped", main_process_only=False,
    )
    return []
