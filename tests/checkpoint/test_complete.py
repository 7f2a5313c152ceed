"""Checkpoints without the state of a rank that was killed: the complete one before it stays, and is what `load_state()` takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, begin
from test_save_state import numbering, train

from slipstream.checkpoint.manifest import Manifest, parse_manifest, rank_marker
from slipstream.checkpoint.rotate import NumberedCheckpoint, find_incomplete, find_protected


def saved(name: str, ranks: set[int], site: str = "", *, world: int = 2, savers: int | None = None, marked: bool = False) -> Any:
    manifest = Manifest("1-0123456789abcdef", 1, "today", "us", world, "ddp", savers=savers or world, site=site)
    return NumberedCheckpoint(name, manifest, frozenset(ranks), (Path("marker"),) if marked else ())


ALL, MAIN = {0, 1}, {0}


@pytest.mark.parametrize(
    ("known", "incomplete"),
    [
        ([saved("a", ALL, "x"), saved("b", ALL, "x")], []),
        ([saved("a", ALL, "x"), saved("b", MAIN, "x")], ["b"]),  # killed before it began
        ([saved("a", ALL, "x"), saved("b", MAIN, "y")], []),  # another line of the script: the main process alone
        ([saved("a", ALL, "x"), saved("b", MAIN, "y", marked=True)], ["b"]),
        ([saved("a", MAIN, "x"), saved("b", MAIN, "x")], []),
        ([saved("a", MAIN), saved("b", ALL), saved("c", MAIN)], []),  # of an older version, which did not note the line
        ([saved("a", {0, 1, 2}, "x", world=4), saved("b", {0}, "y", world=4)], ["a"]),
        ([saved("a", {2, 3}, "x", world=4, savers=2), saved("b", {2}, "x", world=4, savers=2)], ["b"]),  # save_on_each_node
        ([saved("a", MAIN, world=1)], []),
    ],
)
def test_which_are_incomplete(known: list[NumberedCheckpoint], incomplete: list[str]) -> None:
    """A checkpoint is incomplete if a rank that took part in such saves is missing."""
    assert [checkpoint.name for checkpoint in find_incomplete(known)] == incomplete


@pytest.mark.parametrize(
    ("known", "protected"),
    [
        ([saved("a", ALL, "x"), saved("b", ALL, "x")], set()),
        ([saved("a", ALL, "x"), saved("b", MAIN, "x")], {"a"}),
        ([saved("a", ALL, "x"), saved("b", MAIN, "x"), saved("c", MAIN, "x")], {"a", "b"}),
        ([saved("a", ALL, "x"), saved("b", ALL, "x"), saved("c", MAIN, "x", marked=True)], {"b"}),
        ([saved("a", ALL, "x"), saved("b", MAIN, "y")], {"a"}),  # the other rank may still come
        ([saved("a", ALL, "x"), saved("b", MAIN, "y"), saved("c", MAIN, "y")], set()),  # it did not come to the last one
        ([saved("a", MAIN, "x"), saved("b", MAIN, "x")], set()),
        ([saved("a", MAIN, world=1), saved("b", MAIN, world=1)], set()),
    ],
)
def test_what_stays_until_newest_is_complete(known: list[NumberedCheckpoint], protected: set[str]) -> None:
    """The newest checkpoint of all ranks stays until a newer one is complete."""
    assert find_protected(known, known[-1].name) == protected


def test_manifest_notes_savers() -> None:
    """A manifest says how many ranks save and from where; one without that is read as before."""
    noted = saved("a", ALL, "0011", world=4, savers=2).manifest
    assert parse_manifest(noted.dump(), "here") == noted
    plain = Manifest("1-0123456789abcdef", 1, "today", "us", 1, "single")
    assert parse_manifest(plain.dump(), "here").savers is None
    assert b"savers" not in plain.dump()


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("checkpoint_*"))


def started(folder: Path, **options: Any) -> Run:
    return begin(**numbering(folder, total_limit=1, **options))


def load(folder: Path, where: Path | None = None) -> str:
    return os.path.basename(started(folder).accelerator.load_state(where))


def test_main_process_alone_is_complete(ranks: Any, tmp_path: Path) -> None:
    """Saves of the main process alone leave one checkpoint, which is loaded."""
    def save_alone() -> None:
        run = started(tmp_path)
        for _ in range(3):
            train(run, 1)
            if run.accelerator.is_main_process:
                run.accelerator.save_state()

    ranks(2).run(save_alone)
    assert listed(tmp_path) == ["checkpoint_2"]
    outcomes = ranks(2).outcomes(load, tmp_path)
    assert [outcome.value for outcome in outcomes] == ["checkpoint_2"] * 2
    assert all("passed over" not in outcome.output for outcome in outcomes)


def test_alone_after_all_is_loaded(ranks: Any, tmp_path: Path) -> None:
    """A save of the main process alone from another line is complete; what all have saved stays until it is known that none comes."""
    def save_mixed(alone: int) -> None:
        run = started(tmp_path)
        train(run, 1)
        run.accelerator.save_state()
        for _ in range(alone):
            train(run, 1)
            if run.accelerator.is_main_process:
                run.accelerator.save_state()

    ranks(2).run(save_mixed, 1)
    assert listed(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    assert [outcome.value for outcome in ranks(2).outcomes(load, tmp_path)] == ["checkpoint_1"] * 2
    ranks(2).run(save_mixed, 2)
    assert listed(tmp_path) == ["checkpoint_4"]


def test_last_rank_removes_outdated(ranks: Any, tmp_path: Path) -> None:
    """A checkpoint that waits for a rank keeps the one before it; when the rank has come, that one goes."""
    def save_in_turn() -> list[list[str]]:
        run = started(tmp_path)
        seen = []
        for _ in range(2):
            train(run, 1)
            for rank in range(3):
                if run.accelerator.process_index == rank:
                    run.accelerator.save_state()
                run.accelerator.wait_for_everyone()
                seen.append(listed(tmp_path))
                run.accelerator.wait_for_everyone()
        return seen

    (seen, *_) = ranks(3).run(save_in_turn)
    both = ["checkpoint_0", "checkpoint_1"]
    assert seen == [["checkpoint_0"]] * 3 + [both, both, ["checkpoint_1"]]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_complete_over_newest(ranks: Any, tmp_path: Path) -> None:
    """The newest complete checkpoint is loaded, and the warning says why and how to load the newer one."""
    def save(last: bool) -> float:
        run = started(tmp_path)
        drawn = 0.0
        for number in range(3):
            train(run, 1)
            if number < 2 or last or run.accelerator.is_main_process:
                run.accelerator.save_state()
            if number == 1:
                drawn = torch.rand(1).item()
        return drawn

    def load_and_draw(where: Path | None) -> tuple[str, float]:
        return load(tmp_path, where), torch.rand(1).item()

    drawn = ranks(2).run(save, False)  # as if rank 1 was killed before its third call
    assert listed(tmp_path) == ["checkpoint_1", "checkpoint_2"]
    main, other = ranks(2).outcomes(load_and_draw, None)
    assert [main.value, other.value] == [("checkpoint_1", drawn[0]), ("checkpoint_1", drawn[1])]
    assert "checkpoint_2 was passed over for checkpoint_1, which is older: it is incomplete, without the state of rank 1" in main.output
    main, other = ranks(2).outcomes(load_and_draw, tmp_path / "checkpoints" / "checkpoint_2")
    assert main.value[0] == other.value[0] == "checkpoint_2"
    assert "has no random state of rank 1" in other.output
    ranks(2).run(save, True)
    assert listed(tmp_path) == ["checkpoint_5"]


def test_marker_is_enough(ranks: Any, tmp_path: Path) -> None:
    """The marker of a rank that began to save shows that a checkpoint from a new line is incomplete; it goes with the checkpoint."""
    def save_twice() -> None:
        run = started(tmp_path)
        train(run, 1)
        run.accelerator.save_state()
        train(run, 1)
        if run.accelerator.is_main_process:
            run.accelerator.save_state()

    def save_again() -> None:
        run = started(tmp_path)
        run.accelerator.load_state()
        train(run, 1)
        run.accelerator.save_state()

    ranks(2).run(save_twice)
    folder = tmp_path / "checkpoints"
    stamp = parse_manifest((folder / "checkpoint_1" / "MANIFEST.json").read_bytes(), "").stamp
    (folder / f".checkpoint_1.{rank_marker(1, stamp)}").touch()
    assert load_on_two(ranks, tmp_path) == "checkpoint_0"
    ranks(2).run(save_again)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "latest"]


def load_on_two(ranks: Any, folder: Path) -> str:
    main, other = ranks(2).run(load, folder)
    assert main == other
    return str(main)


@pytest.mark.parametrize("killed", [False, True])
def test_behind_url(ranks: Any, tmp_path: Path, killed: bool) -> None:
    """Numbered checkpoints at a URL follow the same rules."""
    url = f"local://{tmp_path}/store"

    def save_thrice() -> None:
        run = begin(**numbering(url, total_limit=1))  # type: ignore[arg-type]
        for number in range(3):
            train(run, 1)
            if number < 2 or not killed or run.accelerator.is_main_process:
                run.accelerator.save_state()
            run.accelerator.wait_for_everyone()

    ranks(2).run(save_thrice)
    there = sorted(path.name for path in (tmp_path / "store" / "checkpoints").glob("checkpoint_*") if (path / "MANIFEST.json").exists())
    assert there == (["checkpoint_1", "checkpoint_2"] if killed else ["checkpoint_2"])
    main, other = ranks(2).outcomes(lambda: begin(**numbering(url)).accelerator.load_state())  # type: ignore[arg-type]
    assert main.value == other.value
    assert main.value.endswith("checkpoint_1" if killed else "checkpoint_2")
    assert ("is incomplete, without the state of rank 1" in main.output) == killed
