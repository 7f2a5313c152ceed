"""Write files into a folder of the user: each is written under a temporary name, and all are renamed at the end.

Until `place` is called nothing that was there before has changed; a replaced file is the old or the new one at every moment. What is not
a regular file is never replaced. An error of the disk is a `CheckpointError` that says what could not be written and what to do, and
leaves no temporary files.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.disk import Disk, FileEntry
from slipstream.files.object_store import is_url, local_path as path_of_url
from slipstream.files.os_errors import describe_os_error, suggest_remedy

__all__ = ["AtomicFiles", "check_local_path"]

_Result = TypeVar("_Result")


def check_local_path(given: Any, name: str) -> Path:
    """Return a path on this machine from what was given as the argument `name`."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ConfigError(f"{name}={given!r} is no path. Write the path of a file or folder as text.")
    path = os.fspath(given)
    if isinstance(path, bytes) or "\0" in path:
        raise ConfigError(f"{name}={given!r} is no path. Write the path of a file or folder as text.")
    path = path_of_url(path)
    if is_url(path) or "://" in path:
        raise ConfigError(f"{name} is an address of a remote place, and this writes and reads local files. Copy to or from a local folder.")
    return Path(path).expanduser()


class AtomicFiles:
    """Files on their way into a folder, which is made if it is not there.

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
        self._tried(self._make_folder, f"The folder {self._folder} could not be made")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for path in self._waiting.values():
            with suppress(OSError):
                self._disk.remove(path)
        self._waiting.clear()

    def add(self, name: str, chunks: Iterable[Any], size: int) -> FileEntry:
        """Write a file that will have this name."""

        def write() -> FileEntry:
            return self._disk.write(self._beside(name), chunks, size)

        return self._tried(write, f"{self._folder / name} could not be written", needed=size)

    def adopt(self, name: str, write: Callable[[Path], None]) -> FileEntry:
        """Return a file that somebody else writes, to the path that it is given."""

        def adopt() -> FileEntry:
            path = self._beside(name)
            write(path)
            return self._disk.sync_file(path)

        return self._tried(adopt, f"{self._folder / name} could not be written")

    def place(self) -> None:
        """Rename all files into place, in the order in which they were added, and sync the folder."""

        def place() -> None:
            for name in list(self._waiting):
                self._disk.rename(self._waiting[name], self._folder / name)
                del self._waiting[name]
            self._disk.sync_folder(self._folder)

        self._tried(place, f"The files of {self._folder} could not be put into their places")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that have been replaced by others."""

        def remove() -> None:
            for name in names:
                with suppress(FileNotFoundError):
                    self._disk.remove(self._folder / name)
                self._disk.sync_folder(self._folder)

        self._tried(remove, f"Files of an earlier save in {self._folder} could not be removed")

    def _beside(self, name: str) -> Path:
        self._check_replaceable(self._folder / name)
        self._waiting[name] = self._folder / f".{name[:150]}.saving-{secrets.token_hex(4)}"
        return self._waiting[name]

    def _check_replaceable(self, path: Path) -> None:
        try:
            mode = os.stat(path).st_mode
        except OSError:  # not there, or a link to nowhere: if there is another reason, writing will say it
            return
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
            raise ConfigError(f"{path} is {what}, which a file does not replace. Write the path of a file, or pass one that is open.")

    def _make_folder(self) -> None:
        missing = [self._folder] if not self._folder.exists() else []
        while missing and not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            with suppress(FileExistsError):  # another process was faster
                self._disk.make_folder(path)
            self._disk.sync_folder(path.parent)

    def _tried(self, action: Callable[[], _Result], problem: str, needed: int | None = None) -> _Result:
        try:
            return action()
        except OSError as error:
            what = suggest_remedy(error, needed=needed, free=self._disk.free(self._folder))
            raise CheckpointError(f"{problem}: {describe_os_error(error)}. {what}") from error
