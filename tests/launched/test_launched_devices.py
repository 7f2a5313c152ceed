"""Launches on the stand-in accelerator: a device for each process, also through a variable, and a clean error where it cannot be built."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launching import command, launch, script

pytestmark = pytest.mark.launched

TRAIN = """
import torch
from slipstream import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model, data = torch.nn.Linear(4, 1), torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, 4))
for x, y in loader:
    assert x.device == accelerator.device
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
where = accelerator.gather([str(accelerator.device)])
accelerator.print(where, accelerator.distributed_type, sum(p.sum() for p in model.parameters()).item())
"""


def test_a_device_for_each_process(launch, script, standin):
    """`--device` and `--gpu_ids` give each process a device of its own; forked and fresh processes train alike."""
    forked = launch("--device", standin, "--num_processes", "2", script(TRAIN))
    assert forked.out.startswith("['standin:0', 'standin:1'] MULTI_GPU"), forked.err
    fresh = launch("--gpu_ids", "1,3", "--start_method", "spawn", script(TRAIN), SLIPSTREAM_DEVICE=standin)
    assert (fresh.code, fresh.out) == (0, forked.out), fresh.err


def test_one_process(launch, script, standin):
    """One process takes the launcher's place, and uses the first of the visible devices."""
    single = launch("--device", standin, "--num_processes", "1", script(TRAIN))
    assert single.out.startswith("['standin:0'] NO"), single.err


@pytest.mark.parametrize("processes", ["1", "2"])
def test_without_compiler(launch, script, tmp_path, processes):
    """Without a compiler the launcher says what is missing and how to get it; no process starts."""
    done = launch("--device", "standin", "--num_processes", processes, script("print('started')"), CXX="no-such-compiler",
                  SLIPSTREAM_STANDIN_CACHE=str(tmp_path))  # fmt: skip
    assert done.code == 1
    assert done.out == ""
    assert "no compiler 'no-such-compiler' here; install g++" in done.err
    assert "Traceback" not in done.err


def test_check_of_the_machine(standin):
    """`slipstream test --device` runs its checks there, and ends with a line that can be pasted into an issue."""
    words = ("test", "--device", standin, "--num_processes", "2", "--json", "--num_cpu_threads_per_process", "1")
    done = subprocess.run([sys.executable, "-m", "slipstream", *words], capture_output=True, text=True, timeout=100, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["device"], report["backend"]) == (0, "standin", "standin"), done.stderr
    assert report["summary"].startswith("worked on 2 x standin (stand-in accelerator 0), torch 2.")
    assert report["summary"] in done.stderr.splitlines()[-1]
