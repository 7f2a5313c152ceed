"""Iterable data on 1 to 4 ranks: the global batches of one process, every item once, an end that all ranks share."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from log_capture import captured_log
from slipstream import Accelerator, PartialState
from slipstream.data.loader import PreparedLoader
from slipstream.data.options import DataLoaderConfiguration, DataRank, LoaderSettings
from slipstream.data.prepare import build_loader, skip_first_batches
from slipstream.data.stream_loader import StreamLoader
from slipstream.distributed.gradient_state import BatchShares, GradientState
from slipstream.distributed.guard import Channel, Limits
from slipstream.errors import ConfigError

WORLDS = [1, 2, 3, 4]
LOGGER = "slipstream.data"

relaxed = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Stream(IterableDataset[Any]):
    """Counts what is read of it."""

    def __init__(self, items: Any = ()) -> None:
        self.items = items
        self.read = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.read += 1
            yield item

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Seekable(Stream):
    def skip(self, count: int) -> Seekable:
        rest = Seekable(self.items[count:])
        rest.whole = self  # type: ignore[attr-defined]
        return rest


class Sharded(Stream):
    """The protocol of Hugging Face datasets, in small."""

    def __init__(self, shards: list[list[int]]) -> None:
        super().__init__([item for shard in shards for item in shard])
        self.shards = shards

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.shards[index::num_shards])


class Told(Stream):
    """Shared out already, and says so."""

    def __init__(self, items: Any, rank: int, world_size: int) -> None:
        super().__init__(items)
        self.rank, self.world_size = rank, world_size


class Shuffling(Stream):
    """Shuffles and augments with the global random numbers, in every way."""

    def __iter__(self) -> Iterator[Any]:
        items = list(self.items)
        random.shuffle(items)
        for item in items:
            yield [item, float(numpy.random.rand()), float(torch.rand(()))]


class ByWorker(Stream):
    """Shares itself out between the workers of a loader."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is None or info.dataset is self
        return iter(self.items if info is None else self.items[info.id :: info.num_workers])


def prepared(loader: DataLoader[Any], rank: int | None = None, world_size: int = 1, *, seed: int = 7, **options: Any) -> PreparedLoader:
    """The loader of this process, or of a rank that is only simulated."""
    effective = options.pop("effective_batch_size", None)
    if rank is None:
        state = PartialState()
        place = DataRank(state.process_index, state.num_processes, state._channel, state._limits)
    else:
        place = DataRank(rank, world_size, Channel, Limits())
    config = DataLoaderConfiguration(**options)
    settings = LoaderSettings(
        data_rank=place, config=config, seed=seed, gradient_state=GradientState(), effective_batch_size=effective
    )
    return build_loader(loader, settings)


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def passed(loader: Any) -> list[Any]:
    """One pass: each batch, how it was shared, whether it is the last one, and the remainder."""
    return [(listed(batch), loader.shares, loader.end_of_dataloader, loader.remainder) for batch in loader]


def together(results: list[list[Any]]) -> list[tuple[list[Any], BatchShares | None, bool, int]]:
    """The passes of all ranks as global batches, without what does not count; ranks know the same of each."""
    found = []
    for pieces in zip(*results, strict=True):
        assert all(piece[1:] == pieces[0][1:] for piece in pieces), "ranks know the same of a batch"
        shares = pieces[0][1]
        if shares is not None:
            assert tuple(len(piece[0]) for piece in pieces) == shares.given
        counts = [len(piece[0]) for piece in pieces] if shares is None else shares.real
        found.append(([item for piece, count in zip(pieces, counts, strict=True) for item in piece[0][:count]], *pieces[0][1:]))
    return found


def simulated(make: Any, world: int, **options: Any) -> list[tuple[list[Any], BatchShares | None, bool, int]]:
    """By turns, without processes: the comparison of what the ranks read finds each alone."""
    return together([passed(prepared(make(), rank, world, **options)) for rank in range(world)])


# -- by turns ---------------------------------------------------------------------------------------------------------


@relaxed
@given(
    length=st.integers(0, 30),
    batch=st.integers(1, 5),
    world=st.sampled_from(WORLDS),
    drop_last=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
)
def test_global_batches_match_one_process(length: int, batch: int, world: int, drop_last: bool, even: bool, split: bool) -> None:
    """Global batches are those of one process."""
    size = batch * world
    make = lambda: DataLoader(Stream(range(length)), batch_size=size if split else batch, drop_last=drop_last)  # noqa: E731
    got = simulated(make, world, even_batches=even, split_batches=split)
    plain = [index.tolist() for index in DataLoader(Stream(range(length)), batch_size=size, drop_last=drop_last)]
    assert [entry for entry, _, _, _ in got] == plain
    assert [end for _, _, end, _ in got] == [False] * (len(plain) - 1) + [True] * bool(plain)
    if plain:
        assert got[-1][3] == len(plain[-1]) % size
        assert all(shares is None for entry, shares, _, _ in got if len(entry) == size)
        assert all(shares is not None and shares.weighed == (not even) for entry, shares, _, _ in got if len(entry) < size)


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_take_turns(ranks: Any, world: int) -> None:
    """Ranks in processes take turns."""

    def run() -> Any:
        found = []
        for length, batch, workers in [(0, 2, 0), (1, 1, 0), (7, 1, 0), (10, 2, 0), (9, 2, 1)]:
            loader = prepared(DataLoader(Stream(range(length)), batch_size=batch, num_workers=workers))
            found.append((passed(loader), passed(loader), loader.mode))  # type: ignore[attr-defined]
        return found

    results = ranks(world).run(run)
    for case, (length, batch) in enumerate([(0, 2), (1, 1), (7, 1), (10, 2), (9, 2)]):
        expected = [list(range(length))[start : start + batch * world] for start in range(0, length, batch * world)]
        assert {result[case][2] for result in results} == {"whole" if world == 1 else "turns"}
        for number in range(2):
            got = together([result[case][number] for result in results])
            assert [entry for entry, _, _, _ in got] == expected


def test_random_stream_any_world_size(ranks: Any) -> None:
    """A stream that draws random numbers is the same on every number of processes."""

    def run() -> Any:
        state = PartialState()
        random.seed(state.process_index)
        numpy.random.seed(state.process_index)
        torch.manual_seed(state.process_index)
        size = 12 // state.num_processes
        before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        loader = prepared(DataLoader(Shuffling(range(30)), batch_size=size, collate_fn=list))
        epochs = [passed(loader), passed(loader)]
        assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        return epochs

    found = []
    for world in WORLDS:
        results = ranks(world).run(run)
        found.append([[entry for entry, _, _, _ in together([result[epoch] for result in results])] for epoch in range(2)])
    assert all(entry == found[0] for entry in found)
    assert sorted(item[0] for batch in found[0][0] for item in batch) == list(range(30))
    assert found[0][0] != found[0][1], "another epoch is another order"


def test_workers_of_all_ranks_agree(ranks: Any) -> None:
    """Workers of all ranks read the same though each collates for itself."""

    def run() -> Any:
        loader = prepared(DataLoader(Shuffling(range(22)), batch_size=2, num_workers=2, collate_fn=draw_and_keep))
        return passed(loader), loader.mode  # type: ignore[attr-defined]

    def draw_and_keep(samples: list[Any]) -> list[Any]:
        for _ in range(int(samples[0][0])):  # another number of draws on each rank
            random.random(), torch.rand(())
        return samples

    results = ranks(3).run(run)
    assert [way for _, way in results] == ["turns"] * 3
    read = [item for entry, _, _, _ in together([result for result, _ in results]) for item in entry]
    assert sorted(item[0] for item in read) == sorted([*range(22)] * 2), "two workers, each with the whole stream, as plain torch does"


def test_items_shared_between_workers(ranks: Any) -> None:
    """Items that share themselves out between workers are read once."""

    def run() -> Any:
        loader = prepared(DataLoader(ByWorker(range(23)), batch_size=2, num_workers=2, persistent_workers=True))
        return passed(loader), passed(loader)

    for number in range(2):
        results = [result[number] for result in ranks(2).run(run)]
        assert sorted(item for result, _, _, _ in together(results) for item in result) == list(range(23))


def test_texts_ragged_and_ready_made() -> None:
    """Texts ragged items and batches that are ready made."""
    items = [{"text": "a" * number, "ids": torch.arange(number)} for number in range(7)]
    got = simulated(lambda: DataLoader(Stream(items), batch_size=2, collate_fn=list), 2)
    assert [sample["text"] for entry, _, _, _ in got for sample in entry] == ["a" * number for number in range(7)]
    batches = [torch.arange(size) + 10 * number for number, size in enumerate([2, 2, 2, 1, 2])]
    for even in (True, False):
        got = simulated(lambda: DataLoader(Stream(batches), batch_size=None), 2, even_batches=even)
        assert [entry for entry, _, _, _ in got] == [[0, 1, 10, 11], [20, 21, 30], [40, 41]]
        assert [shares and shares.real for _, shares, _, _ in got] == [None, (2, 1), (2, 0)]
    got = simulated(lambda: DataLoader(Stream(batches), batch_size=None), 2, split_batches=True)
    assert [entry for entry, _, _, _ in got] == [batch.tolist() for batch in batches]


def test_epoch_told_to_dataset() -> None:
    """Every pass is another epoch and the dataset is reported."""
    dataset = Stream(range(4))
    loader = prepared(DataLoader(dataset, batch_size=2), 0, 1)
    list(loader)
    list(loader)
    loader.set_epoch(7)
    list(loader)
    assert dataset.epochs == [0, 1, 7]


def test_effective_batch_any_world_size() -> None:
    """The effective batch is kept for any number of processes."""
    for world in (1, 2, 4):
        loaders = [prepared(DataLoader(Stream(range(32)), batch_size=3), rank, world, effective_batch_size=16) for rank in range(world)]
        assert {(loader.batch_size, loader.steps_per_update) for loader in loaders} == {(2, 8 // world)}


def test_length_of_stream() -> None:
    """The length is known where the dataset has one."""

    class Sized(Stream):
        def __len__(self) -> int:
            return len(self.items)

    loader = prepared(DataLoader(Sized(range(10)), batch_size=2), 1, 2)
    assert len(loader) == 3 == len(list(loader))
    with pytest.raises(TypeError):
        len(prepared(DataLoader(Stream(range(10)), batch_size=2), 1, 2))


# -- position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stream, Seekable])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_later_start_gives_rest(kind: Any, world: int) -> None:
    """A pass that begins later gives the rest."""
    whole = simulated(lambda: DataLoader(kind(range(23)), batch_size=2), world)
    for skipped in range(len(whole) + 1):
        loaders = [skip_first_batches(prepared(DataLoader(kind(range(23)), batch_size=2), rank, world), skipped) for rank in range(world)]
        assert together([passed(loader) for loader in loaders]) == whole[skipped:]


def test_skip_seeks_or_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Skipping seeks where the dataset can and is reported where it reads."""
    read = {}
    for kind in (Stream, Seekable):
        dataset = kind(range(1000))
        list(skip_first_batches(prepared(DataLoader(dataset, batch_size=10), 0, 1), 90))
        read[kind] = dataset.read
        messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        if kind is Stream:
            assert messages == ["900 items of Stream are read and dropped to get to the position: it has no skip(n) to seek with"]
        else:
            assert messages == []
    assert read[Stream] == 1000
    assert read[Seekable] == 0, "nothing of what comes before"


def test_skip_with_workers() -> None:
    """Skipping with workers finds the same batches."""
    make = lambda: DataLoader(ByWorker(range(23)), batch_size=2, num_workers=2)  # noqa: E731
    whole = simulated(make, 2)
    later = together([passed(skip_first_batches(prepared(make(), rank, 2), 3)) for rank in range(2)])
    assert [entry for entry, _, _, _ in later] == [entry for entry, _, _, _ in whole[3:]]


def test_resume_at_other_world_size() -> None:
    """A saved position continues at another number of processes."""
    first = [prepared(DataLoader(Seekable(range(24)), batch_size=2), rank, 2) for rank in range(2)]
    iterators = [iter(loader) for loader in first]
    for _ in range(3):
        for iterator in iterators:
            next(iterator)
    state = first[0].state_dict()
    assert state["samples"] == 12
    for iterator in iterators:
        iterator.close()  # type: ignore[attr-defined]
    state["left"] = 0
    alone = prepared(DataLoader(Seekable(range(24)), batch_size=3), 0, 1)
    alone.load_state_dict(state)
    assert [item for entry, *_ in passed(alone) for item in entry] == list(range(12, 24))


# -- a part of its own ------------------------------------------------------------------------------------------------


OWN_CASES = [
    [[1, 2, 3], [], [], []],
    [[], [1, 2, 3, 4, 5], [6], [7, 8]],
    [[], [], [], []],
    [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]],
    [[*range(9)], [*range(10, 13)], [*range(20, 25)], [*range(30, 31)]],
]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("silent", [False, True])
def test_own_parts_end_together(ranks: Any, world: int, silent: bool) -> None:
    """Parts that end at different times are read once and end together.

    `silent`: the dataset does not say that it is shared out; that is found by comparing (it lost data in another library).
    """

    def run() -> Any:
        rank, found = PartialState().process_index, []
        for parts in OWN_CASES:
            for workers, drop_last in [(0, False), (0, True), (2 if len(parts[0]) == 9 else 0, False)]:
                part = parts[rank]
                dataset = ByWorker(part) if silent else Told(part, rank, world) if not workers else None
                dataset = ByWorker(part) if dataset is None else dataset
                loader = prepared(DataLoader(dataset, batch_size=2, num_workers=workers, drop_last=drop_last))
                found.append((passed(loader), passed(loader)))
        return found

    results = ranks(world).run(run, timeout=60)
    cases = [(parts[:world], drop_last) for parts in OWN_CASES for drop_last in (False, True, False)]
    for case, (parts, drop_last) in enumerate(cases):
        for number in range(2):
            got = together([result[case][number] for result in results])
            wanted = [item for part in parts for item in (part[: len(part) // 2 * 2] if drop_last else part)]
            assert sorted(item for entry, _, _, _ in got for item in entry) == sorted(wanted)
            assert [end for _, _, end, _ in got] == [False] * (len(got) - 1) + [True] * bool(got)
            for entry, shares, _, _ in got:
                assert (shares is None) == (len(entry) == 2 * world)
                if shares is not None:
                    assert shares.weighed
                    assert shares.full == 2 * world
                    assert all(given > 0 for given in shares.given), "a rank without data has something to do"


def test_silently_sharded_stream_warned(ranks: Any) -> None:
    """A stream that was shared out silently is warned about once."""

    def run() -> list[str]:
        with captured_log(LOGGER) as messages:
            rank = PartialState().process_index
            loader = prepared(DataLoader(Stream(range(rank, 20, 2)), batch_size=2))
            list(loader)
            list(loader)
        return messages

    first, second = ranks(2).run(run)
    assert len(first) == 1
    assert first[0].startswith("the processes read different data from Stream, so it is shared out already: each process keeps what ")
    assert second == []


def test_shards_read_once(ranks: Any) -> None:
    """Shards are read once over all ranks."""
    shards = [[10 * shard + item for item in range(shard + 1)] for shard in range(6)]

    def run() -> Any:
        dataset = Sharded(shards)
        loader = prepared(DataLoader(dataset, batch_size=2))
        assert isinstance(loader, StreamLoader)
        return passed(loader), loader.mode, loader._dataset.read, dataset.read

    for world in (2, 3):
        results = ranks(world).run(run)
        got = together([result for result, _, _, _ in results])
        assert sorted(item for entry, _, _, _ in got for item in entry) == sorted(sum(shards, []))
        assert [way for _, way, _, _ in results] == ["own"] * world
        assert sum(read for _, _, read, _ in results) == len(sum(shards, []))
        assert [read for _, _, _, read in results] == [0] * world


def test_batches_per_update_while_a_stream_is_read() -> None:
    """A stream has no length, and is not asked for it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader = accelerator.prepare(DataLoader(Stream(range(3))))
    assert [accelerator.gradient_accumulation_steps for _ in loader] == [3, 3, 3]


def test_too_few_shards_by_turns(caplog: pytest.LogCaptureFixture) -> None:
    """Too few shards are read by turns with a warning."""
    got = simulated(lambda: DataLoader(Sharded([[1, 2, 3], [4, 5]]), batch_size=1), 3)
    assert [entry for entry, _, _, _ in got] == [[1, 2, 3], [4, 5]]
    assert "it has num_shards=2, which 3 processes cannot share evenly" in caplog.text


def test_datapipe_with_workers(ranks: Any) -> None:
    """A pipeline of torch is shared out with its workers."""

    def run() -> Any:
        found = []
        for workers in (0, 2):
            pipe = IterableWrapper(range(21)).shuffle().sharding_filter()
            found.append(passed(prepared(DataLoader(pipe, batch_size=2, num_workers=workers))))
        return found

    results = ranks(2).run(run)
    for number in range(2):
        got = together([result[number] for result in results])
        assert sorted(item for entry, _, _, _ in got for item in entry) == list(range(21))


def test_rank_that_leaves_is_named(ranks: Any) -> None:
    """A rank that leaves the loop alone is named."""

    def run() -> None:
        state = PartialState()
        loader = prepared(DataLoader(Told(range(10), state.process_index, 2), batch_size=2))
        for step, _ in enumerate(loader):
            if state.process_index == 1 and step == 1:
                break
        state.wait_for_everyone()

    for outcome in ranks(2).outcomes(run):
        message = str(outcome.error)
        assert type(outcome.error).__name__ == "MismatchError"
        assert "rank 0: next batch (batch 2 of pass 0 over Told) at test_stream_loader.py:" in message
        assert "rank 1: wait_for_everyone at test_stream_loader.py:" in message


def test_dataset_error_on_all_ranks(ranks: Any) -> None:
    """A dataset that fails on one rank fails on all."""

    def failing(rank: int) -> Iterator[int]:
        yield from range(3)
        if rank == 1:
            raise OSError("shard 7 is broken")
        yield from range(3, 9)

    class Failing(Told):
        def __iter__(self) -> Iterator[int]:
            return failing(self.rank)

    def run() -> None:
        rank = PartialState().process_index
        list(prepared(DataLoader(Failing((), rank, 2), batch_size=2)))

    first, second = ranks(2).outcomes(run)
    assert "because rank 1 raised OSError: shard 7 is broken" in str(first.error)
    assert isinstance(second.error, OSError)


def test_uneven_ranks_do_not_wait(ranks: Any) -> None:
    """Ranks that may end apart do not wait for each other."""

    def run() -> Any:
        rank = PartialState().process_index
        loader = prepared(DataLoader(Told(range(3 + 4 * rank), rank, 2), batch_size=2))
        loader.set_uneven(True)
        return [batch.tolist() for batch in loader]

    assert ranks(2).run(run) == [[[0, 1], [2]], [[0, 1], [2, 3], [4, 5], [6]]]


@pytest.mark.parametrize("world", [2, 3])
def test_own_part_resumes(ranks: Any, world: int) -> None:
    """A part of its own continues where it was left."""

    def run() -> Any:
        rank, found = PartialState().process_index, []
        for kind in (Stream, Seekable):
            dataset = kind([100 * rank + number for number in range(5 + 4 * rank)])
            dataset.rank, dataset.world_size = rank, world  # type: ignore[attr-defined]
            loader = prepared(DataLoader(dataset, batch_size=2))
            whole = passed(loader)
            found.append((whole, passed(skip_first_batches(loader, 2))))
        return found

    results = ranks(world).run(run)
    for case in range(2):
        whole, later = (together([result[case][number] for result in results]) for number in range(2))
        assert [entry for entry, _, _, _ in later] == [entry for entry, _, _, _ in whole[2:]]


def test_the_way_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    prepared(DataLoader(Stream()), 0, 2)
    prepared(DataLoader(Told((), 0, 2)), 0, 2)
    prepared(DataLoader(Sharded([[1], [2]])), 0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "Stream does not say how to share it out; every process reads all of it and keeps its slice of each global batch",
        "Told has rank=0 and world_size=2, so it is shared out already; each process reads a part of its own",
        "Sharded has num_shards=2: each process reads its own shards; each process reads a part of its own",
    ]


def test_hugging_face_stream(ranks: Any, tmp_path: Any) -> None:
    """The stream of Hugging Face datasets."""
    pytest.importorskip("datasets")
    for shard in range(4):
        (tmp_path / f"{shard}.jsonl").write_text("".join(f'{{"id": {10 * shard + item}}}\n' for item in range(3 + shard)))
    files = sorted(map(os.fspath, tmp_path.glob("*.jsonl")))
    wanted = sorted(10 * shard + item for shard in range(4) for item in range(3 + shard))

    def run(cache: str) -> Any:
        import datasets
        from datasets.distributed import split_dataset_by_node

        state = PartialState()
        found = []
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)
        split = split_dataset_by_node(stream, rank=state.process_index, world_size=state.num_processes)
        for dataset in (stream, split, stream.shuffle(seed=1, buffer_size=4)):
            loader = prepared(DataLoader(dataset, batch_size=2))
            found.append((passed_ids(loader), loader.mode))  # type: ignore[attr-defined]
        return found

    def passed_ids(loader: Any) -> list[Any]:
        return [(batch["id"].tolist(), loader.shares, loader.end_of_dataloader, loader.remainder) for batch in loader]

    for world in (2, 3):
        results = ranks(world).run(run, os.fspath(tmp_path / "cache"), timeout=60)
        for case in range(3):
            got = together([result[case][0] for result in results])
            assert sorted(item for entry, _, _, _ in got for item in entry) == wanted
            assert {result[case][1] for result in results} == {"own" if world == 2 or case == 1 else "turns"}


class Keeping(Stream):
    """Keeps its position, as streams with a state do."""

    begin = at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.items):
            self.at += 1
            self.read += 1
            yield self.items[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


@pytest.mark.parametrize("world", [1, 2])
def test_dataset_state_saved(world: int) -> None:
    """A state of the dataset is saved and leads back without reading."""
    whole = simulated(lambda: DataLoader(Keeping(range(203)), batch_size=2), world)
    make = lambda rank: prepared(DataLoader(Keeping(range(203)), batch_size=2), rank, world)  # noqa: E731
    for cut in (0, 1, 40):
        loader = make(0)
        iterator = iter(loader)
        for _ in range(cut):
            next(iterator)
        state = loader.state_dict()
        iterator.close()  # type: ignore[attr-defined]
        assert state.get("dataset") == (None if cut == 0 else {"at": 2 * world * cut})
        resumed = [make(rank) for rank in range(world)]
        for entry in resumed:
            entry.load_state_dict(state)
        assert together([passed(entry) for entry in resumed]) == whole[cut:]
        read = resumed[0].original.dataset.read  # type: ignore[attr-defined]
        heads = 0 if world == 1 or not cut else 2 * world  # compared, and kept to complete the last batch
        assert read == 203 - 2 * world * cut + heads
        assert together([passed(entry) for entry in resumed]) == simulated(lambda: DataLoader(Keeping(range(203)), batch_size=2), world)


def test_hugging_face_stream_resumes() -> None:
    """A stream of Hugging Face datasets continues where it was saved.

    Exactly, though what its shuffle holds in a buffer is not part of its own state.
    """
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": list(range(40))}).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=5)
    make = lambda: prepared(DataLoader(stream, batch_size=4), 0, 1)  # noqa: E731
    whole = [batch["id"].tolist() for batch in make()]
    assert sorted(sum(whole, [])) == list(range(40))
    loader = make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert [batch["id"].tolist() for batch in resumed] == whole[3:]
    iterator.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_position_in_samples(ranks: Any, workers: int) -> None:
    """A position is in samples whatever the number of ranks."""

    def run() -> Any:
        state = PartialState()
        loader = DataLoader(Stream(range(14)), batch_size=2, num_workers=workers)
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        data_rank = DataRank(state.process_index, state.num_processes, state._channel, state._limits)
        built = build_loader(loader, LoaderSettings(data_rank=data_rank, config=config, **REST))
        built.load_state_dict({"epoch": 0, "batches": 2, "samples": 8, "seed": 0})
        return [(batch.tolist(), built.shares) for batch in built]

    read = list(zip(*ranks(3).run(run), strict=True))
    real = [batch[: shares.real[rank] if shares else None] for entry in read for rank, (batch, shares) in enumerate(entry)]
    assert sum(real, []) == list(range(8, 14))


REST: dict[str, Any] = {"seed": 0, "gradient_state": GradientState()}


class Epochal(IterableDataset[Any]):
    """Other items in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([100 * self.epoch, 100 * self.epoch + 1])


def alone(loader: DataLoader[Any], **options: Any) -> PreparedLoader:
    data_rank = DataRank(0, 1, Channel, Limits())
    return build_loader(loader, LoaderSettings(data_rank=data_rank, config=DataLoaderConfiguration(**options), **REST))


def test_persistent_workers_and_set_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """Workers that should stay are told of the epoch."""
    loader = alone(DataLoader(Epochal(), batch_size=2, num_workers=1, persistent_workers=True))
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[0, 1]], [[100, 101]]]
    assert "persistent_workers=True" in caplog.text


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(4))


def test_persistent_stream_nests() -> None:
    """A stream with workers that stay nests in itself."""
    loader = alone(DataLoader(Counting(), batch_size=1, num_workers=1, persistent_workers=True))
    inner: list[list[int]] = []
    outer = [(batch.item(), inner.append([entry.item() for entry in loader]))[0] for batch in loader]
    assert outer == [0, 1, 2, 3]
    assert inner == [outer] * 4
    assert [entry.item() for entry in loader] == outer


class Scaled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch * 10 for batch in super().__iter__())


def test_stream_subclass_refused() -> None:
    """A subclass that changes batches of a stream is refused."""
    for dispatch in (None, True):
        with pytest.raises(ConfigError, match="a Scaled over an IterableDataset"):
            alone(Scaled(Counting(), batch_size=2), dispatch_batches=dispatch)


class Part(Told):
    def __len__(self) -> int:
        return len(self.items)


def test_own_parts_have_no_length() -> None:
    """Parts of ranks have no length that all know."""

    def made(rank: int) -> PreparedLoader:
        data_rank = DataRank(rank, 2, Channel, Limits())
        settings = LoaderSettings(data_rank=data_rank, config=DataLoaderConfiguration(), **REST)
        return build_loader(DataLoader(Part(range(rank, 5, 2), rank, 2)), settings)

    for rank in range(2):
        with pytest.raises(TypeError, match="each process reads a part of its own"):
            len(made(rank))
