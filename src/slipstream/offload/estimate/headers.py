"""The tensors in files of weights, from headers alone: a file of many gigabytes is answered from its first kilobytes.

Files of safetensors, one or several with an index, and checkpoints of ours are read without torch. Files of `torch.save`, and checkpoints
with sharded tensors, go through the readers of `checkpoint/`, which map them. No weight is read, nothing in a file is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from slipstream.checkpoint.names import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.inside import Folder
from slipstream.files.names import check_name
from slipstream.files.tensors import Layout, read_layout
from slipstream.offload.estimate.parts import Part, Parts

__all__ = ["has_weights", "read_config", "read_parts"]

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_MANIFEST: Final = "MANIFEST.json"  # as `checkpoint/format.py` has it, which takes longer to import than everything here to run
_LARGEST_MANIFEST: Final = 64 << 20
_LARGEST_CONFIG: Final = 16 << 20
_NOT_LINEAR: Final = ("embed", "wte", "wpe", "head", "norm", "ln_", "shared", "position", "score", "classifier", "conv", "router")


def has_weights(folder: Path) -> bool:
    """Whether there is any file in a folder that could hold weights."""
    return any(one.name == _MANIFEST or one.name.endswith((*_SUFFIXES, ".index.json")) for one in folder.iterdir())


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a config file."""
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise CheckpointError(f"{path} is larger than {_LARGEST_CONFIG:,} bytes, and so no config. Give the config.json of a model.")
        content = strict_json.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no mapping. Give the config.json of a model.")
    return content


def read_parts(path: Path, config: Mapping[str, Any] | None = None) -> Parts:
    """The tensors of the weights at a path: a file, an index, or a folder.

    >>> import tempfile
    >>> from slipstream.files.tensors import plan
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     _ = file.write_bytes(plan([("up.weight", "BF16", (4, 8))])[0] + bytes(64))
    ...     read_parts(Path(folder)).parts
    [Part(name='up.weight', shape=(4, 8), dtype='BF16', trainable=True, linear=True, layer=None)]
    """
    layouts = _layouts(path)
    if layouts is None:
        found = _through_torch(path)
    else:
        found = [
            _part(entry.name, entry.shape, entry.dtype)
            for layout, names in layouts
            for entry in layout.entries.values()
            if names is None or entry.name in names
        ]
    parts = list({part.name: part for part in found}.values())
    kept, notes = _tied_once(parts, config or {})
    packed = sum(not part.floating for part in kept)
    if packed:
        notes.append(f"{packed:,} tensors are no plain floating point numbers and are counted as they are stored, whatever the type.")
    return Parts(kept, tuple(notes))


def _part(name: str, shape: tuple[int, ...], dtype: str) -> Part:
    *before, last = name.split(".")
    module = before[-1] if before else ""
    linear = len(shape) == 2 and last == "weight" and not any(word in module.lower() for word in _NOT_LINEAR)
    return Part(name, shape, dtype, linear=linear)


def _layouts(path: Path) -> list[tuple[Layout, set[str] | None]] | None:
    """Layouts of safetensors files, and which of their names count; None if these are weights of another kind."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _indexed(path)
        return [(_layout(path), None)] if path.name.endswith(".safetensors") else None
    if (path / _MANIFEST).is_file():
        from slipstream.checkpoint.format import MANIFEST, parse

        with Folder(path) as held:
            manifest = parse(held.read(MANIFEST, _LARGEST_MANIFEST), str(path / MANIFEST))
        if not manifest.models or manifest.models[0].pieces:
            return None
        return [(_layout(path / check_name(name, MANIFEST)), None) for name in manifest.models[0].files]
    names = sorted(one.name for one in path.iterdir())
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        if name in names:
            return _layouts(path / name)
    found = [name for name in names if name.endswith(_SUFFIXES)]
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    only = indices or found
    return _layouts(path / only[0]) if len(only) == 1 and not any(name.endswith(".bin.index.json") for name in names) else None


def _indexed(path: Path) -> list[tuple[Layout, set[str] | None]] | None:
    content = strict_json.parse(path.read_bytes(), str(path))
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) and file.endswith(".safetensors") for file in places.values()):
        return None  # the readers of weights say what is wrong with it, or know what it is
    names: dict[str, set[str]] = {}
    for name, file in places.items():
        names.setdefault(check_name(file, str(path)), set()).add(name)
    return [(_layout(path.parent / file), held) for file, held in names.items()]


def _layout(path: Path) -> Layout:
    try:
        with open(path, "rb") as file:

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(count)

            return read_layout(read, os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _through_torch(path: Path) -> list[Part]:
    from slipstream.checkpoint.raw import DTYPES, identity
    from slipstream.checkpoint.sources import find

    source = find(path)
    seen: set[Any] = set()
    parts = []
    for name in source.files:
        file = source.open(name, verify=False)
        for key, tensor in (file.forms or file.tensors).items():
            if (memory := identity(tensor)) not in seen:  # the other names of a tied weight are the same memory
                seen.add(memory)
                parts.append(_part(key, tuple(tensor.shape), DTYPES.get(tensor.dtype, "U8")))
    return parts


def _tied_once(parts: Iterable[Part], config: Mapping[str, Any]) -> tuple[list[Part], list[str]]:
    """Some files hold a head that is tied to the embedding as well; a model that says so has it once."""
    kept = list(parts)
    if config.get("tie_word_embeddings") is not True:
        return kept, []
    heads = [part for part in kept if part.name.rpartition("lm_head.weight")[1] and part.name.endswith("lm_head.weight")]
    doubled = list(_also_embedded(heads, kept))
    if not doubled:
        return kept, []
    names = {part.name for part in doubled}
    return [part for part in kept if part.name not in names], [f"{', '.join(sorted(names))} is tied to the embedding and is counted once."]


def _also_embedded(heads: Iterable[Part], parts: list[Part]) -> Iterator[Part]:
    for head in heads:
        if any("embed" in part.name or "wte" in part.name for part in parts if part.shape == head.shape and part is not head):
            yield head
