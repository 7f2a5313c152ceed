"""A rank that dies, leaves, stops or is stuck is named to the others, with where it was; nobody waits without a word."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from slipstream import PartialState, PeerLostError, WaitTimeoutError
from slipstream.distributed import collectives
from slipstream.distributed.heartbeat import Heartbeat
from slipstream.distributed.transport import _Peer, find_neighbours
from slipstream.errors import DistributedOperationException
from slipstream.testing import faults


def waiting(fault: faults.Fault, **limits: float) -> Any:
    """A rank function: a few collectives, the fault at one rank, and one more collective that cannot complete."""

    def run() -> tuple[str, str, float]:
        state = PartialState(**limits)
        state.gather([state.process_index])
        fault.reach(state.process_index, 1)
        started = time.monotonic()
        try:
            state.gather([state.process_index])
        except (PeerLostError, WaitTimeoutError) as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return "", "", time.monotonic() - started

    return run


@pytest.mark.parametrize("world", [2, 4])
def test_survivors_name_killed_rank(ranks: Any, soak_limit: Any, world: int) -> None:
    """Survivors of a kill name rank host signal and last collective."""
    outcomes = ranks(world).outcomes(waiting(faults.kill_at(1, 1)))
    assert outcomes[1].exit is not None
    for outcome in outcomes[:1] + outcomes[2:]:
        kind, message, seconds = outcome.value
        assert kind == "PeerLostError"
        assert "rank 1 (host " in message
        assert "SIGKILL" in message
        assert "gather number 1" in message, "the last collective of the rank that died"
        assert "test_lost_ranks.py:" in message
        assert seconds < soak_limit(10)


def in_large_exchange(signal_number: int, **limits: float) -> Any:
    """A rank function: rank 1 gets a signal when a part of 32 MiB has arrived there."""

    def run() -> tuple[str, str]:
        state = PartialState(**limits)
        state.gather([state.process_index])
        receive = _Peer.receive

        def receive_and_fail(peer: _Peer, view: memoryview) -> int:
            size = receive(peer, view)
            if len(view) > 1 << 20 and size:
                os.kill(os.getpid(), signal_number)
            return size

        if state.process_index == 1:
            _Peer.receive = receive_and_fail  # type: ignore[method-assign]
        try:
            state.gather(torch.ones(8 << 20))
        except (PeerLostError, WaitTimeoutError) as error:
            return type(error).__name__, str(error)
        return "", ""

    return run


@pytest.mark.parametrize("world", [2, 3])
def test_kill_in_large_exchange_named(ranks: Any, world: int) -> None:
    """A rank that is killed in the middle of megabytes is named as one that is killed between calls."""
    outcomes = ranks(world).outcomes(in_large_exchange(signal.SIGKILL))
    for outcome in outcomes[:1] + outcomes[2:]:
        kind, message = outcome.value
        assert kind == "PeerLostError"
        assert "rank 1 (host " in message
        assert "SIGKILL" in message


def test_stop_in_large_exchange_named(ranks: Any) -> None:
    """A rank that is stopped in the middle of megabytes is named, and the wait for it ends."""
    outcomes = ranks(2).outcomes(in_large_exchange(signal.SIGSTOP, hang_warning=3.0, timeout=6.0), patience=0.2)
    kind, message = outcomes[0].value
    assert kind == "WaitTimeoutError"
    assert "rank 1 did not come" in message
    assert "stopped by a signal" in message


def test_lost_rank_named_to_ranks_without_a_connection(ranks: Any) -> None:
    """Without a launcher that says so, ranks that have no connection to the lost one hear of it from those that had one."""

    def run() -> str:
        state = PartialState()
        state.gather([state.process_index])
        Heartbeat._read_exits = lambda heartbeat: False  # type: ignore[method-assign]
        if state.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            state.gather([state.process_index])
        return str(caught.value)

    assert 4 not in find_neighbours(1, 6)
    outcomes = ranks(6).outcomes(run)
    for outcome in outcomes[:1] + outcomes[2:]:
        assert "the connection to rank 1 broke" in str(outcome.value), outcome


SHORT_OF_MEMORY: dict[str, Callable[[PartialState], Any]] = {
    "gather": lambda state: state.gather(torch.ones(1 << 20)),
    "reduce": lambda state: state.reduce(torch.ones(1 << 20)),
    "broadcast": lambda state: state.broadcast(torch.ones(1 << 20)),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SHORT_OF_MEMORY)
def test_rank_short_of_memory_named(ranks: Any, name: str, world: int) -> None:
    """A rank without memory for a result is named to the others with its error, and the next calls of all belong together again."""

    def run() -> tuple[str, list[int]]:
        state = PartialState()
        state.wait_for_everyone()
        message = ""
        with contextlib.ExitStack() as patches:
            for module, function in ((collectives, "empty_host_tensor"), (torch, "cat")) if state.process_index == 1 else ():
                patches.enter_context(mock.patch.object(module, function, side_effect=MemoryError("no 32 GB")))
            try:
                SHORT_OF_MEMORY[name](state)
            except (MemoryError, DistributedOperationException) as error:
                message = str(error)
        return message, state.gather([state.process_index])

    for message, gathered in ranks(world).run(run):
        assert "no 32 GB" in message
        assert gathered == list(range(world))


def test_failed_rank_named_with_exception(ranks: Any) -> None:
    """A rank that ended with an exception is named with it."""

    def run() -> None:
        state = PartialState()
        if state.process_index == 1:
            raise ValueError("bad sample 17")
        state.wait_for_everyone()

    main, other = ranks(2).outcomes(run)
    assert isinstance(other.error, ValueError)
    assert isinstance(main.error, PeerLostError)
    assert "bad sample 17" in str(main.error) or "rank 1 left the group" in str(main.error)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.stop_at(1, 1), ["stopped by a signal"]),
        (faults.spin_at(1, 1), ['faults.py", line']),
        (faults.hold_gil_at(1, 1, seconds=60), ["interpreter does not answer", 'faults.py", line']),
    ],
    ids=["stopped", "endless loop", "held interpreter"],
)
def test_stuck_rank_reported_then_error(ranks: Any, soak_limit: Any, fault: faults.Fault, words: list[str]) -> None:
    """A rank that does not come is reported and then an error."""
    outcomes = ranks(2).outcomes(waiting(fault, hang_warning=3.0, timeout=5.0), patience=0.2)
    kind, message, seconds = outcomes[0].value
    assert kind == "WaitTimeoutError"
    assert 4.5 <= seconds < soak_limit(20)
    for text in (message, outcomes[0].output):
        assert "rank 1 (host " in text
        assert "gather number 1 at test_lost_ranks.py:" in text, text
    for word in words:
        assert word in message, (message, outcomes[0].output[-800:])
    assert "has waited 3 s in gather number 2 at test_lost_ranks.py:" in outcomes[0].output
    assert "SLIPSTREAM_TIMEOUT" in message


def test_group_works_after_timeout(ranks: Any) -> None:
    """After a wait that timed out both ranks hear of it and the group works again."""

    def run() -> tuple[str, str, list[int]]:
        state = PartialState(timeout=2.0, hang_warning=0.0)
        state.gather([0])
        if state.process_index == 1:
            time.sleep(4)
        with pytest.raises((WaitTimeoutError, PeerLostError)) as caught:
            state.gather([1])
        return type(caught.value).__name__, str(caught.value), state.gather([state.process_index])

    (first, _, after), (second, told, after_too) = ranks(2).run(run)
    assert (first, second) == ("WaitTimeoutError", "PeerLostError")
    assert "rank 0 gave up waiting in gather number 2 at test_lost_ranks.py:" in told
    assert after == after_too == [0, 1]


def test_late_rank_does_not_complete_alone(ranks: Any) -> None:
    """A rank that comes just after the other gave up does not complete alone."""

    def run() -> str:
        state = PartialState(timeout=2.0, hang_warning=0.0)
        state.gather([0])
        if state.process_index == 1:
            time.sleep(2.3)
        with pytest.raises((WaitTimeoutError, PeerLostError)) as caught:
            state.gather([1])
        return type(caught.value).__name__

    assert ranks(2).run(run) == ["WaitTimeoutError", "PeerLostError"]


def test_ranks_meet_again_after_timeouts(ranks: Any) -> None:
    """One rank gives up several times, also on opening, before the other comes."""

    def run() -> list[int]:
        state = PartialState(timeout=1.0, hang_warning=0.0)
        state.gather([0])
        if state.process_index == 1:
            time.sleep(5)
        for _ in range(12):
            try:
                return state.gather([state.process_index])
            except (WaitTimeoutError, PeerLostError):
                continue
        return []

    assert ranks(2).run(run) == [[0, 1]] * 2


def test_ranks_meet_after_failed_opening(ranks: Any) -> None:
    """Ranks whose first meeting fails meet later."""

    def run() -> list[int]:
        import os

        if os.environ["RANK"] == "1":
            time.sleep(4)
        for _ in range(12):
            try:
                return PartialState(timeout=1.0, hang_warning=0.0).gather([1])
            except (WaitTimeoutError, PeerLostError):
                continue
        return []

    assert ranks(2).run(run) == [[1, 1]] * 2


def test_barrier_waits_for_long_work(ranks: Any) -> None:
    """Limits of two seconds, and five seconds of tokenising."""

    def run() -> list[str]:
        state = PartialState(timeout=2.0, hang_warning=1.0)
        order = []
        with state.main_process_first():
            if state.is_main_process:
                time.sleep(5)
            order.append("main" if state.is_main_process else "other")
        if state.process_index == 1:
            time.sleep(3)
        state.wait_for_everyone()
        return state.gather(order)

    outcomes = ranks(2).outcomes(run)
    assert [outcome.value for outcome in outcomes] == [["main", "other"]] * 2
    assert "Missing: rank 0" in outcomes[1].output


def test_barrier_ends_on_silent_rank(ranks: Any) -> None:
    """A barrier still ends when the other shows no sign of life."""

    def run() -> str:
        state = PartialState(timeout=4.0, hang_warning=0.0)
        faults.stop_at(1, 1).reach(state.process_index, 1)
        with pytest.raises(WaitTimeoutError) as caught:
            state.wait_for_everyone()
        return str(caught.value)

    outcomes = ranks(2).outcomes(run, patience=0.2)
    assert "stopped by a signal" in outcomes[0].value


def test_first_process_exception_reaches_others(ranks: Any) -> None:
    """An exception of the process that goes first reaches the others."""

    def run() -> None:
        state = PartialState()
        with state.main_process_first():
            if state.is_main_process:
                raise FileNotFoundError("tokens.bin")

    main, other = ranks(2).outcomes(run)
    assert isinstance(main.error, FileNotFoundError)
    assert isinstance(other.error, PeerLostError)
    assert "rank 0: FileNotFoundError: tokens.bin" in str(other.error)


def test_nested_first_process_exception_reaches_others(ranks: Any) -> None:
    """The exception is told once, and the process that raised it does not wait for ranks that have gone."""

    def run() -> None:
        state = PartialState()
        with state.main_process_first(), state.local_main_process_first():
            if state.is_main_process:
                raise FileNotFoundError("tokens.bin")

    main, other = ranks(2).outcomes(run)
    assert isinstance(main.error, FileNotFoundError)
    assert isinstance(other.error, PeerLostError)
    assert "rank 0: FileNotFoundError: tokens.bin" in str(other.error)


def test_short_waits_print_nothing(ranks: Any) -> None:
    """No table is printed for waits below the limit."""

    def run() -> None:
        state = PartialState(hang_warning=5.0)
        for step in range(3):
            if state.process_index == step % 2:
                time.sleep(0.7)
            state.gather([step])

    assert [outcome.output for outcome in ranks(2).outcomes(run)] == ["", ""]


def test_ctrl_c_ends_a_wait(ranks: Any) -> None:
    def run() -> float:
        import signal
        import threading

        state = PartialState()
        if state.process_index == 1:
            time.sleep(3)
            return 0.0
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            state.wait_for_everyone()
        taken = time.monotonic() - started
        state.destroy_process_group()  # nothing is left pending
        return taken

    outcomes = ranks(2).outcomes(run)
    assert 0.3 < outcomes[0].value < 2.5
