"""A mistake between processes is an exception on every one of them that names it, and the group works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from slipstream import MismatchError, PartialState
from slipstream.distributed.current import reset
from slipstream.distributed.guard import Limits
from slipstream.distributed.scatter import scatter
from slipstream.errors import DistributedOperationException
from slipstream.utils import copy_tensor_to_devices

Act = Callable[[PartialState, int], Any]

KINDS: dict[str, tuple[Act, tuple[str, ...]]] = {
    "shape": (lambda state, me: state.reduce(torch.ones(2 + me)), ("reduce(sum)", "float32(2,)", "float32(3,)")),
    "shape of equal size": (lambda state, me: state.reduce(torch.ones((2, 3) if me else (3, 2))), ("(2, 3)", "(3, 2)")),
    "type": (lambda state, me: state.gather(torch.ones(2, dtype=torch.float32 if me else torch.float64)), ("float32", "float64")),
    "operation": (lambda state, me: state.gather(torch.ones(2)) if me else state.reduce(torch.ones(2)), ("gather", "reduce")),
    "root": (lambda state, me: state.broadcast(torch.ones(2), from_process=me % 2), ("from rank 0", "from rank 1")),
    "reduce operation": (lambda state, me: state.reduce(torch.ones(2), "max" if me else "min"), ("reduce(max)", "reduce(min)")),
    "device": (lambda state, me: state.gather(torch.ones(2, device="meta" if me else None)), ("meta device", "float32(2,)")),
    "structure": (lambda state, me: state.gather({"a": torch.ones(1)} if me else [torch.ones(1)]), ("{a: float32(1,)}", "[float32(1,)]")),
    "object size": (lambda state, me: state.broadcast_object_list([1] * (2 + me)), ("a list of 2 objects", "a list of 3 objects")),
    "receiver": (lambda state, me: state.gather(torch.ones(1), dst=me % 2), ("to rank 0", "to rank 1")),
    "tensor against text": (lambda state, me: state.gather("a" if me else torch.ones(1)), ("str", "float32(1,)")),
    "padded dimension": (lambda state, me: state.pad_across_processes(torch.ones(2, 2), dim=me % 2), ("dim=0", "dim=1")),
    "padded dimensions": (lambda state, me: state.pad_across_processes(torch.ones((2, 3, 4) if me else (2, 3))), ("(2, 3)", "(2, 3, 4)")),
    "padded scalar": (lambda state, me: state.pad_across_processes(torch.ones(()) if me else torch.ones(2)), ("float32()", "float32(2,)")),
    "padded leaf of a dict": (
        lambda state, me: state.pad_across_processes({"ids": torch.ones(2), "mask": torch.ones((2,) * (1 + me % 2))}, dim=0),
        ("mask: float32(2,)", "mask: float32(2, 2)"),
    ),
    "padded array": (lambda state, me: state.pad_across_processes(numpy.ones((2, 3) if me else 2)), ("array float64(2,)", "(2, 3)")),
    "gathered dimensions": (lambda state, me: state.gather(torch.ones((2, 3, 4) if me else (2, 3))), ("(2, 3)", "(2, 3, 4)")),
    "reduced dimensions": (lambda state, me: state.reduce(torch.ones((1, 2) if me else 2)), ("(1, 2)", "(2,)")),
    "broadcast dimensions": (lambda state, me: state.broadcast(torch.ones((1, 2) if me else 2)), ("(1, 2)", "(2,)")),
    "not to be pickled": (lambda state, me: state.gather_object((lambda: 1) if me else 1), ("could not be sent", "int")),
    "barrier against gather": (lambda state, me: state.gather(["a"]) if me else state.wait_for_everyone(), ("gather", "wait_for_everyone")),
}


@pytest.mark.parametrize("world", [2, 4])
def test_mismatches_named_on_every_rank(ranks: Any, world: int) -> None:
    """Every kind of mistake is named on every rank and the group still works."""

    def run() -> dict[str, Any]:
        state = PartialState()
        messages = {}
        for kind, (act, _) in KINDS.items():
            try:
                act(state, state.process_index)
            except DistributedOperationException as error:
                messages[kind] = str(error)
            except Exception as error:  # the rank whose data cannot be sent raises the cause itself
                messages[kind] = f"{type(error).__name__}: {error}"
            assert state.gather([state.process_index]) == list(range(world)), kind
        return messages

    for messages in ranks(world).run(run):
        for kind, (_, words) in KINDS.items():
            assert "The processes did not call the same thing" in messages[kind], (kind, messages[kind])
            assert all(word in messages[kind] for word in words), (kind, messages[kind])
            assert "test_guard.py:" in messages[kind]


def test_swapped_calls_named(ranks: Any) -> None:
    """Calls in another order are named one by one."""

    def run() -> list[str]:
        state = PartialState()
        calls = [lambda: state.gather(torch.ones(1)), lambda: state.reduce(torch.ones(1))]
        seen = []
        for call in calls if state.is_main_process else calls[::-1]:
            with pytest.raises(MismatchError) as caught:
                call()
            seen.append(str(caught.value))
        state.wait_for_everyone()
        return seen

    for seen in ranks(2).run(run):
        assert ["number 1" in seen[0], "number 2" in seen[1]] == [True, True]


def test_missed_call_named_at_next(ranks: Any) -> None:
    """`if main: gather(...)` is the mistake that users make most."""

    def run() -> str:
        state = PartialState()
        with pytest.raises(MismatchError) as caught:  # noqa: PT012 - the two ranks raise at different lines
            if state.is_main_process:
                state.gather_for_metrics(torch.ones(1))
            state.wait_for_everyone()
        assert state.gather([1]) == [1, 1]
        return str(caught.value)

    for message in ranks(2).run(run):
        assert "rank 0: gather_for_metrics float32(1,)" in message
        assert "rank 1: wait_for_everyone" in message
        assert "Rank 0 alone is at test_guard.py:" in message
        assert "is that under `if accelerator.is_main_process:`" in message


QUESTIONS = {
    0: "Rank 0 alone is at test_guard.py:{line} in run: is that under `if accelerator.is_main_process:`?",
    1: "Rank 1 alone is at test_guard.py:{line} in run: is that under a condition that is true on rank 1 alone?",
    2: "Rank 2 alone is at test_guard.py:{line} in run: is that under `if accelerator.is_last_process:`?",
}


@pytest.mark.parametrize("alone", QUESTIONS)
def test_the_condition_is_asked_for(ranks: Any, alone: int) -> None:
    """The error asks for the condition under which one rank of three makes a call alone, and names its line."""

    def run() -> tuple[str, int]:
        state = PartialState()
        with pytest.raises(MismatchError) as caught:  # noqa: PT012 - the ranks raise at different lines
            if state.process_index == alone:
                state.gather(torch.ones(1))
            state.wait_for_everyone()
        return str(caught.value), run.__code__.co_firstlineno + 4

    for message, line in ranks(3).run(run):
        assert QUESTIONS[alone].format(line=line) in message


def test_no_condition_question_at_one_line(ranks: Any) -> None:
    """Where all ranks are at one line and pass different things, nothing is said of conditions on ranks."""

    def run() -> str:
        state = PartialState()
        with pytest.raises(MismatchError) as caught:
            state.gather(torch.ones(1, 2 + state.process_index))
        return str(caught.value)

    for message in ranks(2).run(run):
        assert "is_main_process" not in message


def test_extra_call_when_other_leaves(ranks: Any) -> None:
    """An extra call at the end is named when the other leaves."""

    def run() -> str:
        state = PartialState()
        state.gather([1])
        with pytest.raises(DistributedOperationException) as caught:  # noqa: PT012 - the two ranks raise at different lines
            if state.is_main_process:
                state.gather([1])
            state.destroy_process_group()
        return str(caught.value)

    for message in ranks(2).run(run):
        assert "gather" in message
        assert "destroy_process_group" in message


def test_extra_call_when_other_ended(ranks: Any) -> None:
    """An extra call when the other process has ended is an error."""

    def run() -> None:
        state = PartialState()
        if state.is_main_process:
            state.gather([1])
        reset("end of the process")

    main, other = ranks(2).outcomes(run)
    assert other.error is None
    assert isinstance(main.error, DistributedOperationException)
    assert "rank 1 left the group after 0 collectives" in str(main.error)
    assert "If rank 0 makes this call alone: is that under `if accelerator.is_main_process:`?" in str(main.error)


def test_missed_call_never_mixes_data(ranks: Any) -> None:
    """A missed call of the same kind and shape is an error and not mixed data."""

    def run() -> tuple[str, list[int]]:
        state = PartialState()
        with pytest.raises(MismatchError) as caught:  # noqa: PT012 - the two ranks raise at different lines
            if state.is_main_process:
                state.gather(torch.ones(1))
            state.gather(torch.ones(1))
        return str(caught.value), state.gather([state.process_index])

    for message, after in ranks(2).run(run):
        lines = [line for line in message.splitlines() if "gather float32(1,) at test_guard.py:" in line]
        assert len(set(lines)) == 2, message
        assert after == [0, 1]


def test_send_and_receive_from_branches(ranks: Any) -> None:
    """Sending and waiting from two branches is right."""

    def run() -> tuple[Any, Any]:
        state = PartialState()
        if state.is_main_process:
            sent = state.broadcast(torch.ones(1))
            named = state.broadcast_object_list(["main"])
            state.wait_for_everyone()
        if not state.is_main_process:
            sent = state.broadcast(torch.zeros(1))
            named = state.broadcast_object_list([None])
            state.wait_for_everyone()
        return sent.item(), named

    assert ranks(2).run(run) == [(1.0, ["main"])] * 2


def test_collective_in_main_process_first(ranks: Any) -> None:
    """A collective inside the main processes turn is named and the ranks stay in step."""

    def run() -> tuple[str, list[int]]:
        state = PartialState()
        with pytest.raises(MismatchError) as caught, state.main_process_first():
            state.gather([1])
        return str(caught.value), state.gather([state.process_index])

    for message, after in ranks(2).run(run):
        assert "main_process_first" in message
        assert after == [0, 1]


def test_refusal_reaches_other_ranks(ranks: Any) -> None:
    """What one rank refuses reaches the others."""

    def run() -> list[bool]:
        state = PartialState()
        main = state.is_main_process
        endless: list[Any] = []
        endless.append(endless)
        refused = []
        for act in (
            lambda: state.gather("text" if main else torch.ones(1), with_gradient=True),
            lambda: state.gather(torch.ones(1, requires_grad=main), with_gradient=True),
            lambda: state.gather(endless if main else [1]),
            lambda: state.gather([1], dst=7 if main else 0),
            lambda: state.gather_object([1] if main else 1),
            lambda: copy_tensor_to_devices((lambda: 1) if main else None),
        ):
            with pytest.raises((MismatchError, TypeError, ValueError, RecursionError)):
                act()
            refused.append(state.gather([1]) == [1, 1])
        return refused

    assert ranks(2).run(run) == [[True] * 6] * 2


def test_long_structures_show_difference(ranks: Any) -> None:
    """The place where long structures differ is shown with the line."""

    def run() -> str:
        state = PartialState()
        data = {f"tensor number {number}": torch.ones(2) for number in range(300)}
        data["tensor number 250"] = torch.ones(2, dtype=torch.float64 if state.is_main_process else torch.int32)
        with pytest.raises(MismatchError) as caught:
            state.gather(data)
        return str(caught.value)

    for message in ranks(2).run(run):
        assert "tensor number 250: float64" in message
        assert "tensor number 250: int32" in message
        assert message.count("at test_guard.py:") == 2
        assert len(message) < 2000


def test_names_beyond_utf8_are_shown(ranks: Any) -> None:
    """A name that came from a file name of other bytes reaches every rank, in a table and in a failure."""

    def run() -> list[str]:
        state = PartialState()
        odd = "caf\udce9.txt"
        texts = []
        for act in (
            lambda: state.gather({odd if state.is_main_process else "cafe.txt": torch.ones(1)}),
            lambda: fail_first(state, odd),
            lambda: scatter(state._channel(), Limits(), FileNotFoundError(odd)),
        ):
            with pytest.raises((MismatchError, DistributedOperationException, FileNotFoundError)) as caught:
                act()
            texts.append(str(caught.value).replace(odd, "caf\\udce9.txt"))
            assert state.gather([1]) == [1, 1]
        return texts

    assert all("caf\\udce9.txt" in text for texts in ranks(2).run(run) for text in texts)


def fail_first(state: PartialState, name: str) -> None:
    with state.main_process_first():
        raise FileNotFoundError(name)


def test_late_difference_of_long_structure(ranks: Any) -> None:
    """The difference is shown also behind a hundred thousand characters."""

    def run() -> str:
        state = PartialState()
        data = {f"tensor number {number}": torch.ones(1, 1 + (number == 9990) * state.process_index) for number in range(9995)}
        with pytest.raises(MismatchError) as caught:
            state.gather(data)
        return str(caught.value)

    for message in ranks(2).run(run):
        assert "rank 0: gather" in message
        assert "tensor number 9990: float32(1, 1)" in message
        assert "tensor number 9990: float32(1, 2)" in message


def test_unsendable_everywhere_raises_own_error(ranks: Any) -> None:
    """What no rank can send is the users own error."""

    def run() -> str:
        state = PartialState()
        with pytest.raises(TypeError) as caught:
            state.reduce({"a": "text"})
        with pytest.raises(TypeError, match="not a whole number"):
            state.reduce(torch.tensor([1]), "mean")
        with pytest.raises(ValueError, match="write one of sum, mean"):
            state.reduce(torch.ones(1), "median")
        with pytest.raises(ValueError, match="rank 7 does not exist"):
            state.broadcast(torch.ones(1), from_process=7)
        assert state.gather([1]) == [1, 1]
        return str(caught.value)

    assert all("pass tensors, arrays or numbers" in message for message in ranks(2).run(run))


def test_drifted_weights_named(ranks: Any) -> None:
    """Weights of replicas that drifted are named by parameter and rank."""

    def run() -> str:
        torch.manual_seed(0)
        state = PartialState(debug=True)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        state.verify_replicas(model=model)
        state.expect_equal("model", model.state_dict)
        state.wait_for_everyone()
        if state.process_index == 2:
            torch.nn.init.zeros_(model[1].weight)
        with pytest.raises(MismatchError) as caught:
            state.wait_for_everyone()
        return str(caught.value)

    for message in ranks(3).run(run):
        assert "1 of 4 are not" in message
        assert "1.weight: ranks 0, 1 | rank 2" in message
        assert "0.weight" not in message


def test_drifted_random_states_named(ranks: Any) -> None:
    """Random states that drifted are named by kind."""

    def run() -> str:
        torch.manual_seed(0)
        state = PartialState()
        state.verify_random_states("torch")
        if state.is_main_process:
            torch.rand(1)
        with pytest.raises(MismatchError) as caught:
            state.verify_random_states("torch")
        return str(caught.value)

    for message in ranks(2).run(run):
        assert "random states should be the same on all processes, but 1 of 1 are not" in message
        assert "torch: rank 0 | rank 1" in message


def test_debug_compares_seeds(ranks: Any) -> None:
    """Debug notices another seed on one process."""

    def run() -> str:
        from slipstream.utils import set_seed

        state = PartialState()
        set_seed(3)
        with pytest.raises(MismatchError) as caught:
            set_seed(state.process_index)
        return str(caught.value)

    for message in ranks(2).run(run, environ={"SLIPSTREAM_DEBUG": "1"}):
        assert "the seeds should be the same" in message
