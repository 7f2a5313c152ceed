"""Publish where this rank is, and know where the other ranks are.

The thread that calls collectives records what it enters and leaves in memory; a daemon thread writes that record to the rendezvous store
once a second and, while this rank waits, reads the records of the others. Freshness is judged by this process's own clock, so clocks need
not agree between hosts. Events that concern every rank (a rank ended, left or gave up, or a stack is requested) increment an alarm counter
that waiting ranks poll. The thread never raises into the program: it sets `Heartbeat.peer_failure`, and the waiting thread raises.
The stack of a process that cannot answer is obtained with `faulthandler` and a signal (Linux only).
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.distributed.call_site import StackLine, filter_stack, is_user_file, user_frames
from slipstream.launch.store import ALARM_KEY, ExitNotice, exit_key

__all__ = [
    "Heartbeat", "PROCESS_ENDED", "PeerStatus", "RankPosition", "StackSignal", "WatchedSection", "describe_position", "format_ranks",
    "process_state", "read_stack_by_signal",
]


@dataclass(frozen=True)
class RankPosition:
    """What a rank is doing: waiting in a collective, or working after one."""

    generation: int = 0
    sequence: int = 0
    operation: str = ""
    site: str = ""
    waiting: bool = False
    since: float = field(default_factory=time.monotonic)
    sections: int = 0
    """Watched sections of this generation that it has entered."""
    sections_since_call: int = 0
    """Those of them that it entered after its last Slipstream collective; equal on ranks that are in step."""
    watched: bool = False
    """Whether this is a watched section and not a Slipstream collective."""
    number: int = 0
    """The number of the section among those of its kind."""
    torch_ops: int = 0
    """Torch collectives that have begun in the section."""
    torch_ops_since_call: int = 0
    """Torch collectives that it has begun after its last Slipstream collective, in a section or not."""
    on_device: bool = False
    """Whether the host has left the section, and the device has not completed what was begun in it."""

    @property
    def call(self) -> str:
        """The call with its number and line: `gather number 7 at train.py:20`."""
        return _describe_call(vars(self))

    def record(self) -> dict[str, Any]:
        return {**vars(self), "seconds": time.monotonic() - self.since}

    def is_after(self, record: dict[str, Any]) -> bool:
        """Whether a rank that took part in this has gone on since it published the record."""
        generation, sequence, sections = (record.get(name, 0) for name in ("generation", "sequence", "sections"))
        if generation != self.generation:
            return bool(generation < self.generation)
        return bool(sequence <= self.sequence and sections <= self.sections and (sequence, sections) != (self.sequence, self.sections))


class WatchedSection(Protocol):
    """A section of the program in which torch's own collectives run, as the heartbeat sees it."""

    since: float
    """When it was entered last."""
    ask_after: float
    """Seconds after which the records of the others are read."""

    def position(self, waiting: bool) -> RankPosition: ...

    def is_pending(self) -> bool:
        """Whether the device has not completed what was begun in the section, which the host has left."""

    def check(self) -> None:
        """Report a long wait and end one that cannot complete; called by the heartbeat thread while the section runs or is pending."""


@dataclass
class PeerStatus:
    """What is known about another rank, by this process's own clock."""

    record: dict[str, Any] = field(default_factory=dict)
    beat: int = -1
    heard: float = field(default_factory=time.monotonic)
    stack: list[str] = field(default_factory=list)
    stack_asked: float = 0.0
    stack_key: str = ""
    """The store key of the answer to the last request for a stack."""

    def update(self, record: dict[str, Any]) -> None:
        if record["beat"] != self.beat:
            self.beat, self.heard = record["beat"], time.monotonic()
        self.record = record

    @property
    def silent(self) -> float:
        """Seconds since its beat last went up."""
        return time.monotonic() - self.heard


def _describe_call(record: dict[str, Any]) -> str:
    return f"{record['operation']} number {record['number'] if record['watched'] else record['sequence']} at {record['site']}"


def describe_position(record: dict[str, Any]) -> str:
    """Describe a record for a message.

    >>> describe_position(RankPosition(1, 7, "gather", "train.py:20", waiting=True).record())
    'waits 0 s in gather number 7 at train.py:20'
    """
    if not record:
        return "nothing heard of it yet"
    failure = f"; before that it failed in {record['failure']}" if record.get("failure") else ""
    if record["waiting"]:
        device = " (the device; the host has gone on)" if record.get("on_device") else ""
        return f"{'has been' if record['watched'] else 'waits'} {record['seconds']:.0f} s in {_describe_call(record)}{device}{failure}"
    if not record["operation"]:
        return f"in no collective yet, for {record['seconds']:.0f} s"
    return f"in no collective for {record['seconds']:.0f} s; the last was {_describe_call(record)}{failure}"


class StackSignal:
    """Registers this process to write its stack on a signal."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._number = 0

    def install(self) -> None:
        if not hasattr(os, "memfd_create") or self._file is not None:
            return
        number = int(signal.SIGRTMAX) - 2  # a real-time signal that neither schedulers nor users' handlers claim
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            return
        self._file, self._number = os.memfd_create("slipstream-stack"), number
        faulthandler.register(number, file=self._file, all_threads=True, chain=False)

    def record(self) -> dict[str, Any]:
        """Return what another process needs in order to ask for the stack."""
        if self._file is None:
            return {}
        import psutil

        thread = f"0x{threading.main_thread().ident or 0:016x}"
        return {"stack_signal": self._number, "stack_file": self._file, "stack_thread": thread, "started": psutil.Process().create_time()}

    def remove(self) -> None:
        if self._file is not None:
            faulthandler.unregister(self._number)
            os.close(self._file)
            self._file = None


def process_state(record: dict[str, Any]) -> str | None:
    """Return what the operating system says about a process on this host ("stopped by a signal", "gone"); None if it is running."""
    import psutil

    try:
        process = psutil.Process(record["pid"])
        if "started" in record and abs(process.create_time() - record["started"]) > 1:
            return f"process {record['pid']} is gone"
        status = process.status()
    except psutil.NoSuchProcess:
        return f"process {record['pid']} is gone"
    except psutil.AccessDenied:
        return None
    words = {
        psutil.STATUS_STOPPED: "stopped by a signal",
        psutil.STATUS_TRACING_STOP: "held by a debugger",
        psutil.STATUS_ZOMBIE: "ended",
        psutil.STATUS_DISK_SLEEP: "in an uninterruptible read or write",
    }
    return words.get(status)


def read_stack_by_signal(record: dict[str, Any]) -> list[str]:
    """Ask a process on this host for its stack by signal; empty if there is no answer."""
    if "stack_signal" not in record or process_state(record) is not None:
        return []
    path = f"/proc/{record['pid']}/fd/{record['stack_file']}"
    try:
        before = os.stat(path).st_size
        os.kill(record["pid"], record["stack_signal"])
        for _ in range(20):
            time.sleep(0.02)
            if os.stat(path).st_size > before:
                break
        with open(path) as file:
            file.seek(before)
            threads = re.split(r"^(?=\w.*hread 0x)", file.read(), flags=re.MULTILINE)
    except OSError as error:
        return [f"(no stack: {error.strerror})"]
    main = next((text for text in threads if record["stack_thread"] in text), "")
    return filter_stack(_parse_stack(main))


def _parse_stack(text: str) -> list[StackLine]:
    """Return the frames of one thread as `faulthandler` wrote them, outermost first.

    `faulthandler` does not mark the script, so the script is the outermost module body of the user's files.
    """
    lines: list[StackLine] = []
    after_user_code = False
    for filename, number, function in reversed(re.findall(r'^\s*File "(.*)", line (\S+) in (.*)$', text, flags=re.MULTILINE)):
        users = is_user_file(filename)
        is_script = users and function == "<module>" and not after_user_code
        lines.append(StackLine(f'File "{filename}", line {number}, in {function}', filename, is_script))
        after_user_code = after_user_code or users
    return lines


PROCESS_ENDED = "(end of the process)"
"""Ends a failure text about a process that ended by itself: the launcher may publish more in a moment."""


def format_ranks(ranks: Sequence[int]) -> str:
    """
    >>> format_ranks([1]), format_ranks([0, 2]), format_ranks([])
    ('rank 1', 'ranks 0, 2', 'no rank in particular')
    """
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}" if ranks else "no rank in particular"


class Heartbeat:
    """Publishes where this rank is, and knows where the others are. One for each connection to the store.

    `store` must be a connection of its own (TCPStore.clone()): a blocking call on a shared one would stop the beats.
    """

    PUBLISH_EVERY = 1.0
    LOOK_EVERY = 0.2

    def __init__(self, store: Any, rank: int, world_size: int, host: str, pid: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.collective = RankPosition()
        self.hang_warning = 10.0
        """Seconds of waiting after which the table is printed; stacks are asked for before that."""
        self.section: WatchedSection | None = None
        """The section that was entered last; `in_section` says whether this rank is in it now."""
        self.in_section = False
        self.sections = 0
        self.failure = (0, "")
        """How many sections were complete when this rank failed inside one with an error of its own, and where that was."""
        self.peer_failure: str | None = None
        """Why the current collective cannot complete, as found in the store; None if nothing is wrong."""
        self.is_mismatch = False
        """Whether the failure is an error of the program: the processes called different things."""
        self.store_error: str | None = None
        self._completed = self.collective
        """The collective that this rank completed last; the others took part in it even if their last record is older."""
        self.peers = {other: PeerStatus() for other in range(world_size) if other != rank}
        self._store = store
        self._identity = {"host": host, "pid": pid}
        self._beat = 0
        self._alarm_seen = 0
        self._events_seen = 0
        self._last_publish = 0.0
        self._last_sample = 0.0
        self._departures: dict[int, dict[str, Any]] = {}
        self._sections_before = 0
        self._count_torch_ops: Callable[[], int] = int
        self._torch_ops_before = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._signal = StackSignal()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="slipstream-heartbeat", daemon=True)

    # -- the calling thread ---------------------------------------------------------------------------------------

    def enter(self, generation: int, sequence: int, operation: str, site: str) -> None:
        """Record that this rank begins to wait in a collective."""
        self._main_thread = threading.get_ident()
        self.collective = RankPosition(generation, sequence, operation, site, True, sections=self.sections)

    def leave(self) -> None:
        """Record that the collective is over."""
        left = self.collective
        self._sections_before, self._torch_ops_before = self.sections, self._count_torch_ops()
        self.collective = self._completed = RankPosition(left.generation, left.sequence, left.operation, left.site, sections=self.sections)

    @property
    def sections_since_call(self) -> int:
        """Watched sections entered since the last Slipstream collective."""
        return self.sections - self._sections_before

    @property
    def torch_ops_since_call(self) -> int:
        """Collectives of torch's default group begun since the last Slipstream collective."""
        return self._count_torch_ops() - self._torch_ops_before

    def count_with(self, count: Callable[[], int]) -> None:
        """Set the function that counts the collectives that torch's default group has begun in this generation."""
        self._count_torch_ops, self._torch_ops_before = count, count()

    def position(self) -> RankPosition:
        """Return what this rank is doing: the inner one of a Slipstream collective and a watched section, or the last of them.

        A section that the host has left and the device has not counts as one that it is in, unless the host waits elsewhere.
        """
        collective, section, inside = self.collective, self.section, self.in_section
        if section is None or collective.since >= section.since and collective.waiting:
            return collective
        inside = inside or section.is_pending()
        return section.position(inside) if inside or collective.since < section.since else collective

    def start(self) -> None:
        self._signal.install()
        self._identity.update(self._signal.record())
        self._publish()  # the others need host and process from the start
        self._thread.start()

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._signal.remove()

    def new_generation(self) -> None:
        """Clear failures of the previous group; a rank that ended stays lost."""
        self.peer_failure, self.is_mismatch, self.failure = None, False, (0, "")
        self.section, self.in_section, self.sections, self._sections_before = None, False, 0, 0
        self.count_with(int)
        with self._lock:
            self._departures.clear()
            self._read_exits()

    def post(self, kind: str, **details: Any) -> None:
        """Publish an event to every rank. Never raises: if the store is gone, `store_error` says so."""
        with self._store_access():
            self._post(self._store.add("events", 1), kind=kind, **details)

    def _post(self, number: int, **event: Any) -> None:
        self._store.set(f"event/{number}", json.dumps({"rank": self.rank, **event}))
        self._store.add(ALARM_KEY, 1)

    @contextmanager
    def _store_access(self) -> Iterator[None]:
        """Hold the lock, and record an error of the store in `store_error` instead of raising it."""
        with self._lock:
            try:
                yield
            except RuntimeError as error:
                self.store_error = str(error).splitlines()[0]

    def find_peer_failure(self, wait: float, otherwise: str | None = None) -> None:
        """Search up to `wait` seconds for why another rank is gone; set `peer_failure` to the result, or to `otherwise`."""
        deadline = time.monotonic() + wait
        is_final = False
        while not is_final:
            is_final = True  # also if the store does not answer
            with self._store_access():
                if not self._read_exits():
                    self._read_events()
                    self._judge_departures()
                    known = self.peer_failure is not None and not self.peer_failure.endswith(PROCESS_ENDED)
                    is_final = known or time.monotonic() >= deadline
            if not is_final:
                time.sleep(0.05)
        self.peer_failure = self.peer_failure or otherwise

    # -- the heartbeat thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._pause()):
            try:
                with self._lock:
                    self._tick()
                self.store_error = None
                section = self.section
                if section is not None and (self.in_section or (section.is_pending() and self.position().on_device)):
                    section.check()
            except RuntimeError as error:  # torch's store errors: the report shows them, and the next tick tries again
                self.store_error = str(error).splitlines()[0]
                if self._stop.wait(self.PUBLISH_EVERY):
                    return

    def _pause(self) -> float:
        position = self.position()
        waits = position.waiting and (not position.watched or time.monotonic() - position.since > self.LOOK_EVERY)
        return self.LOOK_EVERY if waits else self.PUBLISH_EVERY

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._last_publish >= self.PUBLISH_EVERY * 0.9:
            self._last_publish = now
            self._publish()
        alarm = self._store.add(ALARM_KEY, 0)
        if alarm > self._alarm_seen:
            self._alarm_seen = alarm
            self._read_exits()
            self._read_events()
        position = self.position()
        if not position.waiting:
            return
        self._judge_departures()
        ask_after = self.section.ask_after if position.watched and self.section is not None else 0.5
        if now - position.since > ask_after and now - self._last_sample >= min(1.0, self.hang_warning / 8):
            self._last_sample = now
            self._sample()
            if now - position.since > self.hang_warning * 0.5:
                self._ask_for_stacks()

    def _publish(self) -> None:
        self._beat += 1
        record = {"beat": self._beat, **self._identity, **self.record()}
        self._store.set(f"heartbeat/{self.rank}", json.dumps(record))

    def record(self) -> dict[str, Any]:
        """Return where this rank is, with what all its threads have done by now."""
        sections, failure = self.failure
        return {
            **self.position().record(),
            "sections_since_call": self.sections_since_call,
            "torch_ops_since_call": self.torch_ops_since_call,
            "failure": failure if sections == self.sections else "",
        }

    def publish(self) -> None:
        """Publish where this rank is now, before it leaves."""
        with self._store_access():
            self._publish()

    def _read_exits(self) -> bool:
        if self.is_mismatch:
            return True  # the mismatch explains more than a rank that ended because of it
        for other in self.peers:
            if self._store.check([exit_key(other)]):
                notice = ExitNotice.from_json(self._store.get(exit_key(other)).decode())
                if notice.exit_code != 0:
                    self.peer_failure = str(notice)  # more precise than anything found before
                    return True
        return False

    def _read_events(self) -> None:
        count = self._store.add("events", 0)
        for number in range(self._events_seen + 1, count + 1):
            if not self._store.check([f"event/{number}"]):
                return  # not written yet: its writer raises the alarm again afterwards
            self._events_seen = number
            event = json.loads(self._store.get(f"event/{number}").decode())
            if event["rank"] != self.rank:
                self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "left":
            self._departures[event["rank"]] = event
            self._judge_departures()
        elif kind == "stack_wanted":
            if event["of"] == self.rank:
                self._store.set(event["key"], json.dumps(user_frames(sys._current_frames().get(self._main_thread))))
        elif event["generation"] == self.position().generation:
            if kind == "mismatch":
                self.peer_failure, self.is_mismatch = event["text"], True
            else:
                self.peer_failure = self.peer_failure or event["because"] or f"rank {event['rank']} gave up waiting in {event['call']}"

    def _judge_departures(self) -> None:
        """Record a failure if a rank has left without taking part in what this rank waits in."""
        position = self.position()
        counted = "sections" if position.watched else "sequence"
        for rank, event in self._departures.items():
            missed = not position.waiting or event[counted] < getattr(position, counted)
            if self.peer_failure is None and event["generation"] == position.generation and missed:
                last = f"; before that it was in {event['last']}" if event["last"] else ""
                self.peer_failure = f"rank {rank} left the group after {event['sequence']} collectives ({event['site']}){last}"

    # -- watching the others while waiting ------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the records of the others now, for a report that cannot wait for the next tick."""
        with self._store_access():
            self._sample()

    def _sample(self) -> None:
        keys = {f"heartbeat/{other}": peer for other, peer in self.peers.items()}
        present = [key for key, peer in keys.items() if peer.record or self._store.check([key])]  # once there, a record stays
        for key, data in zip(present, self._store.multi_get(present) if present else [], strict=True):
            self.peers[int(key.rpartition("/")[2])].update(json.loads(data.decode()))

    def _ask_for_stacks(self) -> None:
        for other, peer in self.peers.items():
            if not self._is_with_us(peer):
                self._ask_for_stack(other, peer)

    @property
    def _silent_after(self) -> float:
        return min(5.0, max(2.5, self.hang_warning / 2))

    def _is_with_us(self, peer: PeerStatus) -> bool:
        position, record = self.position(), peer.record
        compared = ("generation", "sequence", "watched", *(("sections_since_call", "operation") if position.watched else ()))
        if position.watched and (position.on_device or record.get("on_device")):  # hosts may be ahead of their devices by some sections
            compared = ("generation", "watched")
        same = all(record.get(name) == getattr(position, name) for name in compared)
        return bool(record.get("waiting")) and same and peer.silent < self._silent_after

    def _ask_for_stack(self, other: int, peer: PeerStatus) -> None:
        if peer.stack_asked < self.position().since or time.monotonic() - peer.stack_asked > 30:
            if peer.stack_asked < self.position().since:
                peer.stack = []  # belongs to an earlier wait
            peer.stack_asked = time.monotonic()
            number = self._store.add("events", 1)
            peer.stack_key = f"stack/{number}"
            self._post(number, kind="stack_wanted", of=other, key=peer.stack_key)
        elif self._store.check([peer.stack_key]):
            peer.stack = json.loads(self._store.get(peer.stack_key).decode())
        elif time.monotonic() - peer.stack_asked > 1.5 and self._is_here(peer):
            peer.stack = read_stack_by_signal(peer.record)

    # -- the report -----------------------------------------------------------------------------------------------

    def is_lowest_waiting(self) -> bool:
        """Whether no lower rank waits in the same call, so that one process prints the table."""
        return not any(self._is_with_us(peer) for other, peer in self.peers.items() if other < self.rank)

    def missing(self) -> list[int]:
        """Return the ranks that are not in the call that this rank waits in."""
        return [other for other, peer in self.peers.items() if not self._is_with_us(peer)]

    def ended_ranks(self) -> list[int]:
        """Return the ranks on this host whose processes have ended."""
        self.refresh()
        return [rank for rank, peer in self.peers.items() if self._is_here(peer) and process_state(peer.record) is not None]

    def _is_here(self, peer: PeerStatus) -> bool:
        return bool(peer.record.get("host") == self._identity["host"])

    def all_missing_silent(self, seconds: float) -> bool:
        """Whether every missing rank has been silent for that long (stopped, or with a blocked interpreter)."""
        missing = self.missing()
        return bool(missing) and all(self.peers[other].silent > seconds for other in missing)

    def table(self) -> str:
        """Return where every rank is, one line each, with the known stacks."""
        rows = {self.rank: (self._identity["host"], describe_position(self.record()), list[str]())}
        for rank, peer in self.peers.items():
            rows[rank] = peer.record.get("host", "?"), self._peer_state(peer), self._peer_stack(peer)
        lines = []
        for rank, (host, state, stack) in sorted(rows.items()):
            lines += [f"  rank {rank} (host {host}): {state}", *(f"      {line}" for line in stack)]
        if self.store_error:
            lines.append(f"  The rendezvous store does not answer ({self.store_error}), so this may be out of date.")
        return "\n".join(lines)

    def _peer_state(self, peer: PeerStatus) -> str:
        record = peer.record
        for last in (self._completed, self.position()):
            if last.operation and not last.waiting and last.is_after(record):
                record = {**record, **last.record()}  # its record is older than what it took part in
        state = describe_position(record)
        if not peer.record or self._is_with_us(peer):
            return state
        condition = process_state(peer.record) if self._is_here(peer) else None
        if peer.silent < self._silent_after:
            return f"{condition}; before that {state}" if condition else state
        return f"no sign of life for {peer.silent:.0f} s ({condition or 'its interpreter does not answer'}); before that {state}"

    def _peer_stack(self, peer: PeerStatus) -> list[str]:
        waits = peer.record.get("waiting") and peer.silent < self._silent_after
        return [] if waits or peer.stack_asked < self.position().since else peer.stack
