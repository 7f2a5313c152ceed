"""The trackers of one `Accelerator`: started together, logged to together, ended together.

Only the main process starts the real ones; the others hold null objects, so every call may be made everywhere. A tracker that cannot
start is an error, because a run whose numbers go nowhere is found too late. One that fails later says so once, with its name, and the
training goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigError, StateError
from slipstream.track.base import GeneralTracker, NullTracker

__all__ = ["Trackers"]

_logger = logging.getLogger(__name__)


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
        self._logging_dir = logging_dir
        self._is_main = is_main_process
        self._said: set[tuple[str, str]] = set()
        self.started: list[GeneralTracker] = []
        """The trackers of the run that is under way: the real ones on the main process, null objects elsewhere."""

    @property
    def names(self) -> list[str]:
        """The names of the trackers that were chosen."""
        return [tracker.name for tracker in self._chosen]

    def start(self, project: str, config: Any = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Begins a run: `init_kwargs` has keywords for each tracker by its name, and `config` is kept by all of them."""
        if self.started:
            raise StateError(f"trackers of this Accelerator run already ({', '.join(self.names)}): end_training() ends them first")
        self._check_names("init_kwargs", init_kwargs)
        settings = _as_dict(config)
        made: list[GeneralTracker] = []
        try:
            for chosen in self._chosen:
                tracker = self._made(chosen, project, (init_kwargs or {}).get(chosen.name, {}))
                made.append(tracker)
                tracker.start()
            if settings is not None:
                for tracker in made:
                    tracker.store_init_configuration(settings)
        except BaseException:
            for tracker in made:
                self._safely(tracker, "finish", tracker.finish)
            raise
        self.started = made

    def _made(self, chosen: GeneralTracker | type[GeneralTracker], project: str, keywords: Mapping[str, Any]) -> GeneralTracker:
        if not self._is_main and chosen.main_process_only:
            return NullTracker(chosen.name)
        if isinstance(chosen, GeneralTracker):
            if keywords:
                raise ConfigError(f"init_kwargs has {', '.join(keywords)} for {chosen.name}, which is an object already: make it with them")
            return chosen
        make: Callable[..., GeneralTracker] = chosen
        return make(project, self._logging_dir, **keywords) if chosen.requires_logging_directory else make(project, **keywords)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Sends values to every tracker; `log_kwargs` has keywords for each by its name."""
        if log_kwargs:
            self._check_names("log_kwargs", log_kwargs)
        if not self.started and self._chosen:
            self._say("all", "log", f"log() goes nowhere: {', '.join(self.names)} runs from init_trackers(...) to end_training()")
        for tracker in self.started:
            keywords = (log_kwargs or {}).get(tracker.name, {})
            self._safely(tracker, "log", tracker.log, values, step=step, **keywords)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, or, with `unwrap`, the object of the package behind it."""
        wanted = str(getattr(name, "value", name))
        for tracker in self.started:
            if tracker.name == wanted:
                return getattr(tracker, "tracker", None) if unwrap else tracker
        running = ", ".join(tracker.name for tracker in self.started) or "none: call init_trackers first"
        raise StateError(f"get_tracker({wanted!r}): no such tracker runs; there is {running}")

    def finish(self) -> None:
        """Ends every tracker; a second time it does nothing."""
        ending, self.started = self.started, []
        for tracker in ending:
            self._safely(tracker, "finish", tracker.finish)

    def _check_names(self, what: str, keywords: Mapping[str, Any] | None) -> None:
        unknown = sorted(set(map(str, keywords or ())) - set(self.names))
        if unknown:
            raise ConfigError(f"{what} has {', '.join(unknown)}, but log_with has {', '.join(self.names) or 'no tracker'}: use those names")

    def _safely(self, tracker: GeneralTracker, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            text = f"the tracker {tracker.name} failed in {verb} ({type(error).__name__}: {error}); the run goes on, and this is said once"
            self._say(tracker.name, verb, text)

    def _say(self, name: str, verb: str, text: str) -> None:
        if (name, verb) not in self._said:
            self._said.add((name, verb))
            if self._is_main or name != "all":
                _logger.warning(text)


def _as_dict(config: Any) -> dict[str, Any] | None:
    """Settings as a dict: of a mapping, or of an object with attributes such as `argparse.Namespace`."""
    if config is None:
        return None
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "__dict__"):
        return dict(vars(config))
    raise ConfigError(f"init_trackers(config={config!r}): the settings of a run are a dict, or an object with attributes")
