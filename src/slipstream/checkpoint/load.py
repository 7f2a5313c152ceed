"""Reading a checkpoint: first all of it is read and verified, then it can be asked for its parts.

Every file is read once, into memory, and its checksum taken on the way: what was verified is what is used, whatever happens to the
file afterwards. Nothing is handed out before every file has the size and the checksum that the manifest says, so a broken checkpoint
changes nothing in a run. Files are opened inside the folder alone; nothing in it can name a path elsewhere.

Of files with pieces of sharded tensors only the headers are read now; the pieces a rank needs are verified when it reads them, which is
before anything changes too.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.assembling import StandIns, open_pieces
from slipstream.checkpoint.format import MANIFEST, Manifest, RankFile
from slipstream.checkpoint.leftovers import recover
from slipstream.checkpoint.lookup import rank_files, read_manifest
from slipstream.checkpoint.plain import read_part
from slipstream.checkpoint.tensor_file import Content, read_tensor_file, tensors_in
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.blocks import sums_name
from slipstream.files.inside import open_inside
from slipstream.files.reading import read_whole
from slipstream.runtime.progress import bar

__all__ = ["Checkpoint", "Found", "newest", "open_checkpoint"]

_LOOKS: Final = 5
_ATTEMPTS: Final = 20  # for a folder that other saves replace while it is read: at least this often, and at least this long
_PATIENCE_SECONDS: Final = 60.0
_LARGEST_RANK_FILE: Final = 16 << 20  # every rank looks at those of all ranks: what one passes over, all of them do
_LARGEST_WORLD: Final = 256


@dataclass
class Checkpoint:
    """A checkpoint that was read and verified."""

    folder: Path
    manifest: Manifest
    buffers: dict[str, Content] = field(repr=False)
    """What its files hold: tensors, or bytes; taken out as they are used."""
    stand_ins: StandIns = field(default_factory=StandIns, repr=False)
    """What stands for tensors that are in pieces."""
    _late: dict[int, Path] | None = field(default=None, repr=False)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a model, by name; their memory is handed over. Those that are in pieces are stand-ins."""
        tensors: dict[str, torch.Tensor] = {}
        for name in self.manifest.models[number].files:
            for key, tensor in tensors_in(self.buffers.pop(name), self._path(name)).tensors.items():
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
        folder = recover(folder) or folder
    began = time.monotonic()
    for attempt in itertools.count(1):
        before = _mark(folder)
        try:
            return _read_all(folder, read_manifest(folder), keep, alone)
        except CheckpointError:
            if _mark(folder) == before:  # else another save has taken its place in the meantime: that is read
                raise
            if attempt >= _ATTEMPTS and time.monotonic() - began > _PATIENCE_SECONDS:
                break
    raise CheckpointError(f"{folder} is replaced by other saves faster than it can be read: copy it, or read it while nobody saves")


def _mark(folder: Path) -> tuple[int, ...] | None:
    """What tells a checkpoint from one that takes its place; a folder that is exchanged at this moment is there the next time one looks."""
    for _ in range(_LOOKS):
        with suppress(OSError):
            around, found = os.stat(folder), os.stat(folder / MANIFEST, follow_symlinks=False)
            return around.st_dev, around.st_ino, found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _read_all(folder: Path, manifest: Manifest, keep: Callable[[str], bool], alone: bool) -> Checkpoint:
    buffers = {}
    pieces = manifest.all_pieces()
    known = _parts(manifest) | set(map(sums_name, pieces))
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
) -> Content:
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
class Found:
    """The newest checkpoint that is whole, and why newer ones were passed over."""

    checkpoint: Checkpoint
    passed_over: Mapping[Path, str]


def newest(candidates: Iterable[Path], where: str, *, alone: bool = False, known: Mapping[Path, str] | None = None) -> Found:
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
                return Found(checkpoint, passed)
            except (CheckpointError, FileNotFoundError) as error:
                if folder.exists() or recover(folder):
                    passed[folder] = str(error)
                else:
                    gone.add(folder)
    if not passed:
        raise MissingCheckpointError(f"there is no checkpoint in {where} yet: save_state() makes the first one")
    reasons = "\n".join(f"  {folder.name}: {why}" for folder, why in passed.items())
    raise CheckpointError(f"none of the {len(passed)} checkpoints in {where} is whole:\n{reasons}")
