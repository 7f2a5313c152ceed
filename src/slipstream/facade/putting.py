"""A checkpoint put back into a run: wholly, or not at all.

What prepared objects themselves may still refuse (optimizers, schedulers, the loss scale) comes first, and each step can be taken back.
When every rank has done that, registered objects follow, which may refuse too. Then comes the rest, which was compared before and cannot
fail: loaders, weights, windows, gradients; random states last, so that what loading draws does not count. If a rank fails, every rank
goes back to where it was and raises. Only what hooks and other registered objects did before that stays done: they have no way back.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.checkpoint.saved import Saved
from slipstream.checkpoint.weights import load_into
from slipstream.comm.deal import tell
from slipstream.devices import rng
from slipstream.errors import CheckpointError, SlipstreamError
from slipstream.facade.saving import Saver
from slipstream.logging import get_logger

__all__ = ["Plan", "Undo", "Wishes", "as_ours", "check_random", "positions", "put_back"]

Undo = list[Callable[[], object]]


@dataclass(frozen=True)
class Wishes:
    """How a checkpoint is to be loaded."""

    strict: bool | None = None
    """True: what changed the meaning of the run is an error; False: weights that are missing or unknown are left out."""
    allow_pickle: bool = False
    resume: Any = None


@dataclass
class Plan:
    """What will be put back, once every rank has it."""

    saved: Saved
    own: Mapping[str, Any] | None
    """What belonged to this rank."""
    loop: Mapping[str, Any] | None
    gradients: Mapping[str, torch.Tensor] | None
    said: list[str] = field(default_factory=list)


def put_back(saver: Saver, plan: Plan, wishes: Wishes) -> None:
    """Puts everything back on every rank, or raises on every rank and leaves everything as it was."""
    state = saver.parts.state
    numbers: list[int] = []
    undo: Undo = []

    def first() -> None:
        numbers.extend(_hooked(saver, plan, wishes))
        _put_what_may_refuse(saver, plan, undo)

    def second() -> None:
        _put_objects(saver, plan)

    for stage in (first, second):
        outcome: Exception | None = None
        try:
            stage()
        except Exception as error:  # every rank has to hear of it, and raises
            outcome = as_ours(error, plan.saved.where)
        try:
            tell(state.channel(), state.limits, outcome, operation="load_state")
        except BaseException:
            for step in reversed(undo):
                step()
            raise
    _put_the_rest(saver, plan, wishes, numbers)
    saver.loaded(plan.saved.where)
    plan.said += _random(state.process_index, state.num_processes, plan)


def as_ours(error: Exception, where: str) -> SlipstreamError:
    """An error of whatever kind that came of reading a state, as one that names the checkpoint."""
    if isinstance(error, CheckpointError):
        return error
    kind = "" if isinstance(error, SlipstreamError) else f"{type(error).__name__}: "
    ours = CheckpointError(f"{where} cannot be loaded: {kind}{str(error)[:1000]}")
    ours.__cause__ = error
    return ours


def check_random(state: Any, where: str) -> None:
    """An error if these random states cannot be restored; none are changed."""
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


def positions(loaders: Iterable[Any], saved: Saved, own: Mapping[str, Any] | None) -> Iterator[tuple[Any, Any]]:
    """Loaders, each with the state that it will be given, as far as there are some."""
    for number, (loader, state) in enumerate(zip(loaders, saved.loaders or [], strict=False)):
        same = own is not None and saved.world == loader.place.world_size
        yield loader, own["loaders"][number] if same and own is not None and "loaders" in own else state


# -- what can be taken back -------------------------------------------------------------------------------------------


def _put_what_may_refuse(saver: Saver, plan: Plan, undo: Undo) -> None:
    registry, saved = saver.parts.registry, plan.saved
    for number, (stored, optimizer) in enumerate(zip(saved.optimizers or [], registry.optimizers, strict=False)):
        with _refusing(saved.where, f"optimizer {number}", optimizer.optimizer):
            undo.append(_as_it_was(optimizer.optimizer))
            optimizer.load_state_dict(stored)
    for counted, optimizer in zip(saved.updates, registry.optimizers, strict=False):
        undo.append(_counts_as_they_were(optimizer))
        optimizer.updates, optimizer.step_was_skipped = counted["updates"], bool(counted["skipped"])
    for number, (stored, scheduler) in enumerate(zip(saved.schedulers or [], registry.schedulers, strict=False)):
        with _refusing(saved.where, f"scheduler {number}", scheduler.scheduler):
            undo.append(_state_as_it_was(scheduler))
            scheduler.load_state_dict(stored)
    scaler = saver.parts.precision.scaler
    if saved.scaler is not None and (bool(saved.scaler) == scaler.scales or not saved.receipt):  # else the receipt has said it already
        with _refusing(saved.where, "the loss scale", scaler):
            undo.append(_state_as_it_was(scaler))
            scaler.load_state_dict(saved.scaler)


def _put_objects(saver: Saver, plan: Plan) -> None:
    for number, stored in plan.saved.objects.items():
        if number < len(saver.objects):
            with _refusing(plan.saved.where, f"registered object {number}", saver.objects[number]):
                saver.objects[number].load_state_dict(stored)


@contextmanager
def _refusing(where: str, what: str, one: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{where} cannot be loaded: {what} ({type(one).__name__}) does not take its state ({type(error).__name__}: {str(error)[:300]})"
        ) from error


def _as_it_was(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Loading gives an optimizer a new state and new groups; the old ones are kept, without a copy."""
    attributes, groups = dict(vars(optimizer)), [(group, dict(group)) for group in optimizer.param_groups]

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, entries in groups:
            group.clear()
            group.update(entries)

    return undo


def _counts_as_they_were(optimizer: Any) -> Callable[[], object]:
    updates, skipped = optimizer.updates, optimizer.step_was_skipped

    def undo() -> None:
        optimizer.updates, optimizer.step_was_skipped = updates, skipped

    return undo


def _state_as_it_was(one: Any) -> Callable[[], object]:
    kept = copy.deepcopy(one.state_dict())
    return lambda: one.load_state_dict(kept)


# -- what cannot fail any more ----------------------------------------------------------------------------------------


def _put_the_rest(saver: Saver, plan: Plan, wishes: Wishes, numbers: list[int]) -> None:
    parts, saved = saver.parts, plan.saved
    for loader, state in positions(parts.registry.loaders, saved, plan.own):
        loader.load_state_dict(state, **({} if wishes.resume is None else {"resume": wishes.resume}))
    for number in numbers:
        if (stored := saved.models.get(number)) is not None:
            original = parts.stepper.models[number].original
            load_into(original, stored.tensors, stored.aliases, stored.extra, strict=wishes.strict is not False)
    if plan.loop is not None:
        parts.stepper.restore(plan.loop)
        if saved.clipping is not None:
            parts.clipper.restore(saved.clipping)
        parts.stepper.set_gradients(plan.gradients)


def _hooked(saver: Saver, plan: Plan, wishes: Wishes) -> list[int]:
    """Runs the hooks of the script, and gives the numbers of the models that they leave to us."""
    models = [model.prepared for model in saver.parts.stepper.models]
    everything = list(models)
    for hook in saver.load_hooks.values():
        hook(models, str(plan.saved.folder))
    wanted = {id(model) for model in models}  # hooks take out what they loaded themselves
    numbers = [number for number, prepared in enumerate(everything) if id(prepared) in wanted]
    plan.said += [_without_weights(saver, plan.saved, number, wishes) for number in numbers if number not in plan.saved.models]
    return numbers


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


def _random(rank: int, world: int, plan: Plan) -> list[str]:
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
        "stopped",
        main_process_only=False,
    )
    return []
