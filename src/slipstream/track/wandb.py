"""Weights & Biases: one run of the package `wandb`, made on the main process by `start` and not before.

`mode="offline"` among the keywords (or WANDB_MODE=offline) keeps it in a folder `wandb`, to be sent later with `wandb sync`. Settings are
added to the one run that there is, offline too. wandb itself takes steps in order alone: values of a step that has passed are its warning.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from slipstream.track.base import on_main_process
from slipstream.track.plain import flat, number, plain
from slipstream.track.shared import KeepsTables, ProjectRun
from slipstream.track.tables import Table

__all__ = ["WandBTracker"]


class WandBTracker(KeepsTables, ProjectRun):
    """A run of wandb; keywords go to `wandb.init`, and `run_name` is its project."""

    name = "wandb"
    _own_cells = "wandb"  # pictures and the like in cells are wandb's own business

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds the settings to the run's configuration."""
        self.run.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers and whatever else wandb draws: texts, lists, histograms, objects of its own; nested names get slashes."""
        self.run.log({name: number(value) for name, value in flat(values).items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name, also as files and as objects of wandb; keywords go to `wandb.Image`."""
        from slipstream.track.pictures import SortedPictures

        image = importlib.import_module("wandb").Image
        found = SortedPictures(values, _pictures)
        if shown := {name: [image(one, **kwargs) for one in several] for name, several in found.made.items()}:
            self.run.log(shown, step=step)
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to the call that logs it."""
        made = importlib.import_module("wandb").Table(columns=table.columns, data=table.rows)
        self.run.log({name: made}, step=step, **keywords)


def _pictures(given: Any) -> list[Any]:
    """Pictures as arrays; what wandb alone knows (a file, an object of its own) as it is."""
    from slipstream.track.pictures import pictures

    several = list(given) if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, str | Path) or type(one).__module__.startswith("wandb") for one in several):
        return several
    return list(pictures(given))
