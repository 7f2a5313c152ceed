"""Experiment trackers under Accelerate's names.

The trackers are Slipstream's. What scripts written for Accelerate rely on is added here: a class that lacks an attribute cannot be created,
names are looked up in `LOGGER_TYPE_TO_CLASS`, which scripts change, a tracker keeps the object of its package after `finish`, and a
tracker whose package is not installed is left out with a warning.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from accelerate._forwarding import forward_names
from slipstream import tracking as _trackers
from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.observability.trackers.base import on_main_process
from slipstream.observability.trackers.local import LocalTracker
from slipstream.observability.trackers.registry import (
    LoggerType as _AllTypes,
    get_available_trackers as _installed_trackers,
    missing_account,
)

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.dataclasses": "LoggerType",
        "accelerate.utils.environment": "str_to_bool",
        "accelerate.utils.imports": """is_aim_available is_clearml_available is_comet_ml_available is_dvclive_available
            is_mlflow_available is_swanlab_available is_tensorboard_available is_trackio_available
            is_wandb_available""",
        "accelerate.utils.operations": "listify",
        "accelerate.utils.versions": "compare_versions",
    },
)
_DEFINED_HERE = [
    "AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "GeneralTracker", "LOGGER_TYPE_TO_CLASS", "MLflowTracker",
    "SwanLabTracker", "TensorBoardTracker", "TrackioTracker", "WandBTracker", "filter_trackers", "get_available_trackers",
    "on_main_process", "register_tracker_class",
]  # fmt: skip
__all__ = sorted([*_forwarded, *_DEFINED_HERE])


class GeneralTracker(_trackers.GeneralTracker):
    """The base class of trackers. A subclass has `name`, `requires_logging_directory` and a property `tracker`."""

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if not hasattr(type(self), name)]
        missing = [name for name in missing if name not in vars(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} has no {', no '.join(missing)}: a tracker says its name, whether it needs a folder, and has a "
                "property `tracker` with the object behind it. Define them in the class."
            )
        super().__init__(_blank)


class _KeepsHandle:
    """Keeps the object of the package after `finish`: scripts read files and ids from it at the end of a run."""

    _handle: str
    _ended = False

    def start(self) -> None:
        self._ended = False
        super().start()  # type: ignore[misc]

    def finish(self) -> None:
        if self._ended:
            return
        opened = getattr(self, self._handle)
        try:
            super().finish()  # type: ignore[misc]
        finally:
            self._ended = opened is not None
            setattr(self, self._handle, opened)


class TensorBoardTracker(_KeepsHandle, _trackers.TensorBoardTracker, GeneralTracker):
    """Event files below `logging_dir`; keywords go to the `SummaryWriter`."""


class WandBTracker(_KeepsHandle, _trackers.WandBTracker, GeneralTracker):
    """A run of wandb; keywords go to `wandb.init`."""

    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)


class TrackioTracker(_KeepsHandle, _trackers.TrackioTracker, GeneralTracker):
    """A run of trackio; keywords go to `trackio.init`."""

    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)


class CometMLTracker(_KeepsHandle, _trackers.CometMLTracker, GeneralTracker):
    """An experiment of comet_ml; keywords go to `comet_ml.start`."""

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and texts as others; a step also becomes the current step of the experiment."""
        if step is not None:
            self.experiment.set_step(step)
        super().log(values, step, **kwargs)


class AimTracker(_KeepsHandle, _trackers.AimTracker, GeneralTracker):
    """A run of aim; keywords go to `aim.Run`."""


class MLflowTracker(_KeepsHandle, _trackers.MLflowTracker, GeneralTracker):
    """A run of mlflow. `MLFLOW_NESTED_RUN` decides over `nested_run`, and a parameter that is too long is left out, not cut."""

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
        super().__init__(experiment_name, logging_dir, run_id, tags, nested_run, run_name, description)
        decided = environment().get("MLFLOW_NESTED_RUN")
        if decided is not None:
            from accelerate.utils.environment import str_to_bool

            self.nested_run = bool(str_to_bool(decided))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters; those that mlflow would refuse are named in a warning."""
        limit = self._package.utils.validation.MAX_PARAM_VAL_LENGTH
        long = [name for name, value in values.items() if len(str(value)) > limit]
        if long:
            warnings.warn(f"mlflow accepts at most {limit} characters of a parameter; left out: {', '.join(map(str, long))}", stacklevel=2)
        super().store_init_configuration({name: value for name, value in values.items() if name not in long})


class ClearMLTracker(_KeepsHandle, _trackers.ClearMLTracker, GeneralTracker):
    """A task of clearml; keywords go to `Task.init`."""


class DVCLiveTracker(_KeepsHandle, _trackers.DVCLiveTracker, GeneralTracker):
    """A `Live` of the user, or one that is created with the keywords."""


class SwanLabTracker(_KeepsHandle, _trackers.SwanLabTracker, GeneralTracker):
    """A run of swanlab; keywords go to `swanlab.init`."""

    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)


LOGGER_TYPE_TO_CLASS: dict[str, type[_trackers.GeneralTracker]] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}
"""The class behind each name in `log_with`. `register_tracker_class` adds to it, and scripts may."""


def get_available_trackers() -> list[Any]:
    """Return the trackers whose packages are installed."""
    from accelerate.utils.dataclasses import LoggerType

    return [LoggerType(kind.value) for kind in _installed_trackers() if kind.value in LOGGER_TYPE_TO_CLASS]


def register_tracker_class(tracker_class: type[_trackers.GeneralTracker]) -> None:
    """Make a class known by its `name`, for `log_with="its name"`. One that takes a name that is in use replaces the other."""
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, _trackers.GeneralTracker):
        raise ConfigError(f"register_tracker_class({tracker_class!r}): derive the class from GeneralTracker")
    missing = [name for name in ("name", "requires_logging_directory") if not hasattr(tracker_class, name)]
    if missing:
        raise ConfigError(f"register_tracker_class({tracker_class.__name__}): the class has no {' and no '.join(missing)}")
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"{tracker_class.__name__} replaces {LOGGER_TYPE_TO_CLASS[tracker_class.name].__name__} as the tracker "
            f"{tracker_class.name!r} of log_with",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the names of trackers that can be used, each once, and the user's instances; a package that is missing is a warning."""
    chosen = choose_trackers(log_with, logging_dir)
    return [_as_logger_type(tracker.name) if isinstance(tracker, type) else tracker for tracker in chosen]


def choose_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[Any]:
    """Return the instances and classes that `log_with` names, as `slipstream.Accelerator(log_with=...)` takes them."""
    given = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple | set | frozenset) else [log_with]
    if any(isinstance(choice, str) and str(_plain(choice)) == _AllTypes.ALL for choice in given):
        return [choice for choice in given if isinstance(choice, _trackers.GeneralTracker)] + _all_with_account(logging_dir)
    chosen: list[Any] = []
    for choice in given:
        found = choice if isinstance(choice, _trackers.GeneralTracker) else _find_class(choice, logging_dir)
        if found is not None and found not in chosen:
            chosen.append(found)
    if given and not chosen:
        warnings.warn(f"log_with={log_with!r} has no effect: none of its trackers is installed", stacklevel=3)
    return chosen


def _find_class(choice: Any, logging_dir: Any) -> type[_trackers.GeneralTracker] | None:
    name = _plain(choice)
    if name == _AllTypes.LOCAL:  # Slipstream's own, which Accelerate does not have
        found: type[_trackers.GeneralTracker] | None = LocalTracker
    else:
        found = LOGGER_TYPE_TO_CLASS.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join([_AllTypes.ALL.value, *LOGGER_TYPE_TO_CLASS])
        raise ConfigError(f"log_with={choice!r} is not a tracker: write one of {known}, or an instance of your own GeneralTracker")
    is_known_package = name in _AllTypes._value2member_map_ and found.__module__ == __name__
    if is_known_package and _AllTypes(name) not in _installed_trackers():
        warnings.warn(f"log_with={name!r}: its package is not installed, so this tracker is left out", stacklevel=4)
        return None
    if found.requires_logging_directory and logging_dir is None:
        raise ConfigError(f"Logging with `{name}` requires a `logging_dir`: pass project_dir= to the Accelerator, or in its project_config")
    return found


def _all_with_account(logging_dir: Any) -> list[type[_trackers.GeneralTracker]]:
    """Return the classes that "all" means: installed, with a folder where they need one, and with an account where they need one."""
    chosen = []
    for kind in _installed_trackers():
        found = LOGGER_TYPE_TO_CLASS.get(kind.value)
        if found is None:
            continue
        reason = missing_account(kind.value, environment())
        if reason is None and found.requires_logging_directory and logging_dir is None:
            reason = "it needs a folder (project_dir)"
        if reason is None:
            chosen.append(found)
        else:
            warnings.warn(f"log_with='all' leaves out {kind.value}: {reason}", stacklevel=4)
    return chosen


def _plain(choice: Any) -> Any:
    """Return the text of a name or of a member of an enum."""
    return getattr(choice, "value", choice)


def _as_logger_type(name: str) -> Any:
    from accelerate.utils.dataclasses import LoggerType

    try:
        return LoggerType(name)
    except ValueError:
        return name
