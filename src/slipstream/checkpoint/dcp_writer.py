"""Export a checkpoint of ours as a folder of torch.distributed.checkpoint (DCP), for tools that read those.

`torch.distributed.checkpoint.load` and `dcp_to_torch_save` read the result: weights under `model`, states of optimizers under `optimizer`,
with names of parameters as torch's own functions give them. Torch's writer writes it, so its table of contents is a pickle: this is done
only where a user asks for it by name. Files of the checkpoint are verified first, then mapped: shards are written as they are stored, and
no tensor is assembled in memory. The folder appears under its name when it is complete.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from slipstream.checkpoint.capture import numbered_name
from slipstream.checkpoint.deserialize import rebuild
from slipstream.checkpoint.inspect import (
    CheckpointSummary,
    LazyTensorFile,
    StoredTensor,
    find_problems,
    find_single_checkpoint,
    open_readable,
    read_model_tensors,
    read_state_part,
)
from slipstream.checkpoint.optimizer_names import name_parameters
from slipstream.checkpoint.tensor_bytes import TORCH_DTYPES, from_buffer
from slipstream.checkpoint.weights import METADATA
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import check_local_path
from slipstream.files.paths import open_inside
from slipstream.files.safetensors_layout import TensorEntry
from slipstream.logging import get_logger

__all__ = ["export_dcp"]


def export_dcp(checkpoint: str | os.PathLike[str], output: str | os.PathLike[str]) -> Path:
    """Write models and optimizers of a checkpoint of `save_state` as a folder of torch.distributed.checkpoint, and return its path.

    `output` is a new or empty folder. Its file `.metadata` is a pickle, as torch reads it.
    """
    target = check_local_path(output, "output").absolute()
    if target.exists() and (not target.is_dir() or os.listdir(target)):
        raise ConfigError(f"output={str(target)!r} is there already, and not an empty folder. Write the path of a new one.")
    with open_readable(find_single_checkpoint(os.fspath(checkpoint))) as found:
        if problems := list(find_problems(found, lambda count: None)):
            raise CheckpointError(f"{found.folder} was not exported, because it is not whole: {problems[0]}")
        source = _Source(found)
        state = source.state()
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = target.parent / f".{target.name}.{secrets.token_hex(4)}"
        stage.mkdir()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is")  # one process writes, whatever else there is
                save(state, storage_writer=FileSystemWriter(stage), planner=_ShardPlanner(source.shards), no_dist=True)
            stage.rename(target)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
    return target


@dataclass(frozen=True)
class _Source:
    """A verified checkpoint. Tensors in one piece are views of its mapped files; those in shards are placeholders on the meta device."""

    checkpoint: CheckpointSummary
    shards: dict[int, list[tuple[tuple[int, ...], torch.Tensor]]] = field(default_factory=dict)
    """By the id of the placeholder: where each shard begins, and the shard."""
    _placeholders: list[torch.Tensor] = field(default_factory=list)
    _mapped: dict[Path, mmap.mmap] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return models and optimizers, as DCP nests them."""
        manifest, folder = self.checkpoint.manifest, self.checkpoint.folder
        assert manifest is not None
        state: dict[str, Any] = {}
        for model in manifest.models:
            weights = self._tensors(read_model_tensors(folder, model))
            weights |= {other: weights[kept] for other, kept in model.aliases.items()}
            extra = {} if model.extra is None else self._part(model.extra)
            state[numbered_name("model", model.number)] = {**weights, **{name: value for name, value in extra.items() if name != METADATA}}
        names = self._parameter_names() if manifest.training is not None else []
        for number, file in enumerate(manifest.optimizers):
            known = names[number] if number < len(names) else None
            state[numbered_name("optimizer", number)] = self._optimizer(file, known)
        return state

    def _parameter_names(self) -> list[Any]:
        """Return the names of the parameters of each optimizer, where the checkpoint has them."""
        assert self.checkpoint.manifest is not None
        training = self._part(str(self.checkpoint.manifest.training))
        counted = training.get("optimizers") if isinstance(training, dict) else None
        return [entry.get("parameters") if isinstance(entry, dict) else None for entry in counted or []]

    def _optimizer(self, file: str, names: Any) -> dict[str, Any]:
        state = self._part(file)
        count = sum(len(group["params"]) for group in state["param_groups"])
        if not isinstance(names, list) or len({name for name in names if isinstance(name, str)}) != count or len(names) != count:
            get_logger(__name__).warning(
                f"{self.checkpoint.folder / file} does not know the names of its parameters (it was saved by an earlier version, or two "
                "are called alike): the exported state goes by their numbers."
            )
            names = [str(number) for number in range(count)]
        return name_parameters(state, names)

    def _part(self, name: str) -> Any:
        assert self.checkpoint.manifest is not None
        tree, stored = read_state_part(self.checkpoint.folder, name, self.checkpoint.manifest.shards.get(name, ()))
        return rebuild(tree, self._tensors(stored), str(self.checkpoint.folder / name))

    def _tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        return {name: self._tensor(tensor) for name, tensor in stored.items()}

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        if len(stored.held) == 1:
            file, entry, _ = stored.held[0]
            return self._view(file, entry)
        placeholder = torch.empty(stored.entry.shape, dtype=TORCH_DTYPES[stored.entry.dtype], device="meta")
        self._placeholders.append(placeholder)  # so that no other object gets its id
        held = [(position.box.offset, self._view(file, entry)) for file, entry, position in stored.held if position.box.volume]
        self.shards[id(placeholder)] = held
        return placeholder

    def _view(self, file: LazyTensorFile, entry: TensorEntry) -> torch.Tensor:
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="cpu")
        if file.path not in self._mapped:
            fd = open_inside(file.path.parent, file.path.name)
            try:
                self._mapped[file.path] = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(fd)
        start = file.layout.data_start
        return from_buffer(self._mapped[file.path], entry.dtype, entry.shape, start + entry.start, start + entry.end)


class _ShardPlanner(DefaultSavePlanner):
    """Torch's planner, for tensors of which all shards are at hand."""

    def __init__(self, shards: Mapping[int, Sequence[tuple[tuple[int, ...], torch.Tensor]]]) -> None:
        super().__init__()
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        """Return what is written: of a placeholder, its shards."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._split(item)])
        return self.plan

    def _split(self, item: WriteItem) -> list[WriteItem]:
        shards = self._shards.get(id(self.state_dict[item.index.fqn]))
        if shards is None or item.tensor_data is None:
            return [item]
        return [
            WriteItem(
                index=MetadataIndex(item.index.fqn, offset, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), tensor.size()),
                    properties=item.tensor_data.properties,
                    size=item.tensor_data.size,
                ),
            )
            for place, (offset, tensor) in enumerate(shards)
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is to be written under an index."""
        shards = self._shards.get(id(self.state_dict[index.fqn]))
        if shards is None:
            return super().lookup_object(index)
        return next(tensor for offset, tensor in shards if torch.Size(offset) == index.offset)
