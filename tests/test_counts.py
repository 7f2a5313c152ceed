"""What everyday calls cost, in counts that do not depend on the machine: none may grow unnoticed.

`counting.py` says what is counted and how; `python tests/counting.py` records it anew, after a change that is meant to change it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import counting

RECORD = json.loads(counting.RECORD.read_text())
AGAIN = "run `python tests/counting.py` if this is meant, and read the difference"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", counting.CASES)
def test_counts(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    """Collectives, bytes, modules, calls and tensors of a call are those of the record."""
    found = ranks(size).run(counting.count_case, counting.CASES[name], counting.PLAIN.get(name), tmp_path)[0]
    recorded = {what: count for what, count in RECORD[counting.title(name, size)].items() if what in found}
    assert counting.growth(name, recorded, found) == [], AGAIN


@cache
def system_calls(size: int) -> dict[str, counting.Counts]:
    return counting.count_system_calls(size)


@pytest.mark.launched
@pytest.mark.skipif(not counting.has_strace(), reason="system calls are counted by strace, which is not here or may not trace")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", counting.CASES)
def test_system_calls(name: str, size: int) -> None:
    """System calls of a call are at most those of the record; those of a save that change the disk are exactly those."""
    found = system_calls(size)[name]
    traced = (*counting.SAVES, counting.WAITS, "system calls")
    recorded = {what: count for what, count in RECORD[counting.title(name, size)].items() if what in traced}
    assert counting.growth(name, recorded, found) == [], AGAIN


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"guarded calls": 1, "bytes": 1005, "system calls": 5}, []),
        ({"guarded calls": 1, "bytes": 500, "system calls": 0}, []),
        ({"guarded calls": 2, "bytes": 1000, "system calls": 4}, ["a call: guarded calls grew from 1 to 2"]),
        ({"guarded calls": 0, "bytes": 1000, "system calls": 4}, ["a call: guarded calls shrank from 1 to 0"]),
        ({"guarded calls": 1, "bytes": 1020, "system calls": 4}, ["a call: bytes grew from 1000 to 1020"]),
        ({"guarded calls": 1, "bytes": 1000, "system calls": 9}, ["a call: system calls grew from 4 to 9"]),
        ({"guarded calls": 1, "bytes": 1000, "system calls": 4, "fsync": 1}, ["a call: fsync grew from 0 to 1"]),
    ],
)
def test_growth_is_named(now: counting.Counts, says: list[str]) -> None:
    """What grew is named with both counts; bytes and system calls may vary a little, and be less."""
    assert counting.growth("a call", {"guarded calls": 1, "bytes": 1000, "system calls": 4}, now) == says
