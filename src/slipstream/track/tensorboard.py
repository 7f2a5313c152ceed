"""TensorBoard: event files below the logging folder, written by torch's own writer or by tensorboardX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.devices.packages import version_of
from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import flat, number, plain

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Event files in `<logging_dir>/<run_name>`; keywords go to the `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The writer."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Makes the writer."""
        package = "torch.utils.tensorboard" if version_of("tensorboard") is not None else "tensorboardX"
        self.writer = importlib.import_module(package).SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Writes the settings as hyper-parameters, and as `hparams.yml` beside the events."""
        settings = plain(values)
        known = {name: one if isinstance(one, bool | int | float | str) else str(one) for name, one in flat(settings).items()}
        self.writer.add_hparams(known, metric_dict={}, run_name=".")
        self.writer.flush()
        (self.logging_dir / "hparams.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as text, a dict of numbers as one chart with several lines."""
        for name, given in values.items():
            value = number(given)
            if isinstance(value, bool | int | float):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, {key: number(one) for key, one in value.items()}, global_step=step, **kwargs)
            else:
                raise TypeError(
                    f"{name} is a {type(value).__name__}, which TensorBoard has no chart for: log a number, a text or a dict of numbers, "
                    "or use get_tracker('tensorboard', unwrap=True)"
                )
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs batches of images by name; keywords go to `add_images`."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Closes the writer."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
