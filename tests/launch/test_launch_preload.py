"""Modules that workers need are imported once, before they are forked: ours, and torch's compiler for programs that train."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from slipstream.launch.agent import modules_to_preload, unsafe_fork_reason
from slipstream.launch.plan import Target

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
print(sorted(name for name in set(sys.modules) - loaded if name.startswith("slipstream.")))
"""


def launch(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", "2", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=script.parent)


@pytest.mark.launched
@pytest.mark.parametrize(("text", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_compiler_imported_before_fork(tmp_path: Path, text: str, expected: bool) -> None:
    """A program with an optimizer finds torch's compiler imported, unless it sets variables of the compiler first."""
    script = tmp_path / "program.py"
    script.write_text(f"import sys\nloaded = 'torch._dynamo' in sys.modules\n{text}\nprint('loaded', loaded)\n")
    done = launch(script)
    assert done.stdout.splitlines() == [f"loaded {expected}"] * 2
    assert done.stderr == ""


@pytest.mark.launched
def test_own_modules_imported_before_fork(tmp_path: Path) -> None:
    """A training step in a forked worker imports no further module of ours."""
    script = tmp_path / "step.py"
    script.write_text(STEP)
    assert launch(script).stdout.splitlines() == ["[]"] * 2, "name these modules in _OWN_MODULES of launch/agent.py"


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
