"""A model's weights alone: `save_model` into a folder that other libraries read, `load_weights` from whatever is there.

Saving keeps tied weights once, writes every file beside its place first, and leaves what was there before as it is until all of them are
on the disk. Loading finds out whether everything fits before a tensor of the model changes, and needs no memory but that of the model:
files are mapped, and let go of one after the other. No pickle is written unless it is asked for by name, and none is ever run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.fit import METADATA, LoadReport, bare, check_fit, give_dtype, load_into, may_translate, tied_names
from slipstream.checkpoint.format import MANIFEST, FileEntry
from slipstream.checkpoint.names import MODEL_NAME, SAFE_MODEL_NAME, SAFE_WEIGHTS_NAME
from slipstream.checkpoint.placing import Placing, local_path
from slipstream.checkpoint.plain import write_part
from slipstream.checkpoint.raw import DTYPES, dtype_name
from slipstream.checkpoint.sources import Source, find
from slipstream.checkpoint.weights import Weights, index_bytes, shard_names, shards, split, write_weights
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.disk import Disk
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger
from slipstream.runtime.progress import Bar, bar, counted, waiting

__all__ = ["clean_state_dict_for_safetensors", "dtype_of", "load_weights", "save_model"]

_SHARD: Final = r"-\d{5}-of-\d{5}"


def save_model(
    model: torch.nn.Module | Mapping[str, Any],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    disk: Disk | None = None,
) -> None:
    """Writes the weights of a model, or a state dict, as `model.safetensors`, or as several files with an index if they are larger.

    With `safe_serialization=False` as `pytorch_model.bin`, by `torch.save`. Other files in the folder stay; those of an earlier save
    of the same kind are replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     os.listdir(folder)
    ['model.safetensors']
    """
    folder = local_path(save_directory, "save_directory")
    largest = parse_size(max_shard_size)
    _check_folder(folder)
    state = bare(model).state_dict() if isinstance(model, torch.nn.Module) else model
    if not isinstance(state, Mapping):
        raise ConfigError(f"save_model was given a {type(model).__qualname__}. Pass a torch.nn.Module, or its state_dict().")
    weights = split(state, f"the weights of {type(model).__name__}")
    weights.extra.pop(METADATA, None)  # versions of layers matter for going on with a run; files that are passed on have none
    total = sum(tensor.nbytes for tensor in weights.tensors.values())
    with Placing(folder, disk or Disk()) as files, bar(total, "saving", "B") as shown:
        names = _add_safe(files, weights, largest, shown) if safe_serialization else _add_torch(files, weights, state, largest, shown)
        base = SAFE_MODEL_NAME if safe_serialization else MODEL_NAME
        if any(re.search(_SHARD, name) and (folder / name).exists() for name in names):
            files.remove([name for name in _stale(folder, base, ()) if name.endswith(".index.json")])  # else it would cover old and new
        files.place()
        files.remove(_stale(folder, base, names))
    if not safe_serialization and (folder / SAFE_WEIGHTS_NAME).exists():
        get_logger(__name__).warning(f"{folder / SAFE_WEIGHTS_NAME} of an earlier save is there too, and is what will be read first.")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"save_directory={str(folder)!r} is a file. Write the path of a folder; it is made if it is not there.")
    if (folder / MANIFEST).exists():
        raise ConfigError(
            f"save_directory={str(folder)!r} is a checkpoint of save_state, whose files are not to be changed. Write to another folder."
        )


def _add_safe(files: Placing, weights: Weights, largest: int, shown: Bar) -> set[str]:
    def add(name: str, chunks: Iterable[Any], size: int) -> FileEntry:
        return files.add(name, counted(chunks, shown.update), size)

    names = set()
    if weights.extra:
        names.add(write_part(files.add, f"{SAFE_MODEL_NAME}_extra", weights.extra, "the state dict")[0])
    return names | write_weights(add, SAFE_MODEL_NAME, weights, largest).entries.keys()


def _add_torch(files: Placing, weights: Weights, state: Mapping[str, Any], largest: int, shown: Bar) -> set[str]:
    """Tied weights stand in the file of the one that they are tied to: there they cost nothing."""
    groups = shards(weights.tensors, largest)
    names = shard_names(MODEL_NAME, len(groups), "bin")
    others: dict[str, list[str]] = {}
    for other, kept in weights.aliases.items():
        others.setdefault(kept, []).append(other)
    for name, group in zip(names, groups, strict=True):
        held = {one: state[one] for kept in group for one in (kept, *others.get(kept, ()))}
        if name == names[0]:
            held |= weights.extra
        files.adopt(name, lambda path, held=held: torch.save(held, path))  # type: ignore[misc]
        shown.update(sum(weights.tensors[kept].nbytes for kept in group))
    if len(names) == 1:
        return set(names)
    everywhere = {name: [one for kept in group for one in (kept, *others.get(kept, ()))] for name, group in zip(names, groups, strict=True)}
    everywhere[names[0]] += weights.extra
    stored = {one: state[one] for group in everywhere.values() for one in group if isinstance(state[one], torch.Tensor)}
    data = index_bytes(everywhere, stored)
    files.add(f"{MODEL_NAME}.bin.index.json", [data], len(data))
    return {*names, f"{MODEL_NAME}.bin.index.json"}


def _stale(folder: Path, base: str, new: Collection[str]) -> list[str]:
    """Files of an earlier save of the same kind that are not part of this one; the index first, so that nothing points at what is gone."""
    suffix = "safetensors" if base == SAFE_MODEL_NAME else "bin"
    ours = re.compile(rf"{base}({_SHARD})?\.{suffix}(\.index\.json)?|{base}_extra\.(json|safetensors)", re.ASCII)
    old = [name for name in os.listdir(folder) if ours.fullmatch(name) and name not in new]
    return sorted(old, key=lambda name: (not name.endswith(".index.json"), name))


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same state dict with every tensor once and each in one piece, as the safetensors package wants them; it says what it left out.

    >>> shared = torch.ones(2)
    >>> list(clean_state_dict_for_safetensors({"embed": shared, "head": shared}))
    ['embed']
    """
    weights = split(state_dict, "the state dict")
    weights.extra.pop(METADATA, None)
    if weights.aliases:
        pairs = ", ".join(f"{other} (is {kept})" for other, kept in list(weights.aliases.items())[:5])
        get_logger(__name__).warning(f"{len(weights.aliases)} names of tied weights are left out: {pairs}. Tie them again after loading.")
    kept = {**weights.tensors, **weights.extra}
    return {name: _contiguous(kept[name]) for name in state_dict if name in kept}


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def load_weights(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
    *,
    strict: bool = False,
) -> LoadReport:
    """Loads weights into a model, wherever its tensors are; those on the meta device get memory.

    `checkpoint` is a file (safetensors, or of torch.save), an index, or a folder: one of `save_model`, of `save_state`, or of another
    library. Names that are missing or unexpected are a warning, or an error with `strict=True`, or if they would leave weights on the meta
    device; shapes that do not fit are an error. If there is an error, nothing has changed. `dtype` is what the model's floating point
    weights become.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     load_weights(torch.nn.Linear(2, 2), folder)
    LoadReport(missing=(), unexpected=(), mismatched={}, renamed={})
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"load_checkpoint_in_model was given a {type(model).__qualname__}. Pass a torch.nn.Module.")
    wanted = dtype_of(dtype)
    if keep_in_fp32_modules is not None and (wanted is None or isinstance(keep_in_fp32_modules, str)):
        raise ConfigError(f"keep_in_fp32_modules={keep_in_fp32_modules!r} is a list of names of modules, and needs dtype beside it.")
    path = local_path(checkpoint, "checkpoint")
    with waiting(f"loading {path.name}"):
        return _load(bare(model), find(path), str(path), wanted, tuple(keep_in_fp32_modules or ()), strict=strict)


def dtype_of(given: Any) -> torch.dtype | None:
    """A floating point type from its name, or as torch has it.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    known = {dtype_name(one): one for one in DTYPES if one.is_floating_point}
    found = known.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if given is not None and found not in known.values():
        raise ConfigError(
            f"dtype={given!r} is no floating point type. Write one of {', '.join(list(known)[:4])}, as text or as torch has it."
        )
    return found


def _load(
    model: torch.nn.Module, source: Source, where: str, dtype: torch.dtype | None, keep: tuple[str, ...], *, strict: bool
) -> LoadReport:
    """First all headers, then all values: file by file if the model takes them as they come, at once if it looks at several."""
    forms: dict[str, torch.Tensor] = {}
    aliases = dict(source.aliases)
    homes: dict[str, str] = {}
    for name, file in zip(source.files, source.each(), strict=True):
        if twice := [key for key in file.tensors if key in forms]:
            raise CheckpointError(
                f"{where} has {twice[0]!r} in two files, {homes[twice[0]]} and {name}. Save it again, or remove one of them."
            )
        forms |= {key: tensor.to("meta") for key, tensor in file.tensors.items()}
        homes |= dict.fromkeys(file.tensors, name)
        aliases |= file.aliases
    extra = source.read_extra()
    report = check_fit(model, forms, aliases, extra)
    report.demand_values(model, where)
    report.demand(where, type(model).__name__, strict=strict)
    if dtype is not None:
        give_dtype(model, {report.renamed.get(name, name) for name in (*forms, *aliases)}, dtype, keep)
    together = len(source.files) == 1 or may_translate(model) or _apart(tied_names(model), homes, report)
    if not together and METADATA not in extra:  # a layer that gets part of its weights is not to take them for those of an old version
        extra[METADATA] = getattr(model.state_dict(), METADATA, None)
    for names in [source.files] if together else [(name,) for name in source.files]:
        tensors = {key: tensor for name in names for key, tensor in source.open(name, verify=False).tensors.items()}
        load_into(model, tensors, aliases, extra, strict=False)
        extra = {name: value for name, value in extra.items() if name == METADATA}
    return report


def _apart(tied: Mapping[str, Collection[str]], homes: Mapping[str, str], report: LoadReport) -> bool:
    """Whether values for names of one weight lie in different files, where only all of them together show whether they agree."""
    place = {report.renamed.get(name, name): file for name, file in homes.items()}
    return any(name in place and other in place and place[name] != place[other] for name, others in tied.items() for other in others)
