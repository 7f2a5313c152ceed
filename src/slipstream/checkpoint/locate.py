"""Find, read and verify the checkpoint that `load_state` means: a folder, a URL, the newest valid one, or one of Accelerate.

Every file is read once into memory and verified before its content is used, so a damaged checkpoint changes nothing in a run. Only the
headers of shard files are read here; the shards that a rank needs are verified when they are read, which is still before anything
changes. The result is a `SavedState`, for checkpoints of Slipstream and of Accelerate alike.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from slipstream.checkpoint import remote
from slipstream.checkpoint.commit import find_recoverable
from slipstream.checkpoint.deserialize import read_part
from slipstream.checkpoint.manifest import MANIFEST, Manifest, RankFile, checkpoint_number, open_listed_file, rank_files, read_manifest
from slipstream.checkpoint.rotate import NumberedCheckpoint, describe_checkpoint, find_incomplete, numbered_checkpoints
from slipstream.checkpoint.shard_layout import whole_box
from slipstream.checkpoint.sharded import TensorPlaceholders, WholeTensorFile, open_shards
from slipstream.checkpoint.tensor_bytes import FileContent, LoadedTensorFile, load_tensors, read_tensor_file
from slipstream.checkpoint.weights import check_fit
from slipstream.distributed.progress_bar import bar
from slipstream.errors import CheckpointError, ConfigError, MissingCheckpointError
from slipstream.files.checksum import checksums_name
from slipstream.files.disk import FileEntry
from slipstream.files.object_store import is_url, local_path, redact
from slipstream.files.reader import read_digest, read_span, read_whole
from slipstream.files.safetensors_layout import read_layout
from slipstream.logging import get_logger

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import Saver

__all__ = [
    "Checkpoint", "NewestCheckpoint", "SavedModel", "SavedState", "is_one_of_several", "locate_checkpoint", "open_checkpoint",
    "open_newest", "read_saved_state",
]


_MOST_LOOKS: Final = 5
_ATTEMPTS: Final = 20  # at least, and for at least this long, if other saves replace the folder while it is read
_RETRY_SECONDS: Final = 60.0
_LARGEST_RANK_FILE: Final = 16 << 20  # every rank reads those of all ranks, so that all pass over the same checkpoints
_LARGEST_WORLD: Final = 256
_READ_IN_PARTS: Final = 1 << 20
"""Bytes of a file from which on ranks of a sharded run read parts of it."""


@dataclass
class Checkpoint:
    """A checkpoint whose files were read and verified."""

    folder: Path
    manifest: Manifest
    buffers: dict[str, FileContent] = field(repr=False)
    """The contents of its files, tensors or bytes; removed as they are used."""
    placeholders: TensorPlaceholders = field(default_factory=TensorPlaceholders, repr=False)
    """Placeholders of tensors that are stored in shards."""
    store: remote.RemoteFiles | None = field(default=None, repr=False)
    """Where shards are, if that is not the folder."""
    _late: dict[int, Path] | None = field(default=None, repr=False)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a model by name, once, with their memory; tensors in shards are placeholders."""
        model, tensors = self.manifest.models[number], dict[str, torch.Tensor]()
        for name in model.files:
            for key, tensor in load_tensors(self.buffers.pop(name), self._path(name)).tensors.items():
                if key in tensors:
                    raise CheckpointError(f"{self._path(name)}: {key!r} is in another file of the same model, too")
                tensors[key] = tensor
        elsewhere = self._shards(model.shards)
        if twice := tensors.keys() & elsewhere.keys():
            raise CheckpointError(f"{self.folder}: {min(twice)[:100]!r} is stored in full and in shards")
        tensors |= elsewhere
        for alias, target in model.aliases.items():
            if target not in tensors or alias in tensors:
                raise CheckpointError(f"{self._path(MANIFEST)}: {alias[:100]!r} cannot be the same weight as {target[:100]!r}")
        return tensors

    def part(self, name: str) -> Any:
        """Return the state in a part, once, with the memory of its tensors; tensors in shards are placeholders."""
        elsewhere = self._shards(self.manifest.shards.get(name, ()))
        return read_part(name, self.buffers.pop(name), self._path(name), elsewhere)

    def _shards(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return placeholders for the tensors in these shard files."""
        if not names:
            return {}
        return self.placeholders.add(open_shards(self.folder, names, self.manifest.files, self.buffers.pop, self.store))

    def rank(self, rank: int) -> dict[str, Any] | None:
        """Return the state of a rank, or None if it did not save."""
        name = self.manifest.ranks.get(rank)
        if name is not None:
            return self._checked(self.part(name), rank, name)
        if self._late is None:
            self._late = rank_files(self.folder, self.manifest.stamp)
        path = self._late.get(rank)
        if path is None:
            return None
        buffer = self.buffers.pop(path.name) if path.name in self.buffers else _read_rank_file(path)
        return self._checked(read_part("rank.safetensors", buffer, str(path)), rank, path.name)

    def read_ranks(self) -> None:
        """Read and verify the files that ranks added after the commit, except large ones (with gradients) and those of large runs."""
        self._late = rank_files(self.folder, self.manifest.stamp)
        for path in self._late.values() if self.manifest.world <= _LARGEST_WORLD else ():
            if path.lstat().st_size <= _LARGEST_RANK_FILE:
                self.buffers[path.name] = _read_rank_file(path)

    def _checked(self, state: Any, rank: int, name: str) -> dict[str, Any]:
        if not isinstance(state, dict) or state.get("rank") != rank or state.get("stamp") != self.manifest.stamp:
            raise CheckpointError(f"{self._path(name)} does not belong to rank {rank} of this save")
        return state

    def _path(self, name: str) -> str:
        return str(self.folder / name)


def open_checkpoint(
    folder: Path,
    *,
    keep: Callable[[str], bool] = lambda name: True,
    alone: bool = False,
    in_parts: bool = False,
    store: remote.RemoteFiles | None = None,
) -> Checkpoint:
    """Read and verify a checkpoint; the contents of files for which `keep` returns False are released at once.

    `alone`: no other process reads it at the same time and would profit from the page cache. `in_parts`: large
    files of weights and optimizers are verified here and read later, as much of them as this rank needs. `store`: where shards are, if
    they are not in the folder.
    """
    if not folder.exists():
        folder = find_recoverable(folder) or folder
    began = time.monotonic()
    for attempt in itertools.count(1):
        before = _folder_identity(folder)
        try:
            return _read_all(folder, read_manifest(folder), keep, alone, in_parts, store)
        except CheckpointError:
            if _folder_identity(folder) == before:  # else another save has replaced it meanwhile: read that
                raise
            if attempt >= _ATTEMPTS and time.monotonic() - began > _RETRY_SECONDS:
                break
    raise CheckpointError(f"other saves replace {folder} faster than it can be read: copy it, or read it while nothing is saved there")


def _folder_identity(folder: Path) -> tuple[int, ...] | None:
    """Return the identity of a checkpoint folder, which changes when it is replaced. During an exchange, a retry finds it."""
    for _ in range(_MOST_LOOKS):
        with suppress(OSError):
            around, found = os.stat(folder), os.stat(folder / MANIFEST, follow_symlinks=False)
            return around.st_dev, around.st_ino, found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _read_all(
    folder: Path, manifest: Manifest, keep: Callable[[str], bool], alone: bool, in_parts: bool, store: remote.RemoteFiles | None
) -> Checkpoint:
    buffers = {}
    shards = manifest.shard_files()
    known = manifest.part_files() | set(map(checksums_name, shards))
    large = {name for model in manifest.models for name in model.files} | set(manifest.optimizers) if in_parts else set()
    placeholders = TensorPlaceholders()
    total = sum(entry.size for name, entry in manifest.files.items() if name not in shards)
    with bar(total, "loading", "B") as shown:
        for name, entry in manifest.files.items():
            if name in shards:
                if store is None:
                    os.close(_open_sized(folder, name, entry.size))
                continue
            if name in large and name.endswith(".safetensors") and entry.size >= _READ_IN_PARTS and keep(name):
                buffers[name] = _open_in_parts(folder, name, entry, placeholders)
                shown.update(entry.size)
                continue
            buffer = _read(folder, name, entry.size, entry.checksum, alone=alone, advance=shown.update)
            if name in known and keep(name):
                buffers[name] = buffer
    return Checkpoint(folder, manifest, buffers, placeholders, store)


def _open_in_parts(folder: Path, name: str, entry: FileEntry, placeholders: TensorPlaceholders) -> LoadedTensorFile:
    """Return a verified file with placeholders for its tensors; those of bytes, which may stand for another type, are read."""
    where = str(folder / name)
    descriptor = _open_sized(folder, name, entry.size)
    try:
        found = read_digest(descriptor, entry.size, where=where)
        if found != entry.checksum:
            raise CheckpointError(f"{where} is damaged: its checksum is {found}, and {entry.checksum[:40]} was written")
        layout = read_layout(lambda offset, count: read_span(descriptor, offset, offset + count, where=where), entry.size, where)
    except BaseException:
        os.close(descriptor)
        raise
    file = WholeTensorFile(descriptor, layout, where)
    tensors = placeholders.add(file)
    packed = {key: file.read(key, whole_box(tensor.shape)) for key, tensor in tensors.items() if tensor.dtype == torch.uint8}
    return LoadedTensorFile(layout, {**tensors, **packed})


def _read_rank_file(path: Path) -> FileContent:
    """Read a file that a rank added, inside the checkpoint or beside it, and compare it with the checksum in its name."""
    found = RankFile.of(path.name[path.name.rindex("rank_") :])
    assert found is not None
    return _read(path.parent, path.name, None, found.checksum)


def _open_sized(folder: Path, name: str, size: int | None) -> int:
    """Open a file, which must have this size unless that is None; return its descriptor."""
    descriptor = open_listed_file(folder, name)
    present = os.fstat(descriptor).st_size
    if size is not None and present != size:
        os.close(descriptor)
        raise CheckpointError(f"{folder / name} is damaged: it has {present} bytes, and the manifest lists {size}")
    return descriptor


def _read(
    folder: Path, name: str, size: int | None, checksum: str, *, alone: bool = False, advance: Callable[[int], object] = lambda _: None
) -> FileContent:
    where = str(folder / name)
    descriptor = _open_sized(folder, name, size)
    try:
        read = read_tensor_file if name.endswith(".safetensors") else read_whole
        content, found = read(descriptor, os.fstat(descriptor).st_size, where=where, alone=alone, advance=advance)
    finally:
        os.close(descriptor)
    if found != checksum:
        raise CheckpointError(f"{where} is damaged: its checksum is {found}, and {checksum[:40]} was written")
    return content


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest valid checkpoint, and why others were passed over."""

    checkpoint: Checkpoint
    passed_over: Mapping[Path, str]


def open_newest(
    candidates: Iterable[Path], where: str, *, alone: bool = False, known: Mapping[Path, str] | None = None, in_parts: bool = False
) -> NewestCheckpoint:
    """Return the first candidate that verifies, with the files that ranks added to it.

    If all candidates vanish, a newer one has replaced them, and they are listed again. `known` are unusable ones with the reason.
    """
    passed: dict[Path, str] = dict(known or {})
    gone: set[Path] = set()
    while untried := [folder for folder in candidates if folder not in passed and folder not in gone]:
        for folder in untried:
            try:
                checkpoint = open_checkpoint(folder, alone=alone, in_parts=in_parts)
                checkpoint.read_ranks()
                return NewestCheckpoint(checkpoint, passed)
            except (CheckpointError, FileNotFoundError) as error:
                if folder.exists() or find_recoverable(folder):
                    passed[folder] = str(error)
                else:
                    gone.add(folder)
    raise _none_valid_error({folder.name: why for folder, why in passed.items()}, where)


def _none_valid_error(passed: Mapping[str, str], where: str) -> CheckpointError:
    if not passed:
        return MissingCheckpointError(f"there is no checkpoint in {where} yet: save_state() creates the first one")
    reasons = "\n".join(f"  {name}: {why}" for name, why in passed.items())
    return CheckpointError(f"none of the {len(passed)} checkpoints in {where} is valid:\n{reasons}")


@dataclass(frozen=True)
class SavedModel:
    """The weights of one model."""

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedState:
    """The parts of a checkpoint; None for those that its format does not have."""

    where: str
    folder: Path
    stamp: str
    step: int
    models: Mapping[int, SavedModel]
    optimizers: Sequence[Any] | None
    schedulers: Sequence[Any] | None
    loaders: Sequence[Any] | None
    objects: Mapping[int, Any]
    """Registered objects, by number."""
    objects_missing: frozenset[int] = frozenset()
    """Numbers of registered objects that could not be read; there is a warning for each."""
    scaler: Any = None
    clipping: Any = None
    """The norms of gradients at the last updates."""
    gradients: Mapping[str, Any] | None = None
    """Gradients of an unfinished update that were sharded over the ranks: their mean. Of replicas each rank has saved its own."""
    updates: Sequence[Mapping[str, Any]] = ()
    world: int | None = None
    """The number of processes that saved, if known."""
    seed: int = 0
    receipt: Mapping[str, Any] = field(default_factory=dict)
    rank: Callable[[int], dict[str, Any] | None] = lambda rank: None
    """Returns the state of a rank, or None."""
    warnings: Sequence[str] = ()
    """What could not be read, a sentence each."""
    placeholders: TensorPlaceholders = field(default_factory=TensorPlaceholders)
    """Placeholders in `models`, `optimizers` and `objects` of tensors that are stored in shards."""
    holder: Any = None
    """Keeps the folder alive if it is a temporary copy."""


def read_saved_state(checkpoint: Checkpoint, where: str) -> SavedState:
    """Return the parts of a verified checkpoint of Slipstream."""
    manifest = checkpoint.manifest
    if manifest.training is None:
        raise CheckpointError(f"{where} has no state of a training loop")
    training = checkpoint.part(manifest.training)
    models = {
        entry.number: SavedModel(
            checkpoint.weights(place), entry.aliases, {} if entry.extra is None else checkpoint.part(entry.extra)
        )
        for place, entry in enumerate(manifest.models)
    }
    seed = manifest.receipt.get("seed")
    return SavedState(
        where=where,
        folder=checkpoint.folder,
        stamp=manifest.stamp,
        step=manifest.step,
        models=models,
        optimizers=[checkpoint.part(name) for name in manifest.optimizers],
        schedulers=_listed(training, "schedulers", where),
        loaders=_listed(training, "loaders", where),
        objects={number: checkpoint.part(name) for number, name in enumerate(manifest.objects)},
        scaler=training.get("scaler"),
        clipping=training.get("clipping"),
        gradients=training.get("gradients"),
        updates=_listed(training, "optimizers", where),
        world=manifest.world,
        seed=seed if isinstance(seed, int) else 0,
        receipt=manifest.receipt,
        rank=functools.cache(checkpoint.rank),
        placeholders=checkpoint.placeholders,
    )


def _read_accelerate(saver: Saver, folder: Path, allow_pickle: bool) -> SavedState | None:
    """Return the parts of a checkpoint of Accelerate, or None if the folder is not one."""
    if (folder / MANIFEST).exists():
        return None
    from slipstream.checkpoint.accelerate_import import is_accelerate_checkpoint, read_accelerate_checkpoint

    if not is_accelerate_checkpoint(folder):
        return None
    registry = saver.components.registry
    moves = max((scheduler.moves for scheduler in registry.schedulers), default=1)
    same_order = bool(registry.loaders) and all(getattr(loader, "orders_as_accelerate", False) for loader in registry.loaders)
    found = read_accelerate_checkpoint(folder, allow_pickle=allow_pickle, scheduler_moves=moves, same_order=same_order)
    updates = [_count_steps(state) for state in found.optimizers]
    return SavedState(
        where=str(folder),
        folder=folder,
        stamp="foreign",
        step=max(updates, default=0),
        models=_match_models(saver, [_split_tensors(state) for state in found.models]),
        optimizers=found.optimizers,
        schedulers=found.schedulers,
        loaders=None,
        objects=found.objects,
        objects_missing=frozenset(found.unread),
        scaler=found.scaler,
        updates=[{"updates": count, "skipped": False} for count in updates],
        rank=lambda rank: {"random": found.ranks[rank]} if rank in found.ranks else None,
        warnings=found.warnings,
        placeholders=found.placeholders,
    )


def _match_models(saver: Saver, stored: list[SavedModel]) -> dict[int, SavedModel]:
    """Return the weights by the number of their model.

    Accelerate numbers the weights that save hooks have left, so with load hooks and fewer weights than models those that fit count.
    """
    models = saver.components.stepper.models
    if not saver.load_hooks or len(stored) >= len(models):
        return dict(enumerate(stored))
    matched: dict[int, SavedModel] = {}
    for weights in stored:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        following = range(max(matched, default=-1) + 1, len(models))
        fitting = (number for number in following if check_fit(models[number].original, shapes, weights.aliases, weights.extra))
        number = next(fitting, None)
        if number is None:
            return dict(enumerate(stored))
        matched[number] = weights
    return matched


def _split_tensors(state: Mapping[str, Any]) -> SavedModel:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return SavedModel(tensors, {}, {name: value for name, value in state.items() if name not in tensors})


def _count_steps(optimizer: Mapping[str, Any]) -> int:
    """Return how many updates an optimizer has counted."""
    steps = [entries.get("step") for entries in optimizer.get("state", {}).values() if isinstance(entries, Mapping)]
    return max((int(step) for step in steps if isinstance(step, (int, float, torch.Tensor))), default=0)


def _listed(training: Any, name: str, where: str) -> list[Any]:
    value = training.get(name) if isinstance(training, dict) else None
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: the state of the training loop has no list of {name}")
    return value


def is_one_of_several(saver: Saver, input_dir: Any, folder: str) -> bool:
    """Whether a checkpoint was chosen from a folder of several, so that another one can replace it."""
    searched = saver.folder if input_dir is None else os.fspath(input_dir)
    if searched is None:
        return False
    if is_url(searched):
        return searched.rstrip("/") == folder.rstrip("/").rpartition("/")[0]
    return Path(local_path(searched)).expanduser().absolute() == Path(folder).absolute().parent


def locate_checkpoint(saver: Saver, input_dir: Any, allow_pickle: bool, unusable: Mapping[str, str]) -> SavedState:
    """Return the checkpoint, read and verified; `unusable` are folders to pass over, with the reason."""
    if input_dir is not None and not isinstance(input_dir, (str, os.PathLike)):
        raise ConfigError(f"load_state({input_dir!r}): {type(input_dir).__name__} is not a path; pass the path of a folder")
    where = saver.folder if input_dir is None else os.fspath(input_dir)
    if not where:
        raise ConfigError(
            "load_state() was called without a folder: write load_state('checkpoints/first'), or number checkpoints with "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True) to load the newest"
        )
    in_parts = not saver.components.strategy.replicated
    if is_url(where):
        return _read_remote(where, unusable, numbered=input_dir is None, in_parts=in_parts)
    alone, folder = saver.components.state.num_processes == 1, Path(local_path(where)).expanduser()
    if input_dir is not None:
        if (found := _read_accelerate(saver, folder, allow_pickle)) is not None:
            return found
        if (folder / MANIFEST).exists() or not numbered_checkpoints(folder):
            return read_saved_state(open_checkpoint(folder, alone=alone, in_parts=in_parts), str(folder))
    # If the highest number is a checkpoint of Accelerate, that one is meant; older ones are not considered.
    here = numbered_checkpoints(folder)
    if here and (found := _read_accelerate(saver, here[-1][1], allow_pickle)) is not None:
        return found
    candidates = _Candidates(folder)
    newest = open_newest(
        candidates, where, alone=alone, known={Path(path): why for path, why in unusable.items()}, in_parts=in_parts
    )
    loaded = newest.checkpoint.folder.name
    passed = {path.name: why for path, why in newest.passed_over.items()}
    _warn_passed_over(_newer_than(loaded, candidates.incomplete) | passed, loaded)
    return read_saved_state(newest.checkpoint, str(newest.checkpoint.folder))


class _Candidates:
    """The numbered checkpoints of a folder, complete ones before incomplete ones, newest first; listed again by every iteration."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.incomplete: dict[str, str] = {}

    def __iter__(self) -> Iterator[Path]:
        paths = [path for _, path in reversed(numbered_checkpoints(self._folder))]
        known = [found for path in paths if (found := describe_checkpoint(path)) is not None]
        self.incomplete = {checkpoint.name: _explain_incomplete(checkpoint) for checkpoint in find_incomplete(known)}
        return iter(sorted(paths, key=lambda path: path.name in self.incomplete))


def _newer_than(name: str, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons of checkpoints with higher numbers than `name`."""
    number = checkpoint_number(name)
    return {other: why for other, why in reasons.items() if number is not None and (checkpoint_number(other) or 0) > number}


def _explain_incomplete(checkpoint: NumberedCheckpoint) -> str:
    return f"it is incomplete, without the state of {checkpoint.missing}, which did not finish save_state; pass its path to load it"


def _read_remote(url: str, unusable: Mapping[str, str], *, numbered: bool, in_parts: bool) -> SavedState:
    """Return the checkpoint at a URL, or the newest valid one of those numbered below it, from a temporary copy.

    With `in_parts`, shards are not fetched but read where they are.
    """
    candidates = [place for _, place in reversed(remote.list_numbered(url))]
    known = [found for place in candidates if (found := remote.describe_checkpoint(place)) is not None] if len(candidates) > 1 else []
    incomplete = {checkpoint.name: _explain_incomplete(checkpoint) for checkpoint in find_incomplete(known)}
    candidates.sort(key=lambda place: place in incomplete)
    passed: dict[str, str] = {}
    for place in candidates or ([] if numbered else [url]):
        holder, name = _TemporaryCopy(), place.rpartition("/")[2] if candidates else "checkpoint"
        if place in unusable:
            passed[name] = unusable[place]
            continue
        try:
            store = remote.RemoteFiles(place) if in_parts else None
            folder = remote.fetch(place, holder.folder / name) if store is None else store.fetch_rest(holder.folder / name)
            checkpoint = open_checkpoint(folder, in_parts=in_parts, store=store)
        except CheckpointError as error:
            if not candidates:
                raise
            passed[name] = str(error)
            continue
        newer = {place.rpartition("/")[2]: why for place, why in incomplete.items()}
        _warn_passed_over({**_newer_than(name, newer), **passed}, name)
        return replace(read_saved_state(checkpoint, redact(place)), holder=holder)
    raise _none_valid_error(passed, redact(url))


class _TemporaryCopy:
    """A temporary folder that is removed with the last reference to it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def _warn_passed_over(passed: Mapping[str, str], taken: str) -> None:
    for name, why in passed.items():
        get_logger(__name__).warning(f"{name} was passed over for {taken}, which is older: {why}")
