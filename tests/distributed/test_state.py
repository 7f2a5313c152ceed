"""State objects are views of one runtime: any number of them, each with its own settings, and a group that reopens by itself."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Accelerator, AcceleratorState, DistributedType, PartialState
from slipstream.distributed.current import current, current_or_none, reset
from slipstream.distributed.state import is_initialized
from slipstream.errors import ConfigError, SlipstreamError, StateError


def test_one_process_knows_itself() -> None:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.is_main_process, state.is_local_main_process, state.is_last_process) == (True, True, True)
    assert (state.use_distributed, state.distributed_type, state.backend) == (False, DistributedType.NO, None)
    assert state.device == state.default_device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


def test_several_processes_know_themselves(ranks: Any) -> None:
    def run() -> Any:
        state = PartialState()
        assert torch.distributed.is_initialized(), "torch's own group is open for DDP and for calls of the user's own"
        return state.process_index, state.is_main_process, state.is_last_process, state.distributed_type.value, state.backend

    assert ranks(3, device="cpu").run(run) == [
        (0, True, False, "MULTI_CPU", "gloo"),
        (1, False, False, "MULTI_CPU", "gloo"),
        (2, False, True, "MULTI_CPU", "gloo"),
    ]


def test_group_reopens_repeatedly(ranks: Any) -> None:
    """The group closes and reopens any number of times."""

    def run() -> Any:
        state = PartialState()
        for round_number in range(20):
            assert state.gather([state.process_index]) == [0, 1]
            state.destroy_process_group()
            assert not torch.distributed.is_initialized()
            if round_number % 3 == 0:
                state = AcceleratorState() if round_number % 2 else PartialState()
        threads = [thread.name for thread in threading.enumerate()]
        return threads.count("slipstream-heartbeat"), current().generation

    for heartbeats, generation in ranks(2).run(run):
        assert heartbeats == 1
        assert generation >= 20


def test_short_life(ranks: Any, tmp_path: Path) -> None:
    """A process that ends right after it opened the group waits until the others have connected to it."""
    connected = tmp_path / "connected"

    def run() -> bool:
        state = PartialState()
        state.destroy_process_group()
        if state.is_main_process:  # slow to connect
            connect = torch.distributed.init_process_group

            def slowly(*args: Any, **kwargs: Any) -> None:
                connect(*args, **kwargs)
                time.sleep(0.5)
                connected.touch()

            torch.distributed.init_process_group = slowly
            try:
                PartialState()
            finally:
                torch.distributed.init_process_group = connect
        else:
            PartialState()
        current().close("end of the process")
        return connected.exists()

    assert ranks(2).run(run) == [True, True]


def test_closed_group_leaks_nothing(ranks: Any) -> None:
    """A closed group leaks no files threads or memory."""

    def run() -> tuple[int, int]:
        state = PartialState()

        def rounds(count: int) -> int:
            for _ in range(count):
                state.gather([1])
                state.destroy_process_group()
            return len(os.listdir("/proc/self/fd"))

        return rounds(5), rounds(20)

    for before, after in ranks(2).run(run):
        assert after <= before + 1


def test_settings_stay_per_object() -> None:
    """The settings of one object do not change anothers."""
    first = AcceleratorState(mixed_precision="bf16", timeout=5)
    second = AcceleratorState(mixed_precision="fp16", timeout=timedelta(seconds=9), hang_warning=1)
    third = PartialState()
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "fp16")
    assert (first._limits.timeout, second._limits.timeout, third._limits.timeout) == (5, 9, 1800)
    assert first.process_index == second.process_index == third.process_index


def test_accelerators_are_independent(ranks: Any) -> None:
    """Twenty accelerators in a row are independent."""

    def run() -> list[Any]:
        made = [Accelerator(mixed_precision=["no", "bf16"][number % 2]) for number in range(20)]
        return [accelerator.mixed_precision for accelerator in made] + [made[3].gather([made[7].process_index])]

    assert ranks(2).run(run) == [["no", "bf16"] * 10 + [[0, 1]]] * 2


def test_unknown_arguments_and_values_are_refused() -> None:
    with pytest.raises(TypeError, match="unknown argument timeuot"):
        PartialState(timeuot=3)
    with pytest.raises(ConfigError, match="mixed_precision"):
        AcceleratorState(mixed_precision="fp64")
    with pytest.raises(ConfigError, match="timeout"):
        PartialState(timeout=-1)


def test_no_state_is_made_by_looking() -> None:
    reset()
    assert current_or_none() is None
    assert not is_initialized()
    PartialState()
    assert is_initialized()


def test_forked_child_has_own_runtime() -> None:
    """A forked child does not use its parents runtime."""
    runtime = current()
    child = os.fork()
    if child == 0:
        os._exit(0 if current_or_none() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert current() is runtime


def test_existing_torch_group_used(ranks: Any) -> None:
    """A group of the users own is taken over."""

    def run() -> Any:
        torch.distributed.init_process_group("gloo")
        state = PartialState()
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        gathered = state.gather([state.process_index])
        state.destroy_process_group()
        assert not torch.distributed.is_initialized()
        return total.item(), gathered, state.gather([1])

    assert ranks(2).run(run) == [(2.0, [0, 1], [1, 1])] * 2


def test_decorators_select_processes(ranks: Any) -> None:
    """Decorators run functions on the right processes."""

    def run() -> list[Any]:
        state = PartialState()
        return [
            state.on_main_process(lambda: "main")(),
            state.on_last_process(lambda: "last")(),
            state.on_process(lambda: "one", process_index=1)(),
            state.on_process(process_index=1)(lambda: "decorated")(),
            state.on_local_main_process(lambda: "local main")(),
            state.on_local_process(lambda: "local", local_process_index=1)(),
        ]

    assert ranks(2).run(run) == [["main", None, None, None, "local main", None], [None, "last", "one", "decorated", None, "local"]]


def test_print_once_for_each_machine(ranks: Any) -> None:
    outcomes = ranks(2).outcomes(lambda: PartialState().print("hello"))
    assert [outcome.output.strip() for outcome in outcomes] == ["hello", ""]


def test_trigger_reaches_all(ranks: Any) -> None:
    """A trigger of one process reaches all and is lowered."""

    def run() -> list[bool]:
        state = PartialState()
        seen = [state.check_trigger()]
        if state.process_index == 1:
            state.set_trigger()
        return [*seen, state.check_trigger(), state.check_trigger()]

    assert ranks(2).run(run) == [[False, True, False]] * 2


def test_the_main_process_goes_first(ranks: Any) -> None:
    def run() -> list[tuple[float, int]]:
        state = PartialState()
        with state.main_process_first():
            if state.is_main_process:
                time.sleep(0.3)
            when = time.time()
        with state.local_main_process_first():
            pass
        return sorted(state.gather([(when, state.process_index)]))

    for order in ranks(3).run(run):
        assert order[0][1] == 0


def test_blocks_that_run_first_can_be_nested(ranks: Any) -> None:
    """The ranks that wait before the outer block meet those that end the inner one."""

    def run() -> list[tuple[float, int]]:
        state = PartialState()
        with state.main_process_first(), state.local_main_process_first():
            if state.is_main_process:
                time.sleep(0.3)
            when = time.time()
        return sorted(state.gather([(when, state.process_index)]))

    for order in ranks(3).run(run):
        assert order[0][1] == 0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 10, 37])
def test_split_results_in_input_order(ranks: Any, world: int, padding: bool, count: int) -> None:
    """Results of split work come back in the order of the input."""

    def run() -> Any:
        state = PartialState()
        wanted = list(range(count))
        seen = []
        for inputs in (wanted, tuple(wanted), range(count), torch.arange(count), {"x": wanted}, iter(wanted)):
            with state.split_between_processes(inputs, apply_padding=padding) as mine:
                part = mine["x"] if isinstance(mine, dict) else mine
                results = [int(item) * 2 for item in part]
            seen.append(state.gather(results) == [item * 2 for item in wanted])
            seen.append(state.gather_for_metrics(torch.tensor(results, dtype=torch.int64)).tolist() == [item * 2 for item in wanted])
        return seen

    for seen in ranks(world).run(run):
        assert seen == [True] * 12


def test_unrelated_gather_keeps_rows(ranks: Any) -> None:
    """Other gathers after padded work keep their rows."""

    def run() -> Any:
        state = PartialState()
        with state.split_between_processes(range(3), apply_padding=True) as mine:
            results = list(mine)
        return state.gather(results), state.gather([results]), state.gather(torch.tensor(1.0)).shape[0], state.gather(["one"])

    assert ranks(2).run(run) == [([0, 1, 2], [[0, 1], [2, 2]], 2, ["one", "one"])] * 2


def test_missing_rendezvous_address_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processes meet has to be known."""
    monkeypatch.setenv("RANK", "0")
    reset()
    with pytest.raises((ConfigError, StateError), match="WORLD_SIZE"):
        PartialState()


def test_loader_worker_takes_no_part(ranks: Any) -> None:
    """A worker of a data loader knows its rank and takes no part."""

    class Items(torch.utils.data.Dataset[str]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> str:
            state = PartialState()
            try:
                state.gather([1])
            except StateError as error:
                return f"{state.process_index} {'child of process' in str(error)}"
            return "took part"

    def run() -> Any:
        state = PartialState()
        forked = torch.utils.data.DataLoader(Items(), num_workers=1, batch_size=None)
        seen = list(forked)
        return seen, state.gather([state.process_index])

    assert ranks(2).run(run) == [(["0 True"] * 2, [0, 1]), (["1 True"] * 2, [0, 1])]


def test_inherited_state_takes_no_part(ranks: Any) -> None:
    """In a forked child, an object of its parent neither uses nor closes the group, and no connection is kept open."""

    def use_in_child(state: PartialState) -> int:
        connections = [peer.connection for peer in state._channel().transport._peers.values()]
        child = os.fork()
        if child == 0:
            try:
                state.wait_for_everyone()
            except StateError as error:
                state._runtime.abandon("child", "of a rank")
                os._exit(0 if "child of process" in str(error) and all(peer.fileno() == -1 for peer in connections) else 2)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def run() -> Any:
        state = PartialState()
        state.wait_for_everyone()
        ended = use_in_child(state) if state.is_main_process else None
        return ended, state.gather([state.process_index])

    assert ranks(2).run(run) == [(0, [0, 1]), (None, [0, 1])]


def test_child_process_does_not_claim_rank(ranks: Any) -> None:
    """A fresh child process does not take its parents rank."""

    def run() -> Any:
        import subprocess
        import sys

        state = PartialState()
        program = "from slipstream import PartialState; print(PartialState().process_index)"
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        return seen, state.gather([state.process_index])

    assert ranks(2).run(run, timeout=60) == [("0", [0, 1]), ("1", [0, 1])]


def test_concurrent_threads_open_one_group(ranks: Any) -> None:
    """Threads that need the group at once open one."""

    def run() -> int:
        state = PartialState()
        state.destroy_process_group()
        before = current().generation
        seen: list[Any] = []
        threads = [threading.Thread(target=lambda: seen.append(state._channel())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(channel) for channel in seen}) == 1
        return current().generation - before

    assert ranks(2).run(run) == [1, 1]


def test_impossible_group_settings_refused(ranks: Any) -> None:
    """Settings of the group that cannot be had are refused."""

    def run() -> list[int]:
        for wrong in ({"backend": "nonsense"}, {"init_method": "rubbish"}):
            with pytest.raises(ConfigError):
                PartialState(**wrong)
        state = PartialState()
        with pytest.raises(ConfigError, match="open with 'gloo'"):
            PartialState(backend="cpu:gloo")
        return state.gather([1])

    assert ranks(2, device="cpu").run(run) == [[1, 1]] * 2
    with pytest.raises(ConfigError, match="nonsense"):
        PartialState(backend="nonsense")


def test_split_objects_in_input_order(ranks: Any) -> None:
    """Objects come back in order and without padding too."""

    def run() -> Any:
        state = PartialState()
        with state.split_between_processes(["a", "b", "c"], apply_padding=True) as mine:
            padded = list(mine)
        first = state.gather_object(padded), state.gather_for_metrics(padded, use_gather_object=True)
        with state.split_between_processes(letter for letter in "abcd") as mine:
            dealt = list(mine)
        return *first, state.gather_object(dealt)

    assert ranks(2).run(run) == [(["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c", "d"])] * 2


def test_gather_elsewhere_is_not_reordered(ranks: Any) -> None:
    """Gathers of other functions are not taken for results of the split."""

    def run() -> Any:
        state = PartialState()

        def work() -> Any:
            with state.split_between_processes(range(3), apply_padding=True) as mine:
                return state.gather(list(mine))

        results = work()
        return results, state.gather([10, 11])

    assert ranks(2).run(run) == [([0, 1, 2], [10, 11, 10, 11])] * 2


def test_early_stop_keeps_rank_order(ranks: Any) -> None:
    """A rank that stops early does not change the order on itself alone."""

    def run() -> Any:
        state = PartialState()
        taken = []
        with state.split_between_processes(number for number in range(4)) as mine:
            for item in mine:
                taken.append(item)
                if state.is_main_process and len(taken) == 2:
                    break
        return state.gather(taken)

    assert ranks(2).run(run) == [[0, 2, 1, 3]] * 2


def test_what_is_not_there_yet_says_so() -> None:
    with pytest.raises(AttributeError, match="lomo_backward is not in this version"):
        Accelerator().lomo_backward(None, 0.1)
    with pytest.raises(AttributeError, match="no attribute 'perpare'"):
        Accelerator().perpare  # noqa: B018
    assert not hasattr(Accelerator(), "lomo_backward")


def test_abandon_reason_reaches_waiters(ranks: Any) -> None:
    """A rank that ends the generation says why to those who wait."""

    def run() -> str:
        state = AcceleratorState(cpu=True)
        state.wait_for_everyone()
        if state.process_index == 0:
            time.sleep(0.3)  # until the other one waits
            state.runtime.abandon("a step", "rank 0 ran out of memory")
            return ""
        try:
            state.gather(torch.ones(1))
        except SlipstreamError as error:
            return str(error)
        return "nothing was raised"

    assert "rank 0 ran out of memory" in ranks(2).run(run)[1]
