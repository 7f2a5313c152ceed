"""What numbers take: the types that weights can have, the ways to train, and the states of optimizers. Nothing here imports torch.

Three ways to train are told apart. `float32`: everything in 32 bits. `mixed`: weights, gradients and states in 32 bits, computing (and so
activations) in 16; this is what `mixed_precision` does. `pure`: everything in 16 bits, which bfloat16 alone has the range for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from slipstream.config.names import nearest
from slipstream.errors import ConfigError

__all__ = ["GROUP", "KINDS", "OPTIMIZERS", "Kind", "Way", "kind_named", "optimizer_size", "ways_of"]

GROUP: Final = 128
"""How many numbers of a row share a scale in int4."""


@dataclass(frozen=True)
class Kind:
    """A type of weights."""

    name: str
    bits: int
    computes: str
    """The type of activations."""
    scales: int = 0
    """Bytes of scales (and zero points) for each group; for each row if they are not grouped. Quantised types alone have them."""
    grouped: bool = False


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "float32": Kind("float32", 32, "float32"),
        "float16": Kind("float16", 16, "float16"),
        "bfloat16": Kind("bfloat16", 16, "bfloat16"),
        "int8": Kind("int8", 8, "bfloat16", scales=2),
        "int4": Kind("int4", 4, "bfloat16", scales=4, grouped=True),
    }
)
"""In int8 and int4 the weights of linear layers are stored in so many bits, and the rest in 16."""

_OTHER_NAMES: Final = MappingProxyType(
    {"fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16"}
)


def kind_named(name: str) -> Kind:
    """The type of that name.

    >>> kind_named("bf16").name
    'bfloat16'
    """
    known = _OTHER_NAMES.get(name.lower(), name.lower())
    if known not in KINDS:
        near = nearest(name, KINDS)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--dtypes {name}: there is no such type here.\n{hint}Write one or more of {', '.join(KINDS)}.")
    return KINDS[known]


@dataclass(frozen=True)
class Way:
    """A way to train: `weights` is the type of weights, gradients and states, `computes` that of activations."""

    name: str
    weights: str
    computes: str

    @property
    def mixed(self) -> bool:
        """Whether copies of weights are made to compute with."""
        return self.weights != self.computes


def ways_of(kind: Kind) -> Sequence[Way]:
    """The ways to train in a type; none for types that have no gradients.

    >>> [way.name for way in ways_of(KINDS["bfloat16"])]
    ['bfloat16 mixed', 'bfloat16 pure']
    """
    if kind.scales:
        return []
    if kind.bits == 32:
        return [Way(kind.name, kind.name, kind.name)]
    mixed = Way(f"{kind.name} mixed", "float32", kind.name)
    return [mixed, Way(f"{kind.name} pure", kind.name, kind.name)] if kind.name == "bfloat16" else [mixed]


def _factored(shape: Sequence[int], width: int) -> int:
    if len(shape) < 2:
        return math.prod(shape) * width
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1]) * width


def _in_8_bits(shape: Sequence[int], width: int) -> int:
    """Two states of a byte each with a scale of 4 bytes for 256 of them; small tensors keep two states of 32 bits."""
    count = math.prod(shape)
    return 2 * (count + 4 * math.ceil(count / 256)) if count >= 4096 else 8 * count


OPTIMIZERS: Final[Mapping[str, Callable[[Sequence[int], int], int]]] = MappingProxyType(
    {
        "adamw": lambda shape, width: 2 * math.prod(shape) * width,
        "adam": lambda shape, width: 2 * math.prod(shape) * width,
        "sgd": lambda shape, width: 0,
        "sgd-momentum": lambda shape, width: math.prod(shape) * width,
        "adafactor": _factored,
        "adam8bit": _in_8_bits,
        "none": lambda shape, width: 0,
    }
)
"""Bytes of an optimizer's states for one tensor, by its shape and the bytes of one of its numbers."""


def optimizer_size(name: str, shape: Sequence[int], width: int) -> int:
    """Bytes of states for one tensor.

    >>> optimizer_size("adamw", (10, 20), 4), optimizer_size("adafactor", (10, 20), 4)
    (1600, 120)
    """
    return OPTIMIZERS[name](shape, width)
