"""`save_fsdp_model`, `load_fsdp_model`, ...: model and optimizer of a sharded run, in the files that clients of Accelerate look for.

With `FULL_STATE_DICT` the main process writes `pytorch_model_fsdp.bin` and `optimizer.bin` by `torch.save`: transformers' Trainer resumes
only from these names. With `SHARDED_STATE_DICT` the folders `pytorch_model_fsdp_0` and `optimizer_0` are Slipstream's, without pickle;
ACCELERATE_CHECKPOINT_FORMAT=accelerate makes them folders of torch.distributed.checkpoint. Loading takes what it finds, and runs no code
of a file. All processes have to call these functions; an error on one is raised on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accelerate._accelerator_checkpoints import choose_format
from accelerate._checkpoint_writer import gather_whole, write_dcp
from accelerate.checkpointing import numbered, torch_writer
from accelerate.utils.modeling import is_peft_model
from slipstream.checkpoint import fsdp_io
from slipstream.checkpoint.commit import LocalStage, LocalTarget
from slipstream.checkpoint.manifest import FSDP_MODEL_NAME, OPTIMIZER_NAME
from slipstream.files.atomic_files import AtomicFiles, check_local_path
from slipstream.files.disk import Disk
from slipstream.logging import get_logger

__all__ = ["load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"]

_PathLike = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: _PathLike,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a model, sharded or full as `fsdp_plugin.state_dict_type` says.

    `adapter_only` writes the adapter of a PEFT model; of any other model everything (transformers' Trainer always passes it).
    """
    folder = check_local_path(output_dir, "output_dir")
    adapter_only = adapter_only and _has_adapter(accelerator, model)
    _warn_without_dcp("save_fsdp_model", use_dcp)
    original = accelerator.unwrap_model(model, keep_torch_compile=False)
    if fsdp_io._is_full(fsdp_plugin):
        weights = fsdp_io._chosen(original, accelerator.get_state_dict(model), adapter_only=adapter_only)
        _write_file(accelerator, "save_fsdp_model", folder, numbered(FSDP_MODEL_NAME, model_index, ".bin"), weights)
    elif _is_for_accelerate():
        weights = fsdp_io._chosen(original, accelerator._components.strategy.state(original), adapter_only=adapter_only)
        _write_folder(accelerator, "save_fsdp_model", folder / f"{FSDP_MODEL_NAME}_{model_index}", {"model": weights})
    else:
        fsdp_io.save_fsdp_model(fsdp_plugin, accelerator, model, folder, model_index, adapter_only)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: _PathLike,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load the weights of a model in whichever form the folder has them, and return torch's record of missing and unexpected names."""
    from torch.nn.modules.module import _IncompatibleKeys

    _warn_without_dcp("load_fsdp_model", use_dcp)
    only = adapter_only and _has_adapter(accelerator, model)
    report = fsdp_io.load_fsdp_model(fsdp_plugin, accelerator, model, input_dir, model_index, only)
    return _IncompatibleKeys(list(report.missing), list(report.unexpected))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: _PathLike,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of an optimizer by the names of its parameters, sharded or full as `fsdp_plugin.state_dict_type` says."""
    folder = check_local_path(output_dir, "output_dir")
    _warn_without_dcp("save_fsdp_optimizer", use_dcp)
    if not fsdp_io._is_full(fsdp_plugin) and not _is_for_accelerate():
        fsdp_io.save_fsdp_optimizer(fsdp_plugin, accelerator, optimizer, model, folder, optimizer_index)
        return
    state = fsdp_io.name_parameters(optimizer.state_dict(), fsdp_io._names_of(accelerator, model, optimizer))
    if fsdp_io._is_full(fsdp_plugin):
        whole = gather_whole(state, keep=accelerator.is_main_process)
        _write_file(accelerator, "save_fsdp_optimizer", folder, numbered(OPTIMIZER_NAME, optimizer_index, ".bin"), whole)
    else:
        _write_folder(accelerator, "save_fsdp_optimizer", folder / f"{OPTIMIZER_NAME}_{optimizer_index}", {"optimizer": state})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: _PathLike,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the state of an optimizer in whichever form the folder has it. What it has is matched by names, an adapter's included."""
    _warn_without_dcp("load_fsdp_optimizer", use_dcp)
    fsdp_io.load_fsdp_optimizer(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, adapter_only)


# -- writing ----------------------------------------------------------------------------------------------------------


def _has_adapter(accelerator: Any, model: torch.nn.Module) -> bool:
    return bool(is_peft_model(accelerator.unwrap_model(model, keep_torch_compile=False)))


def _is_for_accelerate() -> bool:
    return choose_format(None)[0] == "accelerate"


def _warn_without_dcp(function: str, use_dcp: bool) -> None:
    if not use_dcp:
        get_logger(__name__).warning_once(
            f"{function}(use_dcp=False) has no effect: a file of pickled local tensors for each rank can be loaded on as many ranks only. "
            "Shards are written and read with their positions."
        )


def _write_file(accelerator: Any, operation: str, folder: Path, name: str, state: Any) -> None:
    """Write a whole state on the main process; the file appears when it is complete."""

    def write() -> None:
        with AtomicFiles(folder, Disk()) as files:
            files.adopt(name, torch_writer(state))  # type: ignore[arg-type]
            files.place()

    accelerator._saver.run_and_agree(operation, lambda: write() if accelerator.is_main_process else None)


def _write_folder(accelerator: Any, operation: str, folder: Path, state: dict[str, Any]) -> None:
    """Write a sharded state as a folder of torch.distributed.checkpoint, which appears when all shards are there."""
    main, agree = accelerator.is_main_process, accelerator._saver.run_and_agree
    target = LocalTarget(folder)
    stages: list[LocalStage] = []

    def begin() -> str | None:
        if main:
            stages.append(target.begin())
        return str(stages[0].folder) if main else None

    try:
        staged = next(path for path in agree(operation, begin) if path is not None)
        write_dcp(Path(staged), state)
        agree(operation, _commit(stages) if main else lambda: None)
    finally:
        for stage in stages:
            stage.abandon()


def _commit(stages: list[LocalStage]) -> Callable[[], None]:
    def commit() -> None:
        for path in sorted(stages[0].folder.iterdir()):
            stages[0].adopt(path.name)
        stages[0].commit(None)

    return commit
