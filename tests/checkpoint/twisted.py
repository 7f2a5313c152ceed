"""Checkpoints of a real run in which one value of a state is another one, with every checksum right: valid files, wrong meaning."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile import body_of, put, safetensors, seal

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    3,
    0.5,
    10**30,
    "x",
    [],
    [1],
    {},
    {"a": 1},
    {"$float": "nan"},
    {"$tuple": [1]},
    {"$bytes": "AA=="},
)
_LONG = 40

Place = tuple[str, tuple[Any, ...]]
"""A file, and the keys on the way to a value in its tree."""


def places(folder: Path) -> Iterator[Place]:
    """Every value in every state, and in the receipt; of long lists the first two alone."""
    for name in sorted(body_of(folder)["files"]):
        if name.endswith(".json") or "tree" in _metadata(folder / name):
            yield from ((name, way) for way in _ways(_tree(folder / name)))
    yield from (("receipt", way) for way in _ways(body_of(folder)["receipt"]))


def twist(folder: Path, place: Place, value: Any) -> None:
    """Puts a value in a place; `...` takes out what is there."""
    name, way = place
    if name == "receipt":
        body = body_of(folder)
        body["receipt"] = _changed(body["receipt"], way, value)
        seal(folder, body)
        return
    tree = _changed(_tree(folder / name), way, value)
    if name.endswith(".json"):
        put(folder, name, json.dumps(tree).encode())
        return
    header, data = _parted((folder / name).read_bytes())
    header["__metadata__"]["tree"] = json.dumps(tree)
    put(folder, name, safetensors(header, data))


def tensors(folder: Path) -> Iterator[Place]:
    """Every tensor in every state."""
    for name in sorted(body_of(folder)["files"]):
        if name.endswith(".safetensors"):
            yield from ((name, (key,)) for key in _parted((folder / name).read_bytes())[0] if key != "__metadata__")


def reshape(folder: Path, place: Place, shape: list[int], dtype: str = "F32") -> None:
    """Makes a tensor another one: of another shape and type, full of zeros."""
    name, (key,) = place
    header, data = _parted((folder / name).read_bytes())
    made, rest, end = bytearray(), {}, 0
    for entry, said in header.items():
        if entry == "__metadata__":
            rest[entry] = said
            continue
        start, stop = said["data_offsets"]
        if entry == key:
            count = 1
            for size in shape:
                count *= size
            held = bytes(count * {"F32": 4, "U8": 1, "I64": 8, "BOOL": 1, "C64": 8}[dtype])
            said = {"dtype": dtype, "shape": shape, "data_offsets": []}
        else:
            held = data[start:stop]
        made += held
        rest[entry] = {**said, "data_offsets": [end, end + len(held)]}
        end += len(held)
    put(folder, name, safetensors(rest, bytes(made)))


def _parted(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _metadata(path: Path) -> dict[str, str]:
    found: dict[str, str] = _parted(path.read_bytes())[0].get("__metadata__", {}) if path.suffix == ".safetensors" else {}
    return found


def _tree(path: Path) -> Any:
    return json.loads(path.read_bytes() if path.suffix == ".json" else _metadata(path)["tree"])


def _ways(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _ways(item, (*way, key))
    elif isinstance(node, list):
        for number, item in enumerate(node[: 2 if len(node) > _LONG else None]):
            yield from _ways(item, (*way, number))


def _changed(tree: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return {} if value is ... else value
    made = copy.deepcopy(tree)
    node = made
    for key in way[:-1]:
        node = node[key]
    if value is ...:
        del node[way[-1]]
    else:
        node[way[-1]] = value
    return made
