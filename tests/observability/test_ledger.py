"""Where the time of a step goes: exactly, in whatever way the loop is written. One process, and a clock that only naps move."""

from __future__ import annotations

import copy
import gc
import pickle  # noqa: TID251  # what users do with their models
import time
import weakref
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from fake_clock import Clock, Loop, Net, Sgd, ledger_of, loader, milliseconds
from hypothesis import given, settings, strategies as st

from slipstream import Accelerator
from slipstream.data.loader import time_batches
from slipstream.errors import ConfigError
from slipstream.observability.options import LedgerKwargs
from slipstream.observability.timing.ledger import Ledger
from slipstream.observability.timing.meter import (
    BACKWARD,
    COLUMNS,
    DATA,
    EVALUATION,
    EXPOSED,
    FORWARD,
    LOG_LIMIT,
    OPTIMIZER,
    OTHER,
    PHASES,
    SAMPLES,
    Meter,
    mark_phase,
)
from slipstream.observability.timing.step_times import MeterReader
from slipstream.utils import is_compiled_module

# -- every moment belongs to one phase --------------------------------------------------------------------------------


class Walk:
    """Takes steps that nest: phases, waits, and passes over loaders that end, are left, or fail; and knows what belongs where.

    The sums are kept in the plainest way: whoever moves the clock says in which phase that was.
    """

    shares = None

    def __init__(self, moves: list[tuple[int, int, bool, str]]) -> None:
        self.moves, self.clock, self.meter = moves, Clock(), Meter()
        self.meter.clock = self.clock
        self.stack: list[int] = []
        self.rows = [[0] * COLUMNS]
        self.setup = 0
        self.trained = 0

    def nap(self, nap: int) -> None:
        self.clock.now += nap
        if self.stack or self.meter.has_begun:
            self.rows[-1][self.stack[-1] if self.stack else OTHER] += nap
        else:
            self.setup += nap

    def go(self, place: int) -> None:
        if place >= len(self.moves):
            return
        phase, nap, fails, kind = self.moves[place]
        self.nap(nap)
        try:
            getattr(self, kind)(place, phase)
            if fails:
                raise KeyError(place)
        except KeyError:
            self.update()
        self.nap(nap)

    def update(self) -> None:
        with mark_phase(self.meter, OPTIMIZER):
            self.meter.updated = True
            self.trained += 1

    def phase(self, place: int, phase: int) -> None:
        self.trained += phase in (BACKWARD, OPTIMIZER)
        with mark_phase(self.meter, phase):
            self.stack.append(phase)
            try:
                self.go(place + 1)
            finally:
                self.stack.pop()

    def wait(self, place: int, phase: int) -> None:
        begun = self.meter.wait()
        self.stack += [EXPOSED] if begun else []
        try:
            self.go(place + 1)
        finally:
            self.stack = self.stack[:-1] if begun else self.stack
            self.meter.end_wait(begun)

    def read(self, place: int, phase: int, leave: bool = False) -> None:
        before = None
        for _ in time_batches(self.batches(place), self.meter, self, 0, None):
            before = before or self.before
            self.rows[-1][SAMPLES] += 3
            self.go(place + 1)
            if leave:
                break
        trained, row = before or self.before
        if trained == self.trained:
            for column in (DATA, FORWARD):
                moved = self.rows[-1][column] - row[column]
                self.rows[-1][column] -= moved
                self.rows[-1][EVALUATION] += moved
            self.rows[-1][SAMPLES] = row[SAMPLES]

    def leave(self, place: int, phase: int) -> None:
        self.read(place, phase, leave=True)

    def batches(self, place: int) -> Any:
        for number in range(3):
            if self.meter.step == len(self.rows):
                self.rows.append([0] * COLUMNS)
            if not number:
                self.before = self.trained, self.rows[-1][:]
            if number == 2:
                return
            self.stack.append(DATA)
            self.nap(self.moves[place][1])
            self.stack.pop()
            yield torch.zeros(3)


_moves = st.tuples(st.integers(0, PHASES - 1), st.integers(0, 5), st.booleans(), st.sampled_from(["phase", "wait", "read", "leave"]))


@settings(max_examples=150, deadline=None)
@given(st.lists(_moves, max_size=7), st.lists(st.integers(1, 40), max_size=30))
def test_log_cut_anywhere(moves: list[tuple[int, int, bool, str]], cuts: list[int]) -> None:
    """Every moment belongs to one phase wherever the log is cut."""
    walk = Walk(moves)
    walk.go(0)
    walk.meter.tick()
    if walk.meter.step == len(walk.rows):
        walk.rows.append([0] * COLUMNS)
    reader, found, log = MeterReader(0), [], walk.meter.log[:]
    for cut in [*cuts, len(log)]:
        found += reader.read(log[: 2 * cut]).tolist()
        del log[: 2 * cut]
    found.append(reader.open.tolist())
    assert found == walk.rows
    assert sum(sum(row[:PHASES]) for row in found) + walk.setup == walk.clock.now
    assert all(value >= 0 for row in found for value in row)


# -- loops ------------------------------------------------------------------------------------------------------------


def test_phases_with_fake_clock(tmp_path: Path) -> None:
    """Naps are attributed to the phase that napped."""
    loop = Loop()
    accelerator, clock = loop.accelerator, loop.clock
    clock.nap("before the first batch", 1000)
    evaluation = accelerator.prepare(loader(clock, 4, 11, name="evaluation"))
    accelerator.register_save_state_pre_hook(lambda *_: clock.nap("checkpoint", 13))
    for number, batch in enumerate(loop.loader):
        loop.step(batch, body=2)
        if number == 4:
            accelerator.save_state(str(tmp_path / "saved"))
            with torch.no_grad():
                for held_out in evaluation:
                    loop.net(held_out)
    napped = {name: value for name, value in clock.napped.items() if not name.startswith("before")}
    assert loop.found() == napped
    report = loop.ledger.report()
    assert (report.steps, report.samples) == (10, 20), "samples of the evaluation are not trained on"
    assert report.seconds == pytest.approx(sum(napped.values()) / 1e3)


@pytest.mark.soak
def test_phases_with_real_sleeps(request: pytest.FixtureRequest) -> None:
    """Real sleeps are attributed within a tenth.

    The clock on the wall, the median of some steps: what else a busy machine does in a step is not looked at.
    """

    class Sleeps:
        def __init__(self) -> None:
            self.slept: dict[str, list[float]] = {}

        def nap(self, name: str, milliseconds: int) -> None:
            began = time.perf_counter()
            time.sleep(milliseconds / 1e3)
            self.slept.setdefault(name, []).append(time.perf_counter() - began)

    sleeps, windows = Sleeps(), []
    accelerator = Accelerator(cpu=True)
    ledger = ledger_of(accelerator)
    ledger.examiners.append(windows.append)
    net = Net(sleeps, 30, 30)
    net, optimizer, reader = accelerator.prepare(net, Sgd(net.parameters(), sleeps, 30), loader(sleeps, 7, 30, batch_size=1))
    for batch in reader:
        accelerator.backward(net(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        sleeps.nap("other", 30)
    ledger.settle()
    rows = [row for window in windows for row in window.rows]
    assert len(rows) == 7
    columns = {"data": DATA, "forward": 1, "backward": 2, "optimizer": 4, "other": OTHER}
    for name, column in columns.items():
        found = [row[column] / slept for row, slept in zip(rows, sleeps.slept[name], strict=True)]
        assert all(ratio > 0.99 for ratio in found), (name, found)
        if request.config.getoption("--soak"):
            assert median(found) < 1.1, (name, found)


def test_accumulation_is_one_step() -> None:
    """Gradients that are added up make one step."""
    loop = Loop(gradient_accumulation_steps=5)
    for batch in loop.loader:
        with loop.accelerator.accumulate(loop.net):
            loop.step(batch)
    assert loop.found() == {"data": 20, "forward": 30, "backward": 50, "optimizer": 14}
    assert (loop.ledger.report().steps, loop.ledger.report().samples) == (2, 20)


def test_steps_without_loader() -> None:
    """A loop without a prepared loader ends its steps with updates."""
    loop = Loop()
    for _ in range(4):
        loop.step(torch.zeros(2, 3), body=2)
    assert loop.found() == {"forward": 12, "backward": 20, "optimizer": 28, "other": 8}
    report = loop.ledger.report()
    assert (report.steps, report.samples, report.samples_per_second) == (4, None, None)


def test_steps_without_optimizer() -> None:
    """A loop without a prepared optimizer ends its steps with backward."""
    clock, accelerator = Clock(), Accelerator(cpu=True)
    ledger = ledger_of(accelerator, clock)
    net, reader = accelerator.prepare(Net(clock, 3, 5), loader(clock, 6, 1))
    for batch in reader:
        accelerator.backward(net(batch).sum())
        clock.nap("other", 2)
    assert (ledger.report().steps, ledger.report().samples) == (3, 6)
    for _ in range(2):
        accelerator.backward(net(torch.zeros(1, 3)).sum())
    report = ledger.report()
    assert report.steps == 5
    assert milliseconds(report.phases) == dict(clock.napped)


def test_several_optimizers() -> None:
    """Several optimizers and several calls of a model make one step."""
    clock, accelerator = Clock(), Accelerator(cpu=True)
    ledger = ledger_of(accelerator, clock)
    first, second = Net(clock, 3, 5), Net(clock, 4, 6)
    first, second, entry, two, reader = accelerator.prepare(
        first, second, Sgd(first.parameters(), clock, 7), Sgd(second.parameters(), clock, 8), loader(clock, 4, 1)
    )
    for batch in reader:
        for net, optimizer in ((first, entry), (second, two)):
            accelerator.backward((net(batch) + net(batch)).sum())
            optimizer.step()
            optimizer.zero_grad()
    report = ledger.report()
    assert report.steps == 2
    assert milliseconds(report.phases) == dict(clock.napped)


def test_evaluation_passes() -> None:
    """An evaluation with gradients on is one too and a pass inside of another is apart."""
    loop = Loop()
    held_out = loop.accelerator.prepare(loader(loop.clock, 4, 11))
    for number, batch in enumerate(loop.loader):
        loop.step(batch)
        if number in (2, 3):
            for other in held_out:
                loop.net(other)
                if number == 3:
                    break
    assert loop.found() == {"data": 20, "forward": 30, "backward": 50, "optimizer": 70, "evaluation": 3 * (2 * 11 + 3)}


def test_two_loaders() -> None:
    """Two loaders that are read side by side."""
    loop = Loop()
    second = loop.accelerator.prepare(loader(loop.clock, 20, 2))
    for batch, other in zip(loop.loader, second, strict=True):
        loop.step(batch + other)
    assert loop.found() == {"data": 60, "forward": 30, "backward": 50, "optimizer": 70}
    assert loop.ledger.report().steps == 10


def test_exceptions_anywhere() -> None:
    """Exceptions anywhere leave the accounts right."""
    loop = Loop()

    def failing(*_: Any) -> Any:
        loop.clock.nap("forward", 9)
        raise KeyError("forward")

    def in_backward(gradient: torch.Tensor) -> None:
        raise KeyError("backward")

    batches = iter(loop.loader)
    loop.step(next(batches))
    handle = loop.net.register_forward_pre_hook(failing)
    with pytest.raises(KeyError):
        loop.net(next(batches))
    handle.remove()
    loss = loop.net(next(batches)).sum()
    loss.register_hook(in_backward)
    with pytest.raises(KeyError):
        loop.accelerator.backward(loss)
    del batches
    loop.clock.nap("other", 4)
    assert loop.found() == {"data": 6, "forward": 3 + 9 + 3, "backward": 5, "optimizer": 7, "other": 4}


def test_time_after_last_step() -> None:
    """What comes after the last step is counted and after the end nothing more."""
    loop = Loop()
    for batch in loop.loader:
        loop.step(batch)
    with torch.no_grad():
        loop.net(torch.zeros(1, 3))
    loop.clock.nap("other", 20)
    finished = loop.ledger.finish()
    assert milliseconds(finished.phases) == dict(loop.clock.napped)
    loop.step(torch.zeros(1, 3))
    assert loop.ledger.finish() is loop.ledger.report() is finished


# -- throughput -------------------------------------------------------------------------------------------------------


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.ones(5, dtype=torch.long), "kept": torch.ones(2)}


@pytest.mark.parametrize(("tokens", "expected"), [(None, 35), ("kept", 14), (lambda batch: 3, 12), ("not there", None)])
def test_samples_and_tokens(tokens: Any, expected: int | None) -> None:
    """Samples and tokens are those that were handed out."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[LedgerKwargs(tokens=tokens)])
    net = torch.nn.Linear(2, 1)
    net, optimizer, reader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters()), torch.utils.data.DataLoader(Texts(), batch_size=2)
    )
    for batch in reader:
        accelerator.backward(net(batch["kept"]).sum())
        optimizer.step()
    report = accelerator.ledger()
    assert (report.steps, report.samples, report.tokens) == (4, 7, expected)
    assert report.samples_per_second == pytest.approx(7 / report.seconds)


ROWS = torch.ones(3, 2)
CHANGING: dict[str, list[tuple[Any, int]]] = {
    "other keys": [({"input_ids": ROWS}, 3), ({"labels": ROWS}, 3), ({"input_ids": None, "x": ROWS[:2]}, 2), ({}, 1)],
    "no dimension any more": [(ROWS, 3), (torch.tensor(1.0), 1), ("text", 1), (None, 1)],
    "shorter": [([ROWS, "text"], 3), ([], 1), ((ROWS,), 3), (["text", ROWS], 3)],
}


@pytest.mark.parametrize("kind", CHANGING)
def test_batches_that_change(kind: str) -> None:
    """What was chosen by the first batch to count samples and tokens does not end a loop over batches of another structure."""
    batches, sizes = zip(*CHANGING[kind], strict=True)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(2, 1)
    net, optimizer, reader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters()), torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    )
    seen = []
    for batch in reader:
        seen.append(batch)
        accelerator.backward(net(ROWS).sum())
        optimizer.step()
    assert len(seen) == len(batches)
    assert accelerator.ledger().samples == sum(sizes)


def test_a_count_that_raises() -> None:
    """An exception of the user's own count of tokens reaches the loop, and what was measured before it can be read."""

    def count(batch: Any) -> int:
        raise KeyError("tokens")

    accelerator = Accelerator(cpu=True, kwargs_handlers=[LedgerKwargs(tokens=count)])
    reader = accelerator.prepare(torch.utils.data.DataLoader(Texts(), batch_size=2))
    with pytest.raises(KeyError, match="tokens"):
        next(iter(reader))
    assert accelerator.ledger().steps == 0


def test_unknown_batch_sizes() -> None:
    """Batches of a size that only they know are measured."""
    clock = Clock()
    accelerator = Accelerator(cpu=True)
    ledger = ledger_of(accelerator, clock)
    sizes = [[0, 1, 2], [3], [4, 5]]
    data = loader(clock, 6, 1).dataset
    net = Net(clock, 1, 1)
    net, optimizer, reader = accelerator.prepare(
        net, Sgd(net.parameters(), clock, 1), torch.utils.data.DataLoader(data, batch_sampler=sizes)
    )
    for batch in reader:
        accelerator.backward(net(batch).sum())
        optimizer.step()
    assert ledger.report().samples == 6


def test_flops_and_mfu() -> None:
    """Flops are counted in one step and set against what the device can do."""
    options = LedgerKwargs(count_flops=True, peak_flops=1e6)
    loop = Loop(kwargs_handlers=[options])
    for batch in loop.loader:
        loop.step(batch, body=10)
    forward = 2 * 3  # of one sample: a product of 1 x 3 and 3 x 1
    per_sample = forward * 2  # backward has that of the weight; the batch takes none
    report = loop.ledger.report()
    assert report.flops == pytest.approx(per_sample * 20)
    assert report.mfu == pytest.approx(report.flops / report.seconds / 1e6, rel=1e-3)
    given = Loop(kwargs_handlers=[LedgerKwargs(flops_per_sample=100.0)])
    for batch in given.loader:
        given.step(batch)
    assert given.ledger.report().flops == pytest.approx(2000)
    assert given.ledger.report().mfu is not None, "the peak is measured where it is not given"


def test_memory_high_water_mark() -> None:
    """Memory is the most that was held."""
    before = Accelerator(cpu=True).ledger().memory["host"]
    taken = torch.zeros(80_000_000, dtype=torch.uint8).fill_(1)
    after = Accelerator(cpu=True).ledger().memory["host"]
    assert before is not None
    assert after is not None
    assert before[0] is not None
    assert after[0] is not None
    assert after[0] >= before[0]
    assert after[0] >= taken.numel()
    assert Accelerator(cpu=True).ledger().memory["device"] is None


# -- intervals, windows and events ------------------------------------------------------------------------------------


def test_intervals() -> None:
    """Intervals come about every second and hold every step once."""
    loop = Loop(data=100)
    entries: list[dict[str, Any]] = []
    loop.ledger.sinks.append(entries.append)
    for batch in loop.loader:
        loop.step(batch, body=100)
    loop.ledger.finish()
    assert [step for entry in entries for step in range(entry["first"], entry["last"] + 1)] == list(range(10))
    assert 3 <= len(entries) <= 4, "3.15 s"
    assert sum(entry["samples"] for entry in entries) == 20
    assert set(entries[0]) == {
        "time", "seconds", "first", "last", "steps", "samples", "tokens", "flops", "phases", "slowest", "memory", "mfu",
    }  # fmt: skip
    for entry in entries:
        assert sum(values[0] for values in entry["phases"].values()) == pytest.approx(entry["seconds"], abs=1e-5)
    assert [round(later["time"] - entry["time"], 2) for entry, later in zip(entries, entries[1:], strict=False)] == [
        round(later["seconds"], 2) for later in entries[1:]
    ]


def test_examiners() -> None:
    """Examiners see every step and every loss once."""
    loop = Loop(data=100)
    windows: list[Any] = []
    loop.ledger.examiners.append(windows.append)
    losses = []
    for batch in loop.loader:
        loss = loop.net(batch).sum()
        losses.append(loss.item())
        loop.accelerator.backward(loss)
        loop.optimizer.step()
        loop.clock.nap("other", 300)
    loop.ledger.settle()
    seen = [(step, loss) for window in windows for step, loss in window.losses]
    assert seen == list(enumerate(losses))
    assert all(type(loss) is float for _, loss in seen), "on the host a number is kept, and no graph"
    assert [window.first_step for window in windows][0] == 0
    assert sum(window.steps for window in windows) == sum(len(window.rows) for window in windows) == 10
    assert sum(window.rows[:, OTHER].sum() for window in windows) == pytest.approx(3.0)


def test_full_log_is_read() -> None:
    """A log that nobody reads is read when it is full. Forward passes alone, without a loader and without a step."""
    accelerator = Accelerator(cpu=True)
    meter = ledger_of(accelerator).meter
    net = accelerator.prepare(torch.nn.Identity())
    assert meter is not None
    for _ in range(LOG_LIMIT // 4 + 100):
        net(0)
    assert len(meter.log) < 1000
    assert accelerator.ledger().phases["forward"][0]


def test_losses_bounded() -> None:
    """Losses do not pile up where no step ends."""
    ledger = Ledger()
    assert ledger.meter is not None
    for number in range(10_000):
        ledger.meter.losses.append((number, 1.0))
    assert len(ledger.losses) < 5_000


def test_failing_sink(caplog: pytest.LogCaptureFixture) -> None:
    """A sink that cannot write ends and training goes on."""
    loop = Loop(data=600)

    def full(entry: Any) -> None:
        raise OSError(28, "No space left on device")

    kept: list[Any] = []
    loop.ledger.sinks += [full, kept.append]
    for batch in loop.loader:
        loop.step(batch)
    assert len(kept) > 2
    assert sum("No space left" in message for message in caplog.messages) == 1


def test_events() -> None:
    """Events go to the sinks with time and rank."""
    ledger, events = Ledger(), []
    ledger.event_sinks.append(events.append)
    ledger.tell({"kind": "warning", "text": "hot"})
    assert events[0]["kind"] == "warning"
    assert events[0]["rank"] == 0
    assert events[0]["time"] > 1e9


# -- the model stays what it is ---------------------------------------------------------------------------------------


def test_timed_model_copies() -> None:
    """A marked model is copied pickled compiled and freed as before."""
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    assert accelerator.prepare(net) is net
    x = torch.ones(1, 3)
    expected = net(x)
    assert not is_compiled_module(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), expected)
        assert twin._compiled_call_impl is None
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), expected)
    net.compile(backend="eager")
    again = accelerator.prepare(net)
    assert is_compiled_module(again)
    assert torch.equal(again(x), expected)
    off = Accelerator(cpu=True, kwargs_handlers=[LedgerKwargs(enabled=False)])
    bare = off.prepare(torch.nn.Linear(3, 2))
    assert bare._compiled_call_impl is None
    gc.collect()
    gc.disable()
    try:
        lone = Accelerator(cpu=True)
        made = lone.prepare(torch.nn.Linear(3, 2))
        gone = weakref.ref(made)
        del made, lone
        assert gone() is None, "kept by a cycle"
    finally:
        gc.enable()


def test_without_accelerator() -> None:
    """What was prepared goes on without its accelerator and piles up nothing."""
    loop = Loop(data=600)
    net, optimizer, meter = loop.net, loop.optimizer, loop.ledger.meter
    backward = loop.accelerator._components.stepper.backward
    batches = iter(loop.loader)
    loop.accelerator = loop.ledger = None  # type: ignore[assignment]
    gc.collect()
    for batch in batches:
        backward(net(batch).sum(), None, {})
        optimizer.step()
    assert meter is not None
    assert (meter.step, len(meter.log) < 3 * 30) == (10, True)


def test_disabled_ledger() -> None:
    """A ledger that is off counts nothing and answers."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[LedgerKwargs(enabled=False)])
    net = torch.nn.Linear(3, 1)
    net, optimizer, reader = accelerator.prepare(net, torch.optim.SGD(net.parameters()), loader(Clock(), 4, 1))
    for batch in reader:
        accelerator.backward(net(batch).sum())
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report = accelerator.ledger()
    assert (report.steps, report.seconds, report.samples) == (0, 0.0, None)
    assert "0 steps" in report.table()


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0}, {"interval": "1"}, {"flops_per_sample": -1}, {"peak_flops": True}, {"tokens": 3},
        {"flops_per_sample": 1e9, "count_flops": True}, {"enabled": False, "interval": 2.0},
    ],
)  # fmt: skip
def test_invalid_ledger_options(wrong: dict[str, Any]) -> None:
    """Options that make no sense are refused."""
    with pytest.raises(ConfigError, match="LedgerKwargs"):
        LedgerKwargs(**wrong)
