"""What a model consists of: its tensors by name, shape and type, each of them once; and its layers, judged by the names.

A layer is a block that repeats (`model.layers.7`: everything below the first number in a name), or else a module that holds tensors of its
own. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.files.tensors import ITEM_SIZE
from slipstream.offload.estimate.kinds import GROUP, Kind

__all__ = ["Part", "Parts", "blocks_in", "layer_of"]

_FLOATING = ("F", "BF")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor; `dtype` is the name that a safetensors header would give its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    linear: bool = False
    """The weight of a linear layer, which quantising replaces."""
    layer: str | None = None
    """Where it is known better than by its name."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Bytes as it is."""
        return self.count * ITEM_SIZE[self.dtype]

    @property
    def floating(self) -> bool:
        """Whether it takes on the type that a model is converted to; what is packed already does not."""
        return self.dtype.startswith(_FLOATING) and not self.dtype.startswith("F8_")

    def size(self, kind: Kind) -> int:
        """Bytes in a model of that kind.

        >>> from slipstream.offload.estimate.kinds import KINDS
        >>> weight = Part("up.weight", (256, 128), "F32", linear=True)
        >>> [weight.size(KINDS[name]) for name in ("float32", "bfloat16", "int8", "int4")]
        [131072, 65536, 33280, 17408]
        """
        if not self.floating:
            return self.stored
        if kind.scales and self.linear:
            columns = self.shape[-1]
            rows = self.count // max(1, columns)
            groups = rows * (math.ceil(columns / GROUP) if kind.grouped else 1)
            return math.ceil(self.count * kind.bits / 8) + groups * kind.scales
        return self.count * (2 if kind.scales else kind.bits // 8)


@dataclass(frozen=True)
class Parts:
    """All tensors of a model."""

    parts: Sequence[Part]
    notes: tuple[str, ...] = field(default=())

    def size(self, kind: Kind) -> int:
        """Bytes of all weights and buffers."""
        return sum(part.size(kind) for part in self.parts)

    @property
    def count(self) -> int:
        """Elements of all floating point tensors."""
        return sum(part.count for part in self.parts if part.floating)

    @property
    def stored(self) -> dict[str, int]:
        """Bytes as they are, by type; the type with most of them first."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.dtype] = found.get(part.dtype, 0) + part.stored
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def trained(self) -> list[Part]:
        """Those that have gradients."""
        return [part for part in self.parts if part.trainable and part.floating]

    def largest_layer(self, kind: Kind) -> tuple[str, int]:
        """Name and bytes of the largest layer.

        >>> from slipstream.offload.estimate.kinds import KINDS
        >>> names = ["embed.weight", "layers.0.up.weight", "layers.0.down.weight"]
        >>> Parts([Part(name, (4, 4), "F32") for name in names]).largest_layer(KINDS["float32"])
        ('layers.0', 128)
        """
        sizes: dict[str, int] = {}
        for part in self.parts:
            layer = part.layer if part.layer is not None else layer_of(part.name)
            sizes[layer] = sizes.get(layer, 0) + part.size(kind)
        return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to, by its name.

    >>> layer_of("model.layers.7.mlp.up.weight"), layer_of("model.norm.weight"), layer_of("scale")
    ('model.layers.7', 'model.norm', '')
    """
    words = name.split(".")
    for place, word in enumerate(words[:-1]):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1])


def blocks_in(names: Iterable[str]) -> list[str]:
    """Of the names of modules, those of the blocks that repeat.

    >>> blocks_in(["embed", "layers", "layers.0", "layers.0.up", "layers.1", "head"])
    ['layers.0', 'layers.1']
    """
    return [name for name in names if layer_of(f"{name}.weight") == name and name.rpartition(".")[2].isdigit()]
