"""Parts of files that are verified by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import CheckpointError
from slipstream.files.checksum import BLOCK_SIZE, SUM_SIZE, BlockChecksums, VerifiedBlockFile, digest

SIZE = 3 * BLOCK_SIZE + 17
CONTENT = os.urandom(SIZE)


def sums_of(data: bytes, *cuts: int) -> bytes:
    sums = BlockChecksums()
    edges = [0, *sorted(cuts), len(data)]
    for _ in sums.passing(data[first:end] for first, end in zip(edges, edges[1:], strict=False)):
        pass
    return sums.taken()


@contextmanager
def opened(path: Path, sums: bytes, size: int = SIZE) -> Iterator[VerifiedBlockFile]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield VerifiedBlockFile(fd, size, sums, str(path))
    finally:
        os.close(fd)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, SIZE), max_size=4))
def test_sums_independent_of_chunks(cuts: list[int]) -> None:
    """The sums do not depend on how the bytes came."""
    blocks = [CONTENT[start : start + BLOCK_SIZE] for start in range(0, SIZE, BLOCK_SIZE)]
    assert sums_of(CONTENT, *cuts) == bytes.fromhex("".join(map(digest, blocks)))


def test_needed_blocks_read_once(tmp_path: Path) -> None:
    """Only the blocks that are needed are read and each once."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with opened(path, sums_of(CONTENT)) as file:
        assert bytes(file.view(BLOCK_SIZE + 5, BLOCK_SIZE + 9)) == CONTENT[BLOCK_SIZE + 5 : BLOCK_SIZE + 9]
        assert file.fetched == BLOCK_SIZE
        assert bytes(file.view(BLOCK_SIZE - 1, 2 * BLOCK_SIZE)) == CONTENT[BLOCK_SIZE - 1 : 2 * BLOCK_SIZE]
        assert file.fetched == 2 * BLOCK_SIZE
        assert bytes(file.view(0, SIZE)) == CONTENT
        assert file.fetched == SIZE
        view = file.view(0, 9)
        file.release()
        assert bytes(view) == CONTENT[:9]
        assert bytes(file.view(7, 9)) == CONTENT[7:9]
        assert file.fetched == SIZE + BLOCK_SIZE


def test_damage_found_in_block_where(tmp_path: Path) -> None:
    """Damage is found in the block where it is."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT[: 2 * BLOCK_SIZE] + bytes([CONTENT[2 * BLOCK_SIZE] ^ 1]) + CONTENT[2 * BLOCK_SIZE + 1 :])
    with opened(path, sums_of(CONTENT)) as file:
        file.view(0, 2 * BLOCK_SIZE)
        file.view(3 * BLOCK_SIZE, SIZE)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"{path} is damaged: its bytes from {2 * BLOCK_SIZE:,} on"):
                file.view(2 * BLOCK_SIZE + 9, 2 * BLOCK_SIZE + 10)


def test_wrong_size_refused_early(tmp_path: Path) -> None:
    """A file of another size is refused before memory is taken for it."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    sums = sums_of(CONTENT)
    for size in (SIZE - 1, SIZE + 1, 2**60):
        with pytest.raises(CheckpointError, match="it should have"), opened(path, sums, size):
            pass
    for wrong in (sums[:-1], sums[:-SUM_SIZE], sums + bytes(SUM_SIZE), b""):
        with pytest.raises(CheckpointError, match="sums"), opened(path, wrong):
            pass
    with opened(path, sums) as file, pytest.raises(CheckpointError, match="were requested"):
        file.view(5, SIZE + 1)


def test_file_shrinks_while_read_error(tmp_path: Path) -> None:
    """A file that shrinks while it is read is an error."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with opened(path, sums_of(CONTENT)) as file:
        os.truncate(path, BLOCK_SIZE)
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            file.view(0, SIZE)
