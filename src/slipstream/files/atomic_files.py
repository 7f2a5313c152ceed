"""Write files into a folder of the user: each is written under a temporary name, and all are renamed at the end.

Until `place` is called the folder's files are unchanged; a replaced file is the old or the new one at every moment. Only regular files
are replaced. A disk error is a `CheckpointError` that names the file and the remedy, and leaves no temporary files.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.errors import ConfigError
from slipstream.files.disk import Disk, FileEntry
from slipstream.files.object_store import is_url, local_path as path_of_url
from slipstream.files.os_errors import explain_os_errors

__all__ = ["AtomicFiles", "check_local_path"]


def check_local_path(given: Any, name: str) -> Path:
    """Return a path on this machine from what was given as the argument `name`."""
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else b""
    if isinstance(path, bytes) or not path or "\0" in path:
        raise ConfigError(f"{name}={given!r} is not a path. Write the path of a file or folder as text.")
    path = path_of_url(path)
    if is_url(path) or "://" in path:
        raise ConfigError(f"{name} is a remote URL, but only local files are supported here. Copy to or from a local folder.")
    return Path(path).expanduser()


class AtomicFiles:
    """Files to be written into a folder, which is created if it does not exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with AtomicFiles(Path(folder), Disk()) as files:
    ...         _ = files.add("notes.txt", [b"hello"], 5)
    ...         before = Path(folder, "notes.txt").exists()
    ...         files.place()
    ...     before, Path(folder, "notes.txt").read_text(), len(os.listdir(folder))
    (False, 'hello', 1)
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._waiting: dict[str, Path] = {}

    def __enter__(self) -> AtomicFiles:
        with self._explain(f"The folder {self._folder} could not be made"):
            self._make_folder()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for path in self._waiting.values():
            with suppress(OSError):
                self._disk.remove(path)
        self._waiting.clear()

    def add(self, name: str, chunks: Iterable[Any], size: int) -> FileEntry:
        """Write a file that will have this name."""
        with self._explain(f"{self._folder / name} could not be written", needed=size):
            return self._disk.write(self._temporary_path(name), chunks, size)

    def adopt(self, name: str, write: Callable[[Path], None]) -> FileEntry:
        """Call `write` with a temporary path to write to, sync the file and return its entry."""
        with self._explain(f"{self._folder / name} could not be written"):
            path = self._temporary_path(name)
            write(path)
            return self._disk.sync_file(path)

    def place(self) -> None:
        """Rename all files into place, in the order in which they were added, and sync the folder."""
        with self._explain(f"The files of {self._folder} could not be put into their places"):
            for name in list(self._waiting):
                self._disk.rename(self._waiting[name], self._folder / name)
                del self._waiting[name]
            self._disk.sync_folder(self._folder)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that have been replaced by others."""
        with self._explain(f"Files of an earlier save in {self._folder} could not be removed"):
            for name in names:
                with suppress(FileNotFoundError):
                    self._disk.remove(self._folder / name)
                self._disk.sync_folder(self._folder)

    def _temporary_path(self, name: str) -> Path:
        self._check_replaceable(self._folder / name)
        self._waiting[name] = self._folder / f".{name[:150]}.saving-{secrets.token_hex(4)}"
        return self._waiting[name]

    def _check_replaceable(self, path: Path) -> None:
        try:
            mode = os.stat(path).st_mode
        except OSError:  # not there, or a dangling link; any other reason is reported when it is written
            return
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
            raise ConfigError(f"{path} is {what}, which cannot be replaced by a file. Write the path of a file, or pass an open one.")

    def _make_folder(self) -> None:
        missing = [self._folder] if not self._folder.exists() else []
        while missing and not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            with suppress(FileExistsError):  # created by another process
                self._disk.make_folder(path)
            self._disk.sync_folder(path.parent)

    def _explain(self, problem: str, needed: int | None = None) -> AbstractContextManager[None]:
        return explain_os_errors(problem, needed=needed, free=lambda: self._disk.free(self._folder))
