"""Writes folders as `save_state` of Accelerate 1.x lays them out, with torch and numpy alone.

Compared once, file by file and instruction by instruction of their pickles, with folders that version 1.15 had written on one and on two
processes: the same names, the same keys in the same order, the same types. A part is written for every argument that is given:

    weights      one file per model; safetensors by default, else torch.save of the state dict
    states       torch.save of what state_dict() of the optimizer, scheduler, scaler or stateful loader gave
    random       per process: the step, random.getstate(), numpy's state as its old tuple, torch's as bytes; lists of bytes per device
    samplers     torch.save of a whole object, whose class is the library's
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file


def write(
    folder: Path,
    *,
    models: Sequence[Mapping[str, Any]] = (),
    safe: bool = True,
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Any] = (),
    scaler: Any = None,
    loaders: Sequence[Any] = (),
    samplers: Sequence[tuple[int, int]] = (),
    objects: Sequence[Any] = (),
    world: int = 1,
    step: int = 0,
) -> Path:
    """A checkpoint with these parts; random states are those of this process, for every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, weights in enumerate(models):
        if safe:
            save_file(dict(weights), folder / name_of("model", ".safetensors", number), {"format": "pt"})
        else:
            torch.save(weights, folder / name_of("pytorch_model", ".bin", number))
    for stem, states in (("optimizer", optimizers), ("scheduler", schedulers), ("dl_state_dict", loaders)):
        for number, state in enumerate(states):
            torch.save(state, folder / name_of(stem, ".bin", number))
    for number, (epoch, seed) in enumerate(samplers):
        with sampler(epoch, seed) as made:
            torch.save(made, folder / name_of("sampler", ".bin", number))
    if scaler is not None:
        torch.save(scaler, folder / "scaler.pt")
    for number, state in enumerate(objects):
        torch.save(state, folder / f"custom_checkpoint_{number}.pkl")
    for rank in range(world):
        torch.save(random_states(step), folder / f"random_states_{rank}.pkl")
    return folder


def name_of(stem: str, suffix: str, number: int) -> str:
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def random_states(step: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": numpy.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


@contextmanager
def sampler(epoch: int, seed: int) -> Iterator[Any]:
    """A sampler of the library's class, which exists only inside of the block; afterwards nobody could unpickle it."""
    module = types.ModuleType("accelerate.data_loader")
    kind = type("SeedableRandomSampler", (torch.utils.data.RandomSampler,), {"__module__": module.__name__})
    module.SeedableRandomSampler = kind  # type: ignore[attr-defined]
    assert "accelerate" not in sys.modules
    sys.modules.update({"accelerate": types.ModuleType("accelerate"), module.__name__: module})
    try:
        made = kind(torch.utils.data.TensorDataset(torch.arange(5.0)), generator=torch.Generator())
        made.initial_seed, made.epoch = seed, epoch
        yield made
    finally:
        del sys.modules[module.__name__], sys.modules["accelerate"]


def loader_state(batches: int, *, workers: int = 0, finished: bool = False, dataset: Any = None) -> dict[str, Any]:
    """What a stateful loader says: without workers what it has given, with workers the last snapshot and what came since."""
    if not workers:
        none = dict.fromkeys(("_index_sampler_state", "_sampler_iter_state"))
        counts = {"_sampler_iter_yielded": batches, "_num_yielded": batches, "_IterableDataset_len_called": None, "_shared_seed": None}
        return {**none, **counts, "fetcher_state": None, "dataset_state": dataset, "_iterator_finished": finished}
    counts = {"_sampler_iter_yielded": batches, "_IterableDataset_len_called": None, "_shared_seed": None, "_base_seed": 1234}
    main = {"_num_workers": workers, "_sampler_iter_state": None, "_index_sampler_state": None, **counts}
    each = {f"worker_{index}": {"worker_id": index, "dataset_state": dataset, "fetcher_state": None} for index in range(workers)}
    snapshot = {"_snapshot_step": batches - 1, "_last_yielded_worker_id": 0, "_main_snapshot": main, "_worker_snapshots": each}
    return {"_snapshot": snapshot, "_steps_since_snapshot": 1, "_iterator_finished": finished}
