"""What was saved, whoever wrote it: one record for checkpoints of ours and of relatives, taken apart and ready to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.load import Checkpoint
from slipstream.errors import CheckpointError

__all__ = ["Saved", "SavedModel", "saved_of"]


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
    objects: Sequence[Any] | None
    scaler: Any = None
    updates: Sequence[Mapping[str, Any]] = ()
    world: int | None = None
    """Processes of the run that saved, if that is known."""
    seed: int = 0
    receipt: Mapping[str, Any] = field(default_factory=dict)
    rank: Callable[[int], dict[str, Any] | None] = lambda rank: None
    """What belongs to a rank, if it is there."""
    said: Sequence[str] = ()
    """What could not be taken over, in words."""
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
        objects=[checkpoint.part(name) for name in manifest.objects],
        scaler=training.get("scaler"),
        updates=_listed(training, "optimizers", where),
        world=manifest.world,
        seed=seed if isinstance(seed, int) else 0,
        receipt=manifest.receipt,
        rank=rank_state,
    )


def _listed(training: Any, name: str, where: str) -> list[Any]:
    value = training.get(name) if isinstance(training, dict) else None
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: the state of the training loop has no list of {name}")
    return value
