"""A model as a list of pieces that cannot be divided, in the order of definition, and as groups of pieces that go together.

A piece is a module without children, one of a class that must not be split, one of torch's own that computes with the weights of its
children itself (they could not be on different devices), or a tensor that a divided module holds directly. Pieces that share a parameter,
or are one module under two names, form a group, which goes where its first piece goes and whose shared weights count once. Every tensor
of the model is in exactly one piece.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.offload.planning.sizes import Sizer, parts_of
from slipstream.offload.planning.tied import identity_of

__all__ = ["Group", "Piece", "Units", "units_of"]

_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""They hand the weights of their children to one function, so the children cannot be on different devices; so do modules whose weights
are computed (`torch.nn.utils.parametrize`)."""


@dataclass(frozen=True)
class Piece:
    """What cannot be divided."""

    name: str
    size: int
    """Bytes of its parameters and buffers; what it holds twice counts once."""
    buffers: int
    """Bytes of its buffers, which are part of `size`."""
    order: int
    """Its number among the pieces, and the modules without tensors, in the order of definition."""


@dataclass(frozen=True)
class Group:
    """Pieces that go together."""

    pieces: tuple[Piece, ...]
    size: int
    """Bytes on a device that holds all of them: what they share counts once."""
    buffers: int
    adds: tuple[int, ...]
    """Bytes of each piece that those before it have not."""

    @property
    def name(self) -> str:
        """The name of the first piece."""
        return self.pieces[0].name


class _Walk:
    """One pass over the tree."""

    def __init__(self, whole: frozenset[str], bytes_of: Sizer) -> None:
        self.whole = whole
        self.bytes_of = bytes_of
        self.pieces: list[Piece] = []
        self.shares: list[dict[Hashable, int]] = []
        """For each piece, the bytes of what others may hold too: parameters by identity, and modules that are met again."""
        self.hollow: dict[str, int] = {}
        """Modules without tensors, and their numbers in the order of definition."""

    def visit(self, name: str, one: nn.Module | torch.Tensor, owner: nn.Module | None = None) -> None:
        if isinstance(one, nn.Module) and self._divided(one):
            for part, inner in parts_of(name, one):
                self.visit(part, inner, one)
            return
        shared: dict[Hashable, int] = {}
        buffers = 0
        if isinstance(one, nn.Module):
            buffers = self._gather(name, one, shared)
        elif isinstance(one, nn.Parameter):
            shared[identity_of(one)] = self.bytes_of(name, one)
        else:
            buffers = shared["buffer", id(owner), name.rpartition(".")[2]] = self.bytes_of(name, one)
        order = len(self.pieces) + len(self.hollow)
        if not shared:
            self.hollow[name] = order
            return
        self.pieces.append(Piece(name, sum(shared.values()), buffers, order))
        self.shares.append(shared)

    def _divided(self, module: nn.Module) -> bool:
        if not module._modules or type(module).__name__ in self.whole:
            return False
        return not isinstance(module, _WHOLE) and "parametrizations" not in module._modules

    def _gather(self, name: str, one: nn.Module, shared: dict[Hashable, int]) -> int:
        """Put what is below into `shared`; the bytes of buffers among it.

        A buffer belongs to its module: two modules with one buffer get one each as soon as they are moved.
        """
        start = f"{name}." if name else ""
        buffers = 0
        for part, parameter in one._parameters.items():
            if parameter is not None:
                shared.setdefault(identity_of(parameter), self.bytes_of(start + part, parameter))
        for part, buffer in one._buffers.items():
            key = ("buffer", id(one), part)
            if buffer is not None and key not in shared:
                shared[key] = self.bytes_of(start + part, buffer)
                buffers += shared[key]
        for part, child in one._modules.items():
            if child is not None:
                buffers += self._gather(start + part, child, shared)
        return buffers


@dataclass(frozen=True)
class Units:
    """A model, taken apart."""

    groups: tuple[Group, ...]
    """Ordered by their first pieces."""
    hollow: dict[str, int]
    """Modules without children and without tensors, and their numbers in the order of definition."""

    def orders(self) -> list[tuple[Group, ...]]:
        """The order of definition, and those in which the modules around a tied piece come along with it.

        A head that is tied to the embedding goes where the embedding goes. What is around it (a norm, a bias) may as well go there too:
        the innermost module around the head, or the one around that, and so on.
        """
        tied = [piece for group in self.groups for piece in group.pieces[1:]]
        depths = range(1, max((piece.name.count(".") + 1 for piece in tied), default=1))
        return list(dict.fromkeys([self.groups, *(self._with_modules(depth) for depth in depths)]))

    def _with_modules(self, depth: int) -> tuple[Group, ...]:
        """The order in which modules at a depth follow those that are tied to a piece of them."""
        below: dict[str, list[Group]] = {}
        for group in self.groups:
            below.setdefault(_cut(group.name, depth), []).append(group)
        order: dict[int, Group] = {}
        for group in self.groups:
            order[id(group)] = order.get(id(group), group)
            for piece in group.pieces[1:]:
                around = _cut(piece.name, depth)
                if around not in (piece.name, _cut(group.name, depth)):
                    order.update({id(one): one for one in below.get(around, ()) if id(one) not in order})
        return tuple(order.values())


def _cut(name: str, depth: int) -> str:
    """The name of the module around at a depth.

    >>> _cut("model.layers.0.up", 2)
    'model.layers'
    """
    return ".".join(name.split(".", depth)[:depth])


def units_of(model: nn.Module, whole: frozenset[str], bytes_of: Sizer) -> Units:
    """The pieces of a model and how they go together; `whole` are names of classes that must not be split.

    >>> from slipstream.offload.planning.sizes import sizer
    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.ReLU(), nn.Linear(2, 4, bias=False))
    >>> model[2].weight = model[0].weight
    >>> [([piece.name for piece in group.pieces], group.size) for group in units_of(model, frozenset(), sizer()).groups]
    [(['0', '2'], 32)]
    """
    walk = _Walk(whole, bytes_of)
    walk.visit("", model)
    leader = list(range(len(walk.pieces)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    holders: dict[Hashable, int] = {}
    for number, shared in enumerate(walk.shares):
        for key in shared:
            first, second = sorted((find(holders.setdefault(key, number)), find(number)))
            leader[second] = first
    members: dict[int, list[int]] = {}
    for number in range(len(walk.pieces)):
        members.setdefault(find(number), []).append(number)
    return Units(tuple(_group(numbers, walk) for numbers in members.values()), walk.hollow)


def _group(numbers: list[int], walk: _Walk) -> Group:
    pieces = tuple(walk.pieces[number] for number in numbers)
    if len(pieces) == 1:
        return Group(pieces, pieces[0].size, pieces[0].buffers, (pieces[0].size,))
    together: dict[Any, int] = {}
    adds = []
    for number in numbers:
        adds.append(sum(size for key, size in walk.shares[number].items() if key not in together))
        together |= walk.shares[number]
    buffers = sum(size for key, size in together.items() if isinstance(key, tuple) and key[0] == "buffer")
    return Group(pieces, sum(together.values()), buffers, tuple(adds))
