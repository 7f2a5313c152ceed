"""Which trackers exist, what `log_with` means, and `Trackers`, which starts, feeds and ends those of one Accelerator.

Unknown names and missing packages raise a `ConfigError` that says what to write or install. A user's class is known by its name as soon
as it is defined. `"all"` means every installed tracker; one that needs an account takes part only where an account or an offline mode is
configured, and never prompts.

Only the main process starts real trackers; the others hold null objects. A tracker that cannot start is an error, except one that only
`log_with="all"` named. A tracker that fails later is reported once for each kind of error and value name, at most twenty times, and
training continues.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.names import nearest
from slipstream.config.sources import environment
from slipstream.devices.packages import PACKAGES, installed
from slipstream.devices.table import StringEnum
from slipstream.errors import ConfigError, StateError
from slipstream.observability.run_dir.folder import RunFolder
from slipstream.observability.trackers.base import GeneralTracker, NullTracker, check_logging_folder
from slipstream.observability.trackers.local import LocalTracker
from slipstream.observability.trackers.values import RejectedValuesError, UnsupportedTypeError, describe_type, fetch_scalars

__all__ = [
    "ChosenTrackers", "LoggerType", "Trackers", "filter_trackers", "get_available_trackers", "missing_account", "register_tracker_class",
    "resolve_trackers", "to_settings",
]


class LoggerType(StringEnum):
    """The names of trackers; `ALL` means all that are installed.

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


_TRACKER_CLASSES = {
    LoggerType.LOCAL: ("slipstream.observability.trackers.local", "LocalTracker"),
    LoggerType.TENSORBOARD: ("slipstream.observability.trackers.on_disk", "TensorBoardTracker"),
    LoggerType.WANDB: ("slipstream.observability.trackers.hosted", "WandBTracker"),
    LoggerType.TRACKIO: ("slipstream.observability.trackers.on_disk", "TrackioTracker"),
    LoggerType.COMETML: ("slipstream.observability.trackers.hosted", "CometMLTracker"),
    LoggerType.AIM: ("slipstream.observability.trackers.on_disk", "AimTracker"),
    LoggerType.MLFLOW: ("slipstream.observability.trackers.hosted", "MLflowTracker"),
    LoggerType.CLEARML: ("slipstream.observability.trackers.hosted", "ClearMLTracker"),
    LoggerType.DVCLIVE: ("slipstream.observability.trackers.on_disk", "DVCLiveTracker"),
    LoggerType.SWANLAB: ("slipstream.observability.trackers.hosted", "SwanLabTracker"),
}
"""The trackers of this version, imported when they are used."""


@dataclass(frozen=True)
class _Account:
    """Variables and files that configure an account or an offline mode; one of them is enough."""

    variables: tuple[str, ...]
    files: tuple[str, ...]
    remedy: str


_ACCOUNTS = {
    LoggerType.WANDB: _Account(
        ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"), ("~/.netrc", "~/_netrc"), "wandb login, or WANDB_MODE=offline"
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
"""The trackers whose runs go to a service unless configured otherwise."""

_IN_FOLDERS = (LoggerType.LOCAL, LoggerType.TENSORBOARD)
"""The trackers that write files of their own into the logging folder."""

_Given = str | LoggerType | GeneralTracker | type[GeneralTracker]
_Tracker = GeneralTracker | type[GeneralTracker]


class ChosenTrackers(list[_Tracker]):
    """The trackers that `log_with` names, in order; `optional` are those that only "all" named."""

    def __init__(self, trackers: Iterable[_Tracker] = (), optional: Iterable[str] = ()) -> None:
        super().__init__(trackers)
        self.optional = frozenset(optional)


def missing_account(name: str, environ: Mapping[str, str]) -> str | None:
    """Return why a tracker cannot run without an account; None if it can, or needs none.

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
    """Return the trackers of this version whose packages are installed.

    >>> LoggerType.LOCAL in get_available_trackers()
    True
    """
    return [kind for kind in LoggerType if kind in _TRACKER_CLASSES and _is_installed(kind)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Check that a class can be used as `log_with="its name"` and return it; also a decorator.

    >>> @register_tracker_class
    ... class Printer(GeneralTracker):
    ...     name = "doctest printer"
    ...     requires_logging_directory = False
    ...     tracker = None
    >>> resolve_trackers("doctest printer", None)[0].name
    'doctest printer'
    """
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, GeneralTracker):
        raise ConfigError(f"register_tracker_class({tracker_class!r}): that is not a class derived from GeneralTracker; derive it from it")
    _check_complete(tracker_class)
    if tracker_class.name in LoggerType._value2member_map_:
        raise ConfigError(
            f"{tracker_class.__qualname__}.name = {tracker_class.name!r} is the name of another tracker: give your class a different name"
        )
    return tracker_class


def resolve_trackers(
    log_with: _Given | Sequence[_Given] | Set[_Given] | None, logging_dir: str | os.PathLike[str] | None
) -> ChosenTrackers:
    """Return the trackers that `log_with` names, each once and in order: the user's instances, and classes to instantiate.

    >>> [tracker.name for tracker in resolve_trackers(["local", LoggerType.LOCAL], "runs")]
    ['local']
    """
    given = _to_list(log_with)
    found: list[_Tracker] = []
    named: set[str] = set()
    for choice in given:
        several = _find_trackers(choice)
        found.extend(tracker for tracker in several if tracker not in found)
        if not isinstance(choice, str) or str(choice).lower() != LoggerType.ALL:
            named.update(tracker.name for tracker in several)
    for tracker in found:
        if not isinstance(tracker, type) or not tracker.requires_logging_directory:
            continue
        if logging_dir is None:
            raise ConfigError(f'log_with="{tracker.name}" needs a folder to write to: pass project_dir="..." to the Accelerator')
        if tracker.name in named and tracker.name in _IN_FOLDERS:
            check_logging_folder(tracker.name, logging_dir)
    names = [tracker.name for tracker in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"log_with has several trackers of the name {', '.join(sorted(twice))}: leave all but one out, or rename them")
    return ChosenTrackers(found, set(names) - named)


def filter_trackers(
    log_with: _Given | Sequence[_Given] | Set[_Given] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | GeneralTracker]:
    """Check `log_with`; return the names of trackers, each once, and the user's instances.

    >>> filter_trackers(["local", "local"], "runs")
    ['local']
    """
    return [tracker.name if isinstance(tracker, type) else tracker for tracker in resolve_trackers(log_with, logging_dir)]


def _to_list(log_with: Any) -> list[Any]:
    """Return `log_with` as a list; a set is sorted by name, so that the order is the same on every process."""
    if isinstance(log_with, set | frozenset):
        return sorted(log_with, key=lambda choice: str(getattr(choice, "name", choice)) if not isinstance(choice, str) else str(choice))
    return [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple) else [log_with]


def _find_trackers(given: Any) -> list[_Tracker]:
    if isinstance(given, GeneralTracker) or (isinstance(given, type) and issubclass(given, GeneralTracker)):
        _check_complete(given)
        return [given]
    if not isinstance(given, str):
        raise ConfigError(
            f"log_with={given!r} is not a tracker: write a name ({', '.join(_known_names())}), or an instance of your own GeneralTracker"
        )
    name = str(given).lower()
    if name == LoggerType.ALL:
        return [_import_tracker(kind) for kind in get_available_trackers()]
    if name in LoggerType._value2member_map_:
        return [_import_tracker(LoggerType(name))]
    users = [klass for klass in _user_classes() if klass.name.lower() == name]
    if not users:
        known = f"{', '.join(_known_names())}, or an instance of your own tracker"
        raise ConfigError(f"log_with={str(given)!r} is not known{_suggest(name)}: write one of {known}")
    _check_complete(users[-1])
    return [users[-1]]  # of several definitions, as in a notebook, the last


def _import_tracker(kind: LoggerType) -> type[GeneralTracker]:
    if not _is_installed(kind):
        row = PACKAGES[kind.value]
        older = f" before version {row.below}" if row.below else ""
        raise ConfigError(
            f"log_with={kind.value!r} needs the package {row.distributions[0]}{older}, which is not installed: "
            f"pip install 'slipstream[{kind.value.split('_')[0]}]', or pip install {row.distributions[0]}"
        )
    module, name = _TRACKER_CLASSES[kind]
    tracker: type[GeneralTracker] = getattr(importlib.import_module(module), name)
    return tracker


def _is_installed(kind: LoggerType) -> bool:
    return kind.value not in PACKAGES or installed(kind.value)


def _known_names() -> list[str]:
    own = [kind.value for kind in _TRACKER_CLASSES]
    return [*own, LoggerType.ALL.value, *dict.fromkeys(klass.name for klass in _user_classes())]


def _suggest(name: str) -> str:
    if "," in name:
        return f" (several names are a list: {[part.strip() for part in name.split(',')]})"
    near = nearest(name, _known_names())
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _user_classes(base: type[GeneralTracker] = GeneralTracker) -> Iterator[type[GeneralTracker]]:
    for subclass in base.__subclasses__():
        if (
            subclass is not NullTracker
            and isinstance(getattr(subclass, "name", None), str)
            and subclass.name not in LoggerType._value2member_map_
        ):
            yield subclass
        yield from _user_classes(subclass)


def _check_complete(tracker: _Tracker) -> None:
    kind = tracker if isinstance(tracker, type) else type(tracker)
    wanted = ("name", "requires_logging_directory", "tracker")
    missing = [name for name in wanted if not hasattr(kind, name) and name not in vars(tracker)]
    if missing:
        raise ConfigError(
            f"the tracker {kind.__qualname__} has no {', no '.join(missing)}: a tracker says its name, whether it needs a folder "
            "(requires_logging_directory), and has a property `tracker` with the object behind it"
        )


_logger = logging.getLogger(__name__)

_MAX_WARNINGS = 20
"""The most warnings about one tracker and method."""
_Keywords = Mapping[str, Mapping[str, Any]] | None


class Trackers:
    """The trackers of one Accelerator, before, during and after a run.

    >>> trackers = Trackers([], None, is_main_process=True)
    >>> trackers.start("demo", {"lr": 0.1})
    >>> trackers.log({"loss": 1.0}, step=1)
    >>> trackers.finish()
    """

    def __init__(
        self,
        chosen: Sequence[GeneralTracker | type[GeneralTracker]],
        logging_dir: str | os.PathLike[str] | None,
        *,
        is_main_process: bool,
    ) -> None:
        self._chosen = list(chosen)
        self._optional = chosen.optional if isinstance(chosen, ChosenTrackers) else frozenset()
        self._logging_dir = logging_dir
        self._is_main = is_main_process
        self._reported: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        """The keys that were reported of a tracker and a method."""
        self._lines: Counter[tuple[str, str]] = Counter()
        self.started: list[GeneralTracker] = []
        """The trackers of the run that is under way: the real ones on the main process, null objects elsewhere."""
        self._stores = False
        """Whether one of them is a real one."""

    @property
    def names(self) -> list[str]:
        """The names of the trackers that were chosen."""
        return [tracker.name for tracker in self._chosen]

    # -- beginning and end ----------------------------------------------------------------------------------------

    def check(self, project: str, config: Any = None, init_kwargs: _Keywords = None) -> None:
        """Raise an error for wrong arguments of `start`, before anything is created; the same on every process."""
        if self.started:
            raise StateError(f"trackers of this Accelerator run already ({', '.join(self.names)}): end_training() ends them first")
        if not isinstance(project, str):
            raise ConfigError(f"init_trackers({project!r}): the first argument is the name of the project, a text")
        self._check_names("init_kwargs", init_kwargs)
        to_settings(config)
        for chosen in self._chosen:
            _check_keywords(chosen, (init_kwargs or {}).get(chosen.name, {}))

    def start(self, project: str, config: Any = None, init_kwargs: _Keywords = None, *, folder: RunFolder | None = None) -> None:
        """Begin a run: `init_kwargs` has keywords for each tracker by its name, and `config` is kept by all of them.

        `folder` is that of the run, where there is one already; the tracker `local` writes into it.
        """
        self.check(project, config, init_kwargs)
        settings = to_settings(config)
        made: list[GeneralTracker] = []
        try:
            for chosen in self._chosen:
                keywords = dict((init_kwargs or {}).get(chosen.name, {}))
                if folder is not None and chosen is LocalTracker:
                    keywords["folder"] = folder
                self._begin(chosen, project, keywords, settings, made)
        except BaseException:
            for tracker in made:
                self._finish(tracker)
            raise
        self.started = made
        self._stores = any(not isinstance(tracker, NullTracker) for tracker in made)

    def _begin(
        self,
        chosen: GeneralTracker | type[GeneralTracker],
        project: str,
        keywords: Mapping[str, Any],
        settings: dict[str, Any] | None,
        made: list[GeneralTracker],
    ) -> None:
        """Create and start one tracker; one of "all" that cannot start is replaced by a null object."""
        optional = chosen.name in self._optional
        reason = missing_account(chosen.name, environment()) if optional and self._is_main and not keywords else None
        if reason is None:
            count = len(made)
            try:
                made.append(self._made(chosen, project, keywords))
                made[-1].start()
                if settings is not None:
                    made[-1].store_init_configuration(settings)
                return
            except Exception as error:
                if not optional:
                    raise
                reason = f"it cannot start ({type(error).__name__}: {error})"
                for tracker in made[count:]:
                    self._finish(tracker)
                del made[count:]
        self._warn(chosen.name, "start", [(reason,)], f"log_with='all' leaves out {chosen.name}: {reason}")
        made.append(NullTracker(chosen.name))

    def _made(self, chosen: GeneralTracker | type[GeneralTracker], project: str, keywords: Mapping[str, Any]) -> GeneralTracker:
        if not self._is_main and chosen.main_process_only:
            return NullTracker(chosen.name)
        if isinstance(chosen, GeneralTracker):
            return chosen
        make: Callable[..., GeneralTracker] = chosen
        return make(project, self._logging_dir, **keywords) if chosen.requires_logging_directory else make(project, **keywords)

    def finish(self) -> None:
        """End every tracker; a second time it does nothing."""
        ending, self.started, self._stores = self.started, [], False
        for tracker in ending:
            self._finish(tracker)

    # -- a run ----------------------------------------------------------------------------------------------------

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: _Keywords = None) -> None:
        """Send values to every tracker; `log_kwargs` has keywords for each by its name.

        Tensors of one element are fetched from their device together: the call waits for it once, on processes with a tracker.
        """
        started = self.started
        if len(started) == 1 and type(local := started[0]) is LocalTracker and type(values) is dict and log_kwargs is None:
            try:
                if local.log_numbers(values, step):  # the usual line, without the steps below
                    return
            except Exception as error:
                self._failed(local, "log", error)
                return
        if not isinstance(values, Mapping):
            raise ConfigError(f'log({values!r}): values are a dict of names, as in log({{"loss": 0.5}}, step=1)')
        if self._stores:
            values = dict(fetch_scalars(values))
        self._send("log", "values", (values,), {}, step, log_kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, log_kwargs: _Keywords = None) -> None:
        """Send images by name (one, a list, or a batch each) to every tracker that stores images; the others are named once."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f'log_images() has {describe_type(values)}: pictures are a dict of names, as in log_images({{"sample": picture}}, step=1)'
            )
        self._send("log_images", "pictures", (values,), {}, step, log_kwargs)

    def log_table(self, table_name: str, step: int | None = None, log_kwargs: _Keywords = None, **table: Any) -> None:
        """Send a table to every tracker that stores tables; the others are named once. `table` are arguments of `make_table`."""
        if not isinstance(table_name, str):
            raise ConfigError(f'log_table({table_name!r}): the first argument is the name of the table, as in log_table("answers", ...)')
        if isinstance(table.get("data"), Iterator):
            table["data"] = list(table["data"])  # an iterator can be read once, and there may be several trackers
        self._send("log_table", "tables", (table_name,), table, step, log_kwargs)

    def _send(
        self, verb: str, what: str, given: tuple[Any, ...], named: Mapping[str, Any], step: int | None, log_kwargs: _Keywords
    ) -> None:
        if log_kwargs is not None:
            self._check_names("log_kwargs", log_kwargs)
        if not self.started:
            self._warn_nowhere(verb)
        step = step if step is None or type(step) is int else _to_int_step(step)
        for tracker in self.started:
            method = getattr(tracker, verb, None)
            if method is None:
                self._warn(tracker.name, verb, [("none",)], f"the tracker {tracker.name} does not store {what}: {verb}() skips it")
                continue
            try:
                method(*given, **named, step=step, **(log_kwargs or {}).get(tracker.name, {}))
            except Exception as error:
                self._failed(tracker, verb, error, given[0] if verb == "log_table" else "")

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, or, with `unwrap`, the object of the package behind it."""
        wanted = str(getattr(name, "value", name))
        for tracker in self.started:
            if tracker.name == wanted:
                return getattr(tracker, "tracker", None) if unwrap else tracker
        running = ", ".join(tracker.name for tracker in self.started) or "none: call init_trackers first"
        raise StateError(f"get_tracker({wanted!r}): no such tracker runs; there is {running}")

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def _check_names(self, what: str, keywords: Mapping[str, Any] | None) -> None:
        if keywords is None:
            return
        if not isinstance(keywords, Mapping):
            raise ConfigError(f'{what}={keywords!r} is not a dict: write keywords under the tracker name, as in {{"wandb": {{...}}}}')
        unknown = sorted(set(map(str, keywords)) - set(self.names))
        if unknown:
            there = f"{', '.join(self.names)}: use {'that name' if len(self.names) == 1 else 'those names'}"
            raise ConfigError(f"{what} has {', '.join(unknown)}, but log_with has {there if self.names else 'no tracker'}")
        for name, some in keywords.items():
            if not isinstance(some, Mapping) or not all(isinstance(key, str) for key in some):
                raise ConfigError(
                    f'{what}: the value of {name}, {some!r}, is not a dict of keywords: write {{"{name}": {{"a": 1}}}}'
                )

    def _finish(self, tracker: GeneralTracker) -> None:
        try:
            tracker.finish()
        except Exception as error:
            self._failed(tracker, "finish", error)

    def _failed(self, tracker: GeneralTracker, verb: str, error: Exception, name: str = "") -> None:
        """Log an error of a tracker, once for each kind of error and name of a value."""
        kind = type(error).__name__
        if isinstance(error, RejectedValuesError):
            fresh = [rejected for rejected in error.wrong if (kind, rejected) not in self._reported.get((tracker.name, verb), ())]
            if fresh:
                by = "" if isinstance(error, UnsupportedTypeError) else f"tracker {tracker.name}, "
                self._warn(tracker.name, verb, [(kind, rejected) for rejected in fresh], f"{error.text(fresh)} ({by}reported once)")
            return
        text = f"the tracker {tracker.name} failed in {verb} ({kind}: {error}); the run continues, and this is reported once"
        self._warn(tracker.name, verb, [(kind, name, str(getattr(error, "errno", "")))], text)

    def _warn_nowhere(self, verb: str) -> None:
        if self._chosen and self._is_main:
            names = ", ".join(self.names)
            self._warn(
                "all", verb, [("nowhere",)], f"{verb}() goes nowhere: trackers ({names}) run from init_trackers(...) to end_training()"
            )

    def _warn(self, tracker: str, verb: str, keys: Sequence[tuple[str, ...]], text: str) -> None:
        """Log a warning about keys none of which was reported before."""
        reported = self._reported.setdefault((tracker, verb), set())
        if reported.intersection(keys) or self._lines[tracker, verb] >= _MAX_WARNINGS:
            return
        reported.update(keys)
        self._lines[tracker, verb] += 1
        is_last = self._lines[tracker, verb] == _MAX_WARNINGS
        _logger.warning(f"{text}; further ones of {tracker} in {verb} are not reported" if is_last else text)


def _check_keywords(kind: GeneralTracker | type[GeneralTracker], keywords: Mapping[str, Any]) -> None:
    """Raise an error for keywords that a class does not accept; a class that passes them on accepts all."""
    if not isinstance(kind, type):
        if keywords:
            raise ConfigError(f"init_kwargs has {', '.join(keywords)} for {kind.name}, which is an object already: make it with them")
        return
    parameters = list(inspect.signature(kind).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    ours = {"folder"} if kind is LocalTracker else set()  # the Accelerator sets the folder of the run
    known = [parameter.name for parameter in parameters[2 if kind.requires_logging_directory else 1 :] if parameter.name not in ours]
    if unknown := [name for name in keywords if name not in known]:
        raise ConfigError(
            f"init_kwargs has {', '.join(unknown)} for {kind.name}, which takes {', '.join(known) or 'no keyword'}: use "
            f"{'that' if len(known) == 1 else 'those'}, or leave {'it' if len(unknown) == 1 else 'them'} out"
        )


def _to_int_step(step: Any) -> int:
    """Return a step as an int; raise an error if it is not a whole number."""
    try:
        whole = int(step)
        if whole == step:
            return whole
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"step={step!r} is not a whole number: a step counts what was done, as in log(values, step=3)")


def to_settings(config: Any) -> dict[str, Any] | None:
    """Return settings as a dict: of a mapping, or of an object with attributes such as `argparse.Namespace` or a dataclass.

    >>> from types import SimpleNamespace
    >>> to_settings(SimpleNamespace(lr=0.1))
    {'lr': 0.1}
    """
    if config is None:
        return None
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "__dataclass_fields__") and not isinstance(config, type):
        return {name: getattr(config, name, None) for name in config.__dataclass_fields__}
    if hasattr(config, "__dict__") and not isinstance(config, type) and not callable(config):
        return dict(vars(config))
    raise ConfigError(f"init_trackers(config={config!r}): the settings of a run are a dict, or an object with attributes")
