"""A file read as a whole, with its checksum on the way."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError
from slipstream.files import large_pages, reader
from slipstream.files.checksum import digest
from slipstream.files.reader import read_digest, read_into, read_whole, release_memory


@pytest.mark.parametrize("size", [0, 1, 4095, 4 << 20, (9 << 20) + 13])
def test_all_bytes_and_checksum(size: int, tmp_path: Path) -> None:
    """All bytes and their checksum."""
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        buffer, checksum = read_whole(file.fileno(), size)
        assert bytes(buffer) == content
        assert checksum == digest(content) == read_digest(file.fileno(), size)
        assert read_whole(file.fileno(), size, digest=False)[1] == ""
    assert not buffer.readonly


@pytest.mark.parametrize("announced", [0, 9, 11, 2**50])
def test_another_size_refused_before_anything_allocated(announced: int, tmp_path: Path) -> None:
    """Another size is refused before anything is allocated."""
    (tmp_path / "file").write_bytes(b"slipstream")
    with (tmp_path / "file").open("rb") as file:
        for read in (read_whole, read_digest):
            with pytest.raises(CheckpointError, match=r"model has 10 bytes, and it should have"):
                read(file.fileno(), announced, where="model")


def test_file_shrinks_while_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that shrinks while it is read is an error."""
    (tmp_path / "file").write_bytes(bytes(100))
    monkeypatch.setattr(reader, "_PIECE", 10)
    with (tmp_path / "file").open("rb") as file:
        original = os.preadv

        def shrinking(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset == 50:
                os.truncate(tmp_path / "file", 50)
            return original(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", shrinking)
        with pytest.raises(CheckpointError, match="ended after 50 bytes"):
            read_whole(file.fileno(), 100)


def test_read_gives_less_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that gives less is continued."""
    content = os.urandom(1000)
    (tmp_path / "file").write_bytes(content)
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: original(fd, [buffers[0][:7]], offset))
    with (tmp_path / "file").open("rb") as file:
        buffer, checksum = read_whole(file.fileno(), 1000)
    assert bytes(buffer) == content
    assert checksum == digest(content)


def test_several_threads_read_descriptor(tmp_path: Path) -> None:
    """Several threads read one descriptor."""
    content = os.urandom(1 << 20)
    (tmp_path / "file").write_bytes(content)
    found: list[str] = []
    with (tmp_path / "file").open("rb") as file:
        threads = [threading.Thread(target=lambda: found.append(read_whole(file.fileno(), len(content))[1])) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [digest(content)] * 3


@pytest.mark.parametrize("size", [16 << 20, (16 << 20) + 1, (21 << 20) - 4096, (20 << 20) + 511])
def test_uncached_file(tmp_path: Path, size: int) -> None:
    """A file outside of the page cache is read whole."""
    content = os.urandom(1 << 20) * (size >> 20) + os.urandom(size % (1 << 20))
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        buffer, checksum = read_whole(file.fileno(), size, alone=True)
        assert fcntl.fcntl(file.fileno(), fcntl.F_GETFL) == before
    assert buffer == content
    assert checksum == digest(content)


def test_direct_read_refused_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that refuses direct reads in the middle is read through the page cache."""
    content = os.urandom(1 << 20) * 17
    (tmp_path / "file").write_bytes(content)
    original = os.preadv

    def refusing(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError
        if offset >= 8 << 20 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not so")
        return original(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    with (tmp_path / "file").open("rb") as file:
        buffer, checksum = read_whole(file.fileno(), len(content), alone=True)
    assert buffer == content
    assert checksum == digest(content)


@pytest.mark.parametrize("small_pages", [-1.0, 1e9], ids=["large pages are slow to get", "they are at hand"])
def test_large_file_with_any_pages(small_pages: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file is whole in pages of any size."""
    monkeypatch.setattr(large_pages, "_SMALL_PAGES", small_pages)
    content = os.urandom(1 << 20) * 33 + b"end"
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        buffer, checksum = read_whole(file.fileno(), len(content))
    assert buffer == content
    assert checksum == digest(content)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("size", [0, 1, 5000, (17 << 20) + 13])
def test_memory_in_many_pieces_filled(size: int, alone: bool, tmp_path: Path) -> None:
    """`read_into` fills pieces of any sizes, more of them than one system call takes, in and outside of the page cache."""
    content = os.urandom(min(size, 1 << 20)) * max(1, size >> 20) + os.urandom(size % (1 << 20) if size > 1 << 20 else 0)
    (tmp_path / "file").write_bytes(content)
    cuts = sorted({0, *range(0, min(len(content), 4000), 3), len(content) // 3, len(content)})
    parts = [memoryview(bytearray(end - start)) for start, end in zip(cuts, cuts[1:], strict=False)]
    with (tmp_path / "file").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_into(file.fileno(), parts, alone=alone) == digest(content)
    assert b"".join(parts) == content


def test_release_memory(tmp_path: Path) -> None:
    """`release_memory` empties the whole pages of a part, and no other byte."""
    content = os.urandom(5 * mmap.PAGESIZE)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        buffer, _ = read_whole(file.fileno(), len(content))
    start, end = mmap.PAGESIZE // 2, 4 * mmap.PAGESIZE + 7
    release_memory(buffer[start:end])
    assert bytes(buffer[: mmap.PAGESIZE]) == content[: mmap.PAGESIZE]
    assert bytes(buffer[4 * mmap.PAGESIZE :]) == content[4 * mmap.PAGESIZE :]
    assert not any(buffer[mmap.PAGESIZE : 4 * mmap.PAGESIZE])
    for other in (memoryview(bytearray(b"kept")), memoryview(b"kept")):
        release_memory(other)
        assert bytes(other) == b"kept"
