"""The plan: what is decided before anything starts, and what is refused."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given, strategies as st

from slipstream.config import resolve, resolved_config
from slipstream.errors import ConfigError
from slipstream.launch.plan import MachineSpec, Target, VisibleAccelerators, describe_plan, make_plan

MACHINE = MachineSpec(cores=8, platform="linux", interpreter=("python",))
SCRIPT = Target("script", __file__)


def plan_of(environ=None, machine=MACHINE, target=SCRIPT, **flags):
    return make_plan(resolve(flags=flags, environ={}), target, environ or {}, machine)


def refusal(**arguments) -> str:
    with pytest.raises(ConfigError) as refused:
        plan_of(**arguments)
    return str(refused.value)


def test_cpu_with_two_processes_starts_two():
    plan = plan_of(cpu=True, num_processes=2)
    assert (plan.local_processes, plan.num_processes, plan.single) == (2, 2, False)


def test_one_process_takes_the_launchers_place():
    plan = plan_of(cpu=True)
    assert plan.single
    assert plan.command == ("python", __file__)


@pytest.mark.parametrize("option", [{"max_restarts": 1}, {"log_dir": "logs"}, {"tee": "3"}])
def test_one_process_that_needs_watching_gets_a_launcher(option):
    assert plan_of(cpu=True, **option).start_method == "fork"


def test_the_number_of_processes_follows_the_accelerators_that_are_there():
    assert plan_of(machine=MachineSpec(accelerators=VisibleAccelerators(4, "SOME_DEVICES"))).local_processes == 4
    assert plan_of(machine=MachineSpec(accelerators=VisibleAccelerators(4, "SOME_DEVICES")), cpu=True).local_processes == 1


def test_named_accelerators_limit_what_processes_see():
    plan = plan_of(machine=MachineSpec(accelerators=VisibleAccelerators(4, "SOME_DEVICES")), gpu_ids="1, 3")
    assert plan.local_processes == 2
    assert plan.environment["SOME_DEVICES"] == "1,3"


def test_named_accelerators_on_a_machine_without_any_are_refused():
    assert "no accelerator was found" in refusal(gpu_ids="0")


def test_processes_are_shared_out_over_machines():
    plan = plan_of(cpu=True, num_processes=8, num_machines=4, machine_rank=3, main_process_ip="a")
    assert (plan.local_processes, plan.num_processes, plan.hosts_store) == (2, 8, False)


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ({}, "fork"),
        ({"start_method": "spawn"}, "spawn"),
        ({"rdzv_backend": "c10d", "rdzv_conf": "endpoint=a:1"}, "spawn"),
    ],
)
def test_the_start_method_and_its_reason(flags, method):
    plan = plan_of(cpu=True, num_processes=2, **flags)
    assert plan.start_method == method
    assert plan.reason


def test_fork_is_for_linux_unless_asked_for():
    elsewhere = MachineSpec(platform="darwin")
    assert plan_of(machine=elsewhere, cpu=True, num_processes=2).start_method == "spawn"
    assert plan_of(machine=elsewhere, cpu=True, num_processes=2, start_method="fork").start_method == "fork"


def test_threads_are_the_cores_divided_unless_somebody_said_otherwise():
    assert plan_of(cpu=True, num_processes=4).environment["OMP_NUM_THREADS"] == "2"
    assert plan_of(cpu=True, num_processes=64).environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in plan_of(environ={"OMP_NUM_THREADS": "3"}, cpu=True, num_processes=4).environment
    assert plan_of(cpu=True, num_processes=4, num_cpu_threads_per_process=5).environment["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in plan_of(cpu=True).environment


def test_one_machine_meets_on_the_loopback_interface_at_a_free_port():
    plan = plan_of(cpu=True, num_processes=2)
    assert (plan.rendezvous.host, plan.rendezvous.port, plan.environment["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", None, "lo")
    assert plan_of(cpu=True, num_processes=2, main_process_port=0).rendezvous.port is None
    assert plan_of(cpu=True, num_processes=2, main_process_port=1234).rendezvous.port == 1234


def test_the_workers_get_the_resolved_configuration():
    plan = plan_of(cpu=True, num_processes=2, mixed_precision="bf16")
    assert resolved_config.load(plan.environment[resolved_config.VARIABLE]).compute.mixed_precision == "bf16"


def test_several_machines_without_a_place_to_meet_are_refused():
    assert "main_process_ip is not given" in refusal(num_machines=2, num_processes=2)
    assert "same_network=false" in refusal(num_machines=2, num_processes=2, main_process_ip="a", same_network=False)


@pytest.mark.parametrize("name", ["missing.py", "no/such/script.py", "folder"])
def test_a_script_that_cannot_be_run_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=name):
        plan_of(target=Target("script", name))


def test_a_script_that_cannot_be_read_is_refused(tmp_path):
    script = tmp_path / "secret.py"
    script.touch(mode=0)
    tmp_path.chmod(0o755)
    pid = os.fork()
    if pid == 0:  # root may read everything, so not as root
        try:
            if os.geteuid() == 0:
                for folder in tmp_path.parents[:3]:
                    folder.chmod(folder.stat().st_mode | 0o011)
                os.setuid(65534)
            plan_of(target=Target("script", str(script)))
        except ConfigError as refused:
            os._exit(0 if "permission denied" in str(refused) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_module_or_program_that_does_not_exist_is_refused():
    assert "no module" in refusal(target=Target("module", "no_such_module.at_all"))
    assert "not on the PATH" in refusal(target=Target("executable", "no-such-program"))


def test_a_script_that_looks_like_a_flag_stays_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-c").touch()
    assert plan_of(target=Target("script", "-c", ("print()",)), cpu=True).command == ("python", os.path.join(".", "-c"), "print()")


words = st.lists(st.text(st.characters(codec=None, exclude_categories=()), max_size=8).filter(lambda word: "\0" not in word), max_size=6)


@given(words, st.sampled_from(["exec", "fork", "spawn"]))
def test_arguments_are_at_the_end_of_the_command_untouched(arguments, method):
    flags = {"cpu": True} if method == "exec" else {"cpu": True, "num_processes": 2, "start_method": method}
    plan = plan_of(target=Target("script", __file__, tuple(arguments)), **flags)
    assert plan.target.arguments == tuple(arguments)
    assert plan.command[len(plan.command) - len(arguments) :] == tuple(arguments)


@given(words)
def test_show_prints_one_line_per_fact_whatever_the_arguments(arguments):
    config = resolve(flags={"cpu": True, "num_processes": 2}, environ={})
    target = Target("script", __file__, tuple(arguments))
    text = describe_plan(make_plan(config, target, {}, MACHINE), config)
    assert len(text.splitlines()) == len(describe_plan(make_plan(config, SCRIPT, {}, MACHINE), config).splitlines())
    assert all(line.isprintable() for line in text.splitlines())


def test_show_says_where_values_come_from():
    config = resolve(flags={"cpu": True}, environ={"SLIPSTREAM_NUM_PROCESSES": "2"})
    text = describe_plan(make_plan(config, SCRIPT, {}, MACHINE), config)
    assert "num_processes  2  from SLIPSTREAM_NUM_PROCESSES" in text
    assert "cpu            true  from --cpu" in text
    assert "fork: safe here" in text


def test_a_fresh_interpreter_gets_the_flags_of_this_one():
    assert MachineSpec().interpreter[0] == sys.executable


def test_insisting_on_several_accelerators_where_there_are_none_is_refused():
    assert "but there are 0 accelerators to use on this machine" in refusal(multi_gpu=True)
    two = MachineSpec(accelerators=VisibleAccelerators(2, "VISIBLE"), interpreter=("python",))
    assert plan_of(machine=two, multi_gpu=True).local_processes == 2


def test_a_number_of_processes_that_would_take_all_memory_is_refused():
    assert "num_processes=3000 (from --num_processes) is 3000 on this machine, which has 8 cores" in refusal(cpu=True, num_processes=3000)
    assert plan_of(cpu=True, num_processes=512).local_processes == 512
