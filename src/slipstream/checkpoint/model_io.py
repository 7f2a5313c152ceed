"""Weights without a training state: `save_model`, `load_weights`, and `merge_weights` of many files into one.

Files are written under temporary names and renamed when all of them are on the disk; earlier files stay until then. Loading checks that
everything fits before a tensor of the model changes, and maps the files instead of reading them. Merging copies in chunks, and removes the
sources only on request and after the result was read back and verified. Pickle is written only on request, and never run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from slipstream.checkpoint.full_tensors import FullTensors
from slipstream.checkpoint.manifest import MANIFEST, MODEL_NAME, SAFE_MODEL_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from slipstream.checkpoint.serialize import write_part
from slipstream.checkpoint.sharded import is_sharded, local_box, shard_like
from slipstream.checkpoint.tensor_bytes import DTYPES, EncodedFile, TensorReader, dtype_name, read_own_bytes, tensor_bytes
from slipstream.checkpoint.weight_source import SHARDS_FILE, WeightSource, find_weights
from slipstream.checkpoint.weights import (
    METADATA,
    LoadReport,
    Weights,
    cast_weights,
    check_fit,
    index_bytes,
    load_into,
    may_rename_keys,
    plan_shards,
    shard_names,
    split_sharded_state_dict,
    split_state_dict,
    tied_names,
    unwrap_module,
    write_weights,
)
from slipstream.distributed.progress_bar import ProgressBar, bar, counted, waiting
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import AtomicFiles, check_local_path
from slipstream.files.disk import Disk
from slipstream.files.safetensors_layout import file_order_key, plan_layout
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import Saver

__all__ = [
    "Progress", "clean_state_dict_for_safetensors", "load_weights", "merge_weights", "parse_dtype", "save_model", "save_sharded_model",
]


_SHARD: Final = r"-\d{5}-of-\d{5}"


def save_model(
    model: torch.nn.Module | Mapping[str, Any],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    disk: Disk | None = None,
) -> None:
    """Write the weights of a model, or a state dict, as `model.safetensors`, or as several files with an index if they are larger.

    With `safe_serialization=False` as `pytorch_model.bin`, by `torch.save`. Other files in the folder stay; those of an earlier save
    of the same kind are replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     os.listdir(folder)
    ['model.safetensors']
    """
    folder, largest = _check_target(save_directory, max_shard_size)
    state = unwrap_module(model).state_dict() if isinstance(model, torch.nn.Module) else model
    if not isinstance(state, Mapping):
        raise ConfigError(f"save_model was given a {type(model).__qualname__}. Pass a torch.nn.Module, or its state_dict().")
    weights = split_state_dict(state, f"the weights of {type(model).__name__}")
    weights.extra.pop(METADATA, None)  # layer versions matter for resuming a run only
    _write_model(
        folder,
        weights,
        lambda files, shown: _add_safe(files, weights, largest, shown)
        if safe_serialization
        else _add_torch(files, weights, state, largest, shown),
        SAFE_MODEL_NAME if safe_serialization else MODEL_NAME,
        disk or Disk(),
    )


def _check_target(save_directory: Any, max_shard_size: int | str) -> tuple[Path, int]:
    folder = check_local_path(save_directory, "save_directory")
    largest = parse_size(max_shard_size)
    _check_folder(folder)
    return folder, largest


def _write_model(
    folder: Path, weights: Weights, add: Callable[[AtomicFiles, ProgressBar], set[str]], base: str, disk: Disk
) -> None:
    """Write files of weights through `add`, which returns their names, and replace those of an earlier save."""
    total = sum(tensor.nbytes for tensor in weights.tensors.values())
    with AtomicFiles(folder, disk) as files, bar(total, "saving", "B") as shown:
        names = add(files, shown)
        if any(re.search(_SHARD, name) and (folder / name).exists() for name in names):
            # Otherwise the old index would list a mixture of old and new files.
            files.remove([name for name in _stale_files(folder, base, ()) if name.endswith(".index.json")])
        files.place()
        files.remove(_stale_files(folder, base, names))
    if base == MODEL_NAME and (folder / SAFE_WEIGHTS_NAME).exists():
        get_logger(__name__).warning(f"{folder / SAFE_WEIGHTS_NAME} of an earlier save is also there, and takes precedence when loading.")


def save_sharded_model(
    saver: Saver, model: torch.nn.Module, save_directory: Any, max_shard_size: int | str, safe_serialization: bool
) -> None:
    """Write the weights of a model that is sharded over ranks, on the main process; every rank must call it.

    The main process holds its shards and one full tensor at a time. With `safe_serialization=False` it holds all weights, because
    `torch.save` wants them at once.
    """
    state = saver.components.strategy.state(model)

    def begin() -> tuple[Path, int] | None:
        if saver.project.save_on_each_node:
            raise ConfigError(
                "save_model of a sharded model with ProjectConfiguration(save_on_each_node=True): the main process alone puts the weights "
                "together. Leave it out, and save to a folder that all machines share"
            )
        return _check_target(save_directory, max_shard_size) if saver.writes else None

    weights = split_sharded_state_dict(model, state, f"the weights of {type(model).__name__}")
    weights.extra.pop(METADATA, None)
    saver.run_and_agree("save_model", lambda: begin() and None)
    if not safe_serialization:
        full = saver.components.strategy.full_state(model)
        saver.run_and_agree("save_model", lambda: save_model(full, save_directory, max_shard_size, False) if saver.writes else None)
        return

    def write() -> None:
        with tensors:
            if saver.writes:
                folder, largest = _check_target(save_directory, max_shard_size)

                def add(files: AtomicFiles, shown: ProgressBar) -> set[str]:
                    return _add_safe(files, weights, largest, shown, tensors.read)

                _write_model(folder, weights, add, SAFE_MODEL_NAME, saver.disk)

    order = plan_shards(weights.tensors, parse_size(max_shard_size))
    tensors = FullTensors(saver, {name: weights.tensors[name] for group in order for name in group}, "save_model")
    saver.run_and_agree("save_model", write)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"save_directory={str(folder)!r} is a file. Pass the path of a folder; it is created if needed.")
    if (folder / MANIFEST).exists():
        raise ConfigError(
            f"save_directory={str(folder)!r} is a checkpoint of save_state, which must not be changed. Use another folder."
        )


def _add_safe(
    files: AtomicFiles, weights: Weights, largest: int, shown: ProgressBar, read: TensorReader = read_own_bytes
) -> set[str]:
    def add(name: str, encode: Callable[[], EncodedFile]) -> None:
        chunks, size = encode()
        files.add(name, counted(chunks, shown.update), size)

    written: set[str | None] = set()
    if weights.extra:
        written.add(write_part(files.add, f"{SAFE_MODEL_NAME}_extra", weights.extra, "the state dict")[0])
    names, index = write_weights(add, SAFE_MODEL_NAME, weights.tensors, weights.aliases, largest, read=read)
    return {name for name in (*written, *names, index) if name is not None}


def _add_torch(files: AtomicFiles, weights: Weights, state: Mapping[str, Any], largest: int, shown: ProgressBar) -> set[str]:
    """Write torch.save files. Tied weights are in one file, where they are stored once."""
    groups = plan_shards(weights.tensors, largest)
    names = shard_names(MODEL_NAME, len(groups), "bin")
    others: dict[str, list[str]] = {}
    for other, kept in weights.aliases.items():
        others.setdefault(kept, []).append(other)
    for name, group in zip(names, groups, strict=True):
        held = {other: state[other] for kept in group for other in (kept, *others.get(kept, ()))}
        if name == names[0]:
            held |= weights.extra
        files.adopt(name, lambda path, held=held: torch.save(held, path))  # type: ignore[misc]
        shown.update(sum(weights.tensors[kept].nbytes for kept in group))
    if len(names) == 1:
        return set(names)
    everywhere = {
        name: [other for kept in group for other in (kept, *others.get(kept, ()))] for name, group in zip(names, groups, strict=True)
    }
    everywhere[names[0]] += weights.extra
    stored = {entry: state[entry] for group in everywhere.values() for entry in group if isinstance(state[entry], torch.Tensor)}
    data = index_bytes(everywhere, stored)
    files.add(f"{MODEL_NAME}.bin.index.json", [data], len(data))
    return {*names, f"{MODEL_NAME}.bin.index.json"}


def _stale_files(folder: Path, base: str, new: Collection[str]) -> list[str]:
    """Return files of an earlier save that are not part of this one; the index first, so that it never lists removed files."""
    suffix = "safetensors" if base == SAFE_MODEL_NAME else "bin"
    ours = re.compile(rf"{base}({_SHARD})?\.{suffix}(\.index\.json)?|{base}_extra\.(json|safetensors)", re.ASCII)
    old = [name for name in os.listdir(folder) if ours.fullmatch(name) and name not in new]
    return sorted(old, key=lambda name: (not name.endswith(".index.json"), name))


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with every tensor once and contiguous, as the safetensors package requires; warn about omitted names.

    >>> shared = torch.ones(2)
    >>> list(clean_state_dict_for_safetensors({"embed": shared, "head": shared}))
    ['embed']
    """
    weights = split_state_dict(state_dict, "the state dict")
    weights.extra.pop(METADATA, None)
    if weights.aliases:
        pairs = ", ".join(f"{other} (is {kept})" for other, kept in list(weights.aliases.items())[:5])
        get_logger(__name__).warning(
            f"Removed shared tensors: {len(weights.aliases)} names of tied weights are omitted: {pairs}. Tie them again after loading."
        )
    kept = {**weights.tensors, **weights.extra}
    return {name: value.contiguous() if isinstance(value := kept[name], torch.Tensor) else value for name in state_dict if name in kept}


def load_weights(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
    *,
    strict: bool = False,
    allow_meta: bool = False,
) -> LoadReport:
    """Load weights into a model, wherever its tensors are; those on the meta device get memory.

    `checkpoint` is a file (safetensors, or of torch.save), an index, or a folder: one of `save_model`, of `save_state`, or of another
    library. Names that are missing or unexpected are a warning, or an error with `strict=True`, or if they would leave weights on the meta
    device without `allow_meta`; shapes that do not fit are an error. If there is an error, nothing has changed. `dtype` is what the
    model's floating point weights become.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     load_weights(torch.nn.Linear(2, 2), folder)
    LoadReport(missing=(), unexpected=(), mismatched={}, renamed={})
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"load_checkpoint_in_model was given a {type(model).__qualname__}. Pass a torch.nn.Module.")
    wanted = parse_dtype(dtype)
    if keep_in_fp32_modules is not None and (wanted is None or isinstance(keep_in_fp32_modules, str)):
        raise ConfigError(f"keep_in_fp32_modules={keep_in_fp32_modules!r} must be a list of module names, together with dtype.")
    path = check_local_path(checkpoint, "checkpoint")
    with waiting(f"loading {path.name}"):
        inner, keep = unwrap_module(model), tuple(keep_in_fp32_modules or ())
        return _load(inner, find_weights(path), str(path), wanted, keep, strict=strict, allow_meta=allow_meta)


def parse_dtype(given: Any) -> torch.dtype | None:
    """Return a floating-point dtype from its name.

    >>> parse_dtype("bfloat16")
    torch.bfloat16
    """
    known = {dtype_name(entry): entry for entry in DTYPES if entry.is_floating_point}
    found = known.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if given is not None and found not in known.values():
        raise ConfigError(
            f"dtype={given!r} is not a floating-point type. Pass one of {', '.join(list(known)[:4])}, as a string or a torch.dtype."
        )
    return found


def _load(
    model: torch.nn.Module,
    source: WeightSource,
    where: str,
    dtype: torch.dtype | None,
    keep: tuple[str, ...],
    *,
    strict: bool,
    allow_meta: bool,
) -> LoadReport:
    """Read all headers, check the fit, then load: file by file, or all at once if loading depends on several files."""
    forms: dict[str, torch.Tensor] = {}
    aliases = dict(source.aliases)
    homes: dict[str, str] = {}
    for name, file in zip(source.files, source.each(), strict=True):
        if twice := [key for key in file.tensors if key in forms]:
            raise CheckpointError(
                f"{where} has {twice[0]!r} in two files, {homes[twice[0]]} and {name}. Save it again, or remove one of them."
            )
        forms |= {key: tensor.to("meta") for key, tensor in (file.forms or file.tensors).items()}
        homes |= dict.fromkeys(file.tensors, name)
        aliases |= file.aliases
    extra = source.read_extra()
    report = check_fit(model, forms, aliases, extra)
    if not allow_meta:
        report.demand_values(model, where)
    report.demand(where, type(model).__name__, strict=strict)
    targets = {name: value for name, value in model.state_dict().items() if is_sharded(value)}
    if dtype is not None and targets:
        raise ConfigError(f"dtype={dtype} for a sharded model, whose weights keep their type. Load it before prepare, or leave dtype out.")
    together = len(source.files) == 1 or may_rename_keys(model) or _aliases_in_other_files(tied_names(model), homes, report)
    if not together and METADATA not in extra:  # else a layer with part of its weights would assume an old version
        extra[METADATA] = getattr(model.state_dict(), METADATA, None)

    def read(names: Sequence[str]) -> dict[str, Any]:
        files = [source.open(name, verify=False).tensors for name in names]
        return {key: _take_share(file, key, targets.get(report.renamed.get(key, key))) for file in files for key in file}

    # Shards are verified as they are read, other files were before: so shards come first, and if one is damaged nothing has changed.
    in_order = sorted(source.files, key=lambda name: name != SHARDS_FILE)
    groups = [in_order] if together else [[name] for name in in_order]
    tensors = read(groups[0])
    if dtype is not None:
        cast_weights(model, {report.renamed.get(name, name) for name in (*forms, *aliases)}, dtype, keep)
    for names in groups:
        if names is not groups[0]:
            tensors = read(names)
        load_into(model, tensors, aliases, extra, strict=False)
        extra = {name: value for name, value in extra.items() if name == METADATA}
    return report


def _take_share(tensors: Mapping[str, torch.Tensor], name: str, target: Any) -> Any:
    """Return a tensor of a file; if the target is sharded, the part that this rank holds, in the same way."""
    if target is None or tuple(getattr(tensors, "placeholders", tensors)[name].shape) != tuple(target.shape):
        return tensors[name]
    box = local_box(target)
    read = getattr(tensors, "read", None)  # of tensors that are in shards themselves
    return shard_like(target, tensors[name][box.slices()].clone() if read is None else read(name, box))


def _aliases_in_other_files(tied: Mapping[str, Collection[str]], homes: Mapping[str, str], report: LoadReport) -> bool:
    """Whether names of a tied weight are in different files, so that only loading all at once can compare them."""
    place = {report.renamed.get(name, name): file for name, file in homes.items()}
    return any(name in place and other in place and place[name] != place[other] for name, others in tied.items() for other in others)


Progress = Callable[[int, int], None]
"""Called with the number of bytes done and in total."""

_CHUNK_SIZE: Final = 4 << 20


@dataclass(frozen=True)
class _CopiedTensor:
    """A tensor to copy: its file, and its span there (None: read it through the opened file)."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: tuple[int, int] | None


def merge_weights(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    remove: bool = False,
    safe_serialization: bool = True,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write the weights in a folder (or those of an index, or of a folder of torch.distributed.checkpoint) as one file; return its path.

    `output` is a folder, in which the file is `model.safetensors`, or the path of a file. `remove` deletes the merged files
    after the new one was verified. With `safe_serialization=False` the file is `pytorch_model.bin`, by `torch.save`. `progress` replaces
    the progress bar.

    >>> import tempfile
    >>> from slipstream.checkpoint.model_io import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(8, 8), f"{folder}/parts", max_shard_size=100)
    ...     len(os.listdir(f"{folder}/parts")), merge_weights(f"{folder}/parts", f"{folder}/whole").name
    (3, 'model.safetensors')
    """
    path = check_local_path(folder, "folder")
    source = find_weights(path)
    target = _target(check_local_path(output, "output"), safe_serialization)
    _check(source, target, remove=remove)
    disk = disk or Disk()
    with AtomicFiles(target.parent, disk) as files:
        if safe_serialization:
            with bar(None, "merging", "B", wanted=None if progress is None else False) as shown:
                checksum = _merge(files, source, target, progress or shown.to)
        else:
            with waiting("merging"):
                checksum = files.adopt(target.name, lambda beside: torch.save(_all_weights(source), beside)).checksum
        files.place()
    if remove:
        _remove(source, target, checksum, disk)
    return target


def _target(output: Path, safe_serialization: bool) -> Path:
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    if output.is_dir():
        return output / name
    if output.suffix == Path(name).suffix:
        return output
    if output.exists():
        raise ConfigError(
            f"output={str(output)!r} is a file that does not end in {Path(name).suffix}. Pass a folder, or a file that does."
        )
    if output.suffix in (".safetensors", ".bin"):
        raise ConfigError(f"output={str(output)!r} does not fit safe_serialization={safe_serialization}: that writes {Path(name).suffix}.")
    return output / name


def _check(source: WeightSource, target: Path, *, remove: bool) -> None:
    sources = [source.folder / name for name in source.stored_files()]
    if target.exists() and any(source.exists() and source.samefile(target) for source in sources):
        raise ConfigError(f"output={str(target)!r} is one of the files to merge. Write to another folder.")
    if (target.parent / MANIFEST).exists():
        raise ConfigError(f"{target.parent} is a checkpoint of save_state, which must not be changed. Use another folder.")
    if remove and (source.entries or source.links_within):
        what = "a checkpoint of save_state" if source.entries else "a cache of downloads"
        raise ConfigError(
            f"{source.folder} is {what}, whose files are not removed. Merge without removing, or delete the folder yourself."
        )


def _merge(files: AtomicFiles, source: WeightSource, target: Path, progress: Progress) -> str:
    tensors, aliases = _contents(source)
    metadata = {"format": "pt", **{other: kept for other, kept in aliases.items() if other != "format"}}
    header, layout = plan_layout([(tensor.name, DTYPES[tensor.dtype], tensor.shape) for tensor in tensors], metadata)
    checksum = files.add(target.name, _merged_chunks(source, tensors, header, layout.size, progress), layout.size).checksum
    if source.dcp is not None and (extra := source.read_extra()):
        write_part(files.add, f"{target.name.partition('.')[0]}_extra", extra, "the state dict")
    elif source.extra is not None:
        data = source.read_bytes(source.extra)
        files.add(f"{target.name.partition('.')[0]}_extra{Path(source.extra).suffix}", [data], len(data))
    return checksum


def _contents(source: WeightSource) -> tuple[list[_CopiedTensor], dict[str, str]]:
    """Return all tensors in the order of a file (`file_order_key`), and the aliases of tied ones."""
    found: dict[str, _CopiedTensor] = {}
    aliases = dict(source.aliases)
    for name, file in zip(source.files, source.each(), strict=True):
        weights = split_state_dict(file.tensors, f"the weights in {file.where}") if file.layout is None and file.forms is None else None
        kept = (file.forms or file.tensors) if weights is None else weights.tensors
        aliases |= file.aliases if weights is None else weights.aliases
        if weights is not None and weights.extra:
            raise CheckpointError(f"{file.where} has {next(iter(weights.extra))!r}, whose dtype safetensors does not support.")
        for key, tensor in kept.items():
            if key in found:
                raise CheckpointError(
                    f"{source.folder} has {key!r} in two files, {found[key].file} and {name}. Remove one, or write an index."
                )
            span = None
            if file.layout is not None:
                entry = file.layout.entries[key]
                span = (file.layout.data_start + entry.start, file.layout.data_start + entry.end)
            found[key] = _CopiedTensor(key, name, tensor.dtype, tuple(tensor.shape), span)
    return sorted(
        found.values(), key=lambda entry: file_order_key(math.prod(entry.shape) * entry.dtype.itemsize, entry.dtype.itemsize)
    ), aliases


def _merged_chunks(source: WeightSource, tensors: list[_CopiedTensor], header: bytes, total: int, progress: Progress) -> Iterator[Any]:
    yield header
    done, opened, fd, held = len(header), "", -1, None
    try:
        for tensor in tensors:
            if tensor.file != opened:
                fd, held = _closed(fd), None
                opened = tensor.file
                if tensor.span is None:
                    held = source.open(tensor.file, verify=False)
                else:
                    fd = source.descriptor(tensor.file)
            chunks = _read(fd, *tensor.span, source.folder / tensor.file) if tensor.span is not None else _chunk_bytes(held, tensor.name)
            for chunk in chunks:
                yield chunk
                done += len(chunk)
                progress(done, total)
    finally:
        _closed(fd)


def _closed(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


def _read(fd: int, start: int, end: int, where: Path) -> Iterator[bytes]:
    while start < end:
        chunk = os.pread(fd, min(_CHUNK_SIZE, end - start), start)
        if not chunk:
            raise CheckpointError(f"{where} became shorter while it was read.")
        start += len(chunk)
        yield chunk


def _chunk_bytes(held: Any, name: str) -> Iterator[memoryview]:
    data = tensor_bytes(held.tensors[name])
    for start in range(0, len(data), _CHUNK_SIZE):
        yield data[start : start + _CHUNK_SIZE]


def _all_weights(source: WeightSource) -> Mapping[str, Any]:
    """Return all weights under all their names, as views of the mapped files."""
    aliases = dict(source.aliases)
    state: dict[str, Any] = {}
    for file in source.each():
        state |= file.tensors
        aliases |= file.aliases
    return {**state, **{other: state[kept] for other, kept in aliases.items() if kept in state}, **source.read_extra()}


def _remove(source: WeightSource, target: Path, checksum: str, disk: Disk) -> None:
    if disk.sync_file(target).checksum != checksum:
        raise CheckpointError(f"{target} differs from what was written: the disk may be failing. Nothing was removed from {source.folder}.")
    merged = [name for name in (source.index, *source.stored_files(), source.extra) if name is not None]
    try:
        for name in merged:
            if not (source.folder / name).samefile(target):
                disk.remove(source.folder / name)
        with suppress(OSError):  # other files in it stay
            disk.remove_folder(source.folder)
    except OSError as error:
        raise CheckpointError(f"{target} is complete, but the merged files could not be removed: {error}.") from error
