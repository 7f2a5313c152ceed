"""Trackers that write to this machine with TensorBoard, Aim, DVCLive or Trackio.

TensorBoard event files are written by torch's writer or tensorboardX below the logging directory, Aim runs in its `.aim` repository,
DVCLive files in `dvclive`, and Trackio runs in its database (`TRACKIO_DIR`). Each package is imported when its tracker starts; no service
is needed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy
import yaml

from slipstream.devices.packages import version_of
from slipstream.errors import ConfigError
from slipstream.observability.trackers.base import PackageTracker, TableMixin, check_logging_folder, on_main_process
from slipstream.observability.trackers.images import ImagesByName, to_three_channels
from slipstream.observability.trackers.values import Table, flatten, raise_if_unsupported, sort_values, to_plain

__all__ = ["AimTracker", "DVCLiveTracker", "TensorBoardTracker", "TrackioTracker"]


class TensorBoardTracker(TableMixin, PackageTracker):
    """Event files in `<logging_dir>/<run_name>`; keywords go to the `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True
    writer: Any
    _handle = "writer"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = check_logging_folder(self.name, logging_dir) / run_name

    def _create(self) -> Any:
        package = "torch.utils.tensorboard" if version_of("tensorboard") is not None else "tensorboardX"
        return importlib.import_module(package).SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    def _close(self, opened: Any) -> None:
        opened.close()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings as hyper-parameters, and as `hparams.yml` beside the events."""
        settings = to_plain(values)
        known = {
            name: setting if isinstance(setting, bool | int | float | str) else str(setting) for name, setting in flatten(settings).items()
        }
        self.writer.add_hparams(known, metric_dict={}, run_name=".")
        self.writer.flush()
        (self.logging_dir / "hparams.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, texts as text, a dict of numbers as one chart with several lines."""
        charts = {name: sort_values(given) for name, given in values.items() if isinstance(given, Mapping)}
        found = sort_values({name: given for name, given in values.items() if name not in charts})
        texts, others = dict(found.texts), dict(found.others)
        for name, value in found.numbers.items():
            self.writer.add_scalar(name, value, global_step=step, **kwargs)
        for name, inner in charts.items():
            self.writer.add_scalars(name, inner.numbers, global_step=step, **kwargs)
            texts |= {f"{name}/{key}": text for key, text in inner.texts.items()}
            others |= {f"{name}/{key}": other for key, other in inner.others.items()}
        for name, text in texts.items():
            self.writer.add_text(name, text, global_step=step, **kwargs)
        self.writer.flush()
        raise_if_unsupported(self.name, others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name; keywords go to `add_images`, which with `dataformats` gets the images as they are."""
        if "dataformats" not in kwargs:
            super().log_images(values, step, **kwargs)
            return
        for name, given in values.items():
            self.writer.add_images(name, given, global_step=step, **kwargs)
        self.writer.flush()

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        for name, several in images.made.items():
            if len({image.shape for image in several}) == 1:
                self.writer.add_images(name, numpy.stack(several), global_step=step, dataformats="NHWC", **keywords)
            else:
                for number, image in enumerate(several):
                    self.writer.add_image(f"{name}/{number}", image, global_step=step, dataformats="HWC", **keywords)
        self.writer.flush()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Log a table as a text that TensorBoard shows as a table."""
        self.writer.add_text(name, table.markdown(), global_step=step, **keywords)
        self.writer.flush()


class AimTracker(PackageTracker):
    """A run of aim; keywords go to `aim.Run`, and `run_name` is its name and its experiment."""

    name = "aim"
    requires_logging_directory = True
    writer: Any
    _handle = "writer"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir

    def _create(self) -> Any:
        repo = os.fspath(self.logging_dir) if self.logging_dir is not None else "."
        writer = self._package.Run(**{"repo": repo, "experiment": self.run_name, **self.init_kwargs})
        writer.name = self.run_name
        return writer

    def _close(self, opened: Any) -> None:
        opened.close()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as `hparams` of the run."""
        self.writer["hparams"] = to_plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, texts as texts, objects of aim as they are; keywords go to `track`."""
        found = sort_values(values, own="aim")
        texts = {name: self._package.Text(text) for name, text in found.texts.items()}
        for name, value in {**found.numbers, **texts, **found.own}.items():
            self.writer.track(value, name=name, step=step, **kwargs)
        raise_if_unsupported(self.name, found.others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Log images by name; `kwargs` has keywords for `aim.Image` as "aim_image", and for `track` as "track".

        An image may be a pair of the image and its caption.
        """
        from PIL import Image

        options = {"aim_image": {}, "track": {}, **(kwargs or {})}
        captions = {
            name: value[1] for name, value in values.items() if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)
        }
        found = ImagesByName({name: value[0] if name in captions else value for name, value in values.items()})
        for name, several in found.made.items():
            for number, array in enumerate(several):
                image = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
                shown = self._package.Image(image, **{"caption": captions.get(name, ""), **options["aim_image"]})
                self.writer.track(shown, **{"name": name, "step": step, "context": {"picture": number}, **options["track"]})
        found.refuse()


class DVCLiveTracker(PackageTracker):
    """A `Live` of the user, or one that is created with the keywords; `run_name` is the message of its experiment."""

    name = "dvclive"
    live: Any
    _handle = "live"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        if live is not None and kwargs:
            raise ConfigError(f"dvclive has an object live and {', '.join(kwargs)}: make the Live with them, or give the keywords alone")
        super().__init__(run_name, **kwargs)
        self.live = live

    def _create(self) -> Any:
        message = {} if self.run_name is None else {"exp_message": self.run_name}
        return self.live or self._package.Live(**{**message, **self.init_kwargs})

    def _close(self, opened: Any) -> None:
        opened.end()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters."""
        self.live.log_params(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts as metrics of a step and end that step; keywords go to `log_metric`."""
        found = sort_values(values)
        if step is not None:
            self.live.step = step
        for name, value in {**found.numbers, **found.texts}.items():
            self.live.log_metric(name, value, **kwargs)
        if found.numbers or found.texts:
            self.live.next_step()
        raise_if_unsupported(self.name, found.others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write images as `plots/images/<name>/<step>.png`, which is how DVC shows them with a slider."""
        super().log_images(values, step)

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        for name, several in images.made.items():
            for number, image in enumerate(several):
                file = f"{self.live.step if step is None else step}{'' if len(several) == 1 else f'-{number}'}.png"
                self.live.log_image(f"{name}/{file}", image[:, :, 0] if image.shape[2] == 1 else image)


class TrackioTracker(TableMixin, PackageTracker):
    """A run of trackio; keywords go to `trackio.init`, and `run_name` is its project."""

    name = "trackio"
    run: Any

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts, and objects of trackio as they are."""
        found = sort_values(values, own="trackio")
        if shown := {**found.numbers, **found.texts, **found.own}:
            self.run.log(shown, step=step, **kwargs)
        raise_if_unsupported(self.name, found.others)

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        make = self._package.Image
        if shown := {name: make(to_three_channels(image), **keywords) for name, image in images.numbered("/")}:
            self.run.log(shown, step=step)

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        self.run.log({name: self._package.Table(columns=table.columns, data=table.rows, **keywords)}, step=step)
