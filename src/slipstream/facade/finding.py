"""Which checkpoint `load_state` means: a folder, a URL, the newest of numbered ones, or one that a relative wrote."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.checkpoint import remote
from slipstream.checkpoint.format import MANIFEST
from slipstream.checkpoint.load import Checkpoint, newest, open_checkpoint
from slipstream.checkpoint.migrate import is_foreign, read_foreign
from slipstream.checkpoint.places import inside
from slipstream.checkpoint.rotate import numbered
from slipstream.checkpoint.saved import Saved, saved_of, saved_of_foreign
from slipstream.errors import ConfigError
from slipstream.facade.saving import Saver
from slipstream.logging import get_logger

__all__ = ["find"]


def find(saver: Saver, input_dir: Any, allow_pickle: bool) -> Saved:
    """The checkpoint, read and verified."""
    if input_dir is None:
        if saver.folder is None:
            raise ConfigError(
                "load_state() was called without a folder: write load_state('checkpoints/first'), or let checkpoints be numbered by "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), and the newest is taken"
            )
        return _newest(saver.folder)
    if not isinstance(input_dir, (str, os.PathLike)) or not os.fspath(input_dir):
        raise ConfigError(f"load_state({input_dir!r}): a {type(input_dir).__name__} is no folder; write its path")
    where = os.fspath(input_dir)
    if remote.is_url(where):
        return _newest(where) if remote.list_numbered(where) else _remote(where)
    folder = Path(remote.local_path(where)).expanduser()
    if folder.is_dir() and not (folder / MANIFEST).exists():
        if is_foreign(folder):
            return saved_of_foreign(read_foreign(folder, allow_pickle=allow_pickle), folder)
        if numbered(folder):
            return _newest(str(folder))
    return saved_of(open_checkpoint(folder), str(folder))


def _newest(folder: str) -> Saved:
    """The newest numbered checkpoint that is whole; which were passed over, and why, is said."""
    if remote.is_url(folder):
        return _newest_remote(folder)
    found = newest((path for _, path in reversed(numbered(Path(folder)))), folder)
    _tell_passed_over({path.name: why for path, why in found.passed_over.items()}, found.checkpoint.folder.name)
    return saved_of(found.checkpoint, str(found.checkpoint.folder))


def _newest_remote(url: str) -> Saved:
    names = [name for _, name in reversed(remote.list_numbered(url))]
    holders: dict[Path, tempfile.TemporaryDirectory[str]] = {}

    def fetched() -> Iterator[Path]:
        for name in names:
            holder = tempfile.TemporaryDirectory(prefix="slipstream-")
            folder = Path(holder.name) / name
            holders[folder] = holder
            yield remote.fetch(inside(url, name), folder)

    found = newest(fetched(), url)
    _tell_passed_over({path.name: why for path, why in found.passed_over.items()}, found.checkpoint.folder.name)
    return _held(found.checkpoint, inside(url, found.checkpoint.folder.name), holders[found.checkpoint.folder])


def _remote(url: str) -> Saved:
    holder = tempfile.TemporaryDirectory(prefix="slipstream-")
    return _held(open_checkpoint(remote.fetch(url, Path(holder.name) / "checkpoint")), url, holder)


def _held(checkpoint: Checkpoint, where: str, holder: Any) -> Saved:
    """A checkpoint whose folder is a copy, which goes when it is no longer needed."""
    return replace(saved_of(checkpoint, where), holder=holder)


def _tell_passed_over(passed: dict[str, str], taken: str) -> None:
    for name, why in passed.items():
        get_logger(__name__).warning(f"{name} was passed over for {taken}, which is older: {why}")
