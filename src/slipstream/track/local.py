"""A tracker that needs nothing: one line of JSON for each call, in a file of the run.

The first line of a run is `{"run": ..., "started": ..., "config": {...}}`, every other one `{"step": ..., "time": ..., "values": {...}}`.
Lines are written through at once, so that a run which is killed keeps them. A run of the same name goes on in the same file, with
a first line of its own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any

from slipstream.errors import ConfigError
from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import plain

__all__ = ["LocalTracker"]


class LocalTracker(GeneralTracker):
    """JSON lines in `<logging_dir>/<run_name>.jsonl`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracker = LocalTracker("demo", folder)
    ...     tracker.start()
    ...     tracker.store_init_configuration({"lr": 0.1})
    ...     tracker.log({"loss": 2.5}, step=1)
    ...     tracker.finish()
    ...     [json.loads(line).get("values") for line in tracker.path.read_text().splitlines()]
    [None, {'loss': 2.5}]
    """

    name = "local"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / f"{run_name.replace(os.sep, '-')}.jsonl"
        self._file: IO[str] | None = None
        self._begun = False

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Makes the folder and opens the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the local tracker cannot write {self.path} ({error.strerror}): pass a folder of yours as project_dir or logging_dir"
            ) from error

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Writes the first line of the run, with its settings."""
        self._write({"run": self.run_name, "started": time.time(), "config": plain(values)})
        self._begun = True

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes one line; keywords become part of it."""
        if not self._begun:
            self.store_init_configuration({})
        self._write({"step": step, "time": time.time(), "values": plain(values), **plain(kwargs)})

    @on_main_process
    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            raise ConfigError(f"the local tracker of {self.run_name!r} is not started: call start() first")
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
