"""Write a snapshot to its destination: the files of a checkpoint, and the manifest that commits them.

The writing process (the main process, or the first of each machine) writes the shared state and its own; every other rank writes one
small file. No rank waits for another: a rank puts its file beside the checkpoint, and whichever is later, the rank or the commit, moves
it inside. Each rank writes its shards of sharded state with block checksums, and the writing rank verifies that they are complete before
it commits. A destination is a local folder (`LocalDestination`) or a URL (`RemoteTarget`), with the same methods.
"""

from __future__ import annotations

import datetime
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from slipstream.checkpoint import remote
from slipstream.checkpoint.capture import ModelPart, ShardedPart, Snapshot, StatePart, package_versions
from slipstream.checkpoint.commit import LocalStage, LocalTarget, write_latest
from slipstream.checkpoint.full_tensors import FullTensors
from slipstream.checkpoint.manifest import (
    Manifest,
    ModelEntry,
    RankFile,
    checkpoint_number,
    pending_and_unfinished,
    rank_file_prefix,
    rank_marker,
    rank_markers,
    read_manifest_or_none,
    split_stamp,
)
from slipstream.checkpoint.rotate import RetentionPolicy, describe_checkpoint, numbered_checkpoints, remove_outdated, rotate
from slipstream.checkpoint.serialize import encode_tree
from slipstream.checkpoint.shard_layout import describe_positions
from slipstream.checkpoint.tensor_bytes import EncodedFile, encode_tensors, read_own_bytes
from slipstream.checkpoint.weights import plan_shards, shard_names, write_weights
from slipstream.distributed.progress_bar import bar, counted
from slipstream.errors import CheckpointError
from slipstream.files.checksum import BlockChecksums, Digest, checksums_name
from slipstream.files.disk import Disk, FileEntry
from slipstream.files.object_store import is_url, local_path
from slipstream.files.os_errors import describe_os_error, suggest_remedy
from slipstream.logging import get_logger

__all__ = [
    "Destination", "LocalDestination", "RankContribution", "Stage", "WrittenParts", "adopt_hook_files", "checkpoint_numbers",
    "commit_manifest", "open_destination", "write_checkpoint", "write_parts",
]

_ABANDONED_SECONDS: Final = 3600.0
"""After this time a rank's file that waits beside a checkpoint is removed."""

Stage: TypeAlias = LocalStage | remote.RemoteStage
"""Where a checkpoint is written before the commit."""


@dataclass
class RankContribution:
    """The files that one rank has written into a stage."""

    rank: int
    own: str
    """The file with the state of this rank."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    shards: dict[str, list[str]] = field(default_factory=dict)
    """Shard files, by the name of their model or part."""
    elements: dict[str, int] = field(default_factory=dict)
    """The number of elements in them."""
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for other ranks."""
        return {**vars(self), "files": {name: [entry.size, entry.checksum] for name, entry in self.files.items()}}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RankContribution:
        """Return the contribution that `to_dict` was called on.

        >>> contribution = RankContribution(1, "rank_1.json", {"rank_1.json": FileEntry(3, "00")}, {"model": []})
        >>> RankContribution.from_dict(contribution.to_dict()) == contribution
        True
        """
        return RankContribution(**{**data, "files": {name: FileEntry(*entry) for name, entry in data["files"].items()}})


@dataclass
class WrittenParts:
    """The parts that one process has written into a stage."""

    contribution: RankContribution
    models: tuple[ModelEntry, ...] = ()
    optimizers: tuple[str, ...] = ()
    training: str | None = None
    objects: tuple[str, ...] = ()


def write_checkpoint(
    stage: Stage, snapshot: Snapshot, *, max_shard_size: int | None = None, reusable: Sequence[Path] = (), dedup: bool = False
) -> Manifest:
    """Write and commit; with `dedup`, files that are unchanged since one of the `reusable` checkpoints are linked to it."""
    return commit_manifest(stage, snapshot, write_parts(stage, snapshot, max_shard_size=max_shard_size, reusable=reusable, dedup=dedup))


def write_parts(
    stage: Stage,
    snapshot: Snapshot,
    *,
    max_shard_size: int | None = None,
    reusable: Sequence[Path] = (),
    dedup: bool = False,
    full: FullTensors | None = None,
) -> WrittenParts:
    """Write everything in a snapshot without committing it. With `dedup`, frozen weights get separate files.

    `full` puts sharded weights together that are to be written whole.
    """
    snapshot.ready()
    with bar(snapshot.size, "saving", "B") as shown:
        writer = _Writer(stage, reusable if dedup else (), shown.update)
        contribution = RankContribution(snapshot.rank, "", writer.files)
        for part in snapshot.shards:
            name = f"{part.base}-rank-{snapshot.rank + 1:05d}-of-{snapshot.facts.world:05d}"
            contribution.shards[part.base] = _write_shards(writer, part, name, max_shard_size, separate_frozen=dedup)
            contribution.elements[part.base] = sum(tensor.numel() for tensor in part.tensors.values())
            contribution.aliases[part.base] = dict(part.aliases)
        written = WrittenParts(
            contribution,
            models=tuple(_write_model(writer, model, max_shard_size, separate_frozen=dedup, full=full) for model in snapshot.models),
            optimizers=tuple(map(writer.part, snapshot.optimizers)),
            training=None if snapshot.training is None else writer.part(snapshot.training),
            objects=tuple(map(writer.part, snapshot.objects)),
        )
        contribution.own = writer.part(snapshot.own)
        stage.flush()
        return written


def commit_manifest(stage: Stage, snapshot: Snapshot, written: WrittenParts, others: Sequence[RankContribution] = ()) -> Manifest:
    """Commit the parts that this process and others have written."""
    ranks = sorted([written.contribution, *others], key=lambda contribution: contribution.rank)
    files = {name: entry for contribution in ranks for name, entry in contribution.files.items()}
    adopt_hook_files(stage, files)
    _check_complete(snapshot.shards, ranks, str(stage.folder))
    shards = {part.base: tuple(name for rank in ranks for name in rank.shards.get(part.base, ())) for part in snapshot.shards}
    manifest = Manifest(
        **vars(snapshot.facts),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        written_by=f"slipstream {package_versions()['slipstream']}",
        files=files,
        models=tuple(
            replace(model, aliases={**model.aliases, **_merge_aliases(ranks, part.base)}, shards=shards.get(part.base, ()))
            for model, part in zip(written.models, snapshot.models, strict=True)
        ),
        optimizers=written.optimizers,
        training=written.training,
        objects=written.objects,
        ranks={contribution.rank: contribution.own for contribution in ranks},
        shards={
            name: found
            for name in (*written.optimizers, written.training, *written.objects)
            if name is not None and (found := shards.get(Path(name).stem))
        },
    )
    stage.commit(manifest.dump())
    return manifest


def _merge_aliases(ranks: Sequence[RankContribution], base: str) -> dict[str, str]:
    """Return the aliases of tied weights, of all ranks: a rank without elements of a tensor cannot see that it is tied."""
    return {name: kept for contribution in ranks for name, kept in contribution.aliases.get(base, {}).items()}


def _check_complete(parts: Sequence[ShardedPart], ranks: Sequence[RankContribution], where: str) -> None:
    """Raise if the shards that were written do not cover the sharded tensors."""
    for part in parts:
        aliases = _merge_aliases(ranks, part.base)
        wanted = sum(math.prod(shape) for name, shape in part.shapes.items() if name not in aliases)
        counts = {contribution.rank: contribution.elements.get(part.base, 0) for contribution in ranks}
        if sum(counts.values()) != wanted:
            stored = ", ".join(f"rank {rank}: {count:,}" for rank, count in counts.items())
            raise CheckpointError(
                f"{where} was not saved: the sharded tensors of {part.base} have {wanted:,} elements, and the ranks stored "
                f"{sum(counts.values()):,} of them ({stored}). Every rank must save the same objects, prepared in the same order."
            )


class _Writer:
    """Adds files to a stage and lists them."""

    def __init__(self, stage: Stage, reusable: Sequence[Path], advance: Callable[[int], object]) -> None:
        self.files: dict[str, FileEntry] = {}
        self._stage = stage
        self._advance = advance
        self._reusable: list[tuple[Path, dict[FileEntry, str]]] = []
        for folder in reusable:
            manifest = read_manifest_or_none(folder)
            if manifest is not None:  # else everything is written
                self._reusable.append((folder, {entry: name for name, entry in manifest.files.items()}))

    def part(self, part: StatePart) -> str:
        name, encoded = encode_tree(part.name, part.tree, part.tensors)
        self._add(name, *encoded)
        return name

    def bytes(self, name: str, data: bytes) -> None:
        self._add(name, [data], len(data))

    def tensors(self, name: str, encode: Callable[[], EncodedFile]) -> None:
        """Write a file of weights, or link an equal earlier one; for the comparison it is encoded once more."""
        if not (self._reusable and self._reuse(name, *encode())):
            self._add(name, *encode())

    def stream(self, name: str, encode: Callable[[], EncodedFile]) -> None:
        """Write a file of weights that can be encoded only once, and whose chunks are valid until the next one."""
        self._add(name, *encode())

    def _add(self, name: str, chunks: Iterable[Any], size: int) -> None:
        self.files[name] = self._stage.add(name, counted(chunks, self._advance), size)

    def _reuse(self, name: str, chunks: Iterable[Any], size: int) -> bool:
        digest = Digest()
        for chunk in chunks:
            digest.update(chunk)
        entry = FileEntry(size, digest.hexdigest())
        for folder, known in self._reusable:
            if entry in known and self._stage.reuse(name, folder / known[entry], entry):
                self.files[name] = entry
                self._advance(size)
                return True
        return False


def adopt_hook_files(stage: Stage, files: dict[str, FileEntry]) -> None:
    """Add the files that save hooks wrote."""
    for name in sorted(_names_in(str(stage.folder))):
        if name not in files and not name.startswith("."):
            files[name] = stage.adopt(name)


def _names_in(folder: str, below: str = "") -> Iterator[str]:
    """Yield the names of all files in a folder, and of links, which are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _names_in(entry.path, f"{below}{entry.name}/")
            else:
                yield below + entry.name


def _write_model(
    writer: _Writer, model: ModelPart, max_shard_size: int | None, *, separate_frozen: bool, full: FullTensors | None
) -> ModelEntry:
    names: list[str] = []
    index = None
    if model.tensors or not model.sharded:
        base = f"{model.base}-rest" if model.sharded else model.base  # not taken for the weights of the model, which are mostly in shards
        frozen = model.frozen if separate_frozen else frozenset()
        add, read = (writer.tensors, read_own_bytes) if full is None else (writer.stream, full.read)
        names, index = write_weights(add, base, model.tensors, model.aliases, max_shard_size, frozen, read)
    extra = None if model.extra is None else writer.part(model.extra)
    return ModelEntry(model.kind, tuple(names), model.aliases, index, extra, model.number)


def _write_shards(writer: _Writer, part: ShardedPart, base: str, max_shard_size: int | None, *, separate_frozen: bool) -> list[str]:
    """Write the shards that this rank stores, with a file of block checksums for each shard file; return the names of these."""
    frozen = part.frozen if separate_frozen else frozenset()
    groups = [group for group in plan_shards(part.tensors, max_shard_size, frozen) if group]
    names = shard_names(base, len(groups)) if groups else []
    for name, group in zip(names, groups, strict=True):
        sums = BlockChecksums()

        def encode(group: Sequence[str] = group) -> EncodedFile:
            nonlocal sums
            sums = BlockChecksums()
            metadata = describe_positions({key: part.positions[key] for key in group})
            chunks, size = encode_tensors({key: part.tensors[key] for key in group}, metadata)
            return sums.passing(chunks), size

        writer.tensors(name, encode)
        writer.bytes(checksums_name(name), sums.taken())
    return names


# -- destinations -----------------------------------------------------------------------------------------------------


class LocalDestination(LocalTarget):
    """A checkpoint folder, with the files of other ranks and the numbered checkpoints beside it."""

    def mark_rank(self, rank: int, stamp: str) -> None:
        """Leave an empty file until `add_rank_file` has returned: without it, and without the rank, the checkpoint is incomplete."""
        with suppress(OSError):  # whatever is wrong here, `add_rank_file` says so
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._marker(rank, stamp).touch()

    def _marker(self, rank: int, stamp: str) -> Path:
        return self.path.parent / f"{rank_file_prefix(self.path)}{rank_marker(rank, stamp)}"

    def add_rank_file(self, snapshot: Snapshot) -> None:
        """Add the state of a rank that does not write the checkpoint: inside if that is there already, else beside it."""
        target, disk = self.path, self.disk
        rank, stamp = snapshot.rank, snapshot.facts.stamp
        step, run = split_stamp(stamp)
        temporary = target.parent / f"{rank_file_prefix(target)}rank-{run}-{secrets.token_hex(8)}"
        snapshot.ready()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _, encoded = encode_tree(snapshot.own.name, snapshot.own.tree, snapshot.own.tensors)
            written = disk.write(temporary, *encoded)
            disk.rename(temporary, target.parent / f"{rank_file_prefix(target)}{RankFile(rank, stamp, written.checksum).name}")
            disk.sync_folder(target.parent)
            self._marker(rank, stamp).unlink(missing_ok=True)
            for path, manifest in _candidate_targets(target):  # the commit came first
                saved_step, saved_run = split_stamp(manifest.stamp)
                if manifest.stamp == stamp or (saved_run == run and saved_step > step):
                    _collect_rank_files(path, manifest.stamp, disk)
                    break
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise CheckpointError(
                f"{target}: the state of rank {rank} could not be saved: {describe_os_error(error)}.\n{suggest_remedy(error)}"
            ) from error

    def collect(self, stamp: str) -> None:
        """Move the files that other ranks have added so far into the checkpoint."""
        try:
            _collect_rank_files(self.path, stamp, self.disk)
        except OSError as error:
            get_logger(__name__).warning(
                f"{self.path} is saved. Files of other ranks beside it could not be moved into it ({describe_os_error(error)}). They are "
                "read where they are; move the hidden files with the folder."
            )

    def mark_latest(self) -> None:
        """Make this checkpoint the one that `latest` names."""
        write_latest(self.path.parent, self.path.name, self.disk)

    def rotate(self, policy: RetentionPolicy) -> None:
        """Remove numbered checkpoints that are no longer kept, and leftovers of dead saves."""
        rotate(self.path.parent, policy, self.disk, newest=self.path)

    def rotate_if_complete(self, policy: RetentionPolicy, stamp: str) -> None:
        """Remove checkpoints that are no longer kept, if a rank has just added the last state that one was waiting for."""
        for _, path in reversed(numbered_checkpoints(self.path.parent) if policy.total_limit is not None else []):
            found = describe_checkpoint(path)
            if found is not None and found.manifest.stamp == stamp:
                if found.has_all_ranks:
                    remove_outdated(self.path.parent, policy, self.disk, newest=path)
                return

    def reusable(self, last: str | None) -> list[Path]:
        """Return checkpoints whose unchanged files can be linked, the most likely first; `last` is the last one of this run."""
        newest = [folder for _, folder in numbered_checkpoints(self.path.parent)][-1:]
        return list(dict.fromkeys([self.path, *([] if last is None else [Path(last).absolute()]), *newest]))


Destination: TypeAlias = LocalDestination | remote.RemoteTarget


def open_destination(target: str, disk: Disk) -> Destination:
    """Return the destination that a path or URL names.

    >>> type(open_destination("runs/first", Disk())).__name__, type(open_destination("memory://first", Disk())).__name__
    ('LocalDestination', 'RemoteTarget')
    """
    return remote.RemoteTarget(target) if is_url(target) else LocalDestination(local_path(target), disk)


def checkpoint_numbers(folder: str) -> list[int]:
    """Return the numbers of the checkpoints in a folder, ascending."""
    found = remote.list_numbered(folder) if is_url(folder) else numbered_checkpoints(Path(local_path(folder)))
    return [number for number, _ in found]


def _collect_rank_files(target: Path, stamp: str, disk: Disk) -> None:
    """Move files of other ranks from beside a committed checkpoint into it; remove those without a checkpoint."""
    waiting, begun = pending_and_unfinished(target)
    homes = {target: stamp}
    if any(found.stamp != stamp or not path.name.startswith(rank_file_prefix(target)) for path, found in waiting):  # late or killed ranks
        homes |= {path: manifest.stamp for path, manifest in _candidate_targets(target) if path != target}
    for path, found in waiting:
        with suppress(FileNotFoundError):  # another process moves it
            home = _find_home(path, found, homes)
            if home is not None:
                _move_into(path, found, home, disk)
            elif _is_outdated(path, found.stamp, target, stamp):
                disk.remove(path)
    unfinished = [path for path in begun if f".rank-{split_stamp(stamp)[1]}-" not in path.name]
    candidates = _candidate_targets(target) if unfinished else []
    needed = {marker for path, manifest in candidates for marker in rank_markers(path, manifest.stamp)}
    for path in unfinished:
        with suppress(FileNotFoundError):
            if path not in needed and _is_abandoned(path, target):
                disk.remove(path)


def _find_home(path: Path, found: RankFile, homes: Mapping[Path, str]) -> Path | None:
    """Return the checkpoint that a waiting file belongs to: one with its stamp, at the number that its rank expected or higher.

    The main process may have saved alone before, so its number may be higher. Two saves without a step in between have the same stamp; a
    file that is written before its own checkpoint must not go into the one before that.
    """
    least = checkpoint_number(path.name.split(".")[1]) or 0
    numbers = {home: checkpoint_number(home.name) for home, stamp in homes.items() if stamp == found.stamp}
    later = {home: number or 0 for home, number in numbers.items() if number is None or number >= least}
    return min(later, key=lambda home: later[home], default=None)


def _move_into(path: Path, found: RankFile, home: Path, disk: Disk) -> None:
    disk.rename(path, home / found.name)
    own = f"rank_{found.rank}.{found.stamp}."
    for name in os.listdir(home):  # not by a pattern, which Python would compile for every save
        if name.startswith(own) and name != found.name:  # of an earlier save with the same stamp
            disk.remove(home / name)
    disk.sync_folder(home)
    disk.sync_folder(home.parent)


def _is_outdated(path: Path, waits_for: str, target: Path, stamp: str) -> bool:
    """Whether the save that a file waits for will not come, now that one with `stamp` is committed."""
    (waiting_step, waiting_run), (step, run) = split_stamp(waits_for), split_stamp(stamp)
    return waiting_step < step if waiting_run == run else _is_abandoned(path, target)  # with a later step, its rank is ahead


def _is_abandoned(path: Path, target: Path) -> bool:
    """Whether the run that wrote a file has ended: another run has saved under its name, or it has waited too long."""
    return path.name.startswith(rank_file_prefix(target)) or time.time() - path.stat().st_mtime > _ABANDONED_SECONDS


def _candidate_targets(target: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints that a rank's file may belong to: this one, and if it is numbered, the other numbered ones, newest first."""
    paths = [target]
    if checkpoint_number(target.name) is not None:
        paths += [path for _, path in reversed(numbered_checkpoints(target.parent)) if path != target]
    return [(path, manifest) for path in paths if (manifest := read_manifest_or_none(path)) is not None]
