"""`save_state` of one Accelerator: where a checkpoint goes, who writes what, synchronously or in the background.

`Saver` keeps what lasts between saves: numbering, hooks, registered objects and the background thread. At most one async save runs at a
time; its failure is logged and raised at the next call, and the thread is no daemon, so a script that ends waits for it. `SaveFolders`
detects through the rendezvous store, without waiting, that processes gave different folders for one checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint.capture import Arena, Snapshot, capture_snapshot, make_stamp, model_state_dicts
from slipstream.checkpoint.rotate import RetentionPolicy
from slipstream.checkpoint.sharded_save import save_sharded
from slipstream.checkpoint.weights import parse_size
from slipstream.checkpoint.writer import checkpoint_numbers, join_location, open_destination, write_checkpoint
from slipstream.config.handlers import ProjectConfiguration
from slipstream.distributed.call_site import call_path, call_site
from slipstream.distributed.process_group import Runtime
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.disk import Disk
from slipstream.files.object_store import is_url, local_path, redact
from slipstream.logging import get_logger
from slipstream.observability.timing.meter import CHECKPOINT, mark_phase

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components

__all__ = ["BackgroundTask", "SaveFolders", "SaveOptions", "Saver", "same_folder"]


class BackgroundTask:
    """One piece of work behind the caller.

    >>> background, done = BackgroundTask(), []
    >>> background.start("the list", lambda: done.append(1))
    >>> background.wait()
    >>> done
    [1]
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._name = ""
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, work: Callable[[], object]) -> None:
        """Runs work behind the caller; what came before it is waited for, and its failure raised."""
        self.wait()
        self._name = name
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"slipstream: {name}")
        self._thread.start()

    def wait(self) -> None:
        """Returns when the work is done; raises what went wrong in it, once."""
        if self._thread is not None:
            self._thread.join()  # one who interrupts this does not forget the work
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._name}, which was written behind the training, failed: {failure}") from failure

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # raised by the next call; whoever makes none reads it in the log
            self._failure = error
            get_logger(__name__).error(f"{self._name} was not saved: {error}", main_process_only=False)


_FolderRecord = dict[str, Any]
"""Rank, host, the folder as it was given, and where it is."""


class SaveFolders:
    """The folders of the saves of one Accelerator."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = next(runtime.savers)
        self._calls: Counter[str] = Counter()
        self._note: str | None = None
        """The name of the last save."""
        self._own: _FolderRecord = {}

    def announce(self, folder: str, stamp: str, *, machine: int | None) -> None:
        """Tells the folder of a save that begins; raises if another process gave another one. `machine`: whose processes are compared."""
        self.check()
        process = self._runtime.process
        if process.world_size == 1:
            return
        path = f"{stamp} {machine} {call_path()}"
        self._calls[path] += 1
        digest = blake2b(f"{path} {self._calls[path]}".encode(errors="replace"), digest_size=8).hexdigest()
        found = folder.rstrip("/") if is_url(folder) else os.path.realpath(os.path.expanduser(local_path(folder)))
        self._own = {"rank": process.rank, "host": process.host, "given": redact(folder), "folder": found, "site": call_site()}
        self._note = f"save/{self._number}/{digest}"
        try:
            first = json.loads(self._runtime.notes.agree(self._note, json.dumps(self._own)))
            if not same_folder(first, self._own):
                self._runtime.notes.append(f"{self._note}/other", json.dumps(self._own) + "\n")
        except torch.distributed.DistError:  # the process that serves the store is gone, and with it whoever could be asked
            self._note = None
        self.check()

    def check(self) -> None:
        """Raises if another process gave another folder for the last save."""
        note, self._note = self._note, None
        if note is None:
            return
        try:
            others = self._runtime.notes.read(f"{note}/other")
            first = self._runtime.notes.agree(note, json.dumps(self._own)) if others else ""
        except torch.distributed.DistError:
            return
        if not others:
            self._note = note
            return
        told = {known["rank"]: known for known in (self._own, *map(json.loads, [first, *others.splitlines()]))}
        shown = "given" if len({known["given"] for known in told.values()}) > 1 else "folder"  # one path in two working directories
        given = ", ".join(f"rank {rank}: {redact(told[rank][shown])!r}" for rank in sorted(told))
        raise ConfigError(
            f"save_state at {self._own['site']} was given different folders for one checkpoint ({given}). The main process writes what all "
            "share, and each other process adds a file of its own, so all of them have to name the same folder: make it of the step or the "
            "epoch, and not of the rank, the time or a random name. To save on the main process alone, call save_state under "
            f"`if accelerator.is_main_process`. (Raised on rank {self._own['rank']}.)"
        )


def same_folder(first: _FolderRecord, second: _FolderRecord) -> bool:
    """Whether two processes mean one folder. Machines may see a disk under different paths: of those, the last name is compared.

    >>> same_folder({"host": "a", "folder": "/runs/1"}, {"host": "a", "folder": "/runs/2"})
    False
    """
    here, there = str(first["folder"]), str(second["folder"])
    if first["host"] != second["host"] and not is_url(here) and not is_url(there):
        return os.path.basename(here) == os.path.basename(there)
    return here == there


_FOLDER = "checkpoints"
_NUMBERED = re.compile(r"checkpoint_(\d+)/*$")


@dataclass(frozen=True)
class SaveOptions:
    """How one checkpoint is saved."""

    behind: bool = False
    dedup: bool = False
    metric: float | None = None
    max_shard_size: int | str | None = None


@dataclass
class Saver:
    """What an Accelerator keeps between saves. One for each."""

    parts: Components
    project: ProjectConfiguration
    behind: bool = False
    """Whether saves are written behind the training unless a call says otherwise."""
    objects: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    background: BackgroundTask = field(default_factory=BackgroundTask)
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
        return join_location(project if is_url(project) else os.path.expanduser(local_path(project)), _FOLDER)

    @property
    def keep(self) -> RetentionPolicy:
        """Which checkpoints stay."""
        return RetentionPolicy(self.project.total_limit, self.project.keep_best or 0, "max" if self.project.best_mode == "max" else "min")

    def _renumber(self) -> None:
        """Takes another number where somebody else has saved under the one that comes next: another run in the same project."""
        taken = checkpoint_numbers(self.folder) if self.folder is not None and self.writes else []
        if self.project.iteration in taken:
            get_logger(__name__).warning(
                f"checkpoint_{self.project.iteration} in {redact(str(self.folder))} was saved by another run since this one began: "
                f"numbers go on with {taken[-1] + 1}. Give each run a project_dir of its own."
            )
            self.project.iteration = taken[-1] + 1

    def begin_numbering(self) -> None:
        """The next number is one that no checkpoint has."""
        if self.folder is not None:
            self.project.iteration = max([self.project.iteration, *(number + 1 for number in checkpoint_numbers(self.folder))])

    def target(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Where this save goes."""
        if output_dir is not None and not isinstance(output_dir, (str, os.PathLike)):
            raise ConfigError(f"save_state({output_dir!r}): a {type(output_dir).__name__} is no folder; write its path")
        folder = self.folder
        if folder is not None:
            target = join_location(folder, f"checkpoint_{self.project.iteration}")
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

    def save(self, output_dir: str | os.PathLike[str] | None, options: SaveOptions) -> str:
        """Saves; the path of the checkpoint."""
        with mark_phase(self.parts.ledger.meter, CHECKPOINT):
            return self._save(output_dir, options)

    def _save(self, output_dir: str | os.PathLike[str] | None, options: SaveOptions) -> str:
        if not self.parts.strategy.replicated:
            return save_sharded(self, output_dir, options)
        self.background.wait()
        self._renumber()
        target = self.target(output_dir)
        largest = None if options.max_shard_size is None else parse_size(options.max_shard_size)
        if options.dedup and is_url(target):
            get_logger(__name__).warning(f"save_state(dedup=True) has no effect at {redact(target)}: only files on a disk can be linked")
        machine = self.parts.state.runtime.process.node_rank if self.project.save_on_each_node else None
        self.folders.announce(self.folder or target, make_stamp(self.parts, self.history), machine=machine)
        work = self._shared(target, options, largest) if self.writes else self._own(target, options)
        if self.folder is not None:
            self.project.iteration += 1
        if options.behind:
            self.background.start(f"the checkpoint {redact(target)}", work)
        else:
            work()
            self.folders.check()
        return target

    def settle(self) -> None:
        """Waits for a save that is written behind the training, and raises what went wrong with the last one."""
        self.background.wait()
        self.folders.check()

    def _shared(self, target: str, options: SaveOptions, largest: int | None) -> Callable[[], None]:
        """What remains to be done once the state of the run was taken."""
        place = open_destination(target, self.disk)
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
                write_checkpoint(stage, snapshot, max_shard_size=largest, reusable=reusable, dedup=options.dedup)
            except BaseException:
                stage.abandon()
                raise
            place.collect(snapshot.facts.stamp)
            self.last = target
            if self.folder is not None:
                place.mark_latest()
                place.rotate(self.keep)

        return work

    def _snapshot(self, folder: Path, options: SaveOptions) -> Snapshot:
        snapshot = capture_snapshot(self.parts, self.history, self.objects, self.weights(str(folder)), options.metric)
        return self.arena.keep(snapshot) if options.behind else snapshot

    def weights(self, folder: str) -> dict[int, dict[str, Any]]:
        """The weights of the models by number, without those that hooks save themselves, which do so now."""
        weights = model_state_dicts(self.parts)
        taken = list(weights)
        self._run_hooks(weights, folder)
        left = {id(weight) for weight in weights}
        return {number: entry for number, entry in enumerate(taken) if id(entry) in left}

    def _own(self, target: str, options: SaveOptions) -> Callable[[], None]:
        if self.save_hooks:
            self._run_hooks(model_state_dicts(self.parts), target)
        snapshot = capture_snapshot(self.parts, self.history, (), None, None)
        kept = self.arena.keep(snapshot) if options.behind else snapshot
        place = open_destination(target, self.disk)
        return lambda: place.add_rank_file(kept)

    def _run_hooks(self, weights: list[dict[str, Any]], folder: str) -> None:
        models = [model.prepared for model in self.parts.stepper.models]
        for hook in self.save_hooks.values():
            hook(models, weights, folder)
