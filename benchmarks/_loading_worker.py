"""The worker of `loading.py` on one rank or on two: the same data by the loader of every contender, in the same processes, interleaved.

A round is one pass over a loader; its time is divided by the number of batches. Before timing, it checks that every
contender reads every sample. Rank 0 writes all times as JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from turns import Contender, has_fabric, in_turns, joined

from slipstream import Accelerator, DataLoaderConfiguration, PartialState

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

BATCH, WIDTH = 32, 16
LONG, MEDIUM, SHUFFLED = 128, 64, 160
"""Batches in a pass; shuffled ones are more samples than an order lays out."""


class Records(Dataset[dict[str, Any]]):
    """Samples as dicts, as in text datasets."""

    def __init__(self, batches: int) -> None:
        self.tokens = torch.arange(batches * BATCH * WIDTH).reshape(-1, WIDTH)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, position: int) -> dict[str, Any]:
        tokens = self.tokens[position]
        return {"input_ids": tokens, "mask": torch.ones_like(tokens), "label": position}


class Stream(IterableDataset[dict[str, Any]]):
    """The same as a stream."""

    def __init__(self, batches: int) -> None:
        self.records = Records(batches)

    def __iter__(self) -> Any:
        return (self.records[position] for position in range(len(self.records)))


def tensors(batches: int) -> Dataset[Any]:
    samples = batches * BATCH
    return TensorDataset(torch.arange(samples * WIDTH, dtype=torch.float32).reshape(samples, WIDTH), torch.arange(samples))


def labels(batch: Any) -> list[int]:
    found: list[int] = (batch["label"] if isinstance(batch, dict) else batch[1]).tolist()
    return found


Data = Callable[[int], Any]
"""A dataset of so many batches."""
Loading = Callable[[int], Any]
"""The loader of one."""


def prepared(kind: type, dataset: Data, config: Any = None, **options: Any) -> Loading:
    def make(batches: int) -> Any:
        accelerator = kind(cpu=True, **({} if config is None else {"dataloader_config": config}))
        loader = accelerator.prepare(DataLoader(dataset(batches), batch_size=BATCH, **options))
        loader.owner = accelerator  # which would end with this function
        return loader

    return make


def plain(dataset: Data, shuffle: bool = False) -> Loading:
    def make(batches: int) -> Any:
        data = dataset(batches)
        if not dist.is_initialized():
            return DataLoader(data, batch_size=BATCH, shuffle=shuffle)
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=shuffle))

    return make


def fabric(dataset: Data, shuffle: bool = False) -> Loading:
    def make(batches: int) -> Any:
        from lightning.fabric import Fabric

        return Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(dataset(batches), batch_size=BATCH, shuffle=shuffle))

    return make


def cases() -> dict[str, tuple[int, dict[str, Loading]]]:
    """Return the batches per pass and the contenders of each case."""
    from accelerate import Accelerator as Theirs
    from accelerate.utils import DataLoaderConfiguration as TheirConfiguration

    def sharing(dataset: Data, shuffle: bool = False) -> dict[str, Loading]:
        return {
            "plain": plain(dataset, shuffle),
            "ours": prepared(Accelerator, dataset, shuffle=shuffle),
            "accelerate": prepared(Theirs, dataset, shuffle=shuffle),
            **({"fabric": fabric(dataset, shuffle)} if has_fabric() and not dist.is_initialized() else {}),
            "plain, again": plain(dataset, shuffle),
        }

    def dispatching(dataset: Data) -> dict[str, Loading]:
        return {
            "ours": prepared(Accelerator, dataset, DataLoaderConfiguration(dispatch_batches=True)),
            "accelerate": prepared(Theirs, dataset, TheirConfiguration(dispatch_batches=True)),
        }

    found = {"tensors": (LONG, sharing(tensors)), "beginning": (dist.get_world_size() if dist.is_initialized() else 1, sharing(tensors))}
    if not dist.is_initialized():
        return {**found, "tensors, shuffled": (SHUFFLED, sharing(tensors, True)), "dicts": (LONG, sharing(Records))}
    return {
        **found,
        "dicts dispatched": (MEDIUM, dispatching(Records)),
        "tensors dispatched": (MEDIUM, dispatching(tensors)),
        "stream dispatched": (MEDIUM, dispatching(Stream)),
    }


def passing(loader: Any) -> Contender:
    """Iterate over a loader; a call is a batch, and a round a whole pass."""

    def call(calls: int) -> None:
        for _ in loader:
            pass

    return call


def check(case: str, batches: int, loaders: dict[str, Any], state: PartialState) -> None:
    """Check that every contender reads every sample."""
    for name, loader in loaders.items():
        seen = state.gather_object([label for batch in loader for label in labels(batch)])
        assert sorted(seen) == list(range(batches * BATCH)), f"{case}: {name} gave {len(seen)} samples"


def profile(loader: Any, title: str, path: Path, writes: bool) -> None:
    """Profile our code by function."""
    profiler = cProfile.Profile()
    for _ in range(10):
        profiler.runcall(passing(loader), 1)
    if writes:
        with path.open("a") as file:
            print(f"\n{title}: 10 passes", file=file)
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    barrier = dist.barrier if dist.is_initialized() else (lambda: None)
    found: dict[str, Any] = {}
    for case, (batches, makes) in cases().items():
        loaders = {name: make(batches) for name, make in makes.items()}
        check(case, batches, loaders, state)
        contenders = {name: passing(loader) for name, loader in loaders.items()}
        times = in_turns(contenders, options.rounds, batches // state.num_processes, barrier)
        found[case] = joined(state.gather_object([{name: asdict(entry) for name, entry in times.items()}]))
        if options.profile:
            for name in ("plain", "ours"):
                if name in loaders:
                    profile(loaders[name], f"{case}, {name}", options.profile, state.is_main_process)
    if state.is_main_process:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
