"""Where a checkpoint goes: a folder of this machine, or a URL. Both know the same verbs, so nobody else has to ask which it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from slipstream.checkpoint import remote
from slipstream.checkpoint.commit import LocalTarget, write_latest
from slipstream.checkpoint.rotate import Keep, numbered, rotate
from slipstream.checkpoint.save import Earlier, Stage, add_rank_file, collect_rank_files, earlier
from slipstream.checkpoint.snapshot import Snapshot
from slipstream.files.disk import Disk
from slipstream.files.trouble import told
from slipstream.logging import get_logger

__all__ = ["Place", "inside", "numbers", "place_at"]


class Place(Protocol):
    """A checkpoint that is to be written."""

    def begin(self) -> Stage:
        """Begins to put it together."""

    def join(self, ticket: str) -> Stage:
        """What another process has begun to put together, for adding files to it."""

    def add_rank_file(self, snapshot: Snapshot) -> None:
        """Adds what belongs to a rank that does not write it."""

    def collect(self, stamp: str) -> None:
        """Takes in what other ranks have added so far."""

    def mark_latest(self) -> None:
        """Makes it the one that `latest` names."""

    def rotate(self, keep: Keep) -> None:
        """Removes checkpoints beside it that are no longer kept."""

    def earlier(self, last: str | None) -> list[Earlier]:
        """Checkpoints whose unchanged files can be used again, the likeliest first."""


class _Local:
    def __init__(self, path: str, disk: Disk) -> None:
        self._target = LocalTarget(path, disk)
        self._path = self._target.path
        self._disk = disk

    def begin(self) -> Stage:
        return self._target.begin()

    def join(self, ticket: str) -> Stage:
        return self._target.join(ticket)

    def add_rank_file(self, snapshot: Snapshot) -> None:
        add_rank_file(self._path, snapshot, self._disk)

    def collect(self, stamp: str) -> None:
        try:
            collect_rank_files(self._path, stamp, self._disk)
        except OSError as error:
            get_logger(__name__).warning(
                f"{self._path} is saved. Files of other ranks beside it could not be moved into it ({told(error)}): they count where they "
                "are, so take the hidden ones along if you move the folder."
            )

    def mark_latest(self) -> None:
        write_latest(self._path.parent, self._path.name, self._disk)

    def rotate(self, keep: Keep) -> None:
        rotate(self._path.parent, keep, self._disk, newest=self._path)

    def earlier(self, last: str | None) -> list[Earlier]:
        newest = [folder for _, folder in numbered(self._path.parent)][-1:]
        folders = dict.fromkeys([self._path, *([] if last is None else [Path(last).absolute()]), *newest])
        return [found for folder in folders if (found := earlier(folder)) is not None]


class _Remote:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._folder, _, self._name = self._url.rpartition("/")

    def begin(self) -> Stage:
        return remote.RemoteTarget(self._url).begin()

    def join(self, ticket: str) -> Stage:
        return remote.RemoteTarget(self._url).join(ticket)

    def add_rank_file(self, snapshot: Snapshot) -> None:
        remote.add_rank_file(self._url, snapshot)

    def collect(self, stamp: str) -> None:
        """Nothing to do: ranks put their files where they belong, and a put is whole or not there."""

    def mark_latest(self) -> None:
        remote.write_latest(self._folder, self._name)

    def rotate(self, keep: Keep) -> None:
        remote.rotate(self._folder, keep, newest=self._url)

    def earlier(self, last: str | None) -> list[Earlier]:
        return []


def place_at(target: str, disk: Disk) -> Place:
    """The place that a path or URL names.

    >>> type(place_at("runs/first", Disk())).__name__, type(place_at("memory://first", Disk())).__name__
    ('_Local', '_Remote')
    """
    return _Remote(target) if remote.is_url(target) else _Local(remote.local_path(target), disk)


def inside(folder: str, name: str) -> str:
    """The path or URL of something in a folder.

    >>> inside("s3://bucket/runs/", "checkpoint_1")
    's3://bucket/runs/checkpoint_1'
    """
    return f"{folder.rstrip('/')}/{name}" if remote.is_url(folder) else os.path.join(folder, name)


def numbers(folder: str) -> list[int]:
    """The numbers of the checkpoints in a folder, ascending."""
    if remote.is_url(folder):
        return [number for number, _ in remote.list_numbered(folder)]
    return [number for number, _ in numbered(Path(remote.local_path(folder)))]
