"""Read a run, finished or in progress, with `Run(path)` and any number of calls of `refresh()`.

No torch is imported. Each call reads what is new and nothing twice. Torn lines, invalid JSON and unknown records are skipped and counted
in `skipped`; a file that was replaced, shortened or overwritten is read again from the start. Numbers are kept in arrays and everything
else has a limit, so no file can exhaust memory. Nothing is written, no link is followed, and no name in a file leads out of the
directory. An object belongs to one thread at a time.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite, nan
from pathlib import Path
from time import time as clock
from typing import Any, Final

from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.observability.run_dir.folder import SILENCE_LIMIT, is_gone
from slipstream.observability.run_dir.series import IntervalList, Series, normalize_interval, to_columns

__all__ = ["LineReader", "MAX_LINE", "Run"]


MAX_LINE: Final = 8 << 20
"""Most characters of a line that is read."""

_BLOCK: Final = 1 << 18
_CHECKED_TAIL: Final = 64


class LineReader:
    """Reads the new lines of one file.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as path, ConfinedFolder(path) as folder:
    ...     file, lines = pathlib.Path(path, "events.jsonl"), LineReader("events.jsonl")
    ...     _ = file.write_text("one\\ntwo\\nthr")
    ...     first = lines.read(folder)
    ...     _ = file.write_text("one\\ntwo\\nthree\\n")
    ...     first, lines.read(folder), lines.read(folder)
    (['one', 'two'], ['three'], [])
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.beginnings = 0
        """How often the file was replaced; what was read before is not in the file any more."""
        self.skipped: Counter[str] = Counter()
        """Why lines were skipped, with how often."""
        self.refused: str | None = None
        """Why the file is not read at all, if it is not a plain file."""
        self.more = False
        """Whether the last `read` stopped at its block and not at the end of the file."""
        self.size = 0
        """Bytes of the file at the last `read`."""
        self.changed = 0.0
        """When the file was last written to, in seconds since 1970."""
        self._file: tuple[int, int] | None = None
        self._seen: tuple[int, int] | None = None
        self._offset = 0
        self._before = b""
        self._dropping = False

    @property
    def position(self) -> int:
        """Bytes that were read."""
        return self._offset

    def read(self, folder: ConfinedFolder) -> list[str]:
        """Return the next whole lines, at most a block; `more` says whether to call again at once."""
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
        except OSError as error:  # the file system cannot read it: keep what was read, and report it
            self.refused = f"{folder.path / self.name} cannot be read: {error.strerror}"
            return []
        finally:
            os.close(file)

    def _read(self, file: int) -> list[str]:
        status = os.fstat(file)
        identity, now = (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)
        self.changed, self.size = status.st_mtime, status.st_size
        if identity == self._file and now == self._seen:
            return []
        if self._offset and (identity != self._file or status.st_size < self._offset or not self._goes_on(file)):
            self.beginnings += 1
            self.skipped.clear()
            self._offset, self._before, self._dropping = 0, b"", False
        self._file = identity
        wanted = _BLOCK
        while True:
            data = os.pread(file, wanted, self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < wanted:
                break
            if self._dropping or wanted > MAX_LINE:  # this much without an end: the rest of the line is passed over
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
        """Return whether the bytes before the offset are still those that were read."""
        return os.pread(file, len(self._before), self._offset - len(self._before)) == self._before

    def _pass(self, data: bytes, count: int) -> None:
        self._offset += count
        self._before = (self._before + data[:count])[-_CHECKED_TAIL:] if count < _CHECKED_TAIL else data[count - _CHECKED_TAIL : count]

    def _lines(self, data: bytes, end: int) -> list[str]:
        self._pass(data, end)
        start = 0
        if self._dropping:
            start = data.index(b"\n") + 1
            self._dropping = False
            self.skipped["lines that are too long"] += 1
        if end == start:
            return []
        try:
            found = data[start : end - 1].decode().split("\n")
        except UnicodeDecodeError:
            found = self._decoded(data[start : end - 1].split(b"\n"))
        if len(data) > MAX_LINE:  # a block this large was read for the sake of one long line
            short = [line for line in found if len(line) <= MAX_LINE]
            self.skipped["lines that are too long"] += len(found) - len(short)
            return short
        return found

    def _decoded(self, lines: list[bytes]) -> list[str]:
        found = []
        for line in lines:
            try:
                found.append(line.decode())
            except UnicodeDecodeError:
                self.skipped["lines that are not text"] += 1
        return found


_MAX_SERIES: Final = 4096
_MAX_HELD_POINTS: Final = 1 << 20
"""Of all series of a run together: 24 MB. Beyond it older points are thinned, see `Series.limit`."""
_MIN_HELD_POINTS: Final = 2048
"""Of one series, however many there are."""
_MAX_EVENTS: Final = 4096
_MAX_FRESH: Final = 256
_MAX_IMAGES: Final = 200
_MAX_NAMES: Final = 500
_MAX_CELLS: Final = 20_000
_MAX_TEXT: Final = 2000
_MAX_NAME_LENGTH: Final = 500
_MAX_EXAMPLE: Final = 60
_MAX_JSON: Final = 8 << 20
_MAX_POINTS: Final = 400_000

_NOT_NUMBERS: Final[Mapping[str, float]] = {"nan": nan, "inf": inf, "-inf": -inf}

_decode: Final = json.JSONDecoder().raw_decode


class Run:
    """One run: `series`, `ledger`, `events`, `images`, `tables`, `texts`, and what its JSON files say.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = Path(path, "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "values": {"loss": 0.5}}\\n{"step": 2, "ti')
    ...     run = Run(path)
    ...     run.refresh(), run.refresh(), run.series["loss"].values
    (True, False, array('d', [0.5]))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name or self.path.resolve().name
        self.info: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.fresh_ledger: list[dict[str, Any]] = []
        """The lines of the ledger that the last `refresh` found, the last few hundred of them."""
        self.fresh_events: list[dict[str, Any]] = []
        """The events that the last `refresh` found, likewise."""
        self.fresh_lost = False
        """Whether the last `refresh` found more of them than these lists hold."""
        self.ledger_lines = 0
        """How many lines of the ledger were read."""
        self._documents: dict[str, tuple[int, ...]] = {}
        self._unreadable: dict[str, str] = {}
        self._metrics, self._ledger, self._events = (LineReader(f"{name}.jsonl") for name in ("metrics", "ledger", "events"))
        self._lines = (self._metrics, self._ledger, self._events)
        self._begin_metrics()
        self._begin_ledger()
        self._begin_events()

    def _begin_metrics(self) -> None:
        self.series: dict[str, Series] = {}
        self.images: dict[str, list[dict[str, Any]]] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, dict[str, Any]] = {}
        self._logged = 0
        self._refused = ""

    def _begin_ledger(self) -> None:
        self._intervals = IntervalList()

    def _begin_events(self) -> None:
        self.events: list[dict[str, Any]] = []

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """The intervals of the ledger; in a long run each is more than a second, see `IntervalList`."""
        return self._intervals.list

    @property
    def beginnings(self) -> int:
        """How often a file was replaced, so that what was read of it before does not hold any more."""
        return sum(lines.beginnings for lines in self._lines)

    @property
    def skipped(self) -> dict[str, int]:
        """What was left out and why, with how often; a file that is not read at all counts once."""
        found: dict[str, int] = {}
        for lines in self._lines:
            found.update({f"{lines.name}: {why}": count for why, count in lines.skipped.items() if count})
            if lines.refused is not None:
                found[lines.refused] = 1
        return {**found, **dict.fromkeys(self._unreadable.values(), 1)}

    @property
    def progress(self) -> float:
        """The part of the bytes of its files that has been read; 1.0 unless `refresh` was told to stop earlier."""
        if not any(lines.more for lines in self._lines):
            return 1.0
        return sum(lines.position for lines in self._lines) / max(1, sum(lines.size for lines in self._lines))

    @property
    def touched(self) -> float:
        """When the run last wrote something, as far as the last `refresh` saw."""
        documents = max((mark[2] / 1e9 for mark in self._documents.values()), default=0.0)
        return max(documents, *(lines.changed for lines in self._lines))

    def current_info(self, now: float | None = None) -> dict[str, Any]:
        """Return `info` with the current state: a run whose state is "running" may have been killed.

        If its process has ended, `state` is "killed" and `ended` the time of its last write. If it wrote nothing for longer than a minute,
        and than ten intervals of its ledger, `silent` is the number of seconds since then, in whole minutes.
        """
        info = {name: value for name, value in self.info.items() if name != "silent"}  # never taken from the file
        if info.get("state") != "running":
            return info
        if is_gone(info):
            return {**info, "state": "killed", "ended": self.touched}
        silent = (clock() if now is None else now) - self.touched
        if silent < SILENCE_LIMIT or silent < 10 * sum(interval["seconds"] or 0 for interval in self.ledger) / max(1, self.ledger_lines):
            return info
        return {**info, "silent": int(silent // 60 * 60)}

    # -- reading --------------------------------------------------------------------------------------------------

    def refresh(self, blocks: int | None = None) -> bool:
        """Read what is new, or so many blocks (of about 256 KB) of each file; return whether there was anything."""
        self.fresh_ledger, self.fresh_events, self.fresh_lost = [], [], False
        try:
            with ConfinedFolder(self.path) as folder:
                changed = [
                    self._document(folder, "run.json", "info"),
                    self._document(folder, "config.json", "config"),
                    self._document(folder, "environment.json", "environment"),
                    self._new_lines(folder, self._metrics, self._begin_metrics, self._read_metrics, blocks),
                    self._new_lines(folder, self._ledger, self._begin_ledger, self._read_ledger, blocks),
                    self._new_lines(folder, self._events, self._begin_events, self._read_events, blocks),
                ]
        except MissingCheckpointError:  # not there yet, or not any more: what was read stays
            return False
        except CheckpointError as error:
            self._unreadable[""] = str(error)
            return False
        self._unreadable.pop("", None)
        return any(changed)

    def _new_lines(
        self,
        folder: ConfinedFolder,
        lines: LineReader,
        begin: Callable[[], None],
        take: Callable[[Iterable[str]], None],
        blocks: int | None,
    ) -> bool:
        changed = False
        while blocks is None or blocks > 0:
            before = lines.beginnings
            found = lines.read(folder)
            if lines.beginnings != before:
                begin()
                changed = True
            if found:
                take(found)
                changed = True
            if not lines.more:
                break
            blocks = None if blocks is None else blocks - 1
        return changed

    def _document(self, folder: ConfinedFolder, name: str, attribute: str) -> bool:
        """Read a JSON file into an attribute if it was replaced since the last call; return whether it was."""
        try:
            file = folder.open(name)
            try:
                status = os.fstat(file)
            finally:
                os.close(file)
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._documents.get(name) == mark:
                return False
            value = _limit_depth(json.loads(folder.read(name, _MAX_JSON)), deepest=20)
        except MissingCheckpointError:
            return False
        except (CheckpointError, ValueError, RecursionError) as error:
            self._unreadable[name] = str(error) if isinstance(error, CheckpointError) else f"{name} is not JSON"
            return False
        self._unreadable.pop(name, None)
        self._documents[name] = mark
        setattr(self, attribute, value if isinstance(value, dict) else {})
        return True

    # -- metrics.jsonl --------------------------------------------------------------------------------------------

    def _read_metrics(self, lines: Iterable[str]) -> None:
        decode, add = _decode, self._add_values
        for line in lines:
            try:
                record, end = decode(line)
                values, step, time = record["values"], record["step"], record["time"]
                if end == len(line) and type(time) is float and type(step) is int and type(values) is dict:
                    add(step, time, values)
                    continue
            except (ValueError, RecursionError, LookupError, TypeError):
                pass  # not the common form: looked at with more care
            self._read_other(line)
        most = max(_MIN_HELD_POINTS, _MAX_HELD_POINTS // max(1, len(self.series)))
        for series in self.series.values():
            series.limit(most)

    def _read_other(self, line: str) -> None:
        """Read a line of metrics.jsonl of any form."""
        record = _parse_record(line, self._metrics.skipped)
        if record is None:
            return
        step, time, values = record.get("step"), _to_time(record.get("time")), record.get("values")
        if type(values) is dict and (step is None or type(step) is int or type(step) is float):
            self._add_values(step, time, values)
        elif type(record.get("images")) is dict:
            self._add_images(step, time, record["images"])
        elif type(record.get("table")) is dict:
            self._add_table(step, time, record["table"])
        elif "run" not in record:  # that one says where the run began, or began again
            self._metrics.skipped["lines of an unknown kind"] += 1

    def _add_values(self, step: float | None, time: float, values: dict[str, Any]) -> None:
        place = _to_float(self._logged if step is None else step)
        if not isfinite(place):
            self._metrics.skipped["steps that are not numbers"] += 1
            return
        self._logged += 1
        every = self.series
        for name, value in values.items():
            number = value if type(value) is float else self._number(name, value, step, time)
            if number is not None:
                series = every.get(name) or self._new_series(name)
                if series is not None:
                    series.add(place, time, number)

    def _number(self, name: str, value: Any, step: float | None, time: float) -> float | None:
        """Return a value as a number; None for a text, which is stored, and for what cannot be shown."""
        if isinstance(value, str) and value not in _NOT_NUMBERS:
            self._keep(self.texts, name, {"step": _limit_depth(step), "time": _limit_depth(time), "text": value[:_MAX_TEXT]})
            return None
        if value is not None and not isinstance(value, (str, int, float)):
            self._metrics.skipped["values that are neither numbers nor texts"] += 1
            return None
        return _to_float(value)

    def _new_series(self, name: str) -> Series | None:
        if len(self.series) >= _MAX_SERIES or len(name) > _MAX_NAME_LENGTH:
            self._refused = self._refused or name[:_MAX_EXAMPLE]
            why = f"points of too many names (more than {_MAX_SERIES}) or of too long ones, such as {self._refused!r}"
            self._metrics.skipped[why] += 1
            return None
        return self.series.setdefault(name, Series())

    def _add_images(self, step: Any, time: float, images: dict[str, Any]) -> None:
        for name, paths in images.items():
            safe = [path for path in paths if _in_media(path)] if isinstance(paths, list) else []
            if not isinstance(paths, list) or len(safe) != len(paths):
                self._metrics.skipped["pictures whose names lead elsewhere than to media/"] += 1
            if not safe or (name not in self.images and len(self.images) >= _MAX_NAMES):
                continue
            kept = self.images.setdefault(name, [])
            kept.append({"step": _limit_depth(step), "time": _limit_depth(time), "paths": safe})
            if len(kept) > _MAX_IMAGES:  # the first one stays: it shows where the run began
                del kept[1 : 1 + _MAX_IMAGES // 4]

    def _add_table(self, step: Any, time: float, table: dict[str, Any]) -> None:
        titles, rows = table.get("columns"), table.get("rows")
        if not isinstance(titles, list) or not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            self._metrics.skipped["tables without columns and rows"] += 1
            return
        shown = rows[: max(1, _MAX_CELLS // max(1, len(titles)))]
        held = _limit_depth({"step": step, "time": time, "columns": titles, "rows": shown, "count": len(rows)}, deepest=5)
        self._keep(self.tables, str(table.get("name")), held)

    def _keep(self, where: dict[str, dict[str, Any]], name: str, value: dict[str, Any]) -> None:
        """Store the latest value of a name."""
        if name in where or (len(where) < _MAX_NAMES and len(name) <= _MAX_NAME_LENGTH):
            where[name] = value
        else:
            self._metrics.skipped[f"texts or tables of too many names ({_MAX_NAMES}) or of too long ones"] += 1

    # -- ledger.jsonl and events.jsonl ----------------------------------------------------------------------------

    def _read_ledger(self, lines: Iterable[str]) -> None:
        for line in lines:
            record = _parse_record(line, self._ledger.skipped)
            if record is None:
                continue
            if type(record.get("phases")) is not dict:
                self._ledger.skipped["lines of an unknown kind"] += 1
                continue
            interval = normalize_interval(record)
            self._intervals.add(interval)
            self.ledger_lines += 1
            self.fresh_ledger.append(interval)
        self._limit(self.fresh_ledger)

    def _read_events(self, lines: Iterable[str]) -> None:
        for line in lines:
            record = _parse_record(line, self._events.skipped)
            if record is None:
                continue
            if not isinstance(record.get("kind"), str):
                self._events.skipped["lines of an unknown kind"] += 1
                continue
            event = _limit_depth(record)
            self.events.append(event)
            self.fresh_events.append(event)
            if len(self.events) > _MAX_EVENTS:
                del self.events[1 : 1 + _MAX_EVENTS // 4]
                self._events.skipped["older events"] += _MAX_EVENTS // 4
        self._limit(self.fresh_events)

    def _limit(self, fresh: list[dict[str, Any]]) -> None:
        self.fresh_lost |= len(fresh) > _MAX_FRESH
        del fresh[:-_MAX_FRESH]

    # -- showing --------------------------------------------------------------------------------------------------

    def view(
        self,
        names: Iterable[str] | None = None,
        points: int = 2000,
        low: float | None = None,
        high: float | None = None,
        *,
        ledger: bool = True,
    ) -> dict[str, Any]:
        """Return everything that the page shows of this run, as JSON values.

        `series` are those named, or all, each thinned to at most `points` between the steps `low` and `high`; with very many series
        it is fewer points for each. A series is `steps`, `times` (seconds since 1970), `values` (None where there is no number) and
        `count`, the number of all points. `info` is that of `current_info`. `ledger` is columns (see `to_columns`), and can be left out.
        """
        return {
            "name": self.name,
            "path": str(self.path),
            "info": self.current_info(),
            "config": self.config,
            "environment": self.environment,
            "series": self.curves(names, points, low, high),
            **({"ledger": to_columns(self.ledger)} if ledger else {}),
            "events": self.events,
            "images": self.images,
            "tables": self.tables,
            "texts": self.texts,
            "skipped": self.skipped,
        }

    def curves(
        self, names: Iterable[str] | None = None, points: int = 2000, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """Return the `series` of a view alone."""
        chosen = [name for name in (self.series if names is None else names) if name in self.series]
        each = min(points, max(50, _MAX_POINTS // max(1, len(chosen))))
        return {name: self.series[name].view(each, low, high) for name in chosen}


def _parse_record(line: str, skipped: Counter[str]) -> dict[str, Any] | None:
    """Return a line as a dict; None for a blank line, and for any other, which is counted."""
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        skipped["lines that are not JSON"] += 1
        return None
    if type(record) is dict:
        return record
    if record is not None:
        skipped["lines of an unknown kind"] += 1
    return None


def _to_float(value: Any) -> float:
    """Return a number, or one of the texts that stand for none."""
    try:
        return float(value) if value is not None else nan
    except OverflowError:
        return inf if value > 0 else -inf


def _to_time(value: Any) -> float:
    return _to_float(value) if isinstance(value, (int, float)) else nan


def _limit_depth(value: Any, deepest: int = 4) -> Any:
    """Return a value within limits: no nan, no infinity, no very long text, no deep nesting."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, (dict, list)) and not deepest:
        return "..."
    if isinstance(value, dict):
        return {name[:_MAX_NAME_LENGTH]: _limit_depth(item, deepest - 1) for name, item in value.items()}
    return [_limit_depth(item, deepest - 1) for item in value] if isinstance(value, list) else value


def _in_media(path: Any) -> bool:
    try:
        return str(check_name(path, "metrics.jsonl")).startswith("media/")
    except CheckpointError:
        return False
