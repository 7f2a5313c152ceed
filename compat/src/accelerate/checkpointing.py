"""Files of a checkpoint in the layout of Accelerate 1.15: written and read here one by one.

    model.safetensors or pytorch_model.bin           weights; model_1.safetensors, ... of further models
    optimizer.bin, scheduler.bin, scaler.pt          `state_dict()`s by torch.save, numbered in the same way
    dl_state_dict.bin                                the position of a loader with `use_stateful_dataloader`
    random_states_0.pkl                              of each process: random states, and the count of batches
    custom_checkpoint_0.pkl                          a registered object

`Accelerator.save_state` writes this layout only where it is asked for (`_checkpoint_writer.py`); Slipstream's own is the default. All but
safetensors files are pickles. Reading builds no object of a class that a file names, unless `weights_only=False` asks for that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate._forwarding import forward_names

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.imports": """is_cuda_available is_hpu_available is_mlu_available is_musa_available is_neuron_available
            is_sdaa_available is_torch_xla_available is_xpu_available""",
        "accelerate.utils.other": "get_pretty_name load save",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME
            SCALER_NAME SCHEDULER_NAME WEIGHTS_NAME""",
    },
)
__all__ = sorted([*_forwarded, "load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state"])

Write = Callable[[str], object]
"""Writes one file to the path that it is given."""


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the state of a run into a folder and return its path; each file appears when it is complete.

    The main process (or the first of each machine) writes what all share, and every process its random states. The folder as a whole is
    not replaced at once: `Accelerator.save_state` does that.
    """
    from slipstream.distributed.state import PartialState
    from slipstream.files.atomic_files import AtomicFiles, check_local_path
    from slipstream.files.disk import Disk

    folder, state = check_local_path(output_dir, "output_dir"), PartialState()
    files = {random_states_name(process_index): random_states_writer(step)}
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        files |= shared_files(dict(enumerate(model_states)), optimizers, schedulers, dataloaders, scaler, safe_serialization)
    with AtomicFiles(folder, Disk()) as written:
        for name, write in files.items():
            written.adopt(name, write)
        written.place()
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load what `save_accelerator_state` wrote into these objects, and return the attributes to set on an Accelerator (`step`).

    `map_location` is "cpu", or "on_device" for the devices of the parameters. States of optimizers follow their parameters either way.
    """
    from slipstream.checkpoint.accelerate_import import read_accelerate_checkpoint
    from slipstream.devices import rng
    from slipstream.logging import get_logger

    check_map_location(map_location)
    allow_pickle = (load_kwargs or {}).get("weights_only") is False
    found = read_accelerate_checkpoint(input_dir, allow_pickle=allow_pickle)
    _check_enough(input_dir, "models", models, found.models)
    _check_enough(input_dir, "optimizers", optimizers, found.optimizers)
    _check_enough(input_dir, "schedulers", schedulers, found.schedulers)
    for model, state in zip(models, found.models, strict=False):
        _load_weights(model, state, load_model_func_kwargs)
    for target, state in (*zip(optimizers, found.optimizers, strict=False), *zip(schedulers, found.schedulers, strict=False)):
        target.load_state_dict(state)
    for number, loader in enumerate(dataloaders):
        position = read_stateful_position(Path(input_dir), number) if getattr(loader, "use_stateful_dataloader", False) else None
        if position is not None:
            loader.load_state_dict(position)
    if scaler is not None and found.scaler is not None:
        scaler.load_state_dict(found.scaler)
    if process_index in found.ranks:
        rng.restore(found.ranks[process_index])
    else:
        get_logger(__name__).warning(f"{input_dir} has no random states of process {process_index}", main_process_only=False)
    for line in found.warnings:
        get_logger(__name__).info(line)
    return {"step": found.step}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of one registered object as `custom_checkpoint_<index>.pkl`, with pickle."""
    from accelerate._object_files import save

    save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl", save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the state that `save_custom_state` wrote. It unpickles the file, which runs code in it: only for files that you trust."""
    from accelerate._object_files import load

    obj.load_state_dict(load(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu", weights_only=False))


# -- the files --------------------------------------------------------------------------------------------------------


def numbered(stem: str, number: int, suffix: str) -> str:
    """Return the name of the nth file of a kind.

    >>> numbered("optimizer", 0, ".bin"), numbered("optimizer", 1, ".bin")
    ('optimizer.bin', 'optimizer_1.bin')
    """
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def random_states_name(rank: int) -> str:
    """Return the name of the file with the random states of a process."""
    return f"random_states_{rank}.pkl"


def shared_files(
    weights: Mapping[int, Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    loaders: Sequence[Any],
    scaler: Any,
    safe_serialization: bool,
) -> dict[str, Write]:
    """Return what the main process writes: by name, a function that writes the file. `weights` are by the number of the model."""
    files: dict[str, Write] = {}
    for number, state in weights.items():
        files |= _weight_files(number, state, safe_serialization)
    for number, optimizer in enumerate(optimizers):
        files[numbered("optimizer", number, ".bin")] = torch_writer(optimizer.state_dict())
    for number, scheduler in enumerate(schedulers):
        files[numbered("scheduler", number, ".bin")] = torch_writer(scheduler.state_dict())
    for number, loader in enumerate(loaders):
        if getattr(loader, "use_stateful_dataloader", False):
            files[numbered("dl_state_dict", number, ".bin")] = torch_writer(loader.state_dict())
    if scaler is not None:
        files["scaler.pt"] = torch_writer(scaler.state_dict())
    return files


def torch_writer(value: Any) -> Write:
    """Return a function that writes a value with `torch.save`."""
    import torch

    return partial(torch.save, value)


def random_states_writer(step: int) -> Write:
    """Return a function that writes the random states of this process, as they are now."""
    import numpy
    import torch

    from slipstream.devices import rng

    states: dict[str, Any] = {"step": step, "random_state": random.getstate(), "numpy_random_seed": numpy.random.get_state()}
    states["torch_manual_seed"] = torch.get_rng_state()
    for kind, state in rng.capture().items():
        if kind not in ("python", "numpy", "torch"):  # a device: Accelerate has a list of states for CUDA, and one state for others
            states[f"torch_{kind}_manual_seed"] = state["states"] if kind == "cuda" else state["states"][state["current"]]
    return torch_writer(states)


def _weight_files(number: int, state: Mapping[str, Any], safe_serialization: bool) -> dict[str, Write]:
    if not safe_serialization:
        return {numbered("pytorch_model", number, ".bin"): torch_writer(state)}
    from slipstream.checkpoint.weights import METADATA, split_state_dict
    from slipstream.errors import ConfigError

    weights = split_state_dict(state, f"the weights of model {number}")
    weights.extra.pop(METADATA, None)  # layer versions
    if weights.extra:
        raise ConfigError(
            f"model {number} has {next(iter(weights.extra))!r} in its state dict, which is no tensor that safetensors can hold: the format "
            "of Accelerate has no place for it. Pass safe_serialization=False, or save in Slipstream's format."
        )
    return {numbered("model", number, ".safetensors"): partial(_write_safetensors, weights.tensors)}


def _write_safetensors(tensors: Mapping[str, Any], path: str) -> None:
    from slipstream.checkpoint.tensor_bytes import encode_tensors

    chunks, _ = encode_tensors(tensors, {})
    with open(path, "wb") as file:
        file.writelines(chunks)


# -- reading ----------------------------------------------------------------------------------------------------------


def check_map_location(map_location: Any) -> None:
    """Raise unless `map_location` is one that states of optimizers can be loaded to."""
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(
            f"Unsupported optimizer map location passed: {map_location!r}. Write 'cpu', or 'on_device' for the devices of the parameters."
        )


def _check_enough(input_dir: Any, what: str, targets: Sequence[Any], found: Sequence[Any]) -> None:
    if len(found) < len(targets):
        from slipstream.errors import CheckpointError

        raise CheckpointError(f"{input_dir} has the state of {len(found)} {what}, and {len(targets)} are to be loaded")


def _load_weights(model: Any, state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from slipstream.checkpoint.weights import check_fit, load_into

    strict = options.get("strict", True)
    tensors = {name: value for name, value in state.items() if hasattr(value, "shape")}
    extra = {name: value for name, value in state.items() if name not in tensors}
    check_fit(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, {}, extra).demand(
        "the checkpoint", type(model).__name__, strict=strict
    )
    load_into(model, tensors, {}, extra, strict=strict)


def read_stateful_position(folder: Path, number: int) -> Any:
    """Return the position of the nth loader, as torchdata's loader wrote it; None if the checkpoint has none."""
    from accelerate._object_files import load

    path = folder / numbered("dl_state_dict", number, ".bin")
    return load(path, map_location="cpu") if path.exists() else None
