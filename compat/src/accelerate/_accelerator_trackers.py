"""Methods of `Accelerator` about experiment trackers.

As in Accelerate, trackers run on the main process only, `init_trackers` and `log` do nothing elsewhere, `trackers` stays after
`end_training`, and keywords for a tracker that is not in `log_with` have no effect; here a warning says so.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["TrackersMixin"]


class TrackersMixin:
    """The tracker side of `accelerate.Accelerator`. Its methods come before those of `slipstream.Accelerator`."""

    _ended_trackers: tuple[Any, ...] = ()

    def _choose_trackers(self, log_with: Any) -> Any:
        if log_with is None:
            return None  # `accelerate.tracking` is not imported
        from accelerate.tracking import choose_trackers

        return choose_trackers(log_with, self.project_configuration.logging_dir)

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were chosen: a name for each class, and the user's instances."""
        from accelerate.tracking import _as_logger_type

        chosen = [tracker for tracker in self._recorder.trackers._chosen if tracker.name in self._recorder.log_with]
        return [_as_logger_type(tracker.name) if isinstance(tracker, type) else tracker for tracker in chosen]

    @property
    def trackers(self) -> list[Any]:
        """The trackers of this run, also after its end; without Slipstream's local one, unless `log_with` names it."""
        started = self._recorder.trackers.started or self._ended_trackers
        return [tracker for tracker in started if tracker.name in self._recorder.log_with]

    def init_trackers(
        self, project_name: str | None, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers of `log_with` on the main process. `init_kwargs` has keywords for each by its name.

        The name may be None where all trackers are the user's instances, which have theirs.
        """
        if self.is_main_process:
            self._ended_trackers = ()
            if project_name is None and not any(isinstance(tracker, type) for tracker in self._recorder.trackers._chosen):
                project_name = ""
            super().init_trackers(project_name, config, self._known_only("init_kwargs", init_kwargs))

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Send values to every tracker, from the main process. `log_kwargs` has keywords for each by its name."""
        if self.is_main_process:
            super().log(values, step, self._known_only("log_kwargs", log_kwargs))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, or with `unwrap` its object; on other processes, or if none runs, one that does nothing."""
        wanted = str(getattr(name, "value", name))
        for tracker in self.trackers:
            if tracker.name == wanted:
                return tracker.tracker if unwrap else tracker
        if not self.trackers and self.is_main_process:  # scripts ask for a tracker that the user did not choose, as in Accelerate
            warnings.warn(f"get_tracker({wanted!r}): no tracker runs, so it does nothing; see log_with and init_trackers", stacklevel=2)
        if not self.trackers or not self.is_main_process:
            from slipstream.observability.trackers.base import NullTracker

            return NullTracker(wanted)
        from slipstream.errors import ConfigError

        running = ", ".join(tracker.name for tracker in self.trackers)
        raise ConfigError(f"get_tracker({wanted!r}): this Accelerator has no such tracker; running: {running}")

    def end_training(self) -> None:
        """End a run: finish the trackers and close the process group."""
        self._ended_trackers = tuple(self._recorder.trackers.started) or self._ended_trackers
        super().end_training()

    def _known_only(self, what: str, keywords: dict[str, Any] | None) -> dict[str, Any] | None:
        """Leave out keywords of trackers that do not run: scripts pass those of every tracker that a user may choose (diffusers)."""
        if not isinstance(keywords, dict):
            return keywords
        plain = {str(getattr(name, "value", name)): value for name, value in keywords.items()}
        unused = sorted(set(plain) - set(self._recorder.trackers.names))
        if unused and what == "init_kwargs":
            warnings.warn(f"init_kwargs for {', '.join(unused)} has no effect: log_with does not name it", stacklevel=3)
        return {name: value for name, value in plain.items() if name not in unused}
