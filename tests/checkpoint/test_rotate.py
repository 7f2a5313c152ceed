"""Which numbered checkpoints stay, and what is never removed."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from small import save, step_of

from slipstream.checkpoint.rotate import RetentionPolicy, numbered_checkpoints, rotate
from slipstream.errors import ConfigError
from slipstream.files.disk import Disk

SMALL = {"w": 10}


def numbers(folder: Path) -> list[int]:
    return [number for number, _ in numbered_checkpoints(folder)]


def filled(folder: Path, *steps: int, metrics: dict[int, float] | None = None) -> Path:
    for step in steps:
        save(folder / f"checkpoint_{step}", step, sizes=SMALL, metric=(metrics or {}).get(step))
    return folder / f"checkpoint_{steps[-1]}"


def test_numbers_compared_as_numbers(tmp_path: Path) -> None:
    """Numbers are compared as numbers."""
    for name in (
        "checkpoint_10",
        "checkpoint_2",
        "checkpoint_1",
        "checkpoint_01",
        "checkpoint_-1",
        "checkpoint_x",
        "checkpoint_3.old",
        "x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_7").write_text("a file")
    (tmp_path / "checkpoint_8").symlink_to(tmp_path / "checkpoint_1")
    assert numbered_checkpoints(tmp_path) == [(number, tmp_path / f"checkpoint_{number}") for number in (1, 2, 10)]
    assert numbered_checkpoints(tmp_path / "nothing") == []


def test_crash_took_from_place_among(tmp_path: Path) -> None:
    """One that a crash took from its place is among them."""
    filled(tmp_path, 1, 2)
    (tmp_path / "checkpoint_2").rename(tmp_path / ".checkpoint_2.was-01234567")
    (tmp_path / ".checkpoint_5.saving-01234567").mkdir()
    assert numbers(tmp_path) == [1, 2]
    assert step_of(tmp_path / "checkpoint_2") == 2


@pytest.mark.parametrize(("limit", "stay"), [(None, [1, 2, 9, 10]), (1, [10]), (3, [2, 9, 10]), (99, [1, 2, 9, 10])])
def test_newest_stay(limit: int | None, stay: list[int], tmp_path: Path) -> None:
    """The newest stay."""
    newest = filled(tmp_path, 1, 2, 9, 10)
    gone = rotate(tmp_path, RetentionPolicy(limit), Disk(), newest)
    assert numbers(tmp_path) == stay
    assert [path.name for path in gone] == [f"checkpoint_{number}" for number in (1, 2, 9, 10) if number not in stay]
    assert sorted(os.listdir(tmp_path)) == sorted(f"checkpoint_{number}" for number in stay)


@pytest.mark.parametrize(("mode", "stay"), [("min", [2, 4, 6]), ("max", [1, 3, 6])])
def test_best_stay_besides_newest(mode: str, stay: list[int], tmp_path: Path) -> None:
    """The best stay besides the newest."""
    newest = filled(tmp_path, 1, 2, 3, 4, 5, 6, metrics={1: 0.9, 2: 0.1, 3: 0.9, 4: 0.1, 6: 0.5})
    rotate(tmp_path, RetentionPolicy(1, keep_best=2, best_mode=mode), Disk(), newest)  # type: ignore[arg-type]
    assert numbers(tmp_path) == stay


def test_of_two_equal_newer_stays(tmp_path: Path) -> None:
    """Of two equal ones the newer stays."""
    newest = filled(tmp_path, 1, 2, 3, metrics={1: 0.5, 2: 0.5})
    rotate(tmp_path, RetentionPolicy(1, keep_best=1), Disk(), newest)
    assert numbers(tmp_path) == [2, 3]


def test_newest_not_highest_after_going_back(tmp_path: Path) -> None:
    """The newest is not the highest after going back."""
    filled(tmp_path, 5, 6, 7)
    newest = filled(tmp_path, 3)
    rotate(tmp_path, RetentionPolicy(1), Disk(), newest)
    assert numbers(tmp_path) == [3, 7]


def test_other_folders_stay(tmp_path: Path) -> None:
    """Folders that are no checkpoints do not count and stay."""
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "mine").write_text("x")
    filled(tmp_path, 2, 3)
    newest = filled(tmp_path, 4)
    (tmp_path / "checkpoint_3" / "MANIFEST.json").write_text("damaged")
    (tmp_path / "checkpoint_9").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    rotate(tmp_path, RetentionPolicy(1), Disk(), newest)
    assert numbers(tmp_path) == [1, 3, 4, 9]
    assert (tmp_path / "checkpoint_1" / "mine").exists()


def test_without_newest_nothing_goes(tmp_path: Path) -> None:
    """Without the newest nothing goes."""
    filled(tmp_path, 1, 2)
    assert rotate(tmp_path, RetentionPolicy(1), Disk(), tmp_path / "checkpoint_3") == []
    assert numbers(tmp_path) == [1, 2]


def test_number_removed_before_files(tmp_path: Path) -> None:
    """A number is gone for good before the first file is."""
    class Log(Disk):
        calls: tuple[str, ...] = ()

        def rename(self, old: Path, new: Path) -> None:
            self.calls += (f"rename {old.name}",)
            super().rename(old, new)

        def sync_folder(self, path: Path) -> None:
            self.calls += ("sync",)
            super().sync_folder(path)

        def remove(self, path: Path) -> None:
            assert path.parent.name.startswith(".checkpoint_1.removing-")
            self.calls += ("remove",)
            super().remove(path)

    disk = Log()
    rotate(tmp_path, RetentionPolicy(1), disk, filled(tmp_path, 1, 2))
    assert disk.calls == ("rename checkpoint_1", "sync", "remove", "remove")


@pytest.mark.parametrize("primitive", ["rename", "remove", "remove_folder", "_fsync"])
def test_failed_removal_tried_again(
    primitive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be removed is said and goes the next time."""
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "x")

    newest = filled(tmp_path, 1, 2, 3)
    disk = Disk()
    monkeypatch.setattr(disk, primitive, broken)
    with caplog.at_level(logging.WARNING):
        rotate(tmp_path, RetentionPolicy(1), disk, newest)
    assert "could not all be removed: x: Input/output error" in caplog.text
    assert step_of(newest) == 3
    rotate(tmp_path, RetentionPolicy(1), Disk(), newest)
    assert os.listdir(tmp_path) == ["checkpoint_3"]


def test_leftovers_of_old_numbers_swept(tmp_path: Path) -> None:
    """Leftovers of numbers that will not come again are swept."""
    newest = filled(tmp_path, 1, 7)
    for name in (".checkpoint_3.saving-01234567", ".checkpoint_4.removing-01234567", ".other.saving-01234567"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    rotate(tmp_path, RetentionPolicy(None), Disk(), newest)
    assert sorted(os.listdir(tmp_path)) == [".other.saving-01234567", "checkpoint_1", "checkpoint_7"]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.none() | st.floats(-5, 5)), min_size=1, max_size=7, unique_by=lambda entry: entry[0]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
    st.data(),
)
def test_against_slow_way(
    tmp_path_factory: pytest.TempPathFactory, saved: list[tuple[int, float | None]], limit: int, best: int, mode: str, data: st.DataObject
) -> None:
    """Against the slow way."""
    folder = tmp_path_factory.mktemp("rotation")
    for step, metric in saved:
        save(folder / f"checkpoint_{step}", step, sizes=SMALL, metric=metric)
    newest = data.draw(st.sampled_from(saved))[0]
    rotate(folder, RetentionPolicy(limit, best, mode), Disk(), folder / f"checkpoint_{newest}")  # type: ignore[arg-type]
    expected = {newest, *sorted(step for step, _ in saved)[-limit:]}
    measured = [(metric, step) for step, metric in saved if metric is not None]
    for _ in range(min(best, len(measured))):
        extreme = (max if mode == "max" else min)(metric for metric, _ in measured)
        chosen = max(step for metric, step in measured if metric == extreme)
        measured.remove((extreme, chosen))
        expected.add(chosen)
    assert set(numbers(folder)) == expected


@pytest.mark.parametrize("wrong", [{"total_limit": 0}, {"total_limit": -1}, {"keep_best": -1}, {"best_mode": "better"}])
def test_what_cannot_kept(wrong: dict[str, object]) -> None:
    """What cannot be kept."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RetentionPolicy(**wrong)  # type: ignore[arg-type]
