"""Rank 0 reads for everyone: the global batches of one process, whatever they hold, in one call each; the others touch nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from slipstream import DistributedOperationException, PartialState
from slipstream.data.dispatch_loader import DispatchLoader
from slipstream.data.options import DataLoaderConfiguration, DataRank, LoaderSettings
from slipstream.data.prepare import build_loader, skip_first_batches
from slipstream.distributed.gradient_state import BatchShares, GradientState
from slipstream.distributed.scatter import ScatterSeries
from slipstream.errors import ConfigError

WORLDS = [1, 2, 3, 4]


class Stream(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items
        self.touched = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.touched += 1
            yield item


class Mapped(Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items
        self.touched = 0

    def __getitem__(self, position: int) -> Any:
        self.touched += 1
        return self.items[position]

    def __len__(self) -> int:
        return len(self.items)


class Untouchable:
    """What a rank that never reads may have for a dataset."""

    def __init__(self, kind: type) -> None:
        self.__class__ = type("Untouchable", (Untouchable, kind), {})

    def __iter__(self) -> Any:
        raise AssertionError("touched")

    def __getitem__(self, position: Any) -> Any:
        raise AssertionError("touched")


def prepared(loader: DataLoader[Any], *, slice_fn: Any = None, effective_batch_size: int | None = None, **options: Any) -> DispatchLoader:
    state = PartialState()
    settings = LoaderSettings(
        data_rank=DataRank(state.process_index, state.num_processes, state._channel, state._limits),
        config=DataLoaderConfiguration(dispatch_batches=True, **options),
        seed=7,
        gradient_state=GradientState(),
        effective_batch_size=effective_batch_size,
        slice_fn=slice_fn,
    )
    prepared = build_loader(loader, settings)
    assert isinstance(prepared, DispatchLoader)
    return prepared


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def passed(loader: Any) -> list[Any]:
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


CASES = [
    (kind, length, batch, drop_last, even, split)
    for kind in (Stream, Mapped)
    for length, batch in [(0, 2), (1, 2), (13, 3)]
    for drop_last in (False, True)
    for even in (False, True)
    for split in (False, True)
]


@pytest.mark.parametrize("world", WORLDS)
def test_global_batches_match_one_process(ranks: Any, world: int) -> None:
    """Global batches are those of one process."""

    def run() -> Any:
        found = []
        for kind, length, batch, drop_last, even, split in CASES:
            size = batch * world if split else batch
            loader = prepared(DataLoader(kind(range(length)), batch_size=size, drop_last=drop_last), even_batches=even, split_batches=split)
            found.append((passed(loader), loader.batch_size, loader.total_batch_size))
        return found

    results = ranks(world).run(run, timeout=60)
    for case, (_, length, batch, drop_last, even, _) in enumerate(CASES):
        size = batch * world
        plain = [index.tolist() for index in DataLoader(Mapped(range(length)), batch_size=size, drop_last=drop_last)]
        got = together([result[case][0] for result in results])
        assert [entry for entry, _, _, _ in got] == plain
        assert [end for _, _, end, _ in got] == [False] * (len(plain) - 1) + [True] * bool(plain)
        assert {result[case][1:] for result in results} == {(batch, size)}
        for entry, shares, end, remainder in got:
            assert (shares is None) == (len(entry) == size)
            assert shares is None or world == 1 or shares.weighed == (not even)
            assert not end or remainder == len(entry) % size


def test_short_last_batch_completed(ranks: Any) -> None:
    """A short last batch is completed from the start of the pass."""

    def run() -> Any:
        loaders = [prepared(DataLoader(kind(range(9)), batch_size=2), even_batches=True) for kind in (Stream, Mapped)]
        return [[listed(batch) for batch in loader] for loader in loaders]

    assert ranks(3).run(run) == [[[[0, 1], [6, 7]]] * 2, [[[2, 3], [8, 0]]] * 2, [[[4, 5], [1, 2]]] * 2]


@pytest.mark.parametrize("kind", [Stream, Mapped])
def test_only_rank_0_reads(ranks: Any, kind: Any) -> None:
    """Only rank 0 reads and each item once."""

    def run() -> Any:
        dataset = kind(range(10)) if PartialState().process_index == 0 else Untouchable(kind)
        made = DataLoader(dataset, batch_size=2) if kind is Stream else DataLoader(dataset, batch_size=2, sampler=range(10))
        return passed(prepared(made, even_batches=False)), getattr(dataset, "touched", None)

    results = ranks(3).run(run)
    assert [item for entry, _, _, _ in together([result for result, _ in results]) for item in entry] == list(range(10))
    # Rank 0 alone has the samples; where positions can be read again, a rank that would have none is kept busy with a batch
    assert [touched for _, touched in results] == [10 if kind is Stream else 12, None, None]


def test_ragged_tensors_texts_and_any_structure(ranks: Any) -> None:
    texts = [("word " * number).strip() for number in range(11)]

    def collate(samples: list[str]) -> dict[str, Any]:
        longest = max(len(sample) for sample in samples)
        rows = [[ord(letter) for letter in sample] + [0] * (longest - len(sample)) for sample in samples]
        empty = torch.empty(len(samples), 0, dtype=torch.bfloat16)
        return {"text": samples, "ids": torch.tensor(rows, dtype=torch.int32), "more": (empty, [{"length": longest}] * len(samples))}

    def run() -> Any:
        found = []
        for kind in (Stream, Mapped):
            for batch in prepared(DataLoader(kind(texts), batch_size=2, collate_fn=collate), even_batches=False):
                wanted = collate(batch["text"])
                assert torch.equal(batch["ids"], wanted["ids"])
                assert batch["ids"].dtype == torch.int32
                assert batch["more"][0].dtype == torch.bfloat16
                assert batch["more"][0].shape == (len(batch["text"]), 0)
                assert batch["more"][1] == wanted["more"][1]
                batch["ids"] += 1
                found.append(batch["text"])
        return found

    first, second = ranks(2).run(run)
    for half in (slice(0, 3), slice(3, 6)):
        read = [text for pair in zip(first[half], second[half], strict=True) for batch in pair for text in batch]
        assert read == texts


def test_batch_cut_along_first_dimension(ranks: Any) -> None:
    """A batch is cut along its first dimension lists too."""

    def collate(samples: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(samples), "text": [str(sample) for sample in samples], "sum": sum(samples)}

    def run() -> Any:
        loader = prepared(DataLoader(Stream(range(8)), batch_size=4, collate_fn=collate), split_batches=True)
        return [(batch["x"].tolist(), batch["text"], batch["sum"]) for batch in loader]

    assert ranks(2).run(run) == [
        [([0, 1], ["0", "1"], 6), ([4, 5], ["4", "5"], 22)],
        [([2, 3], ["2", "3"], 6), ([6, 7], ["6", "7"], 22)],
    ]


@pytest.mark.parametrize("split", [False, True])
def test_user_slice_function(ranks: Any, split: bool) -> None:
    """The script may cut batches itself."""

    def interleaved(data: Any, tensor_slice: slice, process_index: int, num_processes: int) -> Any:
        assert tensor_slice == slice(2 * process_index, 2 * process_index + 2)
        return data[process_index::num_processes]

    def run() -> Any:
        made = [DataLoader(kind(range(8)), batch_size=4 if split else 2) for kind in (Stream, Mapped)]
        return [[listed(batch) for batch in prepared(entry, slice_fn=interleaved, split_batches=split)] for entry in made]

    assert ranks(2).run(run) == [[[[0, 2], [4, 6]]] * 2, [[[1, 3], [5, 7]]] * 2]


@pytest.mark.parametrize("kind", [Stream, Mapped])
def test_batches_that_are_ready_made(ranks: Any, kind: Any) -> None:
    batches = [torch.arange(size) + 10 * number for number, size in enumerate([2, 2, 2, 1, 2])]

    def run() -> Any:
        return [passed(prepared(DataLoader(kind(batches), batch_size=None), split_batches=split)) for split in (False, True)]

    results = ranks(2).run(run)
    dealt, cut = (together([result[case] for result in results]) for case in range(2))
    assert [(entry, shares and shares.real) for entry, shares, _, _ in dealt] == [
        ([0, 1, 10, 11], None),
        ([20, 21, 30], (2, 1)),
        ([40, 41], (2, 0)),
    ]
    assert [entry for entry, _, _, _ in cut] == [batch.tolist() for batch in batches]


def test_batch_sampler_and_shuffled_order(ranks: Any) -> None:
    """A batch sampler of the script's own and a shuffled order."""

    def run() -> Any:
        sampler = BatchSampler(SequentialSampler(range(11)), 3, False)

        class Own:
            def __iter__(self) -> Iterator[list[int]]:
                return iter(sampler)

            def __len__(self) -> int:
                return len(sampler)

        dealt = prepared(DataLoader(Mapped(range(11)), batch_sampler=Own()))  # type: ignore[arg-type]
        shuffled = prepared(DataLoader(Mapped(range(24)), batch_size=12 // PartialState().num_processes, shuffle=True))
        return passed(dealt), len(dealt), passed(shuffled), passed(shuffled)

    orders = []
    for world in (1, 2, 3):
        results = ranks(world).run(run)
        assert [item for entry, _, _, _ in together([result[0] for result in results]) for item in entry] == list(range(11))
        assert {result[1] for result in results} == {len(results[0][0])}
        orders.append([[entry for entry, _, _, _ in together([result[number] for result in results])] for number in (2, 3)])
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("kind", [Stream, Mapped])
def test_workers_of_rank_0(ranks: Any, kind: Any) -> None:
    def run() -> Any:
        loader = prepared(DataLoader(kind(range(11)), batch_size=2, num_workers=1, persistent_workers=True), even_batches=False)
        return passed(loader), passed(loader), passed(skip_first_batches(loader, 1))

    results = ranks(2).run(run)
    whole = together([result[0] for result in results])
    assert [item for entry, _, _, _ in whole for item in entry] == list(range(11))
    assert together([result[1] for result in results]) == whole
    assert together([result[2] for result in results]) == whole[1:]


@pytest.mark.parametrize("kind", [Stream, Mapped])
def test_later_start_gives_rest(ranks: Any, kind: Any) -> None:
    """A pass that begins later gives the rest."""

    def run() -> Any:
        return [passed(skip_first_batches(prepared(DataLoader(kind(range(13)), batch_size=2)), skipped)) for skipped in range(5)]

    results = ranks(2).run(run)
    whole = together([result[0] for result in results])
    for skipped in range(1, 5):
        assert together([result[skipped] for result in results]) == whole[skipped:]


def test_seeking_reads_only_the_head(ranks: Any) -> None:
    """Seeking reads nothing that comes before but what completes the last batch."""

    def run() -> Any:
        found = []
        for size in (None, 1):
            dataset = Mapped([torch.tensor([number]) for number in range(101)])
            later = passed(skip_first_batches(prepared(DataLoader(dataset, batch_size=size)), 45))
            found.append((later, dataset.touched))
        return found

    results = ranks(2).run(run)
    for case in range(2):
        read = [item for entry, _, _, _ in together([result[case][0] for result in results]) for item in entry]
        assert [int(torch.tensor(item)) for item in read] == list(range(90, 101))
        assert results[0][case][1] <= 11 + 3
        assert results[1][case][1] == 0


def test_one_call_per_global_batch(ranks: Any) -> None:
    """One call for each global batch."""

    def run() -> Any:
        channel: Any = PartialState()._channel()
        items = [{"x": torch.ones(50, number), "y": str(number), "z": torch.zeros(())} for number in range(12)]
        loader = prepared(DataLoader(Stream(items), batch_size=1, collate_fn=list))
        before = channel.sequence
        steps = len(list(loader))
        return steps, channel.sequence - before

    assert ranks(2).run(run) == [(6, 6)] * 2


def test_bytes_of_a_dispatched_batch(ranks: Any) -> None:
    """After the first batch of a pass, a batch costs the bytes of its tensors and at most 160 more, also if it is a short one."""

    def run() -> list[int]:
        lengths: list[int] = []
        pack = ScatterSeries._pack

        def record(series: Any, parts: Any, note: bytes) -> Any:
            body = pack(series, parts, note)
            lengths.append(body.length)
            return body

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScatterSeries, "_pack", record)
            data = TensorDataset(torch.ones(60, 16), torch.arange(60))
            assert sum(len(batch[0]) for batch in prepared(DataLoader(data, batch_size=8))) >= 28
        return lengths

    here, there = ranks(2).run(run)
    full = 8 * (16 * 4 + 8)
    assert here[0] < full + 400
    assert [length < full + 160 for length in here[1:]] == [True] * 3
    assert there == []


@pytest.mark.parametrize("kind", [Stream, Mapped])
def test_read_error_raised_everywhere(ranks: Any, kind: Any) -> None:
    """What reading raises is raised on every rank."""

    class Failing(kind):  # type: ignore[misc,valid-type]
        def __getitem__(self, position: int) -> Any:
            if position == 5:
                raise OSError("page 5 is torn")
            return position

        def __iter__(self) -> Iterator[Any]:
            return (self[position] for position in range(10))

    def run() -> Any:
        state = PartialState()
        try:
            for _ in prepared(DataLoader(Failing(range(10)), batch_size=1)):
                pass
        except (OSError, DistributedOperationException) as error:
            return type(error).__name__, "page 5 is torn" in str(error), state.gather([state.process_index])
        return None

    assert ranks(2).run(run) == [("OSError", True, [0, 1]), ("DistributedOperationException", True, [0, 1])]


def test_rank_that_leaves_is_named(ranks: Any) -> None:
    """A rank that leaves the loop alone is named."""

    def run() -> None:
        state = PartialState()
        for step, _ in enumerate(prepared(DataLoader(Mapped(range(10)), batch_size=1))):
            if state.process_index == 1 and step == 2:
                break
        state.wait_for_everyone()

    for outcome in ranks(2).outcomes(run):
        assert "rank 0: next batch from rank 0 (batch 3 of pass 0)" in str(outcome.error)
        assert "rank 1: wait_for_everyone at test_dispatch_loader.py:" in str(outcome.error)


def test_random_state_of_rank_0_untouched(ranks: Any) -> None:
    """Reading leaves the random state of rank 0 alone."""

    class Noisy(Mapped):
        def __getitem__(self, position: int) -> float:
            return random.random() + float(torch.rand(()))

    class NoisyStream(Stream):
        def __iter__(self) -> Iterator[float]:
            return (random.random() for _ in range(8))

    def run() -> Any:
        before = random.getstate(), torch.get_rng_state()
        read = [passed(prepared(DataLoader(dataset, batch_size=2))) for dataset in (Noisy(range(8)), NoisyStream(()))]
        return read, random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])

    (first, alone), (_, other) = ranks(2).run(run)
    assert alone
    assert other
    assert len({item for entry, *_ in first[0] for item in entry}) == 4


def test_effective_batch(ranks: Any) -> None:
    """The effective batch decides about batches and steps."""

    def run() -> Any:
        loader = prepared(DataLoader(Stream(range(32)), batch_size=5), effective_batch_size=16)
        return loader.batch_size, loader.steps_per_update, len(next(iter(loader)))

    assert ranks(2).run(run) == [(4, 2, 4)] * 2


def test_prepare_dispatches_on_request() -> None:
    """Prepare dispatches when it is asked to."""
    place = DataRank(0, 1, lambda: None, None)  # type: ignore[arg-type,return-value]
    for dispatch, kind in [(True, DispatchLoader), (None, object)]:
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        settings = LoaderSettings(data_rank=place, config=config, seed=0, gradient_state=GradientState())
        loader = build_loader(DataLoader(Stream(range(4))), settings)
        assert isinstance(loader, DispatchLoader) == (kind is DispatchLoader)


def test_uneven_cut_refused(ranks: Any) -> None:
    """Batches that cannot be cut evenly are refused at once."""

    def run() -> str:
        with pytest.raises(ConfigError) as caught:
            prepared(DataLoader(Stream(range(4)), batch_size=3), split_batches=True, even_batches=True)
        return str(caught.value)

    assert "batch_size=3 into 2 equal slices" in ranks(2).run(run)[0]


def zipped(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("kind", [Stream, Mapped])
def test_sample_lists_cut(ranks: Any, kind: Any) -> None:
    """Lists of samples are cut between samples."""
    images = [torch.full((3, 2, 2), float(number)) for number in range(4)]
    pairs = [(image, {"boxes": torch.full((number, 4), float(number))}) for number, image in enumerate(images)]

    def run() -> Any:
        (alone,) = prepared(DataLoader(kind(images), batch_size=4, collate_fn=list), split_batches=True)
        ((inputs, targets),) = prepared(DataLoader(kind(pairs), batch_size=4, collate_fn=zipped), split_batches=True)
        return [[image.shape for image in alone], [image[0, 0, 0].item() for image in inputs], [len(target["boxes"]) for target in targets]]

    assert ranks(2).run(run) == [[[(3, 2, 2)] * 2, [0.0, 1.0], [0, 1]], [[(3, 2, 2)] * 2, [2.0, 3.0], [2, 3]]]


def test_ambiguous_list_refused(ranks: Any) -> None:
    """A list that could be of samples or of parts is refused."""
    pairs = [(torch.ones(2), torch.zeros(2))] * 2

    def run() -> Any:
        try:
            list(prepared(DataLoader(pairs, batch_size=2, collate_fn=list), split_batches=True))  # type: ignore[arg-type]
        except Exception as error:
            message = str(error)
        (default,) = prepared(DataLoader(pairs, batch_size=2), split_batches=True)  # type: ignore[arg-type]
        return "slice_fn_for_dispatch" in message, [part.tolist() for part in default]

    assert ranks(2).run(run) == [(True, [[[1.0, 1.0]], [[0.0, 0.0]]])] * 2


def test_none_items(ranks: Any) -> None:
    """Items that are none are not the end."""

    def run() -> Any:
        loader = DataLoader(Stream([torch.arange(4), None, torch.arange(4, 8)]), batch_size=None)
        return [batch if batch is None else batch.tolist() for batch in prepared(loader, split_batches=True)]

    assert ranks(2).run(run) == [[[0, 1], None, [4, 5]], [[2, 3], None, [6, 7]]]
