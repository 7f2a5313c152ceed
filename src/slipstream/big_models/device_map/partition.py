"""How a model is divided: into indivisible pieces for a device map, and into the blocks that an offloaded part gets its weights in.

A piece is a leaf module, a module of a class that must not be split, a torch module that uses the weights of its children itself, or a
tensor that a divided module holds directly. Pieces that share a parameter form a group. A block is a module whose weights are brought
together when it runs: larger blocks mean fewer look-ups and longer reads, smaller ones need less memory at a time.

No tensor is read or moved here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from slipstream.checkpoint.tensor_bytes import memory_identity

__all__ = [
    "LARGEST_BLOCK", "ModelPieces", "Piece", "PieceGroup", "Sizer", "divide_model", "find_composite", "find_offload_blocks", "is_called",
    "list_module_parts", "parameter_identity",
]


Sizer = Callable[[str, torch.Tensor], int]
"""Returns the bytes of a tensor, by its name in the model and the tensor itself."""

_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""They hand the weights of their children to one function, so the children cannot be on different devices; so do modules whose weights
are computed (`torch.nn.utils.parametrize`)."""


def parameter_identity(parameter: torch.Tensor) -> Hashable:
    """Return a key that is equal for tied parameters, valid while the parameter lives."""
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
        return memory_identity(parameter)  # type: ignore[no-any-return]
    return id(parameter)  # other classes may hold their values somewhere else than where they seem to


def list_module_parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return what a module is divided into, in the order of definition: its own parameters, its children, its own buffers."""
    start = f"{name}." if name else ""
    groups: Sequence[Mapping[str, Any]] = (module._parameters, module._modules, module._buffers)
    return [(start + part, entry) for group in groups for part, entry in group.items() if entry is not None]


@dataclass(frozen=True)
class Piece:
    """A part of a model that cannot be divided."""

    name: str
    size: int
    """Bytes of its parameters and buffers; what it holds twice counts once."""
    buffers: int
    """Bytes of its buffers, which are part of `size`."""
    order: int
    """Its number among the pieces, and the modules without tensors, in the order of definition."""


@dataclass(frozen=True)
class PieceGroup:
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


class _PieceWalk:
    """Collects the pieces in one pass over the modules."""

    def __init__(self, whole: frozenset[str], bytes_of: Sizer) -> None:
        self.whole = whole
        self.bytes_of = bytes_of
        self.pieces: list[Piece] = []
        self.shares: list[dict[Hashable, int]] = []
        """For each piece, the bytes of what others may hold too: parameters by identity, and modules that are met again."""
        self.empty_modules: dict[str, int] = {}
        """Modules without tensors, and their numbers in the order of definition."""

    def visit(self, name: str, module: nn.Module | torch.Tensor, owner: nn.Module | None = None) -> None:
        if isinstance(module, nn.Module) and self._divided(module):
            for part, inner in list_module_parts(name, module):
                self.visit(part, inner, module)
            return
        shared: dict[Hashable, int] = {}
        buffers = 0
        if isinstance(module, nn.Module):
            buffers = self._gather(name, module, shared)
        elif isinstance(module, nn.Parameter):
            shared[parameter_identity(module)] = self.bytes_of(name, module)
        else:
            buffers = shared["buffer", id(owner), name.rpartition(".")[2]] = self.bytes_of(name, module)
        order = len(self.pieces) + len(self.empty_modules)
        if not shared:
            self.empty_modules[name] = order
            return
        self.pieces.append(Piece(name, sum(shared.values()), buffers, order))
        self.shares.append(shared)

    def _divided(self, module: nn.Module) -> bool:
        if not module._modules or type(module).__name__ in self.whole:
            return False
        return not isinstance(module, _INDIVISIBLE) and "parametrizations" not in module._modules

    def _gather(self, name: str, module: nn.Module, shared: dict[Hashable, int]) -> int:
        """Add what is below to `shared` and return the bytes of buffers among it.

        A buffer belongs to its module: two modules with one buffer get one each as soon as they are moved.
        """
        start = f"{name}." if name else ""
        buffers = 0
        for part, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(parameter_identity(parameter), self.bytes_of(start + part, parameter))
        for part, buffer in module._buffers.items():
            key = ("buffer", id(module), part)
            if buffer is not None and key not in shared:
                shared[key] = self.bytes_of(start + part, buffer)
                buffers += shared[key]
        for part, child in module._modules.items():
            if child is not None:
                buffers += self._gather(start + part, child, shared)
        return buffers


@dataclass(frozen=True)
class ModelPieces:
    """The groups of a model's pieces."""

    groups: tuple[PieceGroup, ...]
    """Ordered by their first pieces."""
    empty_modules: dict[str, int]
    """Modules without children and without tensors, and their numbers in the order of definition."""

    def orders(self) -> list[tuple[PieceGroup, ...]]:
        """Return the order of definition, and those in which the modules around a tied piece go along with it.

        A head that is tied to the embedding goes where the embedding goes. What is around it (a norm, a bias) may as well go there too:
        the innermost module around the head, or the one around that, and so on.
        """
        tied = [piece for group in self.groups for piece in group.pieces[1:]]
        depths = range(1, max((piece.name.count(".") + 1 for piece in tied), default=1))
        return list(dict.fromkeys([self.groups, *(self._with_modules(depth) for depth in depths)]))

    def _with_modules(self, depth: int) -> tuple[PieceGroup, ...]:
        """Return the order in which modules at a depth follow those that are tied to a piece of them."""
        below: dict[str, list[PieceGroup]] = {}
        for group in self.groups:
            below.setdefault(_ancestor(group.name, depth), []).append(group)
        order: dict[int, PieceGroup] = {}
        for group in self.groups:
            order[id(group)] = order.get(id(group), group)
            for piece in group.pieces[1:]:
                around = _ancestor(piece.name, depth)
                if around not in (piece.name, _ancestor(group.name, depth)):
                    order.update({id(other): other for other in below.get(around, ()) if id(other) not in order})
        return tuple(order.values())


def _ancestor(name: str, depth: int) -> str:
    """Return the name of the enclosing module at a depth.

    >>> _ancestor("model.layers.0.up", 2)
    'model.layers'
    """
    return ".".join(name.split(".", depth)[:depth])


def divide_model(model: nn.Module, whole: frozenset[str], bytes_of: Sizer) -> ModelPieces:
    """Return the pieces of a model and their groups; `whole` are names of classes that must not be split.

    >>> from slipstream.big_models.device_map.sizes import make_sizer
    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.ReLU(), nn.Linear(2, 4, bias=False))
    >>> model[2].weight = model[0].weight
    >>> [([piece.name for piece in group.pieces], group.size) for group in divide_model(model, frozenset(), make_sizer()).groups]
    [(['0', '2'], 32)]
    """
    walk = _PieceWalk(whole, bytes_of)
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
    return ModelPieces(tuple(_make_group(numbers, walk) for numbers in members.values()), walk.empty_modules)


def _make_group(numbers: list[int], walk: _PieceWalk) -> PieceGroup:
    pieces = tuple(walk.pieces[number] for number in numbers)
    if len(pieces) == 1:
        return PieceGroup(pieces, pieces[0].size, pieces[0].buffers, (pieces[0].size,))
    together: dict[Any, int] = {}
    adds = []
    for number in numbers:
        adds.append(sum(size for key, size in walk.shares[number].items() if key not in together))
        together |= walk.shares[number]
    buffers = sum(size for key, size in together.items() if isinstance(key, tuple) and key[0] == "buffer")
    return PieceGroup(pieces, sum(together.values()), buffers, tuple(adds))


LARGEST_BLOCK: Final = 256 << 20
"""Bytes of a block, if nothing else says how large it may be."""

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerDecoder)
"""Of the modules of torch itself: those that leave the weights of their children alone."""


def find_offload_blocks(
    model: nn.Module,
    entry_name: str,
    *,
    largest: int | None = None,
    whole: Collection[str] = (),
    apart: Collection[str] = (),
) -> dict[str, bool]:
    """Return the blocks of the module `entry_name` by name, in the model's order; those without tensors are left out.

    The value says whether a block is the module with all below it, or only the tensors that it holds itself.

    A module is divided if it has more than `largest` bytes, if it is never called itself (a ModuleList), if it is the whole model or has
    a stack of blocks below it (a ModuleList, or a Sequential of modules with parts of their own), or if one of the modules named in
    `apart` is below it: those are left out. It is not divided if its class is named in `whole`, or if it uses
    the weights of its children itself.

    >>> model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    >>> find_offload_blocks(model, "")
    {'blocks.0': True, 'blocks.1': True, 'head': True}
    """
    partitioner = _BlockPartitioner(LARGEST_BLOCK if largest is None else largest, frozenset(whole), frozenset(apart))
    module = model.get_submodule(entry_name)
    partitioner.measure(module, entry_name)
    if not entry_name:
        partitioner.stacks.add(id(model))  # parts of a whole model are called by themselves too: an encoder, a head
    return dict(partitioner.blocks(module, entry_name))


def is_called(module: nn.Module) -> bool:
    """Return whether a module can be called: a list of modules, or of parameters, cannot.

    >>> is_called(nn.Linear(1, 1)), is_called(nn.ModuleList())
    (True, False)
    """
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_composite(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """Return the outermost module around (or of) this name that uses weights of the modules below it itself; None if there is none.

    >>> find_composite(dict(nn.Sequential(nn.MultiheadAttention(2, 1)).named_modules()), "0.out_proj")
    '0'
    """
    words = name.split(".")
    around = (".".join(words[:count]) for count in range(len(words) + 1))
    return next((path for path in around if modules[path]._modules and _is_composite(modules[path])), None)


class _BlockPartitioner:
    def __init__(self, largest: int, whole: frozenset[str], apart: frozenset[str]) -> None:
        self._largest, self._whole, self._apart = largest, whole, apart
        self._bytes: dict[int, int] = {}
        self._divided_below: set[int] = set()
        """Modules with something below them that is left out."""
        self.stacks: set[int] = set()
        """Modules with a stack of blocks in or below them."""
        self._seen: set[int] = set()

    def measure(self, module: nn.Module, name: str) -> int:
        """Return the bytes of a module, and remember those of all modules below it."""
        total = sum(tensor.numel() * tensor.element_size() for tensor in _own_tensors(module))
        for child_name, child in module._modules.items():
            if child is None:
                continue
            full = f"{name}.{child_name}" if name else child_name
            total += self.measure(child, full)
            if full in self._apart or id(child) in self._divided_below:
                self._divided_below.add(id(module))
            if id(child) in self.stacks:
                self.stacks.add(id(module))
        self._bytes[id(module)] = total
        if self._is_stack(module):
            self.stacks.add(id(module))
        return total

    def _is_stack(self, module: nn.Module) -> bool:
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            return False
        inner = [child for child in module.children() if self._bytes[id(child)]]
        return len(inner) > 1 and (not isinstance(module, nn.Sequential) or all(any(child.children()) for child in inner))

    def blocks(self, module: nn.Module, name: str) -> Iterator[tuple[str, bool]]:
        if id(module) in self._seen or not self._bytes[id(module)]:
            return
        self._seen.add(id(module))
        if not self._divides(module):
            yield name, True
            return
        if any(True for _ in _own_tensors(module)):
            yield name, False
        for child_name, child in module._modules.items():
            full = f"{name}.{child_name}" if name else child_name
            if child is not None and full not in self._apart:
                yield from self.blocks(child, full)

    def _divides(self, module: nn.Module) -> bool:
        if not any(child is not None and self._bytes[id(child)] for child in module._modules.values()):
            return False
        if not is_called(module):
            return True
        stays = any(kind.__name__ in self._whole for kind in type(module).__mro__)
        large = self._bytes[id(module)] > self._largest
        if isinstance(module, nn.TransformerEncoder):  # calls its layers, but sees by the weights of the first how to treat padding
            return large and not stays
        if _uses_its_children(module):
            return False
        return id(module) in self._divided_below or ((large or id(module) in self.stacks) and not stays)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def _uses_its_children(module: nn.Module) -> bool:
    """Return whether a module needs weights of children that do not run by themselves."""
    return _is_composite(module) or isinstance(module, nn.TransformerEncoder) or any(_is_bare(child) for child in module._modules.values())


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module of torch hands weights of its children to a function, or computes its own weights from theirs."""
    of_torch = type(module).__module__.startswith("torch.nn.modules.")
    calls_them = (*_CONTAINERS, nn.TransformerEncoder)
    return (of_torch and not isinstance(module, calls_them)) or "parametrizations" in module._modules


def _is_bare(module: nn.Module | None) -> bool:
    """Return whether tensors below are used without calling a module: those of a ParameterList, or of a module without forward."""
    if module is None or is_called(module):
        return False
    return any(True for _ in _own_tensors(module)) or any(map(_is_bare, module._modules.values()))
