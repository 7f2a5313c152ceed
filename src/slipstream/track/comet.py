"""Comet: one experiment of the package `comet_ml`, made on the main process by `start` and not before.

`online=False` among the keywords (or COMET_START_ONLINE=0) writes an archive to be sent later with `comet upload`.
"""

from __future__ import annotations

import importlib
import io
from typing import Any

from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import plain
from slipstream.track.shared import KeepsTables
from slipstream.track.tables import Table
from slipstream.track.values import refuse, sort_values

__all__ = ["CometMLTracker"]


class CometMLTracker(KeepsTables, GeneralTracker):
    """An experiment of comet_ml; keywords go to `comet_ml.start`, and `run_name` is its project."""

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.experiment: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment of comet_ml."""
        return self.experiment

    @on_main_process
    def start(self) -> None:
        """Makes the experiment."""
        self.experiment = importlib.import_module("comet_ml").start(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as parameters."""
        self.experiment.log_parameters(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics (keywords go to `log_metrics`), texts as what Comet calls others."""
        found = sort_values(values)
        if found.numbers:
            self.experiment.log_metrics(found.numbers, step=step, **kwargs)
        for name, text in found.texts.items():
            self.experiment.log_other(name, text)
        refuse(self.name, found.others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `log_image`."""
        from slipstream.track.pictures import SortedPictures, png

        found = SortedPictures(values)
        for name, several in found.made.items():
            for number, one in enumerate(several):
                shown = name if len(several) == 1 else f"{name}/{number}"
                file = io.BytesIO(png(one))  # of an array Comet makes a file with matplotlib, which is not always there
                self.experiment.log_image(file, **{"name": f"{shown}.png", "step": step, **kwargs})
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table as a file of comma-separated values, which carries the step in its name; keywords go to `log_table`."""
        file = f"{name}.csv" if step is None else f"{name}-{step}.csv"
        self.experiment.log_table(file, tabular_data=table.rows, headers=table.columns, **keywords)

    @on_main_process
    def finish(self) -> None:
        """Ends the experiment; what is not sent or written yet is waited for."""
        if self.experiment is not None:
            self.experiment.end()
            self.experiment = None
