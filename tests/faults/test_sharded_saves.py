"""Faults while state that is sharded over ranks is saved: kills of one rank and of all, full disks and damaged files.

A save that does not come to its end is an error on every rank that lives, and the checkpoint before it stays.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills
import pytest
from broken_disk import BrokenDisk, Counting
from test_killed_rank import arm, resume

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parent.parent / "strategies"))
from damage import MUTATIONS
from fsdp_runs import Run, differences

from slipstream.checkpoint.rotate import numbered_checkpoints
from slipstream.errors import SlipstreamError
from slipstream.files.disk import Disk
from slipstream.utils import gather_object

Ranks = Any


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_kill_loses_checkpoint(ranks: Ranks, tmp_path: Path, rounds: Callable[..., int]) -> None:
    """kill -9 of one rank or of all, at random moments: what was committed is there, whole, and all ranks go on from it."""
    count = rounds(ci=8, soak=500)
    chains = kills.campaign(ranks, tmp_path, count, seed=0, progress=lambda done: None, sharded=True)
    print(kills.table(chains))
    assert sum(chain.tally.kills for chain in chains) == count
    assert [trouble for chain in chains for trouble in chain.tally.troubles] == []


def train_and_die(case: kills.Case, folder: Path, point: str, rank: int) -> None:
    """Save three times; one rank is killed in the third save, and the others have to raise."""
    run = kills.begin(case, 1, folder)
    for step in (1, 2, 3):
        run.train(step)
        if step == 3 and run.accelerator.process_index == rank:
            arm(run.accelerator, point)
        run.save()


@pytest.mark.parametrize(
    ("point", "rank", "world"),
    [("before", 1, 2), ("hook", 1, 2), ("write", 1, 2), ("sync", 0, 2), ("rename", 0, 2), ("write", 3, 4), ("sync", 2, 4), ("hook", 0, 4)],
)
def test_rank_killed_while_it_saves(ranks: Ranks, tmp_path: Path, point: str, rank: int, world: int) -> None:
    """The others raise and name the rank; the checkpoint before stays, and a run of all ranks resumes from it exactly."""
    case = kills.Case(world, "limit 1", False, False, "another", True, True)
    ended = ranks(world).run(kills.in_child, train_and_die, case, tmp_path, point, rank)
    assert ended[rank][0] == -signal.SIGKILL
    for other, (code, text) in enumerate(ended):
        assert other == rank or (code == 1 and f"rank {rank}" in text), (other, code, text)
    assert [path.name for _, path in numbered_checkpoints(tmp_path / "checkpoints")] == ["checkpoint_1"]
    found = ranks(world).run(resume, case, tmp_path)
    assert found == [{"run": 1, "step": 2, "random": True}] * world
    assert [path.name for _, path in numbered_checkpoints(tmp_path / "checkpoints")] == ["checkpoint_2"]


@pytest.mark.parametrize("world", [2, 4])
def test_disk_of_one_rank_is_full(ranks: Ranks, tmp_path: Path, rounds: Callable[..., int], world: int) -> None:
    """Wherever the disk of one rank fails, every rank raises or none does, a whole checkpoint is there, and the next save works."""

    def count(rank: int) -> int:
        run = Run("fsdp", steps=2)
        run.train(1)
        run.accelerator.save_state(tmp_path / "first")
        counting = Counting()
        run.accelerator._saver.disk = counting if run.accelerator.process_index == rank else Disk()
        run.accelerator.save_state(tmp_path / "second")
        return len(counting.calls)

    def fail(rank: int, points: list[int], behind: bool) -> list[str]:
        run, troubles = Run("fsdp", steps=2), []
        accelerator = run.accelerator
        accelerator.load_state(tmp_path / "first")
        before = run.state()
        for point in points:
            disk = BrokenDisk(point, errno.ENOSPC, lasting=True)
            accelerator._saver.disk = disk if accelerator.process_index == rank else Disk()
            try:
                accelerator.save_state(tmp_path / "first", async_save=behind)
                accelerator._saver.run_and_agree("settle", accelerator._saver.settle)
                raised = False
            except SlipstreamError:
                raised = True
            if len(set(gather_object([raised]))) > 1:  # after the commit an error is a warning: what is left is removed by the next save
                troubles.append(f"operation {point} is an error on some ranks")
            accelerator._saver.disk = Disk()
            accelerator.wait_for_everyone()
            accelerator.load_state(tmp_path / "first")
            troubles += differences(run.state(), before, 0.0)
        accelerator.save_state(tmp_path / "first")
        return troubles

    for rank in (1, 0):
        calls = ranks(world).run(count, rank)[rank]
        chosen = sorted(random.Random(world + rank).sample(range(calls), min(calls, rounds(ci=6, soak=1000))))
        for behind in (False, True):
            assert ranks(world).run(fail, rank, chosen, behind) == [[]] * world
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


@pytest.mark.parametrize("world", [2, 4])
def test_damaged_files(ranks: Ranks, tmp_path: Path, rounds: Callable[..., int], world: int) -> None:
    """Whatever file is damaged, every rank raises, and the state of every rank is as it was."""

    def save() -> None:
        run = Run("fsdp", steps=2)
        for name in ("then", "now"):
            run.train(1)
            run.accelerator.save_state(tmp_path / name)

    def load(count: int) -> list[str]:
        run, wrong = Run("fsdp", steps=2, seed=5), []
        run.train(1)
        before = run.state()
        for number in range(count):
            try:
                run.accelerator.load_state(tmp_path / f"damaged-{number}")
                wrong.append(f"{number} was loaded")
            except SlipstreamError:
                wrong += [f"{number}: {line}" for line in differences(run.state(), before, 0.0)]
        return wrong

    ranks(world).run(save)
    count = rounds(ci=2, soak=60) * len(MUTATIONS)
    for number in range(count):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "now", folder)
        MUTATIONS[number % len(MUTATIONS)](random.Random(number), folder, tmp_path / "then")
    assert ranks(world).run(load, count) == [[]] * world
    assert len(os.listdir(tmp_path)) == count + 2
