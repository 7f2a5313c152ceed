"""`save_state` in the layout of Accelerate 1.15, for checkpoints that the real package is to load.

Only `checkpoint_format="accelerate"` or ACCELERATE_CHECKPOINT_FORMAT=accelerate leads here: the files are pickles without checksums. They
are still written beside the target and moved into place together, and older checkpoints go only afterwards. With replicated models the
main process never waits for the others, so scripts may call `save_state` there alone (diffusers' training scripts do). The random states
of another process are put beside the checkpoint and moved into it by whichever comes later, that process or the commit; a flag in the
rendezvous store says that the commit is done. Sharded models need every process: their weights and optimizers are folders of
torch.distributed.checkpoint, or whole files under `FULL_STATE_DICT`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from accelerate.checkpointing import Write, random_states_name, random_states_writer, shared_files, torch_writer
from slipstream.checkpoint.accelerate_import import is_accelerate_checkpoint
from slipstream.checkpoint.capture import make_stamp
from slipstream.checkpoint.commit import LocalStage, LocalTarget, remove_checkpoint
from slipstream.checkpoint.manifest import FSDP_MODEL_NAME, OPTIMIZER_NAME
from slipstream.checkpoint.optimizer_names import name_parameters, parameter_names
from slipstream.checkpoint.rotate import numbered_checkpoints
from slipstream.distributed.call_site import call_path
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.object_store import is_url, local_path, redact
from slipstream.logging import get_logger

__all__ = ["AccelerateFormatWriter"]

_STALE_SECONDS: Final = 3600.0


class AccelerateFormatWriter:
    """Writes checkpoints of one Accelerator in Accelerate's layout."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._saver = accelerator._saver
        self._calls: Counter[str] = Counter()

    def save(self, output_dir: Any, *, safe_serialization: bool) -> str:
        """Save, and return the path of the checkpoint."""
        saver = self._saver
        saver.background.wait()
        if saver.project.keep_best:
            raise ConfigError("ProjectConfiguration(keep_best=...) needs metrics, for which the format of Accelerate has no place")
        target = saver.target(output_dir)
        if is_url(target):
            raise ConfigError(f"{redact(target)} is a URL, and the format of Accelerate is written to local folders only. Name a folder.")
        self._warn_left_out()
        if saver.components.strategy.replicated:
            self._save_replicated(LocalTarget(local_path(target), saver.disk), safe_serialization)
        else:
            self._save_sharded(LocalTarget(local_path(target), saver.disk), safe_serialization)
        if saver.folder is not None:
            saver.project.iteration += 1
        return str(target)

    def _warn_left_out(self) -> None:
        """Name what this run has and the format has no place for."""
        components = self._saver.components
        components.stepper.loop_state()  # settles the state of the loss scaler
        if components.stepper.open_gradients() is not None:
            get_logger(__name__).warning(
                "save_state in the format of Accelerate, in the middle of an update: the format has no place for gradients, so the batches "
                "of this update so far are lost on resuming. Save where accelerator.sync_gradients is True."
            )

    # -- replicated models ----------------------------------------------------------------------------------------

    def _save_replicated(self, target: LocalTarget, safe_serialization: bool) -> None:
        saver = self._saver
        state = saver.components.state
        stamp = make_stamp(saver.components, saver.run_id)
        saver.folders.announce(saver.folder or str(target.path), f"{stamp} {call_path()}")
        self._calls[stamp] += 1
        key = "accelerate-" + hashlib.blake2b(f"{stamp} {self._calls[stamp]}".encode(), digest_size=8).hexdigest()
        flags = state.runtime.store_flags
        if not saver.writes:
            if saver.save_hooks:
                saver.take_weights(str(target.path))
            self._leave_random_states(target, key, flags)
            return
        with target.begin() as stage:
            weights = _renumber(saver.take_weights(str(stage.folder)))
            registry = saver.components.registry
            files = shared_files(
                weights, registry.optimizers, registry.schedulers, registry.loaders, self._accelerator.scaler, safe_serialization
            )
            files |= self._object_files()
            files[random_states_name(state.process_index)] = random_states_writer(self._step)
            _write_all(stage, files)
            _adopt_rest(stage, files)
            stage.commit(None)
        flags.agree(key, str(target.path))
        self._collect(target.path, key)
        self._finish(target)

    @property
    def _step(self) -> int:
        return int(getattr(self._accelerator, "step", 0) or 0)

    def _object_files(self) -> dict[str, Write]:
        return {f"custom_checkpoint_{number}.pkl": torch_writer(value.state_dict()) for number, value in enumerate(self._saver.objects)}

    def _leave_random_states(self, target: LocalTarget, key: str, flags: Any) -> None:
        """Write the random states of this process beside the checkpoint, or into it if that is there."""
        parent, rank = target.path.parent, self._saver.components.state.process_index
        waiting = parent / f".{target.path.name}.{key}.{rank}"
        temporary = waiting.with_name(f"{waiting.name}.writing")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            random_states_writer(self._step)(str(temporary))
            target.disk.sync_file(temporary)
            target.disk.rename(temporary, waiting)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise CheckpointError(f"{target.path}: the random states of rank {rank} could not be saved: {error}") from error
        if done := flags.read(key):
            self._move(waiting, Path(done), rank)

    def _collect(self, path: Path, key: str) -> None:
        """Move the random states that other processes left into the checkpoint, and remove those that nobody came for."""
        for waiting in path.parent.glob(".*.accelerate-*"):
            rank = waiting.name.rpartition(".")[2]
            if f".{key}." in waiting.name and rank.isdigit():
                self._move(waiting, path, int(rank))
            else:
                with suppress(OSError):
                    if time.time() - waiting.stat().st_mtime > _STALE_SECONDS:
                        waiting.unlink()

    def _move(self, waiting: Path, path: Path, rank: int) -> None:
        with suppress(FileNotFoundError):  # another process moves it
            path.mkdir(exist_ok=True)  # on a machine that does not share the disk of the main process
            self._saver.disk.rename(waiting, path / random_states_name(rank))
            self._saver.disk.sync_folder(path)

    # -- sharded models -------------------------------------------------------------------------------------------

    def _save_sharded(self, target: LocalTarget, safe_serialization: bool) -> None:
        """Save with every process; one that fails makes all raise, and the checkpoint before this one stays."""
        saver, rank = self._saver, self._saver.components.state.process_index
        stages: list[LocalStage] = []

        def begin() -> list[str | None]:
            if saver.writes:
                stages.append(target.begin())
                return [stages[0].ticket, str(target.path)]
            return [None, None]

        try:
            ticket, path = next(report for report in saver.run_and_agree("save_state", begin) if report[0] is not None)
            common = LocalTarget(path, saver.disk)
            saver.run_and_agree("save_state", lambda: None if saver.writes else stages.append(common.join(ticket)))
            stage = stages[0]
            weights: dict[int, Any] = {}
            saver.run_and_agree("save_state", lambda: weights.update(_renumber(saver.take_weights(str(stage.folder)))))
            whole = saver.components.strategy.saves_whole_weights
            states = {**dict(self._sharded_models(weights)), **dict(self._sharded_optimizers())}
            for name, (key, state) in states.items():
                write_whole(saver, stage, name, state) if whole else write_dcp(stage.folder / name, {key: state})
            saver.run_and_agree("save_state", lambda: self._write_rest(stage, rank))
            saver.run_and_agree("save_state", lambda: _commit(stage) if saver.writes else None)
        finally:
            for stage in stages:
                stage.abandon()
        if saver.writes:
            self._finish(common)
        saver.last = str(common.path)

    def _write_rest(self, stage: LocalStage, rank: int) -> None:
        files: dict[str, Write] = {random_states_name(rank): random_states_writer(self._step)}
        if self._saver.writes:
            registry = self._saver.components.registry
            files |= shared_files({}, (), registry.schedulers, registry.loaders, self._accelerator.scaler, True) | self._object_files()
        _write_all(stage, files)

    def _sharded_models(self, weights: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, tuple[str, Any]]]:
        for number, state in weights.items():
            yield f"{FSDP_MODEL_NAME}_{number}", ("model", dict(state))

    def _sharded_optimizers(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        components = self._saver.components
        names = parameter_names(model.original for model in components.stepper.models)
        for number, optimizer in enumerate(components.registry.optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(id(parameter) not in names for parameter in parameters):
                raise ConfigError(f"optimizer {number} has a parameter that belongs to no prepared model: the format has no name for it")
            state = name_parameters(optimizer.state_dict(), [names[id(parameter)][0] for parameter in parameters])
            yield f"{OPTIMIZER_NAME}_{number}", ("optimizer", state)

    # -- afterwards -----------------------------------------------------------------------------------------------

    def _finish(self, target: LocalTarget) -> None:
        """Remove numbered checkpoints that are no longer kept, after the new one is there."""
        saver = self._saver
        saver.last = str(target.path)
        limit = saver.project.total_limit
        if saver.folder is None or limit is None:
            return
        known = [path for _, path in numbered_checkpoints(target.path.parent) if is_accelerate_checkpoint(path) or path == target.path]
        for path in known[: max(0, len(known) - limit)]:
            try:
                remove_checkpoint(path, path, saver.disk)
            except OSError as error:
                get_logger(__name__).warning(f"{path} is no longer kept and could not be removed: {error}")


def write_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state with torch.distributed.checkpoint; every process has to call it."""
    import warnings

    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        save(dict(state), storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True))


def write_whole(saver: Any, stage: LocalStage, name: str, state: Any) -> None:
    """Put a sharded state together and write it as one file on the writing process; every process has to call it."""
    stem, _, number = name.rpartition("_")
    whole = gather_whole(state, keep=saver.writes)
    file = f"{stem}.bin" if number == "0" else f"{stem}_{number}.bin"
    saver.run_and_agree("save_state", lambda: _write_all(stage, {file: torch_writer(whole)}) if saver.writes else None)


def gather_whole(value: Any, *, keep: bool) -> Any:
    """Return a state with every sharded tensor whole, in host memory; without `keep`, take part in gathering and return nothing of use."""
    if isinstance(value, torch.Tensor):
        whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().cpu() if keep else None
    if isinstance(value, dict):
        return {key: gather_whole(item, keep=keep) for key, item in value.items()}
    return type(value)(gather_whole(item, keep=keep) for item in value) if type(value) in (list, tuple) else value


def _renumber(weights: Mapping[int, Any]) -> dict[int, Any]:
    """Return weights with numbers from 0: Accelerate counts those that hooks have left."""
    return dict(enumerate(weights.values()))


def _commit(stage: LocalStage) -> None:
    _adopt_rest(stage, ())
    stage.commit(None)


def _write_all(stage: LocalStage, files: Mapping[str, Write]) -> None:
    """Write files into a stage and sync them."""
    for name, write in files.items():
        write(str(stage.folder / name))
        stage.adopt(name)


def _adopt_rest(stage: LocalStage, written: Any) -> None:
    """Sync the files that hooks and torch.distributed.checkpoint wrote into the stage."""
    for path in sorted(stage.folder.rglob("*")):
        name = path.relative_to(stage.folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in written:
            stage.adopt(name)
