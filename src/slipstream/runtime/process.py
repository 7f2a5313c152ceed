"""Who this process is among the others: a plain record, made once by `clusters.detect` and never changed."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Process"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """Rank, world and node of this process, and where the job meets.

    >>> Process().is_main, Process(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, num_nodes=2).is_last
    (True, True)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    cluster: str = "single"
    """The name of the cluster class that found this out: torchrun, slurm, openmpi, intelmpi, lsf, kubernetes, sagemaker, single."""
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str = "none"
    attempt: int = 0
    """How often the launcher has restarted the job."""
    agent_store: bool = False
    """The store at master_addr:master_port is served by the launcher's agent, so every rank is a client of it."""

    @cached_property
    def host(self) -> str:
        """The name of this machine; the system is asked for it when somebody wants to know."""
        return socket.gethostname()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    @property
    def one_machine(self) -> bool:
        """Every rank is on this host, so nothing needs to listen off the loopback interface."""
        return self.num_nodes == 1
