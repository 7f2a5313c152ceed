"""Where the output of workers goes: the terminal, files, or both; and the private folder of their failure records.

`parse_tee` understands torchrun's notation. `Folder` makes `<log_dir>/<run>/attempt_<n>/<rank>/stdout.log` and `stderr.log`,
or a private temporary folder that is removed at the end when nobody asked for logs. `Tee` copies what workers append to their
files to the terminal, whole lines at a time with the rank in front, byte for byte. There is no thread here: the launcher calls
`Tee.pump` while it waits, because a thread would not survive the fork of the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.errors import ConfigError

__all__ = ["Folder", "Outlet", "Tee", "parse_tee"]

_STDOUT: Final = 1
_STDERR: Final = 2


def parse_tee(text: str, local_processes: int) -> dict[int, int]:
    """Which streams of each local rank go to the terminal and a file: 0 none, 1 stdout, 2 stderr, 3 both.

    >>> parse_tee("3", 2), parse_tee("1:3", 2)
    ({0: 3, 1: 3}, {0: 0, 1: 3})
    """
    if ":" not in text:
        return dict.fromkeys(range(local_processes), int(text))
    chosen = {int(rank): int(streams) for rank, _, streams in (pair.partition(":") for pair in text.split(","))}
    beyond = [rank for rank in chosen if rank >= local_processes]
    if beyond:
        raise ConfigError(
            f"tee={text} names local rank {beyond[0]}, but this machine runs {local_processes}.\n"
            f"Local ranks are counted from 0: write 0 to {local_processes - 1}."
        )
    return {rank: chosen.get(rank, 0) for rank in range(local_processes)}


@dataclass(frozen=True)
class Outlet:
    """The files of one worker in one attempt; a stream without a file goes to the terminal."""

    folder: Path
    stdout: Path | None
    stderr: Path | None

    @property
    def confession(self) -> Path:
        return self.folder / "failure.json"

    @property
    def stack(self) -> Path:
        return self.folder / "stack.txt"

    @property
    def log(self) -> Path | None:
        """The file to point the user at after a failure."""
        return self.stderr or self.stdout


class Folder:
    """The folder of one run. Readable for the user alone."""

    def __init__(self, log_dir: str | None, run_id: str, tee: Mapping[int, int]) -> None:
        self._tee = tee
        self.kept = log_dir is not None
        try:
            if log_dir is None:
                self.path = Path(tempfile.mkdtemp(prefix="slipstream-"))
            else:
                os.makedirs(log_dir, exist_ok=True)
                self.path = Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=os.path.abspath(log_dir)))
        except OSError as error:
            raise ConfigError(
                f"log_dir={log_dir} cannot be used: {error.strerror}.\nGive a folder that can be written to with --log_dir."
            ) from None

    def outlet(self, attempt: int, rank: int, local_rank: int) -> Outlet:
        """A fresh folder for one worker."""
        folder = self.path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, mode=0o700)
        streams = self._tee.get(local_rank, 0)
        return Outlet(
            folder,
            folder / "stdout.log" if streams & _STDOUT else None,
            folder / "stderr.log" if streams & _STDERR else None,
        )

    def remove(self) -> None:
        """Take a temporary folder away again; one that the user named stays."""
        if not self.kept:
            shutil.rmtree(self.path, ignore_errors=True)


class Tee:
    """Copies lines from files to a stream of the terminal as they are written."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []

    def follow(self, path: Path, prefix: str, destination: int) -> None:
        """Copy what is appended to `path` to the open file `destination`, with `prefix` before every line."""
        self._sources.append(_Source(path, prefix.encode(), destination))

    def pump(self) -> None:
        """Copy the whole lines that are new."""
        for source in self._sources:
            source.pump()

    def finish(self) -> None:
        """Copy the rest, the last line even when it has no end, and let go of the files."""
        for source in self._sources:
            source.pump()
            source.finish()
        self._sources.clear()


class _Source:
    def __init__(self, path: Path, prefix: bytes, destination: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by finish
        self._prefix = prefix
        self._destination = destination
        self._rest = b""

    def pump(self) -> None:
        while chunk := self._file.read(1 << 16):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def finish(self) -> None:
        if self._rest:
            self._write(self._prefix + self._rest + b"\n")
        self._file.close()

    def _write(self, data: bytes) -> None:
        sys.stdout.flush()
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._destination, data) :]
