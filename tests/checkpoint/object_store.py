"""An object store in memory that fails where it is told to, for tests of uploads.

It is like the real ones in what hurts: no rename and no folders, an object is there when its upload ends and not before, listings come in
any order and late. `World` holds the objects and counts every call that changes or reads something, so that a test can break each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Refused(Exception):
    """What a client library raises; it is no OSError, and its text has the address in it as it was given."""


class Killed(BaseException):
    """The process dies: nothing after this call is carried out."""


class World:
    """The objects behind `objects://`, and what goes wrong with them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.fail_at: int | None = None
        self.how = "before"
        self.late = 0
        self.largest_upload = 0
        self._unlisted: dict[str, int] = {}
        self._clock = 0
        self._dead = False
        self._random = random.Random(0)

    def call(self, kind: str, path: str, action: Any, torn: Any = None) -> Any:
        """Carries out one call, or what the fault leaves of it."""
        if self._dead:
            raise Killed
        self._clock += 1
        self.calls.append((kind, path))
        if self.fail_at != len(self.calls) - 1:
            return action()
        if self.how == "killed":
            self._dead = True
            raise Killed
        if self.how == "after":
            action()
        if self.how == "torn" and torn is not None:
            torn()
        raise Refused(f"503 Slow Down: objects://user:secret@host/{path}?signature=secret")

    def put(self, path: str, data: bytes) -> None:
        if path not in self.objects:
            self._unlisted[path] = self._clock + self.late
        self.objects[path] = data

    def listed(self) -> list[str]:
        paths = [path for path in self.objects if self._unlisted.get(path, 0) <= self._clock]
        self._random.shuffle(paths)
        return paths

    def revive(self) -> None:
        """From now on nothing fails; listings are complete."""
        self._dead, self.fail_at, self.late = False, None, 0
        self._unlisted.clear()


class ObjectStore(AbstractFileSystem):
    """The face of it that fsspec wants."""

    protocol = "objects"
    cachable = False
    world: World

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.partition("://")[2].partition("@")[2] or path.partition("://")[2] if "://" in path else path.strip("/")

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        assert not create_parents, "that would make a bucket"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return self.world.call("info", path, lambda: self._info(path))

    def _info(self, path: str) -> dict[str, Any]:
        if path in self.world.objects:
            return {"name": path, "size": len(self.world.objects[path]), "type": "file"}
        if any(thing.startswith(f"{path}/") for thing in self.world.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        return self.world.call("ls", path, lambda: self._ls(path, detail))

    def _ls(self, path: str, detail: bool) -> list[Any]:
        below = [entry for entry in self.world.listed() if entry.startswith(f"{path}/")]
        names = dict.fromkeys(f"{path}/{entry[len(path) + 1 :].split('/')[0]}" for entry in below)
        if not names:
            raise FileNotFoundError(path)
        return [self._info(name) for name in names] if detail else list(names)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        return self.world.call("get", path, lambda: self.world.objects[path][start:end])

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.world.call("put", path, lambda: self.world.put(path, value), lambda: self.world.put(path, value[: len(value) // 2]))

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        for thing in [thing for thing in list(self.world.objects) if thing == path or (recursive and thing.startswith(f"{path}/"))]:
            self.world.call("rm", thing, lambda entry=thing: self.world.objects.pop(entry, None))

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        size = len(self.world.objects[path]) if "r" in mode else None
        return _Upload(self, path, mode, block_size=block_size or 5 << 20, cache_type="none", size=size)


class _Upload(AbstractBufferedFile):
    """Parts are collected, and become an object with the last one."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        part = self.buffer.getvalue()
        world: World = self.fs.world
        world.largest_upload = max(world.largest_upload, len(part))
        world.call("part", self.path, lambda: self.parts.append(part))
        if final:
            world.call("put", self.path, lambda: world.put(self.path, b"".join(self.parts)))
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.world.call("get", self.path, lambda: self.fs.world.objects[self.path][start:end])

    def discard(self) -> None:
        self.parts = []


@contextmanager
def object_store() -> Iterator[World]:
    """A world behind `objects://` for the length of the block."""
    world = World()
    ObjectStore.world = world
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    try:
        yield world
    finally:
        _registry.pop("objects")
