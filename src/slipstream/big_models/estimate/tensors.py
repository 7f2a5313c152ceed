"""The tensors of a model with name, shape and dtype, read from file headers, and what they take in each dtype and with each optimizer.

Only the headers of weights files are read, no weights, and nothing in a file is executed. Safetensors files and our checkpoints need no
torch; files of `torch.save` and sharded checkpoints go through the readers of `checkpoint/`. There are three training modes: `float32`,
`mixed` (weights, gradients and states in 32 bits, activations in 16) and `pure` (all in 16 bits). Importing this does not import torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slipstream.checkpoint.manifest import MANIFEST, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, parse_manifest
from slipstream.config.names import nearest
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import strict_json
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.safetensors_layout import ITEM_SIZE, SafetensorsLayout, read_layout

__all__ = [
    "EstimatedTensor", "EstimatedTensors", "GROUP_SIZE", "OPTIMIZERS", "TrainingMode", "WEIGHT_DTYPES", "WeightDtype",
    "find_layer", "find_repeated_blocks", "has_weights", "list_training_modes", "parse_weight_dtype",
    "read_config", "read_tensors",
]


GROUP_SIZE: Final = 128
"""How many numbers of a row share a scale in int4."""


@dataclass(frozen=True)
class WeightDtype:
    """A dtype of weights."""

    name: str
    bits: int
    computes: str
    """The dtype of activations."""
    scales: int = 0
    """Bytes of scales (and zero points) for each group, or for each row if they are not grouped; 0 unless quantized."""
    grouped: bool = False


WEIGHT_DTYPES: Final[Mapping[str, WeightDtype]] = MappingProxyType(
    {
        "float32": WeightDtype("float32", 32, "float32"),
        "float16": WeightDtype("float16", 16, "float16"),
        "bfloat16": WeightDtype("bfloat16", 16, "bfloat16"),
        "int8": WeightDtype("int8", 8, "bfloat16", scales=2),
        "int4": WeightDtype("int4", 4, "bfloat16", scales=4, grouped=True),
    }
)
"""In int8 and int4 only the weights of linear layers are stored in 8 or 4 bits; all others are stored in 16."""

_ALIASES: Final = MappingProxyType(
    {"fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16"}
)


def parse_weight_dtype(name: str) -> WeightDtype:
    """Return the dtype of that name.

    >>> parse_weight_dtype("bf16").name
    'bfloat16'
    """
    known = _ALIASES.get(name.lower(), name.lower())
    if known not in WEIGHT_DTYPES:
        near = nearest(name, WEIGHT_DTYPES)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--dtypes {name}: unknown type.\n{hint}Write one or more of {', '.join(WEIGHT_DTYPES)}.")
    return WEIGHT_DTYPES[known]


@dataclass(frozen=True)
class TrainingMode:
    """A training mode: `weights` is the dtype of weights, gradients and optimizer states, `computes` that of activations."""

    name: str
    weights: str
    computes: str

    @property
    def mixed(self) -> bool:
        """Whether autocast makes 16-bit copies of the weights."""
        return self.weights != self.computes


def list_training_modes(kind: WeightDtype) -> Sequence[TrainingMode]:
    """Return the training modes of a dtype; none for dtypes without gradients.

    >>> [mode.name for mode in list_training_modes(WEIGHT_DTYPES["bfloat16"])]
    ['bfloat16 mixed', 'bfloat16 pure']
    """
    if kind.scales:
        return []
    if kind.bits == 32:
        return [TrainingMode(kind.name, kind.name, kind.name)]
    mixed = TrainingMode(f"{kind.name} mixed", "float32", kind.name)
    return [mixed, TrainingMode(f"{kind.name} pure", kind.name, kind.name)] if kind.name == "bfloat16" else [mixed]


def _adafactor_size(shape: Sequence[int], width: int) -> int:
    if len(shape) < 2:
        return math.prod(shape) * width
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1]) * width


def _adamw_8bit_size(shape: Sequence[int], width: int) -> int:
    """Return the bytes of two states of a byte each with a scale of 4 bytes for 256 of them; small tensors keep 32 bits."""
    count = math.prod(shape)
    return 2 * (count + 4 * math.ceil(count / 256)) if count >= 4096 else 8 * count


OPTIMIZERS: Final[Mapping[str, Callable[[Sequence[int], int], int]]] = MappingProxyType(
    {
        "adamw": lambda shape, width: 2 * math.prod(shape) * width,
        "adam": lambda shape, width: 2 * math.prod(shape) * width,
        "sgd": lambda shape, width: 0,
        "sgd-momentum": lambda shape, width: math.prod(shape) * width,
        "adafactor": _adafactor_size,
        "adam8bit": _adamw_8bit_size,
        "none": lambda shape, width: 0,
    }
)
"""Bytes of an optimizer's states for one tensor, from its shape and the bytes of an element."""


@dataclass(frozen=True, slots=True)
class EstimatedTensor:
    """One tensor; `dtype` is its name in a safetensors header."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    linear: bool = False
    """Whether it is the weight of a linear layer, which quantization replaces."""
    layer: str | None = None
    """The layer it belongs to, if its name does not say so."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Bytes in the stored dtype."""
        return self.count * ITEM_SIZE[self.dtype]

    @property
    def floating(self) -> bool:
        """Whether converting the model to a dtype converts it; tensors that are packed already are not."""
        return self.dtype.startswith(("F", "BF")) and not self.dtype.startswith("F8_")

    def size(self, kind: WeightDtype) -> int:
        """Return the bytes in a model of that dtype.

        >>> weight = EstimatedTensor("up.weight", (256, 128), "F32", linear=True)
        >>> [weight.size(WEIGHT_DTYPES[name]) for name in ("float32", "bfloat16", "int8", "int4")]
        [131072, 65536, 33280, 17408]
        """
        if not self.floating:
            return self.stored
        if kind.scales and self.linear:
            columns = self.shape[-1]
            rows = self.count // max(1, columns)
            groups = rows * (math.ceil(columns / GROUP_SIZE) if kind.grouped else 1)
            return math.ceil(self.count * kind.bits / 8) + groups * kind.scales
        return self.count * (2 if kind.scales else kind.bits // 8)


@dataclass(frozen=True)
class EstimatedTensors:
    """All tensors of a model."""

    tensors: Sequence[EstimatedTensor]
    notes: tuple[str, ...] = field(default=())

    def size(self, kind: WeightDtype) -> int:
        """Return the bytes of all weights and buffers."""
        return sum(tensor.size(kind) for tensor in self.tensors)

    @property
    def count(self) -> int:
        """Elements of all floating point tensors."""
        return sum(tensor.count for tensor in self.tensors if tensor.floating)

    @property
    def stored(self) -> dict[str, int]:
        """Bytes by stored dtype, the largest first."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.stored
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def trained(self) -> list[EstimatedTensor]:
        """The tensors that have gradients."""
        return [tensor for tensor in self.tensors if tensor.trainable and tensor.floating]

    def largest_layer(self, kind: WeightDtype) -> tuple[str, int]:
        """Return name and bytes of the largest layer.

        >>> names = ["embed.weight", "layers.0.up.weight", "layers.0.down.weight"]
        >>> EstimatedTensors([EstimatedTensor(name, (4, 4), "F32") for name in names]).largest_layer(WEIGHT_DTYPES["float32"])
        ('layers.0', 128)
        """
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            layer = find_layer(tensor.name) if tensor.layer is None else tensor.layer
            sizes[layer] = sizes.get(layer, 0) + tensor.size(kind)
        return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def find_layer(name: str) -> str:
    """Return the layer that a tensor belongs to, by its name.

    >>> find_layer("model.layers.7.mlp.up.weight"), find_layer("model.norm.weight"), find_layer("scale")
    ('model.layers.7', 'model.norm', '')
    """
    words = name.split(".")
    for place, word in enumerate(words[:-1]):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1])


def find_repeated_blocks(names: Iterable[str]) -> list[str]:
    """Return, of the names of modules, those of repeated blocks.

    >>> find_repeated_blocks(["embed", "layers", "layers.0", "layers.0.up", "layers.1", "head"])
    ['layers.0', 'layers.1']
    """
    return [name for name in names if find_layer(f"{name}.weight") == name and name.rpartition(".")[2].isdigit()]


_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_LARGEST_MANIFEST: Final = 64 << 20
_LARGEST_CONFIG: Final = 16 << 20
_NOT_LINEAR: Final = ("embed", "wte", "wpe", "head", "norm", "ln_", "shared", "position", "score", "classifier", "conv", "router")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a file that could hold weights."""
    return any(path.name == MANIFEST or path.name.endswith((*_SUFFIXES, ".index.json")) for path in folder.iterdir())


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a config file."""
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise CheckpointError(f"{path} is larger than a config ({_LARGEST_CONFIG:,} bytes at most). Give the config.json of a model.")
        content = strict_json.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not contain a mapping. Give the config.json of a model.")
    return content


def read_tensors(path: Path, config: Mapping[str, Any] | None = None) -> EstimatedTensors:
    """Return the tensors of the weights at a path: a file, an index, or a folder.

    >>> import tempfile
    >>> from slipstream.files.safetensors_layout import plan_layout
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     _ = file.write_bytes(plan_layout([("up.weight", "BF16", (4, 8))])[0] + bytes(64))
    ...     read_tensors(Path(folder)).tensors
    [EstimatedTensor(name='up.weight', shape=(4, 8), dtype='BF16', trainable=True, linear=True, layer=None)]
    """
    layouts = _layouts(path)
    if layouts is None:
        found = _read_with_torch(path)
    else:
        found = [
            _make_tensor(entry.name, entry.shape, entry.dtype)
            for layout, names in layouts
            for entry in layout.entries.values()
            if names is None or entry.name in names
        ]
    tensors = list({tensor.name: tensor for tensor in found}.values())
    kept, notes = _drop_tied_head(tensors, config or {})
    packed = sum(not tensor.floating for tensor in kept)
    if packed:
        notes.append(f"{packed:,} tensors are not plain floating point numbers and are counted as they are stored, in every type.")
    return EstimatedTensors(kept, tuple(notes))


def _make_tensor(name: str, shape: tuple[int, ...], dtype: str) -> EstimatedTensor:
    *before, last = name.split(".")
    module = before[-1] if before else ""
    linear = len(shape) == 2 and last == "weight" and not any(word in module.lower() for word in _NOT_LINEAR)
    return EstimatedTensor(name, shape, dtype, linear=linear)


def _layouts(path: Path) -> list[tuple[SafetensorsLayout, set[str] | None]] | None:
    """Return the layouts of safetensors files, each with the names to count (None for all); None for weights in another format."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _read_index(path)
        return [(_layout(path), None)] if path.name.endswith(".safetensors") else None
    if (path / MANIFEST).is_file():
        with ConfinedFolder(path) as held:
            manifest = parse_manifest(held.read(MANIFEST, _LARGEST_MANIFEST), str(path / MANIFEST))
        if not manifest.models or manifest.models[0].shards:
            return None
        return [(_layout(path / check_name(name, MANIFEST)), None) for name in manifest.models[0].files]
    names = sorted(file.name for file in path.iterdir())
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        if name in names:
            return _layouts(path / name)
    found = [name for name in names if name.endswith(_SUFFIXES)]
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    only = indices or found
    return _layouts(path / only[0]) if len(only) == 1 and not any(name.endswith(".bin.index.json") for name in names) else None


def _read_index(path: Path) -> list[tuple[SafetensorsLayout, set[str] | None]] | None:
    content = strict_json.parse(path.read_bytes(), str(path))
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) and file.endswith(".safetensors") for file in places.values()):
        return None  # the readers of `checkpoint/` read it, or say what is wrong with it
    names: dict[str, set[str]] = {}
    for name, file in places.items():
        names.setdefault(check_name(file, str(path)), set()).add(name)
    return [(_layout(path.parent / file), held) for file, held in names.items()]


def _layout(path: Path) -> SafetensorsLayout:
    try:
        with open(path, "rb") as file:

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(count)

            return read_layout(read, os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _read_with_torch(path: Path) -> list[EstimatedTensor]:
    from slipstream.checkpoint.tensor_bytes import DTYPES, memory_identity
    from slipstream.checkpoint.weight_source import find_weights

    source = find_weights(path)
    seen: set[Any] = set()
    tensors = []
    for name in source.files:
        file = source.open(name, verify=False)
        for key, tensor in (file.forms or file.tensors).items():
            if (memory := memory_identity(tensor)) not in seen:  # the other names of a tied weight are the same memory
                seen.add(memory)
                tensors.append(_make_tensor(key, tuple(tensor.shape), DTYPES.get(tensor.dtype, "U8")))
    return tensors


def _drop_tied_head(tensors: Sequence[EstimatedTensor], config: Mapping[str, Any]) -> tuple[list[EstimatedTensor], list[str]]:
    """Return the tensors without a stored head that is tied to the embedding, and a note about it."""
    if config.get("tie_word_embeddings") is not True:
        return list(tensors), []
    embeddings = {tensor.shape for tensor in tensors if "embed" in tensor.name or "wte" in tensor.name}
    tied = sorted(tensor.name for tensor in tensors if tensor.name.endswith("lm_head.weight") and tensor.shape in embeddings)
    notes = [f"{', '.join(tied)} is tied to the embedding and is counted once."] if tied else []
    return [tensor for tensor in tensors if tensor.name not in tied], notes
