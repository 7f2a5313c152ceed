"""The methods of `Accelerator` that save and load checkpoints and weights.

Arguments are checked here; saving and loading are implemented in `checkpoint/`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from slipstream.accelerator.components import AcceleratorBase, Components
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["CheckpointsMixin"]

_LOAD_KWARGS = frozenset({"map_location", "weights_only"})


class CheckpointsMixin(AcceleratorBase):
    """Saving and resuming a run."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool | None = None,
        metric: float | None = None,
        dedup: bool = False,
        max_shard_size: int | str | None = None,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that was prepared or registered as one atomic checkpoint, and return its path.

        Call it on every process, or on the main one alone: then random states of the others are not in it, which loading says. With
        numbered checkpoints (`ProjectConfiguration(automatic_checkpoint_naming=True)`) the folder is chosen here. `async_save`: copies
        the state, returns, and writes in the background. `metric`: what `ProjectConfiguration(keep_best=...)` compares. `dedup`:
        files that did not change since the last checkpoint are linked instead of written again. `max_shard_size` cuts the weights
        into several files. See `checkpoint/saver.py`, and `docs/checkpoints.md`.

        >>> import tempfile
        >>> from slipstream import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = accelerator.save_state(f"{folder}/first")
        ...     sorted(os.listdir(path))
        ['MANIFEST.json', 'model.safetensors', 'rank_0.safetensors', 'training.json']
        """
        if save_model_func_kwargs:
            unknown = ", ".join(save_model_func_kwargs)
            raise ConfigError(
                f"save_state got {unknown}, which it does not know: it takes async_save, metric, dedup and max_shard_size. Options of "
                "an engine's own state dict come with that engine."
            )
        if not safe_serialization:
            get_logger(__name__).warning(
                "save_state(safe_serialization=False) has no effect: checkpoints hold no pickle, and weights are safetensors always"
            )
        _check_flags("save_state", async_save=async_save, dedup=dedup, safe_serialization=safe_serialization)
        if metric is not None and not _is_number(metric):
            raise ConfigError(f"save_state(metric={metric!r}): it is one number, which says how good the checkpoint is, e.g. the loss")
        in_background = self._saver.async_save if async_save is None else async_save
        number = None if metric is None else float(metric)
        from slipstream.checkpoint.saver import SaveOptions
        from slipstream.files.object_store import redact

        with self._recorder.timed("checkpoint") as details:
            path = self._saver.save(output_dir, SaveOptions(in_background, dedup, number, max_shard_size))
            details.update(path=redact(path), text=os.path.basename(path), behind=in_background)
        if self._components.stepper.guards is not None:
            self._components.stepper.guards.look_at_checkpoint(path)
        return path

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool | None = None,
        allow_pickle: bool = False,
        resume: bool | None = None,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Resume where a checkpoint was saved, on the same or another number of processes, and return the path that was loaded.

        Without a folder the newest numbered checkpoint that verifies is taken. Call it on every process, after `prepare`. `strict=True`
        makes a changed meaning (effective batch, data, schedule, precision) an error instead of a warning; `strict=False` leaves out
        weights that are missing or unknown. The next iteration over a prepared loader continues where the checkpoint stood;
        `resume=False` begins the epoch anew, and `resume=True` continues where `DataLoaderConfiguration(resume="manual")` would not.
        `allow_pickle` reads what only unpickling can read in a checkpoint of Accelerate: it can run any code, so only for files that
        you trust. See `checkpoint/restore.py`.

        >>> import tempfile
        >>> from slipstream import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = accelerator.save_state(f"{folder}/first")
        ...     before = torch.nn.init.zeros_(model.bias)
        ...     accelerator.load_state(path) == path, model.bias.item() != 0.0
        (True, True)
        """
        _check_flags("load_state", strict=strict, allow_pickle=allow_pickle, resume=resume)
        given = {**_mapping(load_kwargs), **load_model_func_kwargs}
        unknown = sorted(set(given) - _LOAD_KWARGS)
        if unknown:
            raise ConfigError(
                f"load_state got {', '.join(unknown)}, which it does not know here: it takes strict, allow_pickle and resume as arguments "
                f"of its own, and in load_kwargs {' and '.join(sorted(_LOAD_KWARGS))}"
            )
        if given.get("weights_only") is False:
            allow_pickle = True
        from slipstream.checkpoint.restore import LoadOptions, restore
        from slipstream.files.object_store import redact

        with self._recorder.timed("restore") as details:
            path = restore(self._saver, input_dir, LoadOptions(strict, allow_pickle, resume))
            details.update(path=redact(path), text=os.path.basename(path))
        return path

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` saves and `load_state` loads, through their `state_dict` and `load_state_dict`.

        The state is plain data with tensors in it; see `checkpoint/serialize.py`. It is that of the process that writes, and all load it.

        >>> from slipstream import Accelerator
        >>> Accelerator(cpu=True).register_for_checkpointing(torch.nn.Linear(2, 1))
        """
        registry = self._components.registry
        for thing in objects:
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(thing, name, None))]
            if missing:
                raise ConfigError(f"register_for_checkpointing got a {type(thing).__name__} without {' and '.join(missing)}: give it both")
            if isinstance(thing, type):
                raise ConfigError(
                    f"register_for_checkpointing got the class {thing.__name__}: register an object of it, {thing.__name__}(...)"
                )
            known = [*registry.loaders, *registry.optimizers, *registry.schedulers]
            inner = [*(prepared.optimizer for prepared in registry.optimizers), *(prepared.scheduler for prepared in registry.schedulers)]
            if any(thing is other for other in (*known, *inner)) or _is_model(thing, self._components):
                kind = type(thing).__name__
                raise ConfigError(f"register_for_checkpointing got a {kind} that is prepared: it is saved with the rest already")
        for thing in objects:
            if not any(thing is known for known in self._saver.objects):
                self._saver.objects.append(thing)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before a checkpoint is written. Files that it writes into the folder belong to the
        checkpoint, and weights that it removes from the list are not written.

        >>> import pathlib, tempfile
        >>> from slipstream import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> handle = accelerator.register_save_state_pre_hook(lambda models, weights, to: pathlib.Path(to, "notes.txt").write_text("mine"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pathlib.Path(accelerator.save_state(f"{folder}/first"), "notes.txt").read_text()
        'mine'
        >>> handle.remove()
        """
        return _register_hook(self._saver.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before a checkpoint is loaded. Models that it removes from the list are not loaded.

        >>> from slipstream import Accelerator
        >>> Accelerator(cpu=True).register_load_state_pre_hook(lambda models, folder: print(f"from {folder}")).remove()
        """
        return _register_hook(self._saver.load_hooks, hook)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model, and nothing else, as other libraries read them; see `checkpoint/model_io.py`.

        The main process writes. Of a sharded model it puts one tensor after the other together, so every process has to call it.

        >>> import tempfile
        >>> from slipstream import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     accelerator.save_model(model, folder)
        ...     os.listdir(folder)
        ['model.safetensors']
        """
        sharded = not self._components.strategy.replicated
        if not self._saver.writes and not sharded:
            return
        from slipstream.checkpoint.model_io import save_model, save_sharded_model
        from slipstream.checkpoint.sharded import is_sharded
        from slipstream.parallel.unwrap import extract_model_from_parallel

        bare = extract_model_from_parallel(model, keep_torch_compile=False)
        if sharded and any(map(is_sharded, bare.state_dict().values())):
            save_sharded_model(self._saver, bare, save_directory, max_shard_size, safe_serialization)
        elif self._saver.writes:
            save_model(bare, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool | None = None) -> None:
        """Write one object to a file, on the main process; see `checkpoint/object_file.py`.

        >>> import tempfile
        >>> from slipstream import Accelerator
        >>> from slipstream.utils import load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Accelerator(cpu=True).save({"best": 0.25}, f"{folder}/best.json")
        ...     load(f"{folder}/best.json")
        {'best': 0.25}
        """
        if self._saver.writes:
            from slipstream.checkpoint.object_file import save

            save(obj, f, save_on_each_node=self._saver.project.save_on_each_node, safe_serialization=safe_serialization)


def _check_flags(call: str, **flags: Any) -> None:
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{call}({name}={value!r}): write True or False")


def _mapping(load_kwargs: Any) -> dict[str, Any]:
    if load_kwargs is not None and not isinstance(load_kwargs, dict):
        raise ConfigError(f"load_state(load_kwargs={load_kwargs!r}): it is a dict, and not a {type(load_kwargs).__name__}")
    return load_kwargs or {}


def _is_model(value: Any, components: Components) -> bool:
    return isinstance(value, torch.nn.Module) and components.stepper.find(value) is not None


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, str, bytes)):
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False


def _register_hook(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    if not callable(hook):
        raise ConfigError(f"a hook is a function, and not a {type(hook).__name__}: pass it without calling it")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
