"""A store behind URLs `shared://...` that several processes see (its objects are files), and that counts the bytes read from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

ROOT = Path("/")
READ = [0]


class SharedStore(LocalFileSystem):
    """Files below `ROOT`."""

    protocol = "shared"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path)
        if path.startswith("shared://"):
            path = f"{ROOT}/{path.removeprefix('shared://')}"
        return str(LocalFileSystem._strip_protocol(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        before = READ[0]
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        READ[0] = before + len(data)  # and not the whole file, which it opens
        return data

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" in mode:
            READ[0] += self.info(path)["size"]
        else:
            Path(self._strip_protocol(path)).parent.mkdir(parents=True, exist_ok=True)
        return super()._open(path, mode=mode, **kwargs)


def register(root: Path) -> None:
    """Let `shared://name` mean a file in a folder, in this process."""
    global ROOT
    ROOT = root
    fsspec.register_implementation("shared", SharedStore, clobber=True)


def count_bytes(call: Callable[[], Any]) -> int:
    """How many bytes a call reads from the store."""
    before = READ[0]
    call()
    return READ[0] - before
