"""MLflow: one run of the package `mlflow` (or `mlflow-skinny`), in the store that MLFLOW_TRACKING_URI names, or a local one."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.track.base import GeneralTracker, on_main_process
from slipstream.track.plain import flat, plain
from slipstream.track.shared import KeepsTables
from slipstream.track.tables import Table
from slipstream.track.values import refuse, sort_values

__all__ = ["MLflowTracker"]

_logger = logging.getLogger(__name__)
_BATCH = 100
"""Parameters that MLflow takes in one call."""
_LONGEST = 6000
"""Characters of a parameter that MLflow takes."""


class MLflowTracker(KeepsTables, GeneralTracker):
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
        self.tags = _tags(tags if tags is not None else given.get("MLFLOW_TAGS"))
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
        settings = {_name(name): str(one) for name, one in flat(plain(values)).items()}
        if long := [name for name, text in settings.items() if len(text) > _LONGEST]:
            _logger.warning(f"mlflow keeps {_LONGEST} characters of a parameter: {', '.join(long)} {'is' if len(long) == 1 else 'are'} cut")
        pairs = iter({name: text[:_LONGEST] for name, text in settings.items()}.items())
        while some := dict(islice(pairs, _BATCH)):
            mlflow.log_params(some)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics; keywords go to `log_metrics`."""
        found = sort_values(values)
        if found.numbers:
            metrics = {_name(name): float(value) for name, value in found.numbers.items()}
            importlib.import_module("mlflow").log_metrics(metrics, step=step, **kwargs)
        refuse(self.name, {**found.texts, **found.others}, keeps="numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs pictures by name, as PNG files below `images` among the artifacts; keywords go to `log_image`."""
        from slipstream.track.pictures import SortedPictures

        mlflow = importlib.import_module("mlflow")
        found = SortedPictures(values)
        for name, several in found.made.items():
            for number, one in enumerate(several):
                shown = _name(name) if len(several) == 1 else f"{_name(name)}-{number}"
                place = {"artifact_file": f"images/{shown}{'' if step is None else f'-{step}'}.png"}
                mlflow.log_image(one, **(kwargs or place))
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


def _name(name: str) -> str:
    """A name as MLflow takes it: letters, digits and _ - . : / and spaces."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _tags(given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    try:
        tags = json.loads(given)
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise ConfigError(f'the tags of mlflow, {given!r}, are no dict: write {{"name": "value"}}, as a dict or as JSON (MLFLOW_TAGS)')
    return tags
