"""Loading for an Accelerator: what a checkpoint holds is compared with what is prepared, agreed on by all ranks, and put back.

Everything is read, verified and compared before anything changes, on every rank; one that cannot load makes all of them raise.
`putting.py` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.checkpoint.assembling import BrokenPieces
from slipstream.checkpoint.receipt import changes
from slipstream.checkpoint.saved import Saved
from slipstream.checkpoint.weights import check_fit
from slipstream.comm.deal import tell
from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.facade.finding import find, is_one_of_several
from slipstream.facade.fitting import fitted
from slipstream.facade.putting import Plan, Wishes, as_ours, check_random, positions, put_back
from slipstream.facade.saving import Saver
from slipstream.facade.taking import present_receipt
from slipstream.logging import get_logger
from slipstream.step.loop_state import redistribute

__all__ = ["Wishes", "restore"]

_LIKE_THEIR_PARAMETER = (
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev", "square_avg", "sum",
)  # fmt: skip
"""What the optimizers of torch keep in the shape of each parameter."""
_BROKEN = "broken"
"""What a rank tells instead of a stamp if it cannot use the pieces that it needs."""


def restore(saver: Saver, input_dir: Any, wishes: Wishes) -> str:
    """Loads a checkpoint into everything that is prepared; the path of what was loaded."""
    _settle(saver)
    plan = _agreed_plan(saver, input_dir, wishes)
    put_back(saver, plan, wishes)
    for line in plan.said:
        get_logger(__name__).warning(line)
    get_logger(__name__).info(f"loaded {plan.saved.where} (step {plan.saved.step})")
    return plan.saved.where


def _agreed_plan(saver: Saver, input_dir: Any, wishes: Wishes) -> Plan:
    """What is put back, once all ranks have found the same. The newest is passed over by all if one of them cannot use its pieces."""
    state = saver.parts.state
    passed: dict[str, str] = {}
    while True:
        plan: Plan | None = None
        outcome: Any
        try:
            plan = _plan(saver, find(saver, input_dir, wishes.allow_pickle, passed), wishes)
            outcome = (plan.saved.stamp, plan.saved.step, _window(plan, state.num_processes))
        except BrokenPieces as error:
            again = error.folder not in passed and is_one_of_several(saver, input_dir, error.folder)
            outcome = (_BROKEN, error.folder, str(error)) if again else error
        except SlipstreamError as error:  # every rank has to hear of it, and raises
            outcome = error
        except Exception as error:
            outcome = as_ours(error, str(input_dir))
        told = tell(state.channel(), state.limits, outcome, operation="load_state")
        broken = {folder: why for kind, folder, why in told if kind == _BROKEN}
        if not broken:
            break
        passed |= broken
    assert plan is not None
    if len({(stamp, step) for stamp, step, _ in told}) > 1:
        found = ", ".join(f"rank {rank}: step {step} ({stamp})" for rank, (stamp, step, _) in enumerate(told))
        raise CheckpointError(f"the processes found different checkpoints at {plan.saved.where} ({found}): they do not see the same folder")
    _agree_on_windows(plan, [window for _, _, window in told])
    return plan


def _settle(saver: Saver) -> None:
    """Returns when every rank has come and none is still saving: what they look at is the same then."""
    outcome: Exception | None = None
    try:
        saver.settle()
    except Exception as error:  # every rank has to hear of it, and raises
        outcome = error
    tell(saver.parts.state.channel(), saver.parts.state.limits, outcome, operation="load_state")


# -- before anything changes ------------------------------------------------------------------------------------------


def _plan(saver: Saver, saved: Saved, wishes: Wishes) -> Plan:
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
    try:
        if loop is not None:
            parts.stepper.check(loop, gradients)
            if saved.clipping is not None:
                parts.clipper.check(saved.clipping)
        for loader, position in positions(registry.loaders, saved, own):
            loader.check_state_dict(position)
    except ConfigError as error:
        raise as_ours(error, saved.where) from error
    check_random((own or {}).get("random"), saved.where)
    said += notes + _meaning(saver, saved, wishes)
    return Plan(saved, own, loop, gradients, said)


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
        for name in _LIKE_THEIR_PARAMETER:
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
    ratio = _batches_now(saver, saved, world)
    loop, gradients = redistribute(
        [(one["loop"], one["gradients"]) for one in found], saved_by=saved.world, world_size=world, batch_ratio=ratio
    )
    return loop, gradients, []


def _window(plan: Plan, world: int) -> str:
    """What this rank has of the update that was under way, for the others to know."""
    if plan.saved.world != world:
        return ""
    if plan.own is None:
        return "nothing"
    return "a part" if plan.gradients is not None or any(not window["closing"] for window in plan.own["loop"]["windows"]) else ""


def _agree_on_windows(plan: Plan, windows: list[str]) -> None:
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


def _batches_now(saver: Saver, saved: Saved, world: int) -> float:
    """How many batches of all ranks, as they are now, one of the saved run is."""
    loaders = saver.parts.registry.loaders
    before = (saved.receipt.get("loaders") or [{}])[0].get("batch")
    if loaders and before and loaders[0].batch_size is not None:
        return float(before) / loaders[0].total_batch_size
    return (saved.world or world) / world  # batches have sizes of their own, which are not known before they are read


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
