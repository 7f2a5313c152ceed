"""What guards find in a launch that is over before they would look: it is said when the processes end, once."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import pytest
from launching import command, launch, script

pytestmark = pytest.mark.launched

SCRIPT = """
import time, torch
from slipstream import Accelerator

def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(5):
        bad = number == BAD and accelerator.process_index == 1
        accelerator.backward(model(torch.full((1, 2), float("nan") if bad else 1.0)).mean())
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(LATE * accelerator.process_index)

main()
"""


@pytest.mark.parametrize(("bad", "late"), [(2, 0.0), (4, 1.0)])
def test_nan_short_launch(launch, script, bad, late):
    """A NaN on rank 1 in five steps without end_training: for rank 1 and its step, also when the main process has ended by then."""
    finished = launch("--cpu", "--num_processes", "2", script(f"BAD, LATE = {bad}, {late}\n{SCRIPT}"))
    assert finished.code == 0
    assert f"step {bad}, rank 1: the loss is nan; " in finished.err
    assert finished.err.count("\n") == 1, finished.err
