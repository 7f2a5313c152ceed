"""`save` and `load` of one object in one file, with Accelerate's defaults.

Clients read what they saved here with `torch.load`, so `torch.save`'s format is the default, and safetensors is what
`safe_serialization=True` asks for. A file appears under its name when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

__all__ = ["load", "save"]


def save(obj: Any, f: str | os.PathLike[str] | BinaryIO, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object to a file, on the main process (or the first of each machine) alone; with `safe_serialization`, without pickle."""
    from slipstream.checkpoint.object_file import save as write

    if safe_serialization and _is_state_dict(obj):
        from slipstream.checkpoint.model_io import clean_state_dict_for_safetensors

        obj = clean_state_dict_for_safetensors(obj)  # the safetensors package, with which clients read it, knows each tensor once
    write(obj, f, save_on_each_node=save_on_each_node, safe_serialization=bool(safe_serialization))


def _is_state_dict(obj: Any) -> bool:
    import torch

    return isinstance(obj, Mapping) and bool(obj) and all(isinstance(value, torch.Tensor) for value in obj.values())


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the content of a file; objects of other classes are built only with `weights_only=False`."""
    from slipstream.checkpoint.object_file import load as read

    return read(f, map_location, **kwargs)
