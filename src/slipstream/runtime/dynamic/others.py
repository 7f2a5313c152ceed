"""Which of the other processes are gone while work is handed out: what the launcher says, what they said themselves, and silence.

A process is gone when the launcher has told its end, when it has said that it leaves the work, or when its beacon (`comm/beacon.py`,
a beat each second from a thread of its own) has been silent for `SILENCE` seconds by this process's own clock. Silence does not count for a
process of this machine that runs: it is busy in code that lets no other thread in. It may still be wrong (a process that was
stopped comes back): its items are then worked on twice, and the first result counts.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from slipstream.comm.stack import process_state
from slipstream.launch.contract import ExitNotice, exit_key

__all__ = ["LEFT", "SILENCE", "Others"]

SILENCE = 30.0
"""Seconds without a beat after which a process counts as gone."""
LEFT = "left"
"""What a process that leaves the work before its end writes where its claims stand."""


class Others:
    """The other ranks, as the rendezvous store shows them.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> others = Others(store, rank=0, world_size=2)
    >>> others.gone({1: ""})
    {}
    >>> store.set(exit_key(1), ExitNotice(1, "node0", 4711, -9).to_json())
    >>> others.gone({1: ""})
    {1: 'rank 1 (host node0, pid 4711) was ended by SIGKILL'}
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._host = socket.gethostname()
        self._ranks = [other for other in range(world_size) if other != rank]
        self._beats: dict[int, tuple[int, float]] = {}
        self.ended: dict[int, str] = {}
        """Those whose end the launcher has told, as far as `gone` has looked."""

    def gone(self, holds: dict[int, str]) -> dict[int, str]:
        """The ranks that are gone, and how; `holds` is what each has written about its claims."""
        found: dict[int, str] = {}
        for rank in self._ranks:
            if rank not in self.ended and self._store.check([exit_key(rank)]):
                self.ended[rank] = str(ExitNotice.from_json(self._store.get(exit_key(rank)).decode()))
            if rank in self.ended:
                found[rank] = self.ended[rank]
            elif holds.get(rank) == LEFT:
                found[rank] = f"rank {rank} left the work before its end"
            elif (silent := self._silent(rank)) > SILENCE:
                found[rank] = f"rank {rank} has shown no sign of life for {silent:.0f} s"
        return found

    def _silent(self, rank: int) -> float:
        key, now = f"beacon/{rank}", time.monotonic()
        if not self._store.check([key]):
            return 0.0
        note = json.loads(self._store.get(key).decode())
        if self._beats.get(rank, (-1, 0.0))[0] != note["beat"]:
            self._beats[rank] = (note["beat"], now)
        silent = now - self._beats[rank][1]
        return 0.0 if silent > SILENCE and self._runs_here(note) else silent

    def _runs_here(self, note: dict[str, Any]) -> bool:
        if note.get("host") != self._host:
            return False
        state = process_state(note) or "runs"
        return not state.endswith(("is gone", "ended", "stopped by a signal"))
