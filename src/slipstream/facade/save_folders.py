"""Whether all processes give `save_state` the same folder. Found without a wait: the main process may save alone, and first or last.

Each process leaves the folder of its save in the rendezvous store, under a name that the processes have in common: the Accelerator, the
place in the run, the lines of the script that led to the call, and how often they did. Whoever finds another folder there adds its own
and raises before it writes. The others hear of it when they have written, or with their next call about checkpoints.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from hashlib import blake2b
from typing import Any

import torch

from slipstream.checkpoint.store import is_url, local_path, redacted
from slipstream.comm.sites import call_path, call_site
from slipstream.errors import ConfigError
from slipstream.runtime.runtime import Runtime

__all__ = ["SaveFolders", "same_folder"]

_Told = dict[str, Any]
"""Rank, host, the folder as it was given, and where it is."""


class SaveFolders:
    """The folders of the saves of one Accelerator."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = next(runtime.savers)
        self._calls: Counter[str] = Counter()
        self._note: str | None = None
        """The name of the last save."""
        self._own: _Told = {}

    def announce(self, folder: str, stamp: str, *, machine: int | None) -> None:
        """Tells the folder of a save that begins; raises if another process gave another one. `machine`: whose processes are compared."""
        self.check()
        process = self._runtime.process
        if process.world_size == 1:
            return
        path = f"{stamp} {machine} {call_path()}"
        self._calls[path] += 1
        digest = blake2b(f"{path} {self._calls[path]}".encode(errors="replace"), digest_size=8).hexdigest()
        found = folder.rstrip("/") if is_url(folder) else os.path.realpath(os.path.expanduser(local_path(folder)))
        self._own = {"rank": process.rank, "host": process.host, "given": redacted(folder), "folder": found, "site": call_site()}
        self._note = f"save/{self._number}/{digest}"
        try:
            first = json.loads(self._runtime.notes.agree(self._note, json.dumps(self._own)))
            if not same_folder(first, self._own):
                self._runtime.notes.append(f"{self._note}/other", json.dumps(self._own) + "\n")
        except torch.distributed.DistError:  # the process that serves the store is gone, and with it whoever could be asked
            self._note = None
        self.check()

    def check(self) -> None:
        """Raises if another process gave another folder for the last save."""
        note, self._note = self._note, None
        if note is None:
            return
        try:
            others = self._runtime.notes.read(f"{note}/other")
            first = self._runtime.notes.agree(note, json.dumps(self._own)) if others else ""
        except torch.distributed.DistError:
            return
        if not others:
            self._note = note
            return
        told = {known["rank"]: known for known in (self._own, *map(json.loads, [first, *others.splitlines()]))}
        shown = "given" if len({known["given"] for known in told.values()}) > 1 else "folder"  # one path in two working directories
        given = ", ".join(f"rank {rank}: {redacted(told[rank][shown])!r}" for rank in sorted(told))
        raise ConfigError(
            f"save_state at {self._own['site']} was given different folders for one checkpoint ({given}). The main process writes what all "
            "share, and each other process adds a file of its own, so all of them have to name the same folder: make it of the step or the "
            "epoch, and not of the rank, the time or a random name. To save on the main process alone, call save_state under "
            f"`if accelerator.is_main_process`. (Raised on rank {self._own['rank']}.)"
        )


def same_folder(first: _Told, second: _Told) -> bool:
    """Whether two processes mean one folder. Machines may see a disk under different paths: of those, the last name is compared.

    >>> same_folder({"host": "a", "folder": "/runs/1"}, {"host": "a", "folder": "/runs/2"})
    False
    """
    here, there = str(first["folder"]), str(second["folder"])
    if first["host"] != second["host"] and not is_url(here) and not is_url(there):
        return os.path.basename(here) == os.path.basename(there)
    return here == there
