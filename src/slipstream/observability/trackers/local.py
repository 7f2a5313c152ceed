"""`LocalTracker` writes JSON lines into the run directory, one for each call, readable during the run.

No package is needed.

    <logging_dir>/runs/<name>/metrics.jsonl
    {"run": "my-project", "started": 1760000000.0, "config": {...}}              at each start
    {"step": 1, "time": 1760000001.0, "values": {"loss": 0.5, "lr": 0.001}}      numbers and texts; nan and inf are texts
    {"step": 1, "time": 1760000002.0, "images": {"sample": ["media/2-0-sample.png"]}}
    {"step": 1, "time": 1760000003.0, "table": {"name": "answers", "columns": [...], "rows": [...]}}

Each line is written to the operating system before `log` returns, so a killed run loses at most the line that it was writing. A call with
plain numbers costs a few microseconds more than the system call: its line is formatted here, without a lookup.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from types import NoneType
from typing import Any

from slipstream.config.redaction import redact_values
from slipstream.errors import ConfigError
from slipstream.logging import get_logger
from slipstream.observability.run_dir.folder import JsonLinesWriter, RunFolder, replacing
from slipstream.observability.trackers.base import GeneralTracker, ImageMixin, TableMixin, check_logging_folder, on_main_process
from slipstream.observability.trackers.images import ImagesByName, encode_png
from slipstream.observability.trackers.values import MAX_BITS, Table, raise_if_unsupported, sort_values, to_plain

__all__ = ["LocalTracker"]

_MAX_CACHED_NAMES = 10_000
"""Names of metrics whose JSON text is cached; further names are encoded each time."""
_CHECK_SECONDS = 10.0
"""Seconds between two checks that the file still exists."""


class LocalTracker(TableMixin, ImageMixin, GeneralTracker):
    """Writes `metrics.jsonl` and images to `<logging_dir>/runs/<name>`, or to the given folder of a run.

    `run_name` is the project. Without a `name` the run is named after project and time. A name that is taken is an error, unless
    `resume=True` continues that run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracker = LocalTracker("demo", folder, name="first")
    ...     tracker.start()
    ...     tracker.store_init_configuration({"lr": 0.1})
    ...     tracker.log({"loss": 2.5}, step=1)
    ...     tracker.finish()
    ...     [json.loads(line).get("values") for line in tracker.path.read_text().splitlines()]
    [None, {'loss': 2.5}]
    """

    name = "local"
    requires_logging_directory = True

    def __init__(
        self,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        *,
        name: str | None = None,
        resume: bool = False,
        folder: RunFolder | None = None,
    ) -> None:
        super().__init__()
        if folder is not None and name is not None and name != folder.name:
            raise ConfigError(f"the local tracker has the name {name!r} and a folder of the run {folder.name!r}: give one of them")
        self.run_name = run_name
        self.logging_dir = check_logging_folder(self.name, logging_dir)
        self.folder = folder
        self._wanted, self._resume = name, resume
        self._owns = folder is None
        self._journal: JsonLinesWriter | None = None
        self._begun: JsonLinesWriter | None = None
        """The file, once the first line of this start is in it."""
        self._settings: dict[str, Any] = {}
        self._look_at = 0.0
        self._spelled: dict[str, str] = {}
        self._tensor: type = NoneType
        """The class of tensors, from the start on."""

    @property
    def tracker(self) -> Path:
        """The folder of the run."""
        if self.folder is None:
            raise ConfigError(f"the local tracker of {self.run_name!r} has no folder yet: call start() first")
        return self.folder.path

    @property
    def path(self) -> Path:
        """The file of lines."""
        return self.tracker / "metrics.jsonl"

    @on_main_process
    def start(self) -> None:
        """Create or find the folder of the run, and open the file."""
        import torch

        self._tensor = torch.Tensor
        if self.folder is None:
            self.folder = RunFolder.create(self.logging_dir, self._wanted, project=self.run_name, resume=self._resume)
        try:
            self._journal = self.folder.journal("metrics.jsonl", indexed=True)
        except OSError as error:
            raise ConfigError(
                f"the local tracker cannot write {self.path} ({error.strerror}): pass a folder of yours as project_dir or logging_dir"
            ) from error

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the first line of this start, with its settings; and, in a folder of its own, config.json."""
        self._settings = redact_values("config", to_plain(values))
        journal = self._open()
        if journal is None:
            return
        try:
            self._begin_lines(journal)
        except OSError as error:  # a full disk must not end a run; the line comes before the first one that can be written
            get_logger(__name__).warning(f"{self.path} could not be written ({error.strerror}); training continues")

    def _begin_lines(self, journal: JsonLinesWriter) -> None:
        now = time.time()
        journal.append({"run": self.run_name, "started": now, "config": self._settings}, time=now)
        self._begun = journal
        if self._owns and self.folder is not None:
            self.folder.write_json("config.json", {"settings": self._settings, "options": {}})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line; keywords become part of it."""
        if kwargs or not self.log_numbers(values, step):
            self._log_with(values, step, kwargs)

    def log_numbers(self, values: dict[str, Any], step: int | None) -> bool:
        """Write one line if all values are finite numbers or tensors of one on the host; return whether it was written.

        This is the usual line, which some runs write in every step: it enters one further function, that of the file.
        """
        journal = self._begun
        if journal is None or (type(step) is not int and step is not None):
            return False
        spelled, tensor, parts = self._spelled, self._tensor, []
        for name, value in values.items():
            kind = type(value)
            if kind is tensor and value.is_cpu and value.numel() == 1:
                value = value.item()
                kind = type(value)
            if (kind is not float or value - value != 0.0) and (kind is not int or value.bit_length() > MAX_BITS):
                return False
            parts.append(f"{spelled.get(name) or self._spell(name)}{value!r}")
        now = time.time()
        if now >= self._look_at:
            self._look(journal, now)
        shown = "null" if step is None else step
        journal.line(f'{{"step":{shown},"time":{now:.3f},"values":{{{",".join(parts)}}}}}\n', step, now)
        return True

    def _spell(self, name: str) -> str:
        text = json.dumps(str(name), ensure_ascii=False) + ":"
        if len(self._spelled) < _MAX_CACHED_NAMES:
            self._spelled[name] = text
        return text

    def _log_with(self, values: dict[str, Any], step: Any, kwargs: dict[str, Any]) -> None:
        """Write a line with values of any kind."""
        journal = self._beginning()
        if journal is None:
            return
        found = sort_values(values)
        numbers = {name: value if math.isfinite(value) else str(float(value)) for name, value in found.numbers.items()}
        if numbers or found.texts or not found.others:
            self._append(journal, step, {"values": {**numbers, **found.texts}, **to_plain(kwargs)})
        raise_if_unsupported(self.name, found.others)

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        """Write images as PNG files into `media/`, and a line that names them."""
        journal = self._beginning()
        if journal is None:
            return
        media = self.tracker / "media"
        media.mkdir(exist_ok=True)
        places: dict[str, list[str]] = {}
        for name, several in images.made.items():
            slug = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60]
            for number, image in enumerate(several):
                place = media / f"{journal.lines}-{len(places)}-{number}-{slug}.png"
                with replacing(place) as beside:
                    beside.write_bytes(encode_png(image))
                places.setdefault(name, []).append(f"media/{place.name}")
        if places:
            self._append(journal, step, {"images": places, **to_plain(keywords)})

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Write a table, of rows with `columns` or of a data frame, as one line."""
        journal = self._beginning()
        if journal is not None:
            self._append(journal, step, {"table": {"name": name, "columns": table.columns, "rows": table.rows}, **to_plain(keywords)})

    @on_main_process
    def finish(self) -> None:
        """Close the file, and end the run if the folder is its own."""
        if self._journal is not None:
            journal, self._journal, self._begun = self._journal, None, None
            try:
                self._look(journal, time.time())
            finally:
                journal.close()
            if self._owns and self.folder is not None:
                self.folder.end("finished")

    def _append(self, journal: JsonLinesWriter, step: Any, record: dict[str, Any]) -> None:
        now = time.time()
        if now >= self._look_at:
            self._look(journal, now)
        place = None if step is None else int(step)
        journal.append({"step": place, "time": round(now, 3), **record}, step=place, time=now)

    def _look(self, journal: JsonLinesWriter, now: float) -> None:
        """Raise an error if the file was removed: what is written to it is lost, and the system does not say so."""
        self._look_at = now + _CHECK_SECONDS
        if journal.gone:
            raise FileNotFoundError(
                f"{journal.path} was removed during the run: what was logged to it, and will be, is lost; "
                "do not change the folder of a run before its end"
            )

    def _beginning(self) -> JsonLinesWriter | None:
        """Return the file, with the first line of this start in it."""
        journal = self._open()
        if journal is not None and self._begun is None:
            self._begin_lines(journal)
        return journal

    def _open(self) -> JsonLinesWriter | None:
        """Return the file; None on processes that write nothing."""
        if self._journal is None:
            self._check_started()
        return self._journal

    @on_main_process
    def _check_started(self) -> None:
        raise ConfigError(f"the local tracker of {self.run_name!r} is not started: call start() first")
