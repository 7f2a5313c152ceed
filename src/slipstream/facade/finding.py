"""Which checkpoint `load_state` means: a folder, a URL, the newest of numbered ones, or one that a relative wrote."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.checkpoint import remote
from slipstream.checkpoint.format import MANIFEST
from slipstream.checkpoint.load import Checkpoint, newest, open_checkpoint
from slipstream.checkpoint.migrate import is_foreign, read_foreign
from slipstream.checkpoint.rotate import numbered
from slipstream.checkpoint.saved import Saved, saved_of, saved_of_foreign
from slipstream.checkpoint.store import redacted
from slipstream.errors import CheckpointError, ConfigError
from slipstream.facade.saving import Saver
from slipstream.logging import get_logger

__all__ = ["find", "is_one_of_several"]


def is_one_of_several(saver: Saver, input_dir: Any, folder: str) -> bool:
    """Whether a checkpoint was taken because it is the newest, so that another can take its place."""
    searched = saver.folder if input_dir is None else os.fspath(input_dir)
    if searched is None or remote.is_url(searched):
        return False
    return Path(remote.local_path(searched)).expanduser().absolute() == Path(folder).absolute().parent


def find(saver: Saver, input_dir: Any, allow_pickle: bool, passed: Mapping[str, str]) -> Saved:
    """The checkpoint, read and verified; `passed` are folders that cannot be used, and why."""
    alone = saver.parts.state.num_processes == 1
    if input_dir is None or input_dir == "":
        if input_dir == "" or saver.folder is None:
            raise ConfigError(
                "load_state() was called without a folder: write load_state('checkpoints/first'), or let checkpoints be numbered by "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), and the newest is taken"
            )
        return _newest(saver.folder, alone, passed, allow_pickle)
    if not isinstance(input_dir, (str, os.PathLike)):
        raise ConfigError(f"load_state({input_dir!r}): a {type(input_dir).__name__} is no folder; write its path")
    where = os.fspath(input_dir)
    if remote.is_url(where):
        return _newest(where, alone, passed, allow_pickle) if remote.list_numbered(where) else _remote(where)
    folder = Path(remote.local_path(where)).expanduser()
    if folder.is_dir() and not (folder / MANIFEST).exists():
        if is_foreign(folder):
            return saved_of_foreign(read_foreign(folder, allow_pickle=allow_pickle), folder)
        if numbered(folder):
            return _newest(str(folder), alone, passed, allow_pickle)
    return saved_of(open_checkpoint(folder, alone=alone), str(folder))


class _Numbered:
    """The numbered checkpoints of a folder, newest first, as they are when somebody asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Path]:
        return (path for _, path in reversed(numbered(self._folder)))


def _newest(folder: str, alone: bool, passed: Mapping[str, str], allow_pickle: bool) -> Saved:
    """The newest numbered checkpoint that is whole; which were passed over, and why, is said.

    If the highest number is that of a relative's checkpoint, it is the one: its run goes on here. Behind one of ours none is looked at.
    """
    if remote.is_url(folder):
        return _newest_remote(folder)
    found_here = numbered(Path(folder))
    if found_here and is_foreign(last := found_here[-1][1]):
        return saved_of_foreign(read_foreign(last, allow_pickle=allow_pickle), last)
    found = newest(_Numbered(Path(folder)), folder, alone=alone, known={Path(one): why for one, why in passed.items()})
    _tell_passed_over({path.name: why for path, why in found.passed_over.items()}, found.checkpoint.folder.name)
    return saved_of(found.checkpoint, str(found.checkpoint.folder))


def _newest_remote(url: str) -> Saved:
    passed: dict[str, str] = {}
    for number, one in reversed(remote.list_numbered(url)):
        holder, name = _Copy(), f"checkpoint_{number}"
        try:
            checkpoint = open_checkpoint(remote.fetch(one, holder.folder / name))
        except CheckpointError as error:
            passed[name] = str(error)
            continue
        _tell_passed_over(passed, name)
        return _held(checkpoint, one, holder)
    if not passed:
        raise CheckpointError(f"there is no checkpoint in {redacted(url)} yet: save_state() makes the first one")
    reasons = "\n".join(f"  {name}: {why}" for name, why in passed.items())
    raise CheckpointError(f"none of the {len(passed)} checkpoints in {redacted(url)} is whole:\n{reasons}")


def _remote(url: str) -> Saved:
    holder = _Copy()
    return _held(open_checkpoint(remote.fetch(url, holder.folder / "checkpoint")), url, holder)


class _Copy:
    """A folder for what was fetched, which goes with the last one that knows of it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def _held(checkpoint: Checkpoint, where: str, holder: _Copy) -> Saved:
    """A checkpoint whose folder is a copy, which goes when it is no longer needed. Messages name it without what is secret in a URL."""
    return replace(saved_of(checkpoint, redacted(where)), holder=holder)


def _tell_passed_over(passed: dict[str, str], taken: str) -> None:
    for name, why in passed.items():
        get_logger(__name__).warning(f"{name} was passed over for {taken}, which is older: {why}")
