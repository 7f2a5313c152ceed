"""The trackers of one `Accelerator`: started together, logged to together, ended together.

Only the main process starts the real ones; the others hold null objects, so every call may be made everywhere. A tracker that cannot
start is an error, because a run whose numbers go nowhere is found too late; one that only `log_with="all"` named says so and is left out.
One that fails later says so once, with its name, and the training goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.config.sources import environment
from slipstream.errors import ConfigError, StateError
from slipstream.runs.folder import RunFolder
from slipstream.track.base import GeneralTracker, NullTracker
from slipstream.track.local import LocalTracker
from slipstream.track.registry import Chosen, missing_account
from slipstream.track.values import NotANumber

__all__ = ["Trackers", "settings_of"]

_logger = logging.getLogger(__name__)

_Keywords = Mapping[str, Mapping[str, Any]] | None


class Trackers:
    """What `log_with` resolved to (`registry.resolve`), before, during and after a run.

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
        self._optional = chosen.optional if isinstance(chosen, Chosen) else frozenset()
        self._logging_dir = logging_dir
        self._is_main = is_main_process
        self._said: set[tuple[str, ...]] = set()
        self.started: list[GeneralTracker] = []
        """The trackers of the run that is under way: the real ones on the main process, null objects elsewhere."""

    @property
    def names(self) -> list[str]:
        """The names of the trackers that were chosen."""
        return [tracker.name for tracker in self._chosen]

    # -- beginning and end ----------------------------------------------------------------------------------------

    def start(self, project: str, config: Any = None, init_kwargs: _Keywords = None, *, folder: RunFolder | None = None) -> None:
        """Begins a run: `init_kwargs` has keywords for each tracker by its name, and `config` is kept by all of them.

        `folder` is that of the run, where there is one already; the tracker `local` writes into it.
        """
        if self.started:
            raise StateError(f"trackers of this Accelerator run already ({', '.join(self.names)}): end_training() ends them first")
        if not isinstance(project, str):
            raise ConfigError(f"init_trackers({project!r}): the first argument is the name of the project, a text")
        self._check_names("init_kwargs", init_kwargs)
        settings = settings_of(config)
        made: list[GeneralTracker] = []
        try:
            for chosen in self._chosen:
                keywords = dict((init_kwargs or {}).get(chosen.name, {}))
                if folder is not None and chosen is LocalTracker:
                    keywords["folder"] = folder
                self._begin(chosen, project, keywords, settings, made)
        except BaseException:
            for tracker in made:
                self._safely(tracker, "finish", tracker.finish)
            raise
        self.started = made

    def _begin(
        self,
        chosen: GeneralTracker | type[GeneralTracker],
        project: str,
        keywords: Mapping[str, Any],
        settings: dict[str, Any] | None,
        made: list[GeneralTracker],
    ) -> None:
        """One tracker, made and started; one of "all" that cannot is replaced by a null object."""
        if chosen.name not in self._optional:
            made.append(self._made(chosen, project, keywords))
            _start(made[-1], settings)
            return
        reason = missing_account(chosen.name, environment()) if self._is_main and not keywords else None
        tracker: GeneralTracker | None = None
        if reason is None:
            try:
                tracker = self._made(chosen, project, keywords)
                _start(tracker, settings)
            except Exception as error:
                reason = f"it cannot start ({type(error).__name__}: {error})"
        if reason is not None:
            if tracker is not None:
                self._safely(tracker, "finish", tracker.finish)
            self._say((chosen.name, "start"), f"log_with='all' goes without {chosen.name}: {reason}")
        made.append(tracker if reason is None and tracker is not None else NullTracker(chosen.name))

    def _made(self, chosen: GeneralTracker | type[GeneralTracker], project: str, keywords: Mapping[str, Any]) -> GeneralTracker:
        if not self._is_main and chosen.main_process_only:
            return NullTracker(chosen.name)
        if isinstance(chosen, GeneralTracker):
            if keywords:
                raise ConfigError(f"init_kwargs has {', '.join(keywords)} for {chosen.name}, which is an object already: make it with them")
            return chosen
        make: Callable[..., GeneralTracker] = chosen
        return make(project, self._logging_dir, **keywords) if chosen.requires_logging_directory else make(project, **keywords)

    def finish(self) -> None:
        """Ends every tracker; a second time it does nothing."""
        ending, self.started = self.started, []
        for tracker in ending:
            self._safely(tracker, "finish", tracker.finish)

    # -- a run ----------------------------------------------------------------------------------------------------

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: _Keywords = None) -> None:
        """Sends values to every tracker; `log_kwargs` has keywords for each by its name."""
        if log_kwargs:
            self._check_names("log_kwargs", log_kwargs)
        if not self.started:
            self._say_nowhere("log")
        if type(values) is not dict and not isinstance(values, Mapping):
            raise ConfigError(f'log({values!r}): values are a dict of names, as in log({{"loss": 0.5}}, step=1)')
        if step is not None and type(step) is not int:
            step = _whole(step)
        for tracker in self.started:
            try:
                if log_kwargs:
                    tracker.log(values, step=step, **log_kwargs.get(tracker.name, {}))
                else:
                    tracker.log(values, step=step)
            except Exception as error:
                self._failed(tracker, "log", error)

    def log_images(self, values: dict[str, Any], step: int | None = None, log_kwargs: _Keywords = None) -> None:
        """Sends pictures by name (one, a list, or a batch each) to every tracker that keeps pictures; the others are named once."""
        self._send("log_images", "pictures", (values,), {}, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: _Keywords = None,
    ) -> None:
        """Sends a table, rows with `columns` or a data frame, to every tracker that keeps tables; the others are named once."""
        self._send("log_table", "tables", (table_name,), {"columns": columns, "data": data, "dataframe": dataframe}, step, log_kwargs)

    def _send(
        self, verb: str, what: str, given: tuple[Any, ...], named: Mapping[str, Any], step: int | None, log_kwargs: _Keywords
    ) -> None:
        self._check_names("log_kwargs", log_kwargs)
        if not self.started:
            self._say_nowhere(verb)
        step = None if step is None else _whole(step)
        for tracker in self.started:
            method = getattr(tracker, verb, None)
            if method is None:
                self._say((tracker.name, verb), f"the tracker {tracker.name} keeps no {what}: {verb}() goes on without it")
                continue
            self._safely(tracker, verb, method, *given, **named, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, or, with `unwrap`, the object of the package behind it."""
        wanted = str(getattr(name, "value", name))
        for tracker in self.started:
            if tracker.name == wanted:
                return getattr(tracker, "tracker", None) if unwrap else tracker
        running = ", ".join(tracker.name for tracker in self.started) or "none: call init_trackers first"
        raise StateError(f"get_tracker({wanted!r}): no such tracker runs; there is {running}")

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def _check_names(self, what: str, keywords: Mapping[str, Any] | None) -> None:
        unknown = sorted(set(map(str, keywords or ())) - set(self.names))
        if unknown:
            raise ConfigError(f"{what} has {', '.join(unknown)}, but log_with has {', '.join(self.names) or 'no tracker'}: use those names")

    def _safely(self, tracker: GeneralTracker, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._failed(tracker, verb, error)

    def _failed(self, tracker: GeneralTracker, verb: str, error: Exception) -> None:
        if isinstance(error, NotANumber):
            self._say((tracker.name, verb, str(error)), f"{error} (said once)")
            return
        text = f"the tracker {tracker.name} failed in {verb} ({type(error).__name__}: {error}); the run goes on, and this is said once"
        self._say((tracker.name, verb), text)

    def _say_nowhere(self, verb: str) -> None:
        if self._chosen and self._is_main:
            names = ", ".join(self.names)
            self._say(("all", verb), f"{verb}() goes nowhere: trackers ({names}) run from init_trackers(...) to end_training()")

    def _say(self, key: tuple[str, ...], text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            _logger.warning(text)


def _start(tracker: GeneralTracker, settings: dict[str, Any] | None) -> None:
    tracker.start()
    if settings is not None:
        tracker.store_init_configuration(settings)


def _whole(step: Any) -> int:
    """A step as a number of Python's, whatever counted it."""
    try:
        whole = int(step)
        if whole == step:
            return whole
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"step={step!r} is no whole number: a step counts what was done, as in log(values, step=3)")


def settings_of(config: Any) -> dict[str, Any] | None:
    """Settings as a dict: of a mapping, or of an object with attributes such as `argparse.Namespace` or a dataclass.

    >>> from types import SimpleNamespace
    >>> settings_of(SimpleNamespace(lr=0.1))
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
