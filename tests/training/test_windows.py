"""Which batch an update ends with, and how batches are weighed: loaders read in every way that people read them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Batches
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration

WORLDS = (1, 2, 3)


def rows(*values: float) -> TensorDataset:
    return TensorDataset(torch.tensor(values, dtype=torch.float64)[:, None])


def prepared(data: Any, steps: int, batch_size: int = 1, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    net = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    loader = DataLoader(data, batch_size=batch_size) if not isinstance(data, DataLoader) else data
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), loader)


def train(accelerator: Accelerator, net: Any, optimizer: Any, x: torch.Tensor) -> float | None:
    """One batch; the size of its update, if it ended one."""
    with accelerator.accumulate(net):
        accelerator.backward(net(x).mean())
        before = accelerator.unwrap_model(net).weight.item()
        optimizer.step()
        optimizer.zero_grad()
        after = accelerator.unwrap_model(net).weight.item()
    return round(before - after, 6) if accelerator.sync_gradients else None


# -- the end of a pass ------------------------------------------------------------------------------------------------


def test_a_pass_of_one_batch() -> None:
    """Its end, and that of every later pass, ends a window."""
    accelerator, net, optimizer, loader = prepared(rows(1, 2), steps=4)
    found = [train(accelerator, net, optimizer, x) for (x,) in accelerator.skip_first_batches(loader, 1)]
    for _ in range(2):
        found += [train(accelerator, net, optimizer, x) for (x,) in loader]
    assert found == [2.0, None, 1.5, None, 1.5]


def test_one_batch_epochs_after_loading(tmp_path: Path) -> None:
    accelerator, net, optimizer, loader = prepared(rows(3), steps=4)
    for (x,) in loader:
        train(accelerator, net, optimizer, x)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert [train(accelerator, net, optimizer, x) for _ in range(2) for (x,) in loader] == [3.0, 3.0]


def test_resuming_with_one_batch_left(tmp_path: Path) -> None:
    accelerator, net, optimizer, loader = prepared(rows(1, 2, 3), steps=2)
    for number, (x,) in enumerate(loader):
        train(accelerator, net, optimizer, x)
        if number == 1:
            accelerator.save_state(tmp_path / "state")
    accelerator, net, optimizer, loader = prepared(rows(1, 2, 3), steps=2)
    accelerator.load_state(tmp_path / "state")
    found = [train(accelerator, net, optimizer, x) for (x,) in loader]
    found += [train(accelerator, net, optimizer, x) for (x,) in loader]
    assert found == [3.0, None, 1.5, 3.0]


def test_pieces_of_a_single_batch() -> None:
    """A pass of one batch cut into pieces: the first pass tells, and later ones end with the last piece."""
    accelerator, net, optimizer, loader = prepared(rows(1, 3), steps=4, batch_size=2)
    found = []
    for epoch in range(3):
        for (x,) in loader:
            for number, piece in enumerate(x.chunk(2)):
                is_told = (epoch, number) == (0, 1)
                with pytest.warns(UserWarning, match="another micro-batch of the last batch") if is_told else nullcontext():
                    found.append(train(accelerator, net, optimizer, piece))
    assert found == [1.0, 3.0, None, 2.0, None, 2.0]


# -- batches of different sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False])
def test_short_batch_counts_samples(even: bool) -> None:
    """A short batch counts by its samples."""
    accelerator, net, optimizer, loader = prepared(
        rows(1, 1, 10), steps=2, batch_size=2, dataloader_config=DataLoaderConfiguration(even_batches=even)
    )
    assert [train(accelerator, net, optimizer, x) for (x,) in loader] == [None, 4.0]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("even", [True, False])
def test_batches_of_all_sizes(ranks: Any, world: int, even: bool) -> None:
    """The gradient is the mean over all samples of the update, on any number of processes."""
    values = [float(value) for value in range(1, 19)]

    def run() -> list[Any]:
        data = DataLoader(rows(*values), batch_sampler=Batches((1, 4, 2, 3, 5, 3)))
        accelerator, net, optimizer, loader = prepared(
            data, steps=6 // Accelerator().num_processes, dataloader_config=DataLoaderConfiguration(even_batches=even)
        )
        return [train(accelerator, net, optimizer, x) for (x,) in loader][-1:]

    assert ranks(world).run(run) == [[sum(values) / len(values)]] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("samples", [1, 5, 7, 8, 13])
def test_the_default_is_exact(ranks: Any, world: int, samples: int) -> None:
    """Four batches per process and update, sizes that divide nothing: the updates of one process with the same global batch."""
    values = [float(value * value) for value in range(samples)]
    each = 6 // world

    def run() -> list[Any]:
        accelerator, net, optimizer, loader = prepared(rows(*values), steps=2, batch_size=each)
        return [train(accelerator, net, optimizer, x) for (x,) in loader]

    updates = [values[start : start + 12] for start in range(0, samples, 12)]
    expected = [round(sum(update) / len(update), 6) for update in updates]
    for found in ranks(world).run(run):
        assert [update for update in found if update is not None] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_outside_of_accumulate(ranks: Any, world: int) -> None:
    def run() -> float:
        accelerator, net, optimizer, loader = prepared(rows(1, 2, 3, 4, 10), steps=1, batch_size=4)
        for (x,) in loader:
            accelerator.backward(net(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        return round(-accelerator.unwrap_model(net).weight.item(), 6)

    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    expected = sum(sum(part) / len(part) for part in (values[start : start + 4 * world] for start in range(0, 5, 4 * world)))
    assert ranks(world).run(run) == pytest.approx([expected] * world)


# -- two loaders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_two_loaders_side_by_side(ranks: Any, world: int) -> None:
    """`zip(loader, second)`: the first one sets the pace, and its shares weigh the loss, also in passes of one batch."""

    def run() -> list[Any]:
        accelerator, net, optimizer, short = prepared(rows(30), steps=2)
        long = accelerator.prepare(DataLoader(rows(*(1,) * 8)))
        return [train(accelerator, net, optimizer, x) for _ in range(2) for (x,), _ in zip(short, long, strict=False)]

    assert ranks(world).run(run) == [[30.0, 30.0]] * world


@pytest.mark.parametrize("samples", [1, 3, 7])
def test_second_source_restarts(samples: int) -> None:
    """A second source that begins anew.

    It does not set the pace, however often it ends: from the second batch on, that is known.
    """
    accelerator, net, optimizer, loader = prepared(rows(1, 2, 3, 4, 5, 6), steps=2)
    again = _cycle(accelerator.prepare(DataLoader(rows(*(1,) * samples))))
    found = []
    for _ in range(3):
        for (x,) in loader:
            next(again)
            found.append(train(accelerator, net, optimizer, x))
    assert found[6:] == [None, 1.5, None, 3.5, None, 5.5] * 2


def _cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def test_loader_inside_batch() -> None:
    """A loader inside of a batch.

    A loop inside of a batch of another loader ends its windows with its own end.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = torch.nn.Linear(1, 1, bias=False).double()
    net, optimizer, outer, inner = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=1.0), DataLoader(rows(1, 2)), DataLoader(rows(1, 2, 3))
    )
    found = [train(accelerator, net, optimizer, x) for _ in outer for (x,) in inner]
    assert found == [None, None, 2.0] * 2


# -- batches that were read ahead -------------------------------------------------------------------------------------


def listed(loader: Any) -> Iterator[torch.Tensor]:
    for (x,) in list(loader):
        yield x


def windows(loader: Any) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    while window := list(islice(batches, 4)):
        for (x,) in window:
            yield x


def one_ahead(loader: Any) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        yield batch[0]
        batch = following


def prefetched(loader: Any) -> Iterator[torch.Tensor]:
    waiting: deque[Any] = deque()
    for batch in loader:
        waiting.append(batch)
        if len(waiting) == 3:
            yield waiting.popleft()[0]
    while waiting:
        yield waiting.popleft()[0]


AHEAD = (listed, windows, one_ahead, prefetched)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("read", AHEAD)
def test_read_ahead(ranks: Any, world: int, read: Callable[[Any], Iterator[torch.Tensor]]) -> None:
    """Batches that were fetched first and run later: the same updates as in a plain loop, in every epoch."""

    def run(read: Callable[[Any], Iterator[torch.Tensor]]) -> list[Any]:
        size = 2 if Accelerator().num_processes == 1 else 1
        accelerator, net, optimizer, loader = prepared(rows(*range(1, 12)), steps=4, batch_size=size)
        found = []
        for _ in range(3):
            for x in read(loader):
                found.append(train(accelerator, net, optimizer, x))
        return found

    def plain(loader: Any) -> Iterator[torch.Tensor]:
        for (x,) in loader:
            yield x

    expected = ranks(world).run(lambda: run(plain))
    assert sum(update is not None for update in expected[0]) >= 3
    assert ranks(world).run(lambda: run(read)) == expected


def test_list_read_again() -> None:
    """A list that is read again.

    Batches that are kept in a list for several epochs: each round over it ends a window.
    """
    accelerator, net, optimizer, loader = prepared(rows(*range(1, 7)), steps=4)
    batches = list(loader)
    found = [train(accelerator, net, optimizer, x) for _ in range(3) for (x,) in batches]
    assert found == [None, None, None, 2.5, None, 5.5] * 3


def test_read_ahead_outside_of_accumulate(ranks: Any) -> None:
    """The share of a short last batch belongs to its own loss."""

    def run() -> float:
        accelerator, net, optimizer, loader = prepared(rows(1, 2, 3, 4, 10), steps=1, batch_size=2)
        for (x,) in list(loader):
            accelerator.backward(net(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        return round(-accelerator.unwrap_model(net).weight.item(), 6)

    assert ranks(2).run(run) == [12.5, 12.5]


def test_batches_that_are_left_out() -> None:
    """A batch that is skipped before its block is not taken for one that was read ahead."""
    for kept in (False, True):
        accelerator, net, optimizer, loader = prepared(rows(*range(1, 8)), steps=4)
        found = []
        for _ in range(2):
            for (x,) in loader:
                loss = net(x).mean() if kept else None  # whose graph keeps the batch alive
                if x.item() in (2.0, 4.0):
                    continue
                found.append(train(accelerator, net, optimizer, x))
                del loss
        assert found == [None, None, None, 3.75, 7.0] * 2


@pytest.mark.parametrize("ahead", [0, 2])
def test_converted_batches_cannot_be_tied(ahead: int) -> None:
    """Batches that are read ahead and replaced by others: said, with the remedy."""
    accelerator, net, optimizer, loader = prepared(rows(*range(1, 7)), steps=4)

    def converted() -> Iterator[torch.Tensor]:
        waiting: deque[torch.Tensor] = deque()
        for (x,) in loader:
            waiting.append(x * 1.0)
            if ahead and len(waiting) == ahead + 1:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()

    with pytest.warns(UserWarning, match="cannot be tied to a batch.*Keep the batches that the loader gives") as caught:
        _ = [train(accelerator, net, optimizer, x) for _ in range(2) for x in converted()]
    assert all(warning.filename == __file__ for warning in caught), "the line of the block"


def test_text_that_is_read_ahead() -> None:
    """Batches without tensors cannot be recognised: said."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, loader = accelerator.prepare(torch.nn.Linear(1, 1, bias=False), DataLoader(["a", "b", "c"], batch_size=2))

    def work(texts: list[str]) -> None:
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(len(texts), 1)).mean())

    with pytest.warns(UserWarning, match="hold no tensors by which they could be recognised"):
        _ = [work(texts) for _ in range(2) for texts in list(loader)]


@pytest.mark.parametrize("ahead", [None, 1])
def test_converted_batches_without_accumulation(ranks: Any, ahead: int | None) -> None:
    """On several processes, the short last batch of data that was replaced cannot be weighed: said."""

    def run() -> int:
        accelerator, net, optimizer, loader = prepared(rows(1, 2, 3, 4, 10), steps=1, batch_size=2)
        waiting: deque[torch.Tensor] = deque()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for (x,) in loader:
                waiting.append(x * 1.0)
                if ahead is not None and len(waiting) > ahead:
                    accelerator.backward(net(waiting.popleft()).mean())
                    optimizer.step()
            while waiting:
                accelerator.backward(net(waiting.popleft()).mean())
                optimizer.step()
        assert all(warning.filename == run.__code__.co_filename for warning in caught), "the line of the backward pass"
        return sum("cannot be tied" in str(warning.message) for warning in caught)

    assert ranks(2).run(run) == [1, 1]


def test_one_batch_many_times(ranks: Any) -> None:
    """`batch = next(iter(loader))`, trained on again and again: its share stays its own."""

    def run() -> list[float]:
        accelerator, net, optimizer, loader = prepared(rows(1, 0.5, 1.5), steps=1, batch_size=2)
        (x,) = next(iter(loader))
        return [train(accelerator, net, optimizer, x) for _ in range(3)]

    assert ranks(2).run(run) == [[1.0, 1.0, 1.0]] * 2


def test_loaders_in_turns(ranks: Any) -> None:
    """Two tasks that alternate: each loss is weighed by the samples of its own loader."""

    def run() -> list[Any]:
        accelerator, net, optimizer, first = prepared(rows(1, 2, 3), steps=1)
        second = accelerator.prepare(DataLoader(rows(101, 102, 103, 104)))
        entry, two = iter(first), iter(second)
        found = []
        for _ in range(2):
            for batches in (entry, two):
                (x,) = next(batches)
                found.append(train(accelerator, net, optimizer, x))
        return found

    assert ranks(2).run(run) == [[1.5, 101.5, 3.0, 103.5]] * 2


def test_an_iterator_kept_over_epochs(ranks: Any) -> None:
    """A second source of data that goes on from epoch to epoch never sets the pace."""

    def run() -> list[Any]:
        accelerator, net, optimizer, loader = prepared(rows(1, 2, 4), steps=1)
        second = iter(accelerator.prepare(DataLoader(rows(*range(11)))))
        found = []
        for _ in range(2):
            for (x,) in loader:
                next(second)
                found.append(train(accelerator, net, optimizer, x))
        return found

    assert ranks(2).run(run) == [[1.5, 4.0] * 2] * 2


def test_batches_that_are_merged() -> None:
    """Several batches in one block: the end of the loader still ends the window."""
    accelerator, net, optimizer, loader = prepared(rows(*range(1, 13)), steps=2)
    found, waiting = [], []
    for _ in range(2):
        for (x,) in loader:
            waiting.append(x)
            if len(waiting) == 4:
                found.append(train(accelerator, net, optimizer, torch.cat(waiting)))
                waiting.clear()
    assert found == [None, 4.5, 10.5] * 2


@pytest.mark.parametrize("read", AHEAD)
@pytest.mark.parametrize("shuffle", [True, False])
def test_saved_while_reading_ahead(tmp_path: Path, read: Callable[[Any], Iterator[torch.Tensor]], shuffle: bool) -> None:
    """What was handed out and not worked on yet comes again after resuming, in any way of reading."""

    def start() -> tuple[Any, ...]:
        loader = DataLoader(rows(*range(11)), shuffle=shuffle, generator=torch.Generator().manual_seed(1))
        return prepared(loader, steps=2)

    accelerator, net, optimizer, loader = start()
    whole = [x.item() for x in read(loader)]
    for cut in range(1, 10):
        accelerator, net, optimizer, loader = start()
        for number, x in enumerate(read(loader), 1):
            train(accelerator, net, optimizer, x)
            if number == cut:
                accelerator.save_state(tmp_path / f"{cut}")
                break
        accelerator, net, optimizer, loader = start()
        accelerator.load_state(tmp_path / f"{cut}")
        assert [x.item() for x in read(loader)] == whole[cut:], cut


def test_a_batch_that_is_kept() -> None:
    """One batch that a script keeps does not make it remember all that follow."""
    accelerator, net, optimizer, loader = prepared(rows(*range(60)), steps=4)
    kept, found = None, []
    for (x,) in loader:
        kept = x if kept is None else kept
        found.append(train(accelerator, net, optimizer, x))
        assert len(accelerator.gradient_state.only_pass.unread) < 15
    assert sum(update is not None for update in found) == 15
