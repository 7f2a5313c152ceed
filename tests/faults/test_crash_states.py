"""No crash at any moment of a save, whatever of the unsynced changes reached the disk, leaves anything but a whole checkpoint.

In CI about a thousand states, with `--soak` more than ten thousand. Each is made real in a folder in memory and read by a reader that
compares every byte; from some of them the next save is made too, which has to leave nothing behind but its checkpoint.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_states import Check, State, Trace, materialise, states

from slipstream.checkpoint.commit import LocalTarget, write_latest
from slipstream.checkpoint.rotate import RetentionPolicy, numbered_checkpoints, rotate
from slipstream.errors import CheckpointError
from slipstream.files import disk, disk as disk_module
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk, FileEntry

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))
from small import content, fill, manifest_for, save, step_of

SIZES = {"model.safetensors": 9000, "training.json": 60, "unet/config.json": 20}
MINE = b"what somebody put into the checkpoint"

Scenario = Callable[[Path, Trace], None]


class Quick(Disk):
    """A disk that does not sync: the state after it is looked at, not that after another crash."""

    def _fsync(self, fd: int) -> None:
        pass


@pytest.fixture(autouse=True)
def _large_files_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the way of large files is taken by files of 9 KB, in several pieces."""
    monkeypatch.setattr(disk_module, "SMALLEST", 8000)
    monkeypatch.setattr(disk, "_PIECE", 4096)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="slipstream-crash-") as folder:
        yield Path(folder)


# -- what has to be true ------------------------------------------------------------------------------------------------


def whole(steps: set[int], *, mine: bool = False) -> Check:
    """The checkpoint `first` is there, whole, at one of these steps (0: or not there); and what was put into it is not lost."""

    def check(folder: Path) -> None:
        try:
            step = step_of(folder / "first")
        except CheckpointError:
            if 0 not in steps or (folder / "first").exists():
                raise
            step = 0
        assert step in steps
        if mine:
            places = [folder / "first", *folder.glob(".first.was-*")]
            assert any((place / "notes.txt").exists() and (place / "notes.txt").read_bytes() == MINE for place in places)

    return check


def whole_numbers(must: set[int], newest: set[int], latest: set[int]) -> Check:
    """These numbers are there and whole, the newest whole one is one of `newest`, and the file `latest` names one of `latest`."""

    def check(folder: Path) -> None:
        for number in must:
            assert step_of(folder / f"checkpoint_{number}") == number
        found = [number for number, path in numbered_checkpoints(folder) if step_of(path) == number]  # no torn one stands under a number
        assert found[-1] in newest
        said = (folder / "latest").read_text()
        assert said in {f"checkpoint_{number}\n" for number in latest}
        assert step_of(folder / said.strip()) in latest

    return check


# -- saves --------------------------------------------------------------------------------------------------------------


def first_save(folder: Path, trace: Trace) -> None:
    trace.begin()
    trace.promise(whole({0, 2}))
    save(folder / "first", 2, trace, SIZES)
    trace.promise(whole({2}))


def overwrite(folder: Path, trace: Trace) -> None:
    save(folder / "first", 1, Quick(), {**SIZES, "old.json": 30})
    (folder / "first" / "notes.txt").write_bytes(MINE)
    trace.begin()
    trace.promise(whole({1, 2}, mine=True))
    save(folder / "first", 2, trace, SIZES)
    trace.promise(whole({2}, mine=True))
    assert (folder / "first" / "notes.txt").read_bytes() == MINE


def after_a_dead_save(folder: Path, trace: Trace) -> None:
    """Leftovers of every kind are swept before the save."""
    save(folder / "first", 1, Quick(), SIZES)
    (folder / "first" / "notes.txt").write_bytes(MINE)
    shutil.copytree(folder / "first", folder / ".first.removing-00000001")
    shutil.copytree(folder / "first", folder / ".first.saving-00000001")
    (folder / ".first.saving-00000001" / "MANIFEST.json").unlink()
    (folder / "first").rename(folder / ".first.was-00000001")
    trace.begin()
    trace.promise(whole({1, 2}, mine=True))
    save(folder / "first", 2, trace, SIZES)
    trace.promise(whole({2}, mine=True))


def saving_numbers(limit: int, *, there: int = 0, again: bool = False, link: bool = False) -> Scenario:
    """A save beside numbered ones, of which `limit` stay; `again`: to a number that is there already; `link`: one file is linked."""

    def scenario(folder: Path, trace: Trace) -> None:
        old = set(range(1, (there or limit) + 1))
        last = max(old)
        for number in sorted(old):
            save(folder / f"checkpoint_{number}", number, Quick(), {**SIZES, "frozen": 100})
        write_latest(folder, f"checkpoint_{last}", Quick())
        new = last if again else last + 1
        path = folder / f"checkpoint_{new}"
        trace.begin()
        trace.promise(whole_numbers(old, {last, new}, {last}))
        save_linked(path, new, trace) if link else save(path, new, trace, SIZES)
        trace.promise(whole_numbers(old | {new}, {new}, {last, new}))
        write_latest(folder, path.name, trace)
        stay = set(sorted(old | {new})[-limit:])
        trace.promise(whole_numbers(stay, {new}, {new}))
        rotate(folder, RetentionPolicy(limit), trace, path)
        assert {number for number, _ in numbered_checkpoints(folder)} == stay

    return scenario


def save_linked(path: Path, step: int, trace: Trace) -> None:
    """One file is that of the checkpoint before, under a second name; it has to outlive it."""
    entry = FileEntry(100, digest(content("frozen", step, 100)))
    with LocalTarget(path, trace).begin() as stage:
        assert stage.reuse("frozen", path.with_name(f"checkpoint_{step - 1}") / "frozen", entry)
        stage.commit(manifest_for(step, {"frozen": entry, **fill(stage, step, SIZES)}))


def sharded_save(ranks: int) -> Scenario:
    """A save over an older one to which other ranks add files, one after the other."""

    def scenario(folder: Path, trace: Trace) -> None:
        save(folder / "first", 1, Quick(), SIZES)
        trace.begin()
        trace.promise(whole({1, 2}))
        with LocalTarget(folder / "first", trace).begin() as stage:
            files = fill(stage, 2, SIZES)
            for rank in range(1, ranks):
                joined = LocalTarget(folder / "first", trace).join(stage.ticket)
                files |= fill(joined, 2, {f"model-rank-{rank}.safetensors": 9000, f"model-rank-{rank}.blocks": 16})
                joined.flush()
                joined.abandon()
            stage.commit(manifest_for(2, files))
        trace.promise(whole({2}))

    return scenario


SCENARIOS: dict[str, tuple[Scenario, bool]] = {
    "a first save": (first_save, True),
    "over an older one": (overwrite, True),
    "over an older one, by two renames": (overwrite, False),
    "after a dead save": (after_a_dead_save, True),
    "after a dead save, by two renames": (after_a_dead_save, False),
    "numbered, one is kept": (saving_numbers(1), True),
    "numbered, three are kept": (saving_numbers(3), True),
    "numbered, three of five go": (saving_numbers(3, there=5), True),
    "numbered, a number again": (saving_numbers(1, there=2, again=True), True),
    "numbered, a number again, by two renames": (saving_numbers(1, there=2, again=True), False),
    "numbered, linked to one that goes": (saving_numbers(1, link=True), True),
    "by two ranks": (sharded_save(2), True),
    "by four ranks, by two renames": (sharded_save(4), False),
}


def violations(found: Iterator[State], memory: Path, *, go_on: int = 0) -> tuple[int, list[str]]:
    """How many states there were, and what is wrong with the first three bad ones; every `go_on`-th is gone on from."""
    count, wrong = 0, []
    for state in found:
        if len(wrong) == 3:
            break
        place = memory / f"state-{count}"
        place.mkdir()
        materialise(state.tree, place)
        try:
            state.check(place)
            if go_on and count % go_on == 0:
                the_next_save_works(place)
        except (AssertionError, CheckpointError, OSError) as error:
            wrong.append(f"after {state.after} operations: {error!r}: {sorted(state.tree)}")
        shutil.rmtree(place)
        count += 1
    return count, wrong


def the_next_save_works(place: Path) -> None:
    numbers = [number for number, _ in numbered_checkpoints(place)]
    had_notes = any(place.rglob("notes.txt"))
    name = f"checkpoint_{numbers[-1] + 1}" if numbers else "first"
    save(place / name, 99, Quick(), {"w": 10})
    if numbers:
        rotate(place, RetentionPolicy(1), Quick(), place / name)
    assert step_of(place / name) == 99
    left = {path.name for path in place.iterdir() if not path.name.startswith(".latest.writing-")} - {"latest"}
    assert left == {name}
    assert not had_notes or (place / name / "notes.txt").read_bytes() == MINE


def traced(scenario: Scenario, memory: Path, **options: Any) -> Trace:
    folder = Path(tempfile.mkdtemp(dir=memory))
    trace = Trace(folder, **options)
    scenario(folder, trace)
    return trace


@pytest.mark.soak
def test_no_crash_leaves_torn_checkpoint(memory: Path, rounds: Callable[..., int]) -> None:
    """No crash leaves a torn checkpoint."""
    total, wrong = 0, {}
    for name, (scenario, exchanges) in SCENARIOS.items():
        found = states(traced(scenario, memory, exchanges=exchanges), most=rounds(ci=12, soak=1500))
        count, complaints = violations(found, memory, go_on=10)
        total += count
        wrong[name] = complaints
    print(f"{total} states")
    assert wrong == dict.fromkeys(SCENARIOS, [])
    assert total > rounds(ci=1000, soak=10_000)


@pytest.mark.parametrize("forgotten", ["sync file", "sync folder"])
@pytest.mark.parametrize(
    "scenario", [first_save, overwrite, saving_numbers(1), sharded_save(2)], ids=["first", "over", "numbered", "sharded"]
)
def test_sync_forgotten_would_found(forgotten: str, scenario: Scenario, memory: Path) -> None:
    """A sync that is forgotten would be found."""
    _, wrong = violations(states(traced(scenario, memory, forgets=forgotten), most=60), memory)
    assert wrong


def test_removing_under_number_would_found(memory: Path) -> None:
    """Removing one under its number would be found."""
    def hasty(folder: Path, trace: Trace) -> None:
        for number in (1, 2):
            save(folder / f"checkpoint_{number}", number, Quick(), SIZES)
        write_latest(folder, "checkpoint_2", Quick())
        trace.begin()
        trace.promise(whole_numbers({2}, {2}, {2}))
        trace.remove_tree(folder / "checkpoint_1")

    _, wrong = violations(states(traced(hasty, memory), most=20), memory)
    assert wrong
