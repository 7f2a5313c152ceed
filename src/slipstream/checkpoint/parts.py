"""Parts of a checkpoint as files: a state with tensors is one safetensors file whose metadata carry the rest, one without is JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from slipstream.checkpoint.raw import DTYPES, tensor_bytes
from slipstream.checkpoint.snapshot import Part
from slipstream.files import strict_json
from slipstream.files.digest import Digest
from slipstream.files.tensors import plan

__all__ = ["pack", "pack_tensors", "packed_digest", "part_file"]


def part_file(part: Part) -> str:
    """The name of the file of a part."""
    return f"{part.name}.safetensors" if part.tensors else f"{part.name}.json"


def pack(part: Part) -> tuple[Iterable[Any], int]:
    """The bytes of the file of a part in pieces, and how many bytes there are."""
    if part.tensors:
        return pack_tensors(part.tensors, part.tree)
    data = strict_json.dump(part.tree, indent=1)
    return [data], len(data)


def pack_tensors(tensors: Mapping[str, torch.Tensor], tree: Any = None) -> tuple[Iterable[Any], int]:
    """The same of tensors, with a tree beside them unless it is None."""
    metadata = {"format": "pt"} if tree is None else {"format": "pt", "tree": strict_json.dump(tree).decode()}
    header, layout = plan([(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()], metadata)
    return _Chunks(header, tensors), layout.size


class _Chunks:
    """Header and tensors, one after the other; a tensor on a device is fetched when its turn comes."""

    def __init__(self, header: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        self._header = header
        self._tensors = tensors

    def __iter__(self) -> Any:
        yield self._header
        for tensor in self._tensors.values():
            yield tensor_bytes(tensor)


def packed_digest(chunks: Iterable[Any]) -> str:
    """The checksum of a file made of these pieces."""
    digest = Digest()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
