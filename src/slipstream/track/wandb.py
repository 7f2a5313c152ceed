"""Weights & Biases: one run of the package `wandb`, made on the main process by `start` and not before.

`mode="offline"` among the keywords (or WANDB_MODE=offline) keeps it in a folder `wandb`, to be sent later with `wandb sync`. Settings are
added to the one run that there is, offline too. wandb itself takes steps in order alone: values of a step that has passed are its warning.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import flat, number, plain
from slipstream.track.tables import table_of

__all__ = ["WandBTracker"]


class WandBTracker(GeneralTracker):
    """A run of wandb; keywords go to `wandb.init`, and `run_name` is its project."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run of wandb."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Makes the run."""
        self.run = importlib.import_module("wandb").init(**{"project": self.run_name, **self.init_kwargs})

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
        """Logs a table, of rows with `columns` or of a data frame; keywords go to the call that logs it."""
        table = table_of(table_name, columns, data, dataframe, own="wandb")  # pictures and the like in cells are wandb's own business
        made = importlib.import_module("wandb").Table(columns=table.columns, data=table.rows)
        self.run.log({table_name: made}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Ends the run; what wandb has not sent or written yet is waited for."""
        if self.run is not None:
            self.run.finish()
            self.run = None


def _pictures(given: Any) -> list[Any]:
    """Pictures as arrays; what wandb alone knows (a file, an object of its own) as it is."""
    from slipstream.track.pictures import pictures

    several = list(given) if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, str | Path) or type(one).__module__.startswith("wandb") for one in several):
        return several
    return list(pictures(given))
