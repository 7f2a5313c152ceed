"""The weights of a model as safetensors files: what is stored, in which file, and under which names.

`split` takes a state dict apart: tensors, other names of the same tensors (tied weights are stored once), and what is no tensor.
`shards` deals the tensors out to files, `index_bytes` is the usual index over them, readable by every library that reads such files.
Loading is in `fit.py`. Nothing here opens a file: `write_weights` is handed what does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from slipstream.checkpoint.fit import METADATA, LoadReport, bare, check_fit, load_into
from slipstream.checkpoint.format import FileEntry
from slipstream.checkpoint.raw import DTYPES, identity, is_text, storable, tensor_bytes
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.sizes import parse_size
from slipstream.files.tensors import file_order, plan

__all__ = [
    "LoadReport",
    "ModelFiles",
    "Weights",
    "bare",
    "check_fit",
    "index_bytes",
    "load_into",
    "parse_size",
    "shard_names",
    "shards",
    "split",
    "tensors_file",
    "write_weights",
]

_FORMAT = "format"


@dataclass(frozen=True)
class Weights:
    """A state dict taken apart."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tied weights, and the name under which each is stored."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What is no tensor, or one of a kind that safetensors has no name for; and the versions of layers, where they are not 1."""


@dataclass(frozen=True)
class ModelFiles:
    """Where the weights of a model are."""

    files: tuple[str, ...]
    index: str | None
    entries: Mapping[str, FileEntry]
    """What was written, the index included."""


def split(state_dict: Mapping[str, Any], where: str) -> Weights:
    """A state dict taken apart; the tensors are those of the model, not copies. `where` begins the messages.

    >>> shared = torch.ones(2)
    >>> split({"embed": shared, "head": shared, "step": 3}, "the weights")
    Weights(tensors={'embed': tensor([1., 1.])}, aliases={'head': 'embed'}, extra={'step': 3})
    """
    weights = Weights()
    stored: dict[Any, str] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str) or name == "__metadata__" or not is_text(name):
            raise CheckpointError(f"{where} have the name {name!r}, which a file of weights cannot hold. Give the weight another name.")
        if not isinstance(value, torch.Tensor):
            weights.extra[name] = value
            continue
        tensor = storable(value, f"{name!r} of {where}").detach()
        if tensor.dtype not in DTYPES:
            weights.extra[name] = tensor
            continue
        kept = stored.setdefault(identity(value), name)
        if kept == name:
            weights.tensors[name] = tensor
        else:
            weights.aliases[name] = kept
    versions = getattr(state_dict, METADATA, None)
    if isinstance(versions, Mapping) and METADATA not in state_dict:
        told = {path: dict(said) for path, said in versions.items() if said and dict(said) != {"version": 1}}
        if told:
            weights.extra[METADATA] = told
    return weights


def shards(tensors: Mapping[str, torch.Tensor], max_shard_size: int | None, frozen: Collection[str] = frozenset()) -> list[list[str]]:
    """The names that go into each file: at most `max_shard_size` bytes of tensors, unless a single one has more.

    Those in `frozen` go to files of their own, which then do not change from save to save. In each file they stand in `file_order`.

    >>> shards({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}, 32)
    [['a', 'b'], ['c']]
    """
    files: list[list[str]] = []
    for part in ([name for name in tensors if name in frozen], [name for name in tensors if name not in frozen]):
        taken = 0
        for position, name in enumerate(part):
            size = tensors[name].nbytes
            if position == 0 or (max_shard_size is not None and taken + size > max_shard_size and taken):
                files.append([])
                taken = 0
            files[-1].append(name)
            taken += size
    return [sorted(names, key=lambda name: file_order(tensors[name].nbytes, tensors[name].element_size())) for names in files] or [[]]


def shard_names(base: str, count: int, suffix: str = "safetensors") -> list[str]:
    """The names of the files.

    >>> shard_names("model", 1), shard_names("model", 2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1:
        return [f"{base}.{suffix}"]
    return [f"{base}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def index_bytes(files: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The index over files of weights: which name is in which file."""
    where = {name: file for file, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return strict_json.dump({"metadata": {"total_size": total}, "weight_map": {name: where[name] for name in tensors}}, indent=2)


def tensors_file(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], aliases: Mapping[str, str] | None = None
) -> tuple[Iterable[Any], int]:
    """The bytes of a file with these tensors, in pieces, and how many there are. Other names of them stand in its metadata."""
    told = {other: name for other, name in (aliases or {}).items() if name in names and other != _FORMAT}
    header, layout = plan([(name, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names], {_FORMAT: "pt", **told})
    return chain([header], (tensor_bytes(tensors[name]) for name in names)), layout.size


def write_weights(
    add: Callable[[str, Iterable[Any], int], FileEntry],
    base: str,
    weights: Weights,
    max_shard_size: int | None = None,
    frozen: Collection[str] = frozenset(),
) -> ModelFiles:
    """Writes the tensors (not what is extra) through `add(name, chunks, size)`; the index comes last."""
    groups = shards(weights.tensors, max_shard_size, frozen)
    names = shard_names(base, len(groups))
    entries = {name: add(name, *tensors_file(weights.tensors, group, weights.aliases)) for name, group in zip(names, groups, strict=True)}
    index = None
    if len(names) > 1:
        index = f"{base}.safetensors.index.json"
        data = index_bytes(dict(zip(names, groups, strict=True)), weights.tensors)
        entries[index] = add(index, [data], len(data))
    return ModelFiles(tuple(names), index, entries)
