"""The rendezvous store: opened once in a process and kept for all generations of the group.

Under a launcher its agent serves the store and every rank is a client; otherwise rank 0 serves it. On one machine the server
listens on the loopback interface only: torch's own server would bind every interface, so it is given a socket of ours.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from slipstream.errors import StateError
from slipstream.launch.contract import attempt_prefix
from slipstream.runtime.process import Process

__all__ = ["connect", "second_connection"]

_LOOPBACK = "127.0.0.1"


def connect(process: Process, connect_timeout: float = 120.0) -> Store:
    """The store of this job, below the prefix of this attempt."""
    if process.master_addr is None or process.master_port is None:
        raise StateError(
            f"this is process {process.rank} of {process.world_size} (told by {process.cluster}), but nothing says where they meet: "
            "set MASTER_ADDR and MASTER_PORT, or start the script with `slipstream launch`"
        )
    serves = process.rank == 0 and not process.agent_store
    timeout = timedelta(seconds=connect_timeout)
    try:
        store = (
            _serve(process, timeout)
            if serves
            else TCPStore(process.master_addr, process.master_port, None, False, timeout, wait_for_workers=False)
        )
    except (OSError, RuntimeError) as error:
        raise StateError(_explain(process, serves, connect_timeout, error)) from None
    return PrefixStore(attempt_prefix(process.run_id, process.attempt), store)


def _serve(process: Process, timeout: timedelta) -> TCPStore:
    assert process.master_port is not None
    if not process.one_machine:
        return TCPStore(str(process.master_addr), process.master_port, None, True, timeout, wait_for_workers=False)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOOPBACK, process.master_port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return TCPStore(_LOOPBACK, process.master_port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def _explain(process: Process, serves: bool, seconds: float, error: Exception) -> str:
    where = f"{process.master_addr}:{process.master_port}"
    cause = str(error).splitlines()[0]
    if serves:
        return f"rank 0 cannot listen at {where} ({cause}): set MASTER_PORT to a port that is free, the same for all ranks"
    return (
        f"rank {process.rank} on {process.host} cannot reach the main process at {where} within {seconds:.0f} s ({cause}): "
        "check that rank 0 runs, that the name resolves here and that no firewall is between"
    )


def second_connection(store: Store) -> Store:
    """A connection of its own to the same keys, so that a blocking call on one does not stop the other."""
    clone: Any = getattr(store, "clone", None)
    made: Store = clone() if clone is not None else store
    return made
