"""Datasets of Hugging Face, real ones built in memory: how they are shared, shuffled anew in each epoch, and continued."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream import Accelerator, PartialState
from slipstream.data.stream_dataset import has_exact_state
from slipstream.utils import set_seed

datasets = pytest.importorskip("datasets")

COUNT = 24


def rows(batch: dict[str, Any]) -> list[int]:
    return [int(number) for number in batch["number"]]


def make_stream(shards: int, *stages: str) -> Any:
    """A stream of numbers, and a list that gets every number which was read of it."""
    read: list[int] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["number"])
        return row

    stream = datasets.Dataset.from_dict({"number": list(range(COUNT))}).to_iterable_dataset(num_shards=shards)
    if "buffer" in stages:
        stream = stream.shuffle(seed=5, buffer_size=6)
    stream = stream.map(note)
    if "filter" in stages:
        stream = stream.filter(lambda row: row["number"] % 3 > 0)
    if "torch" in stages:
        stream = stream.with_format("torch")
    return stream, read


# -- sharing ----------------------------------------------------------------------------------------------------------


def epochs_of(shards: int, size: int, *stages: str) -> Any:
    accelerator = Accelerator(cpu=True)
    stream, read = make_stream(shards, *stages)
    loader = accelerator.prepare(DataLoader(stream, batch_size=size))
    found = []
    for _ in range(2):
        seen: list[int] = []
        for batch in loader:
            seen += accelerator.gather_for_metrics(torch.tensor(rows(batch))).tolist()
        found.append(seen)
    return found, loader.mode, len(read)  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_are_shared_where_that_is_even(ranks: Any, world: int) -> None:
    """With a multiple of the processes each reads its own shards; otherwise all read, and the samples are shared."""
    for shards in (1, 6):
        for found, mode, read in ranks(world).run(epochs_of, shards, 2):
            assert [sorted(seen) for seen in found] == [list(range(COUNT))] * 2
            even = shards % world == 0
            assert mode == ("whole" if world == 1 else "own" if even else "turns")
            assert read == 2 * COUNT // (world if even else 1)


def test_uneven_shards_are_said(ranks: Any, capfd: Any) -> None:
    ranks(2).run(epochs_of, 3, 2)
    assert "num_shards=3, which 2 processes cannot share evenly, so they share its samples" in capfd.readouterr().out


def test_each_epoch_is_shuffled_anew(ranks: Any) -> None:
    """`set_epoch` of the dataset is called for every pass."""
    for world in (1, 2):
        (first, second), _, _ = ranks(world).run(epochs_of, 6, 2, "buffer")[0]
        assert sorted(first) == sorted(second) == list(range(COUNT))
        assert first != second


def read_map_style() -> Any:
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    dataset = datasets.Dataset.from_dict({"number": list(range(11)), "text": [str(number) for number in range(11)]})
    loader = accelerator.prepare(DataLoader(dataset.with_format("torch"), batch_size=2, shuffle=True))
    return [rows(accelerator.gather_for_metrics(batch)) for batch in loader]


def test_map_style_dataset_is_the_same_on_any_number_of_processes(ranks: Any) -> None:
    whole = sum(read_map_style(), [])
    assert sorted(whole) == list(range(11))
    for world in (2, 3):
        for found in ranks(world).run(read_map_style):
            assert sum(found, []) == whole


def split_dataset(padding: bool) -> Any:
    with PartialState().split_between_processes(
        datasets.Dataset.from_dict({"number": list(range(7))}), apply_padding=padding
    ) as part:
        return type(part).__name__, part["number"][:]


def test_a_part_of_a_dataset_is_a_dataset(ranks: Any) -> None:
    assert list(ranks(3).run(split_dataset, False)) == [("Dataset", [0, 1, 2]), ("Dataset", [3, 4]), ("Dataset", [5, 6])]
    assert [part for _, part in ranks(3).run(split_dataset, True)] == [[0, 1, 2], [3, 4, 4], [5, 6, 6]]


# -- resuming ---------------------------------------------------------------------------------------------------------


def train(folder: str, shards: int, stages: tuple[str, ...], workers: int, resumes: bool) -> Any:
    """Read three epochs and save in the middle of the second; or continue from there."""
    accelerator = Accelerator(cpu=True)
    stream, read = make_stream(shards, *stages)
    # By default, Python 3.14 pickles the stream for its workers, and the functions here cannot be.
    forked = multiprocessing.get_context("fork") if workers else None
    plain = DataLoader(stream, batch_size=2, num_workers=workers, multiprocessing_context=forked)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), plain)
    if resumes:
        accelerator.load_state(folder)
    seen: list[Any] = []
    for epoch in range(1 if resumes else 0, 3):
        for step, batch in enumerate(loader):
            accelerator.backward(model(torch.tensor(rows(batch), dtype=torch.float32)[:, None]).sum())
            seen.append((epoch, rows(batch)))
            if not resumes and (epoch, step) == (1, 1):
                accelerator.save_state(folder)
                seen.clear()
    return seen, len(read)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("shards", "stages"), [(6, ()), (1, ()), (6, ("filter", "torch")), (6, ("buffer",))])
def test_a_later_epoch_continues_without_reading_from_its_start(
    ranks: Any, tmp_path: Path, world: int, shards: int, stages: tuple[str, ...]
) -> None:
    """The state of the dataset is in the checkpoint. Only a shuffle buffer, which is not in that state, makes it read again."""
    folder = str(tmp_path / "saved")
    whole = [seen for seen, _ in ranks(world).run(train, folder, shards, stages, 0, False)]
    resumed = ranks(world).run(train, folder, shards, stages, 0, True)
    assert [seen for seen, _ in resumed] == whole
    for _, read in resumed:
        own = COUNT // world if shards % world == 0 else COUNT
        if stages == ("buffer",):
            assert read == 2 * own
        elif "filter" not in stages:
            first = 0 if shards % world == 0 else 2 * world  # compared between processes that read the same
            assert read == 2 * own - (4 if shards % world == 0 else 4 * world) + first


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_continue(tmp_path: Path, workers: int) -> None:
    folder = str(tmp_path / "saved")
    whole, _ = train(folder, 6, (), workers, False)
    resumed, _ = train(folder, 6, (), workers, True)
    assert resumed == whole


def test_a_loaded_position_is_used_once() -> None:
    """A stream that was continued begins at its start when the same epoch is read again."""
    accelerator = Accelerator(cpu=True)
    stream, _ = make_stream(6)
    loader = accelerator.prepare(DataLoader(stream, batch_size=4))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    loader.load_state_dict(state)
    assert sum((rows(batch) for batch in loader), []) == list(range(4, COUNT))
    loader.set_epoch(0)
    assert sum((rows(batch) for batch in loader), []) == list(range(COUNT))


def pipelines() -> dict[str, Any]:
    stream, _ = make_stream(6)
    other = datasets.Dataset.from_dict({"number": list(range(100, 112))}).to_iterable_dataset(num_shards=2)
    found = {
        "map": stream,
        "filter": make_stream(3, "filter", "torch")[0],
        "concatenated": datasets.concatenate_datasets([stream.take(5), stream.skip(7), other.select_columns(["number"])]),
        "interleaved": datasets.interleave_datasets([stream, other]),
        "drawn": datasets.interleave_datasets([stream, other], probabilities=[0.7, 0.3], seed=4),
        "batched": stream.map(lambda batch: batch, batched=True, batch_size=5),
    }
    if hasattr(other, "shard"):  # datasets 3.1 and later
        found["sharded"] = stream.shard(num_shards=2, index=1)
    if hasattr(other, "repeat"):  # datasets 3.3 and later
        found["repeated"] = other.repeat(2)
    return found


@pytest.mark.parametrize("name", list(pipelines()))
def test_a_state_that_is_taken_for_exact_is(name: str) -> None:
    """Wherever a stream stands, its state leads to the rest. Names of stages are private to `datasets`: this notices if they change."""
    stream = pipelines()[name]
    assert has_exact_state(stream)
    whole, states = [], []
    for row in stream:
        whole.append(int(row["number"]))
        states.append(stream.state_dict())
    for place, state in enumerate(states, start=1):
        fresh = pipelines()[name]
        fresh.load_state_dict(state)
        assert [int(row["number"]) for row in fresh] == whole[place:], place


def test_a_shuffle_buffer_is_not_part_of_a_state() -> None:
    assert not has_exact_state(make_stream(6, "buffer")[0])
    assert not has_exact_state(pipelines()["concatenated"].shuffle(seed=1, buffer_size=10))
