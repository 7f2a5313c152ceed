"""Options that are objects: what scripts pass to `Accelerator(kwargs_handlers=[...])` and its plugin arguments, where no torch is needed.

A handler is a dataclass whose defaults change nothing; `to_kwargs()` returns the fields that differ. Values are checked when the object
is created, so an error points to the line that wrote them.
"""

from __future__ import annotations

import copy
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["GradientAccumulationPlugin", "InitProcessGroupKwargs", "KwargsHandler", "ProjectConfiguration", "check_count"]


def check_count(value: Any, message: str, least: int = 1) -> None:
    """Raise a `ConfigError` with this message unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(message)


@dataclass
class KwargsHandler:
    """The base of handlers: a dataclass that returns which of its fields differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of all fields."""
        return {field_.name: copy.deepcopy(getattr(self, field_.name)) for field_ in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        usual = {
            field_.name: field_.default_factory() if field_.default_factory is not MISSING else field_.default for field_ in fields(self)
        }
        return {name: value for name, value in self.to_dict().items() if value != usual[name]}


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is opened; None leaves the choice to the device and to the `timeout` option.

    >>> InitProcessGroupKwargs(timeout=timedelta(minutes=5)).to_kwargs()
    {'timeout': datetime.timedelta(seconds=300)}
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over several batches before an update.

    >>> GradientAccumulationPlugin(num_steps=4).num_steps
    4
    """

    num_steps: int | None = None
    """Batches per update; None takes it from the other sources (argument, launcher, environment, file)."""
    adjust_scheduler: bool = True
    """Whether calls of a scheduler between updates count in its `_step_count`; its learning rate moves with updates alone."""
    sync_with_dataloader: bool = True
    """Whether the last batch of a loader ends a window, however few batches it has."""
    sync_each_batch: bool = False
    """Reduce gradients after every batch: more communication, less memory in sharded strategies. Updates stay where they are."""

    def __post_init__(self) -> None:
        steps = self.num_steps
        if steps is not None:
            check_count(steps, f"GradientAccumulationPlugin(num_steps={steps!r}): write a whole number of batches, from 1")


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    >>> ProjectConfiguration(project_dir="runs").logging_dir
    'runs'
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    keep_best: int | None = None
    """How many checkpoints are kept for the `metric` that they were saved with, besides the newest `total_limit`."""
    best_mode: str = "min"
    """Whether the best metric is the smallest ("min") or the largest ("max")."""

    def __post_init__(self) -> None:
        if self.keep_best is not None and not _is_count(self.keep_best):
            raise ConfigError(f"ProjectConfiguration(keep_best={self.keep_best!r}): write how many of the best to keep, from 0")
        if self.keep_best and self.total_limit is None:
            raise ConfigError(
                f"ProjectConfiguration(keep_best={self.keep_best}) without total_limit: all checkpoints are kept then. Add "
                "total_limit=..., how many of the newest are kept besides the best."
            )
        if self.best_mode not in ("min", "max"):
            raise ConfigError(f'ProjectConfiguration(best_mode={self.best_mode!r}): write "min" or "max"')
        if self.total_limit is not None and (not _is_count(self.total_limit) or self.total_limit < 1):
            raise ConfigError(
                f"ProjectConfiguration(total_limit={self.total_limit!r}): write how many to keep, from 1; leave it out to keep all"
            )
        if not _is_count(self.iteration):
            raise ConfigError(f"ProjectConfiguration(iteration={self.iteration!r}): write the number of the next checkpoint, from 0")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the root folder, and the folder of trackers if none was given."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
