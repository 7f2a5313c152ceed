"""Write a snapshot to its destination: the files of one checkpoint, and the manifest that makes them one.

The writing process (the main one, or the first of each machine) writes what all ranks share and its own state; every other rank writes
one small file. No rank waits for another: a rank's file is put beside the checkpoint, and whoever comes second, the rank or the commit,
moves it inside. Of sharded state each rank writes its pieces with block checksums, and the writing rank verifies that they are complete
before it commits. `Destination` is a local folder or a URL with the same methods.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import torch

from slipstream.checkpoint import remote
from slipstream.checkpoint.capture import ModelPart, PiecesPart, Snapshot, StatePart, package_versions
from slipstream.checkpoint.commit import LocalTarget, read_manifest_or_none, write_latest
from slipstream.checkpoint.manifest import Manifest, ModelEntry, RankFile
from slipstream.checkpoint.rotate import (
    RetentionPolicy,
    is_numbered,
    numbered_checkpoints,
    pending_rank_files,
    rank_file_prefix,
    rotate,
    unfinished_rank_files,
)
from slipstream.checkpoint.serialize import write_tree
from slipstream.checkpoint.shard_layout import PiecePosition, describe_positions
from slipstream.checkpoint.tensor_bytes import DTYPES, tensor_bytes
from slipstream.checkpoint.weights import index_bytes, plan_shards, shard_names, tensors_file
from slipstream.distributed.progress_bar import bar, counted
from slipstream.errors import CheckpointError
from slipstream.files.checksum import BlockChecksums, Digest, checksums_name
from slipstream.files.disk import SMALLEST, Disk, FileEntry
from slipstream.files.os_errors import describe_os_error, suggest_remedy
from slipstream.files.safetensors_layout import plan_layout
from slipstream.logging import get_logger

__all__ = [
    "ContributionRecord", "Destination", "RankContribution", "ReusableCheckpoint", "Stage", "WrittenParts", "add_rank_file",
    "adopt_hook_files", "check_complete", "checkpoint_numbers", "collect_rank_files", "commit_manifest", "find_reusable", "join_location",
    "merge_aliases", "open_destination", "pieces_name", "with_pieces", "write_checkpoint", "write_parts", "write_pieces",
]


ContributionRecord = dict[str, Any]
"""What a rank tells of its contribution: plain data."""


@dataclass
class RankContribution:
    """The files that one rank has written."""

    rank: int
    own: str
    """The part that belongs to this rank alone."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    pieces: dict[str, list[str]] = field(default_factory=dict)
    """Files of pieces, by the model or part whose they are."""
    elements: dict[str, int] = field(default_factory=dict)
    """How many elements are in them."""
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)

    def told(self) -> ContributionRecord:
        """The same as plain data."""
        return {**vars(self), "files": {name: [entry.size, entry.checksum] for name, entry in self.files.items()}}

    @staticmethod
    def of(told: ContributionRecord) -> RankContribution:
        """What a rank told.

        >>> one = RankContribution(1, "rank_1.json", {"rank_1.json": FileEntry(3, "00")}, {"model": []})
        >>> RankContribution.of(one.told()) == one
        True
        """
        return RankContribution(**{**told, "files": {name: FileEntry(*entry) for name, entry in told["files"].items()}})


_Add = Callable[[str, Callable[[], tuple[Iterable[Any], int]]], None]


def pieces_name(base: str, rank: int, world: int) -> str:
    """What the files of one rank's pieces begin with.

    >>> pieces_name("model", 0, 4)
    'model-rank-00001-of-00004'
    """
    return f"{base}-rank-{rank + 1:05d}-of-{world:05d}"


def write_pieces(
    part: PiecesPart, name: str, max_shard_size: int | None, *, apart: bool, add: _Add, add_bytes: Callable[[str, bytes], None]
) -> list[str]:
    """Writes what this rank stores of a model or part, in files whose names begin with `name`; gives them back."""
    groups = [group for group in plan_shards(part.tensors, max_shard_size, part.frozen if apart else frozenset()) if group]
    names = shard_names(name, len(groups)) if groups else []
    for file, group in zip(names, groups, strict=True):
        sums = BlockChecksums()

        def make(group: Sequence[str] = group) -> tuple[Iterable[Any], int]:
            nonlocal sums
            sums = BlockChecksums()
            chunks, size = _file(part.tensors, part.places, group)
            return sums.passing(chunks), size

        add(file, make)
        add_bytes(checksums_name(file), sums.taken())
    return names


def _file(tensors: Mapping[str, torch.Tensor], places: Mapping[str, PiecePosition], names: Sequence[str]) -> tuple[Iterable[Any], int]:
    metadata = {"format": "pt", **describe_positions({name: places[name] for name in names})}
    header, layout = plan_layout([(name, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names], metadata)
    return chain([header], (tensor_bytes(tensors[name]) for name in names)), layout.size


def merge_aliases(contributions: Sequence[RankContribution], base: str) -> dict[str, str]:
    """Names of tied weights. A rank that holds no element of a tensor cannot tell that it is tied, so all of them are asked."""
    return {name: kept for contribution in contributions for name, kept in contribution.aliases.get(base, {}).items()}


def check_complete(parts: Sequence[PiecesPart], contributions: Sequence[RankContribution], where: str) -> None:
    """An error if the pieces that were written are not all of what is sharded."""
    for part in parts:
        aliases = merge_aliases(contributions, part.base)
        wanted = sum(math.prod(shape) for name, shape in part.shapes.items() if name not in aliases)
        counts = {contribution.rank: contribution.elements.get(part.base, 0) for contribution in contributions}
        if sum(counts.values()) != wanted:
            told = ", ".join(f"rank {rank}: {count:,}" for rank, count in counts.items())
            raise CheckpointError(
                f"{where} was not saved: the sharded tensors of {part.base} have {wanted:,} elements, and the ranks have stored "
                f"{sum(counts.values()):,} of them ({told}). Every rank has to save the same objects, prepared in the same order."
            )


def with_pieces(model: ModelEntry, base: str, contributions: Sequence[RankContribution]) -> ModelEntry:
    """The entry of a model with the pieces that ranks have stored."""
    pieces = tuple(name for contribution in contributions for name in contribution.pieces.get(base, ()))
    return replace(model, aliases={**model.aliases, **merge_aliases(contributions, base)}, pieces=pieces)


_SMALL_FILES: Final = 4
"""So many are written at a time."""
_LONG: Final = 3600.0
"""Seconds after which a rank that waits beside a checkpoint is given up."""

_NUMBER = re.compile(r"\.checkpoint_(\d{1,18})\.", re.ASCII)


class Stage(Protocol):
    """Where a checkpoint is put together; see `commit.py` and `remote.py`."""

    @property
    def folder(self) -> Path: ...

    @property
    def common(self) -> bool: ...

    @property
    def ticket(self) -> str: ...

    def add(self, name: str, chunks: Iterable[Any], size: int) -> FileEntry: ...

    def adopt(self, name: str) -> FileEntry: ...

    def reuse(self, name: str, source: Path, entry: FileEntry) -> bool: ...

    def commit(self, manifest: bytes) -> None: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class ReusableCheckpoint:
    """A checkpoint whose unchanged files can be used again."""

    folder: Path
    files: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """Names by size and checksum."""


def find_reusable(folder: Path) -> ReusableCheckpoint | None:
    """What a checkpoint offers for using again; None if there is none."""
    manifest = read_manifest_or_none(folder)
    if manifest is None:  # no checkpoint, or a broken one: then everything is written
        return None
    return ReusableCheckpoint(folder, {(entry.size, entry.checksum): name for name, entry in manifest.files.items()})


def write_checkpoint(
    stage: Stage, snapshot: Snapshot, *, max_shard_size: int | None = None, reusable: Sequence[ReusableCheckpoint] = (), dedup: bool = False
) -> Manifest:
    """Writes and commits; `dedup` links files that did not change since one of `reusable` instead of writing them again."""
    return commit_manifest(stage, snapshot, write_parts(stage, snapshot, max_shard_size=max_shard_size, reusable=reusable, dedup=dedup))


@dataclass
class WrittenParts:
    """What one process has written into a stage."""

    share: RankContribution
    models: tuple[ModelEntry, ...] = ()
    optimizers: tuple[str, ...] = ()
    training: str | None = None
    objects: tuple[str, ...] = ()


def write_parts(
    stage: Stage, snapshot: Snapshot, *, max_shard_size: int | None = None, reusable: Sequence[ReusableCheckpoint] = (), dedup: bool = False
) -> WrittenParts:
    """Writes everything that is in a snapshot. Nothing is committed."""
    with bar(snapshot.size, "saving", "B") as shown, _Writer(stage, reusable if dedup else (), shown.update) as writer:
        return _write_all_parts(writer, snapshot, max_shard_size, dedup=dedup)


def _write_all_parts(writer: _Writer, snapshot: Snapshot, max_shard_size: int | None, *, dedup: bool) -> WrittenParts:
    rank, world = _rank_of(snapshot.own), snapshot.facts.world
    draft = WrittenParts(RankContribution(rank, "", writer.files))
    for part in snapshot.pieces:
        name = pieces_name(part.base, rank, world)
        draft.share.pieces[part.base] = write_pieces(
            part, name, max_shard_size, apart=dedup, add=writer.tensors, add_bytes=writer.bytes
        )
        draft.share.elements[part.base] = sum(tensor.numel() for tensor in part.tensors.values())
        draft.share.aliases[part.base] = dict(part.aliases)
    draft.models = tuple(_write_model(writer, model, max_shard_size, apart=dedup) for model in snapshot.models)
    draft.optimizers = tuple(writer.part(part) for part in snapshot.optimizers)
    draft.training = None if snapshot.training is None else writer.part(snapshot.training)
    draft.objects = tuple(writer.part(part) for part in snapshot.objects)
    draft.share.own = writer.part(snapshot.own)
    return draft


def commit_manifest(stage: Stage, snapshot: Snapshot, draft: WrittenParts, others: Sequence[RankContribution] = ()) -> Manifest:
    """Commits what was written, by this process and by others."""
    shares = sorted([draft.share, *others], key=lambda other: other.rank)
    files = {name: entry for share in shares for name, entry in share.files.items()}
    adopt_hook_files(stage, files)
    check_complete(snapshot.pieces, shares, str(stage.folder))
    facts = snapshot.facts
    sharded = {base: tuple(chain.from_iterable(share.pieces.get(base, ()) for share in shares)) for base in draft.share.pieces}
    parts = {Path(name).stem: name for name in (*draft.optimizers, *draft.objects)}
    manifest = Manifest(
        stamp=facts.stamp,
        step=facts.step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        written_by=f"slipstream {package_versions()['slipstream']}",
        world=facts.world,
        strategy=facts.strategy,
        mesh=facts.mesh,
        files=files,
        models=tuple(with_pieces(model, part.base, shares) for model, part in zip(draft.models, snapshot.models, strict=True)),
        optimizers=draft.optimizers,
        training=draft.training,
        objects=draft.objects,
        ranks={share.rank: share.own for share in shares},
        pieces={parts[base]: names for base, names in sharded.items() if base in parts and names},
        metric=facts.metric,
        receipt=facts.receipt,
    )
    stage.commit(manifest.dump())
    return manifest


def _rank_of(own: StatePart) -> int:
    rank: int = own.tree["rank"]
    return rank


class _Writer:
    """Adds files to a stage and keeps the list of them, which is complete when the writer is left.

    Small files are added beside each other where the stage is a folder: most of their time is waiting for the disk to confirm them.
    """

    def __init__(self, stage: Stage, reusable: Sequence[ReusableCheckpoint], advance: Callable[[int], object]) -> None:
        self.stage = stage
        self._advance = advance
        self.files: dict[str, FileEntry] = {}
        self._reusable = reusable
        self._beside: dict[str, Future[FileEntry]] = {}
        self._threads = ThreadPoolExecutor(_SMALL_FILES, thread_name_prefix="slipstream: small files") if stage.common else None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=error is not None)  # waits: nobody writes into a stage that was given up
        if error is None:
            self.files.update({name: added.result() for name, added in self._beside.items()})

    def part(self, part: StatePart) -> str:
        return write_tree(self._add, part.name, part.tree, part.tensors)[0]

    def bytes(self, name: str, data: bytes) -> None:
        self._add(name, [data], len(data))

    def tensors(self, name: str, make: Callable[[], tuple[Iterable[Any], int]]) -> None:
        """A file of weights; it is made twice if there are earlier ones that it may be equal to."""
        if not (self._reusable and self._reused(name, make)):
            self._add(name, *make())

    def _add(self, name: str, chunks: Iterable[Any], size: int) -> None:
        chunks = counted(chunks, self._advance)
        if self._threads is None or size >= SMALLEST:
            self.files[name] = self.stage.add(name, chunks, size)
        else:
            self._beside[name] = self._threads.submit(self.stage.add, name, list(chunks), size)  # what a tensor holds is asked for here

    def _reused(self, name: str, make: Callable[[], tuple[Iterable[Any], int]]) -> bool:
        chunks, size = make()
        digest = Digest()
        for chunk in chunks:
            digest.update(chunk)
        entry = FileEntry(size, digest.hexdigest())
        for item in self._reusable:
            source = item.files.get((entry.size, entry.checksum))
            if source is not None and self.stage.reuse(name, item.folder / source, entry):
                self.files[name] = entry
                self._advance(size)
                return True
        return False


def adopt_hook_files(stage: Stage, files: dict[str, FileEntry]) -> None:
    """Files that hooks of the script wrote belong to the checkpoint too."""
    for path in sorted(stage.folder.rglob("*")):
        name = path.relative_to(stage.folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in files and not name.startswith("."):
            files[name] = stage.adopt(name)


def _write_model(writer: _Writer, model: ModelPart, max_shard_size: int | None, *, apart: bool) -> ModelEntry:
    base = f"{model.base}-rest" if model.sharded else model.base  # who looks for whole weights should not find the few that are not sharded
    groups = (
        plan_shards(model.tensors, max_shard_size, model.frozen if apart else frozenset()) if model.tensors or not model.sharded else []
    )
    names = shard_names(base, len(groups)) if groups else []
    for name, group in zip(names, groups, strict=True):
        writer.tensors(name, partial(tensors_file, model.tensors, group, model.aliases))
    index = None
    if len(names) > 1:
        index = f"{base}.safetensors.index.json"
        writer.bytes(index, index_bytes(dict(zip(names, groups, strict=True)), model.tensors))
    extra = None if model.extra is None else writer.part(model.extra)
    return ModelEntry(model.kind, tuple(names), model.aliases, index, extra, model.number)


# -- files of other ranks ---------------------------------------------------------------------------------------------


def add_rank_file(target: Path, snapshot: Snapshot, disk: Disk) -> None:
    """Adds what belongs to a rank that does not write the checkpoint: inside if that is there already, else beside it."""
    rank, stamp = _rank_of(snapshot.own), snapshot.facts.stamp
    temporary = target.parent / f"{rank_file_prefix(target)}rank-{_history(stamp)}-{secrets.token_hex(8)}"
    checksum = ""

    def add(name: str, chunks: Iterable[Any], size: int) -> FileEntry:
        nonlocal checksum
        written = disk.write(temporary, chunks, size)
        checksum = written.digest
        return FileEntry(written.size, written.digest)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_tree(add, snapshot.own.name, snapshot.own.tree, snapshot.own.tensors)
        disk.rename(temporary, target.parent / f"{rank_file_prefix(target)}{RankFile(rank, stamp, checksum).name}")
        disk.sync_folder(target.parent)
        for path, manifest in _candidate_targets(target):  # the commit came first
            if manifest.stamp == stamp or (_history(manifest.stamp) == _history(stamp) and _step(manifest.stamp) > _step(stamp)):
                collect_rank_files(path, manifest.stamp, disk)
                break
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise CheckpointError(
            f"{target}: what belongs to rank {rank} could not be saved: {describe_os_error(error)}.\n{suggest_remedy(error)}"
        ) from error


def collect_rank_files(target: Path, stamp: str, disk: Disk) -> None:
    """Moves the files of other ranks that lie beside a committed checkpoint into it; those that no checkpoint waits for any more go."""
    waiting = pending_rank_files(target)
    homes = {target: stamp}
    if any(
        found.stamp != stamp or not path.name.startswith(rank_file_prefix(target)) for path, found in waiting
    ):  # of late or killed ranks
        homes |= {path: manifest.stamp for path, manifest in _candidate_targets(target) if path != target}
    for path, found in waiting:
        with suppress(FileNotFoundError):  # somebody else does the same
            home = _find_home(path, found, homes)
            if home is not None:
                _move(path, found, home, disk)
            elif _is_outdated(path, found.stamp, target, stamp):
                disk.remove(path)
    for path in unfinished_rank_files(target):
        with suppress(FileNotFoundError):
            if f".rank-{_history(stamp)}-" not in path.name and _is_abandoned(path, target):
                disk.remove(path)


def _find_home(path: Path, found: RankFile, homes: Mapping[Path, str]) -> Path | None:
    """The checkpoint that a waiting file belongs to: one of its save, under the number that its rank meant or the next one after it.

    The main process may have saved alone before, so its number may be higher. A save that was made again without a step in between has
    the same stamp: a file that came before its own checkpoint does not go into the one before that.
    """
    meant = _NUMBER.match(path.name)
    least = int(meant[1]) if meant else 0
    alike = [home for home, stamp in homes.items() if stamp == found.stamp]
    later = [(number, home) for home in alike if (number := _number(home)) is None or number >= least]
    return min(later, key=lambda entry: entry[0] or 0)[1] if later else None


def _number(path: Path) -> int | None:
    found = _NUMBER.match(f".{path.name}.")
    return None if found is None else int(found[1])


def _move(path: Path, found: RankFile, home: Path, disk: Disk) -> None:
    disk.rename(path, home / found.name)
    for older in home.glob(f"rank_{found.rank}.{found.stamp}.*"):  # of an earlier save at the same place of the run
        if older.name != found.name:
            disk.remove(older)
    disk.sync_folder(home)
    disk.sync_folder(home.parent)


def _is_outdated(path: Path, waits_for: str, target: Path, stamp: str) -> bool:
    """Whether no save comes any more with the stamp that a file waits for, now that one with `stamp` was committed."""
    if _history(waits_for) == _history(stamp):
        return _step(waits_for) < _step(stamp)  # else its rank is ahead
    return _is_abandoned(path, target)


def _is_abandoned(path: Path, target: Path) -> bool:
    """Whether the run that a file comes from is over: another one has saved under its name, or nobody came for long."""
    return path.name.startswith(rank_file_prefix(target)) or time.time() - path.stat().st_mtime > _LONG


def _candidate_targets(target: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints that a rank may have meant: that one, and if it is numbered, those that are numbered too, the newest first."""
    paths = (
        [target, *(path for _, path in reversed(numbered_checkpoints(target.parent)) if path != target)]
        if is_numbered(target)
        else [target]
    )
    return [(path, manifest) for path in paths if (manifest := read_manifest_or_none(path)) is not None]


def _step(stamp: str) -> int:
    return int(stamp.partition("-")[0])


def _history(stamp: str) -> str:
    """Which run it was, since its last load."""
    return stamp.partition("-")[2][:8]


class Destination(Protocol):
    """A checkpoint that is to be written."""

    def begin(self) -> Stage:
        """Begins to put it together."""

    def join(self, ticket: str) -> Stage:
        """What another process has begun to put together, for adding files to it."""

    def add_rank_file(self, snapshot: Snapshot) -> None:
        """Adds what belongs to a rank that does not write it."""

    def collect(self, stamp: str) -> None:
        """Takes in what other ranks have added so far."""

    def mark_latest(self) -> None:
        """Makes it the one that `latest` names."""

    def rotate(self, keep: RetentionPolicy) -> None:
        """Removes checkpoints beside it that are no longer kept."""

    def earlier(self, last: str | None) -> list[ReusableCheckpoint]:
        """Checkpoints whose unchanged files can be used again, the likeliest first."""


class _Local:
    def __init__(self, path: str, disk: Disk) -> None:
        self._target = LocalTarget(path, disk)
        self._path = self._target.path
        self._disk = disk

    def begin(self) -> Stage:
        return self._target.begin()

    def join(self, ticket: str) -> Stage:
        return self._target.join(ticket)

    def add_rank_file(self, snapshot: Snapshot) -> None:
        add_rank_file(self._path, snapshot, self._disk)

    def collect(self, stamp: str) -> None:
        try:
            collect_rank_files(self._path, stamp, self._disk)
        except OSError as error:
            get_logger(__name__).warning(
                f"{self._path} is saved. Files of other ranks beside it could not be moved into it ({describe_os_error(error)}): they "
                "count where they "
                "are, so take the hidden ones along if you move the folder."
            )

    def mark_latest(self) -> None:
        write_latest(self._path.parent, self._path.name, self._disk)

    def rotate(self, keep: RetentionPolicy) -> None:
        rotate(self._path.parent, keep, self._disk, newest=self._path)

    def earlier(self, last: str | None) -> list[ReusableCheckpoint]:
        newest = [folder for _, folder in numbered_checkpoints(self._path.parent)][-1:]
        folders = dict.fromkeys([self._path, *([] if last is None else [Path(last).absolute()]), *newest])
        return [found for folder in folders if (found := find_reusable(folder)) is not None]


class _Remote:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._folder, _, self._name = self._url.rpartition("/")

    def begin(self) -> Stage:
        return remote.RemoteTarget(self._url).begin()

    def join(self, ticket: str) -> Stage:
        return remote.RemoteTarget(self._url).join(ticket)

    def add_rank_file(self, snapshot: Snapshot) -> None:
        remote.add_rank_file(self._url, snapshot)

    def collect(self, stamp: str) -> None:
        """Nothing to do: ranks put their files where they belong, and a put is whole or not there."""

    def mark_latest(self) -> None:
        remote.write_latest(self._folder, self._name)

    def rotate(self, keep: RetentionPolicy) -> None:
        remote.rotate(self._folder, keep, newest=self._url)

    def earlier(self, last: str | None) -> list[ReusableCheckpoint]:
        return []


def open_destination(target: str, disk: Disk) -> Destination:
    """The place that a path or URL names.

    >>> type(open_destination("runs/first", Disk())).__name__, type(open_destination("memory://first", Disk())).__name__
    ('_Local', '_Remote')
    """
    return _Remote(target) if remote.is_url(target) else _Local(remote.local_path(target), disk)


def join_location(folder: str, name: str) -> str:
    """The path or URL of something in a folder.

    >>> join_location("s3://bucket/runs/", "checkpoint_1")
    's3://bucket/runs/checkpoint_1'
    """
    return f"{folder.rstrip('/')}/{name}" if remote.is_url(folder) else os.path.join(folder, name)


def checkpoint_numbers(folder: str) -> list[int]:
    """The numbers of the checkpoints in a folder, ascending."""
    if remote.is_url(folder):
        return [number for number, _ in remote.list_numbered(folder)]
    return [number for number, _ in numbered_checkpoints(Path(remote.local_path(folder)))]
