"""`async_save`: the training goes on while a checkpoint is written, one at a time; what goes wrong behind it is raised once, later."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import begin
from test_save_state import numbering, train, trained

from slipstream import Accelerator, CheckpointError
from slipstream.files.disk import Disk, FileEntry


class HeldDisk(Disk):
    """Writes no file of weights before it is let go; with an error, not even then."""

    def __init__(self, error: OSError | None = None) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.error = error

    def write_unsynced(self, path: Path, chunks: Any, size: int) -> tuple[int, FileEntry]:
        if path.name.startswith("model"):
            self.reached.set()
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
        return super().write_unsynced(path, chunks, size)


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")


def test_state_of_the_call_is_written(tmp_path: Path) -> None:
    """The training goes on while the moment of the call is written."""
    run = trained(4)
    run.accelerator._saver.disk = disk = HeldDisk()
    weights, seen = run.weights().clone(), list(run.counter.seen)
    momentum = {number: state["exp_avg"].clone() for number, state in run.optimizer.state_dict()["state"].items()}
    where = run.accelerator.save_state(tmp_path / "first", async_save=True)
    assert disk.reached.wait(30)
    train(run, 5)
    torch.manual_seed(5)
    assert not Path(where).exists()
    disk.go.set()
    run.accelerator.end_training()
    again = begin()
    again.accelerator.load_state(where)
    assert torch.equal(again.weights(), weights)
    assert again.counter.seen == seen
    assert again.optimizer.updates == 4
    assert all(torch.equal(state["exp_avg"], momentum[number]) for number, state in again.optimizer.state_dict()["state"].items())


def test_second_save_waits_for_first(tmp_path: Path) -> None:
    """A second save waits for the first."""
    run = trained(1, **numbering(tmp_path, total_limit=1))
    run.accelerator._saver.disk = disk = HeldDisk()
    run.accelerator.save_state(async_save=True)
    assert disk.reached.wait(30)
    train(run, 1)
    second = threading.Thread(target=run.accelerator.save_state)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert os.listdir(tmp_path / "checkpoints") != ["checkpoint_0"]
    disk.go.set()
    second.join()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "latest"]


def test_accelerator_option_and_call_option(tmp_path: Path) -> None:
    """The option of the accelerator counts unless a call says otherwise."""
    run = trained(1, async_save=True)
    run.accelerator._saver.disk = disk = HeldDisk()
    run.accelerator.save_state(tmp_path / "first")
    assert disk.reached.wait(30)
    assert not (tmp_path / "first").exists()
    disk.go.set()
    run.accelerator.save_state(tmp_path / "second", async_save=False)
    assert (tmp_path / "first").exists()
    assert (tmp_path / "second").exists()


@pytest.mark.parametrize("call", ["save", "load", "end"])
def test_error_raised_once_at_next_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """An error behind the training is raised once at the next call."""
    run = trained(2)
    where = run.accelerator.save_state(tmp_path / "out" / "first")
    train(run, 3)
    run.accelerator._saver.disk = disk = HeldDisk(full())
    run.accelerator.save_state(where, async_save=True)
    disk.go.set()
    calls = {
        "save": lambda: run.accelerator.save_state(tmp_path / "out" / "second"),
        "load": lambda: run.accelerator.load_state(where),
        "end": run.accelerator.end_training,
    }
    with pytest.raises(CheckpointError, match=r"first: the async save failed: (.|\n)*The disk is full"):
        calls[call]()
    assert "The disk is full" in caplog.text
    run.accelerator._saver.disk = Disk()
    calls[call]()  # once
    assert sorted(os.listdir(tmp_path / "out")) == ["first", "second"][: 2 if call == "save" else 1]
    again = begin()
    again.accelerator.load_state(where)
    assert again.optimizer.updates == 2  # what was there before is whole


def test_copies_reuse_memory(tmp_path: Path) -> None:
    """Saves behind the training use the same memory again."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(300, 300))
    accelerator.save_state(tmp_path / "0", async_save=True)
    (memory,) = accelerator._saver.arena._blocks
    for number in range(1, 4):
        with torch.no_grad():
            model.weight.fill_(number)
        accelerator.save_state(tmp_path / f"{number}", async_save=True)
        assert accelerator._saver.arena._blocks[0] is memory
    for number in (3, 1, 2):
        accelerator.load_state(tmp_path / f"{number}")
        assert torch.equal(model.weight, torch.full_like(model.weight, float(number)))


def test_script_ends_waits_for_last_save(tmp_path: Path) -> None:
    """A script that ends waits for its last save."""
    run = trained(1)
    run.accelerator._saver.disk = disk = HeldDisk()
    run.accelerator.save_state(tmp_path / "last", async_save=True)
    assert disk.reached.wait(30)
    (thread,) = [entry for entry in threading.enumerate() if "slipstream: the checkpoint" in entry.name]
    assert not thread.daemon  # Python joins such a thread before it ends
    disk.go.set()
    thread.join()
    assert (tmp_path / "last").exists()
