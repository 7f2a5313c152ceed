"""Objects below a URL: put, read, list and remove them through fsspec; and URLs in general.

Bytes are streamed in pieces of a few megabytes, never a whole file. Every error is a `CheckpointError` that names the URL, and user
names, passwords and signatures in a URL appear in no message (`redact`). A `put` that fails leaves no partial object where the store can
drop one. fsspec is imported only when a store is opened.
"""

from __future__ import annotations

import logging
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from slipstream.errors import CheckpointError, ConfigError, MissingCheckpointError
from slipstream.files.checksum import Bytes, Digest, view_bytes

__all__ = ["ObjectStore", "is_url", "join_location", "local_path", "redact"]

_URL: Final = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.\-]*::)*)([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
_SHORT: Final = re.compile(r"(?i:file):(/(?:[^/].*)?)", re.DOTALL)
_LOCAL: Final = ("file", "local")
_USER: Final = re.compile(r"(?<!abfs)(?<!abfss)(?<!wasb)(?<!wasbs)://[^/@\s]*@|://[^/@\s]*:[^/@\s]*@")  # the former have a container there
_QUERY: Final = re.compile(r"(://[^\s?]*)\?[^\s'\")>]+")
_SECRETS: Final = re.compile(r"(?i)\b([\w-]*(?:password|secret|token|key|signature|credential)[\w-]*['\"]?\s*[=:]\s*['\"]?)[^\s,;&'\")]+")
_PIECE: Final = 4 << 20
_BLOCK: Final = 16 << 20


def is_url(target: Any) -> bool:
    """Return whether a target is a URL that does not name a local folder.

    >>> is_url("s3://bucket/run"), is_url("file:///tmp/run"), is_url("runs/first"), is_url("C:/runs")
    (True, False, False, False)
    """
    found = _URL.fullmatch(target) if isinstance(target, str) else None
    return found is not None and bool(found[1] or found[2].lower() not in _LOCAL)


def local_path(target: str) -> str:
    """Return the path that a `file://` URL means, or its short form `file:/`; any other path as it is.

    >>> local_path("file:///tmp/my%20run"), local_path("file:/tmp/run"), local_path("runs/first")
    ('/tmp/my run', '/tmp/run', 'runs/first')
    """
    if short := _SHORT.fullmatch(target):
        return urllib.parse.unquote(short[1])
    found = _URL.fullmatch(target)
    if found is None or found[1] or found[2].lower() not in _LOCAL:
        return target
    host, slash, path = found[3].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(
            f"{target!r} names the host {host!r}: a file URL has three slashes and an absolute path, such as file:///data/run"
        )
    return urllib.parse.unquote(f"/{path}")


def join_location(folder: str, name: str) -> str:
    """Return the path or URL of something in a folder.

    >>> join_location("s3://bucket/runs/", "checkpoint_1")
    's3://bucket/runs/checkpoint_1'
    """
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def redact(text: str) -> str:
    """Return a text without the user names, passwords and signatures that URLs in it carry.

    >>> redact("ftp://me:hunter2@host/run and https://host/x?sig=abc")
    'ftp://***@host/run and https://host/x?***'
    """
    return _SECRETS.sub(r"\1***", _QUERY.sub(r"\1?***", _USER.sub("://***@", text)))


class ObjectStore:
    """The objects below a URL, by their names relative to it.

    >>> store = ObjectStore("memory://store-example")
    >>> store.put("a/b.txt", [b"hel", b"lo"], 5) == Digest().hexdigest()
    False
    >>> store.read("a/b.txt", largest=10), store.size("a/b.txt"), store.list(), store.list("a")
    (b'hello', 5, ['a'], ['b.txt'])
    >>> store.remove("a")
    """

    def __init__(self, url: str) -> None:
        self.shown = redact(url.rstrip("/"))
        found = _URL.fullmatch(url)
        if found is None or "::" in found[3]:
            raise ConfigError(f"{self.shown} cannot hold a checkpoint: give a folder's URL, such as s3://bucket/run, not an archive's")
        self._fs, path = self._open(url, found[2])
        self._root = path.rstrip("/")
        if not self._root:
            raise ConfigError(f"{redact(url)} names no folder: add one, such as {found[2]}://run")

    def _open(self, url: str, scheme: str) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        try:
            fs, path = fsspec.core.url_to_fs(url)
        except ImportError as problem:
            raise ConfigError(f"{self.shown} needs a package that is not installed here: {problem}") from problem
        except ValueError as problem:
            if "Protocol not known" in str(problem):
                known = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "hf", "sftp", "hdfs", "memory", "file"))
                raise ConfigError(f"{self.shown}: {scheme!r} is not a scheme that fsspec supports; such are {known}") from None
            raise self._failed("cannot be opened", problem) from None
        except Exception as problem:  # stores raise what their clients raise
            raise self._failed("cannot be opened", problem) from self._cause(problem)
        return fs, str(path)

    def show(self, name: str = "") -> str:
        """Return the URL of an object, as it may be printed."""
        return f"{self.shown}/{name}" if name else self.shown

    def put(self, name: str, chunks: Iterable[Bytes], size: int) -> str:
        """Write an object of `size` bytes, in pieces, and return their checksum. It is complete when this returns."""
        with self._saying(f"{name} could not be written"):
            digest, written = self._stream(self._path(name), chunks, size)
            self._fs.invalidate_cache()
            there = int(self._fs.info(self._path(name))["size"])
        if written != size or there != size:
            raise CheckpointError(f"{self.show(name)}: {written:,} bytes came, {there:,} are there, and it should have {size:,}")
        return digest

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object in one request, in place of what is there: object stores do that wholly or not at all."""
        with self._saying(f"{name} could not be written"):
            self._fs.pipe_file(self._path(name), data)
            self._fs.invalidate_cache()

    def read(self, name: str, largest: int) -> bytes:
        """Return all bytes of a small object."""
        size = self.size(name)
        if size > largest:
            raise CheckpointError(f"{self.show(name)} has {size:,} bytes, more than the {largest:,} that such a file may have")
        with self._saying(f"{name} could not be read"):
            data = bytes(self._fs.cat_file(self._path(name)))
        if len(data) != size:
            raise CheckpointError(f"{self.show(name)} was changed while it was read")
        return data

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of an object, piece by piece; an error if it has not `size` of them."""
        there = self.size(name)
        if there != size:
            raise CheckpointError(f"{self.show(name)} is damaged: it has {there:,} bytes, and it should have {size:,}")
        left = size
        with self._saying(f"{name} could not be read"), self._fs.open(self._path(name), "rb", block_size=_BLOCK) as file:
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    break
                left -= len(piece)
                yield piece
        if left:
            raise CheckpointError(f"{self.show(name)} ended {left:,} bytes before its end of {size:,}")

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` until before `end`."""
        with self._saying(f"{name} could not be read"):
            return bytes(self._fs.cat_file(self._path(name), start=start, end=end))

    def size(self, name: str) -> int:
        """Return how many bytes an object has; `MissingCheckpointError` if there is none."""
        with self._saying(f"{name} could not be read"):
            self._fs.invalidate_cache()
            info = self._fs.info(self._path(name))
        if info.get("type") != "file" or type(info.get("size")) is not int:
            raise CheckpointError(f"{self.show(name)} is a {info.get('type')}, and a file was expected")
        size: int = info["size"]
        return size

    def list(self, name: str = "") -> list[str]:
        """Return the names right below a folder, sorted; empty if there is nothing."""
        try:
            with self._saying(f"{name or 'the folder'} could not be listed"):
                self._fs.invalidate_cache()
                found = self._fs.ls(self._path(name), detail=False)
        except MissingCheckpointError:
            return []
        paths = {str(path).rstrip("/") for path in found} - {self._path(name)}  # some stores list a folder in itself
        return sorted({path.rpartition("/")[2] for path in paths} - {""})

    def make_folder(self, name: str) -> None:
        """Create a folder, if the store has folders. Errors show when something is written into it."""
        path = self._path(name)
        missing = []
        while "/" in path.strip("/"):  # the first part is a bucket or a volume, which is never made here
            try:
                self._fs.mkdir(path, create_parents=False)
                break
            except FileExistsError:
                break
            except (OSError, ValueError, NotImplementedError):
                missing.append(path)
                path = path.rpartition("/")[0]
        for path in reversed(missing):
            with suppress(OSError, ValueError, NotImplementedError):
                self._fs.mkdir(path, create_parents=False)

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with all that is in it; nothing happens if it is not there."""
        with suppress(MissingCheckpointError), self._saying(f"{name} could not be removed"):
            self._fs.invalidate_cache()
            self._fs.rm(self._path(name), recursive=True)
            self._fs.invalidate_cache()

    # -- inside

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _stream(self, path: str, chunks: Iterable[Bytes], size: int) -> tuple[str, int]:
        digest, written = Digest(), 0
        file = self._fs.open(path, "wb", block_size=_BLOCK)
        try:
            for chunk in chunks:
                view = view_bytes(chunk)
                written += len(view)
                if written > size:
                    break
                for start in range(0, len(view), _PIECE):
                    piece = view[start : start + _PIECE]
                    digest.update(piece)
                    file.write(piece)
        except BaseException:
            _discard_upload(file)
            raise
        file.close()
        return digest.hexdigest(), written

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as problem:
            raise MissingCheckpointError(f"{self.shown}: {what}: {redact(str(problem)) or 'not found'}") from self._cause(problem)
        except Exception as problem:  # stores raise what their clients raise
            raise self._failed(what, problem) from self._cause(problem)

    def _failed(self, what: str, problem: Exception) -> CheckpointError:
        text = redact(f"{type(problem).__name__}: {problem!s:.500}")
        return CheckpointError(f"{self.shown}: {what}: {text}. Check the address, the network, and your permissions.")

    @staticmethod
    def _cause(problem: Exception) -> Exception | None:
        """Return the error behind ours, for the traceback, unless that would print a secret."""
        seen: BaseException | None = problem
        while seen is not None:
            if redact(str(seen)) != str(seen):
                return None
            seen = seen.__cause__ or seen.__context__
        return problem


def _discard_upload(file: Any) -> None:
    """Discard a partial object, without the close that would publish it."""
    try:
        file.discard()
    except Exception as problem:  # the error that brought us here says more
        logging.getLogger(__name__).debug(f"half an object was left behind: {redact(str(problem))}")
    with suppress(AttributeError):
        file.closed = True
