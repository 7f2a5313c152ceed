"""Which trackers there are, and what `log_with` means.

Names of trackers that this version has not, that are unknown, or whose package is not installed are refused with what to write or to
install. A class of the user's is known by its name from the moment that it is defined: the subclasses of `GeneralTracker` are the register.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from slipstream.devices.packages import PACKAGES, installed
from slipstream.errors import ConfigError
from slipstream.track.base import GeneralTracker, NullTracker

__all__ = ["LoggerType", "filter_trackers", "get_available_trackers", "register_tracker_class", "resolve"]


class LoggerType(str, Enum):
    """The names of trackers; `ALL` stands for those that are installed.

    >>> str(LoggerType.WANDB), LoggerType("tensorboard") is LoggerType.TENSORBOARD
    ('wandb', True)
    """

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    LOCAL = "local"

    def __str__(self) -> str:
        return self.value


_HOMES = {
    LoggerType.LOCAL: ("slipstream.track.local", "LocalTracker"),
    LoggerType.TENSORBOARD: ("slipstream.track.tensorboard", "TensorBoardTracker"),
    LoggerType.WANDB: ("slipstream.track.wandb", "WandBTracker"),
}
"""The trackers of this version, imported when they are asked for."""
_LATER = frozenset(LoggerType) - {LoggerType.ALL} - set(_HOMES)

_Given = str | LoggerType | GeneralTracker | type[GeneralTracker]
_Tracker = GeneralTracker | type[GeneralTracker]


def get_available_trackers() -> list[LoggerType]:
    """The trackers of this version whose packages are installed.

    >>> LoggerType.LOCAL in get_available_trackers()
    True
    """
    return [kind for kind in LoggerType if kind in _HOMES and _is_installed(kind)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Checks that a class of yours can be used as `log_with="its name"`, and gives it back: also a decorator.

    >>> @register_tracker_class
    ... class Printer(GeneralTracker):
    ...     name = "doctest printer"
    ...     requires_logging_directory = False
    ...     tracker = None
    >>> resolve("doctest printer", None)[0].name
    'doctest printer'
    """
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, GeneralTracker):
        raise ConfigError(f"register_tracker_class({tracker_class!r}): that is not a class derived from GeneralTracker; derive it from it")
    _check_complete(tracker_class)
    if tracker_class.name in LoggerType._value2member_map_:
        raise ConfigError(
            f"{tracker_class.__qualname__}.name = {tracker_class.name!r} is the name of another tracker: give your class a name of its own"
        )
    return tracker_class


def resolve(
    log_with: _Given | Sequence[_Given] | None, logging_dir: str | os.PathLike[str] | None
) -> list[GeneralTracker | type[GeneralTracker]]:
    """The trackers that `log_with` names, each once and in order: instances of the user's as they are, and classes to be made.

    >>> [tracker.name for tracker in resolve(["local", LoggerType.LOCAL], "runs")]
    ['local']
    """
    given = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    found: list[_Tracker] = []
    for one in given:
        for tracker in _find(one):
            if tracker not in found:
                found.append(tracker)
    for tracker in found:
        if isinstance(tracker, type) and tracker.requires_logging_directory and logging_dir is None:
            raise ConfigError(f'log_with="{tracker.name}" needs a folder to write to: pass project_dir="..." to the Accelerator')
    names = [tracker.name for tracker in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"log_with has several trackers of the name {', '.join(sorted(twice))}: leave all but one out, or rename them")
    return found


def filter_trackers(
    log_with: _Given | Sequence[_Given] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | GeneralTracker]:
    """`log_with` checked: the names of trackers, each once, and the instances of the user's.

    >>> filter_trackers(["local", "local"], "runs")
    ['local']
    """
    return [tracker.name if isinstance(tracker, type) else tracker for tracker in resolve(log_with, logging_dir)]


def _find(given: Any) -> list[_Tracker]:
    if isinstance(given, GeneralTracker) or (isinstance(given, type) and issubclass(given, GeneralTracker)):
        _check_complete(given)
        return [given]
    if not isinstance(given, str):
        raise ConfigError(f"log_with={given!r} is no tracker: write a name ({_known()}), or an instance of a GeneralTracker of yours")
    name = str(given).lower()
    if name == LoggerType.ALL:
        return [_own(kind) for kind in get_available_trackers()]
    if name in LoggerType._value2member_map_:
        return [_own(LoggerType(name))]
    users = [one for one in _users_classes() if one.name.lower() == name]
    if not users:
        raise ConfigError(f"log_with={str(given)!r} is not known: write one of {_known()}, or an instance of a tracker of yours")
    _check_complete(users[-1])
    return [users[-1]]  # of several definitions, as in a notebook, the last


def _own(kind: LoggerType) -> type[GeneralTracker]:
    if kind in _LATER:
        raise ConfigError(
            f"log_with={kind.value!r}: this version has no tracker for it yet; write one of {_known()}, or derive one from GeneralTracker"
        )
    if not _is_installed(kind):
        remedy = PACKAGES[kind.value].distributions[0]
        raise ConfigError(f"log_with={kind.value!r} needs a package that is not installed: pip install {remedy}")
    module, name = _HOMES[kind]
    tracker: type[GeneralTracker] = getattr(importlib.import_module(module), name)
    return tracker


def _is_installed(kind: LoggerType) -> bool:
    return kind.value not in PACKAGES or installed(kind.value)


def _known() -> str:
    return ", ".join([*(kind.value for kind in _HOMES), *dict.fromkeys(one.name for one in _users_classes())])


def _users_classes(base: type[GeneralTracker] = GeneralTracker) -> Iterator[type[GeneralTracker]]:
    for one in base.__subclasses__():
        if one is not NullTracker and isinstance(getattr(one, "name", None), str) and one.name not in LoggerType._value2member_map_:
            yield one
        yield from _users_classes(one)


def _check_complete(tracker: _Tracker) -> None:
    kind = tracker if isinstance(tracker, type) else type(tracker)
    wanted = ("name", "requires_logging_directory", "tracker")
    missing = [name for name in wanted if not hasattr(kind, name) and name not in vars(tracker)]
    if missing:
        raise ConfigError(
            f"the tracker {kind.__qualname__} has no {', no '.join(missing)}: a tracker says its name, whether it needs a folder "
            "(requires_logging_directory), and has a property `tracker` with the object behind it"
        )
