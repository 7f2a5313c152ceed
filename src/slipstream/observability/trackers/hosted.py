"""Trackers for the services Weights & Biases, Comet, ClearML, SwanLab and MLflow.

Each creates one run with its own package, on the main process and not before `start`; the package is imported there. Every service has an
offline or local mode: `WANDB_MODE=offline`, `COMET_START_ONLINE=0`, `CLEARML_OFFLINE_MODE=1`, `SWANLAB_MODE=offline`, and the store that
`MLFLOW_TRACKING_URI` names. A ClearML task that is already running is used, and left open at the end. wandb accepts steps in increasing
order only, and warns about values of an earlier step by itself.
"""

from __future__ import annotations

import importlib
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
from slipstream.observability.trackers.base import GeneralTracker, ProjectTracker, TableMixin, on_main_process
from slipstream.observability.trackers.values import Table, flatten, raise_if_unsupported, sort_values, to_number, to_plain

__all__ = ["ClearMLTracker", "CometMLTracker", "MLflowTracker", "SwanLabTracker", "WandBTracker"]


class WandBTracker(TableMixin, ProjectTracker):
    """A run of wandb; keywords go to `wandb.init`, and `run_name` is its project."""

    name = "wandb"
    _own_cells = "wandb"  # pictures and the like in cells are wandb's own business

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds the settings to the run's configuration."""
        self.run.config.update(to_plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers and whatever else wandb draws: texts, lists, histograms, objects of its own; nested names get slashes."""
        self.run.log({name: to_number(value) for name, value in flatten(values).items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name, also as files and as objects of wandb; keywords go to `wandb.Image`."""
        from slipstream.observability.trackers.images import ImagesByName

        image = importlib.import_module("wandb").Image
        found = ImagesByName(values, _wandb_images)
        if shown := {name: [image(entry, **kwargs) for entry in several] for name, several in found.made.items()}:
            self.run.log(shown, step=step)
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to the call that logs it."""
        made = importlib.import_module("wandb").Table(columns=table.columns, data=table.rows)
        self.run.log({name: made}, step=step, **keywords)


def _wandb_images(given: Any) -> list[Any]:
    """Pictures as arrays; what wandb alone knows (a file, an object of its own) as it is."""
    from slipstream.observability.trackers.images import to_images

    several = list(given) if isinstance(given, list | tuple) else [given]
    if any(isinstance(entry, str | Path) or type(entry).__module__.startswith("wandb") for entry in several):
        return several
    return list(to_images(given))


class CometMLTracker(TableMixin, GeneralTracker):
    """An experiment of comet_ml; keywords go to `comet_ml.start`, and `run_name` is its project."""

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.experiment: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment of comet_ml."""
        return self.experiment

    @on_main_process
    def start(self) -> None:
        """Makes the experiment."""
        self.experiment = importlib.import_module("comet_ml").start(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as parameters."""
        self.experiment.log_parameters(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics (keywords go to `log_metrics`), texts as what Comet calls others."""
        found = sort_values(values)
        if found.numbers:
            self.experiment.log_metrics(found.numbers, step=step, **kwargs)
        for name, text in found.texts.items():
            self.experiment.log_other(name, text)
        raise_if_unsupported(self.name, found.others)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `log_image`."""
        from slipstream.observability.trackers.images import ImagesByName, encode_png

        found = ImagesByName(values)
        for name, several in found.made.items():
            for number, entry in enumerate(several):
                shown = name if len(several) == 1 else f"{name}/{number}"
                file = io.BytesIO(encode_png(entry))  # of an array Comet makes a file with matplotlib, which is not always there
                self.experiment.log_image(file, **{"name": f"{shown}.png", "step": step, **kwargs})
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table as a file of comma-separated values, which carries the step in its name; keywords go to `log_table`."""
        file = f"{name}.csv" if step is None else f"{name}-{step}.csv"
        self.experiment.log_table(file, tabular_data=table.rows, headers=table.columns, **keywords)

    @on_main_process
    def finish(self) -> None:
        """Ends the experiment; what is not sent or written yet is waited for."""
        if self.experiment is not None:
            self.experiment.end()
            self.experiment = None


_SPLIT_NAME = re.compile(r"(train|eval|test|val|validation)[_/](.+)")
"""Names of one metric on several parts of the data: they share a chart."""


class ClearMLTracker(TableMixin, GeneralTracker):
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
        self.task.connect_configuration(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, or as single values where there is no step; `train_loss` and `eval/loss` share the chart `loss`."""
        logger = self.task.get_logger()
        found = sort_values(values)
        for name, value in found.numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart_of(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        raise_if_unsupported(self.name, {**found.texts, **found.others}, keeps="numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `report_image`."""
        from slipstream.observability.trackers.images import ImagesByName

        logger = self.task.get_logger()
        found = ImagesByName(values)
        for name, several in found.made.items():
            title, series = _chart_of(name)
            for number, entry in enumerate(several):
                shown = series if len(several) == 1 else f"{series}-{number}"
                logger.report_image(**{"title": title, "series": shown, "iteration": step, "image": entry, **kwargs})
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table, of rows with `columns` or of a data frame; keywords go to `report_table`."""
        title, series = _chart_of(name)
        given = {"title": title, "series": series, "iteration": step, "table_plot": [table.columns, *table.rows], **keywords}
        self.task.get_logger().report_table(**given)

    @on_main_process
    def finish(self) -> None:
        """Closes the task where it was made here."""
        task, self.task = self.task, None
        if task is not None and self._owns:
            task.close()


def _chart_of(name: str) -> tuple[str, str]:
    """The chart that a metric is drawn in, and its line there.

    >>> _chart_of("eval_loss"), _chart_of("test/accuracy"), _chart_of("lr")
    (('loss', 'eval'), ('accuracy', 'test'), ('lr', 'train'))
    """
    part = _SPLIT_NAME.fullmatch(name)
    return (part[2], part[1]) if part else (name, "train")


class SwanLabTracker(ProjectTracker):
    """A run of swanlab; keywords go to `swanlab.init`, and `run_name` is its project."""

    name = "swanlab"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Adds the settings to the run's configuration."""
        self.run.config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as texts, objects of swanlab's own as they are."""
        package = importlib.import_module("swanlab")
        found = sort_values(values)
        own = {name: other for name, other in found.others.items() if type(other).__module__.split(".")[0] == "swanlab"}
        texts = {name: package.Text(text) for name, text in found.texts.items()}
        if found.numbers or texts or own:
            self.run.log({**found.numbers, **texts, **own}, step=step, **kwargs)
        raise_if_unsupported(self.name, {name: other for name, other in found.others.items() if name not in own})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name; keywords go to `swanlab.Image`."""
        from slipstream.observability.trackers.images import ImagesByName, to_three_channels

        image = importlib.import_module("swanlab").Image
        found = ImagesByName(values)
        if shown := {name: [image(to_three_channels(entry), **kwargs) for entry in several] for name, several in found.made.items()}:
            self.run.log(shown, step=step)
        found.refuse()


_logger = logging.getLogger(__name__)
_MLFLOW_BATCH = 100
"""Parameters that MLflow takes in one call."""
_MLFLOW_LONGEST = 6000
"""Characters of a parameter that MLflow takes."""


class MLflowTracker(TableMixin, GeneralTracker):
    """A run of mlflow below an experiment, which is made where there is none; `logging_dir` is then the place of its artifacts.

    MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID go before what is given, because MLflow sets them for jobs that it starts; MLFLOW_TAGS (JSON)
    and MLFLOW_NESTED_RUN count where nothing is given.
    """

    name = "mlflow"
    requires_logging_directory = False

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
        super().__init__()
        given = environment()
        self.experiment_name = given.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_id = given.get("MLFLOW_RUN_ID") or run_id
        self.tags = _mlflow_tags(tags if tags is not None else given.get("MLFLOW_TAGS"))
        self.nested_run = bool(nested_run) or given.get("MLFLOW_NESTED_RUN", "").lower() in ("1", "true", "yes", "on")
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None

    @property
    def tracker(self) -> Any:
        """The run of mlflow."""
        return self.active_run

    @on_main_process
    def start(self) -> None:
        """Finds or makes the experiment, and begins the run in it."""
        mlflow = importlib.import_module("mlflow")
        try:
            experiment_id = self._experiment(mlflow)
        except Exception as error:
            if mlflow.is_tracking_uri_set():
                raise
            first = str(error).strip().split(". ")[0]
            raise ConfigError(
                f"mlflow has no place to keep runs ({first}): set MLFLOW_TRACKING_URI to a server, or install the whole of mlflow "
                "(pip install mlflow), which keeps them in a local database"
            ) from error
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self, mlflow: Any) -> str | None:
        """The number of the experiment, which is made where there is none."""
        if self.experiment_name is None:
            return None
        found = mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(mlflow.create_experiment(self.experiment_name, artifact_location=place))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keeps the settings as parameters; nested ones with slashes in their names, and long texts cut."""
        mlflow = importlib.import_module("mlflow")
        settings = {_mlflow_name(name): str(value) for name, value in flatten(to_plain(values)).items()}
        if long := [name for name, text in settings.items() if len(text) > _MLFLOW_LONGEST]:
            _logger.warning(
                f"mlflow keeps {_MLFLOW_LONGEST} characters of a parameter: {', '.join(long)} {'is' if len(long) == 1 else 'are'} cut"
            )
        pairs = iter({name: text[:_MLFLOW_LONGEST] for name, text in settings.items()}.items())
        while some := dict(islice(pairs, _MLFLOW_BATCH)):
            mlflow.log_params(some)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics; keywords go to `log_metrics`."""
        found = sort_values(values)
        if found.numbers:
            metrics = {_mlflow_name(name): float(value) for name, value in found.numbers.items()}
            importlib.import_module("mlflow").log_metrics(metrics, step=step, **kwargs)
        raise_if_unsupported(self.name, {**found.texts, **found.others}, keeps="numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name, as PNG files below `images` among the artifacts; keywords go to `log_image`."""
        from slipstream.observability.trackers.images import ImagesByName

        mlflow = importlib.import_module("mlflow")
        found = ImagesByName(values)
        for name, several in found.made.items():
            for number, entry in enumerate(several):
                shown = _mlflow_name(name) if len(several) == 1 else f"{_mlflow_name(name)}-{number}"
                place = {"artifact_file": f"images/{shown}{'' if step is None else f'-{step}'}.png"}
                mlflow.log_image(entry, **(kwargs or place))
        found.refuse()

    def _keep_table(self, name: str, table: Table, step: int | None, keywords: dict[str, Any]) -> None:
        """Logs a table as `<name>.json` among the artifacts; with a step, each row has it as a column. Later rows are added."""
        cells = {column: [row[place] for row in table.rows] for place, column in enumerate(table.columns)}
        steps = {} if step is None else {"step": [step] * len(table.rows)}
        importlib.import_module("mlflow").log_table({**steps, **cells}, artifact_file=f"{name}.json", **keywords)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Logs a figure of matplotlib or plotly as an artifact."""
        importlib.import_module("mlflow").log_figure(figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Logs the files of a folder as artifacts."""
        importlib.import_module("mlflow").log_artifacts(local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Logs a file as an artifact."""
        importlib.import_module("mlflow").log_artifact(local_path, artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Ends the run."""
        if self.active_run is not None:
            importlib.import_module("mlflow").end_run()
            self.active_run = None


def _mlflow_name(name: str) -> str:
    """A name as MLflow takes it: letters, digits and _ - . : / and spaces."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _mlflow_tags(given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    try:
        tags = json.loads(given)
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise ConfigError(f'the tags of mlflow, {given!r}, are no dict: write {{"name": "value"}}, as a dict or as JSON (MLFLOW_TAGS)')
    return tags
