"""Numbered checkpoints (`checkpoint_0`, `checkpoint_1`, ...): list them, read what is known without tensors, remove those not kept.

Only folders with a readable manifest count, and only they are removed. The newest checkpoint is never removed, and nothing is removed
unless the newest one is there. A removed one is renamed first, so that no crash leaves a part of it under a number; what cannot be
removed is logged and does not fail the save. `read_manifest` and `rank_files` serve loading and the command line; nothing here imports
torch.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from slipstream.checkpoint.commit import (
    LARGEST_MANIFEST,
    find_recoverable,
    hidden_path,
    names_with_leftovers,
    read_manifest_or_none,
    sweep_leftovers,
)
from slipstream.checkpoint.manifest import MANIFEST, Manifest, RankFile, parse_manifest
from slipstream.errors import CheckpointError, ConfigError, MissingCheckpointError
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk
from slipstream.files.os_errors import describe_os_error
from slipstream.files.paths import ConfinedFolder
from slipstream.logging import get_logger

__all__ = [
    "RetentionPolicy", "is_numbered", "numbered_checkpoints", "pending_rank_files", "rank_file_prefix", "rank_files", "read_manifest",
    "rotate", "unfinished_rank_files",
]


_NUMBERED: Final = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True)
class RetentionPolicy:
    """How many checkpoints stay: the newest `total_limit` (None: all), and besides them the `keep_best` best ones by their metric."""

    total_limit: int | None = None
    keep_best: int = 0
    best_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"total_limit={self.total_limit}: at least one checkpoint has to stay. Give 1 or more, or None for all.")
        if self.keep_best < 0:
            raise ConfigError(f"keep_best={self.keep_best} is no number of checkpoints. Give 0 or more.")
        if self.best_mode not in ("min", "max"):
            raise ConfigError(f"best_mode={self.best_mode!r}: give 'min' if a smaller metric is better, else 'max'.")


def is_numbered(path: Path) -> bool:
    """Whether a path has the name of a numbered checkpoint.

    >>> is_numbered(Path("runs/checkpoint_3")), is_numbered(Path("runs/best"))
    (True, False)
    """
    return _NUMBERED.fullmatch(path.name) is not None


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints in a folder, ascending; one that a crash took from its place (see `find_recoverable`) is among them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("checkpoint_10", "checkpoint_9", "checkpoint_09", "notes"):
    ...         Path(folder, name).mkdir()
    ...     [number for number, _ in numbered_checkpoints(Path(folder))]
    [9, 10]
    """
    names: set[str] = set()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        names = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    names |= {name for name in names_with_leftovers(folder) - names if _NUMBERED.fullmatch(name) and find_recoverable(folder / name)}
    return sorted((int(found[1]), folder / name) for name in names if (found := _NUMBERED.fullmatch(name)))


def rotate(folder: Path, keep: RetentionPolicy, disk: Disk, newest: Path) -> list[Path]:
    """Remove the numbered checkpoints that need not stay, after `newest` was committed; gives back which ones."""
    for name in names_with_leftovers(folder):
        if _NUMBERED.fullmatch(name):
            sweep_leftovers(folder / name, disk)
    if keep.total_limit is None or read_manifest_or_none(newest) is None:
        return []
    known = [
        (number, path, manifest) for number, path in numbered_checkpoints(folder) if (manifest := read_manifest_or_none(path)) is not None
    ]
    staying = {newest.name, *(path.name for _, path, _ in known[-keep.total_limit :]), *_best(known, keep)}
    return _remove([path for _, path, _ in known if path.name not in staying], folder, disk)


def _best(known: list[tuple[int, Path, Manifest]], keep: RetentionPolicy) -> set[str]:
    """The names of the best ones; of two equal ones the newer."""
    sign = 1 if keep.best_mode == "max" else -1
    measured = sorted((sign * manifest.metric, number, path.name) for number, path, manifest in known if manifest.metric is not None)
    return {name for _, _, name in measured[len(measured) - min(keep.keep_best, len(measured)) :]}


def _remove(paths: list[Path], folder: Path, disk: Disk) -> list[Path]:
    gone: list[Path] = []
    try:
        going = []
        for path in paths:
            going.append(hidden_path(path, "removing"))
            disk.rename(path, going[-1])
            gone.append(path)
        if going:
            disk.sync_folder(folder)  # the numbers are gone for good, before the first file goes
        for path in going:
            disk.remove_tree(path)
    except OSError as error:
        get_logger(__name__).warning(
            f"Checkpoints that are no longer kept in {folder} could not all be removed: {describe_os_error(error)}."
        )
    return gone


_NUMBERED_BESIDE: Final = r"\.checkpoint_[0-9]{1,18}\."
_UNFINISHED: Final = re.compile(r"rank-[0-9a-f]{8}-[0-9a-f]{16}", re.ASCII)
_LONGEST: Final = 100  # with what is put around it a name stays below the 255 bytes of every file system
_OF_ACCELERATE: Final = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict)(_\d{1,9})?\.bin|scaler\.pt|(random_states|custom_checkpoint)_\d{1,9}\.pkl", re.ASCII
)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; an error that says what is there instead if there is none."""
    where = str(folder / MANIFEST)
    try:
        with ConfinedFolder(folder) as opened:
            data = opened.read(MANIFEST, LARGEST_MANIFEST)
    except FileNotFoundError:
        raise MissingCheckpointError(_missing_manifest_error(folder)) from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file, and a checkpoint is a folder: pass the folder that save_state made") from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    return parse_manifest(data, where)


def _missing_manifest_error(folder: Path) -> str:
    if not folder.exists():
        near = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())[:8] if folder.parent.is_dir() else []
        there = f"; in {folder.parent} there are {', '.join(near)}" if near else ""
        return f"there is no checkpoint at {folder}{there}"
    names = sorted(os.listdir(folder))
    if any(map(_OF_ACCELERATE.fullmatch, names)):
        told = f"it has no {MANIFEST}. load_state reads it, and save_state makes one of ours"
        return f"{folder} is a checkpoint of Accelerate, or looks like one: {told}"
    held = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"
    return f"{folder} is no checkpoint, or one whose save did not come to its end: it has no {MANIFEST} (it holds {held})"


def rank_files(target: Path, stamp: str) -> dict[int, Path]:
    """Where the files of ranks are that were added to a checkpoint after its manifest was written; of two of one rank the later one."""
    try:
        inside = [(path, found) for path in target.iterdir() if (found := RankFile.of(path.name)) is not None]
        inside.sort(key=lambda entry: (entry[0].lstat().st_mtime_ns, entry[0].name))
    except FileNotFoundError:
        raise CheckpointError(f"{target} was removed while it was being read") from None
    return {found.rank: path for path, found in [*inside, *pending_rank_files(target)] if found.stamp == stamp}


def rank_file_prefix(target: Path) -> str:
    """What the names of files begin with that ranks put beside a checkpoint.

    >>> rank_file_prefix(Path("runs/first"))
    '.first.'
    """
    encoded = os.fsencode(target.name)
    return f".{target.name}." if len(encoded) <= _LONGEST else f".{encoded[:_LONGEST].decode(errors='ignore')}~{digest(encoded)}."


def pending_rank_files(target: Path) -> list[tuple[Path, RankFile]]:
    """Files of ranks that wait beside a checkpoint: they came before it, and its commit takes them in.

    If it is numbered, those of all numbers: a rank may count otherwise than the main process, which may have saved alone before. The
    stamp in a name tells to which save it belongs.
    """
    return [(target.parent / name, found) for name, rest in _hidden_beside(target) if (found := RankFile.of(rest)) is not None]


def unfinished_rank_files(target: Path) -> list[Path]:
    """Files beside a checkpoint that ranks are writing, or did not come to write."""
    return [target.parent / name for name, rest in _hidden_beside(target) if _UNFINISHED.fullmatch(rest)]


def _hidden_beside(target: Path) -> list[tuple[str, str]]:
    """Hidden names beside a checkpoint, and what follows its name in them."""
    pattern = re.compile(_NUMBERED_BESIDE if is_numbered(target) else re.escape(rank_file_prefix(target)))
    with suppress(FileNotFoundError), os.scandir(target.parent) as entries:
        return [(entry.name, entry.name[match.end() :]) for entry in entries if (match := pattern.match(entry.name))]
    return []
