"""Traces of several ranks become one that chrome://tracing and Perfetto open, with a group of rows for each rank.

Every rank keeps the processes that its trace has (the host, each device, the spans), under numbers that no other rank has, named
"rank 0 (host)" and sorted by rank; arrows between events get numbers of their own, so that none leads from one rank to another. Times are
laid over each other by the base that each trace names: traces of one machine share its clock, and for those of several machines the file
says that their clocks may differ.

Files are read and written piece by piece, so that a trace of any size takes the same memory. The merged file is written beside its place
and takes it when it is whole; the files that it is made of stay as they are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from slipstream.errors import ConfigError
from slipstream.step.profiling.options import PROFILE_PATTERN_NAME

__all__ = ["MERGED", "merge_traces"]

MERGED: Final = PROFILE_PATTERN_NAME.format(suffix="merged")
"""The name of the file of all ranks."""

_OF_A_RANK: Final = re.compile(re.escape(PROFILE_PATTERN_NAME).replace(re.escape("{suffix}"), r"(\d+)"), re.ASCII)
_PIECE: Final = 1 << 20
_LARGEST_EVENT: Final = 64 << 20
_TAIL: Final = 1 << 16
_EVENTS: Final = "traceEvents"
_BASE: Final = "baseTimeNanoseconds"
_GAP: Final = re.compile(r"[\s,]*")
_DECODER: Final = json.JSONDecoder()
_AT_ONCE: Final = 2000
_PER_RANK: Final = 1000
"""Processes of a rank are numbered from (rank + 1) times this; 0 would be the idle process of the system."""
_NAMES: Final = frozenset({"process_name", "process_sort_index"})
_NOBODY: Final = "Traces"
"""The process of marks that belong to none."""


def merge_traces(
    folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, ranks: Collection[int] | None = None
) -> Path:
    """One trace of those that ranks have written into a folder (`profile_0.json`, ...); gives back its path.

    `output` is where it goes, `profile_merged.json` in the same folder if nothing is said; `ranks` are those that are wanted, all that are
    there otherwise. For runs whose processes did not all come to the end of the block, and for traces that were brought together from
    several machines: else the last process to write has done it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):
    ...         event = {"ph": "X", "name": "step", "pid": 77, "tid": 1, "ts": 5.0, "dur": 2.0}
    ...         _ = Path(folder, f"profile_{rank}.json").write_text(json.dumps({"host_name": "here", "traceEvents": [event]}))
    ...     events = json.loads(merge_traces(folder).read_text())["traceEvents"]
    >>> [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"]
    [(1000, 'rank 0 (here)'), (2000, 'rank 1 (here)')]
    """
    traces = [_Trace.of(path, rank) for rank, path in _found(Path(folder), ranks).items()]
    target = Path(folder, MERGED) if output is None else Path(output)
    base = min(trace.base for trace in traces)
    beside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(_head(traces, base))
            separator = ""
            for trace in traces:
                for lines in _batches(trace.events(base, traces[-1].rank + 1)):
                    file.write(separator + ",\n".join(lines))
                    separator = ",\n"
            file.write("\n]}\n")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def _found(folder: Path, ranks: Collection[int] | None) -> dict[int, Path]:
    if not folder.is_dir():
        raise ConfigError(
            f"merge_traces({str(folder)!r}): there is no such folder; write the one that ProfileKwargs(output_trace_dir=...) named"
        )
    known = {int(match[1]): folder / name for name in os.listdir(folder) if (match := _OF_A_RANK.fullmatch(name))}
    chosen = {rank: known[rank] for rank in sorted(known) if ranks is None or rank in ranks}
    if not chosen:
        wanted = "" if ranks is None else f" of rank {', '.join(map(str, sorted(ranks)))}"
        raise ConfigError(
            f"merge_traces({str(folder)!r}): there is no trace{wanted} in it; each is named {PROFILE_PATTERN_NAME.format(suffix='<rank>')}"
        )
    return chosen


def _head(traces: list[_Trace], base: int) -> str:
    hosts = sorted({trace.host for trace in traces})
    if len(hosts) == 1:
        clocks = f"all ranks ran on {hosts[0]}: their times are those of one clock"
    else:
        clocks = f"ranks ran on {', '.join(hosts)}: each machine has a clock of its own, and they may differ by milliseconds"
    told = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        _BASE: base,
        "slipstream": {"clocks": clocks, "ranks": [trace.described() for trace in traces]},
    }
    return json.dumps(told)[:-1] + f', "{_EVENTS}": [\n'


def _batches(events: Iterator[dict[str, Any]]) -> Iterator[list[str]]:
    encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
    lines: list[str] = []
    for event in events:
        lines.append(encode(event))
        if len(lines) == _AT_ONCE:
            yield lines
            lines = []
    if lines:
        yield lines


@dataclass
class _Trace:
    """The trace of one rank."""

    path: Path
    rank: int
    facts: dict[str, Any]
    base: int
    _pids: dict[Any, int] = field(default_factory=dict)
    _labels: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, rank: int) -> _Trace:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            document = _Document(file, path)
            facts = {key: document.value() for key in document.keys_before(_EVENTS)}
        return cls(path, rank, facts, int(facts[_BASE]) if _BASE in facts else _base_at_the_end(path))

    @property
    def host(self) -> str:
        return str(self.facts.get("host_name") or "unknown host")

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"

    def described(self) -> dict[str, Any]:
        more = {key: self.facts[key] for key in ("deviceProperties", "distributedInfo") if self.facts.get(key)}
        return {"rank": self.rank, "host": self.host, "file": self.path.name, **more}

    def events(self, base: int, ranks: int) -> Iterator[dict[str, Any]]:
        """The events as they are in the merged file, and then what its processes are called."""
        shift = (self.base - base) / 1000
        with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
            document = _Document(file, self.path)
            for _ in document.keys_before(_EVENTS):
                document.value()
            for event in document.items():
                if not isinstance(event, dict):
                    raise ConfigError(f"{self.path} is no trace of torch's profiler: one of its events is {str(event)[:50]!r}")
                if event.get("ph") == "M":
                    if event.get("name") == "process_labels":
                        self._labels.setdefault(self._pid(event.get("pid")), str((event.get("args") or {}).get("labels", "")))
                    if event.get("name") in _NAMES:
                        continue
                event["pid"] = self._pid(event.get("pid"))
                if shift and "ts" in event:
                    event["ts"] += shift
                if "id" in event:
                    number = event["id"]
                    event["id"] = number * ranks + self.rank if isinstance(number, int) else f"{number}/{self.rank}"
                yield event
        yield from self._processes()

    def _pid(self, given: Any) -> int:
        known = self._pids.get(given)
        if known is None:
            if given in ("", None):
                return self._pid(_NOBODY)
            known = self._pids[given] = (self.rank + 1) * _PER_RANK + len(self._pids)
        return known

    def _processes(self) -> Iterator[dict[str, Any]]:
        """The host first, then the devices, then what is no process."""
        own = [number for given, number in self._pids.items() if not isinstance(given, str)]
        main = next((number for number in own if self._labels.get(number) == "CPU"), own[0] if own else None)
        names = {number: self._labels.get(number) or str(given) for given, number in self._pids.items()}
        ordered = sorted(names, key=lambda number: (number != main, number not in own, number))
        for place, number in enumerate(ordered):
            name = self.name if number == main else f"{self.name} {names[number]}"
            for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": self.rank * _PER_RANK + place})):
                yield {"ph": "M", "name": kind, "pid": number, "tid": 0, "args": args}


def _base_at_the_end(path: Path) -> int:
    """What a trace counts its times from, where it says so after the events; 0 if it does not."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL))
        found = re.findall(rb'"%s"\s*:\s*(\d+)' % _BASE.encode(), file.read())
    return int(found[-1]) if found else 0


class _Document:
    """A JSON object that is read piece by piece: keys and values as they come, and a long list item by item."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text, self._at = "", 0
        if self._next() != "{":
            raise self._damaged("it does not begin as one")
        self._at += 1

    def keys_before(self, last: str) -> Iterator[str]:
        """Keys as they come; the caller takes the value of each before the next. Stops inside the list of the key `last`."""
        while True:
            if self._next() == "}":
                raise self._damaged(f"it has no {last!r}")
            key = self._decoded()
            if self._next() != ":":
                raise self._damaged("a key has no value")
            self._at += 1
            if key == last:
                if self._next() != "[":
                    raise self._damaged(f"{last!r} is no list")
                self._at += 1
                return
            yield key

    def value(self) -> Any:
        """The value that comes next."""
        self._next()
        return self._decoded()

    def items(self) -> Iterator[Any]:
        """What is in the list that was come to."""
        while self._next() != "]":
            yield self._decoded()

    def _next(self) -> str:
        """The next character that counts, which stays."""
        while True:
            gap = _GAP.match(self._text, self._at)
            assert gap is not None
            self._at = gap.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise self._damaged("it ends too early")

    def _decoded(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > _LARGEST_EVENT or not self._more():
                    raise self._damaged(error.msg) from error
                continue
            if end == len(self._text) and self._more():  # a number may go on
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        piece = self._file.read(max(_PIECE, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self._path} is no whole trace of torch's profiler ({why}): remove it, or record it again")
