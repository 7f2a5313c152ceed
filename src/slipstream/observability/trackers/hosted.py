"""Trackers for the services Weights & Biases, Comet, ClearML, SwanLab and MLflow.

Each creates one run with its own package, on the main process and not before `start`; the package is imported there. Every service has an
offline or local mode: `WANDB_MODE=offline`, `COMET_START_ONLINE=0`, `CLEARML_OFFLINE_MODE=1`, `SWANLAB_MODE=offline`, and the store that
`MLFLOW_TRACKING_URI` names. A ClearML task that is already running is used, and left open at the end. wandb accepts steps in increasing
order only, and warns about values of an earlier step by itself.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.observability.trackers.base import PackageTracker, TableMixin, on_main_process
from slipstream.observability.trackers.images import ImagesByName, encode_png, to_three_channels
from slipstream.observability.trackers.values import Table, flatten, raise_if_unsupported, sort_values, to_number, to_plain

__all__ = ["ClearMLTracker", "CometMLTracker", "MLflowTracker", "SwanLabTracker", "WandBTracker"]


class WandBTracker(TableMixin, PackageTracker):
    """A run of wandb; keywords go to `wandb.init`, and `run_name` is its project."""

    name = "wandb"
    run: Any
    _own_cells = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the settings to the run's configuration."""
        self.run.config.update(to_plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and everything else that wandb draws: texts, lists, histograms, its own objects; nested names get slashes."""
        self.run.log({name: to_number(value) for name, value in flatten(values).items()}, step=step, **kwargs)

    def _read_images(self, given: Any) -> list[Any]:
        """Return files and objects of wandb as they are, other images as arrays."""
        several = list(given) if isinstance(given, list | tuple) else [given]
        if any(isinstance(image, str | Path) or type(image).__module__.startswith("wandb") for image in several):
            return several
        return super()._read_images(given)

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        if shown := {name: [self._package.Image(image, **keywords) for image in several] for name, several in images.made.items()}:
            self.run.log(shown, step=step)

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        self.run.log({name: self._package.Table(columns=table.columns, data=table.rows)}, step=step, **keywords)


class CometMLTracker(TableMixin, PackageTracker):
    """An experiment of comet_ml; keywords go to `comet_ml.start`, and `run_name` is its project."""

    name = "comet_ml"
    experiment: Any
    _handle = "experiment"

    def _create(self) -> Any:
        return self._package.start(**{"project_name": self.run_name, **self.init_kwargs})

    def _close(self, opened: Any) -> None:
        opened.end()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters."""
        self.experiment.log_parameters(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics (keywords go to `log_metrics`), texts as what Comet calls others."""
        found = sort_values(values)
        if found.numbers:
            self.experiment.log_metrics(found.numbers, step=step, **kwargs)
        for name, text in found.texts.items():
            self.experiment.log_other(name, text)
        raise_if_unsupported(self.name, found.others)

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        for name, image in images.numbered("/"):
            file = io.BytesIO(encode_png(image))  # Comet turns an array into a file with matplotlib, which may not be installed
            self.experiment.log_image(file, **{"name": f"{name}.png", "step": step, **keywords})

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Log a table as a file of comma-separated values with the step in its name."""
        file = f"{name}.csv" if step is None else f"{name}-{step}.csv"
        self.experiment.log_table(file, tabular_data=table.rows, headers=table.columns, **keywords)


_SPLIT_NAME = re.compile(r"(train|eval|test|val|validation)[_/](.+)")
"""Names of one metric on several splits of the data: they share a chart."""


class ClearMLTracker(TableMixin, PackageTracker):
    """A task of clearml; keywords go to `Task.init`, and `run_name` is its project and task (or CLEARML_PROJECT, CLEARML_TASK)."""

    name = "clearml"
    task: Any
    _handle = "task"
    _owns = True

    def _create(self) -> Any:
        """Create the task, or take the one that is running."""
        running = self._package.Task.current_task()
        self._owns = running is None
        if running is not None:
            return running
        given = environment()
        project, task = given.get("CLEARML_PROJECT") or self.run_name, given.get("CLEARML_TASK") or self.run_name
        return self._package.Task.init(**{"project_name": project, "task_name": task, **self.init_kwargs})

    def _close(self, opened: Any) -> None:
        if self._owns:
            opened.close()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as a configuration of the task."""
        self.task.connect_configuration(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, or as single values without a step; `train_loss` and `eval/loss` share the chart `loss`."""
        logger = self.task.get_logger()
        found = sort_values(values)
        for name, value in found.numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart_of(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        raise_if_unsupported(self.name, {**found.texts, **found.others}, keeps="numbers")

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        logger = self.task.get_logger()
        for name, several in images.made.items():
            title, series = _chart_of(name)
            for number, image in enumerate(several):
                shown = series if len(several) == 1 else f"{series}-{number}"
                logger.report_image(**{"title": title, "series": shown, "iteration": step, "image": image, **keywords})

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        title, series = _chart_of(name)
        given = {"title": title, "series": series, "iteration": step, "table_plot": [table.columns, *table.rows], **keywords}
        self.task.get_logger().report_table(**given)


def _chart_of(name: str) -> tuple[str, str]:
    """Return the chart that a metric is drawn in, and its line there.

    >>> _chart_of("eval_loss"), _chart_of("test/accuracy"), _chart_of("lr")
    (('loss', 'eval'), ('accuracy', 'test'), ('lr', 'train'))
    """
    part = _SPLIT_NAME.fullmatch(name)
    return (part[2], part[1]) if part else (name, "train")


class SwanLabTracker(PackageTracker):
    """A run of swanlab; keywords go to `swanlab.init`, and `run_name` is its project."""

    name = "swanlab"
    run: Any

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, texts as texts, objects of swanlab as they are."""
        found = sort_values(values, own="swanlab")
        texts = {name: self._package.Text(text) for name, text in found.texts.items()}
        if shown := {**found.numbers, **texts, **found.own}:
            self.run.log(shown, step=step, **kwargs)
        raise_if_unsupported(self.name, found.others)

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        make = self._package.Image
        if shown := {name: [make(to_three_channels(image), **keywords) for image in several] for name, several in images.made.items()}:
            self.run.log(shown, step=step)


_logger = logging.getLogger(__name__)
_MLFLOW_BATCH = 100
"""The most parameters that MLflow accepts in one call."""
_MLFLOW_MAX_LENGTH = 6000
"""The most characters of a parameter that MLflow accepts."""


class MLflowTracker(TableMixin, PackageTracker):
    """A run of mlflow below an experiment, which is created if it does not exist; `logging_dir` is then the place of its artifacts.

    MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID override arguments, because MLflow sets them for jobs that it starts; MLFLOW_TAGS (JSON) and
    MLFLOW_NESTED_RUN are used if the argument is not given.
    """

    name = "mlflow"
    active_run: Any
    _handle = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        given = environment()
        self.experiment_name = given.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = given.get("MLFLOW_RUN_ID") or run_id
        self.tags = _mlflow_tags(tags if tags is not None else given.get("MLFLOW_TAGS"))
        self.nested_run = bool(nested_run) or given.get("MLFLOW_NESTED_RUN", "").lower() in ("1", "true", "yes", "on")
        self.description = description

    def _create(self) -> Any:
        mlflow = self._package
        try:
            experiment_id = self._experiment_id()
        except Exception as error:
            if mlflow.is_tracking_uri_set():
                raise
            first = str(error).strip().split(". ")[0]
            raise ConfigError(
                f"mlflow cannot store runs ({first}): set MLFLOW_TRACKING_URI to a server, or install the full mlflow package "
                "(pip install mlflow), which stores them in a local database"
            ) from error
        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment_id(self) -> str | None:
        """Return the id of the experiment, which is created if it does not exist."""
        if self.experiment_name is None:
            return None
        found = self._package.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(self._package.create_experiment(self.experiment_name, artifact_location=place))

    def _close(self, opened: Any) -> None:
        self._package.end_run()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters; nested ones with slashes in their names, and long texts cut."""
        settings = {_mlflow_name(name): str(value) for name, value in flatten(to_plain(values)).items()}
        if long := [name for name, text in settings.items() if len(text) > _MLFLOW_MAX_LENGTH]:
            _logger.warning(
                f"mlflow keeps {_MLFLOW_MAX_LENGTH} characters of a parameter: {', '.join(long)} {'is' if len(long) == 1 else 'are'} cut"
            )
        pairs = iter({name: text[:_MLFLOW_MAX_LENGTH] for name, text in settings.items()}.items())
        while batch := dict(islice(pairs, _MLFLOW_BATCH)):
            self._package.log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; keywords go to `log_metrics`."""
        found = sort_values(values)
        if found.numbers:
            metrics = {_mlflow_name(name): float(value) for name, value in found.numbers.items()}
            self._package.log_metrics(metrics, step=step, **kwargs)
        raise_if_unsupported(self.name, {**found.texts, **found.others}, keeps="numbers")

    def _keep_images(self, images: ImagesByName, step: int | None, keywords: dict[str, Any]) -> None:
        """Log images as PNG files below `images` among the artifacts."""
        for name, image in images.numbered("-"):
            place = {"artifact_file": f"images/{_mlflow_name(name)}{'' if step is None else f'-{step}'}.png"}
            self._package.log_image(image, **(keywords or place))

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Log a table as `<name>.json` among the artifacts; with a step, each row has it as a column. Later rows are appended."""
        cells = {column: [row[place] for row in table.rows] for place, column in enumerate(table.columns)}
        steps = {} if step is None else {"step": [step] * len(table.rows)}
        self._package.log_table({**steps, **cells}, artifact_file=f"{name}.json", **keywords)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure of matplotlib or plotly as an artifact."""
        self._package.log_figure(figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log the files of a folder as artifacts."""
        self._package.log_artifacts(local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file as an artifact."""
        self._package.log_artifact(local_path, artifact_path)


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits and _ - . : / and spaces."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _mlflow_tags(given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    try:
        tags = json.loads(given)
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise ConfigError(f'the tags of mlflow, {given!r}, are not a dict: write {{"name": "value"}}, as a dict or as JSON (MLFLOW_TAGS)')
    return tags
