"""What several trackers have in common: the form in which tables come, and a run that one call of a package makes."""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.tables import Table, table_of

__all__ = ["KeepsTables", "ProjectRun"]


class KeepsTables:
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
        self._keep_table(table_name, table_of(table_name, columns, data, dataframe, own=self._own_cells), step, kwargs)

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        raise NotImplementedError


class ProjectRun(GeneralTracker):
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
