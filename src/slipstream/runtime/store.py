"""The rendezvous store: opened once in a process and kept for all generations of the group.

Under a launcher its agent serves the store and every rank is a client; otherwise rank 0 serves it, on one machine on the loopback
interface only. How it is served and reached stands in `launch/store.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from slipstream.errors import StateError
from slipstream.launch.contract import attempt_prefix
from slipstream.launch.lookups import short_lookups
from slipstream.launch.store import Place, address_towards, connect as connect_to, listen, quietly, serve
from slipstream.runtime.process import Process

__all__ = ["connect", "own_address", "read_now", "second_connection"]

_ABSENT = "\0absent"
"""What no value of ours is."""

_PATIENCE = 120.0
"""Seconds that rank 0 may take to appear."""
_SILENCE = 300.0
"""Seconds without an answer after which a connection counts as lost."""


def connect(process: Process) -> Store:
    """The store of this job, below the prefix of this attempt."""
    if process.master_addr is None or process.master_port is None:
        raise StateError(
            f"this is process {process.rank} of {process.world_size} (told by {process.cluster}), but nothing says where they meet: "
            "set MASTER_ADDR and MASTER_PORT, or start the script with `slipstream launch`"
        )
    with short_lookups():
        if process.rank == 0 and not process.agent_store:
            host = "127.0.0.1" if process.one_machine else process.master_addr
            store: Store = serve(*listen(host, process.master_port, "MASTER_PORT"))
        else:
            store = connect_to(Place(process.master_addr, process.master_port), patience=_PATIENCE, limit=_SILENCE, check=_nothing)
    return PrefixStore(attempt_prefix(process.run_id, process.attempt), store)


def read_now(store: Any, key: str) -> bytes | None:
    """The value of a key, or None; never a wait, as `get` is for a key that another rank has deleted since it was seen.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("a", "1")
    >>> read_now(store, "a"), read_now(store, "b"), store.check(["b"])
    (b'1', None, False)
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # which changes nothing, and gives what is there
    return None if value == _ABSENT.encode() else value


def _nothing() -> None:
    return None


def own_address(master_addr: str, environ: Mapping[str, str]) -> str:
    """Where other machines reach this one: the address of the interface that gloo is told to use, or of the way to the main process.

    The interface counts for more, as a machine's own name often leads to its loopback interface.

    >>> own_address("127.0.0.1", {})
    '127.0.0.1'
    """
    import psutil

    name = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    entries = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [entry.address for entry in entries if entry.family == family and "%" not in entry.address]
        if found:
            return str(found[0])
    return address_towards(master_addr)


def second_connection(store: Store) -> Store:
    """A connection of its own to the same keys, so that a blocking call on one does not stop the other."""
    clone: Any = getattr(store, "clone", None)
    if clone is None:
        return store
    with short_lookups(), quietly():
        made: Store = clone()
    return made
