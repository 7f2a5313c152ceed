"""The trackers of one `Accelerator`: started together, logged to together, ended together.

Only the main process starts the real ones; the others hold null objects, so every call may be made everywhere. A tracker that cannot
start is an error, because a run whose numbers go nowhere is found too late; one that only `log_with="all"` named says so and is left out.
One that fails later says so, with its name, and the training goes on: once for each kind of error and each name of a value, and twenty
times at most.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slipstream.config.sources import environment
from slipstream.errors import ConfigError, StateError
from slipstream.runs.folder import RunFolder
from slipstream.track.base import GeneralTracker, NullTracker
from slipstream.track.local import LocalTracker
from slipstream.track.registry import Chosen, missing_account
from slipstream.track.values import NotANumber, NotKept, kind_of

__all__ = ["Trackers", "settings_of"]

_logger = logging.getLogger(__name__)

_MANY = 20
"""Different things that are said of one tracker and verb."""
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
        self._said: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        """What was said of a tracker and a verb."""
        self._lines: Counter[tuple[str, str]] = Counter()
        self.started: list[GeneralTracker] = []
        """The trackers of the run that is under way: the real ones on the main process, null objects elsewhere."""

    @property
    def names(self) -> list[str]:
        """The names of the trackers that were chosen."""
        return [tracker.name for tracker in self._chosen]

    # -- beginning and end ----------------------------------------------------------------------------------------

    def check(self, project: str, config: Any = None, init_kwargs: _Keywords = None) -> None:
        """What is wrong with these arguments of `start`, as an error, before anything was made; the same on every process."""
        if self.started:
            raise StateError(f"trackers of this Accelerator run already ({', '.join(self.names)}): end_training() ends them first")
        if not isinstance(project, str):
            raise ConfigError(f"init_trackers({project!r}): the first argument is the name of the project, a text")
        self._check_names("init_kwargs", init_kwargs)
        settings_of(config)
        for chosen in self._chosen:
            _check_keywords(chosen, (init_kwargs or {}).get(chosen.name, {}))

    def start(self, project: str, config: Any = None, init_kwargs: _Keywords = None, *, folder: RunFolder | None = None) -> None:
        """Begins a run: `init_kwargs` has keywords for each tracker by its name, and `config` is kept by all of them.

        `folder` is that of the run, where there is one already; the tracker `local` writes into it.
        """
        self.check(project, config, init_kwargs)
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
            self._say(chosen.name, "start", [(reason,)], f"log_with='all' goes without {chosen.name}: {reason}")
        made.append(tracker if reason is None and tracker is not None else NullTracker(chosen.name))

    def _made(self, chosen: GeneralTracker | type[GeneralTracker], project: str, keywords: Mapping[str, Any]) -> GeneralTracker:
        if not self._is_main and chosen.main_process_only:
            return NullTracker(chosen.name)
        if isinstance(chosen, GeneralTracker):
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
        if log_kwargs is not None:
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
        if not isinstance(values, Mapping):
            raise ConfigError(
                f'log_images() has {kind_of(values)}: pictures are a dict of names, as in log_images({{"sample": picture}}, step=1)'
            )
        self._send("log_images", "pictures", (values,), {}, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: _Keywords = None,
    ) -> None:
        """Sends a table (`track/tables.py` says what is one) to every tracker that keeps tables; the others are named once."""
        if not isinstance(table_name, str):
            raise ConfigError(f'log_table({table_name!r}): the first argument is the name of the table, as in log_table("answers", ...)')
        if isinstance(data, Iterator):
            data = list(data)  # which can be read once, and there may be several trackers
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
                self._say(tracker.name, verb, [("none",)], f"the tracker {tracker.name} keeps no {what}: {verb}() goes on without it")
                continue
            try:
                method(*given, **named, step=step, **(log_kwargs or {}).get(tracker.name, {}))
            except Exception as error:
                self._failed(tracker, verb, error, given[0] if verb == "log_table" else "")

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
        if keywords is None:
            return
        if not isinstance(keywords, Mapping):
            raise ConfigError(f'{what}={keywords!r} is no dict: keywords stand under the name of their tracker, as in {{"wandb": {{...}}}}')
        unknown = sorted(set(map(str, keywords)) - set(self.names))
        if unknown:
            there = f"{', '.join(self.names)}: use {'that name' if len(self.names) == 1 else 'those names'}"
            raise ConfigError(f"{what} has {', '.join(unknown)}, but log_with has {there if self.names else 'no tracker'}")
        for name, some in keywords.items():
            if not isinstance(some, Mapping) or not all(isinstance(one, str) for one in some):
                raise ConfigError(
                    f'{what}: what stands under {name}, {some!r}, are no keywords: write a dict, as in {{"{name}": {{"a": 1}}}}'
                )

    def _safely(self, tracker: GeneralTracker, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._failed(tracker, verb, error)

    def _failed(self, tracker: GeneralTracker, verb: str, error: Exception, name: str = "") -> None:
        """Says what went wrong, once for each kind of error and each name of a value (`name`, where the error does not know it)."""
        kind = type(error).__name__
        if isinstance(error, NotKept):
            fresh = [one for one in error.wrong if (kind, one) not in self._said.get((tracker.name, verb), ())]
            if fresh:
                by = "" if isinstance(error, NotANumber) else f"tracker {tracker.name}, "
                self._say(tracker.name, verb, [(kind, one) for one in fresh], f"{error.text(fresh)} ({by}said once)")
            return
        text = f"the tracker {tracker.name} failed in {verb} ({kind}: {error}); the run goes on, and this is said once"
        self._say(tracker.name, verb, [(kind, name, str(getattr(error, "errno", "")))], text)

    def _say_nowhere(self, verb: str) -> None:
        if self._chosen and self._is_main:
            names = ", ".join(self.names)
            self._say(
                "all", verb, [("nowhere",)], f"{verb}() goes nowhere: trackers ({names}) run from init_trackers(...) to end_training()"
            )

    def _say(self, tracker: str, verb: str, keys: Sequence[tuple[str, ...]], text: str) -> None:
        """A line about things of which none was said before."""
        said = self._said.setdefault((tracker, verb), set())
        if said.intersection(keys) or self._lines[tracker, verb] >= _MANY:
            return
        said.update(keys)
        self._lines[tracker, verb] += 1
        _logger.warning(text if self._lines[tracker, verb] < _MANY else f"{text}; further ones of {tracker} in {verb} are not said")


def _start(tracker: GeneralTracker, settings: dict[str, Any] | None) -> None:
    tracker.start()
    if settings is not None:
        tracker.store_init_configuration(settings)


def _check_keywords(kind: GeneralTracker | type[GeneralTracker], keywords: Mapping[str, Any]) -> None:
    """An error for keywords that a class does not take; one that hands them on to its package takes all."""
    if not isinstance(kind, type):
        if keywords:
            raise ConfigError(f"init_kwargs has {', '.join(keywords)} for {kind.name}, which is an object already: make it with them")
        return
    parameters = list(inspect.signature(kind).parameters.values())
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    ours = {"folder"} if kind is LocalTracker else set()  # the folder of the run is the Accelerator's business
    known = [one.name for one in parameters[2 if kind.requires_logging_directory else 1 :] if one.name not in ours]
    if unknown := [name for name in keywords if name not in known]:
        raise ConfigError(
            f"init_kwargs has {', '.join(unknown)} for {kind.name}, which takes {', '.join(known) or 'no keyword'}: use "
            f"{'that' if len(known) == 1 else 'those'}, or leave {'it' if len(unknown) == 1 else 'them'} out"
        )


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
