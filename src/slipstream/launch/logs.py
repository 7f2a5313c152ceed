"""Where the output of workers goes: the terminal, files, or both; and the private folder of their failure records.

`parse_tee` understands torchrun's notation. `Folder` makes `<log_dir>/<run>/attempt_<n>/<rank>/stdout.log` and `stderr.log` for every
rank, or a private temporary folder that is removed at the end when nobody asked for logs. `Tee` copies what workers append to their
files to the terminal, whole lines at a time with the rank in front, byte for byte; lines of JSON stay whole, as the rank is in them, and
a warning that another rank has given already is left out (`chorus.py`). There is no thread here: the launcher calls `Tee.pump` while it
waits, because a thread would not survive the fork of the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.errors import ConfigError

__all__ = ["Folder", "Outlet", "Tee", "parse_tee"]

_STDOUT: Final = 1
_STDERR: Final = 2
_CLAIMS: Final = ".said"


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
    followed: int = 3
    """The streams whose files are copied to the terminal: 1 stdout, 2 stderr, 3 both."""
    kept: bool = True
    """The files are there after the run."""

    @property
    def files(self) -> int:
        """The streams that have files."""
        return (_STDOUT if self.stdout else 0) | (_STDERR if self.stderr else 0)

    @property
    def is_shown(self) -> bool:
        """Everything that the worker prints gets to the terminal."""
        return self.files & ~self.followed == 0

    @property
    def claims(self) -> Path:
        """The folder where the workers of this machine claim warnings."""
        return self.folder.parent / _CLAIMS

    @property
    def hidden(self) -> Path:
        """Where the worker writes down what the terminal shall leave out: this path, a dot, and the number of the stream."""
        return self.claims / f"hidden-{self.folder.name}"

    @property
    def confession(self) -> Path:
        return self.folder / "failure.json"

    @property
    def stack(self) -> Path:
        return self.folder / "stack.txt"

    @property
    def log(self) -> Path | None:
        """The file to point the user at after a failure; none that will be gone."""
        return (self.stderr or self.stdout) if self.kept else None


class Folder:
    """The folder of one run. Readable for the user alone.

    `direct` names local ranks that keep the terminal for what `tee` does not name, also with a `log_dir`.
    """

    def __init__(self, log_dir: str | None, run_id: str, tee: Mapping[int, int], direct: Collection[int] = ()) -> None:
        self._tee = tee
        self._direct = direct
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
        followed = self._tee.get(local_rank, 0)
        files = _STDOUT | _STDERR if self.kept and local_rank not in self._direct else followed
        outlet = Outlet(
            folder,
            folder / "stdout.log" if files & _STDOUT else None,
            folder / "stderr.log" if files & _STDERR else None,
            followed,
            self.kept,
        )
        outlet.claims.mkdir(exist_ok=True, mode=0o700)
        return outlet

    def not_shown(self) -> list[int]:
        """The local ranks of whose output some goes to files only."""
        return [rank for rank, followed in self._tee.items() if self.kept and rank not in self._direct and followed != _STDOUT | _STDERR]

    def remove(self) -> None:
        """Take a temporary folder away again; of one that the user named, only what was for the launcher."""
        for path in self.path.glob(f"attempt_*/{_CLAIMS}") if self.kept else [self.path]:
            shutil.rmtree(path, ignore_errors=True)


class Tee:
    """Copies lines from files to a stream of the terminal as they are written."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []

    def follow(self, path: Path, prefix: str, destination: int, *, hidden: Path | None = None, json_lines: bool = False) -> None:
        """Copy what is appended to `path` to the open file `destination`, with `prefix` before every line.

        Not copied: the texts that the worker has written into the file `hidden`. With `json_lines`, a line that is one stays as it is.
        """
        self._sources.append(_Source(path, prefix.encode(), destination, _Hidden(hidden), json_lines))

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


class _Hidden:
    """Texts that a worker has printed into its file, but that the terminal leaves out.

    The worker writes a text down here before it prints it, so whoever reads the output first, and this after, knows of all of them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._at = 0
        self._texts: list[list[bytes]] = []

    def without(self, lines: list[bytes], last: bool) -> tuple[list[bytes], list[bytes]]:
        """The lines that are shown, and those at the end that may be the first part of a text that is not."""
        self._read()
        shown: list[bytes] = []
        place = 0
        while place < len(lines) and self._texts:
            found = next((text for text in self._texts if lines[place : place + len(text)] == text), None)
            if found is not None:
                self._texts.remove(found)
                place += len(found)
            elif not last and any(lines[place:] == text[: len(lines) - place] for text in self._texts):
                return shown, lines[place:]
            else:
                shown.append(lines[place])
                place += 1
        return shown + lines[place:], []

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                *lines, _ = file.read().split(b"\n")
        except FileNotFoundError:  # so far there is nothing to hide
            return
        while lines and len(lines) > int(lines[0]):
            count = int(lines[0])
            self._texts.append(lines[1 : 1 + count])
            self._at += sum(len(line) + 1 for line in lines[: 1 + count])
            del lines[: 1 + count]


class _Source:
    def __init__(self, path: Path, prefix: bytes, destination: int, hidden: _Hidden, json_lines: bool) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by finish
        self._prefix = prefix
        self._destination = destination
        self._hidden = hidden
        self._json_lines = json_lines
        self._waiting: list[bytes] = []
        self._rest = b""

    def pump(self) -> None:
        while chunk := self._file.read(1 << 16):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._copy(lines, last=False)

    def finish(self) -> None:
        self._copy([self._rest] if self._rest else [], last=True)
        self._file.close()

    def _copy(self, lines: list[bytes], last: bool) -> None:
        shown, self._waiting = self._hidden.without(self._waiting + lines, last)
        self._write(b"".join(self._labelled(line) + b"\n" for line in shown))

    def _labelled(self, line: bytes) -> bytes:
        return line if self._json_lines and line.startswith(b"{") and line.endswith(b"}") else self._prefix + line

    def _write(self, data: bytes) -> None:
        sys.stdout.flush()
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._destination, data) :]
