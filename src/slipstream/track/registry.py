"""Which trackers there are, and what `log_with` means.

Names that are unknown, or whose package is not installed, are refused with what to write or to install. A class of the user's is known by
its name from the moment that it is defined: the subclasses of `GeneralTracker` are the register. `"all"` are those that are installed; one
of them that talks to a service takes part where an account or its offline mode is set up, and never asks for one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from slipstream.config.names import nearest
from slipstream.devices.packages import PACKAGES, installed
from slipstream.errors import ConfigError
from slipstream.track.base import GeneralTracker, NullTracker, folder_for

__all__ = ["Chosen", "LoggerType", "filter_trackers", "get_available_trackers", "missing_account", "register_tracker_class", "resolve"]


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
    LoggerType.TRACKIO: ("slipstream.track.trackio", "TrackioTracker"),
    LoggerType.COMETML: ("slipstream.track.comet", "CometMLTracker"),
    LoggerType.AIM: ("slipstream.track.aim", "AimTracker"),
    LoggerType.MLFLOW: ("slipstream.track.mlflow", "MLflowTracker"),
    LoggerType.CLEARML: ("slipstream.track.clearml", "ClearMLTracker"),
    LoggerType.DVCLIVE: ("slipstream.track.dvclive", "DVCLiveTracker"),
    LoggerType.SWANLAB: ("slipstream.track.swanlab", "SwanLabTracker"),
}
"""The trackers of this version, imported when they are asked for."""


@dataclass(frozen=True)
class _Account:
    """Where a service keeps that somebody is known to it, or that it shall stay offline: any of these will do."""

    variables: tuple[str, ...]
    files: tuple[str, ...]
    remedy: str


_ACCOUNTS = {
    LoggerType.WANDB: _Account(
        ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"),
        ("~/.netrc", "~/_netrc"),
        "wandb login, or WANDB_MODE=offline",
    ),
    LoggerType.COMETML: _Account(
        ("COMET_API_KEY", "COMET_START_ONLINE", "COMET_CONFIG"),
        ("~/.comet.config", ".comet.config"),
        "comet login, or COMET_START_ONLINE=0",
    ),
    LoggerType.CLEARML: _Account(
        ("CLEARML_API_ACCESS_KEY", "CLEARML_OFFLINE_MODE", "CLEARML_CONFIG_FILE"),
        ("~/clearml.conf",),
        "clearml-init, or CLEARML_OFFLINE_MODE=1",
    ),
    LoggerType.SWANLAB: _Account(("SWANLAB_API_KEY", "SWANLAB_MODE"), ("~/.swanlab/.netrc",), "swanlab login, or SWANLAB_MODE=offline"),
}
"""The trackers whose runs go to a service unless they are told otherwise."""

_IN_FOLDERS = (LoggerType.LOCAL, LoggerType.TENSORBOARD)
"""The trackers that write files of their own into the logging folder."""

_Given = str | LoggerType | GeneralTracker | type[GeneralTracker]
_Tracker = GeneralTracker | type[GeneralTracker]


class Chosen(list[_Tracker]):
    """What `log_with` means, in order; `optional` are the names that nobody wrote, because they stand for "all"."""

    def __init__(self, trackers: Iterable[_Tracker] = (), optional: Iterable[str] = ()) -> None:
        super().__init__(trackers)
        self.optional = frozenset(optional)


def missing_account(name: str, environ: Mapping[str, str]) -> str | None:
    """Why a tracker cannot run without asking somebody for an account; None where it can, and for those that need none.

    >>> missing_account("wandb", {"WANDB_MODE": "offline"}), missing_account("local", {})
    (None, None)
    >>> missing_account("wandb", {"HOME": "/nowhere"})
    'no account is set up (wandb login, or WANDB_MODE=offline)'
    """
    account = _ACCOUNTS.get(LoggerType(name)) if name in LoggerType._value2member_map_ else None
    if account is None or any(environ.get(variable) for variable in account.variables):
        return None
    home = environ.get("HOME") or environ.get("USERPROFILE") or ""
    if any(Path(file.replace("~", home, 1)).is_file() for file in account.files):
        return None
    return f"no account is set up ({account.remedy})"


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


def resolve(log_with: _Given | Sequence[_Given] | Set[_Given] | None, logging_dir: str | os.PathLike[str] | None) -> Chosen:
    """The trackers that `log_with` names, each once and in order: instances of the user's as they are, and classes to be made.

    >>> [tracker.name for tracker in resolve(["local", LoggerType.LOCAL], "runs")]
    ['local']
    """
    given = _several(log_with)
    found: list[_Tracker] = []
    named: set[str] = set()
    for one in given:
        several = _find(one)
        found.extend(tracker for tracker in several if tracker not in found)
        if not isinstance(one, str) or str(one).lower() != LoggerType.ALL:
            named.update(tracker.name for tracker in several)
    for tracker in found:
        if not isinstance(tracker, type) or not tracker.requires_logging_directory:
            continue
        if logging_dir is None:
            raise ConfigError(f'log_with="{tracker.name}" needs a folder to write to: pass project_dir="..." to the Accelerator')
        if tracker.name in named and tracker.name in _IN_FOLDERS:
            folder_for(tracker.name, logging_dir)
    names = [tracker.name for tracker in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"log_with has several trackers of the name {', '.join(sorted(twice))}: leave all but one out, or rename them")
    return Chosen(found, set(names) - named)


def filter_trackers(
    log_with: _Given | Sequence[_Given] | Set[_Given] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | GeneralTracker]:
    """`log_with` checked: the names of trackers, each once, and the instances of the user's.

    >>> filter_trackers(["local", "local"], "runs")
    ['local']
    """
    return [tracker.name if isinstance(tracker, type) else tracker for tracker in resolve(log_with, logging_dir)]


def _several(log_with: Any) -> list[Any]:
    """What was given, one by one; a set has no order, so the names give it one, which is the same on every process."""
    if isinstance(log_with, set | frozenset):
        return sorted(log_with, key=lambda one: str(getattr(one, "name", one)) if not isinstance(one, str) else str(one))
    return [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple) else [log_with]


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
        raise ConfigError(
            f"log_with={str(given)!r} is not known{_hint(name)}: write one of {_known()}, or an instance of a tracker of yours"
        )
    _check_complete(users[-1])
    return [users[-1]]  # of several definitions, as in a notebook, the last


def _own(kind: LoggerType) -> type[GeneralTracker]:
    if not _is_installed(kind):
        row = PACKAGES[kind.value]
        older = f" before version {row.below}" if row.below else ""
        raise ConfigError(
            f"log_with={kind.value!r} needs the package {row.distributions[0]}{older}, which is not installed: "
            f"pip install 'slipstream[{kind.value.split('_')[0]}]', or pip install {row.distributions[0]}"
        )
    module, name = _HOMES[kind]
    tracker: type[GeneralTracker] = getattr(importlib.import_module(module), name)
    return tracker


def _is_installed(kind: LoggerType) -> bool:
    return kind.value not in PACKAGES or installed(kind.value)


def _known() -> str:
    return ", ".join(_names())


def _names() -> list[str]:
    own = [kind.value for kind in _HOMES]
    return [*own, LoggerType.ALL.value, *dict.fromkeys(one.name for one in _users_classes())]


def _hint(name: str) -> str:
    if "," in name:
        return f" (several names are a list: {[one.strip() for one in name.split(',')]})"
    near = nearest(name, _names())
    return f" (did you mean {' or '.join(near)}?)" if near else ""


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
