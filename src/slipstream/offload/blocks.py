"""Into which modules an offloaded part of a model is cut: each of them gets its weights together, when it runs.

Larger blocks cost less (one look-up for many weights, long reads), smaller ones take less memory at a time. A module is cut where that
is safe: only what is called by itself can be given weights by itself. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

__all__ = ["LARGEST", "Part", "blocks_of", "is_called", "user_of"]

LARGEST: Final = 256 << 20
"""Bytes of a block, if nothing else says how large it may be."""

_CALL_THEIR_CHILDREN: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerDecoder)
"""Of the modules of torch itself: those that leave the weights of their children alone."""


class Part(NamedTuple):
    """One block: a module with all below it, or (`whole` is False) the tensors that it holds itself."""

    name: str
    whole: bool


def blocks_of(
    model: nn.Module,
    entry_name: str,
    *,
    largest: int | None = None,
    whole: Collection[str] = (),
    apart: Collection[str] = (),
) -> list[Part]:
    """The blocks of the module `entry_name`, in the model's order; those without tensors are left out.

    A module is divided if it has more than `largest` bytes, if it is never called itself (a ModuleList), if it is the whole model or has
    a stack of blocks below it (a ModuleList, or a Sequential of modules with parts of their own), or if one of the modules named in
    `apart` is below it: those are others' business and left out. It is not divided if its class is named in `whole`, or if it uses
    the weights of its children itself.

    >>> model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    >>> [name for name, _ in blocks_of(model, "")]
    ['blocks.0', 'blocks.1', 'head']
    """
    cut = _Cut(LARGEST if largest is None else largest, frozenset(whole), frozenset(apart))
    module = model.get_submodule(entry_name)
    cut.measure(module, entry_name)
    if not entry_name:
        cut.stacks.add(id(model))  # parts of a whole model are called by themselves too: an encoder, a head
    return list(cut.parts(module, entry_name))


def is_called(module: nn.Module) -> bool:
    """Whether a module can be called at all: a list of modules, or of parameters, is not.

    >>> is_called(nn.Linear(1, 1)), is_called(nn.ModuleList())
    (True, False)
    """
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def user_of(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The outermost module around (or of) this name that uses weights of the modules below it itself; None if there is none.

    >>> user_of(dict(nn.Sequential(nn.MultiheadAttention(2, 1)).named_modules()), "0.out_proj")
    '0'
    """
    words = name.split(".")
    around = (".".join(words[:count]) for count in range(len(words) + 1))
    return next((one for one in around if modules[one]._modules and _is_composite(modules[one])), None)


class _Cut:
    def __init__(self, largest: int, whole: frozenset[str], apart: frozenset[str]) -> None:
        self._largest, self._whole, self._apart = largest, whole, apart
        self._bytes: dict[int, int] = {}
        self._divided_below: set[int] = set()
        """Modules with something below them that is left out."""
        self.stacks: set[int] = set()
        """Modules with a stack of blocks in or below them."""
        self._seen: set[int] = set()

    def measure(self, module: nn.Module, name: str) -> int:
        """The bytes below a module, remembered for all modules below."""
        total = sum(tensor.numel() * tensor.element_size() for tensor in _own(module))
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

    def parts(self, module: nn.Module, name: str) -> Iterator[Part]:
        if id(module) in self._seen or not self._bytes[id(module)]:
            return
        self._seen.add(id(module))
        if not self._divides(module):
            yield Part(name, True)
            return
        if any(True for _ in _own(module)):
            yield Part(name, False)
        for child_name, child in module._modules.items():
            full = f"{name}.{child_name}" if name else child_name
            if child is not None and full not in self._apart:
                yield from self.parts(child, full)

    def _divides(self, module: nn.Module) -> bool:
        if not any(child is not None and self._bytes[id(child)] for child in module._modules.values()):
            return False
        if not is_called(module):
            return True
        stays = any(one.__name__ in self._whole for one in type(module).__mro__)
        large = self._bytes[id(module)] > self._largest
        if isinstance(module, nn.TransformerEncoder):  # calls its layers, but sees by the weights of the first how to treat padding
            return large and not stays
        if _uses_its_children(module):
            return False
        return id(module) in self._divided_below or ((large or id(module) in self.stacks) and not stays)


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def _uses_its_children(module: nn.Module) -> bool:
    """Whether a module needs weights of children that do not run by themselves."""
    return _is_composite(module) or isinstance(module, nn.TransformerEncoder) or any(_is_bare(child) for child in module._modules.values())


def _is_composite(module: nn.Module) -> bool:
    """Whether it is one of torch that hands weights of its children to a function, or computes its own weights from theirs."""
    of_torch = type(module).__module__.startswith("torch.nn.modules.")
    calls_them = (*_CALL_THEIR_CHILDREN, nn.TransformerEncoder)
    return (of_torch and not isinstance(module, calls_them)) or "parametrizations" in module._modules


def _is_bare(module: nn.Module | None) -> bool:
    """Whether tensors below are reached without a call of any module: those of a ParameterList, or of a module without forward."""
    if module is None or is_called(module):
        return False
    return any(True for _ in _own(module)) or any(map(_is_bare, module._modules.values()))
