"""The lines of a file that somebody else is writing, read as they come.

`Lines` remembers by the byte how far it has read. A last line without its end is left for the next time; a line longer than `LONGEST`
and one that is no text are left out and counted. A file that was replaced, shortened or written over is read from its beginning, and
`beginnings` says so. Files are opened inside their folder alone: a link, a pipe or a device in the place of one is not followed and not
read. Nothing is written, and no more than one block is held at a time.
"""

from __future__ import annotations

import os
from typing import Final

from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.inside import Folder

__all__ = ["LONGEST", "Lines"]

LONGEST: Final = 8 << 20
"""Most characters of a line that is read."""

_BLOCK: Final = 1 << 18
_REMEMBERED: Final = 64


class Lines:
    """What is new in one file of lines.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as path, Folder(path) as folder:
    ...     file, lines = pathlib.Path(path, "events.jsonl"), Lines("events.jsonl")
    ...     _ = file.write_text("one\\ntwo\\nthr")
    ...     first = lines.read(folder)
    ...     _ = file.write_text("one\\ntwo\\nthree\\n")
    ...     first, lines.read(folder), lines.read(folder)
    (['one', 'two'], ['three'], [])
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.beginnings = 0
        """How often the file was begun anew; what was read before then is not in the file any more."""
        self.too_long = 0
        self.no_text = 0
        self.refused: str | None = None
        """Why the file is not read at all, where it is no plain file."""
        self.more = False
        """Whether the last `read` stopped at its block and not at the end of the file."""
        self.changed = 0.0
        """When the file was last written to, in seconds since 1970."""
        self._file: tuple[int, int] | None = None
        self._seen: tuple[int, int] | None = None
        self._offset = 0
        self._before = b""
        self._dropping = False

    def read(self, folder: Folder) -> list[str]:
        """The next whole lines, a block of them at the most; `more` says whether to call again at once."""
        self.more = False
        try:
            file = folder.open(self.name)
        except MissingCheckpointError:
            return []
        except CheckpointError as error:
            self.refused = str(error)
            return []
        try:
            self.refused = None
            return self._read(file)
        except OSError as error:  # a file system that fails to read: what was read stays, and it is told
            self.refused = f"{folder.path / self.name} cannot be read: {error.strerror}"
            return []
        finally:
            os.close(file)

    def _read(self, file: int) -> list[str]:
        status = os.fstat(file)
        identity, now = (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)
        self.changed = status.st_mtime
        if identity == self._file and now == self._seen:
            return []
        if self._offset and (identity != self._file or status.st_size < self._offset or not self._goes_on(file)):
            self.beginnings += 1
            self._offset, self._before, self._dropping = 0, b"", False
        self._file = identity
        wanted = _BLOCK
        while True:
            data = os.pread(file, wanted, self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < wanted:
                break
            if self._dropping or wanted > LONGEST:  # this much without an end: the rest of the line is passed over
                self._pass(data, len(data))
                self._dropping = True
            else:
                wanted *= 4
        self.more = len(data) == wanted
        self._seen = None if self.more else now
        if not end and self._dropping:
            self._pass(data, len(data))
        return self._lines(data, end) if end else []

    def _goes_on(self, file: int) -> bool:
        """Whether what was read last still stands before the place where reading goes on."""
        return os.pread(file, len(self._before), self._offset - len(self._before)) == self._before

    def _pass(self, data: bytes, count: int) -> None:
        self._offset += count
        self._before = (self._before + data[:count])[-_REMEMBERED:] if count < _REMEMBERED else data[count - _REMEMBERED : count]

    def _lines(self, data: bytes, end: int) -> list[str]:
        self._pass(data, end)
        start = 0
        if self._dropping:
            start = data.index(b"\n") + 1
            self._dropping = False
            self.too_long += 1
        if end == start:
            return []
        try:
            found = data[start : end - 1].decode().split("\n")
        except UnicodeDecodeError:
            found = self._decoded(data[start : end - 1].split(b"\n"))
        if len(data) > LONGEST:  # a block this large was read for the sake of one long line
            short = [line for line in found if len(line) <= LONGEST]
            self.too_long += len(found) - len(short)
            return short
        return found

    def _decoded(self, lines: list[bytes]) -> list[str]:
        found = []
        for line in lines:
            try:
                found.append(line.decode())
            except UnicodeDecodeError:
                self.no_text += 1
        return found
