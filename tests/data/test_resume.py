"""A loader that was saved anywhere goes on as the saved one would have: the same batches, in this epoch and in those after it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from log_capture import captured_log
from slipstream import PartialState
from slipstream.data.fingerprint import describe_loader
from slipstream.data.options import DataLoaderConfiguration, DataRank, LoaderSettings
from slipstream.data.prepare import build_loader, skip_first_batches
from slipstream.distributed.gradient_state import GradientState
from slipstream.errors import ConfigError
from slipstream.utils import gather_object

LENGTH = 11
EPOCHS = 3
DATA = list(range(LENGTH))


# -- samplers of the user's own --------------------------------------------------------------------------------------------------


class Own(Sampler[int]):
    """What the samplers here share."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Plain:
    """No base class; draws from Python's global numbers, one position at a time."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield random.randrange(LENGTH)

    def __len__(self) -> int:
        return LENGTH


class WithGenerator(Own):
    """A generator under torch's usual name."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


class KeepsRandomState(Own):
    """A RandomState of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.RandomState(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(self.length).tolist())


class DrawsWhileRead(Own):
    """Python's, numpy's and torch's generators under names of its own, drawn one position at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._python, self.numbers, self.torch = random.Random(1), numpy.random.default_rng(2), torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            drawn = self._python.randrange(100) + int(self.numbers.integers(100)) + int(torch.randint(100, (), generator=self.torch))
            yield drawn % self.length


class ShufflesAgain(Own):
    """Shuffles what the epoch before left."""

    def __init__(self) -> None:
        super().__init__()
        self.indices = list(range(self.length))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


class Rotates(Own):
    """Counts its passes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for place in range(self.length):
            yield (place + 3 * self.passes) % self.length


class AtItsPlace(Own):
    """Its state is a place, as those of torchdata: loaded, it goes on there; at its end it begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.order, self.at, self.drawn = random.Random(4), list(range(LENGTH)), 0, 0

    def __iter__(self) -> Iterator[int]:
        if self.at == 0:
            self.rng.shuffle(self.order)
        while self.at < self.length:
            self.at += 1
            self.drawn += 1
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order, "rng": list(self.rng.getstate()[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], list(state["order"])
        self.rng.setstate((3, tuple(state["rng"]), None))


class AtItsEnd(AtItsPlace):
    """The same, but at its end it stays there until the next pass begins."""

    def __iter__(self) -> Iterator[int]:
        if self.at == self.length and not self.loaded:
            self.at = 0
        self.loaded = False
        yield from super().__iter__()
        self.at = self.length

    loaded = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True


class AtItsBeginning(Own):
    """Its state is that of its generator: loaded, it gives a pass from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(4)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield self.rng.randrange(self.length)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": list(self.rng.getstate()[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate((3, tuple(state["rng"]), None))


class HearsOfEpochs(Own):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.length), self.length))


class Budget(Sampler[list[int]]):
    """Batches of all sizes, of a sampler under another name."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for sample in self.inner:
            batch.append(sample)
            if sum(batch) > 9 or len(batch) == 3:
                yield batch
                batch = []
        if batch:
            yield batch


def by_sampler(make: Callable[[], Any]) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(DATA, batch_size=2, sampler=make(), collate_fn=keep)


def by_batches(make: Callable[[], Any]) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(DATA, batch_sampler=make(), collate_fn=keep)


MAPPED: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, batch_size=2, collate_fn=keep),
    "shuffle": lambda: DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=keep),
    "drop_last": lambda: DataLoader(DATA, batch_size=2, shuffle=True, drop_last=True, collate_fn=keep),
    "positions": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "replacement": by_sampler(lambda: RandomSampler(DATA, replacement=True, num_samples=13)),
    "weighted": by_sampler(lambda: WeightedRandomSampler([1.0 + entry % 3 for entry in DATA], 9)),
    "subset": by_sampler(lambda: SubsetRandomSampler(DATA[::2])),
    "a list": by_sampler(lambda: DATA[::-1]),
    "batches": by_batches(lambda: [[1, 2], [3], [4, 5, 6], [0], [7]]),
    "budget": by_batches(lambda: Budget(RandomSampler(DATA))),
    "budget of its own": by_batches(lambda: Budget(KeepsRandomState())),
    **{
        kind.__name__: by_sampler(kind)
        for kind in (
            Plain,
            WithGenerator,
            KeepsRandomState,
            DrawsWhileRead,
            ShufflesAgain,
            Rotates,
            AtItsPlace,
            AtItsEnd,
            AtItsBeginning,
            HearsOfEpochs,
        )
    },
}


def saved_everywhere(loaders: list[Any]) -> tuple[list[list[Any]], list[tuple[int, int, dict[str, Any]]]]:
    """The batches of all epochs, and the state at every point: (epoch, batches read of it, state)."""
    epochs: list[list[Any]] = []
    states = [(0, 0, copy.deepcopy(loaders[0].state_dict()))]
    for epoch in range(EPOCHS):
        batches: list[Any] = []
        for entry in rounds(loaders):
            batches.append(whole(*entry))
            states.append((epoch, len(batches), copy.deepcopy(loaders[0].state_dict())))
        epochs.append(batches)
        states.append((epoch + 1, 0, copy.deepcopy(loaders[0].state_dict())))
    return epochs, [state for state in states if state[0] < EPOCHS]


def whole(batches: list[Any], shares: Any) -> list[Any]:
    return real_samples(batches, shares) if isinstance(batches[0], list) else batches


def rest(loaders: list[Any], count: int) -> list[list[Any]]:
    return [[whole(*entry) for entry in rounds(loaders)] for _ in range(count)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", MAPPED)
def test_map_loader_resumes_anywhere(kind: str, world: int, caplog: pytest.LogCaptureFixture) -> None:
    """A map style loader continues from every point."""
    make = MAPPED[kind]
    epochs, states = saved_everywhere(ranks_of(make, world))
    for epoch, read, state in states:
        expected = [epochs[epoch][read:], *epochs[epoch + 1 :]]
        going_on = ranks_of(make, world, seed=1)
        for entry in going_on:
            entry.load_state_dict(copy.deepcopy(state))
        assert kind.startswith("budget") or len(going_on[0]) == len(epochs[epoch])
        assert rest(going_on, EPOCHS - epoch) == expected, f"cut after {read} of epoch {epoch}, by itself"
        for how in ("manual", "auto"):
            skipping = ranks_of(make, world, seed=1, resume=how)
            for entry in skipping:
                entry.load_state_dict(copy.deepcopy(state))
            assert state["batches"] == read
            twins = [skip_first_batches(entry, read) for entry in skipping]
            assert rest(twins, 1) + rest(skipping, EPOCHS - epoch - 1) == expected, f"cut after {read} of epoch {epoch}, skipping, {how}"
    assert all("is empty" in record.message for record in caplog.records), "nothing else is to be warned of"


_elsewhere = numpy.random.RandomState(8)


class FromElsewhere(Own):
    """Draws from where nobody can look."""

    def __iter__(self) -> Iterator[int]:
        return iter(_elsewhere.permutation(self.length).tolist())


class DrawsFromElsewhere(FromElsewhere):
    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


class Watches(Own):
    """Gives the samples with the largest losses first, as they are when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.given = {entry: float(entry) for entry in DATA}, list[int]()

    def __iter__(self) -> Iterator[int]:
        while len(self.given) < self.length:
            chosen = max((entry for entry in DATA if entry not in self.given), key=self.losses.__getitem__)
            self.given.append(chosen)
            yield chosen
        self.given = []


class Tells(Watches):
    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses.values()), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.given = dict(enumerate(state["losses"])), list(state["given"])


class Ranks(Watches):
    """The order of a pass is that of the losses when it begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(DATA, key=self.losses.__getitem__))


@pytest.mark.parametrize("kind", [Watches, Tells, Ranks])
def test_sampler_that_watches_training(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A sampler that watches the training continues with what it saw."""

    def trained(loader: Any, sampler: Any) -> Iterator[tuple[list[int], Any]]:
        for batch in loader:
            for sample in batch:
                sampler.losses[(sample * 7) % LENGTH] += 0.3 * sample  # which changes the order of what comes
            yield batch, copy.deepcopy(loader.state_dict())

    sampler = kind()
    loader = prepared(DataLoader(DATA, batch_size=2, sampler=sampler, collate_fn=keep))
    straight, later = list(trained(loader, sampler)), [list(loader), list(loader)]
    read = [batch for batch, _ in straight]
    assert sorted(sum(read, [])) == DATA
    told = 0
    for number, (_, state) in enumerate(straight, 1):
        again = kind()
        caplog.clear()
        resumed = prepared(DataLoader(DATA, batch_size=2, sampler=again, collate_fn=keep))
        resumed.load_state_dict(state)
        found = [batch for batch, _ in trained(resumed, again)]
        if "is not that of the saved run" in caplog.text:
            told += 1
            continue
        assert found == read[number:]
        assert again.losses == sampler.losses
        assert [list(resumed), list(resumed)] == later
    assert told == 0 or kind is Watches, "without a state of its own, an order that cannot be drawn again is told"


@pytest.mark.parametrize("kind", [FromElsewhere, DrawsFromElsewhere])
def test_unknown_order_warned(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An order that cannot be known is reported and never handed out in silence."""
    loader = prepared(by_sampler(kind)())
    for number, _ in enumerate(loader):
        if number == 2:
            state = loader.state_dict()
    resumed = prepared(by_sampler(kind)())
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 3
    assert f"the order of {kind.__name__} is not that of the saved run" in caplog.text
    assert caplog.text.count("is not that of the saved run") == 1


# -- where a script saves, and how it goes on ------------------------------------------------------------------------------------


def shuffled(**options: Any) -> Any:
    return prepared(MAPPED["KeepsRandomState"](), **options)


def resumed_from(state: dict[str, Any], **options: Any) -> Any:
    loader = shuffled(**options)
    loader.load_state_dict(copy.deepcopy(state))
    return loader


def epochs_of_shuffled(count: int = 4) -> list[list[Any]]:
    loader = shuffled()
    return [list(loader) for _ in range(count)]


def test_break_then_next_epoch() -> None:
    """After a break the next pass is the next epoch."""
    loader = shuffled()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    straight = [list(loader), list(loader)]
    resumed = resumed_from(state)
    assert resumed.state_dict()["left"] == 1
    assert [list(resumed), list(resumed)] == straight


def test_left_pass_can_be_resumed() -> None:
    """A pass that was left can be resumed in this process and in another."""
    epochs = epochs_of_shuffled()
    loader = shuffled()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = copy.deepcopy(loader.state_dict())
    assert list(skip_first_batches(loader, 3)) == epochs[0][3:], "a sampler that keeps a generator is put back for it"
    assert list(loader) == epochs[1]
    for how in ("auto", "manual"):
        again = resumed_from(state, resume=how)
        assert list(skip_first_batches(again, 3)) == epochs[0][3:]
        assert list(again) == epochs[1]


def test_resume_of_resumed_run() -> None:
    """A resumed run can be resumed and so on."""
    epochs = epochs_of_shuffled()
    state, read = shuffled().state_dict(), []
    for _ in range(4 * 6):  # one batch in each life
        loader = resumed_from(state)
        assert loader.state_dict()["samples"] == state["samples"], "also before anything was read"
        for batch in loader:
            read.append(batch)
            state = copy.deepcopy(loader.state_dict())
            break
        else:
            state = copy.deepcopy(loader.state_dict())
            continue
    flat = [batch for epoch in epochs for batch in epoch]
    assert read == flat[: len(read)]
    assert len(read) >= 18


def test_state_of_skipping_twin() -> None:
    """The state of the loader is that of its twin that skips."""
    epochs = epochs_of_shuffled()
    loader = shuffled()
    twin = skip_first_batches(loader, 2)
    for number, _ in enumerate(twin, 3):
        state = copy.deepcopy(loader.state_dict())
        resumed = resumed_from(state)
        assert list(resumed) == epochs[0][number:]
        assert list(resumed) == epochs[1]
    assert list(resumed_from(loader.state_dict())) == epochs[1], "after the twin is through"
    assert list(loader) == epochs[1]


def test_save_inside_evaluation() -> None:
    """Inside of an evaluation the position of the training is kept and the evaluation begins anew."""

    def loaders() -> tuple[Any, Any]:
        state = GradientState()
        make = lambda: DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=keep)  # noqa: E731
        return tuple(prepared(make(), seed=seed, gradient_state=state) for seed in (1, 2))  # type: ignore[return-value]

    train, test = loaders()
    read, evaluations, saved = [], [], None
    for number, batch in enumerate(train):
        read.append(batch)
        if number % 2:
            evaluations.append([])
            for part in test:
                evaluations[-1].append(part)
                if (number, len(evaluations[-1])) == (3, 4):
                    saved = copy.deepcopy((train.state_dict(), test.state_dict()))
    assert saved is not None
    train, test = loaders()
    train.load_state_dict(saved[0])
    test.load_state_dict(saved[1])
    again = []
    for number, batch in enumerate(train, 4):
        again.append(batch)
        if number % 2:
            assert list(test) == evaluations[2], "a whole one: what was left of the other is gone with the process"
    assert again == read[4:]


def test_two_loaders_keep_positions() -> None:
    """Two loaders that are read side by side both keep their places."""

    def loaders() -> list[Any]:
        state = GradientState()
        make = lambda: DataLoader(DATA, batch_size=2, shuffle=True, collate_fn=keep)  # noqa: E731
        return [prepared(make(), seed=seed, gradient_state=state) for seed in (1, 2)]

    pairs, states = [], []
    both = loaders()
    for pair in zip(*both, strict=True):
        pairs.append(pair)
        states.append(copy.deepcopy([entry.state_dict() for entry in both]))
    for cut, saved in enumerate(states, 1):
        both = loaders()
        for entry, state in zip(both, saved, strict=True):
            entry.load_state_dict(state)
        assert list(zip(*both, strict=True)) == pairs[cut:]


def test_set_epoch_and_loaded_position(caplog: pytest.LogCaptureFixture) -> None:
    """Set epoch keeps the position of its epoch and is reported if it gives it up."""
    loader = prepared(MAPPED["shuffle"]())
    epochs = [list(loader) for _ in range(4)]
    loader.set_epoch(2)
    for number, _ in enumerate(loader, 1):
        if number == 3:
            state = loader.state_dict()
    going_on = prepared(MAPPED["shuffle"](), seed=0)
    going_on.load_state_dict(state)
    going_on.set_epoch(2)
    assert list(going_on) == epochs[2][3:]
    going_on.load_state_dict(state)
    assert not caplog.text
    going_on.set_epoch(0)
    assert "gives up the position that was loaded for this loader (6 into epoch 2)" in caplog.text
    assert list(going_on) == epochs[0]


def test_len_of_a_resumed_loader() -> None:
    """`len` is that of a whole pass, before and in a resumed pass: scripts do arithmetic with it after load_state."""
    loader = prepared(MAPPED["shuffle"]())
    loader.load_state_dict({"epoch": 0, "batches": 4, "samples": 8, "seed": 7})
    assert len(loader) == 6
    later = skip_first_batches(loader, 4)
    assert len(later) == 2, "only what skip_first_batches gives back is shorter"
    assert [len(loader) for _ in loader] == [6, 6]
    assert len(loader) == 6
    loader.load_state_dict({"epoch": 0, "batches": 4, "samples": 8, "seed": 7})
    assert [(len(loader), len(later)) for _ in later] == [(6, 2)] * 2
    assert len(later) == 6, "until its first pass is over"


# -- on another number of processes ----------------------------------------------------------------------------------------------


def flat(epochs: list[list[Any]]) -> list[list[Any]]:
    return [[sample for batch in epoch for sample in batch] for epoch in epochs]


def loader_of(kind: str, length: int, size: int, drop_last: bool) -> DataLoader[Any]:
    rest: dict[str, Any] = {"batch_size": size, "drop_last": drop_last, "collate_fn": keep}
    if kind == "batches":
        return DataLoader(range(length), batch_sampler=[[index, index + 1] for index in range(length - 1)], collate_fn=keep)
    if kind in STREAMS:
        return DataLoader(STREAMS[kind](range(length)), **rest)
    sampler = {"shuffle": lambda: RandomSampler(range(length)), "AtItsPlace": AtItsPlace, "DrawsWhileRead": DrawsWhileRead}[kind]()
    return DataLoader(range(length), sampler=sampler, **rest)


def pass_of(loaders: list[Any]) -> list[list[Any]]:
    return [whole(*entry) for entry in rounds(loaders)]


@pytest.mark.parametrize("kind", ["shuffle", "stream", "stateful", "batches", "AtItsPlace", "DrawsWhileRead"])
@pytest.mark.parametrize(
    ("old", "new"), [((2, 2), (1, 4)), ((1, 4), (2, 2)), ((2, 2), (4, 2)), ((4, 1), (3, 2)), ((4, 2), (3, 1)), ((1, 3), (2, 2))]
)
def test_resume_reads_the_rest(kind: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    """The samples that are left are those that were not read.

    (ranks, batch size) before and after; also where the position lies inside of a batch as it is now.
    """
    length = 23
    for even, drop_last in ((True, False), (False, True)):

        def make(ranks: int, size: int, even: bool = even, drop_last: bool = drop_last, **options: Any) -> list[Any]:
            return ranks_of(lambda: loader_of(kind, length, size, drop_last), ranks, even_batches=even, **options)

        saved, read, states = make(*old), list[Any](), []
        for entry in rounds(saved):
            read.append(whole(*entry))
            states.append(copy.deepcopy(saved[0].state_dict()))
        oracle = make(*new)
        straight, later = pass_of(oracle), pass_of(oracle)
        order = flat([straight])[0]
        for cut, state in enumerate(states, 1):
            before = flat([read[:cut]])[0]
            assert state["samples"] == (len(before) if kind != "batches" else min(cut * old[0], length - 1))
            loaders = make(*new)
            for loader in loaders:
                loader.load_state_dict(copy.deepcopy(state))
            expected = None if kind in STREAMS else len(skip_first_batches(loaders[0], cut))
            assert kind in STREAMS or len(loaders[0]) == len(straight)
            batches = pass_of(loaders)
            assert expected in (None, len(batches))
            # also where the saved run dropped what this one would have read
            assert flat([batches])[0] == ([] if state["ended"] else order[len(before) :]), "exactly what was not read"
            assert before[: len(order)] == order[: len(before)], "in one order"
            if kind != "batches" and batches:
                assert batches[1:] == straight[len(straight) - len(batches) + 1 :], "after the first, batches are those of a straight run"
            assert pass_of(loaders) == later


def test_skip_after_world_size_change() -> None:
    """Skipping what a script counted on another number of processes goes to the position.

    After 3 batches of 2 x 2 samples, 3 batches are skipped by a script that knows nothing of samples.
    """
    saved = ranks_of(lambda: DataLoader(range(23), batch_size=2, shuffle=True, collate_fn=keep), 2)
    iterators = [iter(entry) for entry in saved]
    for _ in range(3):
        for iterator in iterators:
            next(iterator)
    state = saved[0].state_dict()
    alone = prepared(DataLoader(range(23), batch_size=2, shuffle=True, collate_fn=keep))
    order = sum(alone, [])
    alone.load_state_dict(state)
    twin = skip_first_batches(alone, 3)
    assert len(twin) == 6
    assert sum(twin, []) == order[12:]
    del iterators


# -- workers ---------------------------------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Draws random numbers of all three kinds for every sample."""

    def __getitem__(self, position: int) -> Any:
        return position, random.random(), float(numpy.random.rand()), float(torch.rand(()))

    def __len__(self) -> int:
        return LENGTH


class Quick(Augmented):
    def __getitems__(self, positions: list[int]) -> list[Any]:
        return [self[position] for position in positions]


def masked(batch: list[Any]) -> list[Any]:
    """What a collate function draws."""
    return [(*sample, random.random()) for sample in batch]


@pytest.mark.parametrize(("kind", "stay"), [(Augmented, False), (Quick, True)])
def test_worker_random_numbers_resume(kind: Any, stay: bool) -> None:
    """Random numbers of workers continue with any number of workers."""

    def make(workers: int = 2) -> Any:
        how: dict[str, Any] = {"num_workers": workers, "persistent_workers": stay and workers > 0}
        return prepared(DataLoader(kind(), batch_size=3, shuffle=True, collate_fn=masked, **how))

    loader = make()
    epochs, states = [], []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            states.append(copy.deepcopy(loader.state_dict()))
    assert len({number for epoch in epochs for batch in epoch for sample in batch for number in sample[1:]}) == 4 * 2 * LENGTH, (
        "all drawn apart"
    )
    for cut, workers in ((1, 2), (2, 1), (4, 2), (6, 1)):
        resumed = make(workers)
        resumed.load_state_dict(states[cut - 1])
        straight = [epochs[0][cut:], epochs[1]] if cut <= 4 else [epochs[1][cut - 4 :]]
        assert [list(resumed) for _ in straight] == straight


# -- streams ---------------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = list(items)
        self.read = 0

    def part(self) -> list[Any]:
        info = get_worker_info()
        return self.items if info is None else self.items[info.id :: info.num_workers]

    def drawn(self, item: Any) -> Any:
        self.read += 1
        return item

    def __iter__(self) -> Iterator[Any]:
        for item in self.part():
            yield self.drawn(item)


class Seekable(Stream):
    def skip(self, count: int) -> Any:
        rest = type(self)(self.items[count:])
        self.rest = rest
        return rest


class Stateful(Stream):
    begin = at = 0

    def __iter__(self) -> Iterator[Any]:
        part = self.part()
        self.at, self.begin = self.begin, 0
        while self.at < len(part):
            self.at += 1
            yield self.drawn(part[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


class Drawing:
    """Random numbers of all three kinds for every item."""

    def drawn(self, item: Any) -> Any:
        return super().drawn(item), random.random(), float(numpy.random.rand()), float(torch.rand(()))  # type: ignore[misc]


class Augmenting(Drawing, Stream):
    pass


class AugmentingSeekable(Drawing, Seekable):
    """Its `skip` draws nothing for what it skips."""


class AugmentingStateful(Drawing, Stateful):
    pass


class Shuffling(Stream):
    """Shuffles when a pass begins."""

    def part(self) -> list[Any]:
        return random.sample(super().part(), len(super().part()))


class ShufflingSeekable(Shuffling):
    """Its `skip` is a promise about the shuffled stream."""

    skipped = 0

    def part(self) -> list[Any]:
        return super().part()[self.skipped :]

    def skip(self, count: int) -> Any:
        rest = type(self)(self.items)
        rest.skipped = count
        self.rest = rest
        return rest


class ShufflingAugmentingSeekable(Drawing, ShufflingSeekable):
    """Both: seeking cannot be exact."""


STREAMS: dict[str, Any] = {"stream": Stream, "seekable": Seekable, "stateful": Stateful}
ALL_STREAMS = [
    Stream,
    Seekable,
    Stateful,
    Augmenting,
    AugmentingSeekable,
    AugmentingStateful,
    Shuffling,
    ShufflingSeekable,
    ShufflingAugmentingSeekable,
]
READS = {Stream, Augmenting, Shuffling, ShufflingAugmentingSeekable}
"""Those that have to be read to seek."""


def resumed_everywhere(make: Callable[[], DataLoader[Any]], world: int, *, every: int = 1, **options: Any) -> list[Any]:
    """Compares resumed passes with the straight one; the loaders that were resumed."""
    epochs, states = saved_everywhere(ranks_of(make, world, **options))
    found = []
    for epoch, read, state in states[::every]:
        expected = [epochs[epoch][read:], *epochs[epoch + 1 :]]
        for how in ("auto", "manual"):
            loaders = ranks_of(make, world, seed=1, resume=how, **options)
            for loader in loaders:
                loader.load_state_dict(copy.deepcopy(state))
            first = loaders if how == "auto" else [skip_first_batches(loader, read) for loader in loaders]
            found.append((read, loaders[0], rest(first, 1) + rest(loaders, EPOCHS - epoch - 1)))
            assert found[-1][-1] == expected, f"cut after {read} of epoch {epoch}"
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ALL_STREAMS)
def test_stream_resumes_anywhere(kind: Any, world: int, caplog: pytest.LogCaptureFixture) -> None:
    """A stream continues from every point."""
    even = kind in (Stream, Stateful, AugmentingSeekable)
    resumed_everywhere(lambda: DataLoader(kind(DATA), batch_size=2, collate_fn=keep), world, even_batches=even)
    assert ("are read and dropped to get to the position" in caplog.text) == (kind in READS)


@pytest.mark.parametrize("kind", [Seekable, Stateful, AugmentingSeekable, AugmentingStateful, ShufflingSeekable])
def test_seeking_reads_little(kind: Any) -> None:
    """Seeking reads little of what comes before."""
    items = range(400)
    make = lambda: DataLoader(kind(items), batch_size=4, collate_fn=keep)  # noqa: E731
    loader = prepared(make())
    for number, _ in enumerate(loader, 1):
        if number == 90:
            state = copy.deepcopy(loader.state_dict())
    resumed = prepared(make())
    resumed.load_state_dict(state)
    data: Any = resumed.original.dataset
    assert len(list(resumed)) == 10
    assert data.read + getattr(getattr(data, "rest", None), "read", 0) <= 40 + 2 * 4


@pytest.mark.parametrize(
    ("kind", "workers", "stay"),
    [(AugmentingStateful, 1, False), (Stateful, 2, False), (AugmentingStateful, 2, True), (Shuffling, 2, False), (Augmenting, 2, True)],
)
def test_stream_workers_resume(kind: Any, workers: int, stay: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Workers of a stream continue where each of them was."""
    make = lambda: DataLoader(kind(range(13)), batch_size=2, collate_fn=masked_items, num_workers=workers, persistent_workers=stay)  # noqa: E731
    resumed_everywhere(make, 1, every=5)
    assert ("are read and dropped to get to the position" in caplog.text) == (kind not in (Stateful, AugmentingStateful))


def masked_items(batch: list[Any]) -> list[Any]:
    return [(sample, random.random()) for sample in batch]


def test_changed_worker_count_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Another number of workers is reported."""

    def make(workers: int) -> Any:
        return prepared(DataLoader(Stream(range(13)), batch_size=2, num_workers=workers))

    loader = make(2)
    iterator = iter(loader)
    next(iterator)
    state = copy.deepcopy(loader.state_dict())
    del iterator
    state["left"] = 0
    make(2).load_state_dict(state)
    assert not caplog.text
    make(0).load_state_dict(state)
    assert "was saved with 2 workers, and there are 1 now" in caplog.text


# -- in processes ----------------------------------------------------------------------------------------------------------------


def ranked(loader: DataLoader[Any], **options: Any) -> Any:
    """The loader of this process, with the others."""
    state = PartialState()
    place = DataRank(state.process_index, state.num_processes, state._channel, state._limits, compares=True)
    config = DataLoaderConfiguration(**options)
    return build_loader(loader, LoaderSettings(data_rank=place, config=config, seed=7, gradient_state=GradientState()))


class Parted(Stateful):
    """Each process has a part of its own, of another length, and knows its place in it."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.rank, self.world_size = PartialState().process_index, PartialState().num_processes
        own = self.items[: len(self.items) - 3 * self.rank]
        self.items = [numpy.asarray(item) + 100 * self.rank if isinstance(item, list) else 100 * self.rank + item for item in own]


class PartedSeekable(Seekable):
    def __init__(self, items: Any, parted: bool = False) -> None:
        super().__init__(items)
        self.rank, self.world_size = PartialState().process_index, PartialState().num_processes
        if not parted:
            self.items = [100 * self.rank + item for item in self.items[: len(self.items) - 3 * self.rank]]

    def skip(self, count: int) -> Any:
        return PartedSeekable(self.items[count:], True)


TOGETHER: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "map": (MAPPED["KeepsRandomState"], {}),
    "drawn": (MAPPED["AtItsPlace"], {}),
    "positions": (MAPPED["positions"], {}),
    "stream by turns": (lambda: DataLoader(AugmentingStateful(DATA), batch_size=2, collate_fn=keep), {}),
    "parts": (lambda: DataLoader(Parted(DATA), batch_size=2, collate_fn=keep), {}),
    "parts in batches": (lambda: DataLoader(Parted([[1, 2], [3], [4, 5, 6], [7]] * 2), batch_size=None), {}),
    "parts that skip": (lambda: DataLoader(PartedSeekable(DATA), batch_size=2, collate_fn=keep), {}),
    "dispatched": (MAPPED["DrawsWhileRead"], {"dispatch_batches": True}),
    "dispatched, shuffled, drawing": (
        lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, collate_fn=keep),
        {"dispatch_batches": True, "even_batches": False},
    ),
    "dispatched stream": (lambda: DataLoader(AugmentingStateful(DATA), batch_size=2, collate_fn=keep), {"dispatch_batches": True}),
    "dispatched batches": (lambda: DataLoader(Stream([[1, 2], [3], [4, 5, 6]] * 3), batch_size=None), {"dispatch_batches": True}),
}


def resumed_together(kind: str, from_rank_0: bool) -> list[str]:
    """What went wrong on this rank: the loader goes on at every point, from its own state or, as after a save of one, that of rank 0."""
    make, options = TOGETHER[kind]
    wrong = []
    loader = ranked(make(), **options)
    epochs, states = list[Any](), list[Any]()
    for epoch in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append((plain(batch), loader.shares, loader.end_of_dataloader))
            states.append((epoch, len(epochs[-1]), copy.deepcopy(loader.state_dict())))
    told = gather_object([states])
    for epoch, read, state in told[0] if from_rank_0 else states:
        resumed = ranked(make(), **options)
        resumed.load_state_dict(copy.deepcopy(state))
        found = [[(plain(batch), resumed.shares, resumed.end_of_dataloader) for batch in resumed] for _ in range(2 - epoch)]
        if found != [epochs[epoch][read:], *epochs[epoch + 1 :]]:
            wrong.append(f"{kind} after {read} of epoch {epoch}: {found} instead of {[epochs[epoch][read:], *epochs[epoch + 1 :]]}")
    return wrong


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize("world", [2, 3])
def test_processes_go_on_together(ranks: Any, world: int) -> None:
    """Every kind of loader, with real collectives; from states of each rank or (with three) from that of rank 0 alone."""

    def run() -> list[str]:
        return [line for kind in TOGETHER for line in resumed_together(kind, world == 3)]

    assert ranks(world).run(run, timeout=90) == [[]] * world


def test_own_parts_and_changed_world(ranks: Any) -> None:
    """A place in parts of their own is not carried to another number of processes."""

    def begin() -> Any:
        loader = ranked(TOGETHER["parts"][0]())
        return [copy.deepcopy(loader.state_dict()) for _ in loader]

    states = ranks(2).run(begin)[0]

    def go_on() -> Any:
        loader = ranked(TOGETHER["parts"][0]())
        with captured_log() as heard:
            loader.load_state_dict(states[1])
        return "".join(heard), [sample for batch in loader for sample in batch][:4], loader.state_dict()["epoch"]

    found = ranks(3).run(go_on)
    assert "cannot be carried to 3 processes: 2 of them read parts of their own" in found[0][0]
    assert "run 2 processes to go on at the position" in found[0][0]
    assert [(first[0] % 100, epoch) for _, first, epoch in found] == [(0, 1)] * 3, "the epoch begins at its start"


# -- cost ------------------------------------------------------------------------------------------------------------------------


class Counted(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __getitem__(self, position: int) -> int:
        self.read += 1
        return position

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}])
@pytest.mark.parametrize("sampler", [None, KeepsRandomState, DrawsWhileRead, AtItsPlace])
def test_no_data_read_to_seek(options: dict[str, Any], sampler: Any) -> None:
    """No data is read to get to a position."""
    for how in ("auto", "manual"):
        data = Counted(LENGTH)
        make = lambda: DataLoader(data, batch_size=2, sampler=sampler and sampler(), shuffle=None if sampler else True, collate_fn=keep)  # noqa: B023, E731
        loader = prepared(make(), **options)
        for number, _ in enumerate(loader, 1):
            if number == 5:
                state = copy.deepcopy(loader.state_dict())
        data.read = 0
        resumed = prepared(make(), **options, resume=how)
        resumed.load_state_dict(state)
        assert data.read == 0
        assert len(list(resumed if how == "auto" else skip_first_batches(resumed, 5))) == 1
        assert data.read == 1


# -- states that cannot be meant -------------------------------------------------------------------------------------------------

STATE = {"epoch": 1, "batches": 2, "samples": 4, "seed": 7, "left": 0}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "a NoneType is not a state of a prepared loader"),
        ([STATE], "a list is not a state"),
        ({"epoch": 1}, "it has no batches, samples, seed"),
        ({**STATE, "epoch": "1"}, "epoch='1'"),
        ({**STATE, "epoch": -1}, "epoch=-1"),
        ({**STATE, "samples": -4}, "samples=-4"),
        ({**STATE, "samples": 4.0}, "samples=4.0"),
        ({**STATE, "samples": True}, "samples=True"),
        ({**STATE, "batches": 10**30}, "batches=1000"),
        ({**STATE, "seed": 2**64}, "seed=18446744073709551616"),
        ({**STATE, "left": None}, "left=None"),
        ({**STATE, "length": -1}, "length=-1"),
        ({**STATE, "samples": 400}, "400 into a loader of list that has only 11 now"),
        ({**STATE, "samples": 12, "length": 40}, r"12 into a loader of list that has only 11 now \(it had 40\)"),
        ({**STATE, "kind": "stream"}, "a loader of iterable data in batches of a fixed size was given to one of map-style data"),
        ({**STATE, "kind": 3}, "a loader of 3 was given"),
        ({**STATE, "dataset": {}}, "has dataset, which such a loader does not know"),
        ({**STATE, "order": {"now": []}}, "prepare it with the same one"),
        ({**STATE, "nominal": "2"}, "nominal='2'"),
        ({**STATE, "order_version": 3}, "order_version=3, and this version of slipstream knows 1, 2"),
        ({**STATE, "order_version": None}, "order_version=None"),
        ({**STATE, "order_version": 2.0}, "order_version=2.0"),
        ({**STATE, "order_version": True}, "order_version=True"),
    ],
)
def test_invalid_state_refused(state: Any, words: str) -> None:
    """A state that cannot be meant is refused before anything changes."""
    for options in ({}, {"dispatch_batches": True}):
        loader = prepared(MAPPED["shuffle"](), **options)
        before = loader.state_dict()
        for load in (loader.check_state_dict, loader.load_state_dict):
            with pytest.raises(ConfigError, match=words):
                load(state)
        assert loader.state_dict() == before
        assert sorted(sum(loader, [])) == DATA


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": 3}, "cannot be read"),
        ({"order": {}}, "cannot be read"),
        ({"order": {"now": 3}}, "with other samplers"),
        ({"order": {"now": [{"type": "Another"}]}}, r"with other samplers \(Another\) than it has now \(KeepsRandomState\)"),
        ({"order": {"now": [{"type": "KeepsRandomState", "state": {}}]}}, "with other samplers"),
        ({"order": {"now": [{"type": "KeepsRandomState", "attributes": {"rng": 3}}]}}, "KeepsRandomState.rng cannot be read"),
        ({"order": {"now": [{"type": "KeepsRandomState", "attributes": {"rng": {"kind": "int", "value": 3}}}]}}, "another thing now"),
        ({"order": {"now": [{"type": "KeepsRandomState", "attributes": {"rng": {"generator": {"kind": "torch"}}}}]}}, "of kind 'torch'"),
        ({"order": {"now": [{"type": "KeepsRandomState", "attributes": {"rng": {"generator": {"kind": "numpy"}}}}]}}, "cannot be put back"),
        ({"order": {"now": [{"type": "KeepsRandomState", "attributes": {"no": {"generator": {}}}}]}}, "has none of that name now"),
        ({"order": {"now": [{"type": "KeepsRandomState"}], "digest": "xyz"}}, "cannot be read"),
        ({"order": {"now": [{"type": "KeepsRandomState"}], "digest": "0", "next": 3}}, "cannot be read"),
    ],
)
def test_state_of_other_sampler_refused(changes: dict[str, Any], words: str) -> None:
    """A state of another sampler is refused before anything changes."""
    loader = shuffled()
    straight = epochs_of_shuffled(1)
    with pytest.raises(ConfigError, match=words):
        loader.load_state_dict({**STATE, **changes})
    assert list(loader) == straight[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "samples"}, "map-style data in batches of a fixed size was given to one of iterable data"),
        ({"order": {}}, "has order, which such a loader does not know"),
        ({"random": 3}, "cannot be read"),
        ({"random": {"after": 3}}, "cannot be read"),
        ({"random": {"after": None, "block": 2, "python": {}}}, "cannot be read"),
        ({"workers": 3}, "in a way that cannot be read"),
        ({"workers": [{"role": 0}]}, "in a way that cannot be read"),
        ({"workers": [{"role": 1, "items": 0, "over": False}]}, r"workers \[1\]: each is there once, from 0"),
        ({"parts": 0}, "part 0 of 0"),
        ({"parts": 2, "part": 2}, "part 2 of 2"),
        ({"dataset": {"at": 3}}, "Stream has no load_state_dict"),
    ],
)
def test_invalid_stream_position_refused(changes: dict[str, Any], words: str) -> None:
    """A place in a stream that cannot be is refused before anything changes."""
    loader = prepared(DataLoader(Stream(DATA), batch_size=2, collate_fn=keep))
    with pytest.raises(ConfigError, match=words):
        loader.load_state_dict({**STATE, **changes})
    assert sum(loader, []) == DATA


def test_changed_length_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Data of another length is reported."""
    loader = prepared(DataLoader(range(20), batch_size=2, shuffle=True))
    loader.load_state_dict({**STATE, "length": 11})
    assert "had 11 samples (or batches) when its position was saved, and has 20 now" in caplog.text


@pytest.mark.parametrize("value", ["always", True, 1, "", None, ["auto"]])
def test_unknown_resume_refused(value: Any) -> None:
    """Other ways to resume are refused."""
    with pytest.raises(ConfigError, match=r"write resume='auto' \(the default\) .* or resume='manual'"):
        DataLoaderConfiguration(resume=value)
    with pytest.raises(ConfigError, match="Leave out one of them"):
        DataLoaderConfiguration(resume="manual", use_stateful_dataloader=True)


# -- the receipt -----------------------------------------------------------------------------------------------------------------


def test_describe_loader_reads_nothing() -> None:
    """A loader describes what it reads without reading."""
    data = Counted(20)
    told = describe_loader(prepared(DataLoader(data, batch_size=3, shuffle=True, drop_last=True), 1, 2, even_batches=False))
    order = told.pop("order")
    assert told == {
        "dataset": "Counted", "length": 20, "sampler": "RandomSampler", "batch": 6, "drop_last": True, "even": False, "seed": 7
    }  # fmt: skip
    assert len(order) == 16
    assert data.read == 0
    stream = describe_loader(prepared(DataLoader(Stream(DATA), batch_size=2)))
    assert (stream["length"], stream["sampler"]) == (None, None)


def test_order_digest() -> None:
    """The digest of an order is equal exactly if the order is."""

    def digest(loader: DataLoader[Any], world: int = 1, **options: Any) -> str:
        return str(describe_loader(prepared(loader, 0, world, **options))["order"])

    def make(length: int = 12, size: int = 4, **options: Any) -> DataLoader[Any]:
        return DataLoader(range(length), batch_size=size, **options)

    mapped = make(shuffle=True)
    split = {"split_batches": True}
    same = [(mapped, 1, {}), (make(size=2, shuffle=True), 2, {}), (make(shuffle=True), 2, split), (make(shuffle=True), 1, {"seed": 7})]
    assert len({digest(loader, world, **options) for loader, world, options in same}) == 1
    other = [
        mapped,
        make(),
        make(13, shuffle=True),
        make(shuffle=True, drop_last=True),
        make(size=2, shuffle=True, drop_last=True),
        make(sampler=RandomSampler(range(12), replacement=True)),
        make(sampler=RandomSampler(range(12), num_samples=7)),
        make(sampler=WeightedRandomSampler([1.0] * 12, 12)),
        make(sampler=WeightedRandomSampler([1.0, 2.0] * 6, 12)),
        make(sampler=SubsetRandomSampler(range(12))),
        make(sampler=SubsetRandomSampler(range(1, 12))),
        make(sampler=list(range(11, -1, -1))),
        make(sampler=KeepsRandomState()),
        make(sampler=Rotates()),
        DataLoader(range(12), batch_sampler=Budget(RandomSampler(range(12)))),
        DataLoader(Subset(range(24), range(12)), batch_size=4, shuffle=True),
        DataLoader(Subset(range(24), range(12, 24)), batch_size=4, shuffle=True),
        DataLoader(Stream(DATA), batch_size=2),
        DataLoader(Stream(DATA), batch_size=2, num_workers=2),
    ]
    digests = [digest(entry) for entry in other] + [digest(mapped, seed=8), digest(mapped, even_batches=True)]
    assert len(set(digests)) == len(digests)
    assert digest(make()) == digest(make(), seed=8), "a seed means nothing where nothing is drawn"
