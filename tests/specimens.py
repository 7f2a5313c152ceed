"""Small real checkpoints, written by the library itself, for tests that look at them or break them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.capture import ModelPart, RunFacts, Snapshot, flatten_part
from slipstream.checkpoint.commit import LocalTarget, write_latest
from slipstream.checkpoint.manifest import Manifest
from slipstream.checkpoint.writer import LocalDestination, write_checkpoint
from slipstream.files.disk import Disk

RECEIPT = {
    "effective_batch": 8,
    "gradient_accumulation_steps": 2,
    "mixed_precision": "no",
    "seed": 7,
    "loaders": [{"dataset": "Rows", "length": 160, "batch": 4, "order": "0011"}],
    "optimizers": [{"kind": "AdamW"}],
    "schedulers": [{"kind": "StepLR", "settings": {"step_size": 5}}],
}


def stamp_of(step: int) -> str:
    return f"{step}-{step + 1:016x}"


def snapshot(step: int = 3, *, world: int = 2, rank: int = 0, metric: float | None = None, **changes: Any) -> Snapshot:
    """Everything that a small run would save at a step; the same numbers on every call."""
    made = torch.Generator().manual_seed(changes.get("seed", step))
    weight, bias = torch.randn(6, 4, generator=made), torch.randn(6, generator=made)
    tensors = {"embed.weight": weight, "small": bias.to(torch.bfloat16), **changes.get("tensors", {})}
    moments = {number: {"step": torch.tensor(float(step)), "exp_avg": entry * 0.1} for number, entry in enumerate((weight, bias))}
    optimizer = {"state": moments, "param_groups": [{"lr": changes.get("lr", 0.01), "betas": (0.9, 0.999), "params": [0, 1]}]}
    training = {
        "schedulers": [{"last_epoch": step}],
        "loaders": [{"samples": 4 * step}],
        "scaler": None,
        "optimizers": [{"updates": step, "skipped": False}],
    }
    own = {"rank": rank, "stamp": stamp_of(step), "random": {"torch": torch.arange(16, dtype=torch.uint8)}, "gradients": None}
    return Snapshot(
        facts=RunFacts(stamp_of(step), step, world, "ddp", {"dp_replicate": world}, metric, {**RECEIPT, **changes.get("receipt", {})}),
        own=flatten_part(f"rank_{rank}", own, "rank"),
        models=(
            ModelPart(
                0,
                "model",
                "Net",
                tensors,
                {"head.weight": "embed.weight"},
                flatten_part("model_extra", {"_extra_state": {"version": 2}}, "extra"),
            ),
        ),
        optimizers=(flatten_part("optimizer", optimizer, "optimizer"),),
        training=flatten_part("training", training, "training"),
        objects=(flatten_part("custom_checkpoint_0", {"seen": [1, 2, 3], "mean": torch.ones(2)}, "object"),),
    )


def save(folder: Path, step: int = 3, *, shard: int | None = None, late: bool = True, note: str | None = None, **changes: Any) -> Manifest:
    """Writes a checkpoint; with `late`, the second rank adds its own file afterwards, and with `note` a hook writes a file."""
    with LocalTarget(folder).begin() as stage:
        if note is not None:
            (stage.folder / "notes").mkdir()
            (stage.folder / "notes" / "note.txt").write_text(note)
        manifest = write_checkpoint(stage, snapshot(step, **changes), max_shard_size=shard)
    if late:
        LocalDestination(folder).add_rank_file(snapshot(step, **{**changes, "rank": 1}))
    return manifest


def numbered(folder: Path, *numbers: int, **changes: Any) -> None:
    """A folder of checkpoints, each with its number as the step."""
    for number in numbers:
        save(folder / f"checkpoint_{number}", number, **changes)
    write_latest(folder, f"checkpoint_{numbers[-1]}", Disk())
