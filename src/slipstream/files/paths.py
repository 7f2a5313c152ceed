"""Safe access to files inside a folder.

`check_name` accepts only plain relative names that cannot lead outside; every name that comes from a file or a user passes it first.
`ConfinedFolder` and `open_inside` open regular files beneath a folder with the kernel's help (`openat2`, or part by part where the kernel
cannot): no symbolic link is followed unless `links_within` allows it, and opening a pipe or device never blocks. Errors are
`CheckpointError`; a missing file is a `FileNotFoundError` too. Nothing is written.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from slipstream.errors import CheckpointError, MissingCheckpointError

__all__ = ["ConfinedFolder", "LONGEST_PART", "MOST_PARTS", "check_name", "open_inside"]


MOST_PARTS: Final = 8
"""Most parts that a name may have."""
LONGEST_PART: Final = 200
"""Most bytes of one part: below the 255 of every file system, so that a temporary name beside it fits too."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DRIVE: Final = re.compile(r"[A-Za-z]:")


def check_name(name: Any, where: str) -> str:
    """Return the name if it is a plain relative path; else raise a `CheckpointError` that says where it came from.

    >>> check_name("unet/model.safetensors", "MANIFEST.json")
    'unet/model.safetensors'
    >>> check_name("../../etc/passwd", "MANIFEST.json")
    Traceback (most recent call last):
        ...
    slipstream.errors.CheckpointError: MANIFEST.json names the file '../../etc/passwd', which has a part '..'.
    Names are plain relative paths such as 'unet/model.safetensors'; this one is not opened.
    """
    why = _find_objection(name)
    if why is None:
        return str(name)
    shown = repr(name) if len(repr(name)) <= 120 else repr(name)[:117] + "..."
    raise CheckpointError(
        f"{where} names the file {shown}, which {why}.\n"
        "Names are plain relative paths such as 'unet/model.safetensors'; this one is not opened."
    )


def _find_objection(name: Any) -> str | None:
    if not isinstance(name, str):
        return f"is not text but {type(name).__name__}"
    if not name:
        return "is empty"
    if _CONTROL.search(name):
        return "has a control character in it"
    if "\\" in name:
        return "has a backslash in it"
    if name.startswith("/") or _DRIVE.match(name):
        return "is an absolute path"
    parts = name.split("/")
    if len(parts) > MOST_PARTS:
        return f"has {len(parts)} parts, more than {MOST_PARTS}"
    return next(filter(None, map(_find_part_objection, parts)), None)


def _find_part_objection(part: str) -> str | None:
    if part in ("", ".", ".."):
        return f"has a part {part!r}" if part else "has an empty part"
    try:
        size = len(part.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return f"has a part of {size} bytes, more than {LONGEST_PART}" if size > LONGEST_PART else None


_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_OPENAT2: Final = 437  # the same number on every architecture that Python runs on but alpha
_NO_MAGIC_LINKS: Final = 0x02
_NO_LINKS: Final = 0x04
_BENEATH: Final = 0x08
_CANNOT: Final = (errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL)  # an old kernel, or a sandbox without openat2
_MOST_RETRIES: Final = 100


class ConfinedFolder:
    """A folder held open, whose files are opened beneath it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = Path(path, "notes.txt").write_text("hello")
    ...     with ConfinedFolder(path) as folder:
    ...         folder.read("notes.txt", largest=100), folder.size("notes.txt"), folder.names()
    (b'hello', 5, ['notes.txt'])
    """

    def __init__(self, path: str | os.PathLike[str], *, links_within: str | os.PathLike[str] | None = None, kernel: bool = True) -> None:
        self.path = Path(path)
        self._kernel = kernel and sys.platform == "linux"
        self._links = links_within is not None
        self._below = ""
        root = self.path if links_within is None else Path(links_within)
        if links_within is not None:
            self._below = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
            if self._below.split(os.sep)[0] == os.pardir:
                raise CheckpointError(f"{self.path} is not beneath {root}, within which its links may lead.")
        self._root = Path(os.path.realpath(root))
        try:
            self._fd = os.open(root, _FOLDER_FLAGS)
        except OSError as error:
            raise _error(error)(f"The folder {self.path} cannot be opened: {error.strerror}.") from error

    def __enter__(self) -> ConfinedFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def open(self, name: str) -> int:
        """Return a descriptor of the regular file of this name, for reading; the caller closes it."""
        place = os.path.join(self._below, check_name(name, str(self.path)))
        try:
            fd = self._open(place)
        except OSError as error:
            raise _error(error)(f"{self.path / name} {_explained(error)}.") from error
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        os.close(fd)
        raise CheckpointError(f"{self.path / name} is {_kind(mode)}, and only regular files are read.")

    def read(self, name: str, largest: int) -> bytes:
        """Return all bytes of a small file, refused if it has more than `largest`."""
        fd = self.open(name)
        with os.fdopen(fd, "rb", buffering=0) as file:
            size = os.fstat(fd).st_size
            if size > largest:
                raise CheckpointError(f"{self.path / name} has {size:,} bytes, more than the {largest:,} that such a file may have.")
            try:
                data = b"".join(iter(functools.partial(file.read, 1 << 20), b"")) if size else b""
            except OSError as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}.") from error
        if len(data) != size:
            raise CheckpointError(f"{self.path / name} was changed while it was read.")
        return data

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        fd = self.open(name)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def names(self, refused: list[str] | None = None) -> list[str]:
        """Return the names of all regular files, in folders below too, sorted.

        Links, pipes, devices and names that `check_name` rejects are an error; if a list is given, they are added to it instead.
        """
        found: list[str] = []
        bad: list[str] = []
        self._walk(self._fd if not self._links else None, "", found, bad)
        if bad and refused is None:
            raise CheckpointError(f"{self.path / sorted(bad)[0]} is neither a regular file with a plain name nor a folder; it is not read.")
        if refused is not None:
            refused.extend(sorted(bad))
        return sorted(found)

    def _walk(self, fd: int | None, below: str, found: list[str], bad: list[str]) -> None:
        with os.scandir(self.path if fd is None else fd) as entries:
            for entry in entries:
                name = below + entry.name
                if entry.is_dir(follow_symlinks=False) and below.count("/") < MOST_PARTS:
                    inner = os.open(entry.name if fd is not None else entry.path, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
                    try:
                        self._walk(inner, f"{name}/", found, bad)
                    finally:
                        os.close(inner)
                elif entry.is_file(follow_symlinks=self._links) and _is_plain(name):
                    found.append(name)
                else:
                    bad.append(name)

    def _open(self, place: str) -> int:
        if self._kernel:
            try:
                return _open_beneath(self._fd, place, _BENEATH | _NO_MAGIC_LINKS | (0 if self._links else _NO_LINKS))
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
        if self._links:
            real = os.path.realpath(self._root / place)
            place = os.path.relpath(real, self._root)
            if place.split(os.sep)[0] == os.pardir:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return _open_by_parts(self._fd, place)


def open_inside(folder: str | os.PathLike[str], name: str) -> int:
    """Return a descriptor of a regular file inside a folder, for reading; `ConfinedFolder.open` for one file."""
    with ConfinedFolder(folder) as held:
        return held.open(name)


class _NotAFolder(CheckpointError, NotADirectoryError):
    """A file, or a link, where a folder should be."""


def _error(error: OSError) -> type[CheckpointError]:
    return {errno.ENOENT: MissingCheckpointError, errno.ENOTDIR: _NotAFolder}.get(error.errno or 0, CheckpointError)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@functools.lru_cache(maxsize=1)
def _syscall() -> Callable[..., Any]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


def _open_beneath(root: int, place: str, resolve: int) -> int:
    how = _OpenHow(_FLAGS, 0, resolve)
    arguments = (ctypes.c_long(_OPENAT2), ctypes.c_int(root), ctypes.c_char_p(os.fsencode(place)), ctypes.byref(how))
    for _ in range(_MOST_RETRIES):
        fd = int(_syscall()(*arguments, ctypes.c_size_t(ctypes.sizeof(how))))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something was renamed while the kernel looked
            break
    raise OSError(code, os.strerror(code))


def _open_by_parts(root: int, place: str) -> int:
    *folders, last = os.path.normpath(place).split(os.sep)
    held = os.dup(root)
    try:
        for part in folders:
            inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = inner
        return os.open(last, _FLAGS | os.O_NOFOLLOW, dir_fd=held)
    finally:
        os.close(held)


def _is_plain(name: str) -> bool:
    try:
        check_name(name, "")
    except CheckpointError:
        return False
    return True


def _explained(error: OSError) -> str:
    reasons = {
        errno.ENOENT: "is missing",
        errno.ELOOP: "is a symbolic link or behind one; links are not followed",
        errno.EXDEV: "is a symbolic link that leads outside; it is not followed",
        errno.ENXIO: "is a pipe, a socket or a device, and only regular files are read",
        errno.EACCES: "may not be read by this user",
        errno.ENOTDIR: "is behind something that is not a folder, or behind a symbolic link; links are not followed",
    }
    return reasons.get(error.errno or 0, f"cannot be opened: {error.strerror}")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "something special")
