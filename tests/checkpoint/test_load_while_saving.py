"""A reader that looks while a run is saving finds a whole checkpoint, whatever is exchanged or rotated away under its hands."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import small

from slipstream.checkpoint.locate import open_checkpoint, open_newest
from slipstream.checkpoint.rotate import RetentionPolicy, numbered_checkpoints, rotate
from slipstream.files.disk import Disk

SIZES = {f"{name}.bin": 30_000 for name in "abcdefgh"}


class Quick(Disk):
    """Does not wait for the disk, so that more happens at once."""

    def _fsync(self, fd: int) -> None:
        pass


@contextmanager
def saving(save: Callable[[int], None]) -> Iterator[None]:
    """Saves again and again, in a thread."""
    save(0)
    over = threading.Event()

    def work() -> None:
        for step in itertools.count(1):
            if over.is_set():
                return
            save(step)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_folder(tmp_path: Path) -> None:
    """One folder."""
    steps = []
    with saving(lambda step: small.save(tmp_path / "one", step, Quick(), SIZES)):
        while len(set(steps)) < 30:
            steps.append(open_checkpoint(tmp_path / "one").manifest.step)
    assert steps == sorted(steps)


def test_numbered_of_stays(tmp_path: Path) -> None:
    """Numbered ones of which one stays."""
    def save(step: int) -> None:
        path = tmp_path / f"checkpoint_{step}"
        small.save(path, step, Quick(), SIZES)
        rotate(tmp_path, RetentionPolicy(1), Quick(), path)

    class Listed:
        def __iter__(self) -> Iterator[Path]:
            return (path for _, path in reversed(numbered_checkpoints(tmp_path)))

    steps = []
    with saving(save):
        while len(set(steps)) < 30:
            found = open_newest(Listed(), "here")
            assert not found.passed_over
            steps.append(found.checkpoint.manifest.step)
    assert steps == sorted(steps)
