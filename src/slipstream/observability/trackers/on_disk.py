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

import yaml

from slipstream.devices.packages import version_of
from slipstream.errors import ConfigError
from slipstream.observability.trackers.base import GeneralTracker, ProjectTracker, TableMixin, check_logging_folder, on_main_process
from slipstream.observability.trackers.values import Table, flatten, raise_if_unsupported, sort_values, to_plain

__all__ = ["AimTracker", "DVCLiveTracker", "TensorBoardTracker", "TrackioTracker"]


class TensorBoardTracker(TableMixin, GeneralTracker):
    """Event files in `<logging_dir>/<run_name>`; keywords go to the `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = check_logging_folder(self.name, logging_dir) / run_name
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
        settings = to_plain(values)
        known = {
            name: setting if isinstance(setting, bool | int | float | str) else str(setting) for name, setting in flatten(settings).items()
        }
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
                others |= {f"{name}/{key}": other for key, other in inner.others.items()}
        self.writer.flush()
        raise_if_unsupported(self.name, others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name: one, several, or a batch; keywords go to `add_images`, which with `dataformats` gets them as they are."""
        import numpy

        from slipstream.observability.trackers.images import ImagesByName

        if "dataformats" in kwargs:
            for name, given in values.items():
                self.writer.add_images(name, given, global_step=step, **kwargs)
            self.writer.flush()
            return
        found = ImagesByName(values)
        for name, several in found.made.items():
            if len({entry.shape for entry in several}) == 1:
                self.writer.add_images(name, numpy.stack(several), global_step=step, dataformats="NHWC", **kwargs)
            else:
                for number, entry in enumerate(several):
                    self.writer.add_image(f"{name}/{number}", entry, global_step=step, dataformats="HWC", **kwargs)
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


class AimTracker(GeneralTracker):
    """A run of aim; keywords go to `aim.Run`, and `run_name` is its name and its experiment."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The run of aim."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Makes the repository where there is none, and the run."""
        repo = os.fspath(self.logging_dir) if self.logging_dir is not None else "."
        self.writer = importlib.import_module("aim").Run(**{"repo": repo, "experiment": self.run_name, **self.init_kwargs})
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as `hparams` of the run."""
        self.writer["hparams"] = to_plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, texts as texts, objects of aim's own as they are; keywords go to `track`."""
        package = importlib.import_module("aim")
        found = sort_values(values)
        own = {name: other for name, other in found.others.items() if type(other).__module__.split(".")[0] == "aim"}
        texts = {name: package.Text(text) for name, text in found.texts.items()}
        for name, value in {**found.numbers, **texts, **own}.items():
            self.writer.track(value, name=name, step=step, **kwargs)
        raise_if_unsupported(self.name, {name: other for name, other in found.others.items() if name not in own})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Logs pictures by name; `kwargs` has keywords for `aim.Image` as "aim_image", and for `track` as "track".

        A picture may be a pair of it and its caption.
        """
        from PIL import Image

        from slipstream.observability.trackers.images import ImagesByName

        package = importlib.import_module("aim")
        options = {"aim_image": {}, "track": {}, **(kwargs or {})}
        captions = {
            name: value[1] for name, value in values.items() if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)
        }
        found = ImagesByName({name: value[0] if name in captions else value for name, value in values.items()})
        for name, several in found.made.items():
            caption = captions.get(name, "")
            for number, entry in enumerate(several):
                image = Image.fromarray(entry[:, :, 0] if entry.shape[2] == 1 else entry)
                shown = package.Image(image, **{"caption": caption, **options["aim_image"]})
                self.writer.track(shown, **{"name": name, "step": step, "context": {"picture": number}, **options["track"]})
        found.refuse()

    @on_main_process
    def finish(self) -> None:
        """Closes the run."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class DVCLiveTracker(GeneralTracker):
    """A `Live` of the user's, or one that is made with the keywords; `run_name` is the message of its experiment."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        if live is not None and kwargs:
            raise ConfigError(f"dvclive has an object live and {', '.join(kwargs)}: make the Live with them, or give the keywords alone")
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.live = live

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Makes the `Live` where none was given."""
        if self.live is None:
            message = {} if self.run_name is None else {"exp_message": self.run_name}
            self.live = importlib.import_module("dvclive").Live(**{**message, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as parameters."""
        self.live.log_params(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts as metrics of a step, which is ended by it; keywords go to `log_metric`."""
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
        """Writes pictures as `plots/images/<name>/<step>.png`, which is how DVC shows them with a slider."""
        from slipstream.observability.trackers.images import ImagesByName

        found = ImagesByName(values)
        for name, several in found.made.items():
            for number, entry in enumerate(several):
                file = f"{self.live.step if step is None else step}{'' if len(several) == 1 else f'-{number}'}.png"
                self.live.log_image(f"{name}/{file}", entry[:, :, 0] if entry.shape[2] == 1 else entry)
        found.refuse()

    @on_main_process
    def finish(self) -> None:
        """Ends the `Live`: its last files, and, in a repository of DVC, the experiment."""
        if self.live is not None:
            self.live.end()
            self.live = None


class TrackioTracker(TableMixin, ProjectTracker):
    """A run of trackio; keywords go to `trackio.init`, and `run_name` is its project."""

    name = "trackio"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds the settings to the run's configuration, which goes out with the first values."""
        self.run.config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts, and objects of trackio's own as they are."""
        found = sort_values(values)
        own = {name: other for name, other in found.others.items() if type(other).__module__.split(".")[0] == "trackio"}
        if found.numbers or found.texts or own:
            self.run.log({**found.numbers, **found.texts, **own}, step=step, **kwargs)
        raise_if_unsupported(self.name, {name: other for name, other in found.others.items() if name not in own})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `trackio.Image`."""
        from slipstream.observability.trackers.images import ImagesByName, to_three_channels

        image = importlib.import_module("trackio").Image
        shown: dict[str, Any] = {}
        found = ImagesByName(values)
        for name, several in found.made.items():
            for number, entry in enumerate(several):
                shown[name if len(several) == 1 else f"{name}/{number}"] = image(to_three_channels(entry), **kwargs)
        if shown:
            self.run.log(shown, step=step)
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to `trackio.Table`."""
        made = importlib.import_module("trackio").Table(columns=table.columns, data=table.rows, **keywords)
        self.run.log({name: made}, step=step)
