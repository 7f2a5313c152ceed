"""Trackio: one run of the package `trackio`, in a database of the user's cache folder (TRACKIO_DIR), shown by `trackio show`."""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.track.base import on_main_process
from slipstream.track.plain import plain
from slipstream.track.shared import KeepsTables, ProjectRun
from slipstream.track.tables import Table
from slipstream.track.values import refuse, sort_values

__all__ = ["TrackioTracker"]


class TrackioTracker(KeepsTables, ProjectRun):
    """A run of trackio; keywords go to `trackio.init`, and `run_name` is its project."""

    name = "trackio"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds the settings to the run's configuration, which goes out with the first values."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts, and objects of trackio's own as they are."""
        found = sort_values(values)
        own = {name: one for name, one in found.others.items() if type(one).__module__.split(".")[0] == "trackio"}
        if found.numbers or found.texts or own:
            self.run.log({**found.numbers, **found.texts, **own}, step=step, **kwargs)
        refuse(self.name, {name: one for name, one in found.others.items() if name not in own})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `trackio.Image`."""
        from slipstream.track.pictures import SortedPictures, three_channels

        image = importlib.import_module("trackio").Image
        shown: dict[str, Any] = {}
        found = SortedPictures(values)
        for name, several in found.made.items():
            for number, one in enumerate(several):
                shown[name if len(several) == 1 else f"{name}/{number}"] = image(three_channels(one), **kwargs)
        if shown:
            self.run.log(shown, step=step)
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to `trackio.Table`."""
        made = importlib.import_module("trackio").Table(columns=table.columns, data=table.rows, **keywords)
        self.run.log({name: made}, step=step)
