"""Commit a checkpoint: a folder becomes a checkpoint completely or not at all.

    stage    .NAME.saving-HEX beside the target; every file is written and checksummed, MANIFEST.json last
    seal     every file and folder of the stage is synced, all at the same time
    publish  one rename, or where NAME exists, one exchange of the two; then the parent folder is synced
    tidy     remove the replaced one; files that others put into it move into the new one

Beside a checkpoint there may also be .NAME.lock (held by the process that saves to NAME), .NAME.was-HEX (a folder that was replaced, or
is about to become NAME) and .NAME.removing-HEX (being removed). A crash at any moment leaves the old checkpoint or the new one under the
name, and perhaps hidden folders that the next save removes. Where the system has no atomic exchange there are two renames, and
`find_recoverable` finds what a crash between them left. A lock ends with its process, so a dead save never blocks another one, and a
second live process that saves to the same name raises an error that names the first.

A committed checkpoint is never changed or removed before the next one is on the disk, no link is followed, and files of others are never
removed. An `OSError` becomes a `CheckpointError` that names the file and what to do. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import filecmp
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from slipstream.checkpoint.manifest import (
    ACCELERATE_FILE,
    FSDP_MODEL_NAME,
    LATEST,
    MANIFEST,
    MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_MODEL_NAME,
    Manifest,
    RankFile,
    read_manifest_or_none,
)
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.checksum import Bytes, digest
from slipstream.files.disk import Disk, FileEntry, UnsyncedFiles
from slipstream.files.os_errors import describe_os_error, explain_os_errors, suggest_remedy
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.reader import read_digest
from slipstream.logging import get_logger

__all__ = [
    "HiddenKind", "JoinedStage", "LocalStage", "LocalTarget", "acquire_lock", "discard_replaced", "find_recoverable", "hidden_path",
    "is_alive", "lock_path", "names_with_leftovers", "read_lock_owner", "remove_checkpoint", "sweep_leftovers", "sweep_locked",
    "write_latest",
]


HiddenKind = Literal["saving", "was", "removing"]

_HIDDEN: Final = re.compile(r"\.(?P<stem>.+)\.((?P<kind>saving|was|removing)-[0-9a-f]{8}|lock)", re.DOTALL)
_ACCELERATE_WEIGHTS: Final = re.compile(
    rf"{SAFE_MODEL_NAME}(_\d+)?\.safetensors|({MODEL_NAME}|{FSDP_MODEL_NAME})(_\d+)?\.bin|({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})_\d+/.+"
)
"""Files of weights, and those below folders of torch.distributed.checkpoint, in the layout of Accelerate."""
_LONGEST_STEM: Final = 200  # with prefix and suffix, a name stays below the 255 bytes that file systems allow
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_CHILD_GRACE_SECONDS: Final = 10.0
_LONGEST_LOCK: Final = 4096


def hidden_path(path: Path, kind: HiddenKind) -> Path:
    """Return a new hidden name beside a checkpoint.

    >>> hidden_path(Path("/data/first"), "saving").name[:14]
    '.first.saving-'
    """
    return path.with_name(f".{_short_name(path.name)}.{kind}-{secrets.token_hex(4)}")


def names_with_leftovers(folder: Path) -> set[str]:
    """Return the names of all checkpoints in a folder that have hidden files or folders beside them."""
    with suppress(OSError), os.scandir(folder) as entries:
        return {found["stem"] for entry in entries if (found := _HIDDEN.fullmatch(entry.name))}
    return set()


def find_recoverable(path: Path) -> Path | None:
    """Return the hidden folder of a checkpoint that a crash left there; None if the checkpoint is in its place, or nowhere.

    That happens only where the system cannot exchange two folders atomically, between the two renames that replace the exchange.
    """
    if os.path.lexists(path):
        return None
    whole = [
        (manifest.step, str(found), found)
        for found in _list_hidden(path)["was"]
        if (manifest := read_manifest_or_none(found)) and _is_whole(found, manifest)
    ]
    return max(whole)[2] if whole else None


def lock_path(path: Path) -> Path:
    """Return the lock file of a name."""
    return path.with_name(f".{_short_name(path.name)}.lock")


def acquire_lock(path: Path, disk: Disk) -> int | None:
    """Lock a name; return None where the file system does not support locks. A `CheckpointError` names the process that holds it."""
    lock = lock_path(path)
    deadline = time.monotonic() + _CHILD_GRACE_SECONDS
    while True:
        try:
            return disk.lock(lock)
        except BlockingIOError:
            owner, host = read_lock_owner(lock)
            # children of a dead process may still hold its lock; they end soon
            if time.monotonic() < deadline and host == socket.gethostname() and not is_alive(owner):
                time.sleep(0.05)
                continue
            who = f"process {owner} on {host}" if owner else "another process"
            raise CheckpointError(
                f"{path} is being saved by {who}.\n"
                "Give every run its own folder, or wait until that save has finished. The existing checkpoint is untouched."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if disk.locks_are_missed:
                return None
            disk.locks_are_missed = True
            get_logger(__name__).warning(
                f"{path.parent} does not support file locks: two simultaneous saves to one name are not detected, and leftovers of a "
                "killed save (.NAME.saving-*) are not removed."
            )
            return None


def sweep_leftovers(path: Path, disk: Disk) -> None:
    """Remove the leftovers of dead saves to this name, and move a checkpoint back that a crash left hidden. Live saves are not touched."""
    if not os.path.lexists(lock_path(path)) and not any(_list_hidden(path).values()):
        return
    try:
        lock = acquire_lock(path, disk)
    except (CheckpointError, OSError):  # a live save holds it, or it cannot be locked
        return
    if lock is None:
        return
    try:
        sweep_locked(path, disk)
    finally:
        with suppress(OSError):
            disk.unlock(lock_path(path), lock)


def sweep_locked(path: Path, disk: Disk) -> None:
    """Do what `sweep_leftovers` does, for the holder of the lock. A failure to remove is logged and does not fail the save."""
    found = _list_hidden(path)
    if not any(found.values()):
        return
    try:
        if not os.path.lexists(path) and found["was"]:
            back = find_recoverable(path) or found["was"][0]
            disk.rename(back, path)
            found["was"].remove(back)
        disk.sync_folder(path.parent)  # the name is durable before anything is removed
        for leftover in [*found["saving"], *found["removing"]]:
            with suppress(FileNotFoundError):  # a rank removes it, too
                disk.remove_tree(leftover)
        for leftover in found["was"]:
            discard_replaced(leftover, path, disk)
    except OSError as error:
        get_logger(__name__).warning(
            f"Leftovers of an earlier save to {path} could not be removed ({describe_os_error(error)}); the next save tries again."
        )


def discard_replaced(old: Path, new: Path, disk: Disk) -> None:
    """Remove a replaced folder. Files that do not belong to its checkpoint move into the new one, or stay and are named in a warning.

    Scripts write their own files into checkpoints at every save (a Trainer's state, a tokenizer), so these have to follow the name.
    """
    if not stat.S_ISDIR(os.lstat(old).st_mode):
        get_logger(__name__).warning(f"{old} is not a folder; it is left in place.")
        return
    ours = _checkpoint_files(old, new)
    moved, left = _move_foreign_files(old, new, "", ours, disk)
    if moved:
        disk.sync_folder(new)
    if not left:
        remove_checkpoint(old, new, disk)
        return
    kept = new.with_name(f"replaced-{secrets.token_hex(4)}.{_short_name(new.name)}")  # a name that scripts do not take for a checkpoint
    for name in sorted(ours):
        with suppress(FileNotFoundError):
            disk.remove(old / name)
    disk.rename(old, kept)
    disk.sync_folder(new.parent)
    get_logger(__name__).warning(
        f"{new} was replaced; {', '.join(left[:5])}{' and others' if len(left) > 5 else ''} did not belong to the old checkpoint, "
        f"and the new one has different files of the same name. They are in {kept}; remove it when you do not need them."
    )


def remove_checkpoint(folder: Path, named: Path, disk: Disk) -> None:
    """Remove a folder with its content, so that no crash leaves a part of it under a name that counts."""
    hidden = hidden_path(named, "removing")
    disk.rename(folder, hidden)
    disk.sync_folder(hidden.parent)
    disk.remove_tree(hidden)


def _move_foreign_files(old: Path, new: Path, below: str, ours: set[str], disk: Disk) -> tuple[int, list[str]]:
    """Move everything that is not ours; return the number of moved files, and the names that the new checkpoint uses otherwise."""
    moved = 0
    left: list[str] = []
    with os.scandir(old / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = below + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if name in ours and not is_folder:
            continue
        taken = os.path.lexists(new / name)
        if is_folder and (any(our.startswith(f"{name}/") for our in ours) or (taken and (new / name).is_dir())):
            if not taken:
                disk.make_folder(new / name)
            inner_moved, inner_left = _move_foreign_files(old, new, f"{name}/", ours, disk)
            if inner_moved:
                disk.sync_folder(new / name)
            elif not taken:
                disk.remove_folder(new / name)
            moved, left = moved + inner_moved, left + inner_left
        elif taken and _has_same_bytes(old / name, new / name):
            disk.remove(old / name)
        elif taken:
            left.append(name)
        else:
            disk.rename(Path(entry.path), new / name)
            moved += 1
    return moved, left


def _has_same_bytes(path: Path, other: Path) -> bool:
    """Whether two regular files have the same content."""
    if path.is_symlink() or other.is_symlink() or not path.is_file() or not other.is_file():
        return False
    return filecmp.cmp(path, other, shallow=False)


def _checkpoint_files(old: Path, new: Path) -> set[str]:
    """Return the names of the files in a replaced folder that belong to its checkpoint."""
    manifest, successor = read_manifest_or_none(old), read_manifest_or_none(new)
    # Two saves at the same step: a rank that wrote before the second commit may have put its file into the first checkpoint.
    stamp = None if successor is None else successor.stamp
    ranks = {name for name in os.listdir(old) if (rank := RankFile.of(name)) and (rank.stamp != stamp or os.path.lexists(new / name))}
    if manifest is not None:
        return {MANIFEST, *manifest.files, *ranks}
    if not os.path.lexists(old / MANIFEST):
        # A checkpoint in the layout of Accelerate, replaced by another: leftovers of the old one would be read with the new one.
        return ranks if os.path.lexists(new / MANIFEST) else ranks | _files_in_layout_of_accelerate(old)
    # A checkpoint with a damaged manifest: files with a successor of the same name belonged to it.
    return {MANIFEST, *ranks, *(successor.files if successor else ())}


def _files_in_layout_of_accelerate(folder: Path) -> set[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {name for name in names if ACCELERATE_FILE.fullmatch(name) or _ACCELERATE_WEIGHTS.fullmatch(name)}


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    try:
        with ConfinedFolder(folder) as opened:
            return all(opened.size(name) == entry.size for name, entry in manifest.files.items())
    except CheckpointError:
        return False


def _short_name(name: str) -> str:
    """Return the name, or the beginning and checksum of one that is too long for a prefix and suffix."""
    encoded = os.fsencode(name)
    if len(encoded) <= _LONGEST_STEM:
        return name
    return f"{encoded[: _LONGEST_STEM - 33].decode(errors='ignore')}~{digest(encoded)}"


def _list_hidden(path: Path) -> dict[str, list[Path]]:
    """Return the hidden folders beside a checkpoint by kind, each kind sorted."""
    stem = _short_name(path.name)
    listed: dict[str, list[Path]] = {"saving": [], "was": [], "removing": []}
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if not entry.name.startswith(f".{stem}."):  # there may be thousands of others
                continue
            found = _HIDDEN.fullmatch(entry.name)
            if found and found["kind"] and found["stem"] == stem and entry.is_dir(follow_symlinks=False):
                listed[found["kind"]].append(path.with_name(entry.name))
    return {kind: sorted(paths) for kind, paths in listed.items()}


def read_lock_owner(lock: Path) -> tuple[int, str]:
    """Return the process and host in a lock file; (0, "") if there is none."""
    try:
        with ConfinedFolder(lock.parent) as opened:
            pid, host = opened.read(lock.name, _LONGEST_LOCK).decode(errors="replace").split("\n")[0].split(" ", 1)
        return int(pid), host
    except (CheckpointError, OSError, ValueError):  # it is being written, or was just removed
        return 0, ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # of another user
        return True
    except (OSError, OverflowError):
        return False
    return True


_NO_LINKS: Final = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)
_STALE_SECONDS: Final = 3600.0


class LocalTarget:
    """A checkpoint folder on this machine; a relative path is resolved now.

    >>> import tempfile
    >>> from slipstream.checkpoint.manifest import Manifest
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
        """Return an empty stage. The checkpoint under the name does not change before `commit`."""
        _check_target(self.path)
        lock = None
        with _explain_os_errors(self.path, self.disk):
            _make_parents(self.path.parent, self.disk)
            lock = acquire_lock(self.path, self.disk)
            try:
                if lock is not None:
                    sweep_locked(self.path, self.disk)
                return LocalStage(self.path, self.disk, lock)
            except BaseException:
                _release(self.path, self.disk, lock)
                raise

    def join(self, ticket: str) -> JoinedStage:
        """Return the stage that another process began, to add files to it."""
        return JoinedStage(self.path, ticket, self.disk)


class LocalStage:
    """A checkpoint that is being written to `folder`. `LocalTarget.begin` returns it; leaving its context without a commit abandons it."""

    common: Final = True
    """Whether other processes see `folder`."""

    def __init__(self, target: Path, disk: Disk, lock: int | None) -> None:
        self.target = target
        self.folder = hidden_path(target, "saving")
        self._disk = disk
        self._lock = lock
        self._unsynced = UnsyncedFiles(disk)
        self._open = True
        disk.make_folder(self.folder)
        try:
            self._mode = stat.S_IMODE(os.stat(self.folder).st_mode)  # by the umask; the committed folder gets this mode
            disk.set_mode(self.folder, 0o700)
        except OSError:
            with suppress(OSError):
                disk.remove_folder(self.folder)
            raise

    @property
    def ticket(self) -> str:
        """The argument of `LocalTarget.join` in another process."""
        return self.folder.name

    def __enter__(self) -> LocalStage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abandon()

    def add(self, name: str, chunks: Iterable[Bytes], size: int) -> FileEntry:
        """Write a file with these bytes, `size` in total; it is on the disk after `commit`, or `flush` of a stage that was joined."""
        path = self._path(name)
        with _explain_os_errors(self.target, self._disk, needed=size):
            self._make_folders(path.parent)
            return self._unsynced.write(path, chunks, size)

    def flush(self) -> None:
        """End what this process adds. There is nothing to do for the one that commits: `commit` syncs its files."""

    def adopt(self, name: str) -> FileEntry:
        """Add a file that somebody else wrote into `folder`; anything but a regular file is an error."""
        path = self._path(name)
        with ConfinedFolder(self.folder) as opened:
            os.close(opened.open(name))
        with _explain_os_errors(self.target, self._disk):
            return self._disk.sync_file(path)

    def reuse(self, name: str, source: Path, entry: FileEntry) -> bool:
        """Hard-link a file of another checkpoint if its bytes, read now, match `entry`; return whether that was possible."""
        path = self._path(name)
        try:
            with ConfinedFolder(source.parent) as opened:
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
        with _explain_os_errors(self.target, self._disk):
            self._make_folders(path.parent)
            try:
                self._disk.link(source, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return False
            if os.path.samestat(known, os.stat(path, follow_symlinks=False)):
                return True
            self._disk.remove(path)  # it was replaced after it was read
            return False

    def commit(self, manifest: bytes | None) -> None:
        """Write the manifest and move the stage into place. Afterwards the checkpoint is there, or an error says why not.

        Without a manifest, which the layouts of other libraries do not have, nothing can tell later whether the files changed.
        """
        try:
            with _explain_os_errors(self.target, self._disk, needed=len(manifest or b"")):
                if manifest is not None:
                    self._unsynced.write(self.folder / MANIFEST, [manifest], len(manifest))
                self._disk.set_mode(self.folder, self._mode)
                self._unsynced.sync(list(_folders_in(self.folder)))
                _check_target(self.target)
                replaced = _publish(self.folder, self.target, self._disk)
        except BaseException:
            self.abandon()
            raise
        self._open = False
        try:
            if replaced is not None:
                discard_replaced(replaced, self.target, self._disk)
        except OSError as error:
            get_logger(__name__).warning(
                f"{self.target} is saved. The checkpoint that it replaced could not be removed ({describe_os_error(error)}); the next save "
                "tries again."
            )
        finally:
            _release(self.target, self._disk, self._lock)

    def abandon(self) -> None:
        """Remove the stage; after `commit`, or a second time, do nothing."""
        if not self._open:
            return
        self._open = False
        self._unsynced.close()
        try:
            with suppress(FileNotFoundError):
                self._disk.remove_tree(self.folder)
        except OSError as error:
            get_logger(__name__).warning(
                f"{self.folder} could not be removed ({describe_os_error(error)}); the next save to that name removes it."
            )
        finally:
            _release(self.target, self._disk, self._lock)

    def _path(self, name: str) -> Path:
        if not self._open:
            raise CheckpointError(f"{self.target}: this save has ended; {name!r} cannot be added to it.")
        return self.folder / check_name(name, f"The save to {self.target}")

    def _make_folders(self, folder: Path) -> None:
        if folder != self.folder and not folder.is_dir():
            self._make_folders(folder.parent)
            with suppress(FileExistsError):
                self._disk.make_folder(folder)


class JoinedStage(LocalStage):
    """A stage that another process began, and will commit or abandon; files can be added to it."""

    def __init__(self, target: Path, ticket: str, disk: Disk) -> None:
        self.target = target
        self.folder = target.parent / ticket
        self._disk = disk
        self._lock = None
        self._unsynced = UnsyncedFiles(disk)
        self._open = True
        if not _HIDDEN.fullmatch(ticket) or not self.folder.is_dir():
            raise CheckpointError(
                f"{target} cannot be saved by all processes: this one does not see {self.folder}, which the main process created. State "
                "that is sharded over processes needs a folder on a file system that all of them share, or a URL."
            )

    def flush(self) -> None:
        """Sync the files that this process added: the one that commits relies on it."""
        with _explain_os_errors(self.target, self._disk):
            self._unsynced.sync()

    def commit(self, manifest: bytes | None) -> None:
        raise CheckpointError(f"{self.target} is committed by the process that began it.")

    def abandon(self) -> None:
        """Refuse further files; the other process removes the stage."""
        self._open = False
        self._unsynced.close()


def _folders_in(folder: Path) -> Iterator[Path]:
    """Yield a folder and all below it; links are not followed."""
    yield folder
    with os.scandir(folder) as entries:
        inner = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    for path in inner:
        yield from _folders_in(Path(path))


def write_latest(parent: Path, name: str, disk: Disk) -> None:
    """Write the name of the newest checkpoint in a folder into the file `latest`."""
    with _explain_os_errors(parent / LATEST, disk):
        disk.replace_text(parent / LATEST, f"{name}\n")
    with suppress(OSError):
        for path in parent.glob(f".{LATEST}.writing-*"):  # left by a killed process; a live one needs milliseconds
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                disk.remove(path)


def _publish(stage: Path, target: Path, disk: Disk) -> Path | None:
    """Move a sealed stage into place durably, or leave everything as it was; return where the replaced folder is now."""
    undo: list[Callable[[], object]] = []
    replaces = os.path.lexists(target)
    try:
        return _move_into_place(stage, target, disk, undo)
    except BaseException as error:
        if _undo_on_error(undo) or not isinstance(error, OSError):
            raise
        both = f"it and the one before it are both complete, as {target.name} and .{target.name}.was-*"
        state = both if replaces else "it is complete, but the disk has not confirmed it,"
        raise CheckpointError(
            f"{target} could not be saved: {describe_os_error(error)}.\n{suggest_remedy(error)} "
            f"The new checkpoint was being moved into place, and that could not be undone: {state} in {target.parent}."
        ) from error


def _undo_on_error(steps: list[Callable[[], object]]) -> bool:
    try:
        for step in reversed(steps):
            step()
    except OSError:  # the first error is more useful
        return False
    return True


def _move_into_place(stage: Path, target: Path, disk: Disk, undo: list[Callable[[], object]]) -> Path | None:
    def rename(old: Path, new: Path) -> None:
        disk.rename(old, new)
        undo.append(lambda: disk.rename(new, old))

    if not os.path.lexists(target):
        rename(stage, target)
        disk.sync_folder(target.parent)
        return None
    # From here on it is complete: after a crash, the next save must not delete files of others in it.
    staged = hidden_path(target, "was")
    rename(stage, staged)
    if disk.exchange(staged, target):
        undo.append(lambda: disk.exchange(staged, target))
        disk.sync_folder(target.parent)
        return staged
    old = hidden_path(target, "was")
    rename(target, old)
    rename(staged, target)
    disk.sync_folder(target.parent)
    return old


def _release(target: Path, disk: Disk, lock: int | None) -> None:
    if lock is not None:
        with suppress(OSError):  # closing the descriptor unlocks; the next save takes over the file
            disk.unlock(lock_path(target), lock)


def _resolved(path: str) -> Path:
    """Return the absolute path, with links resolved in all parts but the last."""
    bare = path.rstrip("/") or "/"
    parent, name = os.path.split(bare)
    if name in ("", os.curdir, os.pardir):
        return Path(os.path.realpath(bare))
    return Path(os.path.realpath(parent or os.curdir), name)


def _check_target(path: Path) -> None:
    """Raise a `ConfigError` for a path that cannot become a checkpoint."""
    why = None
    if path.parent == path:
        why = "it is the root of the file system"
    elif os.path.islink(path):
        why = f"it is a symbolic link (to {os.readlink(path)}), and a checkpoint replaces the whole folder"
    elif os.path.lexists(path) and not os.path.isdir(path):
        why = "there is a file of that name, and a checkpoint is a folder"
    elif os.path.ismount(path):
        why = "it is a mount point, which cannot be replaced atomically"
    elif os.path.isdir(path) and _holds_working_directory(path):
        why = "it holds the working directory of this process, and a checkpoint replaces the whole folder"
    elif _HIDDEN.fullmatch(path.name):
        why = "names of that form are reserved for saves in progress"
    if why is not None:
        raise ConfigError(f"A checkpoint cannot be saved to {path}: {why}.\nUse a separate folder, such as {_suggestion(path)}.")


def _suggestion(path: Path) -> Path:
    inside = os.path.isdir(path) and not os.path.islink(path)
    return path / "checkpoint" if inside else path.with_name(f"{path.name.strip('.')[:100]}_checkpoint")


def _holds_working_directory(path: Path) -> bool:
    try:
        here = Path(os.getcwd())
    except OSError:  # the working directory was removed
        return False
    return path == here or path in here.parents


def _make_parents(folder: Path, disk: Disk) -> None:
    """Create missing parent folders, each durable before the next."""
    if folder.is_dir():
        return
    _make_parents(folder.parent, disk)
    with suppress(FileExistsError):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _explain_os_errors(target: Path, disk: Disk, *, needed: int | None = None) -> AbstractContextManager[None]:
    after = " The previous checkpoint is untouched."
    return explain_os_errors(
        f"{target} could not be saved", after=after, separator="\n", needed=needed, free=lambda: disk.free(target.parent)
    )
