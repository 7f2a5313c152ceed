"""Functions in several processes, from a process that goes on: what notebooks and tests stand on."""

from __future__ import annotations

import os

import pytest

from slipstream.config import resolve
from slipstream.errors import ConfigError, LaunchError
from slipstream.launch.function_launcher import launch_function

pytestmark = pytest.mark.launched
TWO = resolve(flags={"cpu": True, "num_processes": 2}, environ={})


def test_closure_on_every_rank(tmp_path):
    """A closure runs on every rank and its output comes back."""
    factor = 21

    def work(note, number):
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor(number)
        dist.all_reduce(total)
        print("rank", dist.get_rank(), factor * total.item())
        with open(f"{note}-{dist.get_rank()}", "w") as file:
            file.write(str(os.getppid()))

    printed: list[str] = []
    launch_function(work, (str(tmp_path / "note"), 1), config=TWO, console="main", output=printed.append)
    assert printed == ["rank 0 42\n"]
    parents = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert len(parents) == 1
    assert os.getpid() not in parents


def test_failure_with_user_frames():
    """A failure raises with the user's frames and its exit code."""
    def work():
        import os

        if os.environ["RANK"] == "1":
            raise KeyError("missing")

    with pytest.raises(LaunchError, match="rank 1 of 2") as failed:
        launch_function(work, config=TWO)
    assert failed.value.exit_code == 1
    assert str(failed.value).count("Traceback") == 1
    assert "in work" in str(failed.value)
    assert "launch/worker_main.py" not in str(failed.value)


def test_several_machines_refused():
    """Several machines are refused."""
    config = resolve(flags={"num_machines": 2, "main_process_ip": "a"}, environ={})
    with pytest.raises(ConfigError, match="one machine"):
        launch_function(print, config=config)
