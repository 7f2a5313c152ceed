"""TensorBoard: event files below the logging folder, written by torch's own writer or by tensorboardX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import yaml

from slipstream.devices.packages import version_of
from slipstream.track.base import GeneralTracker, folder_for, on_main_process
from slipstream.track.plain import flat, plain
from slipstream.track.shared import KeepsTables
from slipstream.track.tables import Table
from slipstream.track.values import refuse, sort_values

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(KeepsTables, GeneralTracker):
    """Event files in `<logging_dir>/<run_name>`; keywords go to the `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = folder_for(self.name, logging_dir) / run_name
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
        found = sort_values({name: given for name, given in values.items() if not isinstance(given, Mapping)})
        for name, value in found.numbers.items():
            self.writer.add_scalar(name, value, global_step=step, **kwargs)
        for name, text in found.texts.items():
            self.writer.add_text(name, text, global_step=step, **kwargs)
        others = dict(found.others)
        for name, several in values.items():
            if isinstance(several, Mapping):
                inner = sort_values(several)
                self.writer.add_scalars(name, inner.numbers, global_step=step, **kwargs)
                for key, text in inner.texts.items():
                    self.writer.add_text(f"{name}/{key}", text, global_step=step, **kwargs)
                others |= {f"{name}/{key}": one for key, one in inner.others.items()}
        self.writer.flush()
        refuse(self.name, others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name: one, several, or a batch; keywords go to `add_images`, which with `dataformats` gets them as they are."""
        import numpy

        from slipstream.track.pictures import SortedPictures

        if "dataformats" in kwargs:
            for name, given in values.items():
                self.writer.add_images(name, given, global_step=step, **kwargs)
            self.writer.flush()
            return
        found = SortedPictures(values)
        for name, several in found.made.items():
            if len({one.shape for one in several}) == 1:
                self.writer.add_images(name, numpy.stack(several), global_step=step, dataformats="NHWC", **kwargs)
            else:
                for number, one in enumerate(several):
                    self.writer.add_image(f"{name}/{number}", one, global_step=step, dataformats="HWC", **kwargs)
        self.writer.flush()
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table as a text that TensorBoard shows as one; keywords go to `add_text`."""
        self.writer.add_text(name, table.markdown(), global_step=step, **keywords)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Closes the writer."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
