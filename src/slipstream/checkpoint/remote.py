"""Checkpoints at a URL. As on a disk, files come first, the manifest last, and old checkpoints are removed only after that.

An object store has no rename, so the files of each save go into a folder of their own:

    URL/data-TIME-HEX/model.safetensors, ...      the files of one save, and a copy of its manifest
    URL/MANIFEST.json                             which save counts: it names the files in that folder
    URL/rank_3.STAMP.CHECKSUM.safetensors         the state of other ranks, added later

Writing `MANIFEST.json` is the commit: one small request. Until then the previous checkpoint stays complete. If that object is damaged,
readers use the copies beside the files to find the newest complete save. Two writers at one URL never mix their files: the last manifest
wins.
`fetch` downloads a checkpoint into a local folder; names are checked, sizes are limited by the manifest, and checksums are compared on
the way. Nothing here imports torch at import time.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from slipstream.checkpoint.manifest import (
    LARGEST_MANIFEST,
    LATEST,
    MANIFEST,
    Manifest,
    RankFile,
    checkpoint_number,
    parse_manifest,
    read_manifest,
    split_stamp,
)
from slipstream.checkpoint.rotate import NumberedCheckpoint, RetentionPolicy, find_protected
from slipstream.distributed.progress_bar import bar, counted
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.checksum import Bytes, Digest
from slipstream.files.disk import FileEntry
from slipstream.files.object_store import ObjectStore
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.logging import get_logger

if TYPE_CHECKING:
    from slipstream.checkpoint.capture import Snapshot

__all__ = [
    "RemoteFile", "RemoteFiles", "RemoteStage", "RemoteTarget", "describe_checkpoint", "fetch", "list_numbered", "read_remote_manifest",
    "rotate", "write_latest",
]

_LARGEST_RANK_FILE: Final = 64 * 2**20
_CHUNK_SIZE: Final = 4 << 20
_DATA: Final = re.compile(r"data-([0-9a-f]{16})-[0-9a-f]{8}", re.ASCII)
_ABANDONED_SECONDS: Final = 7 * 24 * 3600
"""After this time the next save removes the files of one that never ended."""


class RemoteTarget:
    """A checkpoint at a URL; the methods are those of `LocalDestination` in `writer.py`.

    >>> with RemoteTarget("memory://remote-example").begin() as stage:
    ...     files = {"notes.txt": stage.add("notes.txt", [b"hello"], 5)}
    ...     stage.commit(Manifest("1-0123456789abcdef", 1, "today", "me", 1, "single", files=files).dump())
    >>> read_remote_manifest("memory://remote-example").files["notes.txt"].size
    5
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._store = ObjectStore(url)

    def begin(self) -> RemoteStage:
        """Return an empty stage. The checkpoint at the URL does not change before `commit`."""
        return RemoteStage(self._store)

    def join(self, ticket: str) -> RemoteStage:
        """Return the stage that another process began, and will commit or remove, to add files to it."""
        return RemoteStage(self._store, ticket)

    def add_rank_file(self, snapshot: Snapshot) -> None:
        """Upload the state of a rank that does not write the checkpoint. It counts once the checkpoint with its stamp is committed."""
        from slipstream.checkpoint.serialize import encode_tree  # imports torch, which reading does not need

        snapshot.ready()
        own, digest = snapshot.own, Digest()
        # The name contains the checksum, which must be known before the upload: the file is encoded twice.
        for chunk in encode_tree(own.name, own.tree, own.tensors)[1][0]:
            digest.update(chunk)
        self._store.make_folder("")
        name = RankFile(snapshot.rank, snapshot.facts.stamp, digest.hexdigest()).name
        self._store.put(name, *encode_tree(own.name, own.tree, own.tensors)[1])

    def mark_rank(self, rank: int, stamp: str) -> None:
        """Do nothing: an upload is too slow for a marker, so a rank that is killed is noticed by earlier saves from the same line."""

    def collect(self, stamp: str) -> None:
        """Do nothing: ranks upload their files to where they belong."""

    def mark_latest(self) -> None:
        """Make this checkpoint the one that `latest` names."""
        write_latest(*self._url.rsplit("/", 1))

    def rotate(self, policy: RetentionPolicy) -> None:
        """Remove numbered checkpoints that are no longer kept."""
        rotate(self._url.rpartition("/")[0], policy, newest=self._url)

    def rotate_if_complete(self, policy: RetentionPolicy, stamp: str) -> None:
        """Remove checkpoints that are no longer kept, if a rank has just added the last state that this one was waiting for."""
        found = describe_checkpoint(self._url) if policy.total_limit is not None else None
        if found is not None and found.manifest.stamp == stamp and found.has_all_ranks:
            self.rotate(policy)

    def reusable(self, last: str | None) -> list[Path]:
        """Return nothing: object stores have no links."""
        return []


class RemoteStage:
    """A checkpoint that is being uploaded. `folder` is a local folder for files that hooks write; `adopt` uploads them."""

    common: Final = False
    """Whether other processes see `folder`."""

    def __init__(self, store: ObjectStore, ticket: str | None = None) -> None:
        self._store = store
        self._joined = ticket is not None
        self._data = check_name(ticket, "The save") if ticket is not None else f"data-{time.time_ns():016x}-{secrets.token_hex(4)}"
        self._open = True
        self._folder: Path | None = None
        self._made: set[str] = set()

    def __enter__(self) -> RemoteStage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abandon()

    @property
    def ticket(self) -> str:
        """The argument of `RemoteTarget.join` in another process."""
        return self._data

    @property
    def folder(self) -> Path:
        """A local folder that exists as long as the stage."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="slipstream-saving-"))
        return self._folder

    def add(self, name: str, chunks: Iterable[Bytes], size: int) -> FileEntry:
        """Upload a file with these bytes, `size` in total; it is stored when this returns."""
        return FileEntry(size, self._put(name, chunks, size))

    def flush(self) -> None:
        """End what this process adds. There is nothing to do: each file is in the store already."""

    def adopt(self, name: str) -> FileEntry:
        """Upload a file that somebody wrote into `folder`; anything but a regular file is an error."""
        with ConfinedFolder(self.folder) as opened, os.fdopen(opened.open(name), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return self.add(name, iter(lambda: file.read(_CHUNK_SIZE), b""), size)

    def reuse(self, name: str, source: Path, entry: FileEntry) -> bool:
        """Return False: object stores have no links."""
        return False

    def commit(self, manifest: bytes) -> None:
        """Write the manifest, which makes this the checkpoint at the URL; then remove the previous one."""
        if self._joined:
            raise CheckpointError(f"{self._store.shown} is committed by the process that began it.")
        try:
            new = parse_manifest(manifest, self._store.show(MANIFEST))
            data = _renamed(new, lambda name: f"{self._data}/{name}").dump()
            before = _published_manifest(self._store)
            self._put(MANIFEST, [data], len(data))
            self._publish(data)
        except BaseException:
            self.abandon()
            raise
        self._open = False
        self._clear()
        _remove_outdated(self._store, before, self._data, new)

    def abandon(self) -> None:
        """Remove the uploaded files; after `commit`, or a second time, do nothing."""
        if not self._open:
            return
        self._open = False
        self._clear()
        if self._joined:
            return
        try:
            self._store.remove(self._data)
        except CheckpointError as problem:
            get_logger(__name__).warning(f"Files of an abandoned save remain in {self._store.show(self._data)}: {problem}")

    def _put(self, name: str, chunks: Iterable[Bytes], size: int) -> str:
        if not self._open:
            raise CheckpointError(f"{self._store.shown}: this save has ended; {name!r} cannot be added to it.")
        place = f"{self._data}/{check_name(name, f'The save to {self._store.shown}')}"
        folder = check_name(place, f"The save to {self._store.shown}").rpartition("/")[0]
        if folder not in self._made:
            self._store.make_folder(folder)
            self._made.add(folder)
        return self._store.put(place, chunks, size)

    def _publish(self, data: bytes) -> None:
        try:
            self._store.replace(MANIFEST, data)
        except CheckpointError:
            # A failed request may have been carried out, so look at the result.
            try:
                there = self._store.read(MANIFEST, LARGEST_MANIFEST)
            except MissingCheckpointError:
                there = b""
            except CheckpointError:
                self._keep_all()
                raise
            if there == data:
                return
            if there:
                try:
                    parse_manifest(there, MANIFEST)
                except CheckpointError:
                    self._keep_all()
            raise

    def _keep_all(self) -> None:
        """Keep the files of both saves, because either manifest may be there."""
        self._open = False
        self._clear()
        get_logger(__name__).warning(
            f"It is unknown whether {self._store.show(MANIFEST)} was replaced. The files of both saves stay, this one's in {self._data}."
        )

    def _clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def read_remote_manifest(url: str) -> Manifest:
    """Return the manifest of the checkpoint at a URL, with the names that its files were saved with."""
    return _saved_names(_current(ObjectStore(url)))


class RemoteFiles:
    """Files of a checkpoint at a URL that are read in parts, by the names that they were saved with."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = ObjectStore(url)
        self._places: dict[str, str] = {}

    def fetch_rest(self, into: Path) -> Path:
        """Download everything but the shards into a folder, and return it."""
        manifest = fetch(self.url, into, with_shards=False)
        current = _current(self._store)
        saved = _saved_names(current)
        if saved.stamp != read_manifest(manifest).stamp:
            raise CheckpointError(f"{self._store.shown} was replaced by another save while it was read; load it again")
        self._places = dict(zip(saved.files, current.files, strict=True))
        return manifest

    def show(self, name: str) -> str:
        """Return the URL of a file, as it may be printed."""
        return self._store.show(self._places[name])

    def open(self, name: str) -> RemoteFile:
        """Return a file whose bytes can be read at any offset."""
        return RemoteFile(self._store, self._places[name])


class RemoteFile:
    """An object of a store, read in parts."""

    def __init__(self, store: ObjectStore, place: str) -> None:
        self._store, self._place = store, place

    def size(self) -> int:
        """Return how many bytes it has."""
        return self._store.size(self._place)

    def read_at(self, offset: int, into: memoryview) -> int:
        """Read bytes from `offset` on, and return how many were read."""
        data = self._store.read_range(self._place, offset, offset + len(into))
        into[: len(data)] = data
        return len(data)


def fetch(url: str, into: str | os.PathLike[str], *, with_shards: bool = True) -> Path:
    """Download the checkpoint at a URL into a folder, which has to be empty or absent, and return that folder."""
    store, folder = ObjectStore(url), Path(into)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CheckpointError(f"{store.shown} cannot be downloaded into {folder}: that folder is not empty")
    manifest = _current(store)
    try:
        _download(store, manifest, folder, with_shards)
    except MissingCheckpointError:
        # Another save may have replaced it meanwhile, and removed these files.
        again = _current(store)
        if again == manifest:
            raise
        shutil.rmtree(folder)
        folder.mkdir()
        _download(store, again, folder, with_shards)
    return folder


def list_numbered(url: str) -> list[tuple[int, str]]:
    """Return the numbered checkpoints below a URL, ascending: number and URL."""
    names = ObjectStore(url).list()
    return sorted((number, f"{url.rstrip('/')}/{name}") for name in names if (number := checkpoint_number(name)) is not None)


def write_latest(url: str, name: str) -> None:
    """Write the name of the newest checkpoint below a URL into the object `latest`."""
    ObjectStore(url).replace(LATEST, f"{name}\n".encode())


def rotate(url: str, policy: RetentionPolicy, newest: str) -> list[str]:
    """Remove the numbered checkpoints below a URL that need not stay, after `newest` was committed; return which ones."""
    if policy.total_limit is None or _published_manifest(ObjectStore(newest)) is None:
        return []
    known = {location: found for _, location in list_numbered(url) if (found := describe_checkpoint(location)) is not None}
    newest = newest.rstrip("/")
    metrics = [(location, checkpoint.manifest.metric) for location, checkpoint in known.items()]
    removed = []
    for location in policy.find_outdated(metrics, newest, find_protected(list(known.values()), newest)):
        try:
            _remove(ObjectStore(location), known[location].manifest)
            removed.append(location)
        except MissingCheckpointError:  # another rank removes it
            continue
        except CheckpointError as problem:
            get_logger(__name__).warning(f"A checkpoint that is no longer kept could not be removed: {problem}")
    return removed


def describe_checkpoint(url: str) -> NumberedCheckpoint | None:
    """Return the checkpoint at a URL and the ranks whose state is in it, or None if it has no readable manifest."""
    store = ObjectStore(url)
    manifest = _published_manifest(store)
    if manifest is None:
        return None
    names = store.list() if len(manifest.ranks) < manifest.world else []
    added = {found.rank for name in names if (found := RankFile.of(name)) is not None and found.stamp == manifest.stamp}
    return NumberedCheckpoint(url, manifest, frozenset(manifest.ranks) | added)


# -- manifests at a URL


def _read_manifest(store: ObjectStore, name: str = MANIFEST) -> Manifest:
    return parse_manifest(store.read(name, LARGEST_MANIFEST), store.show(name))


def _published_manifest(store: ObjectStore) -> Manifest | None:
    """Return the current manifest, or None if it is missing or damaged."""
    with suppress(CheckpointError):
        return _read_manifest(store)
    return None


def _current(store: ObjectStore) -> Manifest:
    """Return the current manifest; if it is missing or damaged, that of the newest complete save beside it."""
    try:
        return _read_manifest(store)
    except CheckpointError as problem:
        for data in sorted(filter(_DATA.fullmatch, store.list()), reverse=True):
            with suppress(CheckpointError):
                found = _read_manifest(store, f"{data}/{MANIFEST}")
                if all(store.size(name) == entry.size for name, entry in found.files.items()):
                    get_logger(__name__).warning(f"{problem}; the save in {data} is complete and is used instead.")
                    return found
        if isinstance(problem, MissingCheckpointError):
            there = ", ".join(store.list()[:6]) or "nothing"
            raise CheckpointError(f"there is no checkpoint at {store.shown}: it has no {MANIFEST} (it holds {there})") from None
        raise


def _renamed(manifest: Manifest, rename: Callable[[str], str]) -> Manifest:
    """Return the manifest with renamed files."""

    def optional(name: str | None) -> str | None:
        return None if name is None else rename(name)

    models = tuple(
        dataclasses.replace(
            model,
            files=tuple(map(rename, model.files)),
            index=optional(model.index),
            extra=optional(model.extra),
            shards=tuple(map(rename, model.shards)),
        )
        for model in manifest.models
    )
    return dataclasses.replace(
        manifest,
        files={rename(name): entry for name, entry in manifest.files.items()},
        models=models,
        optimizers=tuple(map(rename, manifest.optimizers)),
        training=optional(manifest.training),
        objects=tuple(map(rename, manifest.objects)),
        ranks={rank: rename(name) for rank, name in manifest.ranks.items()},
        shards={rename(part): tuple(map(rename, names)) for part, names in manifest.shards.items()},
    )


def _data_of(manifest: Manifest) -> str | None:
    """Return the folder that contains all files of a save, if there is one."""
    folders = {name.partition("/")[0] for name in manifest.files}
    only = folders.pop() if len(folders) == 1 else ""
    return only if _DATA.fullmatch(only) and only not in manifest.files else None


def _saved_names(manifest: Manifest) -> Manifest:
    data = _data_of(manifest)
    return manifest if data is None else _renamed(manifest, lambda name: name.removeprefix(f"{data}/"))


# -- downloading and removing


def _download(store: ObjectStore, manifest: Manifest, folder: Path, with_shards: bool) -> None:
    saved = _saved_names(manifest)
    left_out = set() if with_shards else saved.shard_files()
    with bar(sum(entry.size for name, entry in saved.files.items() if name not in left_out), "fetching", "B") as shown:
        for place, (name, entry) in zip(manifest.files, saved.files.items(), strict=True):
            if name in left_out:
                continue
            _download_file(store, place, folder / name, entry.size, entry.checksum, shown.update)
    limit = _LARGEST_RANK_FILE + sum(entry.size for entry in manifest.files.values())
    for name in store.list():
        found = RankFile.of(name)
        if found is not None and found.stamp == manifest.stamp:
            size = store.size(name)
            if size > limit:
                raise CheckpointError(f"{store.show(name)} has {size:,} bytes, more than the whole checkpoint; it is not downloaded")
            _download_file(store, name, folder / name, size, found.checksum)
    (folder / MANIFEST).write_bytes(saved.dump())


def _download_file(
    store: ObjectStore, place: str, path: Path, size: int, checksum: str, advance: Callable[[int], object] = lambda count: None
) -> None:
    if shutil.disk_usage(path.parent if path.parent.exists() else path.anchor or ".").free < size:
        raise CheckpointError(f"{store.show(place)} cannot be downloaded to {path}: it has {size:,} bytes, more than the disk has free")
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = Digest()
    with path.open("xb") as file:
        for chunk in counted(store.pieces(place, size), advance):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != checksum:
        raise CheckpointError(f"{store.show(place)} is damaged: its checksum is {digest.hexdigest()}, and it should be {checksum}")


def _remove_outdated(store: ObjectStore, before: Manifest | None, data: str, new: Manifest) -> None:
    """Remove, after a commit, the files of the previous save and leftovers of dead ones."""
    try:
        for name in _outdated(store, before, data, new):
            store.remove(name)
    except CheckpointError as problem:
        get_logger(__name__).warning(f"{store.shown} is saved. Not all files of earlier saves could be removed: {problem}")


def _outdated(store: ObjectStore, before: Manifest | None, data: str, new: Manifest) -> Iterator[str]:
    if before is not None:
        folder = _data_of(before)
        yield from [folder] if folder is not None else before.files
    oldest = time.time_ns() - _ABANDONED_SECONDS * 10**9
    for name in store.list():
        part, rank = _DATA.fullmatch(name), RankFile.of(name)
        dead = part is not None and name != data and int(part[1], 16) < oldest
        if dead or (rank is not None and rank.stamp != new.stamp and split_stamp(rank.stamp)[0] <= new.step):
            yield name


def _remove(store: ObjectStore, manifest: Manifest) -> None:
    """Remove a checkpoint, its manifests first: without them an interrupted removal leaves no checkpoint."""
    folder = _data_of(manifest)
    if folder is not None:
        store.remove(f"{folder}/{MANIFEST}")
    store.remove(MANIFEST)
    for name in [folder] if folder is not None else list(manifest.files):
        store.remove(name)
    for name in store.list():
        if RankFile.of(name) is not None:
            store.remove(name)
