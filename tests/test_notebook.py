"""Functions of a cell run in several processes; what they print arrives in the cell; what is wrong is explained by name."""

from __future__ import annotations

import functools
import linecache
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import PartialState
from slipstream.errors import ConfigError, LaunchError, StateError
from slipstream.notebook import debug_launcher, notebook_launcher


def cell(source: str, name: str = "/tmp/ipykernel_1/cell.py", **variables: Any) -> dict[str, Any]:
    """Runs a cell as a kernel does: in a namespace that is called __main__ and can be imported from nowhere."""
    namespace = {"__name__": "__main__", **variables}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# What runs


@pytest.mark.launched
def test_cell_function_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """A function of a cell runs on every rank and rank 0 prints."""
    notebook = cell(
        """
import sys
from dataclasses import dataclass

@dataclass
class Settings:
    rate: float

settings = Settings(0.5)

def helper(value):
    return value * settings.rate

def make(offset):
    def train(name, numbers):
        from slipstream import PartialState
        state = PartialState()
        everybody = state.gather([helper(offset + state.process_index)])
        print(name, numbers, everybody, state.num_processes)
        print("to stderr", file=sys.stderr)
    return train

train = make(10)
"""
    )
    notebook_launcher(notebook["train"], ("run", [1, 2]), num_processes=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["run [1, 2] [5.0, 5.5] 2", "to stderr"]


@pytest.mark.launched
def test_all_output_with_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """The output of every rank with a prefix."""
    talk = cell("def talk():\n    import os\n    print('I am', os.environ['RANK'])")["talk"]
    notebook_launcher(talk, num_processes=2, log_line_prefix_template="<${role_name} ${rank}> ")
    assert sorted(capsys.readouterr().out.splitlines()) == ["<default 0> I am 0", "<default 1> I am 1"]


@pytest.mark.launched
def test_debug_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """Debug launcher runs on the CPU and shows every rank."""
    check = cell(
        "def check(word):\n    from slipstream import PartialState\n"
        "    state = PartialState()\n    print(word, state.device, state.num_processes)"
    )["check"]
    debug_launcher(check, ("on",), num_processes=3)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {rank}] on cpu 3" for rank in range(3)]


@pytest.mark.launched
@pytest.mark.parametrize(
    "first",
    [
        pytest.param("first\n", id="a line"),
        pytest.param("\r 10%", id="a progress bar"),
    ],
)
def test_text_arrives_while_running(first: str, tmp_path: Path) -> None:
    """The function goes on only when its text has been seen here: a cell that shows nothing before the end would be no progress."""
    seen = tmp_path / "seen"
    arrived: list[str] = []

    class Screen:
        def write(self, text: str) -> None:
            arrived.append(text)
            if first in "".join(arrived):
                seen.touch()

        def flush(self) -> None: ...

    source = """
def show(first, seen):
    import os, sys, time
    if os.environ["RANK"] == "0":
        sys.stdout.write(first)
        sys.stdout.flush()
        limit = time.monotonic() + 5
        while not seen.exists():
            assert time.monotonic() < limit, "nothing was seen of it"
            time.sleep(0.01)
        print("second")
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", Screen())
        notebook_launcher(cell(source)["show"], (first, seen), num_processes=2)
    assert "".join(arrived) == f"{first}second\n"


@pytest.mark.launched
def test_options_reach_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """Options reach the processes."""
    tell = cell(
        "def tell():\n    from slipstream.config import for_worker\n    print(for_worker().compute.mixed_precision)\n"
        "    import os\n    print(os.environ['TORCHELASTIC_MAX_RESTARTS'])"
    )["tell"]
    notebook_launcher(tell, num_processes=2, mixed_precision="bf16", max_restarts=3)
    assert capsys.readouterr().out.split() == ["bf16", "3"]


def test_one_process_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is this one."""
    monkeypatch.setenv("SLIPSTREAM_MIXED_PRECISION", "")
    seen: list[Any] = []
    lock = threading.Lock()  # could not be sent anywhere
    notebook_launcher(
        lambda word: seen.append((os.getpid(), word, lock, os.environ["SLIPSTREAM_MIXED_PRECISION"])),
        ("here",),
        num_processes=1,
        mixed_precision="bf16",
    )
    assert seen == [(os.getpid(), "here", lock, "bf16")]
    assert os.environ["SLIPSTREAM_MIXED_PRECISION"] == ""


_ON_A_DEVICE = """
import torch
from slipstream import notebook_launcher
from slipstream.devices.memory import allocator_statistics, clear_device_cache
from slipstream.devices.rng import capture
from slipstream.errors import LaunchError
from slipstream.testing import standin

standin.enable()
clear_device_cache(), allocator_statistics(), capture()
print("started by looking:", torch.standin.is_initialized())
weights = torch.ones(2, device="standin")

def train(own=None):
    from slipstream import PartialState
    state = PartialState()
    print(state.device, state.reduce(torch.ones(1, device=state.device)).item(), own is not None)

print("in use:", torch.standin.is_initialized())
notebook_launcher(train, num_processes=2, output="all")
notebook_launcher(train, num_processes=1)
try:
    notebook_launcher(train, (weights,), num_processes=2)
except LaunchError as error:
    print(error)
"""


@pytest.mark.launched
def test_device_in_use(standin: str) -> None:
    """A notebook that uses a device starts processes on it: it is not forked. What is in its memory cannot be sent, and is named."""
    done = subprocess.run([sys.executable, "-c", _ON_A_DEVICE], capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["started by looking: False", "in use: True"]
    assert sorted(lines[2:4]) == ["[rank 0] standin:0 2.0 False", "[rank 1] standin:1 2.0 False"]
    assert lines[4] == "standin:0 1.0 False", "one process runs in the notebook itself"
    assert lines[5].startswith("notebook_launcher cannot send args[0] to other processes: it is on standin:0, in the memory of this")



@pytest.mark.launched
def test_notebook_state_unused_is_fine() -> None:
    """A state in the notebook does not matter if the function leaves it alone."""
    state = PartialState()
    check = cell("def check():\n    from slipstream import PartialState\n    assert PartialState().num_processes == 2", state=state)[
        "check"
    ]
    notebook_launcher(check, num_processes=2)
    assert state.num_processes == 1


# What fails


@pytest.mark.launched
def test_failure_report(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure has the worker's exception, the cell's lines and the other ranks output."""
    fail = cell(
        """def fail():
    import os, time
    rank = int(os.environ["RANK"])
    print(f"printed by {rank}", flush=True)
    if rank == 1:
        raise ValueError("no such column: label")
    time.sleep(60)
""",
        name="/tmp/ipykernel_1/fail.py",
    )["fail"]
    with pytest.raises(LaunchError) as caught:
        notebook_launcher(fail, num_processes=2)
    report = str(caught.value)
    assert "rank 1 of 2" in report
    assert '  File "/tmp/ipykernel_1/fail.py", line 6, in fail\n    raise ValueError("no such column: label")\n' in report
    assert report.endswith("ValueError: no such column: label")
    assert "slipstream-notebook-" not in report
    assert caught.value.exit_code == 1
    assert capsys.readouterr().out == "printed by 0\n--- the last output of rank 1 ---\nprinted by 1\n"


@pytest.mark.launched
def test_exit_code_returned() -> None:
    """An exit code comes back."""
    leave = cell("def leave():\n    import sys\n    sys.exit(7)")["leave"]
    with pytest.raises(LaunchError, match="exit code 7") as caught:
        debug_launcher(leave)
    assert caught.value.exit_code == 7


# What is refused before anything is started


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device which this machine may not have."""

    device = torch.device("cuda", 0)


def on_another_device() -> torch.Tensor:
    return torch.empty(2).as_subclass(Elsewhere)


def model_on_another_device() -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(on_another_device())
    return module


class Accelerator:
    """Stands for the one of the library, which is recognised by its name and home."""

    __module__ = "slipstream.accelerator.accelerator"


CAPTURED: dict[str, tuple[Callable[[], Any], str]] = {
    "a state": (PartialState, "is the PartialState of this one process.*Make it inside the function"),
    "an accelerator": (Accelerator, "is the Accelerator of this one process.*Make it inside the function"),
    "a store": (torch.distributed.HashStore, "is a HashStore, a connection of this one process"),
    "a tensor": (on_another_device, r"is on cuda:0, in the memory of this process.*move it to the CPU"),
    "a model": (model_on_another_device, r"has tensors on cuda:0"),
}


@pytest.mark.parametrize("kind", CAPTURED)
def test_process_objects_refused(kind: str) -> None:
    """What belongs to this process is refused."""
    make, reason = CAPTURED[kind]
    train = cell("def train():\n    return thing", thing=make())["train"]
    with pytest.raises(LaunchError, match=rf"^notebook_launcher cannot send thing \(used in train\) to other processes: it {reason}"):
        notebook_launcher(train, num_processes=2)


@pytest.mark.parametrize("place", ["global", "closure", "argument", "helper", "container", "method"])
def test_captured_variable_named(place: str) -> None:
    """The variable is named wherever it is."""
    function, args, name = placed(place, Accelerator())
    with pytest.raises(LaunchError, match=rf"cannot send {name} to other processes"):
        debug_launcher(function, args)


def placed(place: str, thing: Any) -> tuple[Any, tuple[Any, ...], str]:
    """A function with a thing in some place, and how the error should call it."""
    if place == "argument":
        return cell("def train(thing): ...")["train"], (thing,), r"args\[0\]"
    if place == "closure":
        return (
            cell("def make(thing):\n    def train():\n        return thing\n    return train")["make"](thing),
            (),
            r"thing \(used in make.<locals>.train\)",
        )
    if place == "helper":
        source = "class Task:\n    def run(self):\n        return thing\ndef train():\n    return Task().run()"
        return cell(source, thing=thing)["train"], (), r"thing \(used in Task.run\)"
    if place == "method":
        source = "class Task:\n    def __init__(self, thing): self.thing = thing\n    def run(self): return 1"
        return cell(source)["Task"](thing).run, (), "the thing of the object of Task.run"
    if place == "container":
        return cell("def train():\n    return settings", settings={"model": thing})["train"], (), r"settings \(used in train\)\['model'\]"
    return cell("def train():\n    return thing.x", thing=thing, x=1)["train"], (), r"thing \(used in train\)"


@pytest.mark.launched
def test_attribute_is_no_capture() -> None:
    """A name that is only an attribute is no capture."""
    train = cell("def train(box):\n    return box.thing", thing=on_another_device())["train"]
    from types import SimpleNamespace

    notebook_launcher(train, (SimpleNamespace(thing=1),), num_processes=2)


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (cell("def train():\n    return lock", lock=threading.Lock())["train"], (), r"lock \(used in train\)"),
        (cell("def train(x): ...")["train"], ((number for number in range(3)),), r"args\[0\]"),
        (functools.partial(cell("def train(x): ...")["train"], x=threading.Lock()), (), "argument x of the function"),
        (cell("def train():\n    return box", box=[1, threading.Lock()])["train"], (), r"box \(used in train\)\[1\]"),
    ],
    ids=["global", "argument", "partial", "container"],
)
def test_unpicklable_value_named(function: Any, args: tuple[Any, ...], name: str) -> None:
    """What cannot be sent is named."""
    with pytest.raises(LaunchError, match=rf"^{name} cannot be sent to other processes: [\s\S]*Make it inside the function"):
        notebook_launcher(function, args, num_processes=2)


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_inside_launched_process(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a launched process."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StateError, match="rank 1 of 2, started by torchrun"):
        launcher(print, num_processes=2)


def test_num_processes_required() -> None:
    """How many processes has to be said."""
    with pytest.raises(ConfigError, match=r"not told how many processes.*num_processes="):
        notebook_launcher(print)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"node_rank": 1}, "node_rank=1"),
        ({"master_addr": "10.0.0.1"}, "master_addr='10.0.0.1'"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd'"),
        ({"rdzv_endpoint": "a:1"}, "rdzv_endpoint='a:1'"),
        ({"rdzv_conf": {"timeout": 3}}, "rdzv_conf="),
        ({"rdzv_id": "job"}, "rdzv_id='job'"),
    ],
)
def test_machine_options_refused(options: dict[str, Any], named: str) -> None:
    """Options for several machines are refused."""
    with pytest.raises(ConfigError, match="slipstream launch") as caught:
        notebook_launcher(print, num_processes=2, **options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_processes": 0}, "num_processes"),
        ({"num_processes": "two"}, "num_processes"),
        ({"mixed_precision": "fp12"}, "mixed_precision"),
        ({"mixed_precision": "fp12", "num_processes": 1}, "mixed_precision"),
        ({"output": "some"}, "output='some' is neither"),
    ],
)
def test_wrong_options_refused(options: dict[str, Any], named: str) -> None:
    """Wrong options are refused."""
    with pytest.raises(ConfigError, match=named):
        notebook_launcher(print, **{"num_processes": 2, **options})


def test_port_has_no_effect() -> None:
    """A port is not needed."""
    with pytest.warns(UserWarning, match="use_port=29501 has no effect"):
        notebook_launcher(len, ("abc",), num_processes=1, use_port="29501")


def test_call_instead_of_function() -> None:
    """A call instead of a function."""
    with pytest.raises(ConfigError, match="without parentheses"):
        debug_launcher(None)  # type: ignore[arg-type]
