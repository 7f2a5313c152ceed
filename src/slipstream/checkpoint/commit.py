"""How a folder becomes a checkpoint: wholly, or not at all.

    stage    .NAME.saving-HEX beside the target, seen by nobody else; every file is written, checksummed and synced
    seal     MANIFEST.json last; then every folder of the stage is synced
    publish  one rename, or where NAME exists, one exchange of the two; then the folder around them is synced
    tidy     only now the replaced one goes; what others put into it moves into the new one (`leftovers.py`)

A crash at any moment leaves the old checkpoint or the new one under the name, and perhaps a hidden folder beside it, which the next save of
that name removes. Where the system knows no exchange there are two renames, and `recover` finds what a crash between them left. A second
process that saves to the same name at the same time gets an error that names the first one.

What this never does: change or remove a committed checkpoint before the next one is on the disk, or follow a link. Every error of the
system becomes a `CheckpointError` that names the file and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from slipstream.checkpoint.format import LATEST, MANIFEST, FileEntry
from slipstream.checkpoint.leftovers import discard, hidden, hold, lock_of, recover, sweep, sweep_held
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.digest import Bytes
from slipstream.files.disk import Disk, Written
from slipstream.files.inside import Folder
from slipstream.files.names import check_name
from slipstream.files.reading import read_digest
from slipstream.files.trouble import remedy, told
from slipstream.logging import get_logger

__all__ = ["JoinedStage", "LocalStage", "LocalTarget", "recover", "sweep", "write_latest"]

_OWN_NAMES: Final = re.compile(r"\..+\.(saving|was|removing)-[0-9a-f]{8}|\..+\.lock", re.DOTALL)
_NO_LINKS: Final = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)
_OLD: Final = 3600.0


class LocalTarget:
    """A place for a checkpoint in a folder of this machine; a relative path means what it means now.

    >>> import tempfile
    >>> from slipstream.checkpoint.format import Manifest
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with LocalTarget(Path(folder, "first")).begin() as stage:
    ...         files = {"notes.txt": stage.add("notes.txt", [b"hello"], 5)}
    ...         stage.commit(Manifest("1-0123456789abcdef", 1, "today", "me", 1, "single", files=files).dump())
    ...     sorted(os.listdir(folder)), sorted(os.listdir(Path(folder, "first")))
    (['first'], ['MANIFEST.json', 'notes.txt'])
    """

    def __init__(self, path: str | os.PathLike[str], disk: Disk | None = None) -> None:
        self.path = _resolved(os.path.expanduser(os.fspath(path)))
        self.disk = disk or Disk()

    def begin(self) -> LocalStage:
        """An empty stage; nothing of what is under the name changes before its `commit`."""
        _check_target(self.path)
        lock = None
        with _saying(self.path, self.disk):
            _make_parents(self.path.parent, self.disk)
            lock = hold(self.path, self.disk)
            try:
                if lock is not None:
                    sweep_held(self.path, self.disk)
                return LocalStage(self.path, self.disk, lock)
            except BaseException:
                _release(self.path, self.disk, lock)
                raise

    def join(self, ticket: str) -> JoinedStage:
        """The stage that another process has begun, for adding files to it."""
        return JoinedStage(self.path, ticket, self.disk)


class LocalStage:
    """A checkpoint that is being put together in `folder`. Made by `LocalTarget.begin`; as a context it is abandoned if not committed."""

    common: Final = True
    """Whether other processes see `folder`."""

    def __init__(self, target: Path, disk: Disk, lock: int | None) -> None:
        self.target = target
        self.folder = hidden(target, "saving")
        self._disk = disk
        self._lock = lock
        self._open = True
        disk.make_folder(self.folder)
        try:
            self._mode = stat.S_IMODE(os.stat(self.folder).st_mode)  # what the umask makes of it: so it will be when it is committed
            disk.set_mode(self.folder, 0o700)
        except OSError:
            with suppress(OSError):
                disk.remove_folder(self.folder)
            raise

    @property
    def ticket(self) -> str:
        """What another process passes to `LocalTarget.join`."""
        return self.folder.name

    def __enter__(self) -> LocalStage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abandon()

    def add(self, name: str, chunks: Iterable[Bytes], size: int) -> FileEntry:
        """Write a file of these bytes, `size` altogether; it is on the disk when this returns."""
        path = self._path(name)
        with _saying(self.target, self._disk, needed=size):
            self._make_folders(path.parent)
            return _entry(self._disk.write(path, chunks, size))

    def adopt(self, name: str) -> FileEntry:
        """Take in a file that somebody else wrote into `folder`; links and anything else that is no regular file are refused."""
        path = self._path(name)
        with Folder(self.folder) as opened:
            os.close(opened.open(name))
        with _saying(self.target, self._disk):
            return _entry(self._disk.sync_file(path))

    def reuse(self, name: str, source: Path, entry: FileEntry) -> bool:
        """Give a file of another checkpoint a second name in this one, if its bytes, read now, are what `entry` says; False if not."""
        path = self._path(name)
        try:
            with Folder(source.parent) as opened:
                fd = opened.open(source.name)
        except CheckpointError:
            return False
        try:
            checksum = read_digest(fd, entry.size, where=str(source))
            known = os.fstat(fd)
        except CheckpointError:
            return False
        finally:
            os.close(fd)
        if checksum != entry.checksum:
            return False
        with _saying(self.target, self._disk):
            self._make_folders(path.parent)
            try:
                self._disk.link(source, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return False
            if os.path.samestat(known, os.stat(path, follow_symlinks=False)):
                return True
            self._disk.remove(path)  # something else took the place of what was read
            return False

    def commit(self, manifest: bytes) -> None:
        """Seal the stage with its manifest and put it in its place. Afterwards the checkpoint is there, or an error says why not."""
        try:
            with _saying(self.target, self._disk, needed=len(manifest)):
                self._disk.write(self.folder / MANIFEST, [manifest], len(manifest))
                self._disk.set_mode(self.folder, self._mode)
                self._sync_folders(self.folder)
                _check_target(self.target)
                replaced = _publish(self.folder, self.target, self._disk)
        except BaseException:
            self.abandon()
            raise
        self._open = False
        try:
            if replaced is not None:
                discard(replaced, self.target, self._disk)
        except OSError as error:
            get_logger(__name__).warning(
                f"{self.target} is saved; the checkpoint that it replaced could not be removed ({told(error)}), the next save tries again."
            )
        finally:
            _release(self.target, self._disk, self._lock)

    def abandon(self) -> None:
        """Give the stage up and remove it; after `commit`, or a second time, this does nothing."""
        if not self._open:
            return
        self._open = False
        try:
            with suppress(FileNotFoundError):
                self._disk.remove_tree(self.folder)
        except OSError as error:
            get_logger(__name__).warning(f"{self.folder} could not be removed ({told(error)}); the next save to that name removes it.")
        finally:
            _release(self.target, self._disk, self._lock)

    def _path(self, name: str) -> Path:
        if not self._open:
            raise CheckpointError(f"{self.target}: this save is over; {name!r} cannot be added to it.")
        return self.folder / check_name(name, f"The save to {self.target}")

    def _make_folders(self, folder: Path) -> None:
        if folder != self.folder and not folder.is_dir():
            self._make_folders(folder.parent)
            with suppress(FileExistsError):
                self._disk.make_folder(folder)

    def _sync_folders(self, folder: Path) -> None:
        with os.scandir(folder) as entries:
            inner = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        for path in inner:
            self._sync_folders(Path(path))
        self._disk.sync_folder(folder)


class JoinedStage(LocalStage):
    """A stage that another process has begun: files can be added to it, and the other one commits or abandons it."""

    def __init__(self, target: Path, ticket: str, disk: Disk) -> None:
        self.target = target
        self.folder = target.parent / ticket
        self._disk = disk
        self._lock = None
        self._open = True
        if not _OWN_NAMES.fullmatch(ticket) or not self.folder.is_dir():
            raise CheckpointError(
                f"{target} cannot be saved by all processes together: {self.folder}, which the main process has made, is not there for "
                "this one. State that is sharded over processes needs a folder that all of them see (on a shared file system), or a URL."
            )

    def commit(self, manifest: bytes) -> None:
        raise CheckpointError(f"{self.target} is committed by the process that has begun it.")

    def abandon(self) -> None:
        """Nothing more is added from here."""
        self._open = False


def write_latest(parent: Path, name: str, disk: Disk) -> None:
    """Say in the file `latest` which of the checkpoints in a folder is the newest one."""
    with _saying(parent / LATEST, disk):
        disk.replace_text(parent / LATEST, f"{name}\n")
    with suppress(OSError):
        for path in parent.glob(f".{LATEST}.writing-*"):  # of a process that was killed while it wrote; a living one takes milliseconds
            if time.time() - path.stat().st_mtime > _OLD:
                disk.remove(path)


def _publish(stage: Path, target: Path, disk: Disk) -> Path | None:
    """Put a sealed stage in its place, durably, or leave everything as it was; gives back where the replaced folder is now."""
    undo: list[Callable[[], object]] = []
    replaces = os.path.lexists(target)
    try:
        return _put(stage, target, disk, undo)
    except BaseException as error:
        if _undone(undo) or not isinstance(error, OSError):
            raise
        two = f"it and the one before it are both whole, as {target.name} and .{target.name}.was-*"
        state = two if replaces else "it is whole, but the disk has not confirmed it,"
        raise CheckpointError(
            f"{target} could not be saved: {told(error)}.\n{remedy(error)} "
            f"The new checkpoint was being put in its place, which could not be taken back: {state} in {target.parent}."
        ) from error


def _undone(steps: list[Callable[[], object]]) -> bool:
    try:
        for step in reversed(steps):
            step()
    except OSError:  # the error that brought us here says more
        return False
    return True


def _put(stage: Path, target: Path, disk: Disk, undo: list[Callable[[], object]]) -> Path | None:
    def rename(old: Path, new: Path) -> None:
        disk.rename(old, new)
        undo.append(lambda: disk.rename(new, old))

    if not os.path.lexists(target):
        rename(stage, target)
        disk.sync_folder(target.parent)
        return None
    waiting = hidden(target, "was")  # from now on it is whole: if we die, whoever finds it there may not remove what others put into it
    rename(stage, waiting)
    if disk.exchange(waiting, target):
        undo.append(lambda: disk.exchange(waiting, target))
        disk.sync_folder(target.parent)
        return waiting
    old = hidden(target, "was")
    rename(target, old)
    rename(waiting, target)
    disk.sync_folder(target.parent)
    return old


def _entry(written: Written) -> FileEntry:
    return FileEntry(written.size, written.digest)


def _release(target: Path, disk: Disk, lock: int | None) -> None:
    if lock is not None:
        with suppress(OSError):  # the lock ends with the descriptor; a file that stays is taken over by the next save
            disk.unlock(lock_of(target), lock)


def _resolved(path: str) -> Path:
    """The path, absolute, with every link on the way to its last part followed, but not that one itself."""
    bare = path.rstrip("/") or "/"
    parent, name = os.path.split(bare)
    if name in ("", os.curdir, os.pardir):
        return Path(os.path.realpath(bare))
    return Path(os.path.realpath(parent or os.curdir), name)


def _check_target(path: Path) -> None:
    """A place that a checkpoint can take; `ConfigError` says what is wrong with another."""
    why = None
    if path.parent == path:
        why = "it is the root of the file system"
    elif os.path.islink(path):
        why = f"it is a symbolic link (to {os.readlink(path)}), and a checkpoint replaces the whole folder"
    elif os.path.lexists(path) and not os.path.isdir(path):
        why = "there is a file of that name, and a checkpoint is a folder"
    elif os.path.ismount(path):
        why = "it is a mount point, which cannot be replaced in one go"
    elif os.path.isdir(path) and _is_at_or_above(path, _working_directory()):
        why = "this process works in that folder, and a checkpoint replaces the whole folder"
    elif _OWN_NAMES.fullmatch(path.name):
        why = "names of that form are those of saves under way"
    if why is not None:
        raise ConfigError(f"A checkpoint cannot be saved to {path}: {why}.\nGive a folder of its own, such as {_suggestion(path)}.")


def _suggestion(path: Path) -> Path:
    inside = os.path.isdir(path) and not os.path.islink(path)
    return path / "checkpoint" if inside else path.with_name(f"{path.name.strip('.')[:100]}_checkpoint")


def _working_directory() -> Path | None:
    try:
        return Path(os.getcwd())
    except OSError:  # it was removed
        return None


def _is_at_or_above(path: Path, other: Path | None) -> bool:
    return other is not None and (path == other or path in other.parents)


def _make_parents(folder: Path, disk: Disk) -> None:
    """Make the folders on the way, each of them durable before the next."""
    if folder.is_dir():
        return
    _make_parents(folder.parent, disk)
    with suppress(FileExistsError):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


@contextmanager
def _saying(target: Path, disk: Disk, *, needed: int | None = None) -> Iterator[None]:
    """Errors of the system, as what they mean for a save."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        free = disk.free(target.parent) if error.errno == errno.ENOSPC else None
        raise CheckpointError(
            f"{target} could not be saved: {told(error)}.\n{remedy(error, needed=needed, free=free)} What was there before is untouched."
        ) from error
