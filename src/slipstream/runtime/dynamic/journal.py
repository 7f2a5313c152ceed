"""The journal of dynamic work: a JSON-lines file with the result of each finished item, from which an interrupted run goes on.

    {"slipstream": "results", "version": 1, "count": 3, "inputs": "5f0c..."}
    {"index": 1, "item": "90aa1f0c2b7d4e55", "result": "B!"}

The first line says what the inputs were: a file of other inputs is refused. Each further line is one item: its position in the input, a
fingerprint of it (null for one that is not plain data) and its result, which has to be plain JSON data.

Every process appends to a file of its own beside the journal (`NAME.part-RUN-RANK`), a whole line in one write, before it tells
anybody of the result. What a process has written survives its death; a line that was cut off in the middle can only be the last one of
its file, and is cut away. The parts of an interrupted run are taken into the journal when the next one begins. When all is done, one
process writes the journal anew, one line for each item in the order of the input, and puts it in place in one step.

The data is forced to the disk at most once a second and at the end: the loss of a process loses nothing, that of the machine's power
at most a second. All processes have to see the same folder. One run at a time: the main process holds a lock on the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.trouble import remedy, told
from slipstream.runtime.dynamic.items import fingerprint

__all__ = ["Header", "Journal", "Page", "Unwritten", "Writer", "checked_result", "finish", "read", "take_in"]

_SYNC_EVERY = 1.0
_LOCK_PATIENCE = 2.0
"""Seconds to wait for the lock: a child of a process that was killed may hold it a moment longer."""
_LONG = 1 << 20
"""Bytes of a line from which on it may be too large to be read again."""
_DEEPEST = strict_json.DEEPEST - 1
_MOST_BITS = 14_000
"""Of a whole number that JSON gives back."""
_BEGINNING = re.compile(rb'\{"index":(\d{1,18}),"item":')
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Header:
    """What the inputs of a journal are."""

    count: int
    inputs: str

    def line(self) -> bytes:
        value = {"slipstream": "results", "version": 1, "count": self.count, "inputs": self.inputs}
        return strict_json.dump(value) + b"\n"


@dataclass(frozen=True)
class Page:
    """One line about an item, and where it stands."""

    index: int
    item: str | None
    result: Any
    line: bytes


class Writer(Protocol):
    """What the work needs of a journal."""

    def mark(self, item: Any) -> str | None:
        """What a line says about an item; asked before the user's code can have changed the item."""

    def add(self, index: int, mark: str | None, result: Any) -> None:
        """Keeps the result of the item at this position."""

    @property
    def lost(self) -> bool:
        """Whether what was added is no longer there."""

    def close(self) -> None:
        """Nothing more is added."""


class Unwritten:
    """No journal."""

    def mark(self, item: Any) -> str | None:
        return None

    def add(self, index: int, mark: str | None, result: Any) -> None:
        """Nothing is kept."""

    @property
    def lost(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


class Journal:
    """The file that one process appends to.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> part = Journal(folder / "results.jsonl", run="abc", rank=1)
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

    def mark(self, item: Any) -> str | None:
        return fingerprint(item)

    def add(self, index: int, mark: str | None, result: Any) -> None:
        """Appends the result of an item; a TypeError that names the item for one that is not plain JSON data."""
        line = _line(index, mark, checked_result(result, index, self._path))
        if len(line) > _LONG and (trouble := strict_json.too_large(line.decode())):
            raise TypeError(f"the result of item {index} cannot be kept in {self._path.name}: {trouble}; keep it in a file of its own")
        with _telling(self._part):
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
        """Forces what was written to the disk."""
        if self._file is not None:
            with _telling(self._part):
                os.fsync(self._file)
                os.close(self._file)
            self._file = None


def _line(index: int, mark: str | None, result: Any) -> bytes:
    return strict_json.dump({"index": index, "item": mark, "result": result}) + b"\n"


def checked_result(result: Any, index: int, path: Path) -> Any:
    """The result itself, if it is plain JSON data; else an error that says where it is not.

    >>> checked_result({"scores": [1, float("nan")]}, 7, Path("a.jsonl"))
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
    if kind is str and not value.isascii() and _has_half_a_pair(value):
        return f"{where} has half of a surrogate pair in it, which is no text; write .encode('utf-8', 'replace').decode() behind it"
    if kind is int and value.bit_length() > _MOST_BITS:
        return f"{where} is a number of thousands of digits; write hex(...) around it"
    if kind in _PLAIN:
        return None
    ways = {"Tensor": ".tolist() or .item()", "ndarray": ".tolist()", "tuple": "list(...) around it"}
    better = ways.get(kind.__name__, ".item()" if hasattr(value, "item") else "text, numbers, lists and dicts in its place")
    article = "an" if kind.__name__[0].lower() in "aeiou" or kind.__name__ == "ndarray" else "a"
    return f"{where} is {article} {kind.__name__}, and a checkpoint keeps plain JSON data alone; write {better}"


def _objection_inside(value: Any, where: str, depth: int) -> str | None:
    if depth > _DEEPEST:
        return f"it is nested deeper than {_DEEPEST} levels; give a flat list, or json.dumps(...) of it as a text"
    if type(value) is list:
        return next(filter(None, (_objection(item, f"{where}[{place}]", depth) for place, item in enumerate(value))), None)
    odd = next((key for key in value if type(key) is not str or _has_half_a_pair(key)), None)
    if odd is not None:
        return f"{where} has the key {odd!r}, and keys of JSON are text; write str(...) around it"
    return next(filter(None, (_objection(item, f"{where}[{key!r}]", depth) for key, item in value.items())), None)


def _has_half_a_pair(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# Reading -----------------------------------------------------------------------------------------------------------------


def read(path: Path, header: Header, *, part: bool = False) -> Iterator[Page]:
    """The pages of a journal, or of a part of one; a last line that was cut off is left out.

    Raises CheckpointError for a journal of other inputs and for a line in the middle that cannot be read.
    """
    with _telling(path), open(path, "rb") as file:
        if not part:
            _check_header(path, file.readline(), header)
        for number, line in enumerate(file, start=1 if part else 2):
            if not line.endswith(b"\n"):
                return
            yield _page(line, f"{path}, line {number},", header)


def _check_header(path: Path, line: bytes, header: Header) -> None:
    try:
        found = strict_json.parse(line, f"{path}, line 1,")
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give checkpoint= another name, or remove the file to begin anew.") from None
    if not isinstance(found, dict) or found.get("slipstream") != "results":
        raise CheckpointError(f"{path} is no file of results: it has to begin with a line that says so. Give checkpoint= another name.")
    if found.get("version") != 1:
        raise CheckpointError(f"{path} was written by another version of this library ({found.get('version')!r}, here 1).")
    if (found.get("count"), found.get("inputs")) != (header.count, header.inputs):
        raise CheckpointError(
            f"{path} has the results of other inputs: {found.get('count')} items with the fingerprint {found.get('inputs')}, and these are "
            f"{header.count} with {header.inputs}. Give checkpoint= another name, or remove the file to begin anew."
        )


def _page(line: bytes, where: str, header: Header) -> Page:
    try:
        found = strict_json.parse(line, where)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Remove that line, and the item is worked on again.") from None
    if not isinstance(found, dict) or set(found) != {"index", "item", "result"} or type(found["index"]) is not int:
        raise CheckpointError(f"{where} is not the result of an item. Remove that line, and the item is worked on again.")
    if not 0 <= found["index"] < header.count:
        raise CheckpointError(f"{where} is about item {found['index']}, but there are {header.count}.")
    return Page(found["index"], found["item"], found["result"], line)


# The main process alone --------------------------------------------------------------------------------------------------


def take_in(path: Path, header: Header) -> int:
    """Makes the journal ready for a run: begun if there is none, without a cut-off line, the parts of an interrupted run taken in.

    Gives the open file, which holds the lock of this run until it is closed.
    """
    with _telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
    try:
        with _telling(path):
            _cut(file, path, header)
        parts = _parts(path)
        known = {page.index for page in read(path, header)} if parts else set()
        with _telling(path):
            for part in parts:
                for page in read(part, header, part=True):
                    if page.index not in known:
                        known.add(page.index)
                        _write(file, page.line)
            os.fsync(file)
            for part in parts:
                part.unlink()
    except BaseException:
        os.close(file)
        raise
    return file


def _locked(path: Path) -> int:
    """The open journal, with the lock of this run on it; made if there is none."""
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
    deadline = time.monotonic() + _LOCK_PATIENCE
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


def _cut(file: int, path: Path, header: Header) -> None:
    """Cuts away a last line without an end; begins a file that has no complete line. A file that is not ours is left as it is."""
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


def _parts(path: Path) -> list[Path]:
    return sorted(one for one in path.parent.iterdir() if one.name.startswith(f"{path.name}.part-"))


def finish(path: Path, header: Header, authors: Sequence[int | None], run: str, results: Mapping[int, Any]) -> int:
    """Writes the journal anew: one line for each item, in the order of the input, and removes the parts.

    `authors` says by position which rank's result counts (None: one that stood there before): two may have worked on the same item.
    What stands in no file any more, because something has removed it during the work, is written from `results`; gives how many those are.
    """
    with _telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = _chosen(path, header, authors, run)
    temporary = path.with_name(f"{path.name}.new")
    missing = 0
    with _telling(path), contextlib.ExitStack() as closing:
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
        for part in _parts(path):
            part.unlink(missing_ok=True)
    return missing


def _chosen(path: Path, header: Header, authors: Sequence[int | None], run: str) -> dict[int, tuple[Path, int, int]]:
    """By position, where the line stands that counts: the file, its first byte and its length."""
    chosen: dict[int, tuple[Path, int, int]] = {}
    for source in (path, *_parts(path)):
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


def _index(line: bytes, where: str, header: Header) -> int:
    """The position that a line is about, which was checked when the work began, or written since then."""
    found = _BEGINNING.match(line)
    if found is None or int(found[1]) >= header.count:
        return _page(line, where, header).index
    return int(found[1])


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The results cannot be kept in {path}: {told(error)}. {remedy(error)}") from error
