"""A position that was loaded: which batches come next, whatever a script does with the loader before it reads on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from slipstream import Accelerator
from slipstream.data.prepare import skip_first_batches
from slipstream.distributed.gradient_state import GradientState

LENGTH, COUNT = 11, 6
"""Samples, and batches of two."""


class Drawn(Sampler[int]):
    """A sampler with a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        return iter(torch.randperm(LENGTH, generator=self.generator).tolist())

    def __len__(self) -> int:
        return LENGTH


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(LENGTH))


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(range(LENGTH), batch_size=2, shuffle=True, collate_fn=keep),
    "sampler": lambda: DataLoader(range(LENGTH), batch_size=2, sampler=Drawn(), collate_fn=keep),
    "batches": lambda: DataLoader(range(LENGTH), batch_sampler=[[1, 2], [3], [4, 5], [6], [7], [8, 9, 10]], collate_fn=keep),
    "stream": lambda: DataLoader(Stream(), batch_size=2, collate_fn=keep),
}


def epochs_of(kind: str = "shuffle", count: int = 5) -> list[list[Any]]:
    loader = prepared(KINDS[kind]())
    return [list(loader) for _ in range(count)]


def saved_at(epoch: int, batches: int, kind: str = "shuffle") -> dict[str, Any]:
    """The state inside of the loop, after so many batches."""
    loader = prepared(KINDS[kind]())
    for _ in range(epoch):
        list(loader)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return copy.deepcopy(loader.state_dict())


def loaded_at(epoch: int, batches: int, kind: str = "shuffle", **options: Any) -> Any:
    loader = prepared(KINDS[kind](), seed=99, **options)
    loader.load_state_dict(saved_at(epoch, batches, kind))
    return loader


# -- skip_first_batches on top of a loaded position ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", range(1, COUNT + 1))
@pytest.mark.parametrize("skipped", range(COUNT + 2))
def test_skip_is_absolute(kind: str, batches: int, skipped: int) -> None:
    """The number counts from the start of the epoch, not from the position; at the end of an epoch another number means the next."""
    epochs = epochs_of(kind)
    loader = loaded_at(1, batches, kind)
    epoch = 2 if batches == COUNT != skipped else 1
    later = skip_first_batches(loader, skipped)
    assert list(later) == epochs[epoch][skipped:]
    assert [list(loader), list(later)] == epochs[epoch + 1 : epoch + 3], "both count on"


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.integers(0, 8), st.integers(0, 8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_skip_is_absolute_on_ranks(length: int, size: int, world: int, batches: int, skipped: int, even: bool) -> None:
    """So it is on any number of ranks, for any data."""

    def make() -> DataLoader[Any]:
        return DataLoader(range(length), batch_size=size, shuffle=True, collate_fn=keep)

    def passed(loaders: list[Any]) -> list[Any]:
        return [real_samples(*batch) for batch in rounds(loaders)]

    twins = ranks_of(make, world, even_batches=even)
    epochs = [passed(twins) for _ in range(4)]
    count = len(epochs[0])
    batches = min(batches, count)
    saved = ranks_of(make, world, even_batches=even)
    iterators = [iter(loader) for loader in saved if batches]
    for _ in range(batches):
        for iterator in iterators:
            next(iterator)
    loaders = ranks_of(make, world, even_batches=even, seed=99)
    for loader in loaders:
        loader.load_state_dict(saved[0].state_dict())
    assert len(loaders[0]) == count
    epoch = int(batches == count != skipped)
    later = [skip_first_batches(loader, skipped) for loader in loaders]
    assert len(later[0]) == max(0, count - skipped)
    assert passed(later) == epochs[epoch][skipped:]
    assert passed(loaders) == epochs[epoch + 1]


@pytest.mark.parametrize(
    ("batches", "skipped", "level", "words"),
    [
        (3, 3, "INFO", ["skip_first_batches(loader, 3) is not needed", "3 batches into epoch 1 already", "Nothing is skipped twice"]),
        (3, 4, "WARNING", ["begins 4 batches into epoch 1", "which is 3 batches into epoch 1", "Iterate over the loader itself"]),
        (3, 1, "WARNING", ["begins 1 batch into epoch 1", "which is 3 batches into epoch 1"]),
        (3, 0, "WARNING", ["gives up the loaded position", "(3 batches into epoch 1): epoch 1 begins anew"]),
        (COUNT, COUNT, "WARNING", ["is empty: its position was saved after the last batch of epoch 1"]),
        (COUNT, 2, "WARNING", ["begins 2 batches into epoch 2", "which is 6 batches into epoch 1"]),
        (COUNT, 0, None, []),
        (0, 0, None, []),
    ],
)
def test_skip_tells(batches: int, skipped: int, level: str | None, words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """What `skip_first_batches` means on a loaded position is said once."""
    loader = loaded_at(1, batches)
    with caplog.at_level(logging.INFO, "slipstream"):
        later = skip_first_batches(loader, skipped)
        len(later), list(later), list(later), list(loader)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert all(word in caplog.text for word in words), caplog.text


def test_manual(caplog: pytest.LogCaptureFixture) -> None:
    """With `resume="manual"` the epoch begins anew, and `skip_first_batches` continues it, without a word."""
    epochs = epochs_of()
    with caplog.at_level(logging.INFO, "slipstream"):
        assert list(loaded_at(1, 3, resume="manual")) == epochs[1]
        for skipped in (1, 3, 4):
            assert list(skip_first_batches(loaded_at(1, 3, resume="manual"), skipped)) == epochs[1][skipped:]
        assert list(loaded_at(1, COUNT, resume="manual")) == epochs[2], "nothing of that epoch was left"
    assert not caplog.text


def test_skip_before_the_load() -> None:
    """A loader that `skip_first_batches` gave back before the position was loaded skips nothing twice either."""
    loader = prepared(KINDS["shuffle"](), seed=99)
    later = skip_first_batches(loader, 3)
    loader.load_state_dict(saved_at(1, 3))
    assert list(later) == epochs_of()[1][3:]


def test_count_of_batches() -> None:
    """`batches` is what a script counts, also where batches were of another size before: so the number leads to the position again."""
    order = sum(epochs_of()[0], [])
    first = ranks_of(KINDS["shuffle"], 2)
    iterators = [iter(loader) for loader in first]
    for iterator in iterators:
        next(iterator)
    alone = prepared(KINDS["shuffle"](), seed=99)
    alone.load_state_dict(first[0].state_dict())
    for number, batch in enumerate(alone, 2):
        assert batch == order[4 + 2 * (number - 2) :][:2]
        state = copy.deepcopy(alone.state_dict())
        assert (state["batches"], state["samples"]) == (number, 4 + 2 * (number - 1))
        if number == 3:
            break
    assert sum(skip_first_batches(alone, 3), []) == order[8:], "in this process"
    again = prepared(KINDS["shuffle"](), seed=99)
    again.load_state_dict({**state, "left": 0})
    assert sum(skip_first_batches(again, 3), []) == order[8:], "and in another"


# -- set_epoch -------------------------------------------------------------------------------------------------------------------


def test_set_epoch_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """A position at the end of an epoch: `set_epoch` of that epoch completes it by an empty pass, of the next one begins it whole."""
    epochs = epochs_of()
    for skips in (False, True):
        loader = loaded_at(1, COUNT)
        loader.set_epoch(2)
        assert list(skip_first_batches(loader, 0) if skips else loader) == epochs[2]
    assert not caplog.text
    loader = loaded_at(1, COUNT)
    loader.set_epoch(1)
    assert [list(loader), list(loader)] == [[], epochs[2]]
    assert caplog.text.count("is empty") == 1


def test_script_that_sets_every_epoch() -> None:
    """`set_epoch` before every pass, with the epoch of the checkpoint first: exact, also with a skip on top."""
    epochs = epochs_of()
    for batches in range(COUNT + 1):
        for skips in (False, True):
            loader, read = loaded_at(1, batches), []
            for epoch in range(1, 4):
                loader.set_epoch(epoch)
                read.append(list(skip_first_batches(loader, batches) if skips and epoch == 1 else loader))
            assert read == [epochs[1][batches:], *epochs[2:4]]


# -- a look at the data ----------------------------------------------------------------------------------------------------------


def test_look_then_skip() -> None:
    """`next(iter(loader))` is a look: `skip_first_batches` means the next epoch after it, as a plain loop would."""
    for kind in KINDS:
        epochs = epochs_of(kind)
        loader = prepared(KINDS[kind]())
        assert next(iter(loader)) == epochs[0][0]
        assert list(skip_first_batches(loader, 1)) == epochs[1][1:], kind
        assert list(loader) == epochs[2], kind


@pytest.mark.parametrize("how", ["backward", "accumulate", "backward of a stranger"])
def test_one_trained_batch_is_no_look(how: str) -> None:
    """A pass that was left after one batch which was trained on is continued by `skip_first_batches`."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1), KINDS["shuffle"]()
    )
    epochs = [list(loader) for _ in range(2)]
    loader.set_epoch(0)
    for _ in loader:
        if how == "accumulate":
            with accelerator.accumulate(model):
                pass
        elif how == "backward":
            accelerator.backward(model(torch.ones(1, 1)).sum())
        else:
            accelerator.backward(torch.ones(1, requires_grad=True).sum())
        break
    assert list(skip_first_batches(loader, 1)) == epochs[0][1:]
    assert list(loader) == epochs[1]


def test_two_batches_are_no_look() -> None:
    """A pass that was left after two batches is continued, whatever was done with them."""
    epochs = epochs_of()
    loader = prepared(KINDS["shuffle"]())
    for number, _ in enumerate(loader, 1):
        if number == 2:
            break
    assert list(skip_first_batches(loader, 2)) == epochs[0][2:]


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_look_at_a_loaded_position(kind: str, options: dict[str, Any]) -> None:
    """A look at a loaded position does not use it up; nor does a first batch that failed."""
    epochs = epochs_of(kind)
    loader = loaded_at(1, 3, kind, **options)
    assert next(iter(loader)) == epochs[1][3]
    assert loader.epoch == 1
    with pytest.raises(ZeroDivisionError):
        [1 // 0 for _ in loader]
    later = skip_first_batches(loader, 3)
    assert next(iter(later)) == epochs[1][3]
    again = prepared(KINDS[kind](), seed=99, **options)
    again.load_state_dict(copy.deepcopy(loader.state_dict()))
    for entry in (later, again):
        assert list(entry) == epochs[1][3:]
        assert list(entry) == epochs[2]


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_unread_iterator(kind: str, options: dict[str, Any]) -> None:
    """An iterator of which nothing was asked takes no epoch and no loaded position: it begins where the loader stands when it is read."""
    epochs = epochs_of(kind)
    loader = prepared(KINDS[kind](), **options)
    early = iter(loader)
    assert (loader.epoch, loader.state_dict()["epoch"]) == (0, 0)
    loader.load_state_dict(saved_at(1, 3, kind))
    for unread in (loader, skip_first_batches(loader, 3)):
        assert list(zip([], unread, strict=False)) == []
        assert (loader.epoch, loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 1, 3)
    assert list(early) == epochs[1][3:]
    assert list(loader) == epochs[2]


def test_reading_on_from_a_loaded_position() -> None:
    """Two batches of it read, or one trained on: it is used up, and the next pass is the next epoch."""
    epochs = epochs_of()
    for read in (1, 2):
        state = GradientState()
        loader = loaded_at(1, 2, gradient_state=state)
        for number, _ in enumerate(loader, 1):
            state.trained += 1
            if number == read:
                break
        assert list(loader) == epochs[2]


# -- evaluations, copies, loads inside of a loop ---------------------------------------------------------------------------------


def test_evaluation_begins_anew() -> None:
    """A pass that nothing was trained in is resumed by a script that reads on; after training on another loader it begins anew."""
    epochs = epochs_of()
    for trains in (False, True):
        state = GradientState()
        loader = loaded_at(1, 3, gradient_state=state)
        assert loader.state_dict()["untrained"] == 1
        state.trained += trains
        assert loader.state_dict()["samples"] == 6, "as long as it was not read, it can be saved again"
        assert list(loader) == (epochs[2] if trains else epochs[1][3:])


def test_late_second_source() -> None:
    """A second loader that was trained on is resumed even if it begins after training on another one."""
    state = GradientState()
    loader = prepared(KINDS["shuffle"](), gradient_state=state)
    for number, _ in enumerate(loader, 1):
        state.trained += 1
        if number == 3:
            saved = copy.deepcopy(loader.state_dict())
    state = GradientState()
    again = prepared(KINDS["shuffle"](), gradient_state=state)
    again.load_state_dict(saved)
    state.trained += 5
    assert list(again) == epochs_of()[0][3:]


def test_copies_wait_too() -> None:
    """A copy of a loader continues at the position that was loaded."""
    loader = loaded_at(1, 3)
    loader.gradient_state.trained += 7
    assert list(copy.deepcopy(loader)) == epochs_of()[1][3:]


def test_load_inside_of_a_loop() -> None:
    """A position that is loaded while the loader is being read counts for the next pass, however the present one ends."""
    epochs = epochs_of()
    for number_of_batches in (1, 4):
        loader = prepared(KINDS["shuffle"]())
        for number, _ in enumerate(loader, 1):
            if number == number_of_batches:
                loader.load_state_dict(saved_at(1, 2))
                break
        assert list(skip_first_batches(loader, 2)) == epochs[1][2:]
        loader.load_state_dict(saved_at(1, 2))
        assert list(loader) == epochs[1][2:]


def test_loop_read_on_after_a_load(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that goes on after a load inside of it says where the loader stands; the next one begins at the loaded position."""
    epochs = epochs_of()
    loader, position = prepared(KINDS["shuffle"]()), saved_at(1, 2)
    for number, batch in enumerate(loader):
        assert batch == epochs[0][number]
        if number == 2:
            loader.load_state_dict(position)
            assert (loader.epoch, loader.state_dict()["samples"]) == (1, 4)
        elif number == 3:
            assert (loader.epoch, loader.state_dict()["samples"]) == (0, 8)
    assert "loaded inside of a loop over range (epoch 0), and the loop went on" in caplog.text
    assert list(loader) == epochs[1][2:]


def test_kept_iterator() -> None:
    """An iterator that was kept after a look does not stand for the loader, once a later pass was trained on."""
    state = GradientState()
    loader = prepared(KINDS["shuffle"](), gradient_state=state)
    kept = iter(loader)
    next(kept)
    for number, _ in enumerate(loader, 1):
        state.trained += 1
        assert (loader.epoch, loader.state_dict()["batches"]) == (1, number)
    assert (loader.epoch, loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (2, 2, 0)
    next(kept)
    assert (loader.epoch, loader.state_dict()["batches"]) == (0, 2), "unless it is read on"


def test_weighted_kind_is_resumed() -> None:
    """Sampling with replacement resumes by default as well."""
    make = lambda: DataLoader(range(LENGTH), batch_size=2, sampler=RandomSampler(range(LENGTH), replacement=True), collate_fn=keep)  # noqa: E731
    loader, read = prepared(make()), []
    for batch in loader:
        read.append(batch)
        if len(read) == 2:
            state = copy.deepcopy(loader.state_dict())
    again = prepared(make(), seed=99)
    again.load_state_dict(state)
    assert list(again) == read[2:]
