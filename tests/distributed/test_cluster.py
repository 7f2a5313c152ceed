"""Every system's real set of variables becomes the right process; half-set and contradictory ones become a helpful error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from slipstream.distributed.cluster import CLUSTERS, derived_port, detect, expand_hosts
from slipstream.errors import ConfigError

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0.cluster",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "a1b2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM_JOB = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOBID": "200505",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "gnode[010,020,025-026]",
    "SLURM_NODELIST": "gnode[010,020,025-026]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_SUBMIT_HOST": "login1",
}
SLURM_BATCH_SCRIPT = {**SLURM_JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
SLURM_STEP = {
    **SLURM_JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "gnode[020,025-026]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.5",
}
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "node0",
    "PMIX_NAMESPACE": "prterun-node0-4962@1",
    "PMIX_RANK": "1",
}
INTELMPI = {
    "HYDRA_BSTRAP_LOCALHOST": "node0",
    "HYDRA_BSTRAP_NODE_ID": "0",
    "I_MPI_HYDRA_UUID": "83130000-c779-c6a4-5760-060096fb2e04",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MPICH = {"HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "2"}
LSF = {
    "LSB_JOBID": "4711",
    "LSB_MCPU_HOSTS": "batch5 1 h36n03 42 h36n05 42",
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "12",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "6",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
PYTORCHJOB = {
    **POD,
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
INDEXED_JOB = {**POD, "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "0",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "TRAINING_JOB_NAME": "bert-2026",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def facts(environ: dict[str, str]) -> dict[str, Any]:
    process = detect(environ)
    return {name: getattr(process, name) for name in process.__dataclass_fields__ if name != "host"}


def place(rank: int, world: int, local_rank: int, local_world: int, node: int, nodes: int) -> dict[str, int]:
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": local_rank,
        "local_world_size": local_world,
        "node_rank": node,
        "num_nodes": nodes,
    }


def met(address: str | None, port: int | None, run_id: str, attempt: int = 0, agent_store: bool = False) -> dict[str, Any]:
    return {"master_addr": address, "master_port": port, "run_id": run_id, "attempt": attempt, "agent_store": agent_store}


@pytest.mark.parametrize(
    ("cluster", "environ", "where", "meeting"),
    [
        ("torchrun", TORCHRUN, place(3, 4, 1, 2, 1, 2), met("node0.cluster", 29511, "a1b2", 2, True)),
        ("slurm", SLURM_STEP, place(4, 5, 0, 1, 2, 3), met("gnode020", derived_port("200505.0"), "200505.0")),
        ("openmpi", OPENMPI, place(1, 2, 1, 2, 0, 1), met("127.0.0.1", derived_port("prterun-node0-4962@1"), "prterun-node0-4962@1")),
        (
            "intelmpi",
            INTELMPI,
            place(1, 2, 1, 2, 0, 1),
            met("127.0.0.1", derived_port(INTELMPI["I_MPI_HYDRA_UUID"]), INTELMPI["I_MPI_HYDRA_UUID"]),
        ),
        ("lsf", LSF, place(7, 12, 1, 6, 1, 2), met("h36n03", derived_port("4711"), "4711")),
        ("kubernetes", PYTORCHJOB, place(2, 3, 0, 1, 2, 3), met("job-master-0", 23456, "none")),
        ("kubernetes", INDEXED_JOB, place(1, 4, 0, 1, 1, 4), met("train-0.train", 29500, "none")),
        ("sagemaker", SAGEMAKER, place(1, 2, 0, 1, 1, 2), met("algo-1", derived_port("bert-2026"), "bert-2026")),
        ("single", {"PATH": "/bin", "MASTER_ADDR": "somewhere"}, place(0, 1, 0, 1, 0, 1), met(None, None, "none")),
    ],
)
def test_real_variable_sets(cluster: str, environ: dict[str, str], where: dict[str, int], meeting: dict[str, Any]) -> None:
    assert facts(environ) == {"cluster": cluster, **where, **meeting}


def test_cluster_names_are_unique() -> None:
    """Every cluster has a name of its own."""
    names = [cluster.name for cluster in CLUSTERS]
    assert names == ["kubernetes", "torchrun", "lsf", "openmpi", "intelmpi", "mvapich", "slurm", "sagemaker", "single"]


@pytest.mark.parametrize("outer", [SLURM_STEP, OPENMPI, INTELMPI, LSF, PYTORCHJOB, SAGEMAKER])
def test_a_launcher_inside_a_cluster_wins(outer: dict[str, str]) -> None:
    assert facts({**outer, **TORCHRUN}) == facts(TORCHRUN)


def test_mpirun_wins_over_slurm_helper() -> None:
    """Mpirun inside a slurm job wins over the helper task that started it."""
    assert detect({**SLURM_STEP, **OPENMPI}).cluster == "openmpi"


# torchrun and hand-made variables


def test_four_torch_variables_on_one_machine() -> None:
    """Only the four variables of torch on one machine."""
    process = detect({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    assert (process.local_rank, process.local_world_size, process.num_nodes) == (2, 4, 1)


def test_world_of_one_needs_no_rendezvous() -> None:
    """A world of one needs no meeting point."""
    process = detect({"RANK": "0", "WORLD_SIZE": "1"})
    assert (process.world_size, process.master_addr, process.cluster) == (1, None, "torchrun")


def test_nodes_derived_from_local_world() -> None:
    """Nodes are derived from local world size."""
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
    assert (detect(environ).node_rank, detect(environ).num_nodes) == (1, 2)


def test_local_rank_not_guessed_across_machines() -> None:
    """Local rank is not guessed when the job may span machines."""
    with pytest.raises(ConfigError, match=r"missing: LOCAL_RANK \(.*LOCAL_WORLD_SIZE \(.*"):
        detect({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})


def test_localhost_in_pod_proves_nothing() -> None:
    """Localhost in a pod does not prove one machine."""
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        detect({**POD, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})


@pytest.mark.parametrize("store", ["False", "", "0"])
def test_no_agent_store(store: str) -> None:
    assert not detect({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": store}).agent_store


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": "4"}, ("RANK=4", "WORLD_SIZE=4", "0 to 3")),
        ({"RANK": "-1"}, ("RANK='-1'", "at least 0")),
        ({"RANK": "one"}, ("RANK='one'", "whole number")),
        ({"RANK": "٣"}, ("RANK=", "whole number")),
        ({"WORLD_SIZE": "0"}, ("WORLD_SIZE=0", "at least one")),
        ({"WORLD_SIZE": "4.0"}, ("WORLD_SIZE='4.0'",)),
        ({"LOCAL_RANK": "2"}, ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2")),
        ({"LOCAL_WORLD_SIZE": "8"}, ("LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4")),
        ({"GROUP_RANK": "2"}, ("2", "number of nodes=2")),
        ({"MASTER_PORT": "99999"}, ("MASTER_PORT='99999'", "1 to 65535")),
        ({"MASTER_PORT": ""}, ("missing: MASTER_PORT", "MASTER_ADDR=node0.cluster")),
    ],
)
def test_wrong_numbers_are_named(changed: dict[str, str], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect({**TORCHRUN, **changed})
    assert [text for text in named if text not in str(caught.value)] == []


def test_copied_rank_is_caught() -> None:
    """A rank copied from the job script to every task is caught."""
    copied = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "5", "MASTER_ADDR": "gnode020", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"task 4 of 5 \(SLURM_PROCID=4\)[\s\S]*Unset RANK"):
        detect({**SLURM_STEP, **copied})


@given(
    present=st.dictionaries(
        st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]), st.sampled_from(["0", "1", "2", "3"]), min_size=1
    ),
    loopback=st.booleans(),
)
def test_half_set_variables_raise(present: dict[str, str], loopback: bool) -> None:
    """Half set variables never become a lone process."""
    environ = {**present, **({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if loopback else {})}
    try:
        process = detect(environ)
    except ConfigError as error:
        assert any(name in str(error) for name in present)  # noqa: PT017
        if "half set" in str(error):
            assert "missing: " in str(error)  # noqa: PT017
            assert all(f"{name}={value}" in str(error) for name, value in present.items())  # noqa: PT017
        return
    assert process.cluster == "torchrun"
    assert (process.rank, process.world_size) == (int(present["RANK"]), int(present["WORLD_SIZE"]))
    assert process.rank < process.world_size
    assert process.local_rank < process.local_world_size <= process.world_size


# Slurm


@pytest.mark.parametrize(
    "environ",
    [
        SLURM_JOB,  # the shell of salloc
        SLURM_BATCH_SCRIPT,
        {**SLURM_STEP, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"},
        {**SLURM_STEP, "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "44537", "SLURM_PROCID": "0"},
    ],
)
def test_shell_in_allocation_is_single(environ: dict[str, str]) -> None:
    """A shell inside an allocation is single."""
    assert (detect(environ).cluster, detect(environ).world_size) == ("single", 1)


def test_srun_from_an_interactive_shell_is_parallel() -> None:
    assert detect({**SLURM_STEP, "SLURM_JOB_NAME": "interactive"}).world_size == 5
    later_step = {**SLURM_STEP, "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "44537", "SLURM_STEP_ID": "1", "SLURM_STEPID": "1"}
    assert detect(later_step).world_size == 5


def test_slurm_on_one_node_meets_on_loopback() -> None:
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gnode020", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"}
    process = detect({**SLURM_STEP, **one_node})
    assert (process.master_addr, process.local_world_size, process.one_machine) == ("127.0.0.1", 5, True)


def test_slurm_tasks_agree_steps_differ() -> None:
    """All slurm tasks agree and steps of one job do not collide."""

    def at(task: int, step: str = "0") -> tuple[str | None, int | None]:
        node, local = divmod(task, 2)
        numbers = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        process = detect({**SLURM_STEP, **numbers, "SLURM_STEP_ID": step, "SLURM_STEPID": step})
        return process.master_addr, process.master_port

    assert {at(task) for task in range(5)} == {at(0)}
    assert at(0) != at(0, step="1")


def test_job_script_address_is_kept() -> None:
    """Meeting point of the job script is kept."""
    process = detect({**SLURM_STEP, "MASTER_ADDR": "ib0-gnode020", "MASTER_PORT": "2345", "WORLD_SIZE": "5"})
    assert (process.cluster, process.master_addr, process.master_port) == ("slurm", "ib0-gnode020", 2345)


def test_requeued_slurm_job_counts_attempts() -> None:
    """A requeued slurm job is another attempt."""
    assert detect({**SLURM_STEP, "SLURM_RESTART_COUNT": "3"}).attempt == 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID=5"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({"SLURM_LOCALID": ""}, "missing: SLURM_LOCALID"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "SLURM_STEP_TASKS_PER_NODE='2x2'"),
        ({"SLURM_STEP_NODELIST": "gnode[020"}, "gnode[020"),
        ({"WORLD_SIZE": "16"}, "WORLD_SIZE=16 in the environment contradicts slurm"),
    ],
)
def test_wrong_slurm_variables_are_named(changed: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect({**SLURM_STEP, **changed})
    assert named in str(caught.value)


def test_uneven_slurm_tasks_not_guessed() -> None:
    """Uneven slurm tasks without their list are not guessed."""
    with pytest.raises(ConfigError, match="missing: SLURM_STEP_TASKS_PER_NODE"):
        detect(without(SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE"))


# MPI and LSF


@pytest.mark.parametrize("environ", [OPENMPI, INTELMPI])
def test_mpi_across_machines_needs_address(environ: dict[str, str]) -> None:
    """MPI over several machines needs an address."""
    world = "OMPI_COMM_WORLD_SIZE" if "OMPI_COMM_WORLD_SIZE" in environ else "PMI_SIZE"
    with pytest.raises(ConfigError, match=r"Set MASTER_ADDR \("):
        detect({**environ, world: "4"})
    process = detect({**environ, world: "4", "MASTER_ADDR": "node0"})
    assert (process.master_addr, process.num_nodes) == ("node0", 2)


def test_mpich_needs_a_port() -> None:
    """Mpich names no job so it needs a port."""
    with pytest.raises(ConfigError, match=r"Set MASTER_PORT \("):
        detect(MPICH)
    assert detect({**MPICH, "MASTER_PORT": "29512"}).master_port == 29512


def test_round_robin_ranks_over_machines() -> None:
    """Ranks dealt out in turn over the machines."""
    environ = {**OPENMPI, "MASTER_ADDR": "node0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    process = detect({**environ, "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert (process.node_rank, process.local_rank) == (0, 1)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_half_set_mpi_variables(name: str) -> None:
    with pytest.raises(ConfigError, match=f"missing: {name}"):
        detect(without(OPENMPI, name))


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ({"LSB_MCPU_HOSTS": "batch5 1 a 42 b 42"}, "a"),
        ({"LSB_MCPU_HOSTS": "a 42 b 42"}, "a"),
        ({"LSB_HOSTS": "batch5 a a b b"}, "a"),
        ({"LSB_HOSTS": "a a b b"}, "a"),
        ({"LSB_HOSTS": "b a"}, "b"),
    ],
)
def test_lsf_launch_host_runs_no_rank(hosts: dict[str, str], first: str) -> None:
    """The launch host of LSF runs no rank."""
    assert detect({**without(LSF, "LSB_MCPU_HOSTS"), **hosts}).master_addr == first


# Kubernetes and SageMaker


def test_several_processes_per_pod_refused() -> None:
    """Several processes per pod need a launcher."""
    with pytest.raises(ConfigError, match=r"PET_NPROC_PER_NODE=4 asks for 4 processes[\s\S]*slipstream launch"):
        detect({**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"})


def test_elastic_pod_range_refused() -> None:
    """An elastic range of pods needs a launcher."""
    with pytest.raises(ConfigError, match="PET_NNODES=1:3 is a range"):
        detect({**without(PYTORCHJOB, "WORLD_SIZE", "RANK"), "PET_NNODES": "1:3"})


def test_older_pytorchjob_without_pet() -> None:
    """An older pytorchjob without pet variables."""
    process = detect({**POD, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"})
    assert (process.cluster, process.local_rank, process.num_nodes) == ("kubernetes", 0, 2)


def test_unrelated_pods_are_single() -> None:
    """Pods of a job that share nothing are single."""
    assert detect({**POD, "JOB_COMPLETION_INDEX": "3"}).cluster == "single"


def test_pods_without_address_raise() -> None:
    """Pods without an address are half set."""
    with pytest.raises(ConfigError, match="missing: MASTER_ADDR"):
        detect(without(INDEXED_JOB, "MASTER_ADDR", "MASTER_PORT"))


@pytest.mark.parametrize("changed", [{"SM_HOSTS": "algo-1"}, {"SM_HOSTS": '{"a": 1}'}, {"SM_CURRENT_HOST": "algo-9"}])
def test_broken_sagemaker_hosts_are_named(changed: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="SM_CURRENT_HOST"):
        detect({**SAGEMAKER, **changed})


# Host lists


def compress(prefix: str, numbers: list[int], width: int) -> str:
    """The slow, obvious way to write a list of hosts: every run of neighbours as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in runs]
    return f"{prefix}[{','.join(parts)}]"


GROUP = st.tuples(
    st.from_regex(r"[a-z][a-z-]{0,6}", fullmatch=True), st.lists(st.integers(0, 120), min_size=1, max_size=12), st.integers(1, 4)
)


@given(st.lists(GROUP, min_size=1, max_size=4))
def test_expanding_is_the_inverse_of_compressing(groups: list[tuple[str, list[int], int]]) -> None:
    text = ",".join(compress(*group) for group in groups)
    expected = [f"{prefix}{number:0{width}}" for prefix, numbers, width in groups for number in numbers]
    assert list(expand_hosts(text)) == expected


@given(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=6))
def test_plain_names_are_kept(hosts: list[str]) -> None:
    assert list(expand_hosts(",".join(hosts))) == hosts


@given(st.text(alphabet="ab[],-01 ", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ConfigError as error:
        assert repr(text) in str(error) or text.strip() in str(error)  # noqa: PT017
    else:
        assert hosts
        assert not any(set(host) & set("[], ") or not host for host in hosts)


def test_several_brackets_in_one_name() -> None:
    assert expand_hosts("r[1-2]n[09-10]") == ("r1n09", "r1n10", "r2n09", "r2n10")


@pytest.mark.parametrize("text", ["", ",", "a,,b", "node[", "node[]", "node[3-1]", "node[a-b]", "node]1[", "node[1[2]]"])
def test_bad_host_list_refused(text: str) -> None:
    """What is no list of hosts is refused."""
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        expand_hosts(text)
