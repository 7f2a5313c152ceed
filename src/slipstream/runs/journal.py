"""A file of JSON lines that is written while others read it, and that a crash at any moment leaves readable.

Each line is one write of the system, at the end of the file, before `append` returns: a process that is killed loses nothing that it
had appended, and at most tears the line that it was writing. Readers leave out a last line without an end; the next writer finds it and
begins a new one, so a torn line never spoils the one after it.

With an index, every 1024th line is noted in a file beside it (its number, where it begins, its step and time, 32 bytes each). The index
is a help for readers and never needed: one that is missing or does not fit is left aside.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, Final

__all__ = ["EVERY", "INDEX_RECORD", "Journal", "index_path"]

EVERY: Final = 1024
"""Lines from one entry of the index to the next."""
INDEX_RECORD: Final = struct.Struct("<QQqd")
"""Number of the line, its first byte, its step (-1 for none), its time."""

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_PIECE: Final = 1 << 20


def index_path(path: Path) -> Path:
    """The index of a file of lines.

    >>> index_path(Path("runs/first/metrics.jsonl")).name
    'metrics.index'
    """
    return path.with_suffix(".index")


class Journal:
    """Lines at the end of a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder) / "events.jsonl")
    ...     journal.append({"kind": "start"})
    ...     journal.close()
    ...     print(journal.path.read_text(), end="")
    {"kind":"start"}
    """

    def __init__(self, path: str | os.PathLike[str], *, indexed: bool = False) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, _APPEND, 0o666)
        self._index: int | None = None
        found = os.fstat(self._file)
        self.size = found.st_size
        self._counts_links = found.st_nlink > 0
        self.lines = 0
        """Lines of the file, where there is an index; else those of this writer."""
        self._torn = self.size > 0 and _last_byte(self.path, self.size) != b"\n"
        if indexed:
            self._index = os.open(index_path(self.path), _APPEND, 0o666)
            self.lines = _count_lines(self.path) if self.size else 0
            self._trim_index()

    def append(self, record: dict[str, Any], *, step: int | None = None, time: float = 0.0) -> None:
        """One record as a line; `step` and `time` are for the index."""
        self.line(json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")), step=step, time=time)

    def line(self, text: str, *, step: int | None = None, time: float = 0.0) -> None:
        """One line that is spelled already; it holds no end of a line."""
        if self._torn:
            self._write("\n")
            self._torn = False
            self.lines += 1
        if self._index is not None and self.lines % EVERY == 0:
            os.write(self._index, INDEX_RECORD.pack(self.lines, self.size, -1 if step is None else step, time))
        self._torn = True  # until the end of the line is in the file as well
        self._write(text + "\n")
        self._torn = False
        self.lines += 1

    def close(self) -> None:
        """Lets go of the files; a second time it does nothing."""
        for file in (self._file, self._index):
            if file is not None and file >= 0:
                os.close(file)
        self._file, self._index = -1, None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._file < 0

    @property
    def gone(self) -> bool:
        """Whether the file was removed while it is open; False where the file system does not tell."""
        return self._counts_links and self._file >= 0 and os.fstat(self._file).st_nlink == 0

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        written = os.write(self._file, data)
        self.size += written
        while written < len(data):  # a full disk takes a part, and the rest is its error
            more = os.write(self._file, data[written:])
            self.size += more
            written += more

    def _trim_index(self) -> None:
        """Drops entries that a crash left half written, or that are ahead of the file."""
        assert self._index is not None
        whole = min(os.fstat(self._index).st_size // INDEX_RECORD.size, -(-self.lines // EVERY))
        os.ftruncate(self._index, whole * INDEX_RECORD.size)


def _last_byte(path: Path, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(size - 1)
        return file.read(1)


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(_PIECE), b""))
