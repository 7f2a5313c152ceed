"""A prepared map-style loader against plain PyTorch: what is read, what is told of it, and that it ends well however it ends."""

from __future__ import annotations

import copy
import gc
import pickle  # noqa: TID251  # users pickle loaders; this tests that they can
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_twin import chunks, keep, place, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, TensorDataset

from slipstream.data.loader import PreparedLoader, get_sampler
from slipstream.data.options import DataLoaderConfiguration, LoaderSettings
from slipstream.data.prepare import build_loader, choose_seed, prepare_data_loader
from slipstream.distributed.gradient_state import BatchShares, GradientState
from slipstream.errors import ConfigError


def loader_of(length: int = 10, size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(list(range(length)), batch_size=size, collate_fn=keep, **options)


@given(
    st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(), st.booleans()
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_ranks_match_one_process(
    length: int, world: int, each: int, even: bool, drop_last: bool, split: bool, shuffle: bool
) -> None:
    """Ranks together read what one process would."""
    size, total = (each * world,) * 2 if split else (each, each * world)
    shuffle = shuffle and length > 0
    loaders = ranks_of(lambda: loader_of(length, size, drop_last=drop_last, shuffle=shuffle), world, even_batches=even, split_batches=split)
    read = [(real_samples(batches, shares), loaders[0].current.left, loaders[0].end_of_dataloader) for batches, shares in rounds(loaders)]
    order = sum(prepared(loader_of(length, 1, shuffle=shuffle)), [])
    expected = chunks(order, total, drop_last)
    assert [batch for batch, _, _ in read] == expected
    assert [left for _, left, _ in read] == list(range(len(expected)))[::-1]
    assert [end for _, _, end in read] == [left == 0 for left in range(len(expected))[::-1]]
    assert [len(loader) for loader in loaders] == [len(expected)] * world
    assert loaders[0].remainder == (0 if drop_last else length % total)
    assert loaders[0].total_batch_size == total
    assert loaders[0].batch_size == each
    assert loaders[0].total_dataset_length == length


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("even", [True, False])
def test_tensor_batches_match_torch(world: int, even: bool) -> None:
    """Batches of tensors are those of torch."""
    data = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))
    loaders = ranks_of(lambda: DataLoader(data, batch_size=12 // world), world, even_batches=even)
    plain = DataLoader(data, batch_size=12)
    for (batches, shares), (values, labels) in zip(rounds(loaders), plain, strict=True):
        real = shares.real if shares else [12 // world] * world
        assert torch.equal(torch.cat([batch[0][:count] for batch, count in zip(batches, real, strict=True)]), values)
        assert torch.equal(torch.cat([batch[1][:count] for batch, count in zip(batches, real, strict=True)]), labels)


@pytest.mark.parametrize(("even", "expected"), [
    (True, [BatchShares((1, 1, 1), (1, 1, 0), False, 3), [0, 3], [1, 4], [2, 0]]),
    (False, [BatchShares((1, 1, 1), (1, 1, 0), True, 3), [0, 3], [1, 4], [2, 0]]),
])  # fmt: skip
def test_single_positions_dealt_out(even: bool, expected: list[Any]) -> None:
    """Single positions are dealt out."""
    loaders = ranks_of(lambda: DataLoader(list(range(5)), batch_size=None), 3, even_batches=even)
    read = list(rounds(loaders))
    assert read[0][1] is None
    assert [read[1][1], *map(list, zip(*(batches for batches, _ in read), strict=True))] == expected
    assert loaders[0].batch_sampler is None
    assert loaders[0].batch_size is None


def test_single_positions_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="dispatch_batches=True"):
        prepared(DataLoader(list(range(5)), batch_size=None), split_batches=True)


@pytest.mark.parametrize("even", [True, False])
def test_ready_made_batches_counted(ranks: Any, even: bool) -> None:
    """Ready made batches count their samples."""
    parts = [torch.arange(4), torch.arange(4, 7), torch.arange(7, 9)]

    def run() -> Any:
        from slipstream import PartialState

        PartialState()
        loader = prepare_data_loader(DataLoader(parts, batch_size=None), even_batches=even)  # type: ignore[arg-type]
        return [(batch.tolist(), loader.shares, loader.end_of_dataloader) for batch in loader], loader.total_batch_size, loader.remainder

    entry, (first, second) = ranks(1).run(run)[0], ranks(2).run(run)
    assert [shares and shares.real for _, shares, _ in entry[0]] == [None, (3,), (2,)]
    assert [batch for batch, _, _ in first[0]] == [[0, 1, 2, 3], [7, 8]]
    assert [batch for batch, _, _ in second[0]] == [[4, 5, 6], [0, 1, 2, 3]]
    told = [BatchShares((4, 3), (4, 3), not even, 8), BatchShares((2, 4), (2, 0), not even, 8)]
    assert [[shares for _, shares, _ in rank[0]] for rank in (first, second)] == [told, told]
    assert first[1:] == second[1:] == (8, 2)


def test_ready_made_batch_error_everywhere(ranks: Any) -> None:
    """A ready made batch that cannot be read is told to all."""

    def run() -> Any:
        from slipstream import PartialState

        PartialState()
        try:
            list(prepare_data_loader(DataLoader(Unreadable(), batch_size=None), data_seed=0))
        except Exception as error:
            return str(error)

    first, second = ranks(2).run(run)
    assert second == "record 1"
    assert "record 1" in first


class Unreadable(Dataset[Any]):
    def __getitem__(self, position: int) -> Any:
        if position == 1:
            raise ValueError("record 1")
        return torch.arange(2)

    def __len__(self) -> int:
        return 4


class Bucketed(Sampler[list[int]]):
    """Batches of sizes of their own."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("kind", [Bucketed, list])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_batch_sampler_batches_dealt_whole(kind: Any, even: bool, world: int) -> None:
    """Batches of a batch sampler are dealt out whole."""
    batches = [[0, 1], [2, 3], [4], [5, 6], [7, 8, 9]]
    loaders = ranks_of(lambda: DataLoader(list(range(10)), batch_sampler=kind(batches), collate_fn=keep), world, even_batches=even)
    dealt = [
        batch
        for together, shares in rounds(loaders)
        for batch, real in zip(together, shares.real if shares else [1] * world, strict=True)
        if real
    ]
    assert dealt == batches
    assert len(loaders[0]) == -(-5 // world)
    assert loaders[0].end_of_dataloader


@pytest.mark.parametrize("world", [2, 3])
def test_batch_sampler_split_batches(world: int) -> None:
    """Batches of a batch sampler are cut with split batches."""
    batches = [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    for even in (True, False):
        loaders = ranks_of(
            lambda: DataLoader(list(range(12)), batch_sampler=Bucketed(batches), collate_fn=keep),
            world,
            even_batches=even,
            split_batches=True,
        )
        assert [real_samples(together, shares) for together, shares in rounds(loaders)] == batches


def test_torch_batch_sampler_by_hand() -> None:
    """Torch's batch sampler given by hand is one of samples."""

    def make() -> DataLoader[Any]:
        return DataLoader(list(range(10)), batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, True), collate_fn=keep)

    loaders = ranks_of(make, 2)
    assert [real_samples(batches, shares) for batches, shares in rounds(loaders)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_uneven_ranks() -> None:
    """Uneven ranks read what there is and nothing more."""
    loaders = ranks_of(lambda: loader_of(9, 2), 4)
    for loader in loaders:
        loader.set_uneven(True)
    assert [list(loader) for loader in loaders] == [[[0, 1], [8]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert all(loader.end_of_dataloader for loader in loaders)
    for loader in loaders:
        loader.set_uneven(False)
    assert [len(list(loader)) for loader in loaders] == [2, 2, 2, 2]


# -- what ends an iteration, and which epoch is next -----------------------------------------------------------------------


def test_iteration_is_next_epoch() -> None:
    """Every iteration is the next epoch also after a break."""
    loader, twin = (prepared(loader_of(shuffle=True)) for _ in range(2))
    first, second, third = list(twin), list(twin), list(twin)
    assert first != second != third
    for batch in loader:
        assert batch == first[0]
        break
    assert list(loader) == second
    loader.set_epoch(0)
    assert loader.epoch == 0
    assert list(loader) == first
    assert list(loader) == second
    loader.set_epoch(2)
    assert list(loader) == third


def test_gradient_state_told_of_ends() -> None:
    """The gradient state is told of every end."""
    state = GradientState()
    loader = prepared(loader_of(), gradient_state=state)
    assert not state.in_dataloader
    for _ in loader:
        assert state.active is loader
        break
    assert state.active is None
    assert state.metrics.finished is None

    def fail() -> None:
        for _ in loader:
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert state.active is None
    for _ in loader:
        assert state.end_of_dataloader == (loader.current.left == 0)
    assert state.active is None
    assert state.metrics.finished is loader


def test_loaders_nest() -> None:
    state = GradientState()
    outer = prepared(loader_of(), gradient_state=state)
    inner = prepared(loader_of(4), gradient_state=state)
    for number, _ in enumerate(outer):
        for _ in inner:
            assert state.active is inner
        assert state.active is outer
        assert state.end_of_dataloader == (number == 4)
    assert state.active is None


def test_a_loader_nests_in_itself() -> None:
    state = GradientState()
    loader = prepared(loader_of(6, shuffle=True), gradient_state=state)
    expected = [list(entry) for entry in [prepared(loader_of(6, shuffle=True))] * 5]
    outer = []
    for number, batch in enumerate(loader):
        outer.append(batch)
        inner = []
        for other in loader:
            inner.append(other)
            assert loader.end_of_dataloader == (len(inner) == 3)
        assert inner == expected[number + 1]
        assert loader.current.left == 2 - number, "what is told is of the outer batch again"
        assert loader.end_of_dataloader == (number == 2)
        assert state.active is loader
    assert outer == expected[0]
    assert state.active is None


def test_at_start_called_once() -> None:
    """What is called at the start is called once for each iteration."""
    loader = prepared(loader_of())
    calls: list[int] = []
    loader.at_start = lambda: calls.append(1)
    list(loader)
    list(loader)
    assert calls == [1, 1]


# -- position ----------------------------------------------------------------------------------------------------------------


class Counted(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def __getitem__(self, position: int) -> int:
        self.read += 1
        return position

    def __len__(self) -> int:
        return self.length


def numbers(state: dict[str, Any]) -> list[int]:
    return [state[name] for name in ("epoch", "batches", "samples", "seed", "left")]


def test_resume_at_any_world_size() -> None:
    """A position is resumed at any number of ranks without reading."""
    data = Counted(26)
    whole = [list(entry) for entry in [prepared(DataLoader(data, batch_size=12, shuffle=True, collate_fn=keep))] * 3]
    for cut in range(4):
        saved = prepared(DataLoader(data, batch_size=6, shuffle=True, collate_fn=keep), 0, 2)
        list(saved)
        state = saved.state_dict()
        assert numbers(state) == [1, 0, 0, 7, 0]
        for number, _ in enumerate(saved, 1):
            if number == cut:
                state = saved.state_dict()
        for world in (1, 2, 3, 4):
            loaders = ranks_of(lambda: DataLoader(data, batch_size=12 // world, shuffle=True, collate_fn=keep), world, seed=99)  # noqa: B023
            for loader in loaders:
                loader.load_state_dict(state, resume=True)
            data.read = 0
            assert len(loaders[0]) == 3, "that of a whole pass"
            rest = [real_samples(batches, shares) for batches, shares in rounds(loaders)]
            assert rest == whole[1][cut:]
            assert data.read == sum(map(len, rest)) + (12 // world * (world - 1) if rest else 0), "idle ranks are kept busy, nothing else"
            assert [real_samples(batches, shares) for batches, shares in rounds(loaders)] == whole[2], "later passes are whole"


def test_resumed_position_saved_again() -> None:
    """A position that is resumed can be saved again."""
    loader = prepared(loader_of(shuffle=True))
    loader.load_state_dict({"epoch": 3, "batches": 2, "samples": 4, "seed": 5}, resume=True)
    assert numbers(loader.state_dict()) == [3, 2, 4, 5, 0]
    loader.set_epoch(3)
    next(iterator := iter(loader))
    assert numbers(loader.state_dict()) == [3, 3, 6, 5, 0]
    next(iterator)
    del iterator
    assert numbers(loader.state_dict()) == [3, 4, 8, 5, 1]


def test_manual_resume() -> None:
    """Without resuming the epoch is taken and batches are skipped by hand."""
    loader = prepared(loader_of(shuffle=True))
    epochs = [list(loader) for _ in range(3)]
    again = prepared(loader_of(shuffle=True), seed=0, resume="manual")
    again.load_state_dict({"epoch": 1, "batches": 2, "samples": 4, "seed": 7, "order_version": 2})
    assert [list(again), list(again)] == epochs[1:]
    at_the_end = prepared(loader_of(shuffle=True), seed=0, resume="manual")
    at_the_end.load_state_dict({"epoch": 1, "batches": 5, "samples": 10, "seed": 7, "order_version": 2})
    assert list(at_the_end) == epochs[2], "nothing of that epoch was left"


def test_stateful_configuration_resumes() -> None:
    """A stateful loader of the configuration resumes by itself."""
    loader = prepared(loader_of(), use_stateful_dataloader=True)
    loader.load_state_dict({"epoch": 0, "batches": 3, "samples": 6, "seed": 7})
    assert list(loader) == [[6, 7], [8, 9]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_stateful_loaders() -> None:
    """Torchdata's stateful loaders are read as plain ones."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = prepared(stateful.StatefulDataLoader(list(range(10)), batch_size=2, collate_fn=keep, shuffle=True), 1, 2)
    assert list(loader) == list(prepared(loader_of(shuffle=True), 1, 2))
    next(iterator := iter(loader))
    assert loader.state_dict()["samples"] == 4
    del iterator


# -- being a DataLoader --------------------------------------------------------------------------------------------------------


def test_attributes_of_user_loader() -> None:
    """Attributes of the script's loader can be read."""

    class Mine(DataLoader[Any]):
        mark = "mine"

    generator = torch.Generator().manual_seed(4)
    original = Mine(list(range(10)), batch_size=3, shuffle=True, collate_fn=keep, generator=generator)
    loader = prepared(original, 0, 2)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, PreparedLoader)
    assert (loader.dataset, loader.collate_fn, loader.num_workers, loader.drop_last) == (original.dataset, keep, 0, False)
    assert (loader.mark, loader.pin_memory, loader.generator, loader.multiprocessing_context) == ("mine", False, generator, None)
    assert loader.sampler is loader.get_sampler() is get_sampler(loader) is original.sampler
    assert loader.batch_sampler.batch_sampler is original.batch_sampler
    assert list(loader.batch_sampler) == list(loader)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last, len(loader.batch_sampler)) == (3, False, 2)
    with pytest.raises(AttributeError, match="nothing_like_that"):
        loader.nothing_like_that  # noqa: B018


def test_subclass_iteration_kept() -> None:
    """A subclass keeps what it adds to iterating."""

    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            for batch in super().__iter__():
                yield [2 * sample for sample in batch]

    loader = prepared(Doubling(list(range(8)), batch_size=2, collate_fn=keep), 1, 2)
    assert list(loader) == [[4, 6], [12, 14]]


def test_none_batches() -> None:
    """Batches that are none are handed on."""

    class Lazy(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            yield from super().__iter__()

    for kind in (DataLoader, Lazy):
        assert list(prepared(kind(list(range(4)), batch_size=2, collate_fn=lambda samples: None if 0 in samples else samples))) == [
            None,
            [2, 3],
        ]


def test_self_reading_subclass_refused() -> None:
    """A subclass that reads everything by itself is refused."""

    class Stubborn(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            yield from ([sample] for sample in self.dataset)  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="Stubborn.*super"):
        list(prepared(Stubborn(list(range(8))), 1, 2))


def test_sampler_replaced_in_place() -> None:
    """A sampler is replaced in place."""
    original = loader_of(shuffle=True)
    loader = prepared(original)
    loader.set_sampler(SequentialSampler(range(6)))
    assert list(loader) == [[0, 1], [2, 3], [4, 5]]
    assert len(loader) == 3
    assert isinstance(original.sampler, RandomSampler), "the script's own loader is as it was"
    with pytest.raises(ConfigError, match="has no sampler to replace"):
        prepared(DataLoader(range(3), batch_sampler=Bucketed([[0]]))).set_sampler(SequentialSampler(range(6)))


@pytest.mark.parametrize("through", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_are_independent(through: Any) -> None:
    """Copies continue in their own way."""
    state = GradientState()
    loader = prepare_data_loader(loader_of(shuffle=True), data_seed=7, gradient_state=state)
    first = list(loader)
    iterator = iter(loader)
    next(iterator)
    twin = through(loader)
    assert list(twin) != first
    twin.set_epoch(0)
    assert list(twin) == first
    assert twin.gradient_state is not state
    assert state.active is loader
    assert twin.data_rank.channel().world_size == 1
    loader.set_epoch(0)
    assert list(loader) == first


def test_prepared_once_per_accelerator() -> None:
    """A loader is prepared once and anew for another accelerator."""
    state = GradientState()
    loader = prepared(loader_of(), gradient_state=state)
    assert prepared(loader, gradient_state=state) is loader
    other = prepared(loader, 1, 2)
    assert other is not loader
    assert other.original is loader.original
    assert list(other) == [[2, 3], [6, 7], [0, 1]]


def test_batches_moved_to_device() -> None:
    """Batches go to the device only where that is not the host."""
    data = TensorDataset(torch.arange(4.0))
    meta = prepare_data_loader(DataLoader(data, batch_size=2), device=torch.device("meta"), put_on_device=True)
    assert [batch[0].device.type for batch in meta] == ["meta", "meta"]
    assert prepare_data_loader(DataLoader(data), device=torch.device("cpu"), put_on_device=True)._move is None


def test_options_without_effect_named(caplog: pytest.LogCaptureFixture) -> None:
    """Options without effect are named."""
    prepare_data_loader(loader_of(), use_seedable_sampler=False, rng_types=["torch"])
    assert "use_seedable_sampler=False has no effect" in caplog.text
    assert "rng_types=['torch'])" in caplog.text
    with pytest.raises(ConfigError, match="num_processes= and process_index="):
        prepare_data_loader(loader_of(), torch_device_mesh=object())
    with pytest.raises(ConfigError, match="one of 0 to 1"):
        prepare_data_loader(loader_of(), num_processes=2, process_index=2)


def test_seed_of_rank_0(ranks: Any) -> None:
    """The seed is that of the script or of its generator and rank 0 tells it."""

    def run() -> Any:
        from torch.distributed import get_rank

        from slipstream import PartialState

        PartialState()
        torch.manual_seed(100 + get_rank())
        loader = prepare_data_loader(DataLoader(list(range(8)), batch_size=2, shuffle=True))
        own = DataLoader(list(range(8)), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
        return [batch.tolist() for batch in loader], loader.seed, prepare_data_loader(own).seed, prepare_data_loader(own, data_seed=6).seed

    first, second = ranks(2).run(run)
    assert sorted(sum(first[0] + second[0], [])) == list(range(8))
    assert first[1] == second[1]
    assert first[2:] == second[2:] == (5, 6)


# -- workers -----------------------------------------------------------------------------------------------------------------


class Drawing(Dataset[Any]):
    def __getitem__(self, position: int) -> Any:
        return position, int(torch.randint(2**62, ()))

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("stay", [False, True])
def test_workers_read_same_batches(stay: bool) -> None:
    """Workers read the same batches in every epoch."""

    class Drawn(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(11).tolist()

    class Late(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            yield from super().__iter__()

    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": stay}
    kinds: list[dict[str, Any]] = [
        {"shuffle": True, "batch_size": 2},
        {"sampler": Drawn(), "batch_size": 2},
        {"sampler": Drawn(), "batch_size": None},
    ]
    for kind, options in zip((DataLoader, Late, DataLoader), kinds, strict=True):
        plain, ours = (prepared(kind(list(range(11)), collate_fn=str, **options, **more), 1, 2) for more in ({}, workers))
        for _ in range(2):
            assert list(ours) == list(plain)
        next(iter(ours))
        next(iter(plain))
        assert list(ours) == list(plain)
        del ours
        gc.collect()


def test_persistent_workers() -> None:
    """Workers that stay read every pass and draw other numbers on every rank."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "collate_fn": keep, "in_order": False}
    loaders = ranks_of(lambda: DataLoader(Drawing(), **options), 2)
    read = [[list(loader) for loader in loaders] for _ in range(2)]
    for epoch in read:
        assert [[[sample for sample, _ in batch] for batch in rank] for rank in epoch] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    drawn = [number for epoch in read for rank in epoch for batch in rank for _, number in batch]
    assert len(set(drawn)) == len(drawn)
    for number, outer in enumerate(loaders[0]):  # the workers are taken: the inner pass has its own
        assert [sample for sample, _ in outer] == [4 * number, 4 * number + 1]
        if number == 0:
            assert [[sample for sample, _ in batch] for batch in loaders[0]] == [[0, 1], [4, 5]]
    assert [sample for sample, _ in next(iter(loaders[1]))] == [2, 3]
    workers = list(loaders[1]._engine.loader._iterator._workers)  # type: ignore[attr-defined]
    del loaders, outer
    gc.collect()  # a gradient state knows the loader that was read to its end
    assert not any(worker.is_alive() for worker in workers), "they end with the loader"


# -- what cannot be meant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("even_batches", "False"), ("split_batches", 1), ("dispatch_batches", "no"), ("data_seed", 1.5), ("data_seed", -1)]
)
def test_invalid_options_refused(name: str, value: Any) -> None:
    """Options that cannot be meant are refused when made and when read."""
    with pytest.raises(ConfigError, match=f"DataLoaderConfiguration.{name}="):
        DataLoaderConfiguration(**{name: value})
    config = DataLoaderConfiguration()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"DataLoaderConfiguration.{name}="):
        build_loader(loader_of(), LoaderSettings(data_rank=place(), config=config, seed=0, gradient_state=GradientState()))


def test_slice_function_without_dispatch(caplog: pytest.LogCaptureFixture) -> None:
    """A way to cut without dispatching is named."""
    prepare_data_loader(loader_of(), slice_fn_for_dispatch=lambda *_, **__: None)
    assert "slice_fn_for_dispatch has no effect" in caplog.text


def test_loaders_of_one_seed_differ() -> None:
    """Two loaders of one data seed are shuffled apart."""
    config = DataLoaderConfiguration(data_seed=3)
    seeds = [choose_seed(loader_of(), config, ordinal) for ordinal in range(3)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 3


class Epochal(Dataset[int]):
    """Other samples in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, position: int) -> int:
        return 100 * self.epoch + position

    def __len__(self) -> int:
        return 2


def test_persistent_workers_and_set_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """Workers that should stay are told of the epoch."""
    loader = prepared(DataLoader(Epochal(), batch_size=2, num_workers=1, persistent_workers=True))
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[0, 1]], [[100, 101]]]
    assert "persistent_workers=True" in caplog.text


def test_invalid_positions_refused() -> None:
    """Positions that cannot be meant are refused."""
    loader = prepare_data_loader(DataLoader(range(4)), num_processes=1, process_index=0)
    with pytest.raises(ConfigError, match="whole numbers"):
        loader.set_epoch(1.7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no epoch, batches"):
        loader.load_state_dict({})


def test_another_default_device() -> None:
    """The host is the host, whatever device torch makes tensors on when we are imported: batches are moved to where they belong."""
    code = (
        "import torch; torch.set_default_device('meta'); from slipstream import prepare_data_loader; torch.set_default_device('cpu'); "
        "loader = prepare_data_loader(torch.utils.data.DataLoader(torch.ones(4, 2)), device=torch.device('meta'), put_on_device=True); "
        "print({batch.device.type for batch in loader})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "{'meta'}", done.stderr
