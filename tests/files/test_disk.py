"""What reaches the disk: the bytes given, checksummed, synced, or an error that names the file."""

from __future__ import annotations

import array
import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.files.checksum import digest
from slipstream.files.disk import SMALLEST, Disk, UnsyncedFiles

SIZES = [0, 1, 4096, SMALLEST - 1, SMALLEST, SMALLEST + 1, (2 << 20) * 4, (2 << 20) * 5 + 4096, 10_000_019]


class Log(Disk):
    """Keeps the names of the primitives that were called, with the size of every write."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.calls.append(("write", len(data)))
        return super()._pwrite(fd, data, offset)

    def _fsync(self, fd: int) -> None:
        self.calls.append("sync")
        super()._fsync(fd)

    def _close(self, fd: int) -> None:
        self.calls.append("close")
        super()._close(fd)


class Buffered(Disk):
    def _set_direct(self, fd: int, wanted: bool) -> bool:
        return False


class Short(Disk):
    """A system that never writes all it is asked for, and not in whole blocks."""

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        return super()._pwrite(fd, memoryview(data)[: max(1, len(data) * 2 // 3)], offset)


class Stubborn(Disk):
    """A file system that allows direct writing and then refuses every direct write."""

    def __init__(self) -> None:
        self.direct = False

    def _set_direct(self, fd: int, wanted: bool) -> bool:
        self.direct = wanted
        return wanted

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super()._pwrite(fd, data, offset)


def cut(content: bytes, where: list[int]) -> list[memoryview]:
    edges = [0, *sorted(min(entry, len(content)) for entry in where), len(content)]
    return [memoryview(content)[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("disk", [Disk(), Buffered(), Short(), Stubborn()], ids=lambda disk: type(disk).__name__)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_given(size: int, disk: Disk, tmp_path: Path) -> None:
    """The bytes given are there."""
    content = os.urandom(size)
    written = disk.write(tmp_path / "file", cut(content, [1, 5000, 70_000, 70_000, 3_000_000]), size)
    assert (tmp_path / "file").read_bytes() == content
    assert (written.size, written.checksum) == (size, digest(content))


@settings(max_examples=25, deadline=None)
@given(st.integers(SMALLEST - 3, 9 << 20), st.lists(st.integers(0, 9 << 20), max_size=6))
def test_however_bytes_cut(tmp_path_factory: pytest.TempPathFactory, size: int, where: list[int]) -> None:
    """However the bytes are cut."""
    content = (b"0123456789abcdefghi" * (size // 19 + 1))[:size]
    path = tmp_path_factory.mktemp("cut") / "file"
    assert Disk().write(path, cut(content, where), size).checksum == digest(content)
    assert path.read_bytes() == content
    path.unlink()


def test_buffers_of_any_type_bytes(tmp_path: Path) -> None:
    """Buffers of any type are bytes."""
    numbers = array.array("d", [1.0, 2.0])
    table = memoryview(bytes(range(12))).cast("B", (3, 4))
    written = Disk().write(tmp_path / "file", [numbers, table, b"", memoryview(b"").cast("B")], 28)  # type: ignore[list-item]
    assert (tmp_path / "file").read_bytes() == numbers.tobytes() + bytes(range(12))
    assert written.checksum == digest((tmp_path / "file").read_bytes())


@pytest.mark.parametrize("size", [10, SMALLEST])
def test_file_synced_after_last_byte(size: int, tmp_path: Path) -> None:
    """A file is synced after its last byte."""
    disk = Log()
    disk.write(tmp_path / "file", [bytes(size)], size)
    assert disk.calls[-2:] == ["sync", "close"]
    assert all(call[0] == "write" for call in disk.calls[:-2])
    assert sum(call[1] for call in disk.calls[:-2]) == size


def test_existing_file_never_overwritten(tmp_path: Path) -> None:
    """An existing file is never overwritten."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            Disk().write(tmp_path / name, [b"other"], 5)
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("size", [10, SMALLEST + 10])
@pytest.mark.parametrize("difference", [-1, 1])
def test_wrong_number_of_bytes(size: int, difference: int, tmp_path: Path) -> None:
    """Another number of bytes than announced is an error."""
    with pytest.raises(ValueError, match=r"file was announced with .* and got"):
        Disk().write(tmp_path / "file", [bytes(size + difference)], size)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("size", [100, 30 << 20])
def test_write_error_leaves_no_thread(code: int, size: int, tmp_path: Path) -> None:
    """An error while writing names the file and leaves no thread."""
    class Broken(Disk):
        def _pwrite(self, fd: int, data: Any, offset: int) -> int:
            if offset + len(data) >= size // 2:
                raise OSError(code, os.strerror(code))
            return super()._pwrite(fd, data, offset)

    with pytest.raises(OSError, match="file") as caught:
        Broken().write(tmp_path / "file", [bytes(size)], size)
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "file"))


def test_error_of_source_raised_as(tmp_path: Path) -> None:
    """An error of the source is raised as it is."""
    def chunks() -> Iterator[bytes]:
        yield bytes(5 << 20)
        raise KeyError("the tensor is gone")

    with pytest.raises(KeyError):
        Disk().write(tmp_path / "file", chunks(), 10 << 20)


def test_empty_write_is_an_error(tmp_path: Path) -> None:
    """A write of nothing is an error and no endless loop."""
    class Nothing(Disk):
        def _pwrite(self, fd: int, data: Any, offset: int) -> int:
            return 0

    for size in (5, SMALLEST):
        with pytest.raises(OSError, match="wrote nothing"):
            Nothing().write(tmp_path / str(size), [bytes(size)], size)


def test_full_disk_noticed_before_first_byte(tmp_path: Path) -> None:
    """A full disk is noticed before the first byte."""
    class Full(Log):
        def _allocate(self, fd: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Full()
    with (tmp_path / "probe").open("wb") as probe:
        if not disk._set_direct(probe.fileno(), True):
            pytest.skip("no direct writing here")
    with pytest.raises(OSError, match="No space"):
        disk.write(tmp_path / "file", [bytes(SMALLEST)], SMALLEST)
    assert disk.calls == ["close"]


def test_two_names_change_places(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").write_text("")
    if not Disk().exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("no exchange here")
    assert (tmp_path / "a" / "of_b").exists()
    assert (tmp_path / "b" / "of_a").exists()
    with pytest.raises(FileNotFoundError, match="nothing"):
        Disk().exchange(tmp_path / "a", tmp_path / "nothing")


def test_file_of_others_synced_and_described(tmp_path: Path) -> None:
    """A file of others is synced and described."""
    (tmp_path / "file").write_bytes(b"x" * 5_000_000)
    disk = Log()
    written = disk.sync_file(tmp_path / "file")
    assert (written.size, written.checksum) == (5_000_000, digest(b"x" * 5_000_000))
    assert disk.calls == ["sync", "close"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    for name in ("pipe", "link", "nothing"):
        with pytest.raises(OSError, match=name):
            disk.sync_file(tmp_path / name)


class OpenNow(Disk):
    """Counts the descriptors that are open at the same time."""

    def __init__(self) -> None:
        self.now, self.most = set[int](), 0

    def _open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        fd = super()._open(path, flags, mode)
        self.now.add(fd)
        self.most = max(self.most, len(self.now))
        return fd

    def _close(self, fd: int) -> None:
        self.now.discard(fd)
        super()._close(fd)


def test_thousands_of_files_and_folders_synced(tmp_path: Path) -> None:
    """Syncing many files and folders together needs few descriptors: a process may have 1,024."""
    disk = OpenNow()
    files = UnsyncedFiles(disk)
    folders = [tmp_path / str(number) for number in range(300)]
    for folder in folders:
        folder.mkdir()
        files.write(folder / "file", [b"x"], 1)
    files.sync(folders)
    assert not disk.now
    assert disk.most < 100


@pytest.mark.parametrize("room", [1, 2, 7])
def test_files_of_a_save_with_few_descriptors(room: int, tmp_path: Path) -> None:
    """Where the system opens no more files, those that wait are synced and closed, and the save goes on."""

    class Limited(OpenNow):
        def _open(self, path: Path, flags: int, mode: int = 0o666) -> int:
            if len(self.now) >= room:
                raise OSError(errno.EMFILE, "Too many open files")
            return super()._open(path, flags, mode)

    disk = Limited()
    files = UnsyncedFiles(disk)
    for number in range(30):
        entry = files.write(tmp_path / str(number), iter([b"some ", b"bytes"]), 10)
        assert (tmp_path / str(number)).read_bytes() == b"some bytes"
        assert entry.size == 10
    files.sync()
    assert not disk.now
    with disk._opened(tmp_path / "0", os.O_RDONLY):
        files = UnsyncedFiles(disk)
        if room == 1:
            with pytest.raises(OSError, match="Too many open files"):
                files.write(tmp_path / "more", [b"x"], 1)


@pytest.mark.parametrize("started", [0, 1])
def test_synced_without_threads(started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no more threads, as while Python ends, those that there are sync everything."""
    disk = Log()
    files = UnsyncedFiles(disk)
    for number in range(9):
        files.write(tmp_path / str(number), [b"x"], 1)
    start, left = threading.Thread.start, [None] * started

    def refuse(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    files.sync([tmp_path])
    assert disk.calls.count("sync") == disk.calls.count("close") == 10


def test_text_replaced_whole(tmp_path: Path) -> None:
    """A text is replaced whole."""
    disk = Disk()
    disk.replace_text(tmp_path / "latest", "one\n")
    disk.replace_text(tmp_path / "latest", "two\n")
    assert (tmp_path / "latest").read_text() == "two\n"
    assert os.listdir(tmp_path) == ["latest"]


def test_text_cannot_replaced_stays(tmp_path: Path) -> None:
    """A text that cannot be replaced stays."""
    class Broken(Disk):
        def rename(self, old: Path, new: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(old))

    (tmp_path / "latest").write_text("one\n")
    with pytest.raises(OSError, match="Input/output"):
        Broken().replace_text(tmp_path / "latest", "two\n")
    assert (tmp_path / "latest").read_text() == "one\n"
    assert os.listdir(tmp_path) == ["latest"]


def test_tree_removed_without_following_links(tmp_path: Path) -> None:
    """A tree is removed without following links."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "file").write_text("x")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "precious")
    Disk().remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == ["precious"]
    assert os.listdir(tmp_path / "precious") == ["file"]


def test_lock_held_by(tmp_path: Path) -> None:
    """A lock is held by one."""
    disk = Disk()
    held = disk.lock(tmp_path / "lock")
    assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} ")
    with pytest.raises(BlockingIOError):
        disk.lock(tmp_path / "lock")
    disk.unlock(tmp_path / "lock", held)
    assert os.listdir(tmp_path) == []
    disk.unlock(tmp_path / "lock", disk.lock(tmp_path / "lock"))


def hold_and_wait(path: Path, ready: Any) -> None:
    Disk().lock(path)
    ready.set()
    signal.pause()


def test_killed_process_holds_no_lock(tmp_path: Path) -> None:
    """A killed process holds no lock."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=hold_and_wait, args=(tmp_path / "lock", ready))
    child.start()
    assert ready.wait(20)
    with pytest.raises(BlockingIOError):
        Disk().lock(tmp_path / "lock")
    child.kill()
    child.join()
    held = Disk().lock(tmp_path / "lock")
    assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} ")
    Disk().unlock(tmp_path / "lock", held)


def test_locks_of_many_threads(tmp_path: Path) -> None:
    """Locks of many threads come one after the other."""
    holding: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(30):
            try:
                held = Disk().lock(tmp_path / "lock")
            except BlockingIOError:
                continue
            holding.append(1)
            most.append(len(holding))
            holding.pop()
            Disk().unlock(tmp_path / "lock", held)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}


def test_file_system_without_permissions(tmp_path: Path) -> None:
    """A file system without permissions is no error and another reason is."""
    class Mount(Disk):
        def __init__(self, code: int) -> None:
            self.code = code

        def _chmod(self, path: Path, mode: int) -> None:
            raise OSError(self.code, os.strerror(self.code))

    for code in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        Mount(code).set_mode(tmp_path, 0o700)
    with pytest.raises(OSError, match="Input/output error") as caught:
        Mount(errno.EIO).set_mode(tmp_path, 0o700)
    assert caught.value.filename == str(tmp_path)
