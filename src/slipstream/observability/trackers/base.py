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
nothing, so scripts need no condition around their calls. `TableMixin`, `ImageMixin` and `PackageTracker` hold what several trackers
share.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from slipstream.config.redaction import redact_text
from slipstream.distributed.cluster import this_process
from slipstream.errors import ConfigError
from slipstream.observability.trackers.images import ImagesByName, to_images
from slipstream.observability.trackers.values import Table, make_table, to_plain

__all__ = ["GeneralTracker", "ImageMixin", "NullTracker", "PackageTracker", "TableMixin", "check_logging_folder", "on_main_process"]


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a tracker so that it runs on the main process only and returns None elsewhere, if `main_process_only` is set.

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
    """Return the logging folder of a tracker that writes files; raise an error for a URL.

    >>> check_logging_folder("local", "s3://bucket/run")
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: the tracker local writes into a folder of this machine, and 's3://bucket/run' is a URL: give it a ...
    """
    if "://" in os.fspath(logging_dir):
        shown = redact_text(os.fspath(logging_dir))
        raise ConfigError(
            f"the tracker {tracker} writes into a folder of this machine, and {shown!r} is a URL: give it a local folder, "
            'as in Accelerator(project_config=ProjectConfiguration(project_dir="s3://...", logging_dir="logs"))'
        )
    return Path(logging_dir)


class GeneralTracker:
    """The base class of trackers; its methods do nothing.

    >>> GeneralTracker(_blank=True).log({"loss": 1.0}, step=1)
    """

    name: str
    """The name of the tracker in `log_with` and `get_tracker`."""
    requires_logging_directory: bool
    """Whether the class is called with a folder after the name of the run."""
    main_process_only: bool = True
    """Whether it runs on the main process only."""

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank

    def start(self) -> None:
        """Begin the run: called once, before anything else."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store values of one step."""

    def finish(self) -> None:
        """End the run."""


class NullTracker(GeneralTracker):
    """Takes the place of a tracker on processes where it does not run.

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
        """An object that accepts every call and does nothing."""
        return _NullObject()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NullObject()


class _NullObject:
    """Accepts every call, attribute and item."""

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
    """Adds `log_table`; `_keep_table` stores the table."""

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
        """Log a table, given as rows with `columns`, a dict of columns, records, a two-dimensional array, or a data frame."""
        self._keep_table(table_name, make_table(table_name, columns, data, dataframe, own=self._own_cells), step, kwargs)

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        raise NotImplementedError


class ImageMixin:
    """Adds `log_images`; `_keep_images` stores the images, and those that cannot be read are an error afterwards."""

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name, each an image, a list or a batch; keywords go to the call of the package that stores an image."""
        found = ImagesByName(values, self._read_images)
        self._keep_images(found, step, kwargs)
        found.refuse()

    def _read_images(self, given: Any) -> list[Any]:
        return list(to_images(given))

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        raise NotImplementedError


class PackageTracker(ImageMixin, GeneralTracker):
    """A tracker around one object of a package, which `start` creates with the keywords, and `finish` ends.

    The object is in the attribute that `_handle` names. `_create` and `_close` are for packages that have no `init(project=...)` and no
    `finish()`.
    """

    requires_logging_directory = False
    _handle = "run"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        setattr(self, self._handle, None)

    @property
    def tracker(self) -> Any:
        """The object of the package."""
        return getattr(self, self._handle)

    @property
    def _package(self) -> Any:
        return importlib.import_module(self.name)

    @on_main_process
    def start(self) -> None:
        """Create the object of the package."""
        setattr(self, self._handle, self._create())

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the settings to the configuration of the run."""
        self.tracker.config.update(to_plain(values))

    @on_main_process
    def finish(self) -> None:
        """End the run, and wait for what the package has not sent or written yet."""
        opened = self.tracker
        if opened is not None:
            setattr(self, self._handle, None)
            self._close(opened)

    def _create(self) -> Any:
        return self._package.init(**{"project": self.run_name, **self.init_kwargs})

    def _close(self, opened: Any) -> None:
        opened.finish()
