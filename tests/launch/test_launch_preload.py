"""What a worker still has to do between the fork and its first step, in counts: modules, requests to the store, processes, finalizers.

Modules that workers need are imported once, before they are forked: ours, and torch's compiler for programs that train.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from slipstream.launch.agent import modules_to_preload, unsafe_fork_reason
from slipstream.launch.plan import Target
from slipstream.testing.rank_pool import GLOO_LINES

PROGRAMS = {
    "with an optimizer": ("from torch import optim", True),
    "without": ("import torch", False),
    "one that sets the compiler up": ("import os; os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'; from torch import optim", False),
}
STEP = """
import sys
loaded = set(sys.modules)
import torch
from torch.utils.data import DataLoader, TensorDataset
from slipstream import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
for (batch,) in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
new = set(sys.modules) - loaded
print(sorted(name for name in new if name.startswith("slipstream.")), sum(name.startswith("torch.") for name in new) <= 1)
"""
PLAIN_STEP = """
import sys
loaded = set(sys.modules)
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
data = TensorDataset(torch.ones(8, 2))
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for (batch,) in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
    model(batch).mean().backward()
    optimizer.step()
print(sum(name.startswith("torch.") for name in set(sys.modules) - loaded) <= 1)
dist.destroy_process_group()
"""
COUNTED_STEP = """
import collections, json, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from slipstream import Accelerator
from slipstream.distributed.current import current
requests, forks = collections.Counter(), []
os.register_at_fork(before=lambda: forks.append(1))
def count(frame, event, called):
    if event == "c_call" and getattr(called, "__module__", "") == "torch._C._distributed_c10d":
        requests[called.__name__] += 1
sys.setprofile(count)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2))
(batch,) = next(iter(loader))
accelerator.backward(model(batch).mean())
optimizer.step()
sys.setprofile(None)
asked = ("set", "get", "add", "append", "multi_get", "multi_set", "compare_set", "delete_key", "clone")
print(json.dumps({"store": sum(requests[name] for name in asked), "forks": len(forks), "guarded": current().channel().sequence}))
"""
FINALIZERS = """
import weakref
def of_torch(finalizer):
    return finalizer.peek()[1].__module__ == "torch.library"
found = [finalizer.atexit for finalizer in list(weakref.finalize._registry) if of_torch(finalizer)]
print(len(found) > 50, any(found))
"""


def launch(script: Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", str(processes), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=script.parent)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what the workers printed."""
    return GLOO_LINES.sub("", done.stdout).splitlines()


@pytest.mark.launched
@pytest.mark.parametrize(("text", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_compiler_imported_before_fork(tmp_path: Path, text: str, expected: bool) -> None:
    """A program with an optimizer finds torch's compiler imported, unless it sets variables of the compiler first."""
    script = tmp_path / "program.py"
    script.write_text(f"import sys\nloaded = 'torch._dynamo' in sys.modules\n{text}\nprint('loaded', loaded)\n")
    done = launch(script)
    assert lines(done) == [f"loaded {expected}"] * 2
    assert done.stderr == ""


@pytest.mark.launched
def test_own_modules_imported_before_fork(tmp_path: Path) -> None:
    """A training step in a forked worker imports no further module of ours, and at most one of torch."""
    script = tmp_path / "step.py"
    script.write_text(STEP)
    assert lines(launch(script)) == ["[] True"] * 2, "name these modules in _OWN_MODULES of launch/agent.py"


@pytest.mark.launched
def test_torch_modules_imported_before_fork(tmp_path: Path) -> None:
    """A step with plain DistributedDataParallel imports at most one further module of torch, of the thousand that it needs."""
    script = tmp_path / "plain_step.py"
    script.write_text(PLAIN_STEP)
    assert lines(launch(script)) == ["True"] * 2


@pytest.mark.launched
@pytest.mark.parametrize("processes", [2, 4])
def test_requests_until_first_step(tmp_path: Path, processes: int) -> None:
    """Until the end of the first step a worker asks the store nine times, whatever the number of workers, and starts no process.

    Polling the store while the others arrive is not counted; rank 0 and the last one to arrive write one key more.
    """
    script = tmp_path / "counted_step.py"
    script.write_text(COUNTED_STEP)
    counts = [json.loads(line) for line in lines(launch(script, processes))]
    assert len(counts) == processes
    assert {count["forks"] for count in counts} == {0}
    assert max(count["store"] for count in counts) <= 11
    assert max(count["guarded"] for count in counts) <= 3, "exchanges of prepare (model, data) and of the beginning of a pass"


@pytest.mark.launched
def test_operators_kept_at_exit(tmp_path: Path) -> None:
    """A worker ends without undoing torch's registrations of operators, which would copy the pages that all workers share."""
    script = tmp_path / "finalizers.py"
    script.write_text(FINALIZERS)
    assert lines(launch(script)) == ["True False"] * 2


GROUPS = """
import sys, weakref
from functools import partial
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
other = dist.new_group()
tell = eval("lambda name, reference: print(name, 'is gone', flush=True)", {})  # it does not hold this program
watched = {"group of the model": model.process_group, "own group": other, "model": model}
sys.references = [weakref.ref(entry, partial(tell, name)) for name, entry in watched.items()]
watched.clear()
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.launched
def test_process_groups_outlive_the_program(tmp_path: Path) -> None:
    """What a program leaves is finalised, but not its process groups: gloo's threads may be about to let go of a collective.

    The destructor of a group has the interpreter and waits for such a thread, which waits for the interpreter.
    """
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    assert lines(launch(script)) == ["model is gone"] * 2


def test_plain_torch_program_preloads_nothing(tmp_path: Path) -> None:
    """A program that does not mention Slipstream does not pay for importing it; a target whose text is unknown does."""
    script = tmp_path / "plain.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert modules_to_preload(Target("script", str(script))) == []
    assert modules_to_preload(Target("module", "no_such.module"))[0] == "slipstream.accelerator.accelerator"


def test_unsafe_fork_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device driver that has started and a running thread make a fork unsafe."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert unsafe_fork_reason() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert unsafe_fork_reason() == "importing torch has initialised torch.cuda"
    monkeypatch.setattr(threading, "active_count", lambda: 3)
    assert unsafe_fork_reason() == "3 threads are running in the launcher"
