"""A run that Ctrl-C ends says so: it was interrupted, and did not fail."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import PATIENCE, command, eventually, script

pytestmark = pytest.mark.launched

SCRIPT = """
import sys, time, torch
from slipstream import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
accelerator.init_trackers("project", init_kwargs={"local": {"name": "run"}})
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.print("training", flush=True)
while True:
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    time.sleep(0.01)
"""


def check(folder: Path) -> None:
    run = folder / "runs" / "run"
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["text"]) == ("end", "by Ctrl-C, or another SIGINT")
    assert "interrupted" in (run / "report.html").read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_launched(command, script, tmp_path, processes):
    """Ctrl-C in the terminal of a launch, which reaches the launcher and every process."""
    running = command("--cpu", "--num_processes", processes, script(SCRIPT), str(tmp_path / "project"))
    assert running.process.stdout.readline() == "training\n"
    os.killpg(running.process.pid, signal.SIGINT)
    running.finish()
    check(tmp_path / "project")


def test_plain(script, tmp_path):
    """Ctrl-C in a script that Python runs without a launcher."""
    words = [sys.executable, script(SCRIPT), str(tmp_path / "project")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    check(tmp_path / "project")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_launcher_ended_at_import(script, tmp_path, number):
    """A signal that ends the launcher while it imports torch leaves nothing in the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    words = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", "2", script("import time; time.sleep(60)")]

    def answer() -> None:
        signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and the launcher goes on, as it should

    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=answer) as process:
        assert eventually(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert not list(folder.iterdir())
