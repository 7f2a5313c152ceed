"""A pipeline in a launched program: it ends without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launched

SCRIPT = """
import torch
from slipstream import Accelerator
from slipstream.inference.pipeline import prepare_pippy

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).eval()
model = prepare_pippy(model, example_args=(torch.ones(4, 4),), gather_output=True)
print(model(torch.ones(5, 4)).shape)
model, = accelerator.free_memory(model)
accelerator.state.destroy_process_group()
"""


def test_silent_after_destroy(tmp_path: Path) -> None:
    """No warning of a group or a store that was left open, no abort by a connection that was, and exit code 0."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", "2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "torch.Size([5, 4])\n" * 2
