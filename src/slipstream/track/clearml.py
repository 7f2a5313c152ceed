"""ClearML: one task of the package `clearml`, made on the main process by `start` and not before.

A task that runs already is used, and left open at the end. CLEARML_OFFLINE_MODE=1 keeps everything in a local archive.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from slipstream.config.sources import environment
from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import plain
from slipstream.track.shared import KeepsTables
from slipstream.track.tables import Table
from slipstream.track.values import refuse, sort_values

__all__ = ["ClearMLTracker"]

_PARTS = re.compile(r"(train|eval|test|val|validation)[_/](.+)")
"""Names of one metric on several parts of the data: they share a chart."""


class ClearMLTracker(KeepsTables, GeneralTracker):
    """A task of clearml; keywords go to `Task.init`, and `run_name` is its project and task (or CLEARML_PROJECT, CLEARML_TASK)."""

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._owns = True

    @property
    def tracker(self) -> Any:
        """The task of clearml."""
        return self.task

    @on_main_process
    def start(self) -> None:
        """Makes the task, or takes the one that runs."""
        kind = importlib.import_module("clearml").Task
        running = kind.current_task()
        self._owns = running is None
        if running is not None:
            self.task = running
            return
        given = environment()
        names = {
            "project_name": given.get("CLEARML_PROJECT") or self.run_name,
            "task_name": given.get("CLEARML_TASK") or self.run_name,
        }
        self.task = kind.init(**{**names, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as a configuration of the task."""
        self.task.connect_configuration(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, or as single values where there is no step; `train_loss` and `eval/loss` share the chart `loss`."""
        logger = self.task.get_logger()
        found = sort_values(values)
        for name, value in found.numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        refuse(self.name, {**found.texts, **found.others}, keeps="numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `report_image`."""
        from slipstream.track.pictures import SortedPictures

        logger = self.task.get_logger()
        found = SortedPictures(values)
        for name, several in found.made.items():
            title, series = _chart(name)
            for number, one in enumerate(several):
                shown = series if len(several) == 1 else f"{series}-{number}"
                logger.report_image(**{"title": title, "series": shown, "iteration": step, "image": one, **kwargs})
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to `report_table`."""
        title, series = _chart(name)
        given = {"title": title, "series": series, "iteration": step, "table_plot": [table.columns, *table.rows], **keywords}
        self.task.get_logger().report_table(**given)

    @on_main_process
    def finish(self) -> None:
        """Closes the task where it was made here."""
        task, self.task = self.task, None
        if task is not None and self._owns:
            task.close()


def _chart(name: str) -> tuple[str, str]:
    """The chart that a metric is drawn in, and its line there.

    >>> _chart("eval_loss"), _chart("test/accuracy"), _chart("lr")
    (('loss', 'eval'), ('accuracy', 'test'), ('lr', 'train'))
    """
    part = _PARTS.fullmatch(name)
    return (part[2], part[1]) if part else (name, "train")
