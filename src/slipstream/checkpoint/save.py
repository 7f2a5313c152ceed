"""Writing a snapshot: the files of one checkpoint, and the manifest that makes them one.

The process that writes (the main one, or the first of each machine) writes everything that all ranks share and what is its own. Every
other rank writes one small file of its own. No rank waits for another: a rank's file goes beside the checkpoint first, and whoever comes
second, the rank or the commit, moves it inside. So a save on the main process alone is whole but for what belongs to the
others, and a save on all of them is complete when all have returned.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from slipstream.checkpoint.contributions import Contribution, check_whole, pieces_name, with_pieces, write_pieces
from slipstream.checkpoint.format import FileEntry, Manifest, ModelEntry, RankFile
from slipstream.checkpoint.leftovers import manifest_of
from slipstream.checkpoint.lookup import beside, lying_beside, unfinished_beside
from slipstream.checkpoint.plain import write_tree
from slipstream.checkpoint.receipt import versions
from slipstream.checkpoint.rotate import is_numbered, numbered
from slipstream.checkpoint.snapshot import ModelPart, Part, Snapshot
from slipstream.checkpoint.weights import index_bytes, shard_names, shards, tensors_file
from slipstream.errors import CheckpointError
from slipstream.files.digest import Digest
from slipstream.files.direct import SMALLEST
from slipstream.files.disk import Disk
from slipstream.files.trouble import remedy, told
from slipstream.runtime.progress import bar, counted

__all__ = ["Draft", "Earlier", "Stage", "add_rank_file", "adopt_the_rest", "collect_rank_files", "compose", "earlier", "seal", "write"]

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
class Earlier:
    """A checkpoint whose unchanged files can be used again."""

    folder: Path
    files: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """Names by size and checksum."""


def earlier(folder: Path) -> Earlier | None:
    """What a checkpoint offers for using again; None if there is none."""
    manifest = manifest_of(folder)
    if manifest is None:  # no checkpoint, or a broken one: then everything is written
        return None
    return Earlier(folder, {(entry.size, entry.checksum): name for name, entry in manifest.files.items()})


def write(
    stage: Stage, snapshot: Snapshot, *, max_shard_size: int | None = None, reusable: Sequence[Earlier] = (), dedup: bool = False
) -> Manifest:
    """Writes and commits; `dedup` links files that did not change since one of `reusable` instead of writing them again."""
    return seal(stage, snapshot, compose(stage, snapshot, max_shard_size=max_shard_size, reusable=reusable, dedup=dedup))


@dataclass
class Draft:
    """What one process has written into a stage."""

    share: Contribution
    models: tuple[ModelEntry, ...] = ()
    optimizers: tuple[str, ...] = ()
    training: str | None = None
    objects: tuple[str, ...] = ()


def compose(
    stage: Stage, snapshot: Snapshot, *, max_shard_size: int | None = None, reusable: Sequence[Earlier] = (), dedup: bool = False
) -> Draft:
    """Writes everything that is in a snapshot. Nothing is committed."""
    with bar(snapshot.size, "saving", "B") as shown, _Writer(stage, reusable if dedup else (), shown.update) as writer:
        return _composed(writer, snapshot, max_shard_size, dedup=dedup)


def _composed(writer: _Writer, snapshot: Snapshot, max_shard_size: int | None, *, dedup: bool) -> Draft:
    rank, world = _rank_of(snapshot.own), snapshot.facts.world
    draft = Draft(Contribution(rank, "", writer.files))
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


def seal(stage: Stage, snapshot: Snapshot, draft: Draft, others: Sequence[Contribution] = ()) -> Manifest:
    """Commits what was written, by this process and by others."""
    shares = sorted([draft.share, *others], key=lambda one: one.rank)
    files = {name: entry for one in shares for name, entry in one.files.items()}
    adopt_the_rest(stage, files)
    check_whole(snapshot.pieces, shares, str(stage.folder))
    facts = snapshot.facts
    sharded = {base: tuple(chain.from_iterable(one.pieces.get(base, ()) for one in shares)) for base in draft.share.pieces}
    parts = {Path(name).stem: name for name in (*draft.optimizers, *draft.objects)}
    manifest = Manifest(
        stamp=facts.stamp,
        step=facts.step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        written_by=f"slipstream {versions()['slipstream']}",
        world=facts.world,
        strategy=facts.strategy,
        mesh=facts.mesh,
        files=files,
        models=tuple(with_pieces(model, part.base, shares) for model, part in zip(draft.models, snapshot.models, strict=True)),
        optimizers=draft.optimizers,
        training=draft.training,
        objects=draft.objects,
        ranks={one.rank: one.own for one in shares},
        pieces={parts[base]: names for base, names in sharded.items() if base in parts and names},
        metric=facts.metric,
        receipt=facts.receipt,
    )
    stage.commit(manifest.dump())
    return manifest


def _rank_of(own: Part) -> int:
    rank: int = own.tree["rank"]
    return rank


class _Writer:
    """Adds files to a stage and keeps the list of them, which is complete when the writer is left.

    Small files are added beside each other where the stage is a folder: most of their time is waiting for the disk to confirm them.
    """

    def __init__(self, stage: Stage, reusable: Sequence[Earlier], advance: Callable[[int], object]) -> None:
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

    def part(self, part: Part) -> str:
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
        for one in self._reusable:
            source = one.files.get((entry.size, entry.checksum))
            if source is not None and self.stage.reuse(name, one.folder / source, entry):
                self.files[name] = entry
                self._advance(size)
                return True
        return False


def adopt_the_rest(stage: Stage, files: dict[str, FileEntry]) -> None:
    """Files that hooks of the script wrote belong to the checkpoint too."""
    for path in sorted(stage.folder.rglob("*")):
        name = path.relative_to(stage.folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in files and not name.startswith("."):
            files[name] = stage.adopt(name)


def _write_model(writer: _Writer, model: ModelPart, max_shard_size: int | None, *, apart: bool) -> ModelEntry:
    base = f"{model.base}-rest" if model.sharded else model.base  # who looks for whole weights should not find the few that are not sharded
    groups = shards(model.tensors, max_shard_size, model.frozen if apart else frozenset()) if model.tensors or not model.sharded else []
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
    temporary = target.parent / f"{beside(target)}rank-{_history(stamp)}-{secrets.token_hex(8)}"
    checksum = ""

    def add(name: str, chunks: Iterable[Any], size: int) -> FileEntry:
        nonlocal checksum
        written = disk.write(temporary, chunks, size)
        checksum = written.digest
        return FileEntry(written.size, written.digest)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_tree(add, snapshot.own.name, snapshot.own.tree, snapshot.own.tensors)
        disk.rename(temporary, target.parent / f"{beside(target)}{RankFile(rank, stamp, checksum).name}")
        disk.sync_folder(target.parent)
        for path, manifest in _alike(target):  # the commit came first
            if manifest.stamp == stamp or (_history(manifest.stamp) == _history(stamp) and _step(manifest.stamp) > _step(stamp)):
                collect_rank_files(path, manifest.stamp, disk)
                break
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise CheckpointError(f"{target}: what belongs to rank {rank} could not be saved: {told(error)}.\n{remedy(error)}") from error


def collect_rank_files(target: Path, stamp: str, disk: Disk) -> None:
    """Moves the files of other ranks that lie beside a committed checkpoint into it; those that no checkpoint waits for any more go."""
    waiting = lying_beside(target)
    homes = {target: stamp}
    if any(found.stamp != stamp or not path.name.startswith(beside(target)) for path, found in waiting):  # of late or killed ranks
        homes |= {path: manifest.stamp for path, manifest in _alike(target) if path != target}
    for path, found in waiting:
        with suppress(FileNotFoundError):  # somebody else does the same
            home = _home(path, found, homes)
            if home is not None:
                _move(path, found, home, disk)
            elif _is_over(path, found.stamp, target, stamp):
                disk.remove(path)
    for path in unfinished_beside(target):
        with suppress(FileNotFoundError):
            if f".rank-{_history(stamp)}-" not in path.name and _is_given_up(path, target):
                disk.remove(path)


def _home(path: Path, found: RankFile, homes: Mapping[Path, str]) -> Path | None:
    """The checkpoint that a waiting file belongs to: one of its save, under the number that its rank meant or the next one after it.

    The main process may have saved alone before, so its number may be higher. A save that was made again without a step in between has
    the same stamp: a file that came before its own checkpoint does not go into the one before that.
    """
    meant = _NUMBER.match(path.name)
    least = int(meant[1]) if meant else 0
    alike = [home for home, stamp in homes.items() if stamp == found.stamp]
    later = [(number, home) for home in alike if (number := _number(home)) is None or number >= least]
    return min(later, key=lambda one: one[0] or 0)[1] if later else None


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


def _is_over(path: Path, waits_for: str, target: Path, stamp: str) -> bool:
    """Whether no save comes any more with the stamp that a file waits for, now that one with `stamp` was committed."""
    if _history(waits_for) == _history(stamp):
        return _step(waits_for) < _step(stamp)  # else its rank is ahead
    return _is_given_up(path, target)


def _is_given_up(path: Path, target: Path) -> bool:
    """Whether the run that a file comes from is over: another one has saved under its name, or nobody came for long."""
    return path.name.startswith(beside(target)) or time.time() - path.stat().st_mtime > _LONG


def _alike(target: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints that a rank may have meant: that one, and if it is numbered, those that are numbered too, the newest first."""
    paths = [target, *(path for _, path in reversed(numbered(target.parent)) if path != target)] if is_numbered(target) else [target]
    return [(path, manifest) for path in paths if (manifest := manifest_of(path)) is not None]


def _step(stamp: str) -> int:
    return int(stamp.partition("-")[0])


def _history(stamp: str) -> str:
    """Which run it was, since its last load."""
    return stamp.partition("-")[2][:8]
