"""What a step costs, in counts that do not depend on the machine: functions entered, system calls, memory kept, collectives."""

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream import Accelerator
from slipstream.observability.options import LedgerKwargs

PACKAGE = str(Path(slipstream.__file__).parent)
IO = Path("/proc/self/io")


def stepping(folder: Path | None = None, *, accumulates: bool = False, interval: float = 3600.0) -> Callable[[], Any]:
    """Return a training step with ledger and guards, without a loader; with a folder, it logs its loss."""
    accelerator = Accelerator(
        cpu=True, project_dir=None if folder is None else str(folder), kwargs_handlers=[LedgerKwargs(interval=interval, summary=False)]
    )
    if folder is not None:
        accelerator.init_trackers("counts")
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    inner = torch.optim.AdamW(net.parameters())
    model, optimizer, scheduler = accelerator.prepare(net, inner, torch.optim.lr_scheduler.StepLR(inner, 1000))
    x, numbers = torch.randn(4, 8), itertools.count()

    def update() -> torch.Tensor:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    def step() -> None:
        if accumulates:
            with accelerator.accumulate(model):
                loss = update()
        else:
            loss = update()
        if folder is not None:
            accelerator.log({"loss": loss}, step=next(numbers))

    step.accelerator = accelerator  # type: ignore[attr-defined]
    for _ in range(3):
        step()
    return step


def entered(step: Callable[[], Any]) -> Counter[str]:
    """Return the functions of ours that one step enters, with how often."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(("accumulates", "most"), [(False, 16), (True, 19)])
def test_functions_entered(accumulates: bool, most: int) -> None:
    """A step with ledger and guards enters a handful of our functions for each of its five calls."""
    found = entered(stepping(accumulates=accumulates))
    assert found.total() <= most, found


def test_functions_entered_by_log(tmp_path: Path) -> None:
    """`log` of a tensor walks its values once, and converts them once."""
    found = entered(stepping(tmp_path))
    assert found.total() <= 16 + 8, found
    assert not {"flatten", "_flatten", "sort_values"} & set(found), found


def test_functions_do_not_grow() -> None:
    """The thousandth step enters as many functions as the fourth."""
    step = stepping()
    before = entered(step).total()
    for _ in range(1000):
        step()
    assert entered(step).total() == before


@pytest.mark.skipif(not IO.exists(), reason="the kernel does not count the system calls of a process")
def test_writes(tmp_path: Path) -> None:
    """A step writes nothing; one that logs writes once, with an entry of the index for 1024 of them."""

    def writes(step: Callable[[], Any], steps: int = 500) -> int:
        before = _count_writes()
        for _ in range(steps):
            step()
        return _count_writes() - before

    assert writes(stepping()) <= 5  # of other threads of this process
    assert 500 <= writes(stepping(tmp_path)) <= 506


def _count_writes() -> int:
    return int(next(line for line in IO.read_text().splitlines() if line.startswith("syscw")).split()[1])


@pytest.mark.parametrize("logs", [False, True])
def test_memory_is_flat(tmp_path: Path, logs: bool) -> None:
    """After a thousand steps more, whose marks the ledger has read, as many blocks of memory are in use as before."""
    step = stepping(tmp_path if logs else None)

    def blocks() -> int:
        step.accelerator.ledger()  # type: ignore[attr-defined]
        gc.collect()
        return sys.getallocatedblocks()

    for _ in range(1000):
        step()
    before = blocks()
    for _ in range(1000):
        step()
    assert abs(blocks() - before) < 200  # an interval of the ledger


def test_marks_of_a_step() -> None:
    """A step leaves 18 numbers in the ledger's log: two marks of two numbers for each of four phases, and its end."""
    step = stepping()
    meter = step.accelerator._components.ledger.meter  # type: ignore[attr-defined]
    before = len(meter.log)
    step()
    assert len(meter.log) - before == 18


def test_collectives_of_ours(ranks: Any, tmp_path: Path) -> None:
    """A step on two processes has no collective beside torch's all-reduce of gradients, logged or not."""

    def run(folder: str) -> int:
        step = stepping(Path(folder))
        channel = step.accelerator.state.channel()  # type: ignore[attr-defined]
        before = channel.sequence
        for _ in range(20):
            step()
        return int(channel.sequence - before)

    assert ranks(2).run(run, str(tmp_path)) == [0, 0]
