"""The journal of a work queue: a JSON-lines file with the result of each finished item, from which an interrupted run resumes.

    {"slipstream": "results", "version": 1, "count": 3, "inputs": "5f0c..."}
    {"index": 1, "item": "90aa1f0c2b7d4e55", "result": "B!"}

The first line describes the inputs: a file of other inputs is refused. Each further line is one item: position, fingerprint (null if it
is not plain data) and result, which has to be plain JSON data. Every process appends whole lines to a file of its own (`NAME.part-RUN-
RANK`) before it reports the result; a truncated line can only be the last one and is dropped. The next run merges the parts, and at the
end one process rewrites the journal in the order of the input, atomically.

Data is fsynced at most once a second and at the end. All processes have to see the same folder; the main process holds a lock on the
file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.os_errors import explain_os_errors

__all__ = ["JournalEntry", "JournalHeader", "ResultJournal", "check_result", "finish_journal", "prepare_journal", "read_journal"]

_SYNC_EVERY = 1.0
_LOCK_SECONDS = 2.0
"""Seconds to wait for the lock: a child of a process that was killed may hold it a moment longer."""
_LONG_LINE = 1 << 20
"""Bytes of a line from which on it may be too large to be read again."""
_MAX_DEPTH = strict_json.DEEPEST - 1
_MAX_INT_BITS = 14_000
"""Of a whole number that JSON gives back."""
_LINE_START = re.compile(rb'\{"index":(\d{1,18}),"item":')
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class JournalHeader:
    """What the inputs of a journal are."""

    count: int
    inputs: str

    def line(self) -> bytes:
        value = {"slipstream": "results", "version": 1, "count": self.count, "inputs": self.inputs}
        return strict_json.dump(value) + b"\n"


@dataclass(frozen=True)
class JournalEntry:
    """One line of a journal."""

    index: int
    item: str | None
    result: Any
    line: bytes


class ResultJournal:
    """The file that one process appends to.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> part = ResultJournal(folder / "results.jsonl", run="abc", rank=1)
    >>> part.add(2, "some text", ["a", 0.5])
    >>> part.close()
    >>> (folder / "results.jsonl.part-abc-1").read_text()
    '{"index":2,"item":"some text","result":["a",0.5]}\\n'
    """

    def __init__(self, path: Path, run: str, rank: int) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part-{run}-{rank}")
        self._file: int | None = None
        self._synced = time.monotonic()

    def add(self, index: int, mark: str | None, result: Any) -> None:
        """Append the result of an item; raise a TypeError that names the item if it is not plain JSON data."""
        line = _line(index, mark, check_result(result, index, self._path))
        if len(line) > _LONG_LINE and (trouble := strict_json.explain_too_large(line.decode())):
            raise TypeError(f"the result of item {index} cannot be kept in {self._path.name}: {trouble}; keep it in a file of its own")
        with _explain_os_errors(self._part):
            if self._file is None:
                self._part.parent.mkdir(parents=True, exist_ok=True)  # it was there when the work began
                self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            _write(self._file, line)
            if time.monotonic() - self._synced > _SYNC_EVERY:
                os.fsync(self._file)
                self._synced = time.monotonic()

    @property
    def lost(self) -> bool:
        """Whether something has removed the file that this process wrote to, or the journal itself."""
        return not self._path.exists() or (self._file is not None and not self._part.exists())

    def close(self) -> None:
        """Flush what was written to the disk."""
        if self._file is not None:
            with _explain_os_errors(self._part):
                os.fsync(self._file)
                os.close(self._file)
            self._file = None


def _line(index: int, mark: str | None, result: Any) -> bytes:
    return strict_json.dump({"index": index, "item": mark, "result": result}) + b"\n"


def check_result(result: Any, index: int, path: Path) -> Any:
    """Return the result itself if it is plain JSON data; else raise an error that says where it is not.

    >>> check_result({"scores": [1, float("nan")]}, 7, Path("a.jsonl"))
    Traceback (most recent call last):
        ...
    TypeError: the result of item 7 cannot be kept in a.jsonl: result['scores'][1] is nan, for which JSON has no number; give None or a text
    """
    trouble = _objection(result, "result")
    if trouble is None:
        return result
    raise TypeError(f"the result of item {index} cannot be kept in {path.name}: {trouble}")


def _objection(value: Any, where: str, depth: int = 0) -> str | None:
    kind = type(value)
    if kind in (list, dict):
        return _objection_inside(value, where, depth + 1)
    if kind is float and value - value != 0:
        return f"{where} is {value}, for which JSON has no number; give None or a text"
    if kind is str and not value.isascii() and _has_lone_surrogate(value):
        return f"{where} has half of a surrogate pair in it, which is no text; write .encode('utf-8', 'replace').decode() behind it"
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        return f"{where} is a number of thousands of digits; write hex(...) around it"
    if kind in _PLAIN:
        return None
    ways = {"Tensor": ".tolist() or .item()", "ndarray": ".tolist()", "tuple": "list(...) around it"}
    better = ways.get(kind.__name__, ".item()" if hasattr(value, "item") else "text, numbers, lists and dicts in its place")
    article = "an" if kind.__name__[0].lower() in "aeiou" or kind.__name__ == "ndarray" else "a"
    return f"{where} is {article} {kind.__name__}, and a checkpoint keeps plain JSON data alone; write {better}"


def _objection_inside(value: Any, where: str, depth: int) -> str | None:
    if depth > _MAX_DEPTH:
        return f"it is nested deeper than {_MAX_DEPTH} levels; give a flat list, or json.dumps(...) of it as a text"
    if type(value) is list:
        return next(filter(None, (_objection(item, f"{where}[{place}]", depth) for place, item in enumerate(value))), None)
    odd = next((key for key in value if type(key) is not str or _has_lone_surrogate(key)), None)
    if odd is not None:
        return f"{where} has the key {odd!r}, and keys of JSON are text; write str(...) around it"
    return next(filter(None, (_objection(item, f"{where}[{key!r}]", depth) for key, item in value.items())), None)


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# Reading -----------------------------------------------------------------------------------------------------------------


def read_journal(path: Path, header: JournalHeader, *, part: bool = False) -> Iterator[JournalEntry]:
    """Yield the entries of a journal, or of a part of one; a truncated last line is left out.

    Raises CheckpointError for a journal of other inputs and for a line in the middle that cannot be read.
    """
    with _explain_os_errors(path), open(path, "rb") as file:
        if not part:
            _check_header(path, file.readline(), header)
        for number, line in enumerate(file, start=1 if part else 2):
            if not line.endswith(b"\n"):
                return
            yield _parse_entry(line, f"{path}, line {number},", header)


def _check_header(path: Path, line: bytes, header: JournalHeader) -> None:
    try:
        found = strict_json.parse(line, f"{path}, line 1,")
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give checkpoint= another name, or remove the file to start over.") from None
    if not isinstance(found, dict) or found.get("slipstream") != "results":
        raise CheckpointError(f"{path} is no file of results: it has to begin with a line that says so. Give checkpoint= another name.")
    if found.get("version") != 1:
        raise CheckpointError(f"{path} was written by another version of this library ({found.get('version')!r}, here 1).")
    if (found.get("count"), found.get("inputs")) != (header.count, header.inputs):
        raise CheckpointError(
            f"{path} has the results of other inputs: {found.get('count')} items with the fingerprint {found.get('inputs')}, and these are "
            f"{header.count} with {header.inputs}. Give checkpoint= another name, or remove the file to start over."
        )


def _parse_entry(line: bytes, where: str, header: JournalHeader) -> JournalEntry:
    try:
        found = strict_json.parse(line, where)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Remove that line, and the item is worked on again.") from None
    if not isinstance(found, dict) or set(found) != {"index", "item", "result"} or type(found["index"]) is not int:
        raise CheckpointError(f"{where} is not the result of an item. Remove that line, and the item is worked on again.")
    if not 0 <= found["index"] < header.count:
        raise CheckpointError(f"{where} is about item {found['index']}, but there are {header.count}.")
    return JournalEntry(found["index"], found["item"], found["result"], line)


# The main process alone --------------------------------------------------------------------------------------------------


def prepare_journal(path: Path, header: JournalHeader) -> int:
    """Prepare the journal for a run: create it if there is none, drop a truncated line, and merge the parts of an interrupted run.

    Return the open file, which holds the lock of this run until it is closed.
    """
    with _explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_locked(path)
    try:
        with _explain_os_errors(path):
            _drop_truncated_line(file, path, header)
        parts = _list_parts(path)
        known = {entry.index for entry in read_journal(path, header)} if parts else set()
        with _explain_os_errors(path):
            for part in parts:
                for entry in read_journal(part, header, part=True):
                    if entry.index not in known:
                        known.add(entry.index)
                        _write(file, entry.line)
            os.fsync(file)
            for part in parts:
                part.unlink()
    except BaseException:
        os.close(file)
        raise
    return file


def _open_locked(path: Path) -> int:
    """Return the open journal, locked for this run; create it if there is none."""
    while True:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file, so no results can be kept in it: give checkpoint= the name of a file.")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _lock(file, path)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # while this run waited for the lock, another put its last form in place


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{path} is in use by another run: wait for its end, or give checkpoint= another name.") from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return


def _drop_truncated_line(file: int, path: Path, header: JournalHeader) -> None:
    """Drop a last line without an end, and begin a file that has no complete line. A file that is not ours stays as it is."""
    with open(path, "rb") as first:
        line = first.readline()
    if line.endswith(b"\n") or not header.line().startswith(line):
        _check_header(path, line, header)
    end = size = os.fstat(file).st_size
    while end and os.pread(file, 1, end - 1) != b"\n":
        start = max(0, end - 65536)
        end = start + os.pread(file, end - start, start).rfind(b"\n") + 1
    if end < size:
        os.ftruncate(file, end)
    if not end:
        _write(file, header.line())


def _list_parts(path: Path) -> list[Path]:
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(f"{path.name}.part-"))


def finish_journal(path: Path, header: JournalHeader, authors: Sequence[int | None], run: str, results: Mapping[int, Any]) -> int:
    """Rewrite the journal with one line for each item, in the order of the input, and remove the parts.

    `authors` says by position which rank's result counts (None for an earlier run), as two may have worked on the same item. A result whose
    line was removed from the files during the work is written from `results`; the return value says how many those are.
    """
    with _explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = _choose_lines(path, header, authors, run)
    temporary = path.with_name(f"{path.name}.new")
    missing = 0
    with _explain_os_errors(path), contextlib.ExitStack() as closing:
        files = {source: closing.enter_context(open(source, "rb")) for source in dict.fromkeys(source for source, _, _ in chosen.values())}
        with open(temporary, "wb") as target:
            target.write(header.line())
            for index in sorted(chosen.keys() | results.keys()):
                if index not in chosen:
                    target.write(_line(index, None, results[index]))
                    missing += 1
                    continue
                source, place, length = chosen[index]
                files[source].seek(place)
                target.write(files[source].read(length))
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, path)
        for part in _list_parts(path):
            part.unlink(missing_ok=True)
    return missing


def _choose_lines(path: Path, header: JournalHeader, authors: Sequence[int | None], run: str) -> dict[int, tuple[Path, int, int]]:
    """Return by position where the line is that counts: file, first byte and length."""
    chosen: dict[int, tuple[Path, int, int]] = {}
    for source in (path, *_list_parts(path)):
        if source == path and not path.exists():
            continue
        counts = source != path and f".part-{run}-" in source.name
        rank = int(source.name.rpartition("-")[2]) if counts else None
        place = 0
        with open(source, "rb") as file:
            if source == path:
                place = len(file.readline())
            for number, line in enumerate(file, start=1 if counts else 2):
                if not line.endswith(b"\n"):
                    break
                index = _index(line, f"{source}, line {number},", header)
                if index not in chosen or (counts and authors[index] == rank):
                    chosen[index] = (source, place, len(line))
                place += len(line)
    return chosen


def _index(line: bytes, where: str, header: JournalHeader) -> int:
    """Return the position of a line that was checked when the work began, or written since then."""
    found = _LINE_START.match(line)
    if found is None or int(found[1]) >= header.count:
        return _parse_entry(line, where, header).index
    return int(found[1])


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _explain_os_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    return explain_os_errors(f"The results cannot be kept in {path}")
