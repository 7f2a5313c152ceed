"""`save_state` and `load_state` on several processes: nobody waits for anybody to save, and whoever saved is found again."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from runs import Run, begin, steps
from test_async_save import HeldDisk
from test_save_state import numbering, train

from slipstream import Accelerator
from slipstream.files.disk import Disk
from slipstream.utils import set_seed


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]


def started(seed: int = 3, batches: int = 2, **options: Any) -> Run:
    run = begin(seed=seed, **options)
    train(run, batches)
    return run


def in_turn(run: Run, *ranks: int, call: Callable[[], object]) -> None:
    """The ranks call one after the other; those that are not named do not call."""
    for rank in ranks:
        if run.accelerator.process_index == rank:
            call()
        run.accelerator.wait_for_everyone()


def visible(folder: Path) -> list[str]:
    return sorted(name.split(".")[0] for name in os.listdir(folder) if name.startswith("rank_"))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_save_and_all_complete(ranks: Any, tmp_path: Path, world: int) -> None:
    """All ranks save and all are complete."""
    def save_and_load() -> Any:
        run = started()
        where = run.accelerator.save_state(tmp_path / "first")
        weights, expected = run.weights().clone(), draws()
        train(run, 3)
        run.accelerator.load_state(where)  # without waiting: it waits by itself
        assert torch.equal(run.weights(), weights)
        assert draws() == expected
        return expected

    outcomes = ranks(world).outcomes(save_and_load)
    assert [outcome.summary for outcome in outcomes] == ["returned"] * world
    assert len({tuple(outcome.value) for outcome in outcomes}) == world  # every rank had draws of its own
    assert "".join(outcome.output for outcome in outcomes) == ""
    assert visible(tmp_path / "first") == [f"rank_{rank}" for rank in range(world)]
    assert os.listdir(tmp_path) == ["first"]


@pytest.mark.parametrize("world", [2, 3])
def test_main_process_saves_alone(ranks: Any, tmp_path: Path, world: int) -> None:
    """The main process saves alone."""
    def save_and_load() -> Any:
        run = started()
        run.accelerator.wait_for_everyone()
        if run.accelerator.is_main_process:
            run.accelerator.save_state(tmp_path / "first")
        weights, updates, expected = run.weights().clone(), run.optimizer.updates, draws()
        found = []
        for _ in range(2):
            train(run, 1)
            run.accelerator.load_state(tmp_path / "first")
            assert torch.equal(run.weights(), weights)
            assert run.optimizer.updates == updates
            found.append(draws())
        assert found[0] == found[1]  # derived, but always the same
        assert (found[0] == expected) == run.accelerator.is_main_process
        return found[0]

    main, *others = ranks(world).outcomes(save_and_load)
    assert [other.summary for other in (main, *others)] == ["returned"] * world
    assert len({tuple(other.value) for other in (main, *others)}) == world
    assert all("left by break" in line for line in main.output.splitlines()), "it says nothing but that of the loop that was left"
    for other in others:
        assert f"has no random state of rank {other.rank} (this rank did not call save_state" in other.output


def test_rank_before_and_after_commit(ranks: Any, tmp_path: Path) -> None:
    """A rank may come before the commit and after it."""
    def save_and_load() -> list[str]:
        troubles = []
        for name, order in (("early", (1, 2, 0)), ("late", (0, 1, 2)), ("both", (1, 0, 2))):
            run = started()
            in_turn(run, *order, call=partial(run.accelerator.save_state, tmp_path / name))
            expected = draws()
            run.accelerator.load_state(tmp_path / name)
            troubles += [name] if draws() != expected else []
        return troubles

    assert ranks(3).run(save_and_load) == [[], [], []]
    assert sorted(os.listdir(tmp_path)) == ["both", "early", "late"]
    assert all(visible(tmp_path / name) == ["rank_0", "rank_1", "rank_2"] for name in os.listdir(tmp_path))


def test_rank_may_come_while_checkpoint_written(ranks: Any, tmp_path: Path) -> None:
    """A rank may come while the checkpoint is written."""
    def save_and_load(behind: bool) -> None:
        run = started()
        run.accelerator._saver.disk = disk = HeldDisk()
        if run.accelerator.is_main_process:
            run.accelerator.save_state(tmp_path / "first", async_save=True)
            assert disk.reached.wait(30)
        run.accelerator.wait_for_everyone()
        if not run.accelerator.is_main_process:
            run.accelerator.save_state(tmp_path / "first", async_save=behind)
        expected = draws()
        run.accelerator.wait_for_everyone()
        disk.go.set()
        run.accelerator.load_state(tmp_path / "first")
        assert draws() == expected

    for behind in (False, True):
        ranks(2).run(save_and_load, behind)
        assert os.listdir(tmp_path) == ["first"]


@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["early", "late"])
def test_other_run_at_same_step(ranks: Any, tmp_path: Path, order: tuple[int, ...]) -> None:
    """Two runs of a script save to the same folder at the same step: what a rank added to the first is none of the second's."""

    def save(seed: int, *order: int) -> list[float]:
        run = started(seed)
        in_turn(run, *order, call=lambda: run.accelerator.save_state(tmp_path / "first"))
        return draws()

    def load() -> list[float]:
        run = begin(seed=77)
        run.accelerator.load_state(tmp_path / "first")
        return draws()

    pool = ranks(2)
    pool.run(save, 1, *order)
    expected = pool.run(save, 2, *order)
    assert pool.run(load) == expected
    pool.run(save, 3, 1)  # killed before the main process came to save
    expected = pool.run(save, 4, *order)
    assert pool.run(load) == expected
    expected = pool.run(save, 5, 0)  # by the main process alone
    assert pool.run(load)[0] == expected[0]
    assert visible(tmp_path / "first") == ["rank_0"]
    assert os.listdir(tmp_path) == ["first"]


def test_two_saves_at_one_step(ranks: Any, tmp_path: Path) -> None:
    """Two saves at the same place of a run."""
    def save_and_load() -> None:
        run = started()
        for number, orders in enumerate(product([(1, 0), (0, 1), (0,)], [(1, 0), (0, 1)])):
            for order in orders:
                set_seed(number * 10 + len(order), device_specific=True)
                in_turn(run, *order, call=partial(run.accelerator.save_state, tmp_path / "first"))
                expected = draws()
            run.accelerator.load_state(tmp_path / "first")
            assert draws() == expected, orders

    ranks(2).run(save_and_load)
    assert visible(tmp_path / "first") == ["rank_0", "rank_1"]
    assert os.listdir(tmp_path) == ["first"]


def test_numbers_differ_between_ranks_lose_nothing(ranks: Any, tmp_path: Path) -> None:
    """The main process has saved alone, so it counts otherwise than the others."""

    def save_and_load(*order: int) -> None:
        run = started(**numbering(tmp_path, total_limit=2))
        for _ in range(3):
            train(run, 1)
            if run.accelerator.is_main_process:
                run.accelerator.save_state()
        for _ in range(3):
            train(run, 1)
            in_turn(run, *order, call=run.accelerator.save_state)
            expected = draws()
            run.accelerator.load_state()
            assert draws() == expected, order

    for order in ((1, 0), (0, 1)):
        ranks(2).run(save_and_load, *order)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_10", "checkpoint_11", "latest"]


def test_ranks_save_behind_training(ranks: Any, tmp_path: Path) -> None:
    """Ranks that save behind the training."""
    def save_and_load() -> None:
        run = begin(async_save=True, **numbering(tmp_path, total_limit=2))
        expected: list[float] = []
        for number, _ in enumerate(steps(run, run.loader)):
            if number % 2:
                run.accelerator.save_state()
                expected = draws()
        assert run.accelerator.load_state().endswith("checkpoint_9")
        assert draws() == expected

    ranks(2).run(save_and_load)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_8", "checkpoint_9", "latest"]


def test_error_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    """What goes wrong on one rank is heard on all."""
    class Failing(HeldDisk):
        def write_unsynced(self, path: Path, chunks: Any, size: int) -> Any:
            if ".rank-" in path.name:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
            return Disk.write_unsynced(self, path, chunks, size)

    def behind() -> None:
        run = started()
        run.accelerator.save_state(tmp_path / "first")
        run.accelerator._saver.disk = disk = HeldDisk(OSError(errno.ENOSPC, "No space left on device"))
        disk.go.set()
        run.accelerator.save_state(tmp_path / "first", async_save=True)
        run.accelerator.load_state(tmp_path / "first")

    main, other = ranks(2).outcomes(behind)
    assert "CheckpointError: the checkpoint" in main.summary
    assert "The disk is full" in main.summary
    assert "rank 0 raised CheckpointError" in other.summary

    def added() -> None:
        run = started()
        run.accelerator._saver.disk = Failing()
        run.accelerator.save_state(tmp_path / "first")

    main, other = ranks(2).outcomes(added)
    assert main.summary == "returned"
    assert "the state of rank 1 could not be saved" in other.summary
    assert "The quota of this user is exhausted" in other.summary

    def damaged() -> None:
        run = started()
        before = run.weights().clone()
        try:
            run.accelerator.load_state(tmp_path / "first")
        finally:
            assert torch.equal(run.weights(), before)

    path = tmp_path / "first" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for outcome in ranks(2).outcomes(damaged):
        assert "optimizer.safetensors is damaged" in outcome.summary


def test_fewer_and_more_processes(ranks: Any, tmp_path: Path) -> None:
    """A run of fewer and of more processes says what is derived."""
    def save() -> None:
        started(batch_size=6).accelerator.save_state(tmp_path / "first")

    def load(world: int) -> list[float]:
        run = begin(batch_size=12 // world)
        run.accelerator.load_state(tmp_path / "first", strict=True)
        return draws()

    ranks(2).run(save)
    (alone,) = ranks(1).outcomes(load, 1)
    outcomes = ranks(3).outcomes(load, 3)
    assert [outcome.summary for outcome in (alone, *outcomes)] == ["returned"] * 4
    assert alone.output == outcomes[0].output == outcomes[1].output == ""
    assert "has no random state of rank 2 (it was saved by 2 processes and there are 3 now)" in outcomes[2].output
    assert alone.value == outcomes[0].value


def test_broken_rank_file_passed_over(ranks: Any, tmp_path: Path) -> None:
    """A checkpoint with a broken file of a rank is passed over by all."""
    def save() -> None:
        run = started(**numbering(tmp_path))
        for _ in range(2):
            train(run, 1)
            run.accelerator.save_state()

    def load(where: Path | None) -> int:
        run = started(**numbering(tmp_path))
        run.accelerator.load_state(where)
        return run.optimizer.updates

    ranks(2).run(save)
    (path,) = (tmp_path / "checkpoints" / "checkpoint_1").glob("rank_1.*")
    path.write_bytes(path.read_bytes()[:-1])
    main, other = ranks(2).outcomes(load, None)
    assert main.value == other.value == 3
    assert "checkpoint_1 was passed over for checkpoint_0" in main.output
    assert path.name in main.output
    main, other = ranks(2).outcomes(load, path.parent)
    assert f"{path.name} is damaged" in other.summary
    assert "rank 1 raised CheckpointError" in main.summary


class LoadsOnMainAlone(torch.nn.Linear):
    """A model that refuses to load on every rank but 0, when everything was compared already."""

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        if torch.distributed.get_rank():
            raise RuntimeError("no memory left on this device")
        return super().load_state_dict(*arguments, **options)


def test_late_failure_raises_everywhere(ranks: Any, tmp_path: Path) -> None:
    """A rank that fails while weights are assigned makes every rank raise, and the error says that the state cannot be used."""
    def save_and_load() -> None:
        accelerator = Accelerator()
        accelerator.prepare(LoadsOnMainAlone(2, 2))
        accelerator.load_state(accelerator.save_state(tmp_path / "first"))

    for outcome in ranks(2).outcomes(save_and_load):
        assert "was loaded in part" in outcome.summary
        assert "no memory left on this device" in outcome.summary
        assert "cannot be used" in outcome.summary
