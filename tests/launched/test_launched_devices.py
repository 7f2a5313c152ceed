"""Launches on the stand-in accelerator: a device for each process, also through a variable, and a clean error where it cannot be built."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from launching import command, eventually, gone, launch, script

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


RESUME = """
import os, signal, sys, torch
from slipstream import Accelerator
accelerator = Accelerator()
folder, dies = sys.argv[1], sys.argv[2] == "dies" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=12 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), loader)
if os.path.exists(folder):
    accelerator.load_state(folder)
for number, batch in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if number == 1 and not os.path.exists(folder):
        accelerator.save_state(folder)
        if dies and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
weights = accelerator.get_state_dict(model)
accelerator.print(accelerator.distributed_type, [value.tolist() for value in weights.values()])
"""


def test_killed_shard_resumes_exactly(launch, script, tmp_path, standin):
    """A rank of sharded training is killed; after the restart the weights are those of a run without it, to the bit."""
    words = ("--device", standin, "--num_processes", "2", "--use_fsdp", "--max_restarts", "1", script(RESUME))
    whole = launch(*words, str(tmp_path / "whole"), "lives")
    assert whole.out.startswith("FSDP [["), whole.err
    killed = launch(*words, str(tmp_path / "killed"), "dies")
    assert "was ended by SIGKILL" in killed.err
    assert (killed.code, killed.out) == (0, whole.out), killed.err


FOREVER = """
from telling import up
import torch
from slipstream import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
up()
while True:
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).mean())
    optimizer.step()
"""


def test_interrupted(command, script, standin):
    """Ctrl-C ends all processes at once, in the middle of collectives, and leaves none."""
    running = command("--device", standin, "--num_processes", "2", script(FOREVER))
    pids = running.pids(2)
    os.killpg(running.process.pid, signal.SIGINT)
    finished = running.finish()
    assert finished.code == 128 + signal.SIGINT, finished.err
    assert all(eventually(lambda pid=pid: gone(pid), 10) for pid in pids.values())
    assert "Segmentation" not in finished.err
