"""Find, read and verify the checkpoint that `load_state` means: a folder, a URL, the newest valid one, or one of Accelerate.

Every file is read once, into memory, and verified before anything is handed out, so a damaged checkpoint changes nothing in a run; what
was verified is what is used. Of files with pieces of sharded tensors only the headers are read here; the pieces that a rank needs are
verified when they are read, which is still before anything changes. The result is a `SavedState`, the same record whoever wrote the
checkpoint.
"""

from __future__ import annotations

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
from typing import Any, Final

import torch

from slipstream.checkpoint import remote
from slipstream.checkpoint.accelerate_import import AccelerateCheckpoint, is_accelerate_checkpoint, read_accelerate_checkpoint
from slipstream.checkpoint.commit import find_recoverable
from slipstream.checkpoint.manifest import MANIFEST, Manifest, RankFile
from slipstream.checkpoint.rotate import numbered_checkpoints, rank_files, read_manifest
from slipstream.checkpoint.saver import Saver
from slipstream.checkpoint.serialize import read_part
from slipstream.checkpoint.sharded import TensorPlaceholders, open_pieces
from slipstream.checkpoint.tensor_bytes import FileContent, load_tensors, read_tensor_file
from slipstream.distributed.progress_bar import bar
from slipstream.errors import CheckpointError, ConfigError, MissingCheckpointError
from slipstream.files.checksum import checksums_name
from slipstream.files.object_store import redact
from slipstream.files.paths import open_inside
from slipstream.files.reader import read_whole
from slipstream.logging import get_logger

__all__ = [
    "Checkpoint", "NewestCheckpoint", "SavedModel", "SavedState", "convert_accelerate_state", "is_one_of_several", "locate_checkpoint",
    "open_checkpoint", "open_newest", "read_saved_state",
]


_MOST_LOOKS: Final = 5
_ATTEMPTS: Final = 20  # for a folder that other saves replace while it is read: at least this often, and at least this long
_RETRY_SECONDS: Final = 60.0
_LARGEST_RANK_FILE: Final = 16 << 20  # every rank looks at those of all ranks: what one passes over, all of them do
_LARGEST_WORLD: Final = 256


@dataclass
class Checkpoint:
    """A checkpoint that was read and verified."""

    folder: Path
    manifest: Manifest
    buffers: dict[str, FileContent] = field(repr=False)
    """What its files hold: tensors, or bytes; taken out as they are used."""
    stand_ins: TensorPlaceholders = field(default_factory=TensorPlaceholders, repr=False)
    """What stands for tensors that are in pieces."""
    _late: dict[int, Path] | None = field(default=None, repr=False)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a model, by name; their memory is handed over. Those that are in pieces are stand-ins."""
        tensors: dict[str, torch.Tensor] = {}
        for name in self.manifest.models[number].files:
            for key, tensor in load_tensors(self.buffers.pop(name), self._path(name)).tensors.items():
                if key in tensors:
                    raise CheckpointError(f"{self._path(name)}: {key!r} stands in another file of the same model too")
                tensors[key] = tensor
        elsewhere = self._pieces(self.manifest.models[number].pieces)
        if twice := tensors.keys() & elsewhere.keys():
            raise CheckpointError(f"{self.folder}: {min(twice)[:100]!r} is in one piece, and in several")
        return tensors | elsewhere

    def check_aliases(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """An error if names of tied weights of a model lead to nothing, or take the place of a weight that is there."""
        for alias, target in self.manifest.models[number].aliases.items():
            if target not in tensors or alias in tensors:
                raise CheckpointError(f"{self._path(MANIFEST)}: {alias[:100]!r} cannot be the same weight as {target[:100]!r}")

    def extra(self, number: int) -> dict[str, Any]:
        """The entries of a model's state dict that are no tensors."""
        name = self.manifest.models[number].extra
        return {} if name is None else self.part(name)

    def part(self, name: str) -> Any:
        """The state in a part; the memory of its tensors is handed over. Those that are in pieces are stand-ins."""
        elsewhere = self._pieces(self.manifest.pieces.get(name, ()))
        return read_part(name, self.buffers.pop(name), self._path(name), elsewhere)

    def _pieces(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Stand-ins for the tensors whose pieces are in these files."""
        if not names:
            return {}
        return self.stand_ins.add(open_pieces(self.folder, names, self.manifest.files, self.buffers.pop))

    def rank(self, rank: int) -> dict[str, Any] | None:
        """What belongs to a rank, if that rank has saved it."""
        name = self.manifest.ranks.get(rank)
        if name is not None:
            return self._checked(self.part(name), rank, name)
        if self._late is None:
            self._late = rank_files(self.folder, self.manifest.stamp)
        path = self._late.get(rank)
        if path is None:
            return None
        known = path.name in self.buffers
        buffer = self.buffers.pop(path.name) if known else _read(path.parent, path.name, None, _rank_file(path).checksum)
        return self._checked(read_part("rank.safetensors", buffer, str(path)), rank, path.name)

    def read_ranks(self) -> None:
        """Reads and verifies what ranks added after the manifest was written; but for large files, with gradients, and for large runs."""
        self._late = rank_files(self.folder, self.manifest.stamp)
        for path in self._late.values() if self.manifest.world <= _LARGEST_WORLD else ():
            if path.lstat().st_size <= _LARGEST_RANK_FILE:
                self.buffers[path.name] = _read(path.parent, path.name, None, _rank_file(path).checksum)

    def _checked(self, state: Any, rank: int, name: str) -> dict[str, Any]:
        if not isinstance(state, dict) or state.get("rank") != rank or state.get("stamp") != self.manifest.stamp:
            raise CheckpointError(f"{self._path(name)} does not belong to rank {rank} of this save")
        return state

    def _path(self, name: str) -> str:
        return str(self.folder / name)


def open_checkpoint(folder: Path, *, keep: Callable[[str], bool] = lambda name: True, alone: bool = False) -> Checkpoint:
    """Reads and verifies a checkpoint; the bytes of files that `keep` does not want are given back at once.

    `alone`: no other process reads it at the same time, which would profit from files that went through the page cache.
    """
    if not folder.exists():
        folder = find_recoverable(folder) or folder
    began = time.monotonic()
    for attempt in itertools.count(1):
        before = _folder_identity(folder)
        try:
            return _read_all(folder, read_manifest(folder), keep, alone)
        except CheckpointError:
            if _folder_identity(folder) == before:  # else another save has taken its place in the meantime: that is read
                raise
            if attempt >= _ATTEMPTS and time.monotonic() - began > _RETRY_SECONDS:
                break
    raise CheckpointError(f"{folder} is replaced by other saves faster than it can be read: copy it, or read it while nobody saves")


def _folder_identity(folder: Path) -> tuple[int, ...] | None:
    """What tells a checkpoint from one that takes its place; a folder that is exchanged at this moment is there the next time one looks."""
    for _ in range(_MOST_LOOKS):
        with suppress(OSError):
            around, found = os.stat(folder), os.stat(folder / MANIFEST, follow_symlinks=False)
            return around.st_dev, around.st_ino, found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _read_all(folder: Path, manifest: Manifest, keep: Callable[[str], bool], alone: bool) -> Checkpoint:
    buffers = {}
    pieces = manifest.all_pieces()
    known = _parts(manifest) | set(map(checksums_name, pieces))
    total = sum(entry.size for name, entry in manifest.files.items() if name not in pieces)
    with bar(total, "loading", "B") as shown:
        for name, entry in manifest.files.items():
            if name in pieces:
                _check_present(folder, name, entry.size)
                continue
            buffer = _read(folder, name, entry.size, entry.checksum, alone=alone, advance=shown.update)
            if name in known and keep(name):
                buffers[name] = buffer
    return Checkpoint(folder, manifest, buffers)


def _rank_file(path: Path) -> RankFile:
    """What the name of a file says that a rank has added, inside of the checkpoint or beside it."""
    found = RankFile.of(path.name[path.name.rindex("rank_") :])
    assert found is not None
    return found


def _parts(manifest: Manifest) -> set[str]:
    """The files that this library itself reads; others were written by hooks of the script."""
    names = {name for model in manifest.models for name in (*model.files, model.extra) if name is not None}
    names.update(manifest.optimizers, manifest.objects, manifest.ranks.values())
    return names if manifest.training is None else names | {manifest.training}


def _read(
    folder: Path, name: str, size: int | None, checksum: str, *, alone: bool = False, advance: Callable[[int], object] = lambda _: None
) -> FileContent:
    where = folder / name
    try:
        descriptor = _opened(folder, name)
        try:
            present = os.fstat(descriptor).st_size
            if size is not None and present != size:
                raise CheckpointError(f"{where} is damaged: it has {present} bytes, and the manifest says {size}")
            read = read_tensor_file if name.endswith(".safetensors") else read_whole
            content, found = read(descriptor, present, where=str(where), alone=alone, advance=advance)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    if found != checksum:
        raise CheckpointError(f"{where} is damaged: its checksum is {found}, and {checksum[:40]} was written")
    return content


def _check_present(folder: Path, name: str, size: int) -> None:
    descriptor = _opened(folder, name)
    try:
        there = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if there != size:
        raise CheckpointError(f"{folder / name} is damaged: it has {there} bytes, and the manifest says {size}")


def _opened(folder: Path, name: str) -> int:
    try:
        return open_inside(folder, name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / name} is missing, and the manifest lists it") from None
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint that is whole, and why newer ones were passed over."""

    checkpoint: Checkpoint
    passed_over: Mapping[Path, str]


def open_newest(
    candidates: Iterable[Path], where: str, *, alone: bool = False, known: Mapping[Path, str] | None = None
) -> NewestCheckpoint:
    """The first of the candidates (newest first) that verifies, with all that ranks have added to it.

    They are asked for anew if all of them vanish: a newer one has come then. `known` are those that cannot be used, and why.
    """
    passed: dict[Path, str] = dict(known or {})
    gone: set[Path] = set()
    while untried := [folder for folder in candidates if folder not in passed and folder not in gone]:
        for folder in untried:
            try:
                checkpoint = open_checkpoint(folder, alone=alone)
                checkpoint.read_ranks()
                return NewestCheckpoint(checkpoint, passed)
            except (CheckpointError, FileNotFoundError) as error:
                if folder.exists() or find_recoverable(folder):
                    passed[folder] = str(error)
                else:
                    gone.add(folder)
    if not passed:
        raise MissingCheckpointError(f"there is no checkpoint in {where} yet: save_state() makes the first one")
    reasons = "\n".join(f"  {folder.name}: {why}" for folder, why in passed.items())
    raise CheckpointError(f"none of the {len(passed)} checkpoints in {where} is whole:\n{reasons}")


@dataclass(frozen=True)
class SavedModel:
    """The weights of one model."""

    kind: str
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedState:
    """The parts of a checkpoint; None where it does not know of such a thing at all."""

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
    """Numbers of objects that are there and cannot be read, as was said."""
    scaler: Any = None
    clipping: Any = None
    """The norms of gradients at the last updates."""
    updates: Sequence[Mapping[str, Any]] = ()
    world: int | None = None
    """Processes of the run that saved, if that is known."""
    seed: int = 0
    receipt: Mapping[str, Any] = field(default_factory=dict)
    rank: Callable[[int], dict[str, Any] | None] = lambda rank: None
    """What belongs to a rank, if it is there."""
    said: Sequence[str] = ()
    """What could not be taken over, in words."""
    stand_ins: TensorPlaceholders = field(default_factory=TensorPlaceholders)
    """What stands in `models`, `optimizers` and `objects` for tensors that are in pieces."""
    holder: Any = None
    """What keeps the folder there, where it is a copy."""


def read_saved_state(checkpoint: Checkpoint, where: str) -> SavedState:
    """The parts of a verified checkpoint of ours."""
    manifest = checkpoint.manifest
    if manifest.training is None:
        raise CheckpointError(f"{where} has no state of a training loop")
    training = checkpoint.part(manifest.training)
    models = {
        entry.number: SavedModel(entry.kind, checkpoint.weights(place), entry.aliases, checkpoint.extra(place))
        for place, entry in enumerate(manifest.models)
    }
    for place, entry in enumerate(manifest.models):
        checkpoint.check_aliases(place, models[entry.number].tensors)
    seed = manifest.receipt.get("seed")
    ranks: dict[int, dict[str, Any] | None] = {}

    def rank_state(rank: int) -> dict[str, Any] | None:
        if rank not in ranks:
            ranks[rank] = checkpoint.rank(rank)
        return ranks[rank]

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
        updates=_listed(training, "optimizers", where),
        world=manifest.world,
        seed=seed if isinstance(seed, int) else 0,
        receipt=manifest.receipt,
        rank=rank_state,
        stand_ins=checkpoint.stand_ins,
    )


def convert_accelerate_state(foreign: AccelerateCheckpoint, folder: Path) -> SavedState:
    """The parts of a checkpoint of the relative; what has no counterpart here is said."""
    said = list(foreign.said)
    if foreign.samplers or foreign.loaders:
        said.append(
            f"{folder} was written by another library, whose order of data is another one: loaders begin at their start. Call "
            "skip_first_batches(loader, n) to leave out as many batches as were read; other samples are in them."
        )
    if foreign.schedulers and foreign.world > 1:
        said.append(
            f"{folder} was saved by {foreign.world} processes of a library that moves schedulers {foreign.world} times per update: the "
            "schedule goes on from where it is. Pass Accelerator(scheduler_steps_per_process=True) to go on moving it so."
        )
    return SavedState(
        where=str(folder),
        folder=folder,
        stamp="foreign",
        step=max((_updates(state) for state in foreign.optimizers), default=0),
        models={number: _accelerate_model(state) for number, state in enumerate(foreign.models)},
        optimizers=foreign.optimizers,
        schedulers=foreign.schedulers,
        loaders=None,
        objects=foreign.objects,
        objects_missing=frozenset(foreign.unread),
        scaler=foreign.scaler,
        updates=[{"updates": _updates(state), "skipped": False} for state in foreign.optimizers],
        rank=lambda rank: {"random": foreign.ranks[rank]} if rank in foreign.ranks else None,
        said=said,
    )


def _accelerate_model(state: Mapping[str, Any]) -> SavedModel:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return SavedModel("model", tensors, {}, {name: value for name, value in state.items() if name not in tensors})


def _updates(optimizer: Mapping[str, Any]) -> int:
    """How many updates an optimizer has made, as far as it counts them."""
    steps = [entries.get("step") for entries in optimizer.get("state", {}).values() if isinstance(entries, Mapping)]
    return max((int(step) for step in steps if isinstance(step, (int, float, torch.Tensor))), default=0)


def _listed(training: Any, name: str, where: str) -> list[Any]:
    value = training.get(name) if isinstance(training, dict) else None
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: the state of the training loop has no list of {name}")
    return value


def is_one_of_several(saver: Saver, input_dir: Any, folder: str) -> bool:
    """Whether a checkpoint was taken because it is the newest, so that another can take its place."""
    searched = saver.folder if input_dir is None else os.fspath(input_dir)
    if searched is None or remote.is_url(searched):
        return False
    return Path(remote.local_path(searched)).expanduser().absolute() == Path(folder).absolute().parent


def locate_checkpoint(saver: Saver, input_dir: Any, allow_pickle: bool, passed: Mapping[str, str]) -> SavedState:
    """The checkpoint, read and verified; `passed` are folders that cannot be used, and why."""
    alone = saver.parts.state.num_processes == 1
    if input_dir is None or input_dir == "":
        if input_dir == "" or saver.folder is None:
            raise ConfigError(
                "load_state() was called without a folder: write load_state('checkpoints/first'), or let checkpoints be numbered by "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), and the newest is taken"
            )
        return _newest(saver.folder, alone, passed, allow_pickle)
    if not isinstance(input_dir, (str, os.PathLike)):
        raise ConfigError(f"load_state({input_dir!r}): a {type(input_dir).__name__} is no folder; write its path")
    where = os.fspath(input_dir)
    if remote.is_url(where):
        return _newest(where, alone, passed, allow_pickle) if remote.list_numbered(where) else _remote(where)
    folder = Path(remote.local_path(where)).expanduser()
    if folder.is_dir() and not (folder / MANIFEST).exists():
        if is_accelerate_checkpoint(folder):
            return convert_accelerate_state(read_accelerate_checkpoint(folder, allow_pickle=allow_pickle), folder)
        if numbered_checkpoints(folder):
            return _newest(str(folder), alone, passed, allow_pickle)
    return read_saved_state(open_checkpoint(folder, alone=alone), str(folder))


class _Numbered:
    """The numbered checkpoints of a folder, newest first, as they are when somebody asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Path]:
        return (path for _, path in reversed(numbered_checkpoints(self._folder)))


def _newest(folder: str, alone: bool, passed: Mapping[str, str], allow_pickle: bool) -> SavedState:
    """The newest numbered checkpoint that is whole; which were passed over, and why, is said.

    If the highest number is that of a relative's checkpoint, it is the one: its run goes on here. Behind one of ours none is looked at.
    """
    if remote.is_url(folder):
        return _newest_remote(folder)
    found_here = numbered_checkpoints(Path(folder))
    if found_here and is_accelerate_checkpoint(last := found_here[-1][1]):
        return convert_accelerate_state(read_accelerate_checkpoint(last, allow_pickle=allow_pickle), last)
    found = open_newest(_Numbered(Path(folder)), folder, alone=alone, known={Path(entry): why for entry, why in passed.items()})
    _warn_passed_over({path.name: why for path, why in found.passed_over.items()}, found.checkpoint.folder.name)
    return read_saved_state(found.checkpoint, str(found.checkpoint.folder))


def _newest_remote(url: str) -> SavedState:
    passed: dict[str, str] = {}
    for number, entry in reversed(remote.list_numbered(url)):
        holder, name = _TemporaryCopy(), f"checkpoint_{number}"
        try:
            checkpoint = open_checkpoint(remote.fetch(entry, holder.folder / name))
        except CheckpointError as error:
            passed[name] = str(error)
            continue
        _warn_passed_over(passed, name)
        return _with_copy(checkpoint, entry, holder)
    if not passed:
        raise CheckpointError(f"there is no checkpoint in {redact(url)} yet: save_state() makes the first one")
    reasons = "\n".join(f"  {name}: {why}" for name, why in passed.items())
    raise CheckpointError(f"none of the {len(passed)} checkpoints in {redact(url)} is whole:\n{reasons}")


def _remote(url: str) -> SavedState:
    holder = _TemporaryCopy()
    return _with_copy(open_checkpoint(remote.fetch(url, holder.folder / "checkpoint")), url, holder)


class _TemporaryCopy:
    """A folder for what was fetched, which goes with the last one that knows of it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def _with_copy(checkpoint: Checkpoint, where: str, holder: _TemporaryCopy) -> SavedState:
    """A checkpoint whose folder is a copy, which goes when it is no longer needed. Messages name it without what is secret in a URL."""
    return replace(read_saved_state(checkpoint, redact(where)), holder=holder)


def _warn_passed_over(passed: dict[str, str], taken: str) -> None:
    for name, why in passed.items():
        get_logger(__name__).warning(f"{name} was passed over for {taken}, which is older: {why}")
