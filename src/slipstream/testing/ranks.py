"""A pool of gloo ranks on this machine, kept alive between runs: a distributed test costs milliseconds.

    with ranks(2) as pool:
        assert pool.run(lambda: PartialState().process_index) == [0, 1]

Promises: every run starts fresh (own store, own attempt, closed runtime, same seeds and variables); a rank that dies or does not finish is
reported with its signal or its stacks, and the next run has a full pool again; what a rank left behind fails the run; nothing
listens off 127.0.0.1. It never forks the calling process, which may have threads and devices.

How: one fresh interpreter (`testing/server.py`) imports torch and forks the ranks (`testing/worker.py`). Functions and results travel as
pickles over inherited socket pairs between these processes alone.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from slipstream.errors import ConfigError
from slipstream.testing import parcel, wire
from slipstream.testing.link import Link
from slipstream.testing.outcome import Outcome, failure

__all__ = ["RankPool", "ranks"]

_TORCH = ("torch", "torch.distributed", "torch._dynamo")
_PRELOAD = (*_TORCH, "cloudpickle", "psutil", "slipstream.accelerator", "slipstream.inference.stages", "slipstream.testing.worker")
"""`torch._dynamo` is what the first optimizer and the first replica import. The rest each rank imports by itself, after every fork."""
_CLEANING_SECONDS = 20.0
_STACKS_SECONDS = 0.5
_DEAD_OR_STUCK = (EOFError, ConnectionError, TimeoutError)  # what a channel raises then; `_gather` finds out which of the two it is
_FIRST_FRAME_OF_OURS = f'\n  File "{Path(__file__).with_name("worker.py")}"'

Result = TypeVar("Result")


def ranks(size: int) -> RankPool:
    """A pool of `size` ranks: use it with `with`, or `close()` it. Nothing is started before the first run.

    >>> with ranks(2) as pool:
    ...     results = pool.run(lambda word: word * 2, "ha")
    ...     outcomes = pool.outcomes(lambda: 1 / 0)
    >>> results
    ['haha', 'haha']
    >>> [outcome.summary for outcome in outcomes]
    ['ZeroDivisionError: division by zero', 'ZeroDivisionError: division by zero']
    """
    return RankPool(size)


class RankPool:
    """The ranks of one test session; see `ranks`. Not for several threads at once."""

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"ranks({size!r}): a pool has at least one rank; write ranks(2)")
        self.size = size
        self._attempt = 0
        self._link: Link | None = None
        self._whole = False

    def run(
        self,
        function: Callable[..., Result],
        /,
        *args: Any,
        timeout: float = 30.0,
        environ: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Result]:
        """Call `function(*args, **kwargs)` on every rank and give back the results, by rank.

        Raises `RankFailure` if a rank raises, dies or does not finish within `timeout` seconds. `environ` adds variables for this run.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, timeout=timeout, environ=environ, **kwargs)
        if any(outcome.failed for outcome in outcomes):
            raise failure(_name(function), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 30.0,
        patience: float = math.inf,
        environ: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """As `run`, for what should go wrong: every rank's value, exception or end, by rank.

        Where a rank is meant to be stuck, `patience` ends the run so many seconds after the last of the others has finished.
        """
        __tracebackhide__ = True
        body = parcel.pack(function, args, kwargs)
        try:
            outcomes, left = self._one_run(body, timeout, patience, dict(environ or {}))
        except BaseException:
            self.close()  # interrupted in the middle of a conversation (control-C, a time limit of pytest): begin anew next time
            raise
        for outcome in outcomes:
            sys.stdout.write("".join(f"[rank {outcome.rank}] {line}\n" for line in outcome.output.splitlines()))
        if left:
            raise failure(_name(function), outcomes, left)
        return outcomes

    def _one_run(self, body: bytes, timeout: float, patience: float, environ: dict[str, str]) -> tuple[list[Outcome], list[str]]:
        link, port = self._begin()
        run = _Run(link, deadline=time.monotonic() + timeout, seconds=timeout, patience=patience)
        run.send({"attempt": self._attempt, "port": port, "environ": environ}, body)
        run.collect()
        left = run.clean_up()
        outcomes = [run.outcome(rank) for rank in range(self.size)]
        if run.lost or left:
            self._whole = False
            link.ask("stop", "stopped")  # now, not at the next run: a stuck rank may be using a core
        return outcomes, left

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, by rank (starts them if need be)."""
        return list(self._ready().pids)

    @property
    def server_pid(self) -> int | None:
        """The process id of the interpreter that ranks are forked from, if it runs."""
        return self._link.process.pid if self._link is not None else None

    def close(self) -> None:
        """End the ranks and their server. A closed pool starts again at its next run."""
        if self._link is not None:
            link, self._link, self._whole = self._link, None, False
            link.close()

    def _begin(self) -> tuple[Link, int]:
        """A whole pool, and the port of this run's store."""
        while True:
            link = self._ready()
            self._attempt += 1
            port: int = link.ask("begin", "begun", attempt=self._attempt)["port"]
            if not link.deaths:
                return link, port
            self._whole = False  # a rank ended between two runs: that is nobody's outcome

    def _ready(self) -> Link:
        if self._link is not None and self._link.process.poll() is not None:
            self.close()
        if self._link is None:
            self._link = Link.start(size=self.size, preload=_preload())
        if not self._whole:
            self._link.fork()
            self._whole = True
        return self._link

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class _Run:
    """One function on every rank: sent, collected, cleaned up after."""

    link: Link
    deadline: float
    seconds: float
    patience: float = math.inf
    """Seconds from the reply of one rank to that of the next, at most."""
    replies: dict[int, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    printed: dict[int, str] = field(default_factory=dict)
    """What a stuck rank printed before it was asked for its stacks."""

    @property
    def lost(self) -> set[int]:
        """Ranks that the pool can no longer use."""
        return self.stuck | self.link.deaths.keys()

    def send(self, header: dict[str, Any], body: bytes) -> None:
        for channel in self.link.channels:
            channel.settimeout(self.seconds)
            with contextlib.suppress(*_DEAD_OR_STUCK):
                wire.send(channel, header, body)

    def collect(self) -> None:
        """Wait for every rank's reply or end, until the deadline; a failure is made known to the ranks that still wait."""
        self.stuck = self._gather(self.replies, self.deadline, self.patience)
        if self.stuck:
            self.printed = {rank: self.link.printed(rank) for rank in self.stuck}
            self.link.ask("stacks", "asked", ranks=sorted(self.stuck))
            time.sleep(_STACKS_SECONDS)

    def clean_up(self) -> list[str]:
        """Let the ranks close what the run opened; one line for everything that is left. Lost ranks make a new pool instead."""
        if self.lost:
            return []
        for channel in self.link.channels:
            with contextlib.suppress(*_DEAD_OR_STUCK):
                wire.send(channel, {"kind": "reset"})
        clean: dict[int, tuple[dict[str, Any], bytes]] = {}
        silent = self._gather(clean, time.monotonic() + _CLEANING_SECONDS)
        lines = [f"rank {rank} did not finish closing its runtime within {_CLEANING_SECONDS:.0f} s" for rank in sorted(silent)]
        lines += [f"rank {notice.rank} ended while it closed its runtime: {notice}" for notice in self.link.deaths.values()]
        for rank, (header, _) in sorted(clean.items()):
            lines += [f"rank {rank} could not close its runtime:\n{header['trouble']}"] if header["trouble"] else []
            lines += [f"rank {rank} left behind: {thing}" for thing in header["left"]]
        return lines

    def outcome(self, rank: int) -> Outcome:
        header, body = self.replies.get(rank, ({}, b""))
        base = Outcome(rank=rank, output=self.link.printed(rank), traceback=header.get("text", ""), when=header.get("when", float("inf")))
        if rank in self.stuck:
            lag = "" if math.isinf(self.patience) else f", or {self.patience:g} s after the others"
            limit = TimeoutError(f"rank {rank} did not finish within {self.seconds:g} s{lag}")
            stacks = base.output.partition(_FIRST_FRAME_OF_OURS)[0].rstrip() or "unknown: it did not answer"
            return replace(base, error=limit, traceback=f"{limit}; its threads were at\n{stacks}", output=self.printed[rank], stuck=True)
        if rank in self.link.deaths and not header:
            return replace(base, exit=self.link.deaths[rank], when=0.0)  # a death comes before the failures that it causes
        if header["kind"] == "error":
            return replace(base, error=parcel.unpack(body))
        return replace(base, value=parcel.unpack(body))

    def _gather(self, into: dict[int, tuple[dict[str, Any], bytes]], deadline: float, patience: float = math.inf) -> set[int]:
        """One frame from each rank that lives; gives back the ranks that sent none in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link.control, selectors.EVENT_READ)
            for rank, channel in enumerate(self.link.channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while pending := set(range(self.link.size)) - into.keys() - self.link.deaths.keys():
                ready = selector.select(deadline - time.monotonic()) if deadline > time.monotonic() else []
                if not ready:
                    return pending
                for key, _ in ready:
                    if key.data is None:
                        self.link.hear()
                    else:
                        selector.unregister(key.fileobj)
                        self._take(key.data, into)
                        deadline = min(deadline, time.monotonic() + patience)
        return set()

    def _take(self, rank: int, into: dict[int, tuple[dict[str, Any], bytes]]) -> None:
        """One frame of one rank; of a rank that has just died, nothing: the server is about to say so."""
        with contextlib.suppress(*_DEAD_OR_STUCK):
            into[rank] = wire.receive(self.link.channels[rank])
            if into[rank][0]["kind"] == "error":
                self.link.tell("failed", rank=rank, reason=into[rank][0]["summary"])


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _preload() -> list[str]:
    """What the server imports before it forks; with pytest its assertion rewriter, which rewritten asserts refer to."""
    return [*_PRELOAD, *(["_pytest.assertion.rewrite"] if "_pytest.assertion.rewrite" in sys.modules else [])]
