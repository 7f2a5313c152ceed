"""Numbered checkpoints (`checkpoint_0`, `checkpoint_1`, ...): list them, tell which are complete, and remove those not kept.

Only folders with a readable manifest count, and only they are removed. The newest checkpoint is never removed, nothing is removed unless
the newest one is there, and the newest complete one stays until a newer one is complete. A checkpoint is renamed before it is removed, so
that no crash leaves a part of it under a number; a failure to remove is logged and does not fail the save. Nothing here imports torch.

Ranks save without waiting for each other: the main process commits, and every other rank adds its state before or after that. A rank that
is killed in between leaves a checkpoint without its state (`find_incomplete`). A checkpoint of the main process alone is complete.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.checkpoint.commit import find_recoverable, hidden_path, names_with_leftovers, sweep_leftovers
from slipstream.checkpoint.manifest import Manifest, checkpoint_number, rank_files, rank_markers, read_manifest_or_none
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.disk import Disk
from slipstream.files.os_errors import describe_os_error
from slipstream.logging import get_logger

__all__ = [
    "NumberedCheckpoint", "RetentionPolicy", "describe_checkpoint", "find_incomplete", "find_protected", "numbered_checkpoints",
    "remove_outdated", "rotate",
]


@dataclass(frozen=True)
class NumberedCheckpoint:
    """A numbered checkpoint, and the ranks whose state is in it."""

    name: str
    """The name of its folder, or its URL."""
    manifest: Manifest
    ranks: frozenset[int]
    markers: tuple[Path, ...] = ()
    """Files of ranks that have begun to save their state and have not finished."""

    @property
    def has_all_ranks(self) -> bool:
        """Whether every rank that can save to this folder has done so."""
        return len(self.ranks) >= (self.manifest.savers or self.manifest.world)

    @property
    def is_joint(self) -> bool:
        """Whether another rank than the main process took part in the save."""
        return len(self.ranks) > 1 or bool(self.markers)

    @property
    def missing(self) -> str:
        """The missing ranks, as messages name them."""
        absent = [rank for rank in range(self.manifest.world) if rank not in self.ranks]
        return f"rank {', '.join(map(str, absent[:8]))}{', ...' if len(absent) > 8 else ''}"


def find_incomplete(known: Sequence[NumberedCheckpoint]) -> list[NumberedCheckpoint]:
    """Return the checkpoints without the state of a rank that took part in the save.

    Without a trace of another rank, a checkpoint is complete unless other ranks took part in another save from the same line of the
    script: then the rank was killed before it came to this one.
    """
    joint_sites = {checkpoint.manifest.site for checkpoint in known if checkpoint.is_joint} - {""}
    return [
        checkpoint
        for checkpoint in known
        if not checkpoint.has_all_ranks and (checkpoint.is_joint or checkpoint.manifest.site in joint_sites)
    ]


def find_protected(known: Sequence[NumberedCheckpoint], newest: str) -> set[str]:
    """Return the checkpoints, given in ascending order, that stay until `newest` is complete.

    These are the newest one with the state of all ranks, and the one before `newest`, which a rank whose async save is behind may still
    complete. None are needed if the main process saves alone: no other rank took part in an earlier save from the same line.
    """
    position = next((index for index, checkpoint in enumerate(known) if checkpoint.name == newest), None)
    if position is None:  # removed a moment ago
        return {checkpoint.name for checkpoint in known}
    current, earlier = known[position], known[:position]
    with_all_ranks = [checkpoint.name for checkpoint in known if checkpoint.has_all_ranks]
    if current.has_all_ranks or not with_all_ranks:
        return set()
    site = current.manifest.site
    from_here = [checkpoint for checkpoint in earlier if site and checkpoint.manifest.site == site]
    if from_here and not any(checkpoint.is_joint for checkpoint in (*from_here, current)):
        return set()
    return {with_all_ranks[-1], *(checkpoint.name for checkpoint in earlier[-1:])}


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
            raise ConfigError(f"keep_best={self.keep_best} is not a number of checkpoints. Give 0 or more.")
        if self.best_mode not in ("min", "max"):
            raise ConfigError(f"best_mode={self.best_mode!r}: give 'min' if a smaller metric is better, else 'max'.")

    def find_outdated(self, known: Sequence[tuple[str, float | None]], newest: str, protected: Collection[str] = ()) -> list[str]:
        """Return the names that need not stay, of checkpoints given as (name, metric) in ascending order; `newest` stays.

        >>> RetentionPolicy(total_limit=1, keep_best=1).find_outdated([("a", 0.1), ("b", 0.2), ("c", 0.3)], "c")
        ['b']
        """
        if self.total_limit is None:
            return []
        sign = 1 if self.best_mode == "max" else -1
        ranked = sorted((sign * metric, index, name) for index, (name, metric) in enumerate(known) if metric is not None)
        best = [name for _, _, name in ranked[max(0, len(ranked) - self.keep_best) :]]  # of equal ones the newer
        staying = {newest, *best, *protected, *(name for name, _ in known[-self.total_limit :])}
        return [name for name, _ in known if name not in staying]


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the numbered checkpoints in a folder, ascending, with those that a crash left under a hidden name (`find_recoverable`).

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


def describe_checkpoint(path: Path) -> NumberedCheckpoint | None:
    """Return a checkpoint and the ranks whose state is in it, or None if it has no readable manifest."""
    folder = find_recoverable(path) or path
    manifest = read_manifest_or_none(folder)
    if manifest is None:
        return None
    ranks, markers = frozenset(manifest.ranks), list[Path]()
    if len(ranks) < manifest.world:
        with suppress(CheckpointError):  # it was removed a moment ago
            ranks |= rank_files(folder, manifest.stamp).keys()
        markers = rank_markers(path, manifest.stamp)
    return NumberedCheckpoint(path.name, manifest, ranks, tuple(markers))


def rotate(folder: Path, policy: RetentionPolicy, disk: Disk, newest: Path) -> list[Path]:
    """Remove the leftovers of dead saves, and the numbered checkpoints that need not stay, after `newest` was committed; return these."""
    for name in names_with_leftovers(folder):
        if checkpoint_number(name) is not None:
            sweep_leftovers(folder / name, disk)
    return remove_outdated(folder, policy, disk, newest)


def remove_outdated(folder: Path, policy: RetentionPolicy, disk: Disk, newest: Path) -> list[Path]:
    """Remove the numbered checkpoints that need not stay, now that `newest` is there; return them. Ranks may do it at once."""
    if policy.total_limit is None or read_manifest_or_none(newest) is None:
        return []
    known = [found for _, path in numbered_checkpoints(folder) if (found := describe_checkpoint(path)) is not None]
    protected = find_protected(known, newest.name)
    metrics = [(checkpoint.name, checkpoint.manifest.metric) for checkpoint in known]
    outdated = set(policy.find_outdated(metrics, newest.name, protected))
    gone = _remove([folder / checkpoint.name for checkpoint in known if checkpoint.name in outdated], folder, disk)
    for marker in (marker for checkpoint in known if folder / checkpoint.name in gone for marker in checkpoint.markers):
        with suppress(OSError):
            disk.remove(marker)
    return gone


def _remove(paths: list[Path], folder: Path, disk: Disk) -> list[Path]:
    renamed: dict[Path, Path] = {}
    try:
        for path in paths:
            with suppress(FileNotFoundError):  # another rank removes it
                hidden = hidden_path(path, "removing")
                disk.rename(path, hidden)
                renamed[path] = hidden
        if renamed:
            disk.sync_folder(folder)  # the numbers are gone for good before the first file is removed
        for hidden in renamed.values():
            with suppress(FileNotFoundError):  # a save removes leftovers
                disk.remove_tree(hidden)
    except OSError as error:
        get_logger(__name__).warning(
            f"Checkpoints that are no longer kept in {folder} could not all be removed: {describe_os_error(error)}."
        )
    return list(renamed)
