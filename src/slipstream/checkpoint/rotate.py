"""Numbered checkpoints (`checkpoint_0`, `checkpoint_1`, ...): list them and remove those not kept.

Only folders with a readable manifest count, and only they are removed. The newest checkpoint is never removed, and nothing is removed
unless the newest one is there. A removed one is renamed first, so that no crash leaves a part of it under a number; what cannot be
removed is logged and does not fail the save. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.checkpoint.commit import find_recoverable, hidden_path, names_with_leftovers, sweep_leftovers
from slipstream.checkpoint.manifest import checkpoint_number, read_manifest_or_none
from slipstream.errors import ConfigError
from slipstream.files.disk import Disk
from slipstream.files.os_errors import describe_os_error
from slipstream.logging import get_logger

__all__ = ["RetentionPolicy", "numbered_checkpoints", "rotate"]


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


    def find_outdated(self, known: Sequence[tuple[int, str, float | None]], newest: str) -> list[str]:
        """Return the names that need not stay, of checkpoints given as (number, name, metric) in ascending order; `newest` stays.

        >>> RetentionPolicy(total_limit=1, keep_best=1).find_outdated([(0, "a", 0.1), (1, "b", 0.2), (2, "c", 0.3)], "c")
        ['b']
        """
        if self.total_limit is None:
            return []
        sign = 1 if self.best_mode == "max" else -1
        ranked = sorted((sign * metric, number, name) for number, name, metric in known if metric is not None)  # of equal ones the newer
        best = [name for _, _, name in ranked[max(0, len(ranked) - self.keep_best) :]]
        staying = {newest, *best, *(name for _, name, _ in known[-self.total_limit :])}
        return [name for _, name, _ in known if name not in staying]


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the numbered checkpoints in a folder, ascending, with those that a crash took from their place (`find_recoverable`).

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
    lost = {name for name in names_with_leftovers(folder) - names if checkpoint_number(name) is not None}
    names |= {name for name in lost if find_recoverable(folder / name)}
    return sorted((number, folder / name) for name in names if (number := checkpoint_number(name)) is not None)


def rotate(folder: Path, policy: RetentionPolicy, disk: Disk, newest: Path) -> list[Path]:
    """Remove the numbered checkpoints that need not stay, after `newest` was committed; return which ones."""
    for name in names_with_leftovers(folder):
        if checkpoint_number(name) is not None:
            sweep_leftovers(folder / name, disk)
    if policy.total_limit is None or read_manifest_or_none(newest) is None:
        return []
    known = [
        (number, path.name, manifest.metric)
        for number, path in numbered_checkpoints(folder)
        if (manifest := read_manifest_or_none(path)) is not None
    ]
    return _remove([folder / name for name in policy.find_outdated(known, newest.name)], folder, disk)


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
