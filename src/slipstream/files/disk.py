"""Every change that a save makes to a disk goes through an object of this class, one method each.

So there is one place that says what "durable" means (a file is written, checksummed and synced before `write` returns; a folder is synced
by name), and tests can watch each operation, stop after it, or let it fail: they override the primitives whose names begin with an
underscore. Errors of the system come out as `OSError` with the path in `filename`; whoever calls says what they mean.

What it never does: replace a file that it was not told to replace, follow a link in place of a file, or return before the bytes are safe.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import secrets
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slipstream.files.digest import Bytes, Digest, bytes_of
from slipstream.files.direct import SMALLEST, set_direct, write_direct

__all__ = ["Disk", "Written"]

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_PIECE: Final = 4 << 20

_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2
_CANNOT: Final = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class Written:
    """What is on the disk now: size in bytes, and checksum."""

    size: int
    digest: str


class Disk:
    """The operations of a save.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = Disk().write(Path(folder, "notes.txt"), [b"slip", b"stream"], 10)
    ...     written.size, written.digest[:8], Path(folder, "notes.txt").read_text()
    (10, '63f9f393', 'slipstream')
    """

    locks_are_missed = False
    """Whether it was said that a file system here knows no locks."""

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Make a folder that is not there yet; the umask takes its part of `mode`."""
        self._mkdir(path, mode)

    def set_mode(self, path: Path, mode: int) -> None:
        """Set the permissions of a folder or file of this user; where the file system has none of its own, those of the mount hold."""
        with self._naming(path):
            try:
                self._chmod(path, mode)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise

    def write(self, path: Path, chunks: Iterable[Bytes], size: int) -> Written:
        """Make a file of these bytes, `size` altogether; when this returns they are on the disk. A file that exists is an error."""
        with self._opened(path, _CREATE) as fd:
            if size >= SMALLEST and self._set_direct(fd, True):
                written, checksum = write_direct(self, fd, chunks, size)
            else:
                written, checksum = self._write_buffered(fd, chunks)
            if written != size:
                raise ValueError(f"{path} was announced with {size:,} bytes and got {written:,}")
            self._fsync(fd)
        return Written(size, checksum)

    def sync_file(self, path: Path) -> Written:
        """Bring a file that somebody else wrote to the disk, and say what it is; anything but a regular file is an error."""
        with self._opened(path, _READ) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            running, size = Digest(), 0
            while piece := os.pread(fd, _PIECE, size):
                running.update(piece)
                size += len(piece)
            self._fsync(fd)
        return Written(size, running.hexdigest())

    def sync_folder(self, path: Path) -> None:
        """Bring the names in a folder to the disk."""
        with self._opened(path, _FOLDER) as fd:
            try:
                self._fsync(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some network file systems know no syncing of folders: their servers do it
                    raise

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, at once; a file of that name is replaced, and so is an empty folder by a folder."""
        self._rename(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        """Two names change places, at once; False where the system cannot."""
        return self._exchange(one, other)

    def link(self, old: Path, new: Path) -> None:
        """A second name for the same file."""
        self._link(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a link itself."""
        self._unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        self._rmdir(path)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all that is in it; links are removed, not followed."""
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.remove(Path(entry.path))
        self.remove_folder(path)

    def replace_text(self, path: Path, text: str) -> None:
        """A small file has this text from now on; a reader sees the old one or the new one."""
        data = text.encode()
        temporary = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
        try:
            self.write(temporary, [data], len(data))
            self.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                self.remove(temporary)
            raise
        self.sync_folder(path.parent)

    def lock(self, path: Path) -> int:
        """Hold a file locked until `unlock`, or until this process ends, however it ends; `BlockingIOError` if somebody else holds it.

        Who holds it can be read in it: process id and host. A file system without locks is an `OSError` (ENOLCK, ENOSYS, EOPNOTSUPP).
        """
        while True:
            with self._naming(path):
                fd = self._open(path, _LOCK)
                try:
                    self._flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_still(fd, path):  # the one before us may have removed it between our two calls
                        self._pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                        return fd
                except BaseException:
                    self._close(fd)
                    raise
                self._close(fd)

    def unlock(self, path: Path, fd: int) -> None:
        """Let go of a lock, and remove its file."""
        try:
            with suppress(FileNotFoundError):
                self._unlink(path)
        finally:
            with suppress(OSError):  # closing lets go of it too, unless a child process has the descriptor as well
                self._flock(fd, fcntl.LOCK_UN)
            self._close(fd)

    def free(self, path: Path) -> int | None:
        """Bytes that this user can still write where `path` is; None where that cannot be told."""
        try:
            known = os.statvfs(path)
        except OSError:
            return None
        return known.f_bavail * known.f_frsize

    # -- what the operations are made of; tests override these ---------------------------------------------------------

    def _open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags, mode)

    def _pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def _set_direct(self, fd: int, wanted: bool) -> bool:
        """Whether writes to this file pass by the page cache from now on."""
        return set_direct(fd, wanted)

    def _allocate(self, fd: int, size: int) -> None:
        """Ask for the room of a whole file; nothing happens where the file system does not know that."""
        code = _fallocate(fd, size)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(code, os.strerror(code))

    def _fsync(self, fd: int) -> None:
        os.fsync(fd)

    def _close(self, fd: int) -> None:
        os.close(fd)

    def _flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def _mkdir(self, path: Path, mode: int) -> None:
        os.mkdir(path, mode)

    def _chmod(self, path: Path, mode: int) -> None:
        os.chmod(path, mode)

    def _rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def _exchange(self, one: Path, other: Path) -> bool:
        if sys.platform != "linux":
            return False
        code = _renameat2(os.fsencode(one), os.fsencode(other), _EXCHANGE)
        if code in _CANNOT:
            return False
        if code:
            raise OSError(code, os.strerror(code), str(one), None, str(other))
        return True

    def _link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def _unlink(self, path: Path) -> None:
        os.unlink(path)

    def _rmdir(self, path: Path) -> None:
        os.rmdir(path)

    # -- shared --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        """A descriptor, and its path in every error that happens to it."""
        with self._naming(path):
            fd = self._open(path, flags)
            try:
                yield fd
            finally:
                self._close(fd)

    @contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = str(path)
            raise

    def _write_buffered(self, fd: int, chunks: Iterable[Bytes]) -> tuple[int, str]:
        running, offset = Digest(), 0
        for chunk in chunks:
            data = bytes_of(chunk)
            running.update(data)
            while data:
                count = self._write_some(fd, data[:_PIECE], offset)
                data, offset = data[count:], offset + count
        return offset, running.hexdigest()

    def _write_some(self, fd: int, data: memoryview, offset: int) -> int:
        """How many of these bytes were written: more than none."""
        count = self._pwrite(fd, data, offset)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        return count


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, size: int) -> int:
    """0, or the number of the error."""
    call: Callable[..., int] | None = getattr(_library(), "fallocate", None)
    if call is None:
        return errno.ENOSYS
    return 0 if call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0 else ctypes.get_errno()


def _renameat2(old: bytes, new: bytes, flags: int) -> int:
    """0, or the number of the error."""
    call: Callable[..., int] | None = getattr(_library(), "renameat2", None)
    if call is None:
        return errno.ENOSYS
    return 0 if call(_HERE, old, _HERE, new, ctypes.c_uint(flags)) == 0 else ctypes.get_errno()
