"""Damage at random to the files of a checkpoint: what disks, copies and people do to them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from slipstream.checkpoint.manifest import MANIFEST

Mutation = Callable[[random.Random, Path, Path], str]
"""Damages a folder, given another checkpoint; the name of the file that an error has to name."""


def _some_file(chance: random.Random, folder: Path) -> Path:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return chance.choices(files, [path.stat().st_size + 50 for path in files])[0]


def _bytes_changed(change: Callable[[random.Random, bytearray], object]) -> Mutation:
    def mutate(chance: random.Random, folder: Path, other: Path) -> str:
        path = _some_file(chance, folder)
        before = path.read_bytes()
        data = bytearray(before)
        while data == before:
            change(chance, data)
        path.write_bytes(data)
        return path.name

    return mutate


def _swap_blocks(chance: random.Random, data: bytearray) -> None:
    size = chance.randint(1, max(1, len(data) // 4))
    entry, two = (chance.randrange(0, len(data) - size + 1) for _ in range(2))
    held = bytes(data[entry : entry + size])
    data[entry : entry + size] = data[two : two + size]
    data[two : two + size] = held
    if len(set(data)) < 2:
        data.append(0)


def _zero_page(chance: random.Random, data: bytearray) -> None:
    start = chance.randrange(len(data))
    size = min(chance.choice([16, 512, 4096]), len(data) - start)
    data[start : start + size] = bytes(size) if any(data[start : start + size]) else b"\xff" * size


def _flip(chance: random.Random, data: bytearray) -> None:
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _cut(chance: random.Random, data: bytearray) -> None:
    del data[chance.randrange(len(data)) :]


def _append(chance: random.Random, data: bytearray) -> None:
    data.extend(chance.randbytes(chance.randint(1, 100)))


def _drop(chance: random.Random, folder: Path, other: Path) -> str:
    path = _some_file(chance, folder)
    while path.name.startswith("rank_1."):  # came later, and need not be there
        path = _some_file(chance, folder)
    path.unlink()
    return path.name


def _stale(chance: random.Random, folder: Path, other: Path) -> str:
    """A file of another step in place of the one of that name."""
    while True:
        path = _some_file(chance, folder)
        old = other / path.relative_to(folder)
        if old.exists() and old.read_bytes() != path.read_bytes():
            shutil.copy(old, path)
            return path.name if path.name != MANIFEST else ""


MUTATIONS: tuple[Mutation, ...] = (*map(_bytes_changed, (_flip, _zero_page, _swap_blocks, _cut, _append)), _drop, _stale)
