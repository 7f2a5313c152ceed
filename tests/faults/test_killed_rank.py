"""kill -9 of a rank that does not write the checkpoint, at chosen moments of `save_state` with `total_limit=1`.

The checkpoint that it does not complete does not replace the complete one before it, and the next run resumes from that one exactly.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import kills
import pytest

from slipstream.checkpoint.rotate import describe_checkpoint, numbered_checkpoints
from slipstream.files.disk import Disk

POINTS = ("before", "hook", "write", "sync", "rename", "collect")
CASES = [
    *((point, late, False, 2) for point in POINTS for late in (False, True)),
    *((point, True, True, 2) for point in ("hook", "write", "rename")),
    ("hook", True, False, 3),
    ("rename", False, False, 3),
]
"""Where, whether it comes after the main process has committed, whether the save is async, and on how many ranks."""


class DeadlyDisk(Disk):
    """Kills its process at the first call of one primitive, or after it."""

    def __init__(self, point: str) -> None:
        super().__init__()
        self._point = point

    def _fsync(self, fd: int) -> None:
        if self._point == "sync":
            die()
        super()._fsync(fd)

    def write_unsynced(self, *arguments: Any) -> Any:
        if self._point == "write":
            die()
        return super().write_unsynced(*arguments)

    def rename(self, old: Path, new: Path) -> None:
        if self._point == "rename":
            die()
        super().rename(old, new)
        if self._point == "collect":
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(accelerator: Any, point: str) -> None:
    """From now on `save_state` of this rank ends at this point."""
    if point == "before":
        die()
    if point == "hook":
        accelerator.register_save_state_pre_hook(lambda *_: die())
    accelerator._saver.disk = DeadlyDisk(point)


def train_and_die(case: kills.Case, folder: Path, point: str, late: bool) -> None:
    """Saves three times; one rank is killed in the third save, and the others end."""
    run = kills.begin(case, 1, folder)
    accelerator = run.accelerator
    victim = accelerator.process_index == case.ranks - 1
    for step in (1, 2, 3):
        run.train(step)
        accelerator.wait_for_everyone()
        if step == 3 and victim:
            time.sleep(0.4 if late else 0.0)
            arm(accelerator, point)
        if step == 3 and not victim and not late:
            time.sleep(0.4)
        run.save()
        accelerator._saver.background.wait()
    os._exit(0)  # without the end of a run, which would wait for the dead one


def resume(case: kills.Case, folder: Path) -> dict[str, Any]:
    run = kills.begin(case, 2, folder)
    run.accelerator.load_state()
    found = run.compare()
    run.train(found["step"] + 1)
    run.save()
    run.accelerator.end_training()
    return found


@pytest.mark.parametrize(("point", "late", "behind", "world"), CASES)
def test_complete_checkpoint_survives(ranks: Any, tmp_path: Path, point: str, late: bool, behind: bool, world: int) -> None:
    """Wherever the rank is killed, a complete checkpoint is there, and all ranks resume from the newest complete one."""
    case = kills.Case(world, "limit 1", behind, False, "another", True)
    pool = ranks(world, device="cpu")  # a child that is forked cannot use a device
    ended = pool.run(kills.in_child, train_and_die, case, tmp_path, point, late)
    assert [code for code, _ in ended] == [0] * (world - 1) + [-signal.SIGKILL], ended
    known = {path.name: describe_checkpoint(path) for _, path in numbered_checkpoints(tmp_path / "checkpoints")}
    complete = [name for name, found in known.items() if found is not None and found.has_all_ranks]
    assert complete[-1:] == (["checkpoint_2"] if point == "collect" else ["checkpoint_1"])  # its file lies beside the checkpoint
    outcomes = pool.outcomes(resume, case, tmp_path)
    assert [outcome.value for outcome in outcomes] == [{"run": 1, "step": 3 if point == "collect" else 2, "random": True}] * world
    assert ("checkpoint_2 was passed over for checkpoint_1" in outcomes[0].output) == (point != "collect")
    assert [path.name for _, path in numbered_checkpoints(tmp_path / "checkpoints")] == ["checkpoint_3"]
