"""The base class of experiment trackers, and what several of them share.

A tracker has a name, says whether it needs a directory, and has four methods (start, store_init_configuration, log, finish). A tracker of
your own is a subclass of `GeneralTracker` with `name`, `requires_logging_directory` and a property `tracker` (the object of the package
behind it). Pass an instance to `Accelerator(log_with=...)`, or its name once the class exists.

    class Printer(GeneralTracker):
        name = "printer"
        requires_logging_directory = False
        tracker = None

        def log(self, values, step=None, **kwargs):
            print(step, values)

Trackers run on the main process unless `main_process_only` is False. On other processes a `NullTracker` accepts every call and does
nothing, so scripts need no condition around their calls. `TableMixin` and `ProjectTracker` hold what several trackers share.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from slipstream.config.redaction import redact_text
from slipstream.distributed.cluster import this_process
from slipstream.errors import ConfigError
from slipstream.observability.trackers.values import Table, make_table

__all__ = ["GeneralTracker", "NullTracker", "ProjectTracker", "TableMixin", "check_logging_folder", "on_main_process"]


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:\-]+://")


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for methods of a tracker: runs on the main process only, where the tracker has `main_process_only`; else gives None.

    >>> class Printer(GeneralTracker):
    ...     @on_main_process
    ...     def log(self, values, step=None, **kwargs):
    ...         return values
    >>> Printer().log({"loss": 1})
    {'loss': 1}
    """

    @wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not this_process().is_main:
            return None
        return function(self, *args, **kwargs)

    return method


def check_logging_folder(tracker: str, logging_dir: str | os.PathLike[str]) -> Path:
    """The logging folder of a tracker that writes files; a URL is none.

    >>> check_logging_folder("local", "s3://bucket/run")
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: the tracker local writes into a folder of this machine, and 's3://bucket/run' is a URL: give it one ...
    """
    if _URL.match(os.fspath(logging_dir)):
        shown = redact_text(os.fspath(logging_dir))
        raise ConfigError(
            f"the tracker {tracker} writes into a folder of this machine, and {shown!r} is a URL: give it one of its own, "
            'as in Accelerator(project_config=ProjectConfiguration(project_dir="s3://...", logging_dir="logs"))'
        )
    return Path(logging_dir)


class GeneralTracker:
    """The base of trackers: each verb does nothing until a subclass says otherwise.

    >>> GeneralTracker(_blank=True).log({"loss": 1.0}, step=1)
    """

    name: str
    """What the tracker is called in `log_with` and `get_tracker`."""
    requires_logging_directory: bool
    """Whether the class is called with a folder after the name of the run."""
    main_process_only: bool = True
    """Whether it works on the main process alone."""

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank

    def start(self) -> None:
        """Begins the run: called once, before anything else."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keeps values of one step."""

    def finish(self) -> None:
        """Ends the run."""


class NullTracker(GeneralTracker):
    """What stands for a tracker on the processes where it does not work.

    >>> nothing = NullTracker("wandb")
    >>> nothing.log_images({"sample": []}), nothing.tracker.summary.update(best=1)
    (None, None)
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> Any:
        """An object that takes everything and does nothing."""
        return _NullObject()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NullObject()


class _NullObject:
    """Takes every call, attribute and item."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NullObject()

    def __setattr__(self, name: str, value: Any) -> None:
        return None

    def __getitem__(self, key: Any) -> Any:
        return _NullObject()

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __bool__(self) -> bool:
        return False


class TableMixin:
    """A tracker that keeps tables, in the way that its `_keep_table` says."""

    _own_cells: str | None = None
    """The package whose objects stay as they are in cells."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs a table: rows with `columns`, a dict of columns, records, an array of two dimensions, or a data frame."""
        self._keep_table(table_name, make_table(table_name, columns, data, dataframe, own=self._own_cells), step, kwargs)

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        raise NotImplementedError


class ProjectTracker(GeneralTracker):
    """A run that `init` of a package makes, in a project; keywords go to that call, and `run_name` is the project."""

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run, as the package has it."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Makes the run."""
        self.run = importlib.import_module(self.name).init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def finish(self) -> None:
        """Ends the run; what the package has not sent or written yet is waited for."""
        if self.run is not None:
            self.run.finish()
            self.run = None
