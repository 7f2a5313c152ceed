"""Methods of `Accelerator` that save and load checkpoints, weights and objects, with Accelerate's signatures.

Checkpoints are Slipstream's: committed, checksummed and without pickle. `checkpoint_format="accelerate"` of `save_state`, or
ACCELERATE_CHECKPOINT_FORMAT=accelerate, writes the layout that the real package loads. `load_state` reads both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError, MissingCheckpointError

__all__ = ["CheckpointsMixin", "NoSuchFolderError", "choose_format"]

_FORMATS = ("slipstream", "accelerate")
_VARIABLE = "ACCELERATE_CHECKPOINT_FORMAT"


class NoSuchFolderError(MissingCheckpointError, ValueError):
    """`load_state` was given a folder that does not exist: a ValueError, as scripts written for Accelerate expect."""


class CheckpointsMixin:
    """The checkpoint side of `accelerate.Accelerator`. Its methods come before those of `slipstream.Accelerator`."""

    _format_writer: Any = None

    # -- what is saved --------------------------------------------------------------------------------------------

    @property
    def _custom_objects(self) -> list[Any]:
        return self._saver.objects

    @property
    def _save_model_state_pre_hook(self) -> Any:
        return self._saver.save_hooks

    @property
    def _load_model_state_pre_hook(self) -> Any:
        return self._saver.load_hooks

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` saves, through their `state_dict` and `load_state_dict`. Prepared objects may be among them."""
        from slipstream.errors import ConfigError

        wrong = []
        for index, value in enumerate(objects):
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(value, name, None))]
            if missing or isinstance(value, type):
                wrong.append(f"Item at index {index}: a {type(value).__name__} without {' and '.join(missing) or 'being an object'}")
        if wrong:
            raise ConfigError("register_for_checkpointing needs objects with state_dict and load_state_dict.\n" + "\n".join(wrong))
        known = self._saver.objects
        known.extend(value for value in objects if not any(value is other for other in known))

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, weights, output_dir)` before a checkpoint is written; weights that it removes from the list are not written.

        As in Accelerate, models are without the wrapper of data parallelism (diffusers' scripts ask for their class). `output_dir` is
        where the files are collected before the checkpoint gets its name.
        """
        return super().register_save_state_pre_hook(lambda models, weights, folder: hook([*map(_bare, models)], weights, folder))

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, input_dir)` before a checkpoint is loaded; models that it removes from the list are not loaded."""

        def call(models: list[Any], folder: str) -> None:
            bare = [*map(_bare, models)]
            hook(bare, folder)
            left = {id(model) for model in bare}
            models[:] = [model for model in models if id(_bare(model)) in left]

        return super().register_load_state_pre_hook(call)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save everything that was prepared or registered, and return the path of the checkpoint.

        `checkpoint_format` is "slipstream" (the default) or "accelerate". Slipstream's `async_save`, `metric`, `dedup` and
        `max_shard_size` are taken for its own format. `safe_serialization=False` adds `pytorch_model.bin` to a checkpoint, or writes it
        in the place of `model.safetensors` in Accelerate's format.
        """
        from slipstream.errors import ConfigError

        chosen, origin = choose_format(save_model_func_kwargs.pop("checkpoint_format", None))
        if not isinstance(safe_serialization, bool):
            raise ConfigError(f"save_state(safe_serialization={safe_serialization!r}): write True or False")
        if chosen == "accelerate":
            misplaced = sorted(name for name, value in save_model_func_kwargs.items() if value is not None and value is not False)
            if misplaced:
                raise ConfigError(
                    f"save_state got {', '.join(misplaced)}, for which the format of Accelerate ({origin}) has no place: leave it out, or "
                    "save in Slipstream's format"
                )
            return self._save_in_accelerate_format(output_dir, safe_serialization)
        with self._extra_torch_files() if not safe_serialization else _nothing():
            return super().save_state(output_dir, **save_model_func_kwargs)

    def _save_in_accelerate_format(self, output_dir: Any, safe_serialization: bool) -> str:
        if self._format_writer is None:
            from accelerate._checkpoint_writer import AccelerateFormatWriter

            self._format_writer = AccelerateFormatWriter(self)
        with self._recorder.timed("checkpoint") as details:
            path = self._format_writer.save(output_dir, safe_serialization=safe_serialization)
            details.update(path=path, text=os.path.basename(path), behind=False)
        return path

    @contextmanager
    def _extra_torch_files(self) -> Iterator[None]:
        """Have `pytorch_model.bin` written into the checkpoint as well: scripts that ask for it look for it there."""
        if not self._components.strategy.replicated:
            from slipstream.logging import get_logger

            get_logger(__name__).warning_once(
                "save_state(safe_serialization=False) has no effect on sharded weights: they are written in shards. "
                "checkpoint_format='accelerate' writes what Accelerate does."
            )
            yield
            return

        def write(models: Any, weights: list[Any], folder: str) -> None:
            if self._saver.writes:
                from accelerate.checkpointing import numbered, torch_writer

                for number, state in enumerate(weights):
                    torch_writer(state)(str(Path(folder) / numbered("pytorch_model", number, ".bin")))

        handle = super().register_save_state_pre_hook(write)  # runs last, after the hooks of the script have removed what they save
        try:
            yield
        finally:
            handle.remove()

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> str:
        """Load a checkpoint of Slipstream or of Accelerate 1.15, and return the path that was loaded.

        `map_location` is "cpu" or "on_device"; `strict=False` leaves out weights that are missing or unknown. As in Accelerate, loaders
        begin their epoch anew, in the same order, and `skip_first_batches` continues it; those with `use_stateful_dataloader` continue
        by themselves. `resume=True` lets all of them continue. `load_kwargs={"weights_only": False}` unpickles what only that can read.
        """
        from accelerate.checkpointing import check_map_location

        given = dict(load_model_func_kwargs)
        if "map_location" in given:
            check_map_location(given.pop("map_location"))
        if given.get("strict") is True:
            given["strict"] = None  # there it is about weights, which are compared in any case
        if given.get("resume") is None:
            given["resume"] = bool(getattr(self.dataloader_config, "use_stateful_dataloader", False))
        try:
            path = super().load_state(input_dir, load_kwargs, **given)
        except CheckpointError as error:
            if input_dir is None or os.path.exists(input_dir) or "://" in os.fspath(input_dir):
                raise
            raise NoSuchFolderError(str(error)) from error
        self._load_stateful_positions(path, resume=bool(given["resume"]))
        return path

    def _load_stateful_positions(self, path: str, *, resume: bool) -> None:
        """Let loaders of torchdata continue where a checkpoint in Accelerate's format says; Slipstream's has been applied already."""
        from slipstream.checkpoint.manifest import MANIFEST

        numbered = enumerate(self._dataloaders)
        stateful = [(number, loader) for number, loader in numbered if getattr(loader, "use_stateful_dataloader", False)]
        if not stateful or not resume or (Path(path) / MANIFEST).exists():
            return
        import torch

        from accelerate.checkpointing import read_stateful_position

        def read() -> None:
            with torch.random.fork_rng(devices=()):  # torchdata draws a seed where it begins a pass; the states have been restored
                for number, loader in stateful:
                    state = read_stateful_position(Path(path), number)
                    if state is not None:
                        loader.load_state_dict(state)

        self._saver.run_and_agree("load_state", read)

    # -- weights and objects --------------------------------------------------------------------------------------

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write one object to a file on the main process (or one of each machine), by `torch.save` unless `safe_serialization`."""
        from accelerate._object_files import save

        save(obj, f, save_on_each_node=self.project_configuration.save_on_each_node, safe_serialization=safe_serialization)


def choose_format(given: str | None) -> tuple[str, str]:
    """Return the format of a checkpoint, and where that was said.

    >>> choose_format("accelerate")
    ('accelerate', "checkpoint_format='accelerate'")
    """
    from slipstream.config.sources import environment
    from slipstream.errors import ConfigError

    named = environment().get(_VARIABLE) or None
    origin = f"checkpoint_format={given!r}" if given is not None else f"{_VARIABLE}={named}"
    chosen = given if given is not None else named
    if chosen is None:
        return _FORMATS[0], "default"
    if chosen not in _FORMATS:
        raise ConfigError(f"{origin}: there is no such format of checkpoints. Write {' or '.join(map(repr, _FORMATS))}.")
    return str(chosen), origin


def _bare(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def _nothing() -> Iterator[None]:
    yield
