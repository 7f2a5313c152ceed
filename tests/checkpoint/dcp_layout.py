"""Folders of torch.distributed.checkpoint, as torch's own writers make them: alone, or by every rank of a group."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

from slipstream.devices.packages import is_torch_version

FORMATS = {"torch": SerializationFormat.TORCH_SAVE, "safetensors": SerializationFormat.SAFETENSORS}
HAS_SHARDS = is_torch_version(">=", "2.13")
"""Whether torch's `HuggingFaceStorageWriter` has `save_distributed`: in torch 2.8 it does not."""
KINDS = (*FORMATS, "shards") if HAS_SHARDS else (*FORMATS,)


def save(state: dict[str, Any], folder: Path, *, kind: str = "torch", **options: Any) -> Path:
    """What `dcp.save` writes: by this process alone where there is no group, else all ranks have to call it."""
    writer = (
        dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, **options)
        if kind == "shards"
        else dcp.FileSystemWriter(folder, serialization_format=FORMATS[kind], **options)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.8, of a call of its own
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())
    return folder


def save_fsdp(folder: Path, model: Any, optimizer: Any) -> Path:
    """The folders that Accelerate's save_state makes under FSDP2 with SHARDED_STATE_DICT; all ranks have to call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    save({"model": get_model_state_dict(model)}, folder / "pytorch_model_fsdp_0")
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, folder / "optimizer_0")
    return folder
