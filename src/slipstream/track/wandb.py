"""Weights & Biases: one run of the package `wandb`, made on the main process by `start` and not before."""

from __future__ import annotations

import importlib
from typing import Any

from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import number, plain

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
        """Logs values; objects of wandb's own pass as they are."""
        self.run.log({name: number(value) for name, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists of images by name; keywords go to `wandb.Image`."""
        image = importlib.import_module("wandb").Image
        self.run.log({name: [image(one, **kwargs) for one in images] for name, images in values.items()}, step=step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to the call that logs it."""
        table = importlib.import_module("wandb").Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Ends the run; what wandb has not sent or written yet is waited for."""
        if self.run is not None:
            self.run.finish()
            self.run = None
