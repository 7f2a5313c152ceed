"""Small checkpoints for tests of how they get to disk: a few files, a manifest, and a reader that believes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.checkpoint.commit import LocalStage, LocalTarget, find_recoverable
from slipstream.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from slipstream.errors import CheckpointError
from slipstream.files.checksum import digest
from slipstream.files.disk import Disk, FileEntry

FILES = {"model.safetensors": 5000, "training.json": 300, "unet/config.json": 20}


def content(name: str, step: int, size: int) -> bytes:
    """Bytes that differ between files and, but for what is frozen, between steps everywhere."""
    seed = f"{name}@{0 if name.startswith('frozen') else step};".encode()
    return (seed * (size // len(seed) + 1))[:size]


def manifest_for(step: int, files: Mapping[str, FileEntry], metric: float | None = None) -> bytes:
    return Manifest(f"{step}-{step:016x}", step, "2026-01-01T00:00:00Z", "a test", 1, "single", files=files, metric=metric).dump()


def fill(stage: LocalStage, step: int, sizes: Mapping[str, int] = FILES) -> dict[str, FileEntry]:
    return {name: stage.add(name, [content(name, step, size)], size) for name, size in sizes.items()}


def save(path: str | Path, step: int, disk: Disk | None = None, sizes: Mapping[str, int] = FILES, metric: float | None = None) -> None:
    """One save as the library makes it, but smaller."""
    with LocalTarget(path, disk).begin() as stage:
        stage.commit(manifest_for(step, fill(stage, step, sizes), metric))


def step_of(path: Path) -> int:
    """The step of the checkpoint of this name, after every file in it was compared with its manifest and with what was saved."""
    folder = find_recoverable(path) or path
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    except OSError as error:
        raise CheckpointError(f"no checkpoint at {path}: {error}") from error
    for name, entry in manifest.files.items():
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"torn: {error}") from error
        if (len(data), digest(data)) != (entry.size, entry.checksum) or data != content(name, manifest.step, entry.size):
            raise CheckpointError(f"torn: {folder / name} is not what its manifest says")
    return manifest.step


def tree(path: Path) -> list[str]:
    """All files and folders below a path."""
    return sorted(os.path.relpath(os.path.join(top, name), path) for top, folders, files in os.walk(path) for name in [*folders, *files])
