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


def test_two_cpu_processes():
    """CPU with two processes starts two."""
    plan = plan_of(cpu=True, num_processes=2)
    assert (plan.local_processes, plan.num_processes, plan.single) == (2, 2, False)


def test_single_process_exec():
    """One process takes the launcher's place."""
    plan = plan_of(cpu=True)
    assert plan.single
    assert plan.command == ("python", __file__)


@pytest.mark.parametrize("option", [{"max_restarts": 1}, {"log_dir": "logs"}, {"tee": "3"}])
def test_single_process_under_launcher(option):
    """One process that needs watching gets a launcher."""
    assert plan_of(cpu=True, **option).start_method == "fork"


def test_process_count_from_accelerators():
    """The number of processes follows the accelerators that are there."""
    assert plan_of(machine=MachineSpec(accelerators=VisibleAccelerators(4, "SOME_DEVICES"))).local_processes == 4
    assert plan_of(machine=MachineSpec(accelerators=VisibleAccelerators(4, "SOME_DEVICES")), cpu=True).local_processes == 1


def test_gpu_ids_limit_visible_devices():
    """Named accelerators limit what processes see."""
    plan = plan_of(machine=MachineSpec(accelerators=VisibleAccelerators(4, "SOME_DEVICES")), gpu_ids="1, 3")
    assert plan.local_processes == 2
    assert plan.environment["SOME_DEVICES"] == "1,3"


def test_gpu_ids_without_accelerator():
    """Named accelerators on a machine without any are refused."""
    assert "no accelerator was found" in refusal(gpu_ids="0")


def test_processes_divided_over_machines():
    """Processes are shared out over machines."""
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
def test_start_method_and_reason(flags, method):
    """The start method and its reason."""
    plan = plan_of(cpu=True, num_processes=2, **flags)
    assert plan.start_method == method
    assert plan.reason


def test_fork_only_on_linux():
    """Fork is for linux unless asked for."""
    elsewhere = MachineSpec(platform="darwin")
    assert plan_of(machine=elsewhere, cpu=True, num_processes=2).start_method == "spawn"
    assert plan_of(machine=elsewhere, cpu=True, num_processes=2, start_method="fork").start_method == "fork"


def test_threads_are_cores_divided():
    """Threads are the cores divided unless an option says otherwise."""
    assert plan_of(cpu=True, num_processes=4).environment["OMP_NUM_THREADS"] == "2"
    assert plan_of(cpu=True, num_processes=64).environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in plan_of(environ={"OMP_NUM_THREADS": "3"}, cpu=True, num_processes=4).environment
    assert plan_of(cpu=True, num_processes=4, num_cpu_threads_per_process=5).environment["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in plan_of(cpu=True).environment


def test_one_machine_uses_loopback():
    """One machine meets on the loopback interface at a free port."""
    plan = plan_of(cpu=True, num_processes=2)
    assert (plan.rendezvous.host, plan.rendezvous.port, plan.environment["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", None, "lo")
    assert plan_of(cpu=True, num_processes=2, main_process_port=0).rendezvous.port is None
    assert plan_of(cpu=True, num_processes=2, main_process_port=1234).rendezvous.port == 1234


def test_workers_get_resolved_config():
    """The workers get the resolved configuration."""
    plan = plan_of(cpu=True, num_processes=2, mixed_precision="bf16")
    assert resolved_config.load(plan.environment[resolved_config.VARIABLE]).compute.mixed_precision == "bf16"


def test_machines_without_meeting_point():
    """Several machines without a place to meet are refused."""
    assert "main_process_ip is not given" in refusal(num_machines=2, num_processes=2)
    assert "same_network=false" in refusal(num_machines=2, num_processes=2, main_process_ip="a", same_network=False)


@pytest.mark.parametrize("name", ["missing.py", "no/such/script.py", "folder"])
def test_missing_script_refused(name, tmp_path, monkeypatch):
    """A script that cannot be run is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=name):
        plan_of(target=Target("script", name))


def test_unreadable_script_refused(tmp_path):
    """A script that cannot be read is refused."""
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


def test_missing_module_or_program_refused():
    """A module or program that does not exist is refused."""
    assert "no module" in refusal(target=Target("module", "no_such_module.at_all"))
    assert "not on the PATH" in refusal(target=Target("executable", "no-such-program"))


def test_script_named_like_flag(tmp_path, monkeypatch):
    """A script that looks like a flag stays a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-c").touch()
    assert plan_of(target=Target("script", "-c", ("print()",)), cpu=True).command == ("python", os.path.join(".", "-c"), "print()")


words = st.lists(st.text(st.characters(codec=None, exclude_categories=()), max_size=8).filter(lambda word: "\0" not in word), max_size=6)


@given(words, st.sampled_from(["exec", "fork", "spawn"]))
def test_arguments_unchanged_at_end(arguments, method):
    """Arguments are at the end of the command untouched."""
    flags = {"cpu": True} if method == "exec" else {"cpu": True, "num_processes": 2, "start_method": method}
    plan = plan_of(target=Target("script", __file__, tuple(arguments)), **flags)
    assert plan.target.arguments == tuple(arguments)
    assert plan.command[len(plan.command) - len(arguments) :] == tuple(arguments)


@given(words)
def test_show_one_line_per_fact(arguments):
    """Show prints one line per fact whatever the arguments."""
    config = resolve(flags={"cpu": True, "num_processes": 2}, environ={})
    target = Target("script", __file__, tuple(arguments))
    text = describe_plan(make_plan(config, target, {}, MACHINE), config)
    assert len(text.splitlines()) == len(describe_plan(make_plan(config, SCRIPT, {}, MACHINE), config).splitlines())
    assert all(line.isprintable() for line in text.splitlines())


def test_show_origins_of_values():
    """Show says where values come from."""
    config = resolve(flags={"cpu": True}, environ={"SLIPSTREAM_NUM_PROCESSES": "2"})
    text = describe_plan(make_plan(config, SCRIPT, {}, MACHINE), config)
    assert "num_processes  2  from SLIPSTREAM_NUM_PROCESSES" in text
    assert "cpu            true  from --cpu" in text
    assert "fork: safe here" in text


def test_interpreter_flags_passed_on():
    """A fresh interpreter gets the flags of this one."""
    assert MachineSpec().interpreter[0] == sys.executable


def test_multi_gpu_without_accelerators():
    """Insisting on several accelerators where there are none is refused."""
    assert "but there are 0 accelerators to use on this machine" in refusal(multi_gpu=True)
    two = MachineSpec(accelerators=VisibleAccelerators(2, "VISIBLE"), interpreter=("python",))
    assert plan_of(machine=two, multi_gpu=True).local_processes == 2


def test_too_many_processes_refused():
    """A number of processes that would take all memory is refused."""
    assert "num_processes=3000 (from --num_processes) is 3000 on this machine, which has 8 cores" in refusal(cpu=True, num_processes=3000)
    assert plan_of(cpu=True, num_processes=512).local_processes == 512


FOUR = MachineSpec(cores=8, accelerators=VisibleAccelerators(4, "VISIBLE", total=4, total_variable="DEVICES", plugin="made.up"))


def test_device_of_the_plan():
    """A family that has to be enabled is named in the plan, and not for the CPU; the plan shows the device."""
    plan = plan_of(machine=FOUR, device="xpu", num_processes=2)
    assert (plan.plugin, plan.start_method) == ("made.up", "fork")
    assert "device      xpu\n" in describe_plan(plan, resolve(flags={"device": "xpu"}, environ={}))
    assert plan_of(machine=FOUR, device="cpu", num_processes=9).plugin is None
    assert plan_of(machine=FOUR, device="xpu", gpu_ids="0,2").environment["VISIBLE"] == "0,2"
    assert plan_of(machine=FOUR, device="xpu", gpu_ids="0,2").local_processes == 2


def test_more_processes_than_devices():
    """More processes than devices is refused with the arithmetic, and what to write."""
    said = refusal(machine=FOUR, device="xpu", num_processes=6)
    assert "num_processes=6 (from --num_processes) means 6 on this machine" in said
    assert "device=xpu (from --device) has 4 devices: 6 - 4 = 2 without one" in said
    assert said.endswith("write --num_processes 4, or set DEVICES=6 for more devices.")


def test_more_processes_than_visible_devices():
    """Devices that a variable hides are counted as hidden."""
    two = MachineSpec(cores=8, accelerators=VisibleAccelerators(2, "VISIBLE", total=4, total_variable="DEVICES"))
    said = refusal(machine=two, device="xpu", num_processes=3)
    assert "has 2 devices of 4, which VISIBLE allows: 3 - 2 = 1 without one" in said
    assert said.endswith("write --num_processes 2, or unset VISIBLE.")


def test_device_numbers_that_are_not_there():
    """A number beyond the devices is refused."""
    assert "names 7, but device=xpu (from --device) has 4 devices, 0 to 3" in refusal(machine=FOUR, device="xpu", gpu_ids="0,7")
