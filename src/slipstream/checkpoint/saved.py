"""What was saved, whoever wrote it: one record for checkpoints of ours and of relatives, taken apart and ready to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.assembling import StandIns
from slipstream.checkpoint.load import Checkpoint
from slipstream.checkpoint.migrate import Foreign
from slipstream.errors import CheckpointError

__all__ = ["Saved", "SavedModel", "saved_of", "saved_of_foreign"]


@dataclass(frozen=True)
class SavedModel:
    """The weights of one model."""

    kind: str
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """The parts of a checkpoint; None where it does not know of such a thing at all."""

    where: str
    folder: Path
    stamp: str
    step: int
    models: Mapping[int, SavedModel]
    optimizers: Sequence[Any] | None
    schedulers: Sequence[Any] | None
    loaders: Sequence[Any] | None
    objects: Mapping[int, Any]
    """Registered objects, by number."""
    objects_missing: frozenset[int] = frozenset()
    """Numbers of objects that are there and cannot be read, as was said."""
    scaler: Any = None
    clipping: Any = None
    """The norms of gradients at the last updates."""
    updates: Sequence[Mapping[str, Any]] = ()
    world: int | None = None
    """Processes of the run that saved, if that is known."""
    seed: int = 0
    receipt: Mapping[str, Any] = field(default_factory=dict)
    rank: Callable[[int], dict[str, Any] | None] = lambda rank: None
    """What belongs to a rank, if it is there."""
    said: Sequence[str] = ()
    """What could not be taken over, in words."""
    stand_ins: StandIns = field(default_factory=StandIns)
    """What stands in `models`, `optimizers` and `objects` for tensors that are in pieces."""
    holder: Any = None
    """What keeps the folder there, where it is a copy."""


def saved_of(checkpoint: Checkpoint, where: str) -> Saved:
    """The parts of a verified checkpoint of ours."""
    manifest = checkpoint.manifest
    if manifest.training is None:
        raise CheckpointError(f"{where} has no state of a training loop")
    training = checkpoint.part(manifest.training)
    models = {
        entry.number: SavedModel(entry.kind, checkpoint.weights(place), entry.aliases, checkpoint.extra(place))
        for place, entry in enumerate(manifest.models)
    }
    for place, entry in enumerate(manifest.models):
        checkpoint.check_aliases(place, models[entry.number].tensors)
    seed = manifest.receipt.get("seed")
    ranks: dict[int, dict[str, Any] | None] = {}

    def rank_state(rank: int) -> dict[str, Any] | None:
        if rank not in ranks:
            ranks[rank] = checkpoint.rank(rank)
        return ranks[rank]

    return Saved(
        where=where,
        folder=checkpoint.folder,
        stamp=manifest.stamp,
        step=manifest.step,
        models=models,
        optimizers=[checkpoint.part(name) for name in manifest.optimizers],
        schedulers=_listed(training, "schedulers", where),
        loaders=_listed(training, "loaders", where),
        objects={number: checkpoint.part(name) for number, name in enumerate(manifest.objects)},
        scaler=training.get("scaler"),
        clipping=training.get("clipping"),
        updates=_listed(training, "optimizers", where),
        world=manifest.world,
        seed=seed if isinstance(seed, int) else 0,
        receipt=manifest.receipt,
        rank=rank_state,
        stand_ins=checkpoint.stand_ins,
    )


def saved_of_foreign(foreign: Foreign, folder: Path) -> Saved:
    """The parts of a checkpoint of the relative; what has no counterpart here is said."""
    said = list(foreign.said)
    if foreign.samplers or foreign.loaders:
        said.append(
            f"{folder} was written by another library, whose order of data is another one: loaders begin at their start. Call "
            "skip_first_batches(loader, n) to leave out as many batches as were read; other samples are in them."
        )
    if foreign.schedulers and foreign.world > 1:
        said.append(
            f"{folder} was saved by {foreign.world} processes of a library that moves schedulers {foreign.world} times per update: the "
            "schedule goes on from where it is. Pass Accelerator(scheduler_steps_per_process=True) to go on moving it so."
        )
    return Saved(
        where=str(folder),
        folder=folder,
        stamp="foreign",
        step=max((_updates(state) for state in foreign.optimizers), default=0),
        models={number: _foreign_model(state) for number, state in enumerate(foreign.models)},
        optimizers=foreign.optimizers,
        schedulers=foreign.schedulers,
        loaders=None,
        objects=foreign.objects,
        objects_missing=frozenset(foreign.unread),
        scaler=foreign.scaler,
        updates=[{"updates": _updates(state), "skipped": False} for state in foreign.optimizers],
        rank=lambda rank: {"random": foreign.ranks[rank]} if rank in foreign.ranks else None,
        said=said,
    )


def _foreign_model(state: Mapping[str, Any]) -> SavedModel:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return SavedModel("model", tensors, {}, {name: value for name, value in state.items() if name not in tensors})


def _updates(optimizer: Mapping[str, Any]) -> int:
    """How many updates an optimizer has made, as far as it counts them."""
    steps = [entries.get("step") for entries in optimizer.get("state", {}).values() if isinstance(entries, Mapping)]
    return max((int(step) for step in steps if isinstance(step, (int, float, torch.Tensor))), default=0)


def _listed(training: Any, name: str, where: str) -> list[Any]:
    value = training.get(name) if isinstance(training, dict) else None
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: the state of the training loop has no list of {name}")
    return value
