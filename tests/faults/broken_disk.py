"""A disk on which one chosen operation fails.

`BrokenDisk(at, code)` counts the primitives of `Disk` and raises this error instead of the `at`-th one; with `lasting` all after it that
could fail for the same reason fail as well, as on a disk that stays full or read-only. `ShortDisk` writes less than it is asked for.
`FlopCount` fails never and says what there is to fail. Nothing here knows what a checkpoint is.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.files.disk import Disk

__all__ = ["CODES", "BrokenDisk", "Counting", "ShortDisk"]

CODES = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT, "EIO": errno.EIO, "EROFS": errno.EROFS, "EACCES": errno.EACCES}
"""What disks and file systems say when they cannot."""

_GIVES_ROOM = {"remove", "remove_folder", "_close", "_fsync", "_flock", "rename", "exchange"}
"""These work on a full disk."""


class Counting(Disk):
    """Does everything, without really syncing, and keeps the names of the primitives."""

    def __init__(self, *, exchanges: bool = True) -> None:
        self.calls: list[str] = []
        self._exchanges = exchanges

    def _before(self, primitive: str, path: Path | None) -> None:
        """Called before each primitive; `path` where it has one."""
        self.calls.append(primitive)

    def _open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        self._before("_open", path)
        return super()._open(path, flags, mode)

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        self._before("_pwrite", None)
        return super()._pwrite(fd, data, offset)

    def _allocate(self, fd: int, size: int) -> None:
        self._before("_allocate", None)
        super()._allocate(fd, size)

    def _fsync(self, fd: int) -> None:
        self._before("_fsync", None)

    def _flock(self, fd: int, operation: int) -> None:
        self._before("_flock", None)
        super()._flock(fd, operation)

    def _close(self, fd: int) -> None:
        super()._close(fd)  # the descriptor is gone in any case
        self._before("_close", None)

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        self._before("make_folder", path)
        super().make_folder(path, mode)

    def _chmod(self, path: Path, mode: int) -> None:
        self._before("_chmod", path)
        super()._chmod(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        self._before("rename", old)
        super().rename(old, new)

    def exchange(self, path: Path, other: Path) -> bool:
        self._before("exchange", path)
        return self._exchanges and super().exchange(path, other)

    def link(self, old: Path, new: Path) -> None:
        self._before("link", old)
        super().link(old, new)

    def remove(self, path: Path) -> None:
        self._before("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._before("remove_folder", path)
        super().remove_folder(path)


class BrokenDisk(Counting):
    """Fails at one operation, or from it on."""

    def __init__(self, at: int, code: int, *, lasting: bool = False, exchanges: bool = True) -> None:
        super().__init__(exchanges=exchanges)
        self._at = at
        self._code = code
        self._one_at_a_time = threading.Lock()
        self.lasting = lasting
        self.failed = ""

    def _before(self, primitive: str, path: Path | None) -> None:
        with self._one_at_a_time:  # large files have two writers
            super()._before(primitive, path)
            number = len(self.calls) - 1
        if number == self._at or (self.lasting and number > self._at and self._still(primitive)):
            self.failed = self.failed or primitive
            raise OSError(self._code, os.strerror(self._code), None if path is None else str(path))

    def _still(self, primitive: str) -> bool:
        full = self._code in (errno.ENOSPC, errno.EDQUOT)
        return not (full and primitive in _GIVES_ROOM) and primitive not in ("_close", "_flock")


class ShortDisk(Counting):
    """Every write takes as much as `part` says of what it is given, one byte at least."""

    def __init__(self, part: Callable[[int], int]) -> None:
        super().__init__()
        self._part = part

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        return super()._pwrite(fd, memoryview(data)[: max(1, self._part(len(data)))], offset)
