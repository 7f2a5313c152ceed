"""Saving for an Accelerator: where a checkpoint goes, who writes what, now or behind the training."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.checkpoint.background import Background
from slipstream.checkpoint.places import inside, numbers, place_at
from slipstream.checkpoint.rotate import Keep
from slipstream.checkpoint.save import write
from slipstream.checkpoint.snapshot import Arena, Snapshot
from slipstream.checkpoint.store import is_url, local_path, redacted
from slipstream.checkpoint.weights import parse_size
from slipstream.comm.meter import CHECKPOINT, marked
from slipstream.config.handlers import ProjectConfiguration
from slipstream.errors import ConfigError
from slipstream.facade.parts import Parts
from slipstream.facade.save_folders import SaveFolders
from slipstream.facade.taking import stamp_of, state_dicts, take
from slipstream.facade.together import save_together
from slipstream.files.disk import Disk
from slipstream.logging import get_logger

__all__ = ["Options", "Saver"]

_FOLDER = "checkpoints"
_NUMBERED = re.compile(r"checkpoint_(\d+)/*$")


@dataclass(frozen=True)
class Options:
    """How one checkpoint is saved."""

    behind: bool = False
    dedup: bool = False
    metric: float | None = None
    max_shard_size: int | str | None = None


@dataclass
class Saver:
    """What an Accelerator keeps between saves. One for each."""

    parts: Parts
    project: ProjectConfiguration
    behind: bool = False
    """Whether saves are written behind the training unless a call says otherwise."""
    objects: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    background: Background = field(default_factory=Background)
    disk: Disk = field(default_factory=Disk)
    arena: Arena = field(default_factory=Arena)
    last: str | None = None
    """The checkpoint that was saved last."""
    history: str = ""
    """Names this run since its last load, the same on all ranks (8 hex digits): saves of another one at the same step are not its own."""

    folders: SaveFolders = field(init=False)
    """Whether all ranks save to the same folder."""
    _told_numbered: bool = False

    def __post_init__(self) -> None:
        self.folders = SaveFolders(self.parts.state.runtime)
        self.history = self.parts.state.runtime.notes.agree("run", secrets.token_hex(4))

    # -- where ----------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> str | None:
        """The folder of numbered checkpoints, if they are numbered."""
        if not self.project.automatic_checkpoint_naming:
            return None
        project = self.project.project_dir or "."
        return inside(project if is_url(project) else os.path.expanduser(local_path(project)), _FOLDER)

    @property
    def keep(self) -> Keep:
        """Which checkpoints stay."""
        return Keep(self.project.total_limit, self.project.keep_best or 0, "max" if self.project.best_mode == "max" else "min")

    def _renumber(self) -> None:
        """Takes another number where somebody else has saved under the one that comes next: another run in the same project."""
        taken = numbers(self.folder) if self.folder is not None and self.writes else []
        if self.project.iteration in taken:
            get_logger(__name__).warning(
                f"checkpoint_{self.project.iteration} in {redacted(str(self.folder))} was saved by another run since this one began: "
                f"numbers go on with {taken[-1] + 1}. Give each run a project_dir of its own."
            )
            self.project.iteration = taken[-1] + 1

    def begin_numbering(self) -> None:
        """The next number is one that no checkpoint has."""
        if self.folder is not None:
            self.project.iteration = max([self.project.iteration, *(number + 1 for number in numbers(self.folder))])

    def target(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Where this save goes."""
        if output_dir is not None and not isinstance(output_dir, (str, os.PathLike)):
            raise ConfigError(f"save_state({output_dir!r}): a {type(output_dir).__name__} is no folder; write its path")
        folder = self.folder
        if folder is not None:
            target = inside(folder, f"checkpoint_{self.project.iteration}")
            if output_dir and not self._told_numbered:
                self._told_numbered = True
                get_logger(__name__).warning(
                    f"save_state({os.fspath(output_dir)!r}) goes to {target}, because checkpoints are numbered: leave out the folder, or "
                    "ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return target
        if output_dir and "\0" in os.fspath(output_dir):
            raise ConfigError(f"save_state({os.fspath(output_dir)!r}): no name of a file holds a zero byte; write another one")
        if not output_dir or not os.fspath(output_dir):
            raise ConfigError(
                "save_state() was called without a folder: write save_state('checkpoints/first'), or let them be numbered by "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return os.fspath(output_dir)

    def loaded(self, where: str) -> None:
        """Numbers go on after a checkpoint that was loaded."""
        self.last = where
        self.history = hashlib.blake2b(self.history.encode(), digest_size=4).hexdigest()
        found = _NUMBERED.search(where)
        if self.folder is not None and found is not None:
            self.project.iteration = max(self.project.iteration, int(found[1]) + 1)

    @property
    def writes(self) -> bool:
        """Whether this process writes what all ranks share."""
        state = self.parts.state
        return state.is_local_main_process if self.project.save_on_each_node else state.is_main_process

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, output_dir: str | os.PathLike[str] | None, options: Options) -> str:
        """Saves; the path of the checkpoint."""
        with marked(self.parts.ledger.meter, CHECKPOINT):
            return self._save(output_dir, options)

    def _save(self, output_dir: str | os.PathLike[str] | None, options: Options) -> str:
        if not self.parts.strategy.replicated:
            return save_together(self, output_dir, options)
        self.background.wait()
        self._renumber()
        target = self.target(output_dir)
        largest = None if options.max_shard_size is None else parse_size(options.max_shard_size)
        if options.dedup and is_url(target):
            get_logger(__name__).warning(f"save_state(dedup=True) has no effect at {redacted(target)}: only files on a disk can be linked")
        machine = self.parts.state.runtime.process.node_rank if self.project.save_on_each_node else None
        self.folders.announce(self.folder or target, stamp_of(self.parts, self.history), machine=machine)
        work = self._shared(target, options, largest) if self.writes else self._own(target, options)
        if self.folder is not None:
            self.project.iteration += 1
        if options.behind:
            self.background.start(f"the checkpoint {redacted(target)}", work)
        else:
            work()
            self.folders.check()
        return target

    def settle(self) -> None:
        """Waits for a save that is written behind the training, and raises what went wrong with the last one."""
        self.background.wait()
        self.folders.check()

    def _shared(self, target: str, options: Options, largest: int | None) -> Callable[[], None]:
        """What remains to be done once the state of the run was taken."""
        place = place_at(target, self.disk)
        stage = place.begin()
        try:
            snapshot = self._snapshot(stage.folder, options)
        except BaseException:
            stage.abandon()
            raise
        last = self.last

        def work() -> None:
            try:
                reusable = place.earlier(last) if options.dedup else []
                write(stage, snapshot, max_shard_size=largest, reusable=reusable, dedup=options.dedup)
            except BaseException:
                stage.abandon()
                raise
            place.collect(snapshot.facts.stamp)
            self.last = target
            if self.folder is not None:
                place.mark_latest()
                place.rotate(self.keep)

        return work

    def _snapshot(self, folder: Path, options: Options) -> Snapshot:
        snapshot = take(self.parts, self.history, self.objects, self.weights(str(folder)), options.metric)
        return self.arena.keep(snapshot) if options.behind else snapshot

    def weights(self, folder: str) -> dict[int, dict[str, Any]]:
        """The weights of the models by number, without those that hooks save themselves, which do so now."""
        weights = state_dicts(self.parts)
        taken = list(weights)
        self._run_hooks(weights, folder)
        left = {id(one) for one in weights}
        return {number: one for number, one in enumerate(taken) if id(one) in left}

    def _own(self, target: str, options: Options) -> Callable[[], None]:
        if self.save_hooks:
            self._run_hooks(state_dicts(self.parts), target)
        snapshot = take(self.parts, self.history, (), None, None)
        kept = self.arena.keep(snapshot) if options.behind else snapshot
        place = place_at(target, self.disk)
        return lambda: place.add_rank_file(kept)

    def _run_hooks(self, weights: list[dict[str, Any]], folder: str) -> None:
        models = [model.prepared for model in self.parts.stepper.models]
        for hook in self.save_hooks.values():
            hook(models, weights, folder)
