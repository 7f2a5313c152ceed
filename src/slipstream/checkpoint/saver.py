"""`save_state` of one Accelerator: where a checkpoint goes, which rank writes what, synchronously or in the background.

`Saver` holds the state between saves: numbering, hooks, registered objects and the background thread. At most one async save runs at a
time. Its failure is logged and raised at the next call, and its thread is not a daemon, so a script waits for it at exit. `SaveFolders`
detects through the rendezvous store, without waiting, that processes gave different folders for one checkpoint. Every Accelerator has a
`Saver`, so the modules that write are imported by the methods that save.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from slipstream.config.handlers import ProjectConfiguration
from slipstream.distributed.call_site import call_path, call_site
from slipstream.errors import CheckpointError, ConfigError
from slipstream.logging import get_logger
from slipstream.observability.timing.meter import CHECKPOINT, mark_phase

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components
    from slipstream.checkpoint.arena import Arena
    from slipstream.checkpoint.capture import Snapshot
    from slipstream.checkpoint.rotate import RetentionPolicy
    from slipstream.checkpoint.writer import Destination
    from slipstream.distributed.process_group import Runtime
    from slipstream.files.disk import Disk

__all__ = ["BackgroundTask", "SaveFolders", "SaveOptions", "Saver", "same_folder"]


class BackgroundTask:
    """One task at a time in a background thread.

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
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, work: Callable[[], object]) -> None:
        """Wait for the previous task, raise its failure, and run this one in the background."""
        self.wait()
        self._name = name
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"slipstream: {name}")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the task has finished, and raise its failure once."""
        if self._thread is not None:
            self._thread.join()  # after an interrupt, the next call waits again
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._name}: the async save failed: {failure}") from failure

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # the next call raises it; a run without one has it in the log
            self._failure = error
            get_logger(__name__).error(f"{self._name} was not saved: {error}", main_process_only=False)


_FolderRecord = dict[str, Any]
"""Rank, host, the folder as given, and its resolved path."""


class SaveFolders:
    """Compares the folders that the ranks give to the saves of one Accelerator, through the rendezvous store and without waiting."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = next(runtime.savers)
        self._calls: Counter[str] = Counter()
        self._key: str | None = None
        """The key of the last save in the store."""
        self._own: _FolderRecord = {}

    def announce(self, folder: str, save: str) -> None:
        """Publish the folder of a save that begins; raise if another process gave a different one. `save` is equal for one save."""
        from slipstream.files.object_store import is_url, local_path, redact

        self.check()
        process = self._runtime.process
        if process.world_size == 1:
            return
        self._calls[save] += 1
        digest = hashlib.blake2b(f"{save} {self._calls[save]}".encode(errors="replace"), digest_size=8).hexdigest()
        found = folder.rstrip("/") if is_url(folder) else os.path.realpath(os.path.expanduser(local_path(folder)))
        self._own = {"rank": process.rank, "host": process.host, "given": redact(folder), "folder": found, "site": call_site()}
        self._key = f"save/{self._number}/{digest}"
        try:
            first = json.loads(self._runtime.store_flags.agree(self._key, json.dumps(self._own)))
            if not same_folder(first, self._own):
                self._runtime.store_flags.append(f"{self._key}/other", json.dumps(self._own) + "\n")
        except torch.distributed.DistError:  # the process that serves the store has ended
            self._key = None
        self.check()

    def check(self) -> None:
        """Raise if another process gave a different folder for the last save."""
        key, self._key = self._key, None
        if key is None:
            return
        try:
            others = self._runtime.store_flags.read(f"{key}/other")
            first = self._runtime.store_flags.agree(key, json.dumps(self._own)) if others else ""
        except torch.distributed.DistError:
            return
        if not others:
            self._key = key
            return
        from slipstream.files.object_store import redact

        records = {record["rank"]: record for record in (self._own, *map(json.loads, [first, *others.splitlines()]))}
        shown = "given" if len({record["given"] for record in records.values()}) > 1 else "folder"  # one path, two working directories
        given = ", ".join(f"rank {rank}: {redact(records[rank][shown])!r}" for rank in sorted(records))
        raise ConfigError(
            f"save_state at {self._own['site']} was given different folders for one checkpoint ({given}). The main process writes "
            "the shared state and every other process adds its own file, so all of them must name the same folder: derive it from the "
            "step or the epoch, not from the rank, the time or a random name. To save on the main process alone, call save_state under "
            f"`if accelerator.is_main_process`. (Raised on rank {self._own['rank']}.)"
        )


def same_folder(first: _FolderRecord, second: _FolderRecord) -> bool:
    """Whether two processes mean one folder. Machines may mount a disk at different paths, so between them only the last name counts.

    >>> same_folder({"host": "a", "folder": "/runs/1"}, {"host": "a", "folder": "/runs/2"})
    False
    """
    from slipstream.files.object_store import is_url

    here, there = str(first["folder"]), str(second["folder"])
    if first["host"] != second["host"] and not is_url(here) and not is_url(there):
        return os.path.basename(here) == os.path.basename(there)
    return here == there


@dataclass(frozen=True)
class SaveOptions:
    """How one checkpoint is saved."""

    async_save: bool = False
    dedup: bool = False
    metric: float | None = None
    max_shard_size: int | str | None = None

    @property
    def shard_bytes(self) -> int | None:
        """`max_shard_size` in bytes; `ConfigError` if it is not a size."""
        from slipstream.files.sizes import parse_size

        return None if self.max_shard_size is None else parse_size(self.max_shard_size)


@dataclass
class Saver:
    """The state of an Accelerator between saves."""

    components: Components
    project: ProjectConfiguration
    async_save: bool = False
    """The default of `save_state(async_save=)`."""
    objects: list[Any] = field(default_factory=list)
    save_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    background: BackgroundTask = field(default_factory=BackgroundTask)
    last: str | None = None
    """The checkpoint that was saved or loaded last."""
    run_id: str = ""
    """Random id of this run (8 hex digits), the same on all ranks and changed by every load: tells apart saves of runs at the same step."""

    folders: SaveFolders = field(init=False)
    """Whether all ranks save to the same folder."""
    _warned_numbered: bool = False

    def __post_init__(self) -> None:
        self.folders = SaveFolders(self.components.state.runtime)
        self.run_id = self.components.state.runtime.store_flags.agree("run", secrets.token_hex(4))

    @cached_property
    def disk(self) -> Disk:
        """The disk that saves write to; tests replace it."""
        from slipstream.files.disk import Disk

        return Disk()

    @cached_property
    def arena(self) -> Arena:
        """Memory for the copies of async saving."""
        from slipstream.checkpoint.arena import Arena

        return Arena()

    # -- where ----------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> str | None:
        """The folder of numbered checkpoints, if they are numbered."""
        if not self.project.automatic_checkpoint_naming:
            return None
        from slipstream.files.object_store import is_url, join_location, local_path

        project = self.project.project_dir or "."
        return join_location(project if is_url(project) else os.path.expanduser(local_path(project)), "checkpoints")

    @property
    def retention(self) -> RetentionPolicy:
        """Which numbered checkpoints stay."""
        from slipstream.checkpoint.rotate import RetentionPolicy

        return RetentionPolicy(self.project.total_limit, self.project.keep_best or 0, "max" if self.project.best_mode == "max" else "min")

    def _numbers(self) -> list[int]:
        """Return the numbers of the existing checkpoints, ascending."""
        from slipstream.checkpoint.writer import checkpoint_numbers

        return [] if self.folder is None else checkpoint_numbers(self.folder)

    def begin_numbering(self) -> None:
        """Continue after the existing numbers."""
        if self.folder is not None:
            self.project.iteration = max([self.project.iteration, *(number + 1 for number in self._numbers())])

    def _renumber(self) -> None:
        """Continue after the highest number if another run in the same project has used the next one."""
        taken = self._numbers() if self.folder is not None and self.writes else []
        if self.project.iteration in taken:
            from slipstream.files.object_store import redact

            get_logger(__name__).warning(
                f"checkpoint_{self.project.iteration} in {redact(str(self.folder))} was saved by another run since this one began: "
                f"numbering continues with {taken[-1] + 1}. Give each run its own project_dir."
            )
            self.project.iteration = taken[-1] + 1

    def target(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Return the path or URL of this save."""
        if output_dir is not None and not isinstance(output_dir, (str, os.PathLike)):
            raise ConfigError(f"save_state({output_dir!r}): {type(output_dir).__name__} is not a path; pass the path of a folder")
        given = os.fspath(output_dir or "")
        if self.folder is not None:
            from slipstream.files.object_store import join_location

            target = join_location(self.folder, f"checkpoint_{self.project.iteration}")
            if given and not self._warned_numbered:
                self._warned_numbered = True
                get_logger(__name__).warning(
                    f"save_state({given!r}) goes to {target}, because checkpoints are numbered: leave out the folder, or "
                    "ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return target
        if "\0" in given:
            raise ConfigError(f"save_state({given!r}): the path contains a null byte")
        if not given:
            raise ConfigError(
                "save_state() was called without a folder: write save_state('checkpoints/first'), or number checkpoints with "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return given

    def note_loaded(self, where: str) -> None:
        """Change the run id, and continue the numbering after the checkpoint that was loaded."""
        from slipstream.checkpoint.manifest import checkpoint_number

        self.last = where
        self.run_id = hashlib.blake2b(self.run_id.encode(), digest_size=4).hexdigest()
        number = checkpoint_number(os.path.basename(where.rstrip("/")))
        if self.folder is not None and number is not None:
            self.project.iteration = max(self.project.iteration, number + 1)

    @property
    def writes(self) -> bool:
        """Whether this process writes the shared state."""
        state = self.components.state
        return state.is_local_main_process if self.project.save_on_each_node else state.is_main_process

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, output_dir: str | os.PathLike[str] | None, options: SaveOptions) -> str:
        """Save, and return the path of the checkpoint."""
        from slipstream.checkpoint.garbage import paused_collection

        with mark_phase(self.components.ledger.meter, CHECKPOINT), paused_collection():
            if self.components.strategy.replicated:
                return self._save(output_dir, options)
            from slipstream.checkpoint.sharded_save import save_sharded

            return save_sharded(self, output_dir, options)

    def _save(self, output_dir: str | os.PathLike[str] | None, options: SaveOptions) -> str:
        from slipstream.checkpoint.capture import make_stamp
        from slipstream.checkpoint.writer import open_destination
        from slipstream.files.object_store import is_url, redact

        self.background.wait()
        self._renumber()
        target = self.target(output_dir)
        shard_bytes = options.shard_bytes  # checked before anything is written
        if options.dedup and is_url(target):
            get_logger(__name__).warning(f"save_state(dedup=True) has no effect at {redact(target)}: only files on a disk can be linked")
        process, lines = self.components.state.runtime.process, call_path()
        machine = process.node_rank if self.project.save_on_each_node else None
        stamp = make_stamp(self.components, self.run_id)
        destination = open_destination(target, self.disk)
        self.folders.announce(self.folder or target, f"{stamp} {machine} {lines}")
        if self.folder is not None and not self.writes:
            destination.mark_rank(process.rank, stamp)
        if self.writes:
            write = self._begin_shared(destination, target, options, shard_bytes, lines)
        else:
            write = self._begin_own(destination, target, options)
        if self.folder is not None:
            self.project.iteration += 1
        if options.async_save:
            self.background.start(f"the checkpoint {redact(target)}", write)
        else:
            write()
            self.folders.check()
        return target

    def run_and_agree(self, operation: str, step: Callable[[], Any]) -> list[Any]:
        """Run a step on every rank and return the results of all, which are small plain data. If one rank raises, all raise."""
        from slipstream.distributed.scatter import agree_or_raise

        state = self.components.state
        try:
            outcome = step()
        except Exception as error:  # `agree_or_raise` raises it on every rank
            outcome = error
        return agree_or_raise(state.channel(), state.limits, outcome, operation=operation)

    def settle(self) -> None:
        """Wait for an async save, and raise the failure of the last one."""
        self.background.wait()
        self.folders.check()

    def _begin_shared(
        self, destination: Destination, target: str, options: SaveOptions, shard_bytes: int | None, lines: str
    ) -> Callable[[], None]:
        """Capture the state of the run, and return a function that writes it. `lines` are those of the script that led to the call."""
        from slipstream.checkpoint.capture import capture_snapshot
        from slipstream.checkpoint.writer import write_checkpoint

        stage = destination.begin()
        try:
            weights = self.take_weights(str(stage.folder))
            snapshot = self._keep(capture_snapshot(self.components, self.run_id, self.objects, weights, options.metric), options)
            process = self.components.state.runtime.process
            if process.world_size > 1:
                savers = process.local_world_size if self.project.save_on_each_node else process.world_size
                site = hashlib.blake2b(lines.encode(errors="replace"), digest_size=8).hexdigest()
                snapshot = replace(snapshot, facts=replace(snapshot.facts, savers=savers, site=site))
        except BaseException:
            stage.abandon()
            raise
        last = self.last

        def write() -> None:
            try:
                reusable = destination.reusable(last) if options.dedup else []
                write_checkpoint(stage, snapshot, max_shard_size=shard_bytes, reusable=reusable, dedup=options.dedup)
            except BaseException:
                stage.abandon()
                raise
            self.finish(destination, target, snapshot)

        return write

    def _begin_own(self, destination: Destination, target: str, options: SaveOptions) -> Callable[[], None]:
        """Capture the state of this rank alone, and return a function that writes it."""
        from slipstream.checkpoint.capture import capture_snapshot

        if self.save_hooks:
            self.take_weights(target)
        snapshot = self._keep(capture_snapshot(self.components, self.run_id, (), None, None), options)

        def write() -> None:
            destination.add_rank_file(snapshot)
            if self.folder is not None:
                destination.rotate_if_complete(self.retention, snapshot.facts.stamp)

        return write

    def finish(self, destination: Destination, target: str, snapshot: Snapshot) -> None:
        """Collect the files of other ranks after a commit, and remove checkpoints that are no longer kept."""
        destination.collect(snapshot.facts.stamp)
        self.last = target
        if self.folder is not None:
            destination.mark_latest()
            destination.rotate(self.retention)

    def _keep(self, snapshot: Snapshot, options: SaveOptions) -> Snapshot:
        return self.arena.keep(snapshot) if options.async_save else snapshot

    def take_weights(self, folder: str) -> dict[int, dict[str, Any]]:
        """Run the save hooks, and return the weights by model number, without those that hooks save into the folder themselves."""
        from slipstream.checkpoint.capture import model_state_dicts

        state_dicts = model_state_dicts(self.components)
        remaining = list(state_dicts)
        models = [model.prepared for model in self.components.stepper.models]
        for hook in self.save_hooks.values():
            hook(models, remaining, folder)
        kept = {id(state_dict) for state_dict in remaining}
        return {number: state_dict for number, state_dict in enumerate(state_dicts) if id(state_dict) in kept}
