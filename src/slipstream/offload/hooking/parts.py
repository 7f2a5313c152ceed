"""Tensors in a tree of modules: their places, and copies of them that are of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from slipstream.offload.hooking.standins import KEEPER, NAME, is_stand_in

__all__ = ["MADE", "PLAIN", "Place", "as_device", "dressed_like", "parked_like", "places_of", "same_memory"]

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_PARKED: Final = "_slipstream_parked"
MADE: Final = "_slipstream_made"
"""Where the Parameter that was made of a tensor is kept: on that tensor, with the address of its memory."""


class Place(NamedTuple):
    """One place of a tensor in a tree of modules."""

    name: str
    store: dict[str, Any]
    """`_parameters` or `_buffers` of the module that holds it."""
    key: str
    tensor: torch.Tensor
    owner: torch.nn.Module
    persistent: bool


def places_of(module: torch.nn.Module, recurse: bool) -> Iterator[Place]:
    """Every place of a parameter or buffer, tied ones more than once, and modules once.

    >>> [place.name for place in places_of(torch.nn.Sequential(torch.nn.Linear(2, 2)), recurse=True)]
    ['0.weight', '0.bias']
    """
    waiting, seen = [("", module)], {id(module)}
    while waiting:
        prefix, owner = waiting.pop()
        transient = owner._non_persistent_buffers_set
        for store in (owner._parameters, owner._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    yield Place(prefix + key, store, key, tensor, owner, store is owner._parameters or key not in transient)
        if recurse:
            inner = [(f"{prefix}{name}.", child) for name, child in owner._modules.items() if child is not None]
            inner = [(name, child) for name, child in inner if id(child) not in seen]
            seen.update(id(child) for _, child in inner)
            waiting.extend(reversed(inner))


def as_device(device: Any) -> torch.device:
    """The device that was meant; there is one processor, whatever number it is given.

    >>> as_device("cpu:0")
    device(type='cpu')
    """
    made = torch.device(device)
    return torch.device("cpu") if made.type == "cpu" else made


def dressed_like(like: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """These values as what `like` is: a Parameter of its class, with its attributes and `requires_grad`, or a plain buffer.

    >>> dressed_like(torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False), torch.ones(2))
    Parameter containing:
    tensor([1., 1.])
    """
    if not isinstance(like, torch.nn.Parameter):
        return data.detach()
    needs = like.requires_grad and (data.is_floating_point() or data.is_complex())
    with torch.inference_mode(False):
        if type(like) is torch.nn.Parameter or is_stand_in(like) or type(data) not in PLAIN:
            made = torch.nn.Parameter(data.detach(), requires_grad=needs)
        else:
            made = torch.Tensor._make_subclass(type(like), data.detach(), needs)
    vars(made).update({name: value for name, value in vars(like).items() if name not in (MADE, _PARKED, KEEPER, NAME)})
    return made


def parked_like(tensor: torch.Tensor) -> torch.Tensor:
    """The stand-in of a tensor: the same without values, on the meta device.

    >>> parked_like(torch.ones(2, dtype=torch.float16))
    tensor(..., device='meta', size=(2,), dtype=torch.float16)
    """
    if tensor.is_meta:
        return tensor
    known: torch.Tensor | None = getattr(tensor, _PARKED, None)  # of another block that has the same weight: what is tied stays one
    if known is None or known.dtype is not tensor.dtype or known.requires_grad is not tensor.requires_grad:
        with torch.inference_mode(False), torch.no_grad():
            known = dressed_like(tensor, tensor.detach().to("meta"))
        setattr(tensor, _PARKED, known)
    return known


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one piece of memory."""
    if one.is_meta or other.is_meta or type(one) not in PLAIN or type(other) not in PLAIN:
        return one is other
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
