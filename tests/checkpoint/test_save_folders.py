"""`save_state` with another folder on each process is an error that names them; nobody waits for anybody to find that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_save_state import numbering
from test_save_state_ranks import in_turn, started

from slipstream.checkpoint.saver import same_folder
from slipstream.errors import ConfigError


def attempt(call: Callable[[], object]) -> str:
    """What a call raises."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("then", ["load_state", "save_state", "end_training"])
def test_after_other(ranks: Any, tmp_path: Path, order: tuple[int, int], then: str) -> None:
    """The process that comes second raises at once, the first one with its next call about checkpoints."""

    def run() -> list[str]:
        run = started()
        accelerator = run.accelerator
        mine = tmp_path / f"rank_{accelerator.process_index}"
        told: list[str] = []
        in_turn(run, *order, call=lambda: told.append(attempt(lambda: accelerator.save_state(mine))))
        if then == "load_state":
            with pytest.raises(Exception, match="different folders"):  # one rank tells it to all
                accelerator.load_state(mine)
        elif accelerator.process_index == order[0]:
            next_call = accelerator.end_training if then == "end_training" else lambda: accelerator.save_state(tmp_path / "next")
            told.append(attempt(next_call))
        return told

    outcomes = [outcome.value for outcome in ranks(2).outcomes(run)]
    first, second = outcomes[order[0]], outcomes[order[1]]
    assert first[0] == ""
    for text in (*second, *first[1:]):
        assert f"rank 0: {str(tmp_path / 'rank_0')!r}" in text
        assert f"rank 1: {str(tmp_path / 'rank_1')!r}" in text
        assert "the same folder" in text


def test_at_same_time(ranks: Any, tmp_path: Path) -> None:
    """Whoever comes first: what a process returns without an error exists when all have returned."""

    def run() -> Any:
        run = started()
        mine = tmp_path / f"rank_{run.accelerator.process_index}"
        raised = attempt(lambda: run.accelerator.save_state(mine))
        run.accelerator.wait_for_everyone()
        return raised or attempt(lambda: run.accelerator.save_state(tmp_path / "next"))

    assert all("different folders" in text for text in ranks(2).run(run))


def test_behind_training(ranks: Any, tmp_path: Path) -> None:
    """Saves that are written behind the training are compared, too."""

    def run() -> Any:
        run = started()
        mine = tmp_path / f"rank_{run.accelerator.process_index}"
        told: list[str] = []
        in_turn(run, 1, 0, call=lambda: told.append(attempt(lambda: run.accelerator.save_state(mine, async_save=True))))
        return told[0] or attempt(run.accelerator.end_training)

    assert all("different folders" in text for text in ranks(2).run(run))


def test_project_folders(ranks: Any, tmp_path: Path) -> None:
    """Numbered checkpoints have to be in one project; their numbers may differ."""

    def run(own: bool) -> Any:
        run = started(**numbering(tmp_path / (f"rank_{os.environ['RANK']}" if own else "one")))
        told: list[str] = []
        if run.accelerator.is_main_process:
            run.accelerator.save_state()  # alone: its numbers are ahead now
        in_turn(run, 0, 1, call=lambda: told.append(attempt(run.accelerator.save_state)))
        return told[0]

    assert ranks(2).run(run, False) == ["", ""]
    first, second = ranks(2).run(run, True)
    assert first == ""
    assert str(tmp_path / "rank_0") in second
    assert str(tmp_path / "rank_1") in second


def test_no_false_alarm(ranks: Any, tmp_path: Path) -> None:
    """The main process may save alone, from the same function and at the same step, and folders may be spelled in several ways."""

    def run() -> list[str]:
        run = started()
        accelerator = run.accelerator
        before = os.getcwd()
        os.chdir(tmp_path)

        def save(folder: Any) -> str:
            return attempt(lambda: accelerator.save_state(folder))

        told = []
        if accelerator.is_main_process:
            told.append(save(tmp_path / "best"))
        told.append(save(tmp_path / "last" if accelerator.is_main_process else "last/"))
        for name in ("a", "b"):
            told.append(save(tmp_path / name))
        if not accelerator.is_main_process:
            os.symlink(tmp_path, tmp_path / "link")
        accelerator.wait_for_everyone()
        told.append(save(tmp_path / ("c" if accelerator.is_main_process else "link/c")))
        for trial in range(2):
            told.append(attempt(lambda: started().accelerator.save_state(tmp_path / f"trial_{trial}")))  # noqa: B023
        accelerator.load_state(tmp_path / "last")
        told.append(save(tmp_path / "again"))
        os.chdir(before)
        return [text for text in told if text]

    assert ranks(2).run(run) == [[], []]


def test_machines() -> None:
    """Machines may see one disk under different paths, but not under another name of the checkpoint."""
    here, there = {"host": "a", "folder": "/mnt/runs/first"}, {"host": "b", "folder": "/data/first"}
    assert same_folder(here, there)
    assert not same_folder(here, {**there, "folder": "/data/second"})
    assert not same_folder(here, {**there, "host": "a"})
    assert not same_folder({**here, "folder": "s3://one/first"}, {**there, "folder": "s3://other/first"})


def test_working_directories(ranks: Any, tmp_path: Path) -> None:
    """One relative path in two working directories is two folders, and the message shows where they are."""

    def run() -> str:
        run = started()
        before, mine = os.getcwd(), tmp_path / f"home_{run.accelerator.process_index}"
        mine.mkdir()
        os.chdir(mine)
        told: list[str] = []
        in_turn(run, 0, 1, call=lambda: told.append(attempt(lambda: run.accelerator.save_state("first"))))
        os.chdir(before)
        return told[0]

    first, second = ranks(2).run(run)
    assert first == ""
    assert f"rank 0: '{tmp_path}/home_0/first'" in second
    assert f"rank 1: '{tmp_path}/home_1/first'" in second
