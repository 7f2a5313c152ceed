"""Run torch.profiler and write a trace for each rank, a merged trace, and a table of the most expensive operators.

With `output_trace_dir` every process writes `profile_<rank>.json` whenever a recording ends. The last process to write creates
`profile_merged.json`: processes count themselves in the rendezvous store, and none waits for another. If a process never reaches the end,
`merge_traces(folder)` merges the files later. Traces that cannot be merged are a warning, not an error of the run.

`merge_traces` streams its input, so memory use does not depend on the size of the traces. Every rank keeps its process rows under numbers
that no other rank uses. Times are aligned by the base time that each trace names; clocks of different machines may differ, and the merged
file says so. `top_operators` ranks by self time, on the device if one was recorded, else on the host.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from torch.profiler import ProfilerActivity, profile

from slipstream.config.handlers import check_count
from slipstream.devices.memory import convert_bytes
from slipstream.distributed.cluster import Process
from slipstream.distributed.process_group import Runtime
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.logging import get_logger
from slipstream.observability.options import PROFILE_PATTERN_NAME, ProfileKwargs
from slipstream.observability.report.text_charts import align_columns
from slipstream.observability.run_dir.folder import replacing

__all__ = ["MERGED_TRACE", "Operator", "TopOperators", "merge_traces", "run_profiler", "top_operators"]


_STEP_EVENT: Final = "ProfilerStep"
_MAX_NAME: Final = 48


@dataclass(frozen=True)
class Operator:
    """One operator, over all of its calls."""

    name: str
    calls: int
    self_time: float
    """Seconds, without what it calls."""
    share: float
    """Of the time of all operators together."""
    memory: int | None
    """Bytes that it took and did not give back; None if memory was not recorded."""


@dataclass(frozen=True)
class TopOperators:
    """The operators with the most time of their own; as text it is a table."""

    operators: tuple[Operator, ...]
    total: float
    """Seconds of all operators together."""
    others: int
    """How many there are besides."""
    where: str
    """Whose time it is: "host" or "device"."""
    silent: tuple[str, ...] = ()
    """The devices that were to be recorded and of which nothing was: nothing ran there, or their package does not tell torch's profiler."""

    def __str__(self) -> str:
        if not self.operators:
            return "no operator was recorded"
        silent = f" (nothing was recorded on {', '.join(self.silent)})" if self.silent else ""
        rows = [["operator", "self time", "share", "calls", "memory"]]
        for operator in self.operators:
            name = operator.name if len(operator.name) <= _MAX_NAME else operator.name[: _MAX_NAME - 3] + "..."
            memory = convert_bytes(operator.memory or 0)
            rows.append([name, _format_time(operator.self_time), f"{operator.share:.1%}", f"{operator.calls:,}", memory])
        if all(operator.memory is None for operator in self.operators):
            rows = [row[:-1] for row in rows]
        more = f" (and {self.others:,} others)" if self.others else ""
        return "\n".join([f"time of operators on the {self.where}{silent}: {_format_time(self.total)} in all{more}", *align_columns(rows)])


def top_operators(profiler: Any, count: int = 10) -> TopOperators:
    """Return the `count` operators that took the most time of their own in what a profiler has recorded (its last cycle, with a schedule).

    >>> import torch
    >>> from torch.profiler import ProfilerActivity, profile
    >>> with profile(activities=[ProfilerActivity.CPU]) as profiler:
    ...     _ = torch.ones(200, 200) @ torch.ones(200, 200)
    >>> top = top_operators(profiler, count=1)
    >>> len(top.operators), top.where, str(top).splitlines()[1].split()
    (1, 'host', ['operator', 'self', 'time', 'share', 'calls'])
    """
    check_count(count, f"top_operators(count={count!r}): write how many operators are wanted, from 1")
    events = [event for event in profiler.key_averages() if not event.key.startswith(_STEP_EVENT)]
    on_device = any(event.self_device_time_total > 0 for event in events)
    times = [event.self_device_time_total if on_device else event.self_cpu_time_total for event in events]
    total = sum(times)
    with_memory = bool(getattr(profiler, "profile_memory", False))
    ranked = sorted(zip(times, events, strict=True), key=lambda pair: -pair[0])
    memory = "self_device_memory_usage" if on_device else "self_cpu_memory_usage"
    chosen = tuple(
        Operator(event.key, event.count, time / 1e6, time / total if total else 0.0, int(getattr(event, memory)) if with_memory else None)
        for time, event in ranked[:count]
    )
    if on_device:
        return TopOperators(chosen, total / 1e6, len(ranked) - len(chosen), "device")
    silent = sorted(activity.name.lower() for activity in getattr(profiler, "activities", ()) if activity != ProfilerActivity.CPU)
    return TopOperators(chosen, total / 1e6, len(ranked) - len(chosen), "host", tuple(silent))


def _format_time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


MERGED_TRACE: Final = PROFILE_PATTERN_NAME.format(suffix="merged")
"""The name of the file of all ranks."""

_RANK_TRACE: Final = re.compile(re.escape(PROFILE_PATTERN_NAME).replace(re.escape("{suffix}"), r"(\d+)"), re.ASCII)
_CHUNK: Final = 1 << 20
_LARGEST_EVENT: Final = 64 << 20
_TAIL: Final = 1 << 16
_EVENTS: Final = "traceEvents"
_BASE: Final = "baseTimeNanoseconds"
_GAP: Final = re.compile(r"[\s,]*")
_DECODER: Final = json.JSONDecoder()
_PER_RANK: Final = 1000
"""Processes of a rank are numbered from (rank + 1) times this; 0 would be the idle process of the system."""
_PROCESS_METADATA: Final = frozenset({"process_name", "process_sort_index"})
_NO_PROCESS: Final = "Traces"
"""The process of marks that belong to none."""


def merge_traces(
    folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, ranks: Collection[int] | None = None
) -> Path:
    """Merge the traces that ranks have written into a folder (`profile_0.json`, ...); return the path of the merged trace.

    `output` is the path of the merged trace, by default `profile_merged.json` in the same folder; `ranks` selects ranks, by default all.
    Needed for runs whose processes did not all reach the end of the block, and for traces collected from several machines; otherwise the
    last process to write has merged them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for rank in range(2):
    ...         event = {"ph": "X", "name": "step", "pid": 77, "tid": 1, "ts": 5.0, "dur": 2.0}
    ...         _ = Path(folder, f"profile_{rank}.json").write_text(json.dumps({"host_name": "here", "traceEvents": [event]}))
    ...     events = json.loads(merge_traces(folder).read_text())["traceEvents"]
    >>> [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"]
    [(1000, 'rank 0 (here)'), (2000, 'rank 1 (here)')]
    """
    traces = [_Trace.of(path, rank) for rank, path in _find_traces(Path(folder), ranks).items()]
    target = Path(folder, MERGED_TRACE) if output is None else Path(output)
    base = min(trace.base for trace in traces)
    encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
    with replacing(target) as beside, open(beside, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(_format_header(traces, base))
        separator = ""
        for trace in traces:
            for event in trace.events(base, traces[-1].rank + 1):
                file.write(separator + encode(event))
                separator = ",\n"
        file.write("\n]}\n")
    return target


def _find_traces(folder: Path, ranks: Collection[int] | None) -> dict[int, Path]:
    if not folder.is_dir():
        raise ConfigError(
            f"merge_traces({str(folder)!r}): there is no such folder; write the one that ProfileKwargs(output_trace_dir=...) named"
        )
    known = {int(match[1]): folder / name for name in os.listdir(folder) if (match := _RANK_TRACE.fullmatch(name))}
    chosen = {rank: known[rank] for rank in sorted(known) if ranks is None or rank in ranks}
    if not chosen:
        wanted = "" if ranks is None else f" of rank {', '.join(map(str, sorted(ranks)))}"
        raise ConfigError(
            f"merge_traces({str(folder)!r}): there is no trace{wanted} in it; each is named {PROFILE_PATTERN_NAME.format(suffix='<rank>')}"
        )
    return chosen


def _format_header(traces: list[_Trace], base: int) -> str:
    hosts = sorted({trace.host for trace in traces})
    if len(hosts) == 1:
        clocks = f"all ranks ran on {hosts[0]}: their times are those of one clock"
    else:
        clocks = f"ranks ran on {', '.join(hosts)}: each machine has its own clock, and they may differ by milliseconds"
    header = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        _BASE: base,
        "slipstream": {"clocks": clocks, "ranks": [trace.described() for trace in traces]},
    }
    return json.dumps(header)[:-1] + f', "{_EVENTS}": [\n'


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
            document = _JsonStream(file, path)
            facts = {key: document.value() for key in document.keys_before(_EVENTS)}
        return cls(path, rank, facts, int(facts[_BASE]) if _BASE in facts else _read_trailing_base(path))

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
        """Return the events as they are in the merged file, and then what its processes are called."""
        shift = (self.base - base) / 1000
        with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
            document = _JsonStream(file, self.path)
            for _ in document.keys_before(_EVENTS):
                document.value()
            for event in document.items():
                if not isinstance(event, dict):
                    raise ConfigError(f"{self.path} is not a trace of torch's profiler: one of its events is {str(event)[:50]!r}")
                if event.get("ph") == "M":
                    if event.get("name") == "process_labels":
                        self._labels.setdefault(self._pid(event.get("pid")), str((event.get("args") or {}).get("labels", "")))
                    if event.get("name") in _PROCESS_METADATA:
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
                return self._pid(_NO_PROCESS)
            known = self._pids[given] = (self.rank + 1) * _PER_RANK + len(self._pids)
        return known

    def _processes(self) -> Iterator[dict[str, Any]]:
        """Yield the metadata of the processes: the host first, then the devices, then marks that belong to no process."""
        own = [number for given, number in self._pids.items() if not isinstance(given, str)]
        main = next((number for number in own if self._labels.get(number) == "CPU"), own[0] if own else None)
        names = {number: self._labels.get(number) or str(given) for given, number in self._pids.items()}
        ordered = sorted(names, key=lambda number: (number != main, number not in own, number))
        for place, number in enumerate(ordered):
            name = self.name if number == main else f"{self.name} {names[number]}"
            for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": self.rank * _PER_RANK + place})):
                yield {"ph": "M", "name": kind, "pid": number, "tid": 0, "args": args}


def _read_trailing_base(path: Path) -> int:
    """Return what a trace counts its times from, where it says so after the events; 0 if it does not."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL))
        found = re.findall(rb'"%s"\s*:\s*(\d+)' % _BASE.encode(), file.read())
    return int(found[-1]) if found else 0


class _JsonStream:
    """Reads a JSON object in chunks: keys and values as they come, and a long list item by item."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text, self._at = "", 0
        if self._next() != "{":
            raise self._damaged("it does not begin as one")
        self._at += 1

    def keys_before(self, last: str) -> Iterator[str]:
        """Return keys as they come; the caller takes the value of each before the next. Stops inside the list of the key `last`."""
        while True:
            if self._next() == "}":
                raise self._damaged(f"it has no {last!r}")
            key = self._decoded()
            if self._next() != ":":
                raise self._damaged("a key has no value")
            self._at += 1
            if key == last:
                if self._next() != "[":
                    raise self._damaged(f"{last!r} is not a list")
                self._at += 1
                return
            yield key

    def value(self) -> Any:
        """Return the value that comes next."""
        self._next()
        return self._decoded()

    def items(self) -> Iterator[Any]:
        """Return the items of the list that `keys_before` stopped in."""
        while self._next() != "]":
            yield self._decoded()

    def _next(self) -> str:
        """Return the next character that is neither white space nor a comma, without consuming it."""
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
            if end == len(self._text) and self._more():  # a number may continue in the next chunk
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        piece = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self._path} is not a complete trace of torch's profiler ({why}): remove it, or record it again")


_OnTrace = Callable[[Path], object]


@contextmanager
def run_profiler(handler: ProfileKwargs | None, runtime: Runtime | None = None, tell: _OnTrace | None = None) -> Iterator[profile]:
    """Run torch's profiler around a block; with `output_trace_dir`, write `profile_<rank>.json` when it ends.

    `runtime` is that of this process, which knows its rank and the others; `tell` is called with the path of each trace that is there when
    the block ends, that of this rank and, if it was made here, that of all.

    >>> import torch
    >>> with run_profiler(ProfileKwargs(activities=["cpu"])) as profiler:
    ...     _ = torch.ones(3).sum()
    >>> any(event.key == "aten::sum" for event in profiler.key_averages())
    True
    """
    handler = handler or ProfileKwargs()
    process = runtime.process if runtime is not None else Process()
    folder = None if handler.output_trace_dir is None else _prepare_folder(handler.output_trace_dir)
    recording = _Recording(folder and folder / PROFILE_PATTERN_NAME.format(suffix=process.rank), handler.on_trace_ready, process)
    building = handler.building(recording.ready)
    try:
        with building as profiler:
            yield profiler
    finally:
        if folder is not None:
            recording.say_if_nothing()
            for path in recording.path, _merge_if_last(folder, recording, runtime):
                if path is not None and tell is not None:
                    tell(path)
    recording.say_top()


def _prepare_folder(given: str) -> Path:
    """Return the folder for traces, created if needed; raise an error before the run if it is not writable."""
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"ProfileKwargs(output_trace_dir={os.fspath(given)!r}): no trace can be written there ({error.strerror}); name another folder"
        ) from error


class _Recording:
    """Writes every recording that ends to a file, after the user's own function has seen it."""

    def __init__(self, path: Path | None, also: Callable[..., Any] | None, process: Process) -> None:
        self._path = path
        self._also = also
        self._written = self._ended = False
        # It costs a look at every event, as much as writing them: where traces are written it is shown, else to who listens.
        self._counted = process.is_main and (path is not None or get_logger(__name__).isEnabledFor(logging.INFO))
        self._top: TopOperators | None = None

    @property
    def path(self) -> Path | None:
        """The file, if it is there."""
        return self._path if self._written else None

    def ready(self, profiler: profile) -> None:
        if self._also is not None:
            self._also(profiler)
        self._ended = True
        if self._counted:
            self._top = top_operators(profiler)  # now: torch forgets it with the next cycle
        if self._path is not None:
            self._write(profiler, self._path)

    def _write(self, profiler: profile, path: Path) -> None:
        """Write the trace atomically: whoever merges meanwhile reads the trace of the previous cycle."""
        try:
            with replacing(path) as beside:
                profiler.export_chrome_trace(str(beside))
            self._written = True
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            get_logger(__name__).warning_once(f"on_trace_ready has saved the trace itself, so {path} is not written again")

    def say_if_nothing(self) -> None:
        if not self._ended:
            get_logger(__name__).warning(
                "nothing was recorded, so there is no %s: with a schedule, call profiler.step() after every step, until a cycle has begun",
                self._path,
                main_process_only=False,
            )

    def say_top(self) -> None:
        if self._top is not None and self._path is not None:
            print(self._top, file=sys.stderr, flush=True)
        elif self._top is not None:
            get_logger(__name__).info("%s", self._top)


def _merge_if_last(folder: Path, recording: _Recording, runtime: Runtime | None) -> Path | None:
    """Return the trace of all ranks, if this is the last of them to have written its own."""
    if runtime is None or runtime.process.world_size == 1:
        return None
    logger, process = get_logger(__name__), runtime.process
    if runtime.store is None:
        logger.info("the traces in %s are not merged, as the processes never met: merge_traces(%r) does that", folder, str(folder))
        return None
    try:
        if not _is_last(runtime.store, f"traces/{folder}", process, written=recording.path is not None):
            return None
        merged = merge_traces(folder, ranks=range(process.world_size))
    except (OSError, RuntimeError, SlipstreamError) as error:
        logger.warning(
            "the traces in %s were not merged (%s): merge_traces(%r) tries again", folder, error, str(folder), main_process_only=False
        )
        return None
    absent = [rank for rank in range(process.world_size) if not (folder / PROFILE_PATTERN_NAME.format(suffix=rank)).exists()]
    if absent:
        logger.warning(
            "%s has no rank %s, whose traces are on other machines: bring them into one folder and call merge_traces",
            merged,
            ", ".join(map(str, absent)),
            main_process_only=False,
        )
    return merged


def _is_last(store: Any, key: str, process: Process, *, written: bool) -> bool:
    """Return whether all others have written the trace of the same block: the first of each on this folder, the second, and so on."""
    number = store.add(f"{key}/{process.rank}", 1)
    return bool(written and store.add(f"{key}/block {number}", 1) == process.world_size)
