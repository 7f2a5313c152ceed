"""Fresh memory in large pages: what the system is told about which memory, and when it is taken back."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from slipstream.distributed.codec import byte_view
from slipstream.files import large_pages
from slipstream.files.large_pages import LargePages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes advice about large pages")

MEGABYTE = 1 << 20


class Advice:
    """Records what the system is told, and how much time it says that a thread has used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: bool = False) -> None:
        self.told: list[tuple[int, int, int]] = []
        self.seconds = 0.0
        self._refused = refused
        monkeypatch.setattr(large_pages, "_madvise", self._madvise)
        monkeypatch.setattr(large_pages.time, "thread_time", lambda: self.seconds)

    def _madvise(self, start: int, size: int, advice: int) -> bool:
        self.told.append((start, size, advice))
        return not self._refused

    @property
    def kinds(self) -> list[int]:
        return [advice for _, _, advice in self.told]


def write(pages: LargePages, advice: Advice, seconds: float, count: int = 4 * MEGABYTE) -> None:
    with pages.watched(count):
        advice.seconds += seconds


def test_neighbours_are_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call covers tensors that lie beside each other, so that a large page may hold the end of one and the beginning of the next."""
    advice = Advice(monkeypatch)
    mapped = memoryview(mmap.mmap(-1, 8 * MEGABYTE))
    start = large_pages.address_of(mapped)
    LargePages([mapped[4 * MEGABYTE + 64 : 5 * MEGABYTE + 7], mapped[6 * MEGABYTE :], mapped[100 : 4 * MEGABYTE]])
    page = mmap.PAGESIZE
    assert [(first - start, size) for first, size, _ in advice.told] == [(page, 5 * MEGABYTE - page), (6 * MEGABYTE, 2 * MEGABYTE)]
    assert set(advice.kinds) == {mmap.MADV_HUGEPAGE}


def test_empty_and_constant_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = Advice(monkeypatch)
    LargePages([memoryview(b""), memoryview(bytes(3 * mmap.PAGESIZE)), memoryview(bytearray())])
    assert advice.told == []


def test_taken_back_when_slower_than_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few slow pages are accepted; once they have cost more than small pages would have, the rest gets small ones, once."""
    advice = Advice(monkeypatch)
    pages = LargePages([memoryview(mmap.mmap(-1, 8 * MEGABYTE))])
    for _ in range(10):
        write(pages, advice, 0.005)
    assert advice.kinds == [mmap.MADV_HUGEPAGE]
    for _ in range(40):
        write(pages, advice, 0.005)
    assert advice.kinds == [mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE]


def test_kept_while_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow page in ten does not outweigh the fast ones."""
    advice = Advice(monkeypatch)
    pages = LargePages([memoryview(mmap.mmap(-1, 8 * MEGABYTE))])
    for number in range(300):
        write(pages, advice, 0.01 if number % 10 == 0 else 0.0003)
    assert advice.kinds == [mmap.MADV_HUGEPAGE]


def test_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses, nothing is taken back either."""
    advice = Advice(monkeypatch, refused=True)
    pages = LargePages([memoryview(mmap.mmap(-1, 8 * MEGABYTE))])
    for _ in range(100):
        write(pages, advice, 0.1)
    assert advice.kinds == [mmap.MADV_HUGEPAGE]


def test_memory_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of tensors counts, without the part of a page at either end that others may use."""
    advice = Advice(monkeypatch)
    tensor = torch.empty(3 * MEGABYTE + 5, dtype=torch.uint8)
    LargePages([byte_view(tensor)])
    ((start, size, _),) = advice.told
    assert tensor.data_ptr() <= start < tensor.data_ptr() + mmap.PAGESIZE
    assert tensor.data_ptr() + tensor.nbytes - mmap.PAGESIZE < start + size <= tensor.data_ptr() + tensor.nbytes
