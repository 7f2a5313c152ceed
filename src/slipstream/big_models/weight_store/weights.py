"""Mappings from names to offloaded weights: in memory, in memory-mapped safetensors files, or in an offload folder.

Every mapping returns CPU tensors. Those in files are views of mapped pages: nothing is read before it is used, and nothing is copied.
`bundle` returns the tensors of one module together, so that the store can prefetch the next ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.big_models.weight_store.store import PageBundle, WeightBlock, WeightStore
from slipstream.big_models.weight_store.transfer import BlockTransfer, DeviceBundle
from slipstream.checkpoint.tensor_bytes import BYTE_VIEWED_DTYPES, DTYPES, dtype_name, from_buffer
from slipstream.devices.table import CPU
from slipstream.errors import CheckpointError, ConfigError, StateError
from slipstream.files import strict_json
from slipstream.files.mapped_file import MappedFile, Span, open_mapped_file
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.sizes import parse_size

__all__ = [
    "INDEX_NAME", "ConvertedBundle", "FileTensor", "OffloadedWeightsLoader", "PrefixedDataset", "make_index_entry", "parse_description",
    "read_index",
]

INDEX_NAME = "index.json"
"""The index file of an offload folder."""

_TORCH_NAMES: Mapping[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in DTYPES}
_ALL_DTYPES: Mapping[str, torch.dtype] = {**_TORCH_NAMES, **BYTE_VIEWED_DTYPES}


class FileTensor(NamedTuple):
    """A tensor in a file: a view of its pages, and the dtype to convert it to (None: not converted)."""

    file: MappedFile
    span: Span
    view: torch.Tensor
    wanted: torch.dtype | None = None


class ConvertedBundle:
    """A bundle whose tensors are converted to a different dtype at every use; writes into them do not reach the file."""

    def __init__(self, bundle: PageBundle, wanted: Sequence[torch.dtype | None]) -> None:
        self.bundle, self.wanted = bundle, wanted
        self.arrive, self.give_back = bundle.arrive, bundle.give_back

    def take(self) -> Sequence[torch.Tensor]:
        """Return converted copies."""
        return [tensor.to(dtype or tensor.dtype) for tensor, dtype in zip(self.bundle.take(), self.wanted, strict=True)]


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name from a state dict in memory, from a folder of `offload_state_dict`, and from safetensors files that `index` names.

    `limit` is the memory that weights in files may take at a time while modules run on them (bytes, or "2GB"); None means no limit.

    >>> weights = OffloadedWeightsLoader({"bias": torch.ones(2)})
    >>> weights["bias"], list(weights)
    (tensor([1., 1.]), ['bias'])
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Any = None,
        *,
        limit: int | str | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError("OffloadedWeightsLoader needs weights from somewhere: give state_dict, save_folder or index.")
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self._own = index is None and save_folder is not None
        self.index: Mapping[str, Mapping[str, Any]] = index or {}
        if index is None and save_folder is not None:
            self.index = read_index(Path(save_folder), required=True)
        self.device = device
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.store = WeightStore(None if limit is None else parse_size(limit, "limit"))
        self._files: dict[str, MappedFile] = {}
        """Safetensors files by the names that the index has for them."""
        self._found: dict[str, FileTensor] = {}
        self._transfers: dict[torch.device, BlockTransfer] = {}
        self.copies_ahead = True
        """Whether an accelerator has room for the next block beside the one that runs."""
        self.first_names: Mapping[str, str] = {}
        """The first name of each weight by all its names, where a dispatch knows them."""
        self.keeps_alive: tuple[Any, ...] = ()
        """Temporary folders that contain its files."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        return self  # a copy of the model shares the files, and the weights are not changed

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        placed = self._placed(key)
        found = placed.view.detach()
        if placed.wanted is not None:
            found = found.to(placed.wanted)
        return found if self.device is None else found.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "A model with offloaded weights cannot be pickled (torch.save(model) and processes that are spawned do that): its weights are "
            "pages of files that this process has open. Save the weights: save_model(model, folder), or model.state_dict()."
        )

    def entry_of(self, key: str) -> dict[str, Any] | None:
        """Return the index entry of a weight in a safetensors file, with its full path; None if it is in memory or in a `.dat` file."""
        entry = {} if key in self.state_dict else self.index[key]
        if "safetensors_file" not in entry:
            return None
        file = self._opened(entry["safetensors_file"])
        return {"weight_name": key, **entry, "safetensors_file": str(Path(file.where).absolute())}

    def use_files_of(self, other: OffloadedWeightsLoader) -> None:
        """Use the files that another loader has open: their names may refer to different files by now."""
        self._files = {**{str(Path(file.where).absolute()): file for file in other._files.values()}, **self._files}

    def use_tensors(self, tensors: Mapping[str, FileTensor]) -> None:
        """Use tensors of files that the caller has mapped, instead of looking up the entries that the index has for their names."""
        self._found.update(tensors)
        self._files.update({self.index[name]["safetensors_file"]: tensor.file for name, tensor in tensors.items()})

    def find(self, names: Iterable[str]) -> None:
        """Raise if one of these weights is not in the file that the index names."""
        for name in names:
            if name not in self.state_dict:
                self._placed(name)

    def size_of(self, names: Iterable[str]) -> int:
        """Return the bytes of files that are in memory when these weights are used together, as the store counts them."""
        placed = [self._placed(name) for name in names if name not in self.state_dict]
        return WeightBlock("", (), [(place.file, place.span) for place in placed]).size

    def bundle(self, names: Sequence[str], device: Any) -> PageBundle | ConvertedBundle:
        """Return the tensors that a module needs together, for the device that it runs on."""
        placed = [None if name in self.state_dict else self._placed(name) for name in names]
        tensors = [self.state_dict[name] if place is None else place.view for name, place in zip(names, placed, strict=True)]
        spans = [None if place is None else (place.file, place.span) for place in placed]
        wanted = [None if place is None else place.wanted for place in placed]
        block = self.store.add(WeightBlock(_common_module(names), tensors, spans))
        where = torch.device(CPU.type if device is None else device)
        found = PageBundle(self.store, block) if where.type == CPU.type else DeviceBundle(self.store, block, self._transfer(where))
        return found if not any(wanted) else ConvertedBundle(found, wanted)

    def _transfer(self, device: torch.device) -> BlockTransfer:
        if device not in self._transfers:
            self._transfers[device] = BlockTransfer(device, ahead=self.copies_ahead)
        return self._transfers[device]

    def _placed(self, key: str) -> FileTensor:
        known = self._found.get(key)
        if known is None:
            entry = self.index[key]
            find = self._find if "safetensors_file" in entry else self._find_alone
            known = self._found[key] = find(key, entry)
        return known

    def _find(self, key: str, entry: Mapping[str, Any]) -> FileTensor:
        """Return a tensor in a safetensors file."""
        wanted = _TORCH_NAMES.get(entry.get("dtype", ""))
        if wanted is None and entry.get("dtype") is not None:
            raise CheckpointError(f"The index of offloaded weights has {key!r} with dtype {entry['dtype']!r}, which is not a torch dtype.")
        file = self._opened(entry["safetensors_file"])
        name = entry.get("weight_name", key)
        if (found := file.layout.entries.get(name)) is None:
            raise CheckpointError(f"{file.where} has no tensor {name!r}, which the index of offloaded weights names.")
        span = file.layout.span(found)
        view = _view(file, found.dtype, found.shape, span)
        return FileTensor(file, span, view, None if wanted is view.dtype else wanted)

    def _find_alone(self, key: str, entry: Mapping[str, Any]) -> FileTensor:
        """Return a tensor in a `.dat` file, as `offload_weight` writes it."""
        if self.save_folder is None:
            raise CheckpointError(f"The index has {key!r} as a file of an offload folder: give save_folder too.")
        index = str(Path(self.save_folder) / INDEX_NAME)
        dtype, shape = parse_description(entry, f"{key!r} in {index}")
        if dtype not in DTYPES:
            raise CheckpointError(f"{index} has {key!r} with dtype {dtype_name(dtype)!r}, which is not mapped.")
        file = self._map(check_name(f"{key}.dat", index), inside=True)
        count = math.prod(shape) * dtype.itemsize
        if file.size < count:
            raise CheckpointError(f"{file.where} has {file.size} bytes, and a tensor of {dtype} with shape {list(shape)} has {count}.")
        return FileTensor(file, (0, count), _view(file, DTYPES[dtype], shape, (0, count)))

    def _opened(self, name: Any) -> MappedFile:
        if not isinstance(name, (str, os.PathLike)):
            raise CheckpointError(f"The index of offloaded weights names the file {name!r}, which is not a path.")
        known = self._files.get(os.fspath(name))
        if known is None:
            known = self._files[os.fspath(name)] = self._map(os.fspath(name), inside=self._own)
        return known

    def _map(self, name: str, *, inside: bool) -> MappedFile:
        folder = None if self.save_folder is None else Path(self.save_folder)
        if inside and folder is not None:  # the name comes from a file: it must not lead out of the folder
            with ConfinedFolder(folder) as held:
                return MappedFile(held.open(check_name(name, str(folder / INDEX_NAME))), str(folder / name))
        within = None if folder is None else folder / name
        return open_mapped_file(within if within is not None and within.exists() else Path(name))


@torch.inference_mode(False)  # tensors of that mode could not be weights outside of it
def _view(file: MappedFile, dtype: str, shape: Sequence[int], span: Span) -> torch.Tensor:
    return from_buffer(file.buffer, dtype, shape, *span)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The weights below one module: `dataset` without the `prefix` of its names.

    >>> PrefixedDataset({"layer.bias": 1, "head.bias": 2}, "layer.")["bias"]
    1
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(key.startswith(self.prefix) for key in self.dataset)

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset  # without it a Mapping would read the tensor

    def __getattr__(self, name: str) -> Any:
        if name != "bundle" or not hasattr(self.__dict__.get("dataset"), "bundle"):
            raise AttributeError(f"a PrefixedDataset has no {name}")
        return lambda names, device: self.dataset.bundle([f"{self.prefix}{name}" for name in names], device)  # type: ignore[attr-defined]


def read_index(folder: Path, *, required: bool = False) -> dict[str, dict[str, Any]]:
    """Return the index of an offload folder; without an index file return {}, or raise if it is required."""
    if not required and not (folder / INDEX_NAME).exists():
        return {}
    with ConfinedFolder(folder) as held:
        content = strict_json.parse(held.read(INDEX_NAME, strict_json.LARGEST), str(folder / INDEX_NAME))
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise CheckpointError(
            f"{folder / INDEX_NAME} is not an index of offloaded weights, which maps names to entries. Remove it, or use another folder."
        )
    return content


def parse_description(info: Mapping[str, Any], where: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape in an entry of an index."""
    dtype, shape = _ALL_DTYPES.get(str(info.get("dtype"))), info.get("shape")
    if dtype is None or not isinstance(shape, (list, tuple)) or not all(type(size) is int and size >= 0 for size in shape):
        raise CheckpointError(
            f"The index describes {where} as {dict(info)!r:.200}, which is not a tensor. "
            "An entry needs a dtype such as 'float32' and a shape such as [2, 3]."
        )
    return dtype, tuple(shape)


def make_index_entry(file: str, name: str, dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Any]:
    """Return the index entry of the tensor `name` in a safetensors file.

    >>> make_index_entry("/models/a.safetensors", "bias", torch.float16, (2,))
    {'safetensors_file': '/models/a.safetensors', 'weight_name': 'bias', 'dtype': 'float16', 'shape': [2]}
    """
    return {"safetensors_file": file, "weight_name": name, "dtype": dtype_name(dtype), "shape": list(shape)}


def _common_module(names: Sequence[str]) -> str:
    """Return the module that names belong to, for messages."""
    return os.path.commonprefix(list(names)).rpartition(".")[0] or (names[0] if names else "(nothing)")
