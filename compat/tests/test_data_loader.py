"""The loaders of the drop-in: which samples come where, by a model of Accelerate's rule; metrics; resuming in the middle of an epoch."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  # scripts do that to loaders
import random
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler


class Numbers(IterableDataset):
    """A stream of numbers, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def listed(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


# -- the rule ---------------------------------------------------------------------------------------------------------


def model_of_dealing(count: int, size: int, world: int, *, drop_last: bool, split: bool, even: bool) -> list[list[list[int]]]:
    """The batches of each process, written down from the samples: cut them into pieces, give each process its place in every group."""
    piece = size // world if split else size
    samples = list(range(count))
    if drop_last:
        whole = piece * world if split else size
        samples = samples[: count - count % (whole if split else piece * world)]
    elif even and world > 1 and count % (piece * world):
        start = samples[: min(count, piece * world)]
        samples += islice(cycle(start), -count % (piece * world))
    pieces = [samples[begin : begin + piece] for begin in range(0, len(samples), piece)]
    return [pieces[rank::world] for rank in range(world)]


cases = st.tuples(st.integers(0, 40), st.integers(1, 7), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=200, deadline=None)
@given(cases)
def test_each_process_reads_its_place(case: tuple[Any, ...]) -> None:
    count, size, world, drop_last, split, even = case
    size = size * world if split else size
    expected = model_of_dealing(count, size, world, drop_last=drop_last, split=split, even=even)
    for rank in range(world):
        loader = DataLoader(range(count), batch_size=size, drop_last=drop_last)
        options = {"num_processes": world, "process_index": rank, "split_batches": split, "even_batches": even}
        prepared = prepare_data_loader(loader, **options)
        assert listed(prepared) == expected[rank]
        assert listed(prepared) == expected[rank]
        if not split:
            assert len(prepared) == len(expected[rank])
        skipped = skip_first_batches(prepared, 1)
        assert listed(skipped) == expected[rank][1:]


@settings(max_examples=150, deadline=None)
@given(cases)
def test_streams_are_dealt_alike(case: tuple[Any, ...]) -> None:
    count, size, world, drop_last, split, _ = case
    size = size * world if split else size
    expected = model_of_dealing(count, size, world, drop_last=drop_last, split=split, even=True)
    for rank in range(world):
        loader = DataLoader(Numbers(count), batch_size=size, drop_last=drop_last)
        prepared = prepare_data_loader(
            loader, num_processes=world, process_index=rank, split_batches=split, dispatch_batches=False
        )
        assert listed(prepared) == expected[rank]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 4), st.booleans())
def test_batches_of_varying_sizes_are_dealt_whole(sizes: list[int], world: int, even: bool) -> None:
    batches = [[number] * size for number, size in enumerate(sizes)]
    dealt = batches + (list(islice(cycle(batches[:world]), -len(batches) % world)) if even and batches else [])
    for rank in range(world):
        shard = BatchSamplerShard(batches, world, rank, even_batches=even)  # type: ignore[arg-type]
        assert list(shard) == dealt[rank::world]
        assert (len(shard), shard.total_length) == (len(dealt[rank::world]), len(batches))


def test_short_batches_in_the_middle_are_not_lost() -> None:
    class Sampler(list[Any]):
        batch_size = 3
        drop_last = False

    batches = Sampler([[0, 1, 2], [3], [4, 5, 6], [7]])
    assert [list(BatchSamplerShard(batches, 2, rank)) for rank in range(2)] == [[[0, 1, 2], [4, 5, 6]], [[3], [7, 0, 1]]]  # type: ignore[arg-type]


def test_even_batches_can_be_assigned() -> None:
    shard = BatchSamplerShard(BatchSampler(range(5), 2, False), 2, 1)
    assert list(shard) == [[2, 3], [1, 2]]
    shard.even_batches = False
    assert list(shard) == [[2, 3]]
    shard.num_processes, shard.process_index = 1, 0  # transformers does that to a loader whose batches are balanced elsewhere
    assert list(shard) == [[0, 1], [2, 3], [4]]


def test_splitting_needs_a_size_that_fits() -> None:
    with pytest.raises(ValueError, match="round multiple"):
        prepare_data_loader(DataLoader(range(9), batch_size=3), num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(ValueError, match="split_batches"):
        BatchSamplerShard([[1, 2]], 2, 0, split_batches=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="put_on_device"):
        prepare_data_loader(DataLoader(range(9)), dispatch_batches=True)


def test_seedable_order_is_a_function_of_seed_and_epoch() -> None:
    loader = prepare_data_loader(DataLoader(range(9), batch_size=3, shuffle=True), use_seedable_sampler=True, data_seed=5)
    sampler = get_sampler(loader)
    assert isinstance(sampler, SeedableRandomSampler)
    epochs = [listed(loader), listed(loader)]
    generator = torch.Generator()
    for number, batches in enumerate(epochs):
        generator.manual_seed(5 + number)
        assert sum(batches, []) == list(RandomSampler(range(9), generator=generator))
    loader.set_epoch(1)
    assert listed(loader) == epochs[1]
    next(iter(loader))
    assert loader.iteration == 2, "a pass that is left does not count"


# -- classes and attributes -------------------------------------------------------------------------------------------


def test_prepare_returns_the_classes_that_clients_ask_for() -> None:
    accelerator = Accelerator(cpu=True)
    loader, stream = accelerator.prepare(DataLoader(range(10), batch_size=4), DataLoader(Numbers(5), batch_size=2))
    assert all(isinstance(loader, kind) for kind in (DataLoaderShard, DataLoader, DataLoaderStateMixin))
    assert isinstance(stream, DataLoaderDispatcher)
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader), loader.iteration) == (4, 10, 3, 0)
    assert accelerator.prepare(loader) is loader
    assert accelerator._dataloaders == [loader, stream]
    told = [(accelerator.gradient_state.remainder, loader.end_of_dataloader) for _ in loader]
    assert told == [(2, False), (2, False), (2, True)]
    assert accelerator.gradient_state.active_dataloader is None
    skipped = accelerator.skip_first_batches(loader, 1)
    assert (type(skipped), type(skipped.batch_sampler)) == (DataLoaderShard, SkipBatchSampler)
    assert listed(skipped) == [[4, 5, 6, 7], [8, 9]]
    assert listed(accelerator.skip_first_batches(stream, 1)) == [[2, 3], [4]]
    assert isinstance(skip_first_batches(DataLoader(Numbers(3)), 1), SkipDataLoader)


def test_options_are_read_when_a_loader_is_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    accelerator.dataloader_config.dispatch_batches = True
    assert isinstance(accelerator.prepare(DataLoader(range(3))), DataLoaderDispatcher)


def test_a_loader_can_be_pickled() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(range(10), batch_size=4, shuffle=True))
    loader.set_epoch(3)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert (type(twin), twin.iteration) == (DataLoaderShard, 3)
        assert sorted(sum(listed(twin), [])) == list(range(10))


def test_a_loader_of_a_script_tells_its_last_batch() -> None:
    class Own(DataLoaderStateMixin):
        def __init__(self) -> None:
            self.gradient_state = GradientState()

        def __iter__(self) -> Any:
            self.begin()
            for number in range(3):
                self.end_of_dataloader = number == 2
                yield number
            self.end()

    accelerator = Accelerator(cpu=True)
    assert [accelerator.gradient_state.end_of_dataloader for _ in Own()] == [False, False, True]
    assert not accelerator.gradient_state.in_dataloader


# -- several processes ------------------------------------------------------------------------------------------------


def fresh(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def evaluate(count: int, size: int, options: dict[str, Any], stream: bool) -> list[Any]:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(Numbers(count) if stream else range(count), batch_size=size))
    rows: list[int] = []
    doubled: list[int] = []
    texts: list[str] = []
    for batch in loader:
        told = accelerator.gather_for_metrics({"rows": batch, "twice": batch.repeat_interleave(2)})
        rows += told["rows"].tolist()
        doubled += told["twice"].tolist()
        texts += accelerator.gather_for_metrics([str(number) for number in batch.tolist()], use_gather_object=True)
    return [rows, doubled, texts]


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_hold_every_sample_once(ranks: Any, world: int) -> None:
    """Also where several rows belong to a sample, where Accelerate would cut in the wrong place, and of a stream without a length."""
    for stream, dispatch, count in [(False, None, 11), (False, True, 11), (True, False, 7), (True, None, 7), (False, None, 1)]:
        case = (count, 2, {"dispatch_batches": dispatch}, stream)
        for found in ranks(world).run(evaluate, *case) if world > 1 else [evaluate(*case)]:
            assert found[0] == list(range(count)), (stream, dispatch)
            assert found[1] == [number for number in range(count) for _ in range(2)]
            assert found[2] == [str(number) for number in range(count)]


def gather_stream_of_workers() -> Any:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2, num_workers=1))
    return [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]


def test_repeated_samples_that_are_not_known_are_said(ranks: Any, capfd: Any) -> None:
    assert ranks(2).run(gather_stream_of_workers)[0] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert "may hold repeated samples" in capfd.readouterr().out


def shuffled(options: dict[str, Any]) -> list[Any]:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(accelerator.process_index)  # processes that were seeded differently still read one order
    loader = accelerator.prepare(DataLoader(range(12), batch_size=3, shuffle=True))
    return [sum(listed(loader), []) for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}, {"dispatch_batches": True}], ids=str)
def test_processes_read_one_order(ranks: Any, options: dict[str, Any]) -> None:
    first, second = ranks(2).run(shuffled, options)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(12))
    assert first[0] != first[1]


def uneven() -> Any:
    accelerator = fresh()
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(5.0).view(-1, 1), batch_size=1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        inside = [batch.item() for batch in loader if model(batch).sum().backward() is None]
    return inside, [batch.item() for batch in loader]


def test_processes_join_with_different_numbers_of_batches(ranks: Any) -> None:
    assert list(ranks(2).run(uneven)) == [([0.0, 2.0, 4.0], [0.0, 2.0, 4.0]), ([1.0, 3.0], [1.0, 3.0, 0.0])]


def read_on_mesh(shape: tuple[int, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    accelerator = fresh()
    accelerator.wait_for_everyone()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    return listed(prepare_data_loader(DataLoader(range(8), batch_size=2), torch_device_mesh=mesh))


def test_processes_of_one_replica_read_the_same(ranks: Any) -> None:
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(ranks(2).run(read_on_mesh, (1, 2))) == [whole, whole]
    assert list(ranks(2).run(read_on_mesh, (2, 1))) == [whole[0::2], whole[1::2]]


def ragged(kind: str) -> Any:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = DataLoader([[number] * (number + 1) for number in range(4)], batch_size=1, collate_fn=lambda rows: torch.tensor(rows))
    if kind == "text":
        loader = DataLoader([f"text {number}" for number in range(4)], batch_size=1)
    return [batch.tolist() if kind == "ragged" else batch for batch in accelerator.prepare(loader)]


def test_text_and_ragged_batches_can_be_dispatched(ranks: Any) -> None:
    assert list(ranks(2).run(ragged, "ragged")) == [[[[0]], [[2, 2, 2]]], [[[1, 1]], [[3, 3, 3, 3]]]]
    assert list(ranks(2).run(ragged, "text")) == [[["text 0"], ["text 2"]], [["text 1"], ["text 3"]]]


# -- resuming ---------------------------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise from the random states of the process: exact resuming needs those as well."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([place + random.random() / 4 + torch.rand(()).item() / 4])


def train(folder: str, options: dict[str, Any], leave_at: int | None, how: str) -> Any:
    """Train two epochs; save in the middle of the second. With `how`, continue from there in another way."""
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(**options))
    set_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Noisy(), batch_size=2, shuffle=True))
    epoch, done, seen = 0, 0, []
    if how:
        set_seed(77)
        accelerator.load_state(folder, **({"resume": True} if how == "resume" else {}))
        epoch, done = 1, leave_at or 0
    while epoch < 3:
        active = accelerator.skip_first_batches(loader, done) if how == "skip" and done else loader
        for step, batch in enumerate(active, start=done):
            seen.append((epoch, step, batch.tolist()))
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            if not how and epoch == 1 and step + 1 == leave_at:
                accelerator.save_state(folder)
        epoch, done = epoch + 1, 0
    return seen, [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
@pytest.mark.parametrize(
    ("world", "options", "how"),
    [
        (1, {}, "skip"),
        (1, {}, "resume"),
        (1, {"use_seedable_sampler": True}, "skip"),
        (1, {"use_stateful_dataloader": True}, "stateful"),
        (1, {"dispatch_batches": True}, "resume"),
        (2, {}, "skip"),
        (2, {"split_batches": True}, "resume"),
        (2, {"dispatch_batches": True}, "skip"),
        (2, {"use_stateful_dataloader": True}, "stateful"),
    ],
)
def test_a_run_continues_exactly(ranks: Any, tmp_path: Path, world: int, options: dict[str, Any], how: str) -> None:
    """Weights, batches and what is drawn are those of a run that was never interrupted, also with the default sampler."""
    folder = str(tmp_path / "saved")
    whole, rest = (
        list(ranks(world).run(train, folder, options, 2, way)) if world > 1 else [train(folder, options, 2, way)] for way in ("", how)
    )
    for (seen, weights), (seen_after, weights_after) in zip(whole, rest, strict=True):
        assert seen_after == [entry for entry in seen if (entry[0], entry[1]) >= (1, 2)]
        assert weights_after == weights


def read_noise(load: str | None, save: str, at: int, skip: int, options: dict[str, Any], resume: bool) -> list[Any]:
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(**options))
    set_seed(50 if load else 3)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Noisy(), batch_size=2, shuffle=True))
    if load:
        accelerator.load_state(load, resume=resume)
    seen = []
    for epoch in range(1 if load else 0, 3):
        done = skip if load and epoch == 1 else 0
        for step, batch in enumerate(accelerator.skip_first_batches(loader, done) if done and not resume else loader, start=done):
            accelerator.backward(model(batch).sum())
            seen.append((epoch, step, batch.tolist(), torch.rand(()).item()))
            if (epoch, step + 1) == (1, at):
                accelerator.save_state(save)
    return seen


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}, {"dispatch_batches": True}], ids=str)
def test_a_continued_run_continues_again(tmp_path: Path, options: dict[str, Any], resume: bool) -> None:
    """Also in a process that was seeded otherwise: the seed of a seedable sampler is part of the checkpoint."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    whole = read_noise(None, first, 2, 0, options, resume)
    for load, save, skip, at in ((first, second, 2, 4), (second, str(tmp_path / "third"), 4, 5)):
        assert read_noise(load, save, at, skip, options, resume) == [entry for entry in whole if entry[:2] >= (1, skip)]


def read_order(folder: str, size: int, resumes: bool) -> list[int]:
    accelerator = fresh()
    set_seed(11 if resumes else 3)
    loader = accelerator.prepare(DataLoader(range(16), batch_size=size, shuffle=True))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    if resumes:
        accelerator.load_state(folder, resume=True)
    seen: list[int] = []
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch[:, None].float()).sum())
        seen += accelerator.gather(batch).tolist()
        if not resumes and number == 1:
            accelerator.save_state(folder)
            seen.clear()
    return seen


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
def test_an_order_is_carried_to_another_number_of_processes(ranks: Any, tmp_path: Path, worlds: tuple[int, int]) -> None:
    """The sampler drew from a generator on several processes, and from the random state of torch on one."""
    folder = str(tmp_path / "saved")
    rest, found = (
        ranks(2).run(read_order, folder, 2, resumes)[0] if world == 2 else read_order(folder, 4, resumes)
        for world, resumes in zip(worlds, (False, True), strict=True)
    )
    assert len(rest) == 8
    assert found == rest


def test_iterable_shards_take_epochs() -> None:
    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.count = epoch

    told = Told(0)
    loader = prepare_data_loader(DataLoader(told, batch_size=2), num_processes=2, process_index=0, dispatch_batches=False)
    assert isinstance(loader.dataset, IterableDatasetShard)
    loader.set_epoch(3)
    assert listed(loader) == [[0, 1]]
    assert told.count == 3
