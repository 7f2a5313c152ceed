"""From what an Accelerator holds to a snapshot of it: who is asked for which state, and the receipt of the run."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.checkpoint.receipt import receipt
from slipstream.checkpoint.shares import Share, is_sharded, shares_held
from slipstream.checkpoint.snapshot import Facts, ModelPart, Part, PiecesPart, Snapshot, part_of, pieces_of
from slipstream.checkpoint.weights import split
from slipstream.devices import rng
from slipstream.errors import CheckpointError
from slipstream.facade.parts import Parts
from slipstream.step.prepared import PreparedModel

__all__ = ["numbered", "present_receipt", "stamp_of", "state_dicts", "step_of", "take"]

_POSITIONS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "eps"})
"""What of a scheduler's state says where it stands, rather than how it was made."""
_MEANS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""What of an optimizer's settings says how it computes, rather than what."""


def numbered(base: str, number: int) -> str:
    """The name of the nth of several: the first one has no number.

    >>> numbered("model", 0), numbered("model", 2)
    ('model', 'model_2')
    """
    return f"{base}_{number}" if number else base


def step_of(parts: Parts) -> int:
    """Updates made: those of the optimizer that made most."""
    return max((optimizer.updates for optimizer in parts.registry.optimizers), default=0)


def state_dicts(parts: Parts) -> list[dict[str, Any]]:
    """The weights of every model, under plain names."""
    return [parts.strategy.state(model.original) for model in parts.stepper.models]


def take(
    parts: Parts,
    history: str,
    objects: Sequence[Any],
    weights: Mapping[int, dict[str, Any]] | None,
    metric: float | None,
    pieces: list[PiecesPart] | None = None,
) -> Snapshot:
    """A snapshot: of everything on the process that writes, which passes the `weights` by number of the model; else of this rank alone.

    What this rank holds of tensors that are sharded is put into `pieces`; without it, sharded tensors are refused.
    """
    loop = parts.stepper.loop_state()  # first: it settles what the loss scaler's state depends on
    stamp = stamp_of(parts, history)
    state = parts.state
    facts = Facts(
        stamp=stamp,
        step=step_of(parts),
        world=state.num_processes,
        strategy=parts.strategy.name,
        mesh={"dp_replicate" if parts.strategy.replicated else "dp_shard": state.num_processes},
        metric=metric,
        receipt=present_receipt(parts) if weights is not None else {},
    )
    own = part_of(
        f"rank_{state.process_index}",
        {
            "rank": state.process_index,
            "stamp": stamp,
            "random": rng.capture(),
            "gradients": _gradients(parts),
            "loop": loop,
            "loaders": [loader.state_dict() for loader in parts.registry.loaders],
        },
        f"what belongs to rank {state.process_index}",
    )
    if weights is None:
        return Snapshot(facts, own)
    return Snapshot(
        facts,
        own,
        models=tuple(_model(parts.stepper.models[number], number, one, pieces) for number, one in weights.items()),
        optimizers=tuple(
            _part(numbered("optimizer", number), optimizer.state_dict(), f"the state of {type(optimizer.optimizer).__name__}", pieces)
            for number, optimizer in enumerate(parts.registry.optimizers)
        ),
        training=_training(parts),
        objects=tuple(
            _part(f"custom_checkpoint_{number}", one.state_dict(), f"registered object {number} ({type(one).__name__})", pieces)
            for number, one in enumerate(objects)
        ),
        pieces=tuple(pieces or ()),
    )


def _model(model: PreparedModel, number: int, state_dict: dict[str, Any], pieces: list[PiecesPart] | None) -> ModelPart:
    base, kind = numbered("model", number), type(model.original).__name__
    where = f"the weights of {kind}"
    held = {} if pieces is None else shares_held(state_dict, where)
    weights = split(_with_own(state_dict, held), where)
    frozen = frozenset(name for name, parameter in model.original.named_parameters() if not parameter.requires_grad)
    extra = part_of(f"{base}_extra", dict(weights.extra), f"the state of {kind}") if weights.extra else None
    if held and pieces is not None:
        pieces.append(pieces_of(base, held, {name: kept for name, kept in weights.aliases.items() if name in held}, frozen))
    whole = {name: tensor for name, tensor in weights.tensors.items() if name not in held}
    aliases = {name: kept for name, kept in weights.aliases.items() if name not in held}
    return ModelPart(number, base, kind, whole, aliases, extra, frozen, bool(held))


def _gradients(parts: Parts) -> dict[str, torch.Tensor] | None:
    """Gradients that belong to an update still to come."""
    gradients = parts.stepper.open_gradients()
    if any(map(is_sharded, (gradients or {}).values())):
        raise CheckpointError(
            "save_state was called in the middle of an update, whose gradients so far are sharded over ranks and cannot be saved: call it "
            "where accelerator.sync_gradients is True, after optimizer.zero_grad()"
        )
    return gradients


def _with_own(state_dict: dict[str, Any], held: Mapping[str, Share]) -> dict[str, Any]:
    """The state dict with this rank's own elements in the place of sharded tensors."""
    if not held:
        return state_dict
    own = copy.copy(state_dict)  # with its attributes: the versions of layers are one
    own.update({name: share.tensor for name, share in held.items()})
    return own


def _part(name: str, state: Any, where: str, pieces: list[PiecesPart] | None) -> Part:
    if pieces is None:
        return part_of(name, state, where)
    sharded: dict[str, Any] = {}
    part = part_of(name, state, where, sharded)
    if sharded:
        pieces.append(pieces_of(name, shares_held(sharded, where)))
    return part


def _training(parts: Parts) -> Part:
    registry = parts.registry
    state = {
        "step": step_of(parts),
        "optimizers": [{"updates": one.updates, "skipped": one.step_was_skipped} for one in registry.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in registry.schedulers],
        "scaler": parts.precision.scaler.state_dict(),
        "clipping": parts.clipper.state(),
        "loaders": [loader.state_dict() for loader in registry.loaders],
    }
    return part_of("training", state, "the state of the training loop")


def stamp_of(parts: Parts, history: str) -> str:
    """What all ranks of a save agree on without asking each other: which run it is, and how far."""
    positions = [[loader.state_dict()[name] for name in ("epoch", "batches")] for loader in parts.registry.loaders]
    updates = [optimizer.updates for optimizer in parts.registry.optimizers]
    text = json.dumps([parts.state.num_processes, positions, updates, len(parts.stepper.models)])
    return f"{step_of(parts)}-{history}{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


# -- the receipt ------------------------------------------------------------------------------------------------------


def present_receipt(parts: Parts) -> dict[str, Any]:
    """What decides the meaning of this run."""
    registry = parts.registry
    steps = parts.gradient_state.plugin.num_steps or 1
    batch = None
    if registry.loaders:
        first = registry.loaders[0]
        if first.batch_size is not None:  # else batches have sizes of their own, which are not known before they are read
            batch = first.total_batch_size * (first.steps_per_update or steps)
    return receipt(
        effective_batch=batch,
        accumulation=steps,
        precision=parts.state.mixed_precision,
        seed=torch.initial_seed() % 2**63,
        loaders=[getattr(loader, "describe", dict)() for loader in registry.loaders],
        optimizers=[
            {
                "kind": type(one.optimizer).__name__,
                "updates": one.updates,
                "lr": [_number(group.get("lr")) for group in one.param_groups],
                "settings": _plain(one.optimizer.defaults, _MEANS),
            }
            for one in registry.optimizers
        ],
        schedulers=[
            {
                "kind": type(one.scheduler).__name__,
                "position": _number(getattr(one.scheduler, "last_epoch", None)),
                "settings": _plain(one.scheduler.state_dict(), _POSITIONS),
            }
            for one in registry.schedulers
        ],
    )


def _plain(settings: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """How a schedule or an optimizer was made, as far as that is plain numbers."""
    found = {}
    for name, value in settings.items():
        if name.startswith("_") or name in left_out:
            continue
        values = [_number(one) for one in value] if isinstance(value, (list, tuple)) else _number(value)
        if values is not None and not (isinstance(values, list) and None in values):
            found[name] = values
    return found


def _number(value: Any) -> Any:
    """A number or text that JSON holds; None for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    return value if isinstance(value, (bool, int, str)) else None
