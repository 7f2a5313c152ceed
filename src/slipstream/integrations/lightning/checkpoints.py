"""Lightning's checkpoints in Slipstream's format, and whole tensors for Lightning's own files.

A checkpoint of Lightning is a dict: weights, states of optimizers, and the rest (loops, callbacks, schedulers, hyperparameters). In our
format it is a folder as `save_state` writes it: weights as safetensors, optimizers, random states, all with checksums and committed as one;
the rest is the first registered object. Sharded weights are saved in shards. `read_folder` returns them with whole tensors, so that
Lightning loads them as it loads its own, on any number of processes. A `.ckpt` file gets whole tensors from `gather_whole`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.accelerator.accelerator import Accelerator
from slipstream.checkpoint.locate import open_checkpoint, read_saved_state
from slipstream.checkpoint.manifest import MANIFEST
from slipstream.checkpoint.sharded import TensorPlaceholders, is_sharded, reshard
from slipstream.checkpoint.weights import METADATA
from slipstream.devices.table import CPU
from slipstream.errors import CheckpointError, ConfigError

__all__ = [
    "FolderContent", "LightningState", "check_not_a_folder", "gather_whole", "is_folder_path", "is_slipstream_folder", "read_folder",
    "shard_optimizer_state", "write_folder",
]


def is_folder_path(path: str | os.PathLike[str], checkpoint_format: str) -> bool:
    """Return whether a checkpoint at this path is written as a folder in Slipstream's format.

    >>> is_folder_path("last.ckpt", "auto"), is_folder_path("checkpoints/last", "auto"), is_folder_path("last.ckpt", "slipstream")
    (False, True, True)
    """
    if checkpoint_format != "auto":
        return checkpoint_format == "slipstream"
    return not os.path.splitext(os.fspath(path))[1]


def check_not_a_folder(path: str | os.PathLike[str]) -> None:
    """Raise where a file of Lightning would replace a folder: it would be moved into it, under a random name."""
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder, and a checkpoint of Lightning is a file: remove the folder, or choose another name")


def is_slipstream_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint in our format at this path."""
    return os.path.exists(os.path.join(os.fspath(path), MANIFEST))


class LightningState:
    """What a checkpoint of Lightning has besides weights and optimizers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        """Return it, under a name by which it is recognised."""
        return {"lightning": dict(self.values)}

    def load_state_dict(self, state: Any) -> None:
        """Refuse: Lightning loads it."""
        raise ConfigError("load_state on a checkpoint of Lightning: pass it to trainer.fit(ckpt_path=...) or fabric.load(...)")


@dataclass(frozen=True)
class FolderContent:
    """What a checkpoint of Lightning is made of."""

    rest: Mapping[str, Any]
    """Everything but weights and optimizers."""
    weights: Mapping[int, Mapping[str, Any]]
    """Weights by the number of the model, in the order in which models were set up."""
    optimizers: Sequence[Any]
    """Optimizers to save, or states that were read."""
    random: Mapping[str, Any] | None = None
    """The random states of the rank that reads it, as they were when it was saved; None if it has none of that rank."""


def write_folder(accelerator: Accelerator, path: str | os.PathLike[str], content: FolderContent, step: int) -> None:
    """Save a checkpoint of Lightning as a folder; every process calls it. One that is there under that name is replaced."""
    if "://" in os.fspath(path):
        raise ConfigError(f"{path}: checkpoints of Lightning in Slipstream's format are saved to a disk; write a path, or end it in .ckpt")
    components, objects = accelerator._components, accelerator._saver.objects
    registry = components.registry
    kept, objects_before = registry.optimizers, list(objects)

    def take_weights(models: list[torch.nn.Module], found: list[dict[str, Any]], folder: str) -> None:
        saved = [(state, content.weights[number]) for number, state in enumerate(found) if number in content.weights]
        for state, weights in saved:  # as hooks of the script have left them
            state.clear()
            state.update(weights)
        found[:] = [state for state, _ in saved]

    handle = accelerator.register_save_state_pre_hook(take_weights)
    try:
        registry.optimizers = []
        for optimizer in content.optimizers:
            accelerator.prepare_optimizer(optimizer).updates = step
        objects[:] = [LightningState(content.rest)]
        if components.strategy.replicated:  # rank 0 writes: if it fails, the others hear of it here
            accelerator._saver.run_and_agree("save_checkpoint", lambda: str(accelerator.save_state(path)))
        else:
            accelerator.save_state(path)
    finally:
        handle.remove()
        registry.optimizers, objects[:] = kept, objects_before


def read_folder(path: str | os.PathLike[str], rank: int = 0) -> FolderContent:
    """Return what is in a folder, verified, with whole tensors in host memory, and the random states of a rank."""
    saved = read_saved_state(open_checkpoint(Path(path)), str(path))
    rest = saved.objects.get(0)
    if not isinstance(rest, Mapping) or not isinstance(rest.get("lightning"), Mapping):
        raise CheckpointError(
            f"{path} is a checkpoint of Slipstream, but not of a run of Lightning: it has no state of its loops. Read its weights with "
            "slipstream.load_checkpoint_in_model, or load it with an Accelerator."
        )
    weights = {}
    for number, model in saved.models.items():
        everything = {**model.tensors, **model.extra}
        everything |= {name: everything[kept] for name, kept in model.aliases.items() if kept in everything}
        everything.pop(METADATA, None)
        weights[number] = {name: reshard(value, None, saved.placeholders) for name, value in everything.items()}
    optimizers = [reshard(state, None, saved.placeholders) for state in saved.optimizers or ()]
    return FolderContent(rest["lightning"], weights, optimizers, (saved.rank(rank) or {}).get("random"))


def gather_whole(value: Any, *, keep: bool = True) -> Any:
    """Return a state with every sharded tensor whole, in host memory; all ranks have to call it, and need it only where `keep`."""
    if isinstance(value, torch.Tensor):
        if not is_sharded(value):
            return value
        whole: Any = value
        full = whole.full_tensor().detach()
        return full.to(CPU.type) if keep else None
    if isinstance(value, Mapping):
        pairs = [(key, gather_whole(item, keep=keep)) for key, item in value.items()]
        return dict(pairs) if any(new is not value[key] for key, new in pairs) else value
    if type(value) in (list, tuple):
        return type(value)(gather_whole(item, keep=keep) for item in value)
    return value


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with tensors sharded as the parameters are that they belong to; nothing is communicated."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    target = dict(zip(numbers, parameters, strict=False))
    entries = {number: reshard(entry, target.get(number), TensorPlaceholders()) for number, entry in state["state"].items()}
    return {**state, "state": entries}
