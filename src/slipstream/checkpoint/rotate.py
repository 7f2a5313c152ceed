"""Numbered checkpoints, `checkpoint_0`, `checkpoint_1`, ..., and which of them stay.

Only folders with a readable manifest count, and only they are removed: a folder of that name that holds something else is left alone.
The newest checkpoint is never removed, and nothing is removed unless the newest one is there. One that goes is renamed first, so that no
crash leaves a part of it under a number. What cannot be removed is said; it is no reason for a save to fail.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from slipstream.checkpoint.format import Manifest
from slipstream.checkpoint.leftovers import hidden, manifest_of, recover, sweep, swept_names
from slipstream.errors import ConfigError
from slipstream.files.disk import Disk
from slipstream.files.trouble import told
from slipstream.logging import get_logger

__all__ = ["Keep", "is_numbered", "numbered", "rotate"]

_NUMBERED: Final = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True)
class Keep:
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


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints in a folder, ascending; one that a crash took from its place (see `recover`) is among them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("checkpoint_10", "checkpoint_9", "checkpoint_09", "notes"):
    ...         Path(folder, name).mkdir()
    ...     [number for number, _ in numbered(Path(folder))]
    [9, 10]
    """
    names: set[str] = set()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        names = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    names |= {name for name in swept_names(folder) - names if _NUMBERED.fullmatch(name) and recover(folder / name)}
    return sorted((int(found[1]), folder / name) for name in names if (found := _NUMBERED.fullmatch(name)))


def rotate(folder: Path, keep: Keep, disk: Disk, newest: Path) -> list[Path]:
    """Remove the numbered checkpoints that need not stay, after `newest` was committed; gives back which ones."""
    for name in swept_names(folder):
        if _NUMBERED.fullmatch(name):
            sweep(folder / name, disk)
    if keep.total_limit is None or manifest_of(newest) is None:
        return []
    known = [(number, path, manifest) for number, path in numbered(folder) if (manifest := manifest_of(path)) is not None]
    staying = {newest.name, *(path.name for _, path, _ in known[-keep.total_limit :]), *_best(known, keep)}
    return _remove([path for _, path, _ in known if path.name not in staying], folder, disk)


def _best(known: list[tuple[int, Path, Manifest]], keep: Keep) -> set[str]:
    """The names of the best ones; of two equal ones the newer."""
    sign = 1 if keep.best_mode == "max" else -1
    measured = sorted((sign * manifest.metric, number, path.name) for number, path, manifest in known if manifest.metric is not None)
    return {name for _, _, name in measured[len(measured) - min(keep.keep_best, len(measured)) :]}


def _remove(paths: list[Path], folder: Path, disk: Disk) -> list[Path]:
    gone: list[Path] = []
    try:
        going = []
        for path in paths:
            going.append(hidden(path, "removing"))
            disk.rename(path, going[-1])
            gone.append(path)
        if going:
            disk.sync_folder(folder)  # the numbers are gone for good, before the first file goes
        for path in going:
            disk.remove_tree(path)
    except OSError as error:
        get_logger(__name__).warning(f"Checkpoints that are no longer kept in {folder} could not all be removed: {told(error)}.")
    return gone
