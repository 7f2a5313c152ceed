"""Whether tensors lie in memory as torch's own allocator gives it: at a multiple of 64 bytes, and not inside of a larger buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def misplaced(value: Any) -> dict[str, str]:
    """What is wrong with the tensors in a value, by where they are in it; empty if each has memory of its own."""
    found = dict(tensors(value))
    assert found, "there is no tensor to look at"
    return {place: why for place, tensor in found.items() if (why := fault(tensor))}


def fault(tensor: torch.Tensor) -> str:
    """Why the memory of a tensor is not like that of torch's own; "" if it is."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.numel():
        return ""
    storage = local.untyped_storage()
    if local.data_ptr() % 64:
        return f"its address is {local.data_ptr() % 64} more than a multiple of 64"
    if storage.nbytes() > local.nbytes + 64:
        return f"it has {local.nbytes} bytes of a storage of {storage.nbytes()}"
    if not storage.resizable():
        return "its memory belongs to a buffer that is not torch's"
    return ""


def tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested data, with its place."""
    if isinstance(value, torch.Tensor):
        yield place, value
        if value.grad is not None:
            yield f"{place}.grad", value.grad
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors(item, f"{place}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, place)
