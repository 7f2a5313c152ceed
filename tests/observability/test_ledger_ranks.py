"""The ledger of several ranks: who is waited for, what goes through the store, and what happens when ranks are late, silent or gone."""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any

import numpy
import pytest
import torch
from fake_clock import Clock, Net, Sgd, ledger_of, loader, milliseconds, on_clock
from hypothesis import given, settings, strategies as st
from torch.distributed import HashStore

from slipstream import Accelerator, LocalSGD
from slipstream.observability.options import LedgerKwargs
from slipstream.observability.timing.ledger import Ledger, StoreExchange
from slipstream.observability.timing.meter import BACKWARD, COLUMNS, EXPOSED, FORWARD, OTHER, SAMPLES, SAMPLES_HANDED, mark_phase
from slipstream.observability.timing.report import RowJoiner, split_phases
from slipstream.observability.timing.step_times import RankMessage, pack_message, unpack_message

# -- joining ----------------------------------------------------------------------------------------------------------


def row(exposed: float, forward: float = 1.0) -> list[float]:
    values = [0.0] * COLUMNS
    values[EXPOSED], values[FORWARD], values[SAMPLES] = exposed, forward, 4.0
    return values


def test_waiting_and_communication() -> None:
    """Waiting is what goes beyond the least exposed rank of each step."""
    steps = numpy.array([[row(0.5), row(0.1)], [row(0.2), row(0.4)], [row(0.3), row(0.4)]])
    found, slowest = split_phases(steps)
    assert found["communication"] == pytest.approx([0.3, 0.3, 0.3])
    assert found["waiting"] == pytest.approx([0.3, 0.3, 0.4])
    assert slowest == [1, 1, 0]


def test_step_without_waiting() -> None:
    """A step in which nobody waits has no last rank."""
    assert split_phases(numpy.array([[row(0.1)], [row(0.1001)]]))[1] == [0, 0]
    assert split_phases(numpy.array([[row(0.0)]]))[1] == [0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=15), st.integers(0, 3))
def test_rows_joined_once(told: list[tuple[int, int]], drops: int) -> None:
    """Every step is joined once whoever tells when.

    Steps come in any pieces; rows that a rank lost are gaps, and everything else adds up.
    """
    joiner, given_out, joined = RowJoiner(3, patience=1e9), [0, 0, 0], []
    lost = 0
    for number, (rank, count) in enumerate(told):
        if rank and drops and number == drops:
            given_out[rank] += 1
            lost += 1
        joiner.add(rank, given_out[rank], numpy.full((count, COLUMNS), float(rank + 1)))
        given_out[rank] += count
        taken = joiner.take()
        if taken is not None:
            joined.append(taken)
    rest = joiner.take(patient=False)
    joined += [] if rest is None else [rest]
    everything = numpy.concatenate(joined, axis=1) if joined else numpy.zeros((3, 0, COLUMNS))
    assert everything.shape[1] == max(given_out)
    for rank in range(3):
        values = everything[rank, :, 0]
        known = values[~numpy.isnan(values)]
        assert (known == rank + 1).all()
        told_of_rank = sum(count for entry, count in told if entry == rank)
        assert len(known) == told_of_rank, "nothing is lost or counted twice"
    assert joiner.late == 0


def test_silent_rank() -> None:
    """A silent rank is left out after a while and welcome later."""
    joiner = RowJoiner(2, patience=0.0)
    joiner.add(0, 0, numpy.ones((3, COLUMNS)))
    first = joiner.take()
    assert first is not None
    assert first.shape[1] == 3
    assert numpy.isnan(first[1]).all()
    found, _ = split_phases(first)
    assert found["forward"] == [3.0, None]
    joiner.add(0, 3, numpy.ones((1, COLUMNS)))
    again = joiner.take()
    assert again is not None, "not waited for a second time"
    joiner.add(1, 0, numpy.ones((5, COLUMNS)))
    joiner.add(0, 4, numpy.ones((1, COLUMNS)))
    both = joiner.take()
    assert both is not None
    assert not numpy.isnan(both).any()
    assert both.shape[1] == 1
    assert joiner.late == 4


def test_message_round_trip() -> None:
    """A message arrives as it was sent."""
    rows = numpy.arange(3.0 * COLUMNS).reshape(3, COLUMNS)
    sent = RankMessage(5, rows, (1000, None), [{"kind": "guard", "text": "ü"}], [0.5] * COLUMNS)
    received = unpack_message(pack_message(sent))
    assert (received.first, received.memory, received.events, received.tail) == (5, (1000, None), sent.events, sent.tail)
    assert numpy.array_equal(received.rows, rows)
    assert len(pack_message(RankMessage(0, numpy.ones((1000, COLUMNS))))) < 41_000, "40 bytes for a step"


# -- through the store ------------------------------------------------------------------------------------------------


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.inner = HashStore()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self.inner, name)(*args)

        return call


def make_step(ledger: Ledger, clock: Clock, forward: int = 10, exposed: int = 2) -> None:
    """A step of one rank."""
    meter = ledger.meter
    assert meter is not None
    meter.begin()
    for phase, nap in ((FORWARD, forward), (EXPOSED, exposed)):
        with mark_phase(meter, phase):
            clock.nap("", nap)
    meter.add(SAMPLES_HANDED)
    meter.add(4)
    meter.tick()
    meter.end_step()


class World:
    """Ledgers of several ranks in one process, each on a clock of naps, with one store."""

    def __init__(self, size: int, **options: Any) -> None:
        self.store, self.clocks = Counting(), [Clock() for _ in range(size)]
        self.empty = self.store.inner.num_keys()
        self.ledgers = [
            on_clock(Ledger(LedgerKwargs(**options), rank=rank, world_size=size, store=lambda: self.store), clock)
            for rank, clock in enumerate(self.clocks)
        ]
        self.intervals: list[dict[str, Any]] = []
        self.ledgers[0].sinks.append(self.intervals.append)

    def steps(self, count: int, absent: tuple[int, ...] = ()) -> None:
        for _ in range(count):
            for rank, ledger in reversed(list(enumerate(self.ledgers))):
                if rank not in absent:
                    make_step(ledger, self.clocks[rank], forward=10 + 5 * rank, exposed=12 - 5 * rank)

    @property
    def keys(self) -> int:
        return self.store.inner.num_keys() - self.empty


def test_rank_0_collects_all() -> None:
    """Rank 0 hears of all steps and the store is empty afterwards."""
    world = World(3)
    world.steps(100)
    for ledger in reversed(world.ledgers):
        report = ledger.finish()
    assert world.keys == 0
    assert report.steps == 100
    assert report.samples == 1200
    assert [milliseconds(report.phases, rank) for rank in range(3)] == [
        {"forward": 1000, "communication": 200, "waiting": 1000},
        {"forward": 1500, "communication": 200, "waiting": 500},
        {"forward": 2000, "communication": 200},
    ]
    assert report.slowest == [0, 0, 100]
    assert report.slowest_rank == 2
    assert [step for entry in world.intervals for step in range(entry["first"], entry["last"] + 1)] == list(range(100))


def test_store_calls_per_interval() -> None:
    """An interval costs a handful of calls of the store."""
    world = World(3)
    world.steps(1000)
    intervals = 22
    assert world.store.calls["set"] <= 2 * (intervals + 1)
    assert world.store.calls["compare_set"] <= 2 * (intervals + 1)
    assert sum(world.store.calls.values()) <= 2 * 7 * (intervals + 1)
    assert set(world.store.calls) == {"set", "compare_set", "check", "delete_key"}


def test_store_does_not_grow() -> None:
    """The store does not grow when rank 0 takes nothing."""
    world = World(3)
    world.steps(1000, absent=(0,))
    assert world.keys == 2
    world.steps(1000, absent=(0,))
    assert world.keys == 2
    for _ in range(4):
        world.ledgers[0].settle()
        for ledger in world.ledgers[1:]:
            ledger.settle()
    assert len(world.ledgers[1]._untold) == 0, "and nothing is lost, as soon as it does"


def test_dead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that died is null and stops nobody."""
    monkeypatch.setattr("slipstream.observability.timing.ledger._FINAL_WAIT", 0.05)
    world = World(2)
    world.steps(50)
    world.steps(450, absent=(1,))
    report = world.ledgers[0].finish()
    assert report.steps == 500
    told = report.phases["forward"][1]
    assert told is not None
    assert told < 50 * 0.015 + 1e-9
    assert world.intervals[-1]["phases"]["forward"][1] is None
    assert world.intervals[-1]["phases"]["forward"][0] > 0
    assert "rank 1" in report.table()


def test_failing_store(caplog: pytest.LogCaptureFixture) -> None:
    """A store that fails ends the exchange with one line."""
    class Gone:
        def check(self, keys: Any) -> bool:
            raise RuntimeError("Connection reset by peer\nmore")

    gone = Gone()
    for rank in (0, 1):
        ledger = Ledger(rank=rank, world_size=2, store=lambda: gone)
        for _ in range(3):
            ledger.settle()
        assert ledger.finish().steps == 0
    lines = [message for message in caplog.messages if "can no longer reach" in message]
    assert len(lines) == 2
    assert "Connection reset by peer" in lines[0]


def test_without_store() -> None:
    """Without a store every rank keeps its own."""
    ledger = Ledger(rank=1, world_size=2)
    assert not StoreExchange(lambda: None, 0, 1, 2).can_publish()
    clock = Clock()
    make_step(on_clock(ledger, clock), clock)
    report = ledger.finish()
    assert (report.steps, report.rank) == (1, 1)
    assert report.phases["forward"][0] is None


def test_events_reach_rank_0() -> None:
    """Events of other ranks reach the sinks of rank 0."""
    world, events = World(2), []
    world.ledgers[0].event_sinks.append(events.append)
    world.ledgers[1].tell({"kind": "guard", "text": "nan", "step": 3})
    world.steps(100)
    assert [(event["rank"], event["kind"], event["step"]) for event in events] == [(1, "guard", 3)]
    assert world.ledgers[1].events == []


def test_two_accelerators() -> None:
    """Two accelerators do not hear each other."""
    store = HashStore()
    first = StoreExchange(lambda: store, 0, 1, 2)
    first.send(b"one")
    assert StoreExchange(lambda: store, 1, 0, 2).collect() == {}
    assert StoreExchange(lambda: store, 0, 0, 2).collect() == {1: b"one"}


def test_taken_meanwhile() -> None:
    """A message that the other side took between two calls of the store is no message, and nobody waits for it."""

    class Raced(HashStore):
        def check(self, keys: list[str]) -> bool:
            return True

    assert StoreExchange(Raced, 0, 0, 2).collect() == {}


# -- real ranks -------------------------------------------------------------------------------------------------------


class Sleeps:
    """Naps that are slept, and how long they took."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def nap(self, name: str, milliseconds: int) -> None:
        if milliseconds:
            began = time.perf_counter()
            time.sleep(milliseconds / 1e3)
            self.slept.append(time.perf_counter() - began)


def train_with_a_slow_rank(slow: int, steps: int = 5) -> dict[str, Any]:
    """A loop in which one rank naps in every forward; what its own stopwatches say, and the ledger."""
    accelerator = Accelerator()
    rank, sleeps, windows = accelerator.process_index, Sleeps(), []
    ledger = ledger_of(accelerator)
    ledger.examiners.append(windows.append)
    ready = []
    net = Net(sleeps, 100 if rank == slow else 0, 0)
    net.linear.weight.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
    net, optimizer, reader = accelerator.prepare(
        net, Sgd(net.parameters(), sleeps, 0), loader(sleeps, 2 * steps * accelerator.num_processes, 0)
    )
    exposed = []
    for batch in reader:
        accelerator.backward(net(batch).sum())
        exposed.append(time.perf_counter() - ready[-1])
        optimizer.step()
        optimizer.zero_grad()
    ledger.settle()
    accelerator.wait_for_everyone()
    report = ledger.finish()
    rows = numpy.concatenate([window.rows for window in windows])
    return {
        "rank": rank,
        "slept": sum(sleeps.slept),
        "stopwatch": exposed,
        "exposed": rows[:, EXPOSED].tolist(),
        "forward": float(rows[:, FORWARD].sum()),
        "backward": float(rows[:, BACKWARD].sum()),
        "phases": report.phases,
        "samples": report.samples,
        "steps": report.steps,
        "slowest": report.slowest_rank,
        "table": report.table(),
        "answers": report.answers(),
        "finished": ledger.finish() is report,
    }


@pytest.mark.parametrize("world", [2, 4])
def test_slow_rank_named(ranks: Any, world: int) -> None:
    """The slow rank is named and what the others wait is not their backward."""
    slow = world - 1
    results = ranks(world).run(lambda: train_with_a_slow_rank(slow))
    slept = results[slow]["slept"]
    main = results[0]
    assert (main["steps"], main["samples"]) == (5, 5 * 2 * world)
    assert main["slowest"] == slow
    assert f"waited for most: rank {slow}" in main["table"]
    assert f"throughput of all {world} processes together" in "\n".join(main["answers"])
    assert results[slow]["forward"] >= slept
    assert main["phases"]["forward"][slow] == pytest.approx(results[slow]["forward"], rel=1e-5)
    for result in results:
        found, seen = result["exposed"][1:], result["stopwatch"][1:]  # a pass over a loader begins with a collective
        assert all(entry <= other for entry, other in zip(found, seen, strict=True)), "it begins after the last gradient"
        if result["rank"] != slow:
            assert median(entry / other for entry, other in zip(found, seen, strict=True)) > 0.9
            waited = main["phases"]["waiting"][result["rank"]]
            assert waited > 0.5 * slept, "in real ranks other things are waited for as well"
            assert result["backward"] < slept
    wait = sum(main["phases"]["waiting"])
    assert all(value >= 0.0 for values in main["phases"].values() for value in values)
    assert main["phases"]["waiting"][slow] < 0.5 * wait


def collective_phases() -> list[dict[str, Any]]:
    """Loops whose waits are collectives of ours: a gather in the loop, LocalSGD, a pass that leaves parameters out, buffers."""
    found = []
    for kind in ("gather", "local_sgd", "unused", "buffers"):
        accelerator = Accelerator(kwargs_handlers=_unused() if kind == "unused" else [])
        rank, sleeps, windows = accelerator.process_index, Sleeps(), []
        ledger = ledger_of(accelerator)
        ledger.examiners.append(windows.append)
        net: Any = _Half(kind)
        net, optimizer, reader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.01), loader(sleeps, 10 * accelerator.num_processes, 0)
        )
        with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=1, enabled=kind == "local_sgd") as local:
            for batch in reader:
                accelerator.backward(net(batch).sum())
                if rank == _slow_in(kind):
                    sleeps.nap("", 40)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                if kind == "gather":
                    accelerator.gather(torch.zeros(1, device=accelerator.device))
        ledger.settle()
        rows = numpy.concatenate([window.rows for window in windows])
        found.append(
            {
                "kind": kind, "exposed": float(rows[:, EXPOSED].sum()), "slept": sum(sleeps.slept), "steps": len(rows),
                "other": float(rows[:, OTHER].sum()), "negative": bool((rows < 0).any()),
            }
        )  # fmt: skip
    return found


def _slow_in(kind: str) -> int:
    """Buffers are those of rank 0, so the others wait for it."""
    return 0 if kind == "buffers" else 1


def _unused() -> list[Any]:
    from slipstream import DistributedDataParallelKwargs

    return [DistributedDataParallelKwargs(find_unused_parameters=True)]


class _Half(torch.nn.Module):
    """A model with a part that the loss may not depend on, and with buffers, if asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3) if kind == "buffers" else torch.nn.Identity()
        self.used = torch.nn.Linear(3, 1)
        self.unused = torch.nn.Linear(3, 1) if kind == "unused" else torch.nn.Identity()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(self.norm(batch))  # type: ignore[no-any-return]


def test_waits_in_collectives(ranks: Any) -> None:
    """Waits in other collectives are communication too."""
    for both in zip(*ranks(2).run(collective_phases), strict=True):
        slow = both[_slow_in(both[0]["kind"])]
        fast = both[1 - _slow_in(both[0]["kind"])]
        assert (fast["negative"], slow["negative"]) == (False, False), fast["kind"]
        assert fast["steps"] == slow["steps"] == 5
        assert fast["exposed"] > 0.4 * slow["slept"], (fast["kind"], fast, slow)
        assert slow["other"] >= slow["slept"]


@pytest.mark.parametrize("heard", [True, False])
def test_last_events(heard: bool) -> None:
    """What a rank told is heard by rank 0, or, if rank 0 has left before, given back to the rank itself; never lost, never both."""
    world = World(2)
    taken: list[str] = []
    back: list[str] = []
    world.ledgers[0].event_sinks.append(lambda event: taken.append(event["text"]))
    world.ledgers[1].unheard.append(lambda event: back.append(event["text"]))
    world.steps(3)
    world.ledgers[1].tell({"kind": "guard", "text": "in a message"})
    world.ledgers[1].settle()
    world.ledgers[1].tell({"kind": "guard", "text": "after the last one"})
    for ledger in reversed(world.ledgers) if heard else world.ledgers:
        ledger.leave()
    expected = ["in a message", "after the last one"]
    assert (taken, back) == ((expected, []) if heard else (expected[:1], expected[1:]))
