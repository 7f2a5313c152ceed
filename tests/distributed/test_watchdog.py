"""Ranks that wait in torch's own collectives, above all in the averaging of gradients: nobody waits without a word, or in vain."""

from __future__ import annotations

import importlib
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slipstream import Accelerator, PartialState, PeerLostError, WaitTimeoutError
from slipstream.distributed.current import current, reset
from slipstream.distributed.transport import GlooConnections
from slipstream.distributed.wait_monitor import Limits
from slipstream.errors import DistributedOperationException, StateError
from slipstream.testing import faults

HERE = "test_watchdog.py:"


class Training:
    """A few steps of a real model on this rank, its backward passes watched, and what came of them."""

    def __init__(self, timeout: float = 20.0, hang_warning: float = 0.0) -> None:
        self.state = PartialState(timeout=timeout, hang_warning=hang_warning)
        self.rank = self.state.process_index
        self.watch = current().watch("backward", Limits(timeout, 3600.0, hang_warning))
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double().to(self.state.device)
        self.wrap()

    def wrap(self) -> None:
        with self.watch:
            self.model = DistributedDataParallel(self.module)

    def loss(self) -> torch.Tensor:
        return self.model(torch.full((2, 4), float(self.rank), dtype=torch.float64, device=self.state.device)).sum()

    def step(self) -> None:
        loss = self.loss()
        with self.watch:
            loss.backward()
            self.module[0].weight.grad.sum().item()  # a device would be waited for after the section

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def works_again(self) -> bool:
        """Whether a new generation of the group carries both kinds of collectives, and gradients are averaged."""
        everyone = self.state.gather([self.rank])
        self.wrap()
        self.module.zero_grad()
        self.step()
        gradient = self.module[0].weight.grad
        assert gradient is not None
        return everyone == list(range(self.state.num_processes)) and len(set(self.state.gather([gradient.sum().item()]))) == 1


def caught(act: Callable[[], Any]) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        act()
    except DistributedOperationException as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


@pytest.mark.parametrize(
    ("world", "then", "name"),
    [
        (2, lambda state: state.gather([1]), "gather number 1"),
        (3, lambda state: state.gather([1]), "gather number 1"),
        (2, lambda state: state.wait_for_everyone(), "wait_for_everyone number 1"),
        (2, lambda state: state.destroy_process_group(), "destroy_process_group number 1"),
    ],
    ids=["gather", "gather, 3 ranks", "wait_for_everyone", "destroy_process_group"],
)
def test_early_loop_exit_named(ranks: Any, soak_limit: Any, world: int, then: Callable[[Any], Any], name: str) -> None:
    """A loop that one rank leaves early is named on every rank."""

    def run() -> tuple[tuple[str, str, float], bool]:
        training = Training()

        def loop() -> None:
            for step in range(5):
                if training.rank == 1 and step == 3:
                    break
                training.step()
            then(training.state)

        return caught(loop), training.works_again()

    for (kind, message, seconds), works in ranks(world).run(run):
        assert kind == "MismatchError", message
        for rank in range(world):
            where = f"waits \\d+ s in {name} at {HERE}" if rank == 1 else f"has been \\d+ s in backward number 5 at {HERE}\\d+ in step"
            assert re.search(f"rank {rank} \\(host .*\\): {where}", message), message
        assert "wait for each other" in message
        assert seconds < soak_limit(10)
        assert works


def test_ended_rank_named_with_place(ranks: Any, soak_limit: Any) -> None:
    """A rank that has ended is named with where it was last."""

    def run() -> tuple[str, str, float]:
        training = Training()
        training.steps(3)
        if training.rank == 1:
            reset("end of the process")
            return "", "", 0.0
        return caught(training.step)

    kind, message, seconds = ranks(2).run(run)[0]
    assert kind == "PeerLostError"
    assert "backward number 5 at " + HERE in message
    assert "rank 1 left the group after 0 collectives (end of the process); before that it was in backward number 4 at " + HERE in message
    assert seconds < soak_limit(10)


@pytest.mark.parametrize("world", [2, 3])
def test_kill_in_backward_named(ranks: Any, soak_limit: Any, world: int) -> None:
    """Survivors of a kill in backward name rank signal and last place."""

    def run() -> tuple[str, str, float]:
        training = Training()
        training.steps(2)
        training.module[0].weight.register_hook(lambda gradient: faults.kill_at(1, 0).reach(training.rank, 0))
        return caught(training.step)

    outcomes = ranks(world).outcomes(run)
    assert outcomes[1].exit is not None
    for outcome in outcomes[:1] + outcomes[2:]:
        kind, message, seconds = outcome.value
        assert kind == "PeerLostError"
        assert "backward number 4 at " + HERE in message
        assert "rank 1 (host " in message
        assert "SIGKILL" in message
        assert seconds < soak_limit(10)


def test_program_error_passes_through(ranks: Any) -> None:
    """An error of the program passes through and the model goes on."""

    def run() -> tuple[str, int, bool]:
        training = Training()
        training.step()
        before = current().generation
        with pytest.raises(RuntimeError, match="does not require grad") as plain, training.watch:
            torch.ones(1, device=training.state.device).sum().backward()
        training.steps(2)
        return type(plain.value).__name__, current().generation - before, training.state.gather([1]) == [1, 1]

    assert ranks(2).run(run) == [("RuntimeError", 0, True)] * 2


def test_error_in_backward_reaches_waiters(ranks: Any) -> None:
    """An error of one rank in the middle of backward is told to those who wait."""

    def run() -> tuple[str, tuple[str, str, float], bool]:
        training = Training()
        training.step()
        own = ""
        if training.rank == 1:
            handle = training.module[0].weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError) as error:
                training.step()
            own = str(error.value)
            handle.remove()
            outcome = caught(lambda: training.state.gather([1]))
        else:
            outcome = caught(training.step)
        return own, outcome, training.works_again()

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("of my own")

    (_, (kind, message, _), works), (own, (kind_too, message_too, _), works_too) = ranks(2).run(run)
    assert own == "of my own"
    assert (kind, kind_too) == ("MismatchError", "MismatchError")
    for text in (message, message_too):
        assert "gather number 1 at " + HERE in text
        assert "it failed in backward number 3 at " + HERE in text
        assert "ZeroDivisionError: of my own" in text
    assert works
    assert works_too


def test_out_of_step_group_not_reused(ranks: Any) -> None:
    """The others' next reductions would be taken for the rest of those that it began; collectives of ours go on."""

    def run() -> tuple[list[int], int, bool]:
        training = Training()
        before = current().generation
        with pytest.raises(ZeroDivisionError), training.watch:  # noqa: PT012 - on every rank alike
            total = torch.ones(1, device=training.state.device)
            dist.all_reduce(total)
            raise ZeroDivisionError(total.item())
        gathered = training.state.gather([training.rank])
        return gathered, current().generation - before, training.works_again()

    assert ranks(2).run(run) == [([0, 1], 1, True)] * 2


def test_long_backward_wait_prints_table(ranks: Any) -> None:
    """A long wait in backward prints who is where and goes on."""

    def run() -> None:
        training = Training(hang_warning=2.0)
        training.steps(2)
        if training.rank == 1:
            time.sleep(4.5)
        training.steps(2)

    outcomes = ranks(3).outcomes(run)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    printed = outcomes[0].output
    assert f"slipstream: rank 0 has been 2 s in backward number 4 at {HERE}" in printed
    assert "Missing: rank 1." in printed
    assert f"the last was backward number 3 at {HERE}" in printed
    assert HERE.rstrip(":") + '", line' in printed, "the stack of the rank that sleeps"
    assert [outcome.output for outcome in outcomes[1:]] == ["", ""], "one table is enough"


def test_ranks_that_are_merely_slow_are_left_alone(ranks: Any) -> None:
    """Slow before a backward pass, slow in one, and busy in a section of its own without any collective of torch's."""

    def run() -> list[int]:
        training = Training(hang_warning=1.0)
        slow = training.module[1].weight.register_hook(lambda gradient: time.sleep(2.5 if training.rank == 1 else 0.0))
        training.step()
        slow.remove()
        if training.rank == 0:
            with current().watch("backward", Limits(1.0, 3600.0, 30.0)):
                time.sleep(2.5)
        return training.state.gather([training.rank])

    outcomes = ranks(2).outcomes(run)
    assert [outcome.value for outcome in outcomes] == [[0, 1]] * 2
    assert outcomes[0].output == "", "all ranks were in the backward pass that took long"


def test_late_rank_is_no_error(ranks: Any) -> None:
    """A rank that comes late is no mistake."""

    def run() -> list[int]:
        training = Training(hang_warning=30.0)
        training.step()
        if training.rank == 1:
            time.sleep(2.5)
        training.state.gather([1])
        training.step()
        return training.state.gather([training.rank])

    outcomes = ranks(2).outcomes(run)
    assert [(outcome.value, outcome.output) for outcome in outcomes] == [([0, 1], "")] * 2


def test_collective_inside_backward(ranks: Any) -> None:
    """A collective of ours inside of a backward pass is in its right place."""

    def run() -> tuple[float, list[int]]:
        training = Training(hang_warning=30.0)
        if training.rank == 1:
            time.sleep(2.5)
        for _ in range(3):
            loss = training.state.gather(training.loss().reshape(1), with_gradient=True).sum()
            with training.watch:
                loss.backward()
        return loss.item(), training.state.gather([training.rank])

    first, second = ranks(2).run(run)
    assert first == second


def test_backward_wait_times_out(ranks: Any, soak_limit: Any) -> None:
    """A wait in backward ends at the limit and the late rank hears of it."""

    def run() -> tuple[tuple[str, str, float], bool]:
        training = Training(timeout=2.5)
        training.steps(2)
        if training.rank == 1:
            time.sleep(4)
        return caught(training.step), training.works_again()

    ((kind, message, seconds), works), ((told, why, _), works_too) = ranks(2).run(run)
    assert kind == "WaitTimeoutError"
    assert "in backward number 4 at " + HERE in message
    assert "rank 1 did not come" in message
    assert "SLIPSTREAM_TIMEOUT" in message
    assert 2.4 < seconds < soak_limit(6)
    assert told == "PeerLostError"
    assert "rank 0 gave up waiting in backward number 4 at " + HERE in why
    assert works
    assert works_too


def test_stopped_rank_in_backward(ranks: Any) -> None:
    """A rank that is stopped in backward is reported and then an error."""

    def run() -> tuple[str, str, float]:
        training = Training(timeout=3.5, hang_warning=2.5)
        training.step()
        training.module[0].weight.register_hook(lambda gradient: faults.stop_at(1, 0).reach(training.rank, 0))
        return caught(training.step)

    ranks(2).run(lambda: importlib.import_module("torch._dynamo").__name__)  # which the first replica of a rank takes its time for
    outcomes = ranks(2).outcomes(run, patience=0.2)
    kind, message, _ = outcomes[0].value
    assert kind == "WaitTimeoutError"
    assert "stopped by a signal" in message
    assert "Missing: rank 1" in outcomes[0].output


def test_different_sections_deadlock_raises(ranks: Any) -> None:
    """Two kinds of sections that wait for each other are a mistake."""

    def run() -> tuple[tuple[str, str, float], bool]:
        training = Training(hang_warning=2.0)
        other = current().watch("prepare", Limits(20.0, 3600.0, 2.0))

        def act() -> None:
            with training.watch if training.rank else other:
                dist.recv(torch.ones(1), src=1 - training.rank)  # which not every backend of a device counts

        return caught(act), training.works_again()

    for (kind, message, _), works in ranks(2, device="cpu").run(run):
        assert kind == "MismatchError", message
        assert "in prepare number 1 at " + HERE in message
        assert "in backward number 2 at " + HERE in message
        assert works


def test_wait_on_the_device_named(ranks: Any, soak_limit: Any) -> None:
    """A device waits behind its host: a rank that has left its section, and waits for a result, is found as if it were inside."""

    def run() -> tuple[str, tuple[str, str, float], bool]:
        training = Training()
        total = torch.ones(1, device=training.state.device)
        for _ in range(3 - training.rank):
            with training.watch:
                dist.all_reduce(total)
        own = ""
        if training.rank == 0:
            with pytest.raises(RuntimeError) as error:
                total.item()
            own = str(error.value)
        return own, caught(lambda: training.state.gather([1])), training.works_again()

    (own, (kind, message, _), works), (_, (kind_too, message_too, seconds), works_too) = ranks(2, device="standin").run(run)
    assert "gloo" in own, "the error of the backend, in the program's own call"
    assert (kind, kind_too) == ("MismatchError", "MismatchError"), "and what it means, in the next one of ours"
    for text in (message, message_too):
        assert "in backward number 4 at " + HERE in text
        assert "(the device; the host has gone on)" in text
        assert "gather number 1 at " + HERE in text
    assert seconds < soak_limit(10)
    assert works
    assert works_too


def test_slow_devices_are_left_alone(ranks: Any) -> None:
    """Devices that are busy for long, also where one host is ahead of the other, are no wait for anybody."""

    def run() -> list[int]:
        training = Training(hang_warning=1.0)
        total = torch.ones(1, device=training.state.device)
        torch.standin.set_delay(copies=0.8)
        for number in range(4):
            with training.watch:
                dist.all_reduce(total)
            if number == training.rank:
                time.sleep(0.7)
        assert total.item() == 16.0
        torch.standin.set_delay(copies=0.0)
        return training.state.gather([training.rank])

    outcomes = ranks(2, device="standin").outcomes(run)
    assert [(outcome.value, outcome.output) for outcome in outcomes] == [([0, 1], "")] * 2


def test_model_of_released_group_raises(ranks: Any) -> None:
    """A model of a group that was given up says so."""

    def run() -> str:
        training = Training(timeout=1.5)
        loss = training.loss()
        if training.rank == 1:
            time.sleep(2)
        with pytest.raises((WaitTimeoutError, PeerLostError)):
            training.state.gather([1])
        with pytest.raises(StateError) as error, training.watch:
            loss.backward()
        return str(error.value)

    for message in ranks(2, device="cpu").run(run):
        assert "prepare the model again" in message
        assert HERE in message


@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_prepared_model_of_released_group_raises(ranks: Any, device: str) -> None:
    """Gradients are not averaged in a group that is gone: a prepared model says so before the backward pass begins."""

    def run() -> str:
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        loss = model(torch.ones(1, 2, device=accelerator.device)).sum()
        PartialState().destroy_process_group()
        with pytest.raises(StateError) as error:
            accelerator.backward(loss)
        return str(error.value)

    for message in ranks(2, device=device).run(run):
        assert "this Linear was prepared before the process group was released: prepare it again" in message


def test_foreign_group_reports_and_times_out(ranks: Any) -> None:
    """Of a group that the program opened the mistake is told at once and raised at its limit."""

    def run() -> tuple[str, str, float]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=4))
        training = Training()
        training.steps(2)
        if training.rank == 1:
            return caught(lambda: training.state.gather([1]))
        return caught(training.step)

    outcomes = ranks(2, device="cpu").outcomes(run)  # the backend of that group
    assert [outcome.value[0] for outcome in outcomes] == ["MismatchError"] * 2
    assert "opened torch's process group itself" in outcomes[0].output
    assert "gather number 1 at " + HERE in outcomes[0].output


def test_disconnect_spares_other_sockets(ranks: Any) -> None:
    """Ending the groups connections leaves those of others alone."""

    def run() -> tuple[bool, bytes]:
        state = PartialState()
        connections = GlooConnections(dist.distributed_c10d._get_default_store(), state.process_index, 2)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with connections.recording():
                group = dist.new_group()
                mine = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        with mine, theirs:
            state.wait_for_everyone()
            known = connections.disconnect()
            with pytest.raises(RuntimeError, match="gloo"):
                dist.all_reduce(torch.ones(1), group=group)
            mine.sendall(b"still here")
            return known, theirs.recv(100)

    assert ranks(2).run(run) == [(True, b"still here")] * 2


def test_single_process_watchdog() -> None:
    """One process has nothing to watch."""
    watch = current().watch("backward")
    with watch:
        pass
    watch.enter()
    watch.leave()
    with pytest.raises(ZeroDivisionError), watch:
        raise ZeroDivisionError
