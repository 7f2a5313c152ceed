"""The environment variables of a rank: the only file in this folder that changes the variables of the process.

A rank finds itself through the variables that torch's elastic agent sets for workers, so code under test cannot tell the pool from a
launched job. Every run starts from the same variables.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from slipstream.config import sources

__all__ = ["rank_variables", "replace", "snapshot"]


def snapshot() -> dict[str, str]:
    """Return a copy of this process's variables."""
    return dict(sources.environment())


def replace(variables: Mapping[str, str]) -> None:
    """Make this process's variables exactly these."""
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})


def rank_variables(rank: int, size: int, *, run_id: str, attempt: int, port: int) -> dict[str, str]:
    """Return what the elastic agent would set for this rank of a job on one machine, with gloo on the loopback interface.

    >>> rank_variables(1, 2, run_id="pool", attempt=3, port=4000)["TORCHELASTIC_RESTART_COUNT"]
    '3'
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt),
        "GLOO_SOCKET_IFNAME": _loopback(),
        "OMP_NUM_THREADS": "1",
    }


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
