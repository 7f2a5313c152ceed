"""Durable writes: every change that a save makes to a disk is one method of `Disk`.

`write` returns when the file is written, checksummed and synced; a folder is synced by name, and the files of a save are synced together
(`UnsyncedFiles`). Large files bypass the page cache: two threads write while the caller copies and checksums the next piece, and where a
file system refuses direct I/O the rest goes through the cache. Nothing is replaced unless the caller says so, no link is followed in
place of a file, and no thread is left behind. Errors are `OSError` with the path in `filename`. Tests override the methods that call the
system once, to watch, stop or fail each operation.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import queue
import secrets
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from slipstream.files.checksum import Bytes, Digest, view_bytes

__all__ = ["Disk", "FileEntry", "SMALLEST", "UnsyncedFiles", "copy_bytes", "set_direct_io", "write_direct"]


SMALLEST: Final = 8 << 20
"""Files from this size on are worth it: below, buffers and threads cost more than the page cache."""

_PIECE: Final = 2 << 20
_DIRECT_PIECES: Final = 5
_WRITER_COUNT: Final = 2
_SYNC_COUNT: Final = 4
"""Files and folders that are synced at the same time."""
_MOST_UNSYNCED: Final = 64
"""Files of a save that stay open until they are synced: the descriptors of a process are limited."""
_DIRECT_BLOCK: Final = max(4096, mmap.PAGESIZE)
_SMALL_COPY: Final = 1 << 16


def set_direct_io(fd: int, wanted: bool) -> bool:
    """Turn direct I/O of an open file on or off; return whether it is on. File systems that do not support it keep it off."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return wanted


def write_direct(disk: Disk, fd: int, chunks: Iterable[Bytes], size: int) -> tuple[int, str]:
    """Write these bytes, `size` altogether, to an empty file that was opened so; return how many there were, and their checksum."""
    disk._allocate(fd, size)  # a full disk shows now, and not after half of the file
    step = min(_PIECE, -(-size // _DIRECT_BLOCK) * _DIRECT_BLOCK)
    memory = memoryview(mmap.mmap(-1, _DIRECT_PIECES * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    writers = _WriterThreads(disk, fd, [memory[start : start + step] for start in range(0, len(memory), step)])
    running, done = Digest(), 0
    try:
        for piece in _fill_buffers(chunks, writers.free):
            running.update(piece)
            writers.write(piece, done)
            done += len(piece)
    finally:
        writers.finish()
    writers.check()
    return done, running.hexdigest()


def _fill_buffers(chunks: Iterable[Bytes], free: queue.SimpleQueue[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in buffers that are full, but for the last one."""
    buffer, used = free.get(), 0
    for chunk in chunks:
        data = view_bytes(chunk)
        while data:
            count = min(len(data), len(buffer) - used)
            copy_bytes(buffer[used : used + count], data[:count])
            data, used = data[count:], used + count
            if used == len(buffer):
                yield buffer
                buffer, used = free.get(), 0
    if used:
        yield buffer[:used]


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """Copy bytes; large copies release the interpreter lock."""
    if len(data) < _SMALL_COPY:
        into[:] = data
        return
    import numpy  # its copy of a large array releases the interpreter lock; that of a memoryview keeps it

    numpy.copyto(numpy.frombuffer(into, numpy.uint8), numpy.frombuffer(data, numpy.uint8))


class _WriterThreads:
    """The threads that write. An error ends the writing, not the threads: buffers keep coming back, and `check` raises it."""

    def __init__(self, disk: Disk, fd: int, buffers: list[memoryview]) -> None:
        self._disk = disk
        self._fd = fd
        self._direct = True
        self._error: BaseException | None = None
        self._tasks: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for buffer in buffers:
            self.free.put(buffer)
        self._threads = [threading.Thread(target=self._run, name="slipstream: writing a file", daemon=True) for _ in range(_WRITER_COUNT)]
        for thread in self._threads:
            thread.start()

    def write(self, piece: memoryview, offset: int) -> None:
        """Have this written; the buffer comes back through `free`."""
        self.check()
        self._tasks.put((piece, offset))

    def finish(self) -> None:
        """Wait until all is written, or something went wrong."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raise what went wrong in a thread."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            piece, offset = task
            if self._error is None:
                try:
                    self._write(piece, offset)
                except BaseException as error:  # raised in the thread that waits, by `check`
                    self._error = error
            self.free.put(piece)

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            direct = self._direct
            if direct and (offset % _DIRECT_BLOCK or len(data) % _DIRECT_BLOCK):
                self._no_longer_direct()
            try:
                count = self._disk._write_some(self._fd, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._no_longer_direct()  # the file system accepts the flag but requires larger blocks
                continue
            data, offset = data[count:], offset + count

    def _no_longer_direct(self) -> None:
        """Continue through the page cache, for every writer: direct I/O is a property of the open file."""
        self._disk._set_direct(self._fd, False)
        self._direct = False


_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_BUFFERED_PIECE: Final = 512 << 10
"""For longer writes Linux takes large pages from the page cache, which a virtual machine may have to fetch from its host: 2 ms a MB."""

_HERE: Final = -100  # AT_FDCWD
_EXCHANGE: Final = 2  # RENAME_EXCHANGE
_START_WRITEBACK: Final = 2  # SYNC_FILE_RANGE_WRITE
_CANNOT: Final = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class FileEntry:
    """What a file holds: size in bytes, and checksum."""

    size: int
    checksum: str


class Disk:
    """The operations of a save.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = Disk().write(Path(folder, "notes.txt"), [b"slip", b"stream"], 10)
    ...     written.size, written.checksum[:8], Path(folder, "notes.txt").read_text()
    (10, '63f9f393', 'slipstream')
    """

    locks_are_missed = False
    """Whether a warning about a file system without locks was logged."""

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Create a folder; the umask applies to `mode`."""
        os.mkdir(path, mode)

    def set_mode(self, path: Path, mode: int) -> None:
        """Set the permissions of a folder or file of this user; where the file system has none of its own, those of the mount hold."""
        with self._naming(path):
            try:
                self._chmod(path, mode)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise

    def write(self, path: Path, chunks: Iterable[Bytes], size: int) -> FileEntry:
        """Make a file of these bytes, `size` altogether; when this returns they are on the disk. A file that exists is an error."""
        fd, entry = self.write_unsynced(path, chunks, size)
        with self._closing(path, fd):
            self._fsync(fd)
        return entry

    def write_unsynced(self, path: Path, chunks: Iterable[Bytes], size: int) -> tuple[int, FileEntry]:
        """Make a file of these bytes that a crash may still take; return the open file, for `sync_all`."""
        with self._naming(path):
            fd = self._open(path, _CREATE)
            try:
                if size >= SMALLEST and self._set_direct(fd, True):
                    written, checksum = write_direct(self, fd, chunks, size)
                else:
                    written, checksum = self._write_buffered(fd, chunks)
                if written != size:
                    raise ValueError(f"{path} was announced with {size:,} bytes and got {written:,}")
            except BaseException:
                self._close(fd)
                raise
        return fd, FileEntry(size, checksum)

    def close_all(self, files: Iterable[int]) -> None:
        """Close files of `write_unsynced` that nobody needs."""
        for fd in files:
            with suppress(OSError):
                self._close(fd)

    def sync_all(self, files: Mapping[int, Path], folders: Sequence[Path] = ()) -> None:
        """Sync and close open files, and sync folders, at the same time: a disk needs hardly longer for many than for one."""
        with ExitStack() as opened:
            for fd, path in files.items():
                opened.enter_context(self._closing(path, fd))
            tasks = [partial(self._sync_open_file, path, fd) for fd, path in files.items()]
            tasks += [partial(self.sync_folder, path) for path in folders]  # each opened in its turn: there may be thousands
            _run_side_by_side(tasks, _SYNC_COUNT)

    def sync_file(self, path: Path) -> FileEntry:
        """Sync a file that other code wrote, and return its entry; anything but a regular file is an error."""
        with self._opened(path, _READ) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            running, size = Digest(), 0
            while piece := os.pread(fd, _BUFFERED_PIECE, size):
                running.update(piece)
                size += len(piece)
            self._fsync(fd)
        return FileEntry(size, running.hexdigest())

    def sync_folder(self, path: Path) -> None:
        """Sync the names in a folder."""
        with self._opened(path, _FOLDER) as fd:
            try:
                self._fsync(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some network file systems do not support syncing folders: their servers do it
                    raise

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically; a file of that name is replaced, and so is an empty folder by a folder."""
        os.rename(old, new)

    def exchange(self, path: Path, other: Path) -> bool:
        """Exchange two names atomically; False where the system cannot."""
        if sys.platform != "linux":
            return False
        code = _renameat2(os.fsencode(path), os.fsencode(other), _EXCHANGE)
        if code in _CANNOT:
            return False
        if code:
            raise OSError(code, os.strerror(code), str(path), None, str(other))
        return True

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name."""
        os.link(old, new, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Remove a file, or a link itself."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

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
        """Replace the text of a small file; a reader sees the old one or the new one."""
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
        """Lock a file until `unlock`, or until this process ends; `BlockingIOError` if another process holds it.

        The file contains process id and host of the holder. Without file locks it is an `OSError` (ENOLCK, ENOSYS, EOPNOTSUPP).
        """
        while True:
            with self._naming(path):
                fd = self._open(path, _LOCK)
                try:
                    self._flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_same_file(fd, path):  # the one before us may have removed it between our two calls
                        self._pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                        return fd
                except BaseException:
                    self._close(fd)
                    raise
                self._close(fd)

    def unlock(self, path: Path, fd: int) -> None:
        """Release a lock, and remove its file."""
        try:
            with suppress(FileNotFoundError):
                self.remove(path)
        finally:
            with suppress(OSError):  # closing releases it too, unless a child process has the descriptor as well
                self._flock(fd, fcntl.LOCK_UN)
            self._close(fd)

    def free(self, path: Path) -> int | None:
        """Return the bytes that this user can still write where `path` is; None where that is unknown."""
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
        """Turn direct I/O of this file on or off; return whether it is on."""
        return set_direct_io(fd, wanted)

    def _allocate(self, fd: int, size: int) -> None:
        """Reserve the space of a whole file, if the file system supports that."""
        code = _fallocate(fd, size)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(code, os.strerror(code))

    def _start_writeback(self, fd: int) -> None:
        """Let the system begin to write a file, without waiting, so that less is left for `_fsync`."""
        _sync_file_range(fd, _START_WRITEBACK)

    def _fsync(self, fd: int) -> None:
        os.fsync(fd)

    def _close(self, fd: int) -> None:
        os.close(fd)

    def _flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def _chmod(self, path: Path, mode: int) -> None:
        os.chmod(path, mode)

    # -- shared --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        """Yield a descriptor, and put its path into every error."""
        with self._naming(path):
            fd = self._open(path, flags)
        with self._closing(path, fd):
            yield fd

    @contextmanager
    def _closing(self, path: Path, fd: int) -> Iterator[None]:
        """Close an open file at the end, and put its path into every error."""
        with self._naming(path):
            try:
                yield
            finally:
                self._close(fd)

    def _sync_open_file(self, path: Path, fd: int) -> None:
        with self._naming(path):
            self._fsync(fd)

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
            data = view_bytes(chunk)
            running.update(data)
            while data:
                count = self._write_some(fd, data[:_BUFFERED_PIECE], offset)
                data, offset = data[count:], offset + count
        self._start_writeback(fd)
        return offset, running.hexdigest()

    def _write_some(self, fd: int, data: memoryview, offset: int) -> int:
        """Return how many of these bytes were written: more than none."""
        count = self._pwrite(fd, data, offset)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        return count


class UnsyncedFiles:
    """Files that a crash may still take: `sync` makes them certain together."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[int, Path] = {}
        self._most = _MOST_UNSYNCED

    def write(self, path: Path, chunks: Iterable[Bytes], size: int) -> FileEntry:
        """Write a file, as `Disk.write` does; it stays open until `sync`."""
        if len(self._open) >= self._most:
            self.sync()
        try:
            fd, entry = self._disk.write_unsynced(path, chunks, size)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
            self._most = max(1, len(self._open) // 2)  # and leave some to others
            self.sync()
            fd, entry = self._disk.write_unsynced(path, chunks, size)  # it could not be opened, so nothing was taken of the chunks
        self._open[fd] = path
        return entry

    def sync(self, folders: Sequence[Path] = ()) -> None:
        """Sync all files, and these folders."""
        files, self._open = self._open, {}
        self._disk.sync_all(files, folders)

    def close(self) -> None:
        """Give the files up; nobody needs them."""
        files, self._open = self._open, {}
        self._disk.close_all(files)


def _run_side_by_side(tasks: Iterable[Callable[[], object]], most: int) -> None:
    """Run all tasks, in this thread and others, and raise the first error. A pool of threads costs as much as a sync."""
    waiting = list(tasks)
    left, errors = iter(waiting), list[BaseException]()

    def work() -> None:
        for task in left:
            try:
                task()
            except BaseException as error:  # raised below, in the thread that waits
                errors.append(error)

    threads: list[threading.Thread] = []
    with suppress(RuntimeError):  # the system has no more threads, or Python is about to end: those that began do all of it
        for _ in range(min(most, len(waiting)) - 1):
            thread = threading.Thread(target=work, name="slipstream: syncing")
            thread.start()
            threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, size: int) -> int:
    """Return 0, or the number of the error."""
    call: Callable[..., int] | None = getattr(_library(), "fallocate", None)
    if call is None:
        return errno.ENOSYS
    return 0 if call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0 else ctypes.get_errno()


def _sync_file_range(fd: int, flags: int) -> None:
    """Call the function of Linux for all of a file; it is a hint, so errors are left to `fsync`."""
    call: Callable[..., int] | None = getattr(_library(), "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(flags))


def _renameat2(old: bytes, new: bytes, flags: int) -> int:
    """Return 0, or the number of the error."""
    call: Callable[..., int] | None = getattr(_library(), "renameat2", None)
    if call is None:
        return errno.ENOSYS
    return 0 if call(_HERE, old, _HERE, new, ctypes.c_uint(flags)) == 0 else ctypes.get_errno()
