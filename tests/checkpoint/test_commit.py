"""A save is a commit: what is there before, after, beside it, and while somebody else is at it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small import FILES, content, fill, manifest_for, save, step_of, tree

from slipstream.checkpoint.commit import LocalStage, LocalTarget, find_recoverable, sweep_leftovers, write_latest
from slipstream.checkpoint.manifest import RankFile
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk, FileEntry

WHOLE = sorted(["MANIFEST.json", "model.safetensors", "training.json", "unet", "unet/config.json"])


class NoExchange(Disk):
    """A system that cannot exchange two names."""

    def exchange(self, path: Path, other: Path) -> bool:
        return False


DISKS = pytest.mark.parametrize("disk", [Disk(), NoExchange()], ids=["exchange", "two renames"])


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_checkpoint_appears_whole(tmp_path: Path) -> None:
    """A checkpoint appears whole."""
    with LocalTarget(tmp_path / "first").begin() as stage:
        files = fill(stage, 1)
        assert os.listdir(tmp_path).count("first") == 0
        assert stage.folder.parent == tmp_path
        assert files["training.json"] == FileEntry(300, digest(content("training.json", 1, 300)))
        stage.commit(manifest_for(1, files))
    assert step_of(tmp_path / "first") == 1
    assert tree(tmp_path / "first") == WHOLE
    assert os.listdir(tmp_path) == ["first"]


@DISKS
def test_checkpoint_replaced_whole(disk: Disk, tmp_path: Path) -> None:
    """A checkpoint is replaced whole."""
    save(tmp_path / "first", 1, disk, {**FILES, "only_old": 10, "old/only": 10})
    with LocalTarget(tmp_path / "first", disk).begin() as stage:
        files = fill(stage, 2)
        assert step_of(tmp_path / "first") == 1
        stage.commit(manifest_for(2, files))
    assert step_of(tmp_path / "first") == 2
    assert tree(tmp_path / "first") == WHOLE
    assert os.listdir(tmp_path) == ["first"]


@DISKS
def test_foreign_files_move_into_new(disk: Disk, tmp_path: Path) -> None:
    """What others put into it moves into the new one."""
    save(tmp_path / "first", 1, disk)
    (tmp_path / "first" / "notes.txt").write_text("mine")
    (tmp_path / "first" / "unet" / "notes.txt").write_text("mine too")
    (tmp_path / "first" / "plots" / "deep").mkdir(parents=True)
    (tmp_path / "first" / "plots" / "deep" / "loss.png").write_text("a picture")
    (tmp_path / "first" / "link").symlink_to("/etc/hostname")
    save(tmp_path / "first", 2, disk, {"model.safetensors": 100})
    assert step_of(tmp_path / "first") == 2
    mine = ["link", "notes.txt", "plots", "plots/deep", "plots/deep/loss.png", "unet", "unet/notes.txt"]
    assert tree(tmp_path / "first") == sorted(["MANIFEST.json", "model.safetensors", *mine])
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "first" / "link").is_symlink()
    assert os.listdir(tmp_path) == ["first"]


def test_foreign_folder_becomes_checkpoint(tmp_path: Path) -> None:
    """A folder of others becomes a checkpoint that keeps their files."""
    (tmp_path / "first" / "unet").mkdir(parents=True)
    (tmp_path / "first" / "notes.txt").write_text("mine")
    (tmp_path / "first" / "unet" / "notes.txt").write_text("mine too")
    save(tmp_path / "first", 1)
    assert step_of(tmp_path / "first") == 1
    assert tree(tmp_path / "first") == sorted([*WHOLE, "notes.txt", "unet/notes.txt"])


def test_foreign_file_with_taken_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of others that has a successor of the same name is left and named."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "model.safetensors").write_text("not of this library")
    with caplog.at_level(logging.WARNING):
        save(tmp_path / "first", 1)
        save(tmp_path / "first", 2)
    assert step_of(tmp_path / "first") == 2
    (kept,) = [name for name in os.listdir(tmp_path) if name != "first"]
    assert (tmp_path / kept / "model.safetensors").read_text() == "not of this library"
    assert [kept in record.getMessage() and "model.safetensors" in record.getMessage() for record in caplog.records] == [True]


def test_stale_rank_files_removed(tmp_path: Path) -> None:
    """Files of ranks of an earlier save do not stay."""
    save(tmp_path / "first", 1)
    (tmp_path / "first" / RankFile(1, "1-0000000000000001", "0" * 32).name).write_text("random state of rank 1 at step 1")
    save(tmp_path / "first", 2)
    assert tree(tmp_path / "first") == WHOLE


def test_damaged_checkpoint_replaced(tmp_path: Path) -> None:
    """A damaged checkpoint is replaced."""
    save(tmp_path / "first", 1)
    (tmp_path / "first" / "MANIFEST.json").write_text("{")
    (tmp_path / "first" / "notes.txt").write_text("mine")
    save(tmp_path / "first", 2)
    assert step_of(tmp_path / "first") == 2
    assert tree(tmp_path / "first") == sorted([*WHOLE, "notes.txt"])
    assert os.listdir(tmp_path) == ["first"]


def test_empty_folder_replaced(tmp_path: Path) -> None:
    """An empty folder is replaced."""
    (tmp_path / "first").mkdir()
    save(tmp_path / "first", 1)
    assert (step_of(tmp_path / "first"), os.listdir(tmp_path)) == (1, ["first"])


def fails_while_saving(path: Path) -> LocalStage:
    with suppress(KeyError), LocalTarget(path).begin() as stage:
        fill(stage, 3)
        raise KeyError("the script failed")
    return stage


def test_abandoned_stages_leave_nothing(tmp_path: Path) -> None:
    save(tmp_path / "first", 1)
    stage = LocalTarget(tmp_path / "first").begin()
    fill(stage, 2)
    stage.abandon()
    stage.abandon()
    stage = fails_while_saving(tmp_path / "first")
    assert (step_of(tmp_path / "first"), os.listdir(tmp_path)) == (1, ["first"])
    with pytest.raises(CheckpointError, match="this save has ended"):
        stage.add("x", [b""], 0)


# -- places -----------------------------------------------------------------------------------------------------------


def test_folders_on_way_made(tmp_path: Path) -> None:
    """Folders on the way are made."""
    save(tmp_path / "a" / "b" / "first", 1)
    assert step_of(tmp_path / "a" / "b" / "first") == 1


@pytest.mark.parametrize(
    "name", ["first/", "first//", "./first", "x/../first", "ünïcödé 模型", "with space", "-rf", "a.b", "n" * 255, "ü" * 127]
)
def test_names_of_all_kinds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    for step in (1, 2):
        save(name, step)
        assert step_of(tmp_path / os.path.normpath(name)) == step
    assert sorted(os.listdir(tmp_path)) == sorted([os.path.normpath(name), "x"])


def test_similar_names_keep_own_leftovers(tmp_path: Path) -> None:
    """Names that begin alike do not share leftovers."""
    names = ["n" * 250 + str(number) for number in range(3)]
    stages = [LocalTarget(tmp_path / name).begin() for name in [*names, "n", "n.saving"]]
    for stage in stages:
        fill(stage, 1)
        stage.commit(manifest_for(1, fill(stage, 1, {"more": 3})))
    assert len(os.listdir(tmp_path)) == 5


def test_relative_path_fixed_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means what it meant at the beginning."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with LocalTarget("out/first").begin() as stage:
        files = fill(stage, 1)
        monkeypatch.chdir(tmp_path / "there")
        stage.commit(manifest_for(1, files))
    assert step_of(tmp_path / "here" / "out" / "first") == 1
    assert os.listdir(tmp_path / "there") == []


def test_links_on_way_followed_before_dots(tmp_path: Path) -> None:
    """Links on the way are followed before dots."""
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
    save(tmp_path / "link" / ".." / "first", 1)
    assert step_of(tmp_path / "real" / "first") == 1


def test_home_directory_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home directory is expanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/first", 1)
    assert step_of(tmp_path / "first") == 1


def test_places_no_checkpoint_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that no checkpoint can take."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "work" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "work")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "work" / "inner")
    bad = {
        "/": "root",
        ".": "holds the working directory",
        "..": "holds the working directory",
        str(tmp_path / "work"): "holds the working directory",
        str(tmp_path / "file"): "there is a file of that name",
        str(tmp_path / "link"): "symbolic link",
        str(tmp_path / "link/"): "symbolic link",
        str(tmp_path / "dangling"): "symbolic link",
        "/proc": "mount point",
        ".x.saving-01234567": "names of that form",
    }
    for path, why in bad.items():
        with pytest.raises(ConfigError, match=why) as caught:
            LocalTarget(path).begin()
        assert "Use a separate folder, such as /" in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert tree(tmp_path / "work") == ["inner"]


def test_file_in_way_of_folder(tmp_path: Path) -> None:
    """A file in the way of a folder."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file where a folder should be") as caught:
        save(tmp_path / "file" / "first", 1)
    assert str(tmp_path / "file") in str(caught.value)


def test_folder_vanishes_during_save(tmp_path: Path) -> None:
    """A folder that vanishes during the save."""
    (tmp_path / "out").mkdir()
    for moment in ("writing", "committing"):
        with LocalTarget(tmp_path / "out" / "first").begin() as stage:
            files = fill(stage, 1)
            shutil.rmtree(tmp_path / "out")
            with pytest.raises(CheckpointError, match="was removed by another process") as caught:
                stage.add("more", [b"x"], 1) if moment == "writing" else stage.commit(manifest_for(1, files))
        assert str(tmp_path / "out" / "first") in str(caught.value)
    save(tmp_path / "out" / "first", 2)
    assert step_of(tmp_path / "out" / "first") == 2


def test_target_replaced_by_link(tmp_path: Path) -> None:
    """A target that became a link during the save is not followed."""
    (tmp_path / "elsewhere").mkdir()
    with LocalTarget(tmp_path / "first").begin() as stage:
        files = fill(stage, 1)
        (tmp_path / "first").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="symbolic link"):
            stage.commit(manifest_for(1, files))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "first"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_permissions_those_of_umask(tmp_path: Path, umask: None) -> None:
    """Permissions are those of the umask."""
    for step in (1, 2):
        with LocalTarget(tmp_path / "way" / "first").begin() as stage:
            files = fill(stage, step)
            assert stat.S_IMODE(stage.folder.stat().st_mode) == 0o700
            stage.commit(manifest_for(step, files))
        for name, mode in {".": 0o750, "..": 0o750, "unet": 0o750, "model.safetensors": 0o640, "MANIFEST.json": 0o640}.items():
            assert stat.S_IMODE((tmp_path / "way" / "first" / name).stat().st_mode) == mode


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", ""])
def test_names_lead_out_of_stage_refused(name: str, tmp_path: Path) -> None:
    """Names that lead out of the stage are refused."""
    with LocalTarget(tmp_path / "first").begin() as stage:
        for call in (lambda: stage.add(name, [b""], 0), lambda: stage.adopt(name), lambda: stage.reuse(name, tmp_path, FileEntry(0, ""))):
            with pytest.raises(CheckpointError, match="names the file"):
                call()


# -- files of others ---------------------------------------------------------------------------------------------------


def test_files_of_hooks_adopted(tmp_path: Path) -> None:
    """Files of hooks are adopted."""
    with LocalTarget(tmp_path / "first").begin() as stage:
        (stage.folder / "adapter").mkdir()
        (stage.folder / "adapter" / "weights.bin").write_bytes(content("adapter/weights.bin", 1, 77))
        entry = stage.adopt("adapter/weights.bin")
        assert entry == FileEntry(77, digest(content("adapter/weights.bin", 1, 77)))
        stage.commit(manifest_for(1, {"adapter/weights.bin": entry}))
    assert step_of(tmp_path / "first") == 1


def test_links_of_hooks_not(tmp_path: Path) -> None:
    """Links of hooks are not."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("secret")
    with LocalTarget(tmp_path / "first").begin() as stage:
        (stage.folder / "link").symlink_to(tmp_path / "secret")
        (stage.folder / "way").symlink_to(tmp_path / "folder")
        os.mkfifo(stage.folder / "pipe")
        for name in ("link", "way/file", "pipe"):
            with pytest.raises(CheckpointError, match=name):
                stage.adopt(name)


def test_unchanged_file_linked_and_outlives_source(tmp_path: Path) -> None:
    """An unchanged file is linked and outlives its source."""
    save(tmp_path / "first", 1, sizes={"frozen/w": 5000})
    data = content("frozen/w", 1, 5000)
    source, entry = tmp_path / "first" / "frozen" / "w", FileEntry(5000, digest(data))
    with LocalTarget(tmp_path / "second").begin() as stage:
        assert stage.reuse("other/w", source, entry)
        assert (stage.folder / "other" / "w").stat().st_ino == source.stat().st_ino
        stage.commit(manifest_for(1, {"other/w": entry}))
    shutil.rmtree(tmp_path / "first")
    assert (tmp_path / "second" / "other" / "w").read_bytes() == data


def test_file_not_what_not_linked(tmp_path: Path) -> None:
    """A file that is not what it was is not linked."""
    save(tmp_path / "first", 1, sizes={"w": 5000})
    source, entry = tmp_path / "first" / "w", FileEntry(5000, digest(content("w", 1, 5000)))
    (tmp_path / "link").symlink_to(source)
    with LocalTarget(tmp_path / "second").begin() as stage:
        assert not stage.reuse("w", tmp_path / "link", entry)
        assert not stage.reuse("w", tmp_path / "nothing", entry)
        assert not stage.reuse("w", source, FileEntry(4999, entry.checksum))
        with source.open("r+b") as file:
            file.seek(3000)
            file.write(b"?")
        assert not stage.reuse("w", source, entry)
        assert os.listdir(stage.folder) == []


def test_system_without_links_says_so(tmp_path: Path) -> None:
    """A system without links says so."""
    class NoLinks(Disk):
        def link(self, old: Path, new: Path) -> None:
            raise PermissionError(1, "Operation not permitted", str(old))

    save(tmp_path / "first", 1, sizes={"w": 50})
    with LocalTarget(tmp_path / "second", NoLinks()).begin() as stage:
        assert not stage.reuse("w", tmp_path / "first" / "w", FileEntry(50, digest(content("w", 1, 50))))


# -- others at work, and those that died --------------------------------------------------------------------------------


def save_and_pause(path: Path, moment: str, ready: Any) -> None:
    """A process that stops in the middle of a save, until it is killed."""

    class Pausing(NoExchange):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            if moment == "between two renames" and new.name.startswith(".") and not old.name.startswith("."):
                ready.set()
                signal.pause()

    with LocalTarget(path, Pausing()).begin() as stage:
        files = fill(stage, 2)
        if moment == "writing":
            ready.set()
            signal.pause()
        stage.commit(manifest_for(2, files))


@pytest.fixture
def paused() -> Iterator[Any]:
    """`paused(path, moment)`: a process that is in the middle of a save."""
    context = multiprocessing.get_context("fork")
    children: list[Any] = []

    def start(path: Path, moment: str) -> Any:
        ready = context.Event()
        children.append(context.Process(target=save_and_pause, args=(path, moment, ready)))
        children[-1].start()
        assert ready.wait(20)
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.join()


def test_second_process_is_refused(tmp_path: Path, paused: Any) -> None:
    """A second save to the same place names the first."""
    save(tmp_path / "first", 1)
    child = paused(tmp_path / "first", "writing")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=f"is being saved by process {child.pid} on "):
        LocalTarget(tmp_path / "first").begin()
    sweep_leftovers(tmp_path / "first", Disk())
    assert tree(tmp_path) == before
    save(tmp_path / "second", 1)  # another name is no matter
    child.kill()
    child.join()
    save(tmp_path / "first", 3)
    assert step_of(tmp_path / "first") == 3
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_second_save_in_one_process(tmp_path: Path) -> None:
    """A second save of the same process is refused too."""
    with LocalTarget(tmp_path / "first").begin(), pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        LocalTarget(tmp_path / "first").begin()
    save(tmp_path / "first", 1)


def test_crash_between_two_renames_loses_nothing(tmp_path: Path, paused: Any) -> None:
    """A crash between two renames loses nothing."""
    save(tmp_path / "first", 1)
    (tmp_path / "first" / "notes.txt").write_text("mine")
    child = paused(tmp_path / "first", "between two renames")
    child.kill()
    child.join()
    assert not (tmp_path / "first").exists()
    found = find_recoverable(tmp_path / "first")
    assert found is not None
    assert step_of(tmp_path / "first") in (1, 2)
    save(tmp_path / "first", 3)
    assert step_of(tmp_path / "first") == 3
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["first"]


def test_sweeping_alone_puts_back(tmp_path: Path, paused: Any) -> None:
    """Sweeping alone puts it back."""
    save(tmp_path / "first", 1)
    child = paused(tmp_path / "first", "between two renames")
    child.kill()
    child.join()
    sweep_leftovers(tmp_path / "first", Disk())
    assert step_of(tmp_path / "first") in (1, 2)
    assert os.listdir(tmp_path) == ["first"]


def test_lock_held_by_orphans(tmp_path: Path) -> None:
    """A lock that children of a dead process still have is waited for."""
    script = f"""
import os, sys, time
from slipstream.checkpoint.commit import LocalTarget
stage = LocalTarget({str(tmp_path / "first")!r}).begin()
if os.fork() == 0:
    sys.stdout.close(); os.close(1)
    time.sleep(1)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    save(tmp_path / "first", 1)
    assert os.listdir(tmp_path) == ["first"]


def test_leftovers_of_another_name_not_touched(tmp_path: Path) -> None:
    """Leftovers of another name are not touched."""
    for name in (
        ".other.saving-01234567",
        ".first.saving-0123456",
        ".first.more.saving-01234567",
        ".first.saving-01234567.x",
        "first.was-01234567",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    before = tree(tmp_path)
    for name in (".first.saving-01234567", ".first.was-01234567", ".first.removing-01234567"):
        (tmp_path / name).mkdir()
    save(tmp_path / "first", 1)
    shutil.rmtree(tmp_path / "first")
    assert tree(tmp_path) == before


def test_foreign_files_survive_crash(tmp_path: Path) -> None:
    """Files of others in what was replaced survive a crash."""
    save(tmp_path / "first", 1)
    (tmp_path / "first" / "notes.txt").write_text("mine")
    (tmp_path / "first").rename(tmp_path / ".first.was-00000000")  # as after an exchange, before the tidying up
    save(tmp_path / "elsewhere", 2)
    (tmp_path / "elsewhere").rename(tmp_path / "first")
    sweep_leftovers(tmp_path / "first", Disk())
    assert step_of(tmp_path / "first") == 2
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["first"]


def test_only_whole_folder_recovered(tmp_path: Path) -> None:
    """Only a whole folder is recovered."""
    assert find_recoverable(tmp_path / "first") is None
    for name, step in (("a", 5), ("b", 3)):
        save(tmp_path / name, step)
    (tmp_path / "a" / "model.safetensors").write_text("shorter")
    (tmp_path / "a").rename(tmp_path / ".first.was-0000000a")
    (tmp_path / "b").rename(tmp_path / ".first.was-0000000b")
    assert find_recoverable(tmp_path / "first") == tmp_path / ".first.was-0000000b"
    (tmp_path / "first").mkdir()
    assert find_recoverable(tmp_path / "first") is None


def test_file_system_without_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file system without locks saves and says so."""
    class NoLocks(Disk):
        def _flock(self, fd: int, operation: int) -> None:
            raise OSError(38, "Function not implemented")

    (tmp_path / ".first.saving-01234567").mkdir()
    with caplog.at_level(logging.WARNING):
        save(tmp_path / "first", 1, NoLocks())
    assert "does not support file locks" in caplog.text
    assert step_of(tmp_path / "first") == 1
    assert (tmp_path / ".first.saving-01234567").exists()  # it could be alive


def test_threads_save_to_places_of_own(tmp_path: Path) -> None:
    """Threads that save to places of their own."""
    threads = [threading.Thread(target=save, args=(tmp_path / str(number), number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [step_of(tmp_path / str(number)) for number in range(4)] == [0, 1, 2, 3]


def test_latest_named(tmp_path: Path) -> None:
    """The latest is named."""
    (tmp_path / ".latest.writing-01234567").write_text("of a process that was killed")
    os.utime(tmp_path / ".latest.writing-01234567", (1, 1))
    (tmp_path / ".latest.writing-76543210").write_text("of one that may be alive")
    write_latest(tmp_path, "checkpoint_3", Disk())
    assert (tmp_path / "latest").read_text() == "checkpoint_3\n"
    assert sorted(os.listdir(tmp_path)) == [".latest.writing-76543210", "latest"]
    with pytest.raises(CheckpointError, match="was removed by another process"):
        write_latest(tmp_path / "nothing", "checkpoint_3", Disk())
