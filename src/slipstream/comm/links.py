"""The connections of torch's own process group, and how to end them from outside.

A collective of gloo that waits for a rank which will not come cannot be taken back: neither destroying the group nor aborting it wakes
the thread that waits (torch 2.13), and a model that holds the group keeps its sockets open. Shutting the sockets down does: the wait
fails at once, here and on the ranks at the other end. So the connections that appear while the group opens are remembered, by
number and inode; a number that has come to mean another file since is left alone. Listening sockets are not touched: gloo would end
the process.

Where more connections appeared than the group has, because another thread opened one too, the ranks tell each other their ends, and only
one that has both ends in the job is the group's. Groups that the program opened itself are left alone.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["Links"]

_FILES = "/dev/fd"


class _Link(NamedTuple):
    file: int
    inode: int
    ends: tuple[str, str]
    """This side and the other, as text."""


class Links:
    """The connections of one generation's default group; `sever` ends them."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._links: list[_Link] = []
        self._abort: Callable[[], None] = _nothing

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What torch connects inside of the block is ours to end."""
        before = {link.inode for link in _connected()}
        yield
        found = [link for link in _connected() if link.inode not in before]
        self._store.set(f"links/{self._rank}", json.dumps([link.ends for link in found]))
        self._links = found if len(found) < self._world_size else self._confirmed(found)

    def also(self, abort: Callable[[], None]) -> None:
        """What ends the operations of backends that know how to end them: gloo does not."""
        self._abort = abort

    def sever(self) -> bool:
        """Ends the connections, so that whoever waits on them fails, here and there; whether they are known."""
        for link in self._links:
            with suppress(OSError), _socket(link.file) as connection:  # closed already, or ended by the other side
                if os.fstat(connection.fileno()).st_ino == link.inode:
                    connection.shutdown(socket.SHUT_RDWR)
        self._abort()
        return len(self._links) == self._world_size - 1

    def _confirmed(self, found: list[_Link]) -> list[_Link]:
        keys = [f"links/{rank}" for rank in range(self._world_size) if rank != self._rank]
        try:
            self._store.wait(keys, timedelta(seconds=10))
        except RuntimeError:  # a rank that had just opened the group has ended: there is no telling, and nothing is touched
            return []
        others = {(there, here) for data in self._store.multi_get(keys) for here, there in json.loads(data.decode())}
        return [link for link in found if link.ends in others]


def _nothing() -> None:
    return None


def _connected() -> list[_Link]:
    """The TCP connections of this process."""
    return [link for link in map(_link, _open_files()) if link is not None]


def _open_files() -> list[int]:
    with suppress(FileNotFoundError):  # a system that does not list them
        return [int(name) for name in os.listdir(_FILES)]
    return []


def _socket(file: int) -> socket.socket:
    """A second handle on an open socket; OSError if it is none."""
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(errno.ENOTSOCK, f"open file {file} is no socket")
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # another file has taken the number in the meantime
        os.close(copy)
        raise


def _link(file: int) -> _Link | None:
    try:
        with _socket(file) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            ends = tuple(f"{host} {port}" for host, port in (connection.getsockname()[:2], connection.getpeername()[:2]))
            return _Link(file, os.fstat(connection.fileno()).st_ino, (ends[0], ends[1]))
    except OSError:  # no socket, not connected, or closed in the meantime
        return None
