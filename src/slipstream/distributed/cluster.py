"""Detect which system started this process, and read rank, world size, node and rendezvous address into a `Process`.

There is one small class per system, and `CLUSTERS` asks them in order: Kubernetes (one process per pod, no launcher), torchrun (also
`slipstream launch`, Ray and DeepSpeed; more precise than the rest), LSF (jsrun sets Open MPI's variables too, so it comes before), Open
MPI, Intel MPI and MVAPICH (their processes inherit Slurm variables of a helper, so before Slurm), Slurm, SageMaker, and a single process.
Variables that contradict each other or are half set are a `ConfigError` that lists what is set, what is missing and what to do; nothing
is guessed. `detect` reads only the mapping it is given; nothing here opens a connection or imports torch. `this_process` answers without
creating a runtime.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from slipstream.config.sources import environment
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.distributed.process_group import Runtime

__all__ = [
    "CLUSTERS", "Cluster", "Environ", "Kubernetes", "Lsf", "Mpi", "Process", "SageMaker", "Single", "Slurm", "Torchrun",
    "VARIABLE_MEANING", "check_rank_in_range", "derived_port", "describe_set", "detect", "expand_hosts", "loaded_runtime", "raise_half_set",
    "read_number", "read_text", "require_numbers", "task_counts", "this_process",
]


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
        """The name of this machine, read when it is first needed."""
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


Environ = Mapping[str, str]

VARIABLE_MEANING = {
    "RANK": "the number of this process, counted from 0 over all machines",
    "WORLD_SIZE": "how many processes there are in all",
    "LOCAL_RANK": "the number of this process on its machine, from 0",
    "LOCAL_WORLD_SIZE": "how many processes there are on this machine",
    "MASTER_ADDR": "name or address of the machine where rank 0 runs",
    "MASTER_PORT": "a free port on that machine, the same number for every process",
}


def read_text(environ: Environ, *names: str) -> str | None:
    """Return the first of these variables that is set; a blank one counts as not set.

    >>> read_text({"A": " ", "B": "x"}, "A", "B")
    'x'
    """
    return next((value for name in names if (value := environ.get(name, "").strip())), None)


def describe_set(environ: Environ, *names: str) -> str:
    """Return `NAME=value` for those of the names that are set."""
    return ", ".join(f"{name}={value}" for name in names if (value := read_text(environ, name)) is not None) or "none"


def read_number(environ: Environ, *names: str, least: int = 0, most: int = 10**9) -> int | None:
    """Return the first of these variables that is set, as a whole number from `least` to `most`."""
    for name in names:
        value = read_text(environ, name)
        if value is None:
            continue
        if not (value.isascii() and value.isdigit() and len(value) <= 18 and least <= int(value) <= most):
            span = f"of at least {least}" if most == 10**9 else f"from {least} to {most}"
            raise ConfigError(f"{name}={value!r} in the environment is not a whole number {span}. Correct it, or unset {name}.")
        return int(value)
    return None


def require_numbers(environ: Environ, system: str, *groups: tuple[str, ...]) -> list[int]:
    """Return a number per group of alternative names; the groups that have none are reported together."""
    numbers = [read_number(environ, *names) for names in groups]
    missing = [names[0] for names, value in zip(groups, numbers, strict=True) if value is None]
    if missing:
        raise_half_set(environ, system, tuple(name for names in groups for name in names), missing)
    return [value for value in numbers if value is not None]


def raise_half_set(environ: Environ, system: str, looked_at: tuple[str, ...], missing: list[str], why: str = "") -> NoReturn:
    """Raise for rank variables of which some are missing: what is set, what is not, what to set or unset."""
    found = tuple(name for name in looked_at if read_text(environ, name) is not None)
    wanted = ", ".join(name + (f" ({VARIABLE_MEANING[name]})" if name in VARIABLE_MEANING else "") for name in missing)
    raise ConfigError(
        f"The variables that tell this process its rank ({system}) are half set{why}.\n"
        f"  set:     {describe_set(environ, *found)}\n"
        f"  missing: {wanted}\n"
        f"Set what is missing, or unset {', '.join(found)} to run as a single process. `slipstream launch` sets all of them by itself."
    )


def check_rank_in_range(system: str, low_name: str, low: int, high_name: str, high: int) -> None:
    """Raise unless a rank is smaller than the number of ranks."""
    if low >= high:
        span = f"it has to be one of 0 to {high - 1}" if high else "there has to be at least one"
        raise ConfigError(
            f"{low_name}={low} does not fit {high_name}={high} ({system}): {span}. "
            f"Correct one of them, or unset both to run as a single process."
        )


def derived_port(job: str) -> int:
    """Return a port that every rank of the job computes alike, below the range of ports for outgoing connections.

    >>> derived_port("1234.0") == derived_port("1234.0"), 12000 <= derived_port("1234.0") < 28000
    (True, True)
    """
    return 12000 + zlib.crc32(job.encode()) % 16000


def expand_hosts(hosts: str) -> tuple[str, ...]:
    """Return the host names that a Slurm host list stands for, in order.

    >>> expand_hosts("node[001-003,007],gpu1")
    ('node001', 'node002', 'node003', 'node007', 'gpu1')
    >>> expand_hosts("r[1-2]n[09-10]-ib")
    ('r1n09-ib', 'r1n10-ib', 'r2n09-ib', 'r2n10-ib')
    """
    names: list[str] = []
    # A comma separates hosts only outside brackets: it is followed by no "]" before the next "[".
    for part in re.split(r",(?![^\[\]]*\])", hosts.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", part.strip())
        plain, ranges = pieces[::2], pieces[1::2]
        if not part.strip() or any(mark in piece for piece in plain for mark in "[] \t"):
            raise ConfigError(f"{hosts!r} is not a list of hosts such as 'node[001-003,007],gpu1' (at {part!r}). Set MASTER_ADDR instead.")
        expanded = [_expand_range(text, hosts) for text in ranges]
        names += ["".join(_interleave(plain, values)) for values in product(*expanded)]
    return tuple(names)


def _interleave(plain: list[str], values: tuple[str, ...]) -> list[str]:
    return [piece for pair in zip(plain, (*values, ""), strict=True) for piece in pair]


def _expand_range(ranges: str, hosts: str) -> list[str]:
    numbers: list[str] = []
    for span in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span.strip(), re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{span!r} in the list of hosts {hosts!r} is not a number or an ascending range. Set MASTER_ADDR instead.")
        numbers += [str(value).zfill(len(match[1])) for value in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def task_counts(environ: Environ, name: str) -> list[int]:
    """Return the tasks per node from a list such as `4(x2),3`: two nodes with four tasks, then one with three.

    >>> task_counts({"SLURM_TASKS_PER_NODE": "4(x2),3"}, "SLURM_TASKS_PER_NODE")
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in filter(None, (read_text(environ, name) or "").split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if match is None:
            raise ConfigError(
                f"{name}={environ[name]!r} is not a list of task counts such as '4(x2),3'. Unset {name} if Slurm did not set it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHELLS = ("bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh")


class Cluster(Protocol):
    """A system that starts processes and tells each its rank through variables."""

    def detect(self, environ: Environ) -> bool: ...

    def process(self, environ: Environ) -> Process: ...


def detect(environ: Environ) -> Process:
    """Return the process that these variables describe, by the first system of `CLUSTERS` that recognises them.

    >>> detect({}).cluster
    'single'
    >>> me = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"})
    >>> me.rank, me.local_rank, me.one_machine
    (1, 1, True)
    """
    cluster = next(cluster for cluster in CLUSTERS if cluster.detect(environ))
    process = cluster.process(environ)
    _check_leftovers(environ, process)
    return process


def _with_rendezvous(environ: Environ, process: Process, job: str | None, first_host: str | None = None) -> Process:
    """Add where the processes meet: MASTER_ADDR and MASTER_PORT if set; otherwise loopback or the first host, and a port of the job."""
    address, port = read_text(environ, "MASTER_ADDR"), _read_port(environ, "MASTER_PORT")
    if process.world_size > 1:
        address = address or ("127.0.0.1" if process.num_nodes == 1 else first_host)
        port = port or (derived_port(job) if job else None)
        missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
        if missing:
            wanted = " and ".join(f"{name} ({VARIABLE_MEANING[name]})" for name in missing)
            raise ConfigError(
                f"Rank {process.rank} of {process.world_size} was started by {process.cluster}, whose variables do not say where the "
                f"processes meet. Set {wanted} for every process: `export {missing[0]}=...` in the job script. Where mpirun starts the "
                f"processes it has to pass it on (Open MPI: `-x {missing[0]}`, Intel MPI and MPICH: `-genvlist {','.join(missing)}`)."
            )
    return replace(process, master_addr=address, master_port=port, run_id=job or "none")


def _read_port(environ: Environ, *names: str) -> int | None:
    return read_number(environ, *names, least=1, most=65535)


def _derive_nodes(rank: int, world: int, local_rank: int, local_world: int) -> tuple[int, int]:
    """Return (node, nodes) for systems that do not number their machines: filled one after the other, or in turn.

    With uneven machines the number of nodes is an estimate; that it is more than one is certain.
    """
    nodes = -(-world // local_world)
    if rank % local_world != local_rank and world % local_world == 0 and rank // nodes == local_rank:
        return rank % nodes, nodes
    return min(rank // local_world, nodes - 1), nodes


def _check_local(system: str, local_rank: tuple[str, int], local_world: tuple[str, int], world: tuple[str, int]) -> None:
    check_rank_in_range(system, *local_rank, *local_world)
    if local_world[1] > world[1]:
        raise ConfigError(
            f"{local_world[0]}={local_world[1]} is more than {world[0]}={world[1]} ({system}): one machine cannot have more processes than "
            f"there are in all. Correct one of them, or unset both to run as a single process."
        )


def _make_process(system: str, ranks: tuple[int, int], local: tuple[int, int], node: tuple[int, int], **more: Any) -> Process:
    """Return a process of (rank, world), (local rank, local world) and (node, nodes)."""
    (rank, world), (local_rank, local_world), (node_rank, nodes) = ranks, local, node
    return Process(
        rank=rank, world_size=world, local_rank=local_rank, local_world_size=local_world, node_rank=node_rank, num_nodes=nodes,
        cluster=system, **more,
    )


# The systems ----------------------------------------------------------------------------------------------------------


class Torchrun:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT: what torchrun and most launchers set."""

    name = "torchrun"
    looked_at = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def detect(self, environ: Environ) -> bool:
        return all(read_text(environ, name) is not None for name in ("RANK", "WORLD_SIZE"))

    def process(self, environ: Environ) -> Process:
        rank, world = require_numbers(environ, self.name, ("RANK",), ("WORLD_SIZE",))
        check_rank_in_range(self.name, "RANK", rank, "WORLD_SIZE", world)
        local_rank, local_world = self._local(environ, rank, world)
        _check_local(self.name, ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world), ("WORLD_SIZE", world))
        derived_node, derived_nodes = _derive_nodes(rank, world, local_rank, local_world)
        nodes = read_number(environ, "GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE", least=1) or derived_nodes
        node = read_number(environ, "GROUP_RANK", "NODE_RANK", "CROSS_RANK")
        node = min(derived_node, nodes - 1) if node is None else node
        check_rank_in_range(self.name, "the node's number", node, "the number of nodes", nodes)
        if world > 1:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if read_text(environ, name) is None]
            if missing:
                raise_half_set(environ, self.name, self.looked_at, missing)
        _check_copied_rank(environ, rank, world)
        return _make_process(
            self.name, (rank, world), (local_rank, local_world), (node, nodes),
            master_addr=read_text(environ, "MASTER_ADDR"),
            master_port=_read_port(environ, "MASTER_PORT"),
            run_id=read_text(environ, "TORCHELASTIC_RUN_ID") or "none",
            attempt=read_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
            agent_store=(read_text(environ, "TORCHELASTIC_USE_AGENT_STORE") or "").lower() in ("true", "1"),
        )

    def _local(self, environ: Environ, rank: int, world: int) -> tuple[int, int]:
        """Rank and world on this machine; derived only where all processes are certainly on one machine."""
        local_rank = read_number(environ, "LOCAL_RANK")
        local_world = read_number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", least=1)
        # In a pod, older operators give rank 0 "localhost" although the other ranks are in other pods.
        loopback = read_text(environ, "MASTER_ADDR") in _LOOPBACK and read_text(environ, "KUBERNETES_SERVICE_HOST") is None
        if world == 1 or loopback or read_number(environ, "GROUP_WORLD_SIZE", "NNODES", least=1) == 1:
            return rank if local_rank is None else local_rank, local_world or world
        if local_rank is None or local_world is None:
            missing = [name for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world)) if value is None]
            raise_half_set(environ, self.name, self.looked_at, missing, why=", and the job may span several machines")
        return local_rank, local_world


@dataclass(frozen=True)
class Mpi:
    """An MPI runtime: the names under which it gives the same four numbers to every process that mpirun starts."""

    name: str
    rank: tuple[str, ...]
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    job: tuple[str, ...]
    node: tuple[str, ...] = ()

    def detect(self, environ: Environ) -> bool:
        return read_text(environ, *self.rank) is not None and read_text(environ, *self.local_rank) is not None

    def process(self, environ: Environ) -> Process:
        rank, world, local_rank, local_world = require_numbers(environ, self.name, self.rank, self.world, self.local_rank, self.local_world)
        check_rank_in_range(self.name, self.rank[0], rank, self.world[0], world)
        _check_local(self.name, (self.local_rank[0], local_rank), (self.local_world[0], local_world), (self.world[0], world))
        node, nodes = _derive_nodes(rank, world, local_rank, local_world)
        told = read_number(environ, *self.node)
        node = node if told is None or told >= nodes else told
        place = _make_process(self.name, (rank, world), (local_rank, local_world), (node, nodes))
        return _with_rendezvous(environ, place, read_text(environ, *self.job), self._first_host(environ))

    @classmethod
    def with_prefix(cls, name: str, prefix: str, *job: str) -> Mpi:
        """Return a runtime that gives its numbers as PREFIX_RANK, PREFIX_SIZE, PREFIX_LOCAL_RANK and PREFIX_LOCAL_SIZE."""
        rank, world, local_rank, local_world = ((f"{prefix}_{what}",) for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        return cls(name, rank, world, local_rank, local_world, job)

    def _first_host(self, environ: Environ) -> str | None:
        """No variable of mpirun names the machine of rank 0."""
        return None


class Lsf(Mpi):
    """jsrun inside an LSF job: JSM_NAMESPACE_* and the host list of the job."""

    def _first_host(self, environ: Environ) -> str | None:
        """The first compute host. Where jobs have a launch host, it is listed first with a single slot and runs no rank."""
        words = (read_text(environ, "LSB_MCPU_HOSTS") or "").split()
        slots = {host: int(count) for host, count in zip(words[::2], words[1::2], strict=False) if count.isdigit()}
        if not slots:
            for host in (read_text(environ, "LSB_HOSTS") or "").split():
                slots[host] = slots.get(host, 0) + 1
        hosts = list(slots)
        launch_host = len(hosts) > 1 and slots[hosts[0]] == 1 and max(slots.values()) > 1
        return next(iter(hosts[1:] if launch_host else hosts), None)


class Slurm:
    """A task of `srun`.

    A batch script, and the shell of an interactive allocation, have SLURM_* variables too but are not a task among others:
    they lack the step's number, or the step has one task, or it is a terminal (`srun --pty bash`). They count as single.
    """

    name = "slurm"
    tasks = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")

    def detect(self, environ: Environ) -> bool:
        if read_text(environ, "SLURM_PROCID") is None or read_text(environ, "SLURM_STEP_ID", "SLURM_STEPID") is None:
            return False
        return not self._is_terminal(environ) and read_text(environ, *self.tasks) != "1"

    def _is_terminal(self, environ: Environ) -> bool:
        """The shell of `srun --pty bash`: step 0 of a job named after its shell. A `srun` inside that shell is a later step."""
        return (
            read_text(environ, "SLURM_JOB_NAME") in _SHELLS
            and read_text(environ, "SLURM_PTY_PORT") is not None
            and read_text(environ, "SLURM_STEP_ID", "SLURM_STEPID") == "0"
        )

    def process(self, environ: Environ) -> Process:
        rank, world, local_rank = require_numbers(environ, self.name, ("SLURM_PROCID",), self.tasks, ("SLURM_LOCALID",))
        nodes = read_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", least=1)
        hosts = self._hosts(environ)
        nodes = nodes or len(hosts) or 1
        (node,) = (0,) if nodes == 1 else require_numbers(environ, self.name, ("SLURM_NODEID",))
        check_rank_in_range(self.name, "SLURM_PROCID", rank, "the number of tasks", world)
        check_rank_in_range(self.name, "SLURM_NODEID", node, "the number of nodes", nodes)
        local_world = world if nodes == 1 else self._tasks_on(environ, node, nodes, world)
        _check_local(self.name, ("SLURM_LOCALID", local_rank), ("tasks on this node", local_world), ("the number of tasks", world))
        job_id, step_id = read_text(environ, "SLURM_JOB_ID", "SLURM_JOBID"), read_text(environ, "SLURM_STEP_ID", "SLURM_STEPID")
        job = f"{job_id}.{step_id}" if job_id else None
        attempt = read_number(environ, "SLURM_RESTART_COUNT") or 0
        place = _make_process(self.name, (rank, world), (local_rank, local_world), (node, nodes), attempt=attempt)
        return _with_rendezvous(environ, place, job, hosts[0] if hosts else None)

    def _hosts(self, environ: Environ) -> tuple[str, ...]:
        hosts = read_text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        return expand_hosts(hosts) if hosts else ()

    def _tasks_on(self, environ: Environ, node: int, nodes: int, world: int) -> int:
        """How many tasks this node has, by the list that fits this step; a list of the whole job may not."""
        for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            counts = task_counts(environ, name)
            if len(counts) == nodes and sum(counts) == world:
                return counts[node]
        if world % nodes:
            raise_half_set(environ, self.name, ("SLURM_PROCID", *self.tasks, "SLURM_NNODES"), ["SLURM_STEP_TASKS_PER_NODE"])
        return world // nodes


class Kubernetes:
    """One process in each pod, started without a launcher: PET_* (Kubeflow), an indexed Job, or RANK and WORLD_SIZE in a pod."""

    name = "kubernetes"
    rank = ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    world = ("WORLD_SIZE", "PET_NNODES")

    def detect(self, environ: Environ) -> bool:
        if read_text(environ, "LOCAL_RANK") is not None or None in (read_text(environ, *self.world), read_text(environ, *self.rank)):
            return False
        if read_text(environ, "PET_NODE_RANK", "JOB_COMPLETION_INDEX") is not None:
            return True
        return read_text(environ, "KUBERNETES_SERVICE_HOST") is not None and read_text(environ, "MASTER_ADDR") not in (None, *_LOOPBACK)

    def process(self, environ: Environ) -> Process:
        per_pod = read_text(environ, "PET_NPROC_PER_NODE") or "1"
        if per_pod.isdigit() and int(per_pod) > 1:
            raise ConfigError(
                f"PET_NPROC_PER_NODE={per_pod} asks for {per_pod} processes in this pod, but the script was started without a launcher, so "
                f"there is one. Start it with `slipstream launch` or `torchrun`, or set PET_NPROC_PER_NODE=1."
            )
        if ":" in (read_text(environ, "PET_NNODES") or ""):
            raise ConfigError(
                f"PET_NNODES={environ['PET_NNODES']} is a range, so the number of processes is only known to a launcher. "
                f"Start the script with `torchrun`, or set PET_NNODES to one number."
            )
        rank, world = require_numbers(environ, self.name, self.rank, self.world)
        check_rank_in_range(self.name, "/".join(self.rank), rank, "/".join(self.world), world)
        address = read_text(environ, "MASTER_ADDR", "PET_MASTER_ADDR")
        port = _read_port(environ, "MASTER_PORT", "PET_MASTER_PORT")
        if world > 1 and (address is None or port is None):
            missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
            raise_half_set(environ, self.name, (*self.rank, *self.world, "MASTER_ADDR", "MASTER_PORT"), missing)
        run_id = read_text(environ, "PET_RDZV_ID", "JOB_NAME") or "none"
        return _make_process(self.name, (rank, world), (0, 1), (rank, world), master_addr=address, master_port=port, run_id=run_id)


class SageMaker:
    """A training job that runs the script once on every host: SM_HOSTS and SM_CURRENT_HOST."""

    name = "sagemaker"

    def detect(self, environ: Environ) -> bool:
        return all(read_text(environ, name) is not None for name in ("SM_HOSTS", "SM_CURRENT_HOST"))

    def process(self, environ: Environ) -> Process:
        current = environ["SM_CURRENT_HOST"].strip()
        try:
            hosts = json.loads(environ["SM_HOSTS"])
        except ValueError:
            hosts = None
        if not (isinstance(hosts, list) and all(isinstance(host, str) for host in hosts) and current in hosts):
            raise ConfigError(
                f"SM_HOSTS={environ['SM_HOSTS']!r} is not a JSON list of host names that contains SM_CURRENT_HOST={current!r}. "
                f"Correct them, or unset both to run as a single process."
            )
        hosts = sorted(hosts)
        place = hosts.index(current), len(hosts)
        job = read_text(environ, "TRAINING_JOB_NAME", "SM_JOB_NAME") or ",".join(hosts)
        return _with_rendezvous(environ, _make_process(self.name, place, (0, 1), place), job, hosts[0])


class Single:
    """One process on its own. Rank variables that no system above could use are half set: an error rather than a lone process."""

    name = "single"
    leftovers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def detect(self, environ: Environ) -> bool:
        return True

    def process(self, environ: Environ) -> Process:
        if read_text(environ, *self.leftovers) is not None:
            missing = [name for name in ("RANK", "WORLD_SIZE") if read_text(environ, name) is None]
            raise_half_set(environ, "torchrun", Torchrun.looked_at, missing)
        return Process()


CLUSTERS: tuple[Cluster, ...] = (
    Kubernetes(),
    Torchrun(),
    Lsf.with_prefix("lsf", "JSM_NAMESPACE", "PMIX_NAMESPACE", "LSB_JOBID"),
    Mpi.with_prefix("openmpi", "OMPI_COMM_WORLD", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    Mpi(
        name="intelmpi",
        rank=("PMI_RANK",),
        world=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID"),
        node=("HYDRA_BSTRAP_NODE_ID", "PALS_NODEID"),
    ),
    Mpi.with_prefix("mvapich", "MV2_COMM_WORLD", "MPIRUN_ID", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID"),
    Slurm(),
    SageMaker(),
    Single(),
)
"""Asked in this order; the module's docstring says why."""


# Agreement between what different systems say -------------------------------------------------------------------------


def _check_leftovers(environ: Environ, process: Process) -> None:
    """Raise for a rank variable that contradicts the system that started this process."""
    for name, value in (("RANK", process.rank), ("WORLD_SIZE", process.world_size), ("LOCAL_RANK", process.local_rank)):
        told = read_number(environ, name)
        if told is not None and told != value:
            raise ConfigError(
                f"{name}={told} in the environment contradicts {process.cluster}, which started this process as rank {process.rank} of "
                f"{process.world_size} (local rank {process.local_rank}). Unset {name}: it is not needed here."
            )


def _check_copied_rank(environ: Environ, rank: int, world: int) -> None:
    """Raise for RANK=0 in every task: it was set once in a job script, where the task's own number is not known yet."""
    if rank != 0 or read_text(environ, "TORCHELASTIC_RUN_ID") is not None:
        return
    for rank_name, world_name in (
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        task = read_text(environ, rank_name)
        if task not in (None, "0") and read_text(environ, world_name) == str(world):
            raise ConfigError(
                f"RANK=0, but this is task {task} of {world} ({rank_name}={task}). RANK was probably set once in the job script and "
                f"copied to every task. Unset RANK, WORLD_SIZE and LOCAL_RANK there: the task's own number is used then. "
                f"If another numbering is meant, unset {rank_name}."
            )


def this_process() -> Process:
    """Return this process as the runtime knows it, or else the variables of the launcher; broken ones are for a state to report.

    >>> this_process().is_main
    True
    """
    runtime = loaded_runtime()
    if runtime is not None:
        return runtime.process
    try:
        return detect(environment())
    except ConfigError:
        return Process()


def loaded_runtime() -> Runtime | None:
    """Return the runtime if there is one, without loading its module, which would import torch."""
    current_or_none = getattr(sys.modules.get("slipstream.distributed.current"), "current_or_none", None)  # absent while it is loaded
    runtime: Runtime | None = None if current_or_none is None else current_or_none()
    return runtime
