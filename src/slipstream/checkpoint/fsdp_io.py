"""Model and optimizer of a sharded run in files of their own: `save_fsdp_model`, `load_fsdp_model`, ... and `merge_fsdp_weights`.

The names are those of Accelerate; the files are safetensors and JSON. With `SHARDED_STATE_DICT` each rank writes the shards that it holds
into `pytorch_model_fsdp_0/` or `optimizer_0/`, in files that torch's `HuggingFaceStorageReader` reads too; with `FULL_STATE_DICT` the main
process writes `pytorch_model_fsdp.safetensors` or `optimizer.safetensors`. Loading takes what it finds: these files, or folders of
torch.distributed.checkpoint and files of torch.save that Accelerate wrote, read as data. All processes have to call these functions; an
error on one is raised on all, before anything of the run changes. `save_state` saves more, and commits it as a whole.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.accelerate_import import explain_bad_optimizer
from slipstream.checkpoint.capture import numbered_name
from slipstream.checkpoint.dcp_metadata import DCP_METADATA, SAVE_KEY, STATE_SHARD_FILE, is_dcp_folder
from slipstream.checkpoint.dcp_reader import open_dcp, read_shard_state
from slipstream.checkpoint.deserialize import read_part
from slipstream.checkpoint.locate import SavedModel
from slipstream.checkpoint.manifest import FSDP_MODEL_NAME, OPTIMIZER_NAME
from slipstream.checkpoint.model_io import merge_weights
from slipstream.checkpoint.optimizer_names import goes_by_names, name_parameters, number_parameters, parameter_names
from slipstream.checkpoint.restore import reshard_model, reshard_optimizer
from slipstream.checkpoint.serialize import encode_tree, flatten, write_part
from slipstream.checkpoint.shard_layout import ShardPosition, describe_positions, whole_box
from slipstream.checkpoint.sharded import TensorPlaceholders, is_sharded, local_shards, reshard
from slipstream.checkpoint.tensor_bytes import encode_tensors
from slipstream.checkpoint.weight_source import find_weights, read_torch_file
from slipstream.checkpoint.weights import METADATA, LoadReport, load_into, split_state_dict
from slipstream.distributed.scatter import agree_or_raise
from slipstream.distributed.state import PartialState
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import AtomicFiles, check_local_path
from slipstream.files.disk import Disk
from slipstream.files.paths import ConfinedFolder

__all__ = ["load_fsdp_model", "load_fsdp_optimizer", "merge_fsdp_weights", "save_fsdp_model", "save_fsdp_optimizer"]


_OURS: Final = re.compile(rf"{STATE_SHARD_FILE.pattern}|(model_extra|optimizer)\.(json|safetensors)", re.ASCII)
"""Names of files that a save here replaces."""
_LARGEST_FILE: Final = 1 << 50


@dataclass(frozen=True)
class _LocalPart:
    """What this rank writes."""

    tensors: Mapping[str, tuple[torch.Tensor, ShardPosition]]
    aliases: Mapping[str, str]
    """Names of tied weights, and the name under which each is stored."""
    write_rest: Callable[[AtomicFiles], list[str]]
    """Writes what all ranks share, and returns the names of the files."""


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights in a folder of shards as one file, on the main process; the others wait for it.

    `checkpoint_dir` is a folder such as `pytorch_model_fsdp_0`, or a checkpoint around it, written by Accelerate, torch or Slipstream. The
    file is `model.safetensors` in `output_path`, or `pytorch_model.bin`. `remove_checkpoint_dir` removes the files that were merged.
    """
    state = PartialState()
    failure: Exception | None = None
    if state.is_main_process:
        try:
            merge_weights(checkpoint_dir, output_path, remove=remove_checkpoint_dir, safe_serialization=safe_serialization)
        except Exception as error:  # `agree_or_raise` raises it on every rank
            failure = error
    agree_or_raise(state._channel(), state._limits, failure, operation="merge_fsdp_weights")


# -- models -----------------------------------------------------------------------------------------------------------


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a model, sharded or full as `fsdp_plugin.state_dict_type` says.

    `adapter_only` writes the adapter of a PEFT model. `use_dcp` makes no difference: no process waits for another's tensors either way.
    """
    folder = check_local_path(output_dir, "output_dir")
    original = accelerator.unwrap_model(model, keep_torch_compile=False)
    if _is_full(fsdp_plugin):
        weights = _chosen(original, accelerator.get_state_dict(model), adapter_only=adapter_only)
        write = partial(_write_full_model, folder, model_index, weights)
        _agree(accelerator, "save_fsdp_model", lambda: write() if accelerator.is_main_process else None)
        return

    def capture() -> _LocalPart:
        state = _chosen(original, accelerator._components.strategy.state(original), adapter_only=adapter_only)
        return _capture_model(state, f"the weights of {type(original).__name__}", is_main=accelerator.is_main_process)

    _write_shards(accelerator, "save_fsdp_model", folder / f"{FSDP_MODEL_NAME}_{model_index}", "model", capture)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> LoadReport:
    """Load the weights of a model from what is in a folder, in whichever of the forms; each process reads its own part."""
    folder = check_local_path(input_dir, "input_dir")
    original = accelerator.unwrap_model(model, keep_torch_compile=False)
    read: list[SavedModel] = []

    def prepare() -> None:
        path = _find(folder, FSDP_MODEL_NAME, model_index, (".safetensors", ".bin"))
        placeholders, source = TensorPlaceholders(), find_weights(path)
        tensors: dict[str, torch.Tensor] = {}
        aliases = dict(source.aliases)
        for file in source.each():
            tensors |= file.tensors if file.forms is None else placeholders.add(file.tensors)  # type: ignore[arg-type]
            aliases |= file.aliases
        saved = SavedModel(tensors, aliases, source.read_extra())
        if adapter_only:
            targets = _chosen(original, original.state_dict(), adapter_only=True)
            if absent := [name for name in targets if name not in tensors]:
                raise CheckpointError(f"{path} has no weights of the adapter's {absent[0]!r}")
            read.append(SavedModel({name: reshard(tensors[name], target, placeholders) for name, target in targets.items()}))
        else:
            read.append(reshard_model(original, saved, placeholders, strict=True))

    _agree(accelerator, "load_fsdp_model", prepare)
    if adapter_only:
        _peft().set_peft_model_state_dict(original, dict(read[0].tensors), adapter_name=original.active_adapter)
        return LoadReport((), (), {}, {})
    return load_into(original, read[0].tensors, read[0].aliases, read[0].extra)


def _capture_model(state: Mapping[str, Any], where: str, *, is_main: bool) -> _LocalPart:
    """Return the shards that this rank stores; the main process stores what is not sharded as well."""
    shards = local_shards(state, where)
    local = split_state_dict({**state, **{name: shard.tensor for name, shard in shards.items()}}, where)
    owned = {name: shard for name, shard in shards.items() if shard.owned and name not in local.aliases}
    tensors = {name: (shard.tensor, shard.position) for name, shard in owned.items()}
    whole = {name: tensor for name, tensor in local.tensors.items() if name not in shards and is_main}
    tensors |= {name: (tensor, ShardPosition(tuple(tensor.shape), whole_box(tensor.shape))) for name, tensor in whole.items()}
    extra = {name: value for name, value in local.extra.items() if name != METADATA}

    def write_rest(files: AtomicFiles) -> list[str]:
        return [write_part(files.add, "model_extra", extra, where)[0]] if extra else []

    return _LocalPart(tensors, local.aliases, write_rest)


def _chosen(model: Any, state: Mapping[str, Any], *, adapter_only: bool) -> dict[str, Any]:
    """Return a state dict, or the entries of it that belong to the adapter of a PEFT model."""
    if not adapter_only:
        return dict(state)
    if not hasattr(model, "peft_config"):
        raise ConfigError(f"adapter_only=True: {type(model).__name__} is no PEFT model, so it has no adapter. Leave it out.")
    return dict(_peft().get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=model.active_adapter))


def _peft() -> Any:
    """Return the library that made the model."""
    return importlib.import_module("peft")


def _write_full_model(folder: Path, index: int, state: Mapping[str, Any]) -> None:
    name = numbered_name(FSDP_MODEL_NAME, index)
    weights = split_state_dict(state, "the weights")
    extra = {key: value for key, value in weights.extra.items() if key != METADATA}
    with AtomicFiles(folder, Disk()) as files:
        files.add(f"{name}.safetensors", *encode_tensors(weights.tensors, weights.aliases))
        if extra:
            write_part(files.add, f"{name}_extra", extra, "the state dict")
        files.place()


# -- optimizers -------------------------------------------------------------------------------------------------------


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of an optimizer by the names of its parameters, sharded or full as `fsdp_plugin.state_dict_type` says."""
    folder = check_local_path(output_dir, "output_dir")
    where = f"the state of {type(getattr(optimizer, 'optimizer', optimizer)).__name__}"
    if _is_full(fsdp_plugin):
        whole = _gathered(name_parameters(optimizer.state_dict(), _names_of(accelerator, model, optimizer)))

        def write() -> None:
            with AtomicFiles(folder, Disk()) as files:
                write_part(files.add, numbered_name(OPTIMIZER_NAME, optimizer_index), whole, where)
                files.place()

        _agree(accelerator, "save_fsdp_optimizer", lambda: write() if accelerator.is_main_process else None)
        return

    def capture() -> _LocalPart:
        sharded: dict[str, Any] = {}
        state = name_parameters(optimizer.state_dict(), _names_of(accelerator, model, optimizer))
        tree, tensors = flatten(state, where, sharded)
        owned = {name: (shard.tensor, shard.position) for name, shard in local_shards(sharded, where).items() if shard.owned}

        def write_rest(files: AtomicFiles) -> list[str]:
            name, encoded = encode_tree(OPTIMIZER_NAME, tree, tensors)
            files.add(name, *encoded)
            return [name]

        return _LocalPart(owned, {}, write_rest)

    _write_shards(accelerator, "save_fsdp_optimizer", folder / f"{OPTIMIZER_NAME}_{optimizer_index}", OPTIMIZER_NAME, capture)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the state of an optimizer from what is in a folder, in whichever of the forms; parameters are matched by their names."""
    folder = check_local_path(input_dir, "input_dir")
    names = parameter_names([accelerator.unwrap_model(model, keep_torch_compile=False)])
    read: list[Any] = []

    def prepare() -> None:
        path = _find(folder, OPTIMIZER_NAME, optimizer_index, (".safetensors", ".json", ".bin"))
        placeholders = TensorPlaceholders()
        stored = _read_optimizer(path, placeholders)
        if problem := explain_bad_optimizer(stored):
            raise CheckpointError(f"{path} cannot be used: it {problem}")
        if goes_by_names(stored):
            stored = number_parameters(stored, optimizer.param_groups, names, str(path))
        read.append(reshard_optimizer(stored, optimizer.param_groups, placeholders))

    _agree(accelerator, "load_fsdp_optimizer", prepare)
    optimizer.load_state_dict(read[0])


def _names_of(accelerator: Any, model: torch.nn.Module, optimizer: Any) -> list[str]:
    known = parameter_names([accelerator.unwrap_model(model, keep_torch_compile=False)])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if stray := [parameter for parameter in parameters if id(parameter) not in known]:
        raise ConfigError(f"the optimizer has a parameter of shape {list(stray[0].shape)} that is not one of {type(model).__name__}")
    return [known[id(parameter)][0] for parameter in parameters]


def _gathered(value: Any) -> Any:
    """Return a state with every sharded tensor whole, in host memory; all ranks have to call it."""
    if isinstance(value, torch.Tensor):
        whole: Any = value
        return (whole.full_tensor() if is_sharded(value) else whole).detach().cpu()
    if isinstance(value, dict):
        return {key: _gathered(item) for key, item in value.items()}
    return type(value)(_gathered(item) for item in value) if type(value) in (list, tuple) else value


def _read_optimizer(path: Path, placeholders: TensorPlaceholders) -> Any:
    if not path.is_dir():
        with ConfinedFolder(path.parent) as opened:
            data = bytearray(opened.read(path.name, _LARGEST_FILE))
        if path.suffix == ".bin":
            return read_torch_file(data, str(path), "Save it again with save_fsdp_optimizer.")
        return read_part(path.name, data, str(path))
    if is_dcp_folder(path):
        opened_folder = open_dcp(path)
        placeholders.add(opened_folder.tensors)
        return {"state": {}, **opened_folder.state(OPTIMIZER_NAME)}
    state, tensors = read_shard_state(path, OPTIMIZER_NAME)
    placeholders.add(tensors)
    return state


# -- both -------------------------------------------------------------------------------------------------------------


def _is_full(fsdp_plugin: Any) -> bool:
    """Whether the state is to be written whole."""
    kind = getattr(fsdp_plugin.state_dict_type, "name", fsdp_plugin.state_dict_type)
    if kind not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        raise ConfigError(f"state_dict_type={kind!r} cannot be saved. Write SHARDED_STATE_DICT or FULL_STATE_DICT.")
    return bool(kind == "FULL_STATE_DICT")


def _agree(accelerator: Any, operation: str, step: Callable[[], Any]) -> list[Any]:
    found: list[Any] = accelerator._saver.run_and_agree(operation, step)
    return found


def _find(folder: Path, stem: str, index: int, suffixes: tuple[str, ...]) -> Path:
    """Return the folder `stem_0`, or the file `stem.safetensors`, ...: what there is of it."""
    if folder.name == f"{stem}_{index}" and folder.is_dir():
        return folder
    candidates = [folder / f"{stem}_{index}", *(folder / f"{numbered_name(stem, index)}{suffix}" for suffix in suffixes)]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise CheckpointError(f"There is neither {candidates[0]} nor {', '.join(path.name for path in candidates[1:])} beside it.")
    return found


def _write_shards(accelerator: Any, operation: str, folder: Path, base: str, capture: Callable[[], _LocalPart]) -> None:
    """Write the shards of this rank, and on the main process what all share; old files go when the new ones are there."""
    captured: list[_LocalPart] = []

    def begin() -> str:
        if (folder / DCP_METADATA).exists():
            raise ConfigError(f"{folder} was written by torch.distributed.checkpoint, and would hold both. Write to another folder.")
        captured.append(capture())
        return secrets.token_hex(8)

    save = _agree(accelerator, operation, begin)[0]
    name = f"shard-{accelerator.process_index + 1:05d}-{base}-00001-of-00001.safetensors"

    def write() -> list[str]:
        part = captured[0]
        with AtomicFiles(folder, Disk()) as files:
            names = part.write_rest(files) if accelerator.is_main_process else []
            if part.tensors or accelerator.is_main_process:
                positions = describe_positions({key: position for key, (_, position) in part.tensors.items()})
                here = {other: kept for other, kept in part.aliases.items() if kept in part.tensors}
                held = {key: tensor for key, (tensor, _) in part.tensors.items()}
                files.add(name, *encode_tensors(held, {**here, **positions, SAVE_KEY: save}))
                names.append(name)
            files.place()
        return names

    written = {name for names in _agree(accelerator, operation, write) for name in names}

    def finish() -> None:
        if accelerator.is_main_process:
            with AtomicFiles(folder, Disk()) as files:
                files.remove([entry for entry in sorted(os.listdir(folder)) if _OURS.fullmatch(entry) and entry not in written])

    _agree(accelerator, operation, finish)
