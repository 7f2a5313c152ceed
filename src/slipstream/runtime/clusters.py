"""Which system started this process, and what rank it gave it: one small class per system, asked in a stated order.

Every class answers two questions about a mapping of variables: `detect(environ)` says whether this system started the process
as one of a job, and `process(environ)` reads rank, world, node and meeting point into a `Process`.

What this promises: variables that contradict each other, or are half set, are a `ConfigError` that lists what is set, what is
missing and what to set or unset; nothing is guessed where a wrong guess would leave the job waiting. A number that the
variables do not give is derived only where that is certain. All ranks derive the same meeting point.

What it never does: read `os.environ` itself, open a connection, look up a name, import torch.

The order, and why (`CLUSTERS`):

1. `kubernetes`: one process per pod, started without a launcher (a launcher inside the pod sets LOCAL_RANK, and is not this)
2. `torchrun`: RANK and WORLD_SIZE; also what `slipstream launch`, Ray and the DeepSpeed launcher set. More precise than the rest
3. `lsf`: jsrun; it sets Open MPI's variables as well, so it comes before
4. `openmpi`, `intelmpi`, `mvapich`: mpirun; inside a Slurm job its processes inherit the SLURM_PROCID of a helper, so before `slurm`
5. `slurm`: srun
6. `sagemaker`: one process per host
7. `single`: nothing of the above, and no rank variable left over
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.runtime.process import Process
from slipstream.runtime.variables import (
    MEANING,
    Environ,
    check_order,
    derived_port,
    expand_hosts,
    half_set,
    needed,
    number,
    task_counts,
    text,
)

__all__ = ["CLUSTERS", "Cluster", "Kubernetes", "Lsf", "Mpi", "SageMaker", "Single", "Slurm", "Torchrun", "detect"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHELLS = ("bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh")


class Cluster(Protocol):
    """A system that starts processes and tells each who it is through variables."""

    @property
    def name(self) -> str: ...

    def detect(self, environ: Environ) -> bool: ...

    def process(self, environ: Environ) -> Process: ...


def detect(environ: Environ) -> Process:
    """The process that these variables describe, by the first system of `CLUSTERS` that recognises them.

    >>> detect({}).cluster
    'single'
    >>> me = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"})
    >>> me.rank, me.local_rank, me.one_machine
    (1, 1, True)
    """
    cluster = next(one for one in CLUSTERS if one.detect(environ))
    process = cluster.process(environ)
    _refuse_leftovers(environ, process)
    return process


def _meeting_point(
    environ: Environ, system: str, process: Process, job: str | None, first_host: str | None = None
) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT where they are set; otherwise loopback or the first host, and a port derived from the job."""
    address, port = text(environ, "MASTER_ADDR"), number(environ, "MASTER_PORT", least=1, most=65535)
    if process.world_size == 1:
        return address, port
    address = address or ("127.0.0.1" if process.num_nodes == 1 else first_host)
    port = port or (derived_port(job) if job else None)
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
    if missing:
        wanted = " and ".join(f"{name} ({MEANING[name]})" for name in missing)
        raise ConfigError(
            f"Rank {process.rank} of {process.world_size} was started by {system}, whose variables do not say where the processes meet. "
            f"Set {wanted} for every process: `export {missing[0]}=...` in the job script. Where mpirun starts the processes it has "
            f"to pass it on (Open MPI: `-x {missing[0]}`, Intel MPI and MPICH: `-genvlist {','.join(missing)}`)."
        )
    return address, port


def _nodes(rank: int, world: int, local_rank: int, local_world: int) -> tuple[int, int]:
    """(node, nodes) for systems that do not number their machines: filled one after the other, or dealt out in turn.

    With uneven machines the number of nodes is an estimate; that it is more than one is certain.
    """
    nodes = -(-world // local_world)
    if rank % local_world != local_rank and world % local_world == 0 and rank // nodes == local_rank:
        return rank % nodes, nodes
    return min(rank // local_world, nodes - 1), nodes


def _check_local(system: str, local_rank: tuple[str, int], local_world: tuple[str, int], world: tuple[str, int]) -> None:
    check_order(system, *local_rank, *local_world)
    if local_world[1] > world[1]:
        raise ConfigError(
            f"{local_world[0]}={local_world[1]} is more than {world[0]}={world[1]} ({system}): one machine cannot have more processes than "
            f"there are in all. Correct one of them, or unset both to run as a single process."
        )


def _meet(place: Process, address: str | None, port: int | None, *, run_id: str | None) -> Process:
    return replace(place, master_addr=address, master_port=port, run_id=run_id or "none")


# The systems ----------------------------------------------------------------------------------------------------------


class Torchrun:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT: what torchrun and most launchers set."""

    name = "torchrun"
    looked_at = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def detect(self, environ: Environ) -> bool:
        return all(text(environ, name) is not None for name in ("RANK", "WORLD_SIZE"))

    def process(self, environ: Environ) -> Process:
        rank, world = needed(environ, self.name, ("RANK",), ("WORLD_SIZE",))
        check_order(self.name, "RANK", rank, "WORLD_SIZE", world)
        local_rank, local_world = self._local(environ, rank, world)
        _check_local(self.name, ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world), ("WORLD_SIZE", world))
        derived_node, derived_nodes = _nodes(rank, world, local_rank, local_world)
        nodes = number(environ, "GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE", least=1) or derived_nodes
        node = number(environ, "GROUP_RANK", "NODE_RANK", "CROSS_RANK")
        node = min(derived_node, nodes - 1) if node is None else node
        check_order(self.name, "the node's number", node, "the number of nodes", nodes)
        if world > 1:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if text(environ, name) is None]
            if missing:
                half_set(environ, self.name, self.looked_at, missing)
        _refuse_copied_rank(environ, rank, world)
        return Process(
            rank=rank,
            world_size=world,
            local_rank=local_rank,
            local_world_size=local_world,
            node_rank=node,
            num_nodes=nodes,
            cluster=self.name,
            master_addr=text(environ, "MASTER_ADDR"),
            master_port=number(environ, "MASTER_PORT", least=1, most=65535),
            run_id=text(environ, "TORCHELASTIC_RUN_ID") or "none",
            attempt=number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
            agent_store=(text(environ, "TORCHELASTIC_USE_AGENT_STORE") or "").lower() in ("true", "1"),
        )

    def _local(self, environ: Environ, rank: int, world: int) -> tuple[int, int]:
        """Rank and world on this machine; derived only where all processes are certainly on one machine."""
        local_rank = number(environ, "LOCAL_RANK")
        local_world = number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", least=1)
        # In a pod, older operators give rank 0 "localhost" although the other ranks are in other pods.
        loopback = text(environ, "MASTER_ADDR") in _LOOPBACK and text(environ, "KUBERNETES_SERVICE_HOST") is None
        if world == 1 or loopback or number(environ, "GROUP_WORLD_SIZE", "NNODES", least=1) == 1:
            return rank if local_rank is None else local_rank, local_world or world
        if local_rank is None or local_world is None:
            missing = [name for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world)) if value is None]
            half_set(environ, self.name, self.looked_at, missing, why=", and the job may span several machines")
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
        return text(environ, *self.rank) is not None and text(environ, *self.local_rank) is not None

    def process(self, environ: Environ) -> Process:
        rank, world, local_rank, local_world = needed(environ, self.name, self.rank, self.world, self.local_rank, self.local_world)
        check_order(self.name, self.rank[0], rank, self.world[0], world)
        _check_local(self.name, (self.local_rank[0], local_rank), (self.local_world[0], local_world), (self.world[0], world))
        node, nodes = _nodes(rank, world, local_rank, local_world)
        told = number(environ, *self.node)
        place = Process(
            rank=rank,
            world_size=world,
            local_rank=local_rank,
            local_world_size=local_world,
            node_rank=node if told is None or told >= nodes else told,
            num_nodes=nodes,
            cluster=self.name,
        )
        job = text(environ, *self.job)
        address, port = _meeting_point(environ, self.name, place, job, self._first_host(environ))
        return _meet(place, address, port, run_id=job)

    def _first_host(self, environ: Environ) -> str | None:
        """No variable of mpirun names the machine of rank 0."""
        return None


class Lsf(Mpi):
    """jsrun inside an LSF job: JSM_NAMESPACE_* and the host list of the job."""

    def _first_host(self, environ: Environ) -> str | None:
        """The first compute host. Where jobs have a launch host, it is listed first with a single slot and runs no rank."""
        words = (text(environ, "LSB_MCPU_HOSTS") or "").split()
        slots = {host: int(count) for host, count in zip(words[::2], words[1::2], strict=False) if count.isdigit()}
        if not slots:
            for host in (text(environ, "LSB_HOSTS") or "").split():
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
        if text(environ, "SLURM_PROCID") is None or text(environ, "SLURM_STEP_ID", "SLURM_STEPID") is None:
            return False
        return not self._is_terminal(environ) and text(environ, *self.tasks) != "1"

    def _is_terminal(self, environ: Environ) -> bool:
        """The shell of `srun --pty bash`: step 0 of a job named after its shell. A `srun` inside that shell is a later step."""
        return (
            text(environ, "SLURM_JOB_NAME") in _SHELLS
            and text(environ, "SLURM_PTY_PORT") is not None
            and text(environ, "SLURM_STEP_ID", "SLURM_STEPID") == "0"
        )

    def process(self, environ: Environ) -> Process:
        rank, world, local_rank = needed(environ, self.name, ("SLURM_PROCID",), self.tasks, ("SLURM_LOCALID",))
        nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", least=1)
        hosts = self._hosts(environ)
        nodes = nodes or len(hosts) or 1
        (node,) = (0,) if nodes == 1 else needed(environ, self.name, ("SLURM_NODEID",))
        check_order(self.name, "SLURM_PROCID", rank, "the number of tasks", world)
        check_order(self.name, "SLURM_NODEID", node, "the number of nodes", nodes)
        local_world = world if nodes == 1 else self._tasks_on(environ, node, nodes, world)
        _check_local(self.name, ("SLURM_LOCALID", local_rank), ("tasks on this node", local_world), ("the number of tasks", world))
        job_id, step_id = text(environ, "SLURM_JOB_ID", "SLURM_JOBID"), text(environ, "SLURM_STEP_ID", "SLURM_STEPID")
        job = f"{job_id}.{step_id}" if job_id else None
        place = Process(
            rank=rank,
            world_size=world,
            local_rank=local_rank,
            local_world_size=local_world,
            node_rank=node,
            num_nodes=nodes,
            cluster=self.name,
            attempt=number(environ, "SLURM_RESTART_COUNT") or 0,
        )
        return _meet(place, *_meeting_point(environ, self.name, place, job, hosts[0] if hosts else None), run_id=job)

    def _hosts(self, environ: Environ) -> tuple[str, ...]:
        hosts = text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        return expand_hosts(hosts) if hosts else ()

    def _tasks_on(self, environ: Environ, node: int, nodes: int, world: int) -> int:
        """How many tasks this node has, by the list that fits this step; a list of the whole job may not."""
        for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            counts = task_counts(environ, name)
            if len(counts) == nodes and sum(counts) == world:
                return counts[node]
        if world % nodes:
            half_set(environ, self.name, ("SLURM_PROCID", *self.tasks, "SLURM_NNODES"), ["SLURM_STEP_TASKS_PER_NODE"])
        return world // nodes


class Kubernetes:
    """One process in each pod, started without a launcher: PET_* (Kubeflow), an indexed Job, or RANK and WORLD_SIZE in a pod."""

    name = "kubernetes"
    rank = ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    world = ("WORLD_SIZE", "PET_NNODES")

    def detect(self, environ: Environ) -> bool:
        if text(environ, "LOCAL_RANK") is not None or text(environ, *self.world) is None or text(environ, *self.rank) is None:
            return False
        if text(environ, "PET_NODE_RANK", "JOB_COMPLETION_INDEX") is not None:
            return True
        return text(environ, "KUBERNETES_SERVICE_HOST") is not None and text(environ, "MASTER_ADDR") not in (None, *_LOOPBACK)

    def process(self, environ: Environ) -> Process:
        per_pod = text(environ, "PET_NPROC_PER_NODE") or "1"
        if per_pod.isdigit() and int(per_pod) > 1:
            raise ConfigError(
                f"PET_NPROC_PER_NODE={per_pod} asks for {per_pod} processes in this pod, but the script was started without a launcher, so "
                f"there is one. Start it with `slipstream launch` or `torchrun`, or set PET_NPROC_PER_NODE=1."
            )
        if ":" in (text(environ, "PET_NNODES") or ""):
            raise ConfigError(
                f"PET_NNODES={environ['PET_NNODES']} is a range, so the number of processes is only known to a launcher. "
                f"Start the script with `torchrun`, or set PET_NNODES to one number."
            )
        rank, world = needed(environ, self.name, self.rank, self.world)
        check_order(self.name, "/".join(self.rank), rank, "/".join(self.world), world)
        address = text(environ, "MASTER_ADDR", "PET_MASTER_ADDR")
        port = number(environ, "MASTER_PORT", "PET_MASTER_PORT", least=1, most=65535)
        if world > 1 and (address is None or port is None):
            missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
            half_set(environ, self.name, (*self.rank, *self.world, "MASTER_ADDR", "MASTER_PORT"), missing)
        place = Process(rank=rank, world_size=world, node_rank=rank, num_nodes=world, cluster=self.name)
        return _meet(place, address, port, run_id=text(environ, "PET_RDZV_ID", "JOB_NAME"))


class SageMaker:
    """A training job that runs the script once on every host: SM_HOSTS and SM_CURRENT_HOST."""

    name = "sagemaker"

    def detect(self, environ: Environ) -> bool:
        return all(text(environ, name) is not None for name in ("SM_HOSTS", "SM_CURRENT_HOST"))

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
        place = Process(
            rank=hosts.index(current),
            world_size=len(hosts),
            node_rank=hosts.index(current),
            num_nodes=len(hosts),
            cluster=self.name,
        )
        job = text(environ, "TRAINING_JOB_NAME", "SM_JOB_NAME") or ",".join(hosts)
        return _meet(place, *_meeting_point(environ, self.name, place, job, hosts[0]), run_id=job)


class Single:
    """One process on its own. Rank variables that no system above could use are half set: an error rather than a lone process."""

    name = "single"
    leftovers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def detect(self, environ: Environ) -> bool:
        return True

    def process(self, environ: Environ) -> Process:
        if text(environ, *self.leftovers) is not None:
            missing = [name for name in ("RANK", "WORLD_SIZE") if text(environ, name) is None]
            half_set(environ, "torchrun", Torchrun.looked_at, missing)
        return Process()


CLUSTERS: tuple[Cluster, ...] = (
    Kubernetes(),
    Torchrun(),
    Lsf(
        name="lsf",
        rank=("JSM_NAMESPACE_RANK",),
        world=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_world=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "LSB_JOBID"),
    ),
    Mpi(
        name="openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        world=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    Mpi(
        name="intelmpi",
        rank=("PMI_RANK",),
        world=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID"),
        node=("HYDRA_BSTRAP_NODE_ID", "PALS_NODEID"),
    ),
    Mpi(
        name="mvapich",
        rank=("MV2_COMM_WORLD_RANK",),
        world=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("MPIRUN_ID", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID"),
    ),
    Slurm(),
    SageMaker(),
    Single(),
)
"""Asked in this order; the module's docstring says why."""


# Agreement between what different systems say -------------------------------------------------------------------------


def _refuse_leftovers(environ: Environ, process: Process) -> None:
    """A rank variable that survives from elsewhere and says something else than the system that started this process."""
    for name, value in (("RANK", process.rank), ("WORLD_SIZE", process.world_size), ("LOCAL_RANK", process.local_rank)):
        told = number(environ, name)
        if told is not None and told != value:
            raise ConfigError(
                f"{name}={told} in the environment contradicts {process.cluster}, which started this process as rank {process.rank} of "
                f"{process.world_size} (local rank {process.local_rank}). Unset {name}: it is not needed here."
            )


def _refuse_copied_rank(environ: Environ, rank: int, world: int) -> None:
    """RANK=0 in every task: it was set once in a job script, where the task's own number was not known yet."""
    if rank != 0 or text(environ, "TORCHELASTIC_RUN_ID") is not None:
        return
    for rank_name, world_name in (
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        task = text(environ, rank_name)
        if task not in (None, "0") and text(environ, world_name) == str(world):
            raise ConfigError(
                f"RANK=0, but this is task {task} of {world} ({rank_name}={task}). RANK was probably set once in the job script and "
                f"copied to every task. Unset RANK, WORLD_SIZE and LOCAL_RANK there: the task's own number is used then. "
                f"If another numbering is meant, unset {rank_name}."
            )
