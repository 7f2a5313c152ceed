"""A disk that fails at any one operation of a save: the old checkpoint stays, the error says what to do, and the next save works.

Every operation of every kind of save is made to fail, for a moment and for good: with every error in one kind of save, and with `--soak`
in all of them. The save then either raises a `CheckpointError` with the old checkpoint untouched, or the failure was in tidying up, and
the new one is there.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broken_disk import CODES, BrokenDisk, Counting, ShortDisk

from slipstream.checkpoint.commit import LocalTarget, write_latest
from slipstream.checkpoint.rotate import RetentionPolicy, numbered_checkpoints, rotate
from slipstream.errors import CheckpointError
from slipstream.files import disk, disk as disk_module
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk, FileEntry

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))
from small import content, fill, manifest_for, save, step_of

SIZES = {"model.safetensors": 9000, "unet/config.json": 20}

BOTH = "it and the one before it are both complete"
"""What is said if the disk fails for good between the exchange of two folders and its confirmation; a passing failure is taken back."""

UNCONFIRMED = "it is complete, but the disk has not confirmed it"
"""The same where there was none before."""

Save = Callable[[Path, Disk], None]


@pytest.fixture(autouse=True)
def _large_files_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "SMALLEST", 8000)
    monkeypatch.setattr(disk, "_PIECE", 4096)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="slipstream-broken-") as folder:
        yield Path(folder)


@pytest.fixture
def codes(rounds: Callable[..., int]) -> list[str]:
    """Which errors are tried everywhere: in CI one that leaves room for tidying up, and one that does not."""
    return [["ENOSPC", "EIO"], list(CODES)][rounds(ci=0, soak=1)]


# -- what is there before, and the save -----------------------------------------------------------------------------------


def an_old_one(folder: Path) -> None:
    save(folder / "first", 1, Counting(), {**SIZES, "frozen": 50})
    (folder / "first" / "notes.txt").write_text("mine")


def an_old_one_and_leftovers(folder: Path) -> None:
    an_old_one(folder)
    for kind in ("saving", "removing", "was"):
        shutil.copytree(folder / "first", folder / f".first.{kind}-01234567")
    (folder / ".first.was-01234567" / "notes.txt").unlink()


def out_of_its_place(folder: Path) -> None:
    an_old_one(folder)
    (folder / "first").rename(folder / ".first.was-01234567")


def over_it(folder: Path, disk: Disk) -> None:
    save(folder / "first", 2, disk, SIZES)


def linked(folder: Path, disk: Disk) -> None:
    entry = FileEntry(50, digest(content("frozen", 0, 50)))
    with LocalTarget(folder / "first", disk).begin() as stage:
        (stage.folder / "hook.txt").write_bytes(content("hook.txt", 2, 5))
        files = {"hook.txt": stage.adopt("hook.txt"), **fill(stage, 2, SIZES)}
        if stage.reuse("frozen", folder / "first" / "frozen", entry):
            files["frozen"] = entry
        stage.commit(manifest_for(2, files))


SAVES: dict[str, tuple[Callable[[Path], None], Save, bool]] = {
    "over an old one": (an_old_one, over_it, True),
    "over an old one, by two renames": (an_old_one, over_it, False),
    "after a dead save": (an_old_one_and_leftovers, over_it, True),
    "one that a crash took from its place": (out_of_its_place, over_it, False),
    "with files of hooks and links": (an_old_one, linked, True),
}


def outcome(attempt: Callable[[], None]) -> CheckpointError | None:
    try:
        attempt()
    except CheckpointError as error:
        return error
    return None


def saying(error: CheckpointError, folder: Path) -> bool:
    """Whether a message names the checkpoint, a file, the reason and something to do, and that nothing is lost."""
    text = str(error)
    reasons = "|".join(re.escape(os.strerror(code)) for code in CODES.values())
    named = re.search(rf"{re.escape(str(folder))}/\S+ could not be saved: {re.escape(str(folder))}\S*: ({reasons})\.", text) or re.search(
        rf"could not be saved: {re.escape(str(folder))}\S* -> \S+: ({reasons})\.", text
    )
    nothing_lost = text.endswith("The previous checkpoint is untouched.") or BOTH in text or UNCONFIRMED in text
    what_to_do = re.search("choose another (disk|folder|one)|use a folder below", text.split("\n")[1])
    return named is not None and what_to_do is not None and nothing_lost


@pytest.mark.soak
@pytest.mark.parametrize("lasting", [False, True], ids=["for a moment", "for good"])
@pytest.mark.parametrize("name", SAVES)
def test_every_error_at_every_operation(name: str, lasting: bool, memory: Path, codes: list[str]) -> None:
    """Every operation fails once with every error."""
    prepare, attempt, exchanges = SAVES[name]
    (memory / "counted").mkdir()
    prepare(memory / "counted")
    counting = Counting(exchanges=exchanges)
    attempt(memory / "counted", counting)
    system = {"_open", "_pwrite", "_allocate", "_fsync", "_close", "make_folder", "_chmod", "rename", "remove", "remove_folder"}
    assert set(counting.calls) >= system
    (memory / "template").mkdir()
    prepare(memory / "template")
    wrong = [
        f"{code} at {at} ({counting.calls[at]}): {complaint}"
        for at in range(len(counting.calls))
        for code in (CODES if name == "over an old one" and not lasting else codes)
        if (complaint := one_failure(memory, attempt, BrokenDisk(at, CODES[code], lasting=lasting, exchanges=exchanges)))
    ]
    assert wrong == []


def one_failure(memory: Path, attempt: Save, disk: BrokenDisk) -> str:
    """What is not as it should be after a save on this disk; nothing if all is well."""
    folder = memory / "broken"
    shutil.copytree(memory / "template", folder)
    try:
        error = outcome(lambda: attempt(folder, disk))
        assert disk.failed, "nothing failed"
        assert error is None or saying(error, folder), f"the message is {error}"
        allowed = {2} if error is None else {1, 2} if disk.lasting and BOTH in str(error) else {1}
        assert step_of(folder / "first") in allowed, "the wrong one is there"
        save(folder / "first", 3, Counting(), SIZES)
        assert step_of(folder / "first") == 3
        assert os.listdir(folder) == ["first"], f"left behind: {os.listdir(folder)}"
        assert (folder / "first" / "notes.txt").read_text() == "mine"
    except (AssertionError, CheckpointError, OSError) as failure:
        return f"{type(failure).__name__}: {failure}".split("\n")[0]
    finally:
        shutil.rmtree(folder)
    return ""


def rotation(folder: Path, disk: Disk) -> None:
    save(folder / "checkpoint_3", 3, disk, SIZES)
    write_latest(folder, "checkpoint_3", disk)
    rotate(folder, RetentionPolicy(1), disk, folder / "checkpoint_3")


@pytest.mark.soak
@pytest.mark.parametrize("lasting", [False, True], ids=["for a moment", "for good"])
def test_numbered_checkpoints_on_disk_fails(lasting: bool, memory: Path, codes: list[str]) -> None:
    """Numbered checkpoints on a disk that fails."""
    (memory / "template").mkdir()
    for number in (1, 2):
        save(memory / "template" / f"checkpoint_{number}", number, Counting(), SIZES)
    write_latest(memory / "template", "checkpoint_2", Counting())
    shutil.copytree(memory / "template", memory / "counted")
    counting = Counting()
    rotation(memory / "counted", counting)
    for at in range(len(counting.calls)):
        for code in (CODES[name] for name in codes):
            folder = memory / "broken"
            shutil.copytree(memory / "template", folder)
            error = outcome(lambda: rotation(folder, BrokenDisk(at, code, lasting=lasting)))  # noqa: B023
            assert error is None or saying(error, folder), (counting.calls[at], str(error))
            there = [number for number, path in numbered_checkpoints(folder) if step_of(path) == number]
            latest = (folder / "latest").read_text().strip()
            assert step_of(folder / latest) in there
            assert there[-1:] == [3] if error is None else {1, 2} <= set(there)
            rotation(folder, Counting())
            assert sorted(name for name in os.listdir(folder) if not name.startswith(".latest.writing-")) == ["checkpoint_3", "latest"]
            assert (folder / "latest").read_text() == "checkpoint_3\n"
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    "part", [lambda size: 1, lambda size: size // 2, lambda size: size - 1, lambda size: 4096], ids=["1", "half", "all but 1", "4096"]
)
def test_short_writes_continued(part: Callable[[int], int], memory: Path) -> None:
    """Short writes are continued."""
    disk = ShortDisk(part)
    for step in (1, 2):
        save(memory / "first", step, disk, SIZES)
        assert step_of(memory / "first") == step
    assert disk.calls.count("_pwrite") > 6


def test_short_write_on_full_disk_error(memory: Path) -> None:
    """A short write on a full disk is an error."""
    class Filling(Counting):
        """Takes 5,000 bytes altogether."""

        room = 5000
        one_at_a_time = threading.Lock()  # large files have two writers

        def _allocate(self, fd: int, size: int) -> None:
            """Knows nothing of that."""

        def _pwrite(self, fd: int, data: Any, offset: int) -> int:
            with self.one_at_a_time:
                if not self.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                count = super()._pwrite(fd, memoryview(data)[: self.room], offset)
                self.room -= count
            return count

    save(memory / "first", 1, Counting(), SIZES)
    with pytest.raises(CheckpointError) as caught:
        save(memory / "first", 2, Filling(), SIZES)
    assert re.search(
        r"/model\.safetensors: No space left on device\.\nThe disk is full: .* takes 9,000 bytes, and [\d,]+ are free\.", str(caught.value)
    )
    assert (step_of(memory / "first"), os.listdir(memory)) == (1, ["first"])


def test_interrupt_at_every_operation(memory: Path) -> None:
    """An interrupt at every operation leaves the old or the new one."""
    class Interrupted(Counting):
        def __init__(self, at: int) -> None:
            super().__init__()
            self._at = at

        def _before(self, primitive: str, path: Path | None) -> None:
            super()._before(primitive, path)
            if len(self.calls) - 1 == self._at:
                raise KeyboardInterrupt

    def attempt(at: int) -> bool:
        try:
            save(memory / "first", 2, Interrupted(at), SIZES)
        except KeyboardInterrupt:
            return False
        return True

    counting = Counting()
    save(memory / "first", 1, counting, SIZES)
    save(memory / "first", 1, counting := Counting(), SIZES)
    for at in range(len(counting.calls) + 1):
        done = attempt(at)
        assert step_of(memory / "first") in ((2,) if done else (1, 2)), (at, counting.calls[at : at + 1])
        save(memory / "first", 1, Counting(), SIZES)
        assert (step_of(memory / "first"), os.listdir(memory)) == (1, ["first"])
    assert done


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_may_not_written(tmp_path: Path) -> None:
    """A folder that may not be written."""
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="may not write there"):
            save(tmp_path / "first", 1)
    finally:
        tmp_path.chmod(0o700)
