"""The line that a report shows is the user's own, whatever stands between it and us."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.distributed.call_site import user_frames
from slipstream.distributed.collectives import gather_with_gradient
from slipstream.distributed.guard import Channel, GuardedCall, Limits
from slipstream.distributed.heartbeat import StackSignal, read_stack_by_signal


class Recorder(Channel):
    """A channel of one process that keeps where it was called."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    def guard(self, call: Any, limits: Limits, *, patient: bool = False) -> GuardedCall:
        self.sites.append(call.site)
        return GuardedCall()


def test_call_site_in_backward_pass() -> None:
    """A collective in a backward pass is shown at the line that called backward."""
    channel = Recorder()
    rows = torch.ones(2, requires_grad=True)
    joined = gather_with_gradient(channel, Limits(), rows)
    line = sys._getframe().f_lineno - 1
    joined.sum().backward()
    torch.autograd.grad(gather_with_gradient(channel, Limits(), rows).sum(), rows)
    here = sys._getframe().f_code.co_name
    lines = [line, line + 2, line + 3, line + 3]
    assert channel.sites == [f"test_call_site.py:{number} in {here}" for number in lines]


class Probe:
    """Calls a function from deep inside the standard library."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def __deepcopy__(self, memo: Any) -> Any:
        return self.look()


def look_from_a_library(look: Any) -> Any:
    """What `look` gives where twenty frames of a library lie between it and here."""
    value: Any = Probe(look)
    for _ in range(10):
        value = [value]
    value = copy.deepcopy(value)
    while isinstance(value[0], list) and isinstance(value[0][0], list):
        value = value[0]
    return value[0]


def by_signal() -> list[str]:
    signal = StackSignal()
    signal.install()
    try:
        return read_stack_by_signal({**signal.record(), "pid": os.getpid()})
    finally:
        signal.remove()


@pytest.mark.parametrize(
    "look",
    [
        lambda: user_frames(sys._getframe()),
        pytest.param(by_signal, marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="stacks by signal are for Linux")),
    ],
    ids=["from inside", "by signal"],
)
def test_user_lines_survive_deep_library(look: Any) -> None:
    """A deep library does not push out the lines of the user."""
    frames = look_from_a_library(look)
    assert any("in look_from_a_library" in line for line in frames), frames
    assert any("in test_user_lines_survive_deep_library" in line for line in frames), frames
    assert not any("site-packages" in line for line in frames), frames
    assert len(frames) <= 11


SCRIPT = """
import os, sys
from slipstream.distributed.call_site import user_frames
from slipstream.distributed.heartbeat import StackSignal, read_stack_by_signal

def work():
    print(*user_frames(sys._getframe()), sep="\\n")
    signal = StackSignal()
    signal.install()
    print("by signal", *read_stack_by_signal({**signal.record(), "pid": os.getpid()}), sep="\\n")

work()
"""


def test_runner_frames_left_out(tmp_path: Path) -> None:
    """What runs the script is left out."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "cProfile", "-o", str(tmp_path / "profile"), str(script)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    inside, _, signalled = output.partition("by signal\n")
    assert [line.rpartition(" in ")[2] for line in inside.splitlines()] == ["<module>", "work"], output
    if hasattr(os, "memfd_create"):
        assert signalled.startswith(f'File "{script}", line 12, in <module>\n'), output
        assert "cProfile" not in signalled


def reduce_in_a_bar() -> list[int]:
    """Reduce tensors that a bar asks for, which only rank 0 shows."""
    import torch
    import tqdm

    from slipstream import PartialState

    state = PartialState()
    with open("/dev/null", "w") as nowhere:
        bar = tqdm.tqdm(map(state.reduce, [torch.tensor(1), torch.tensor(2)]), disable=not state.is_main_process, file=nowhere)
        return [int(total) for total in bar]


def test_bar_on_the_main_process_alone(ranks) -> None:
    """A bar that is disabled takes its items at another line of its own than one that is shown; that is no mismatch."""
    assert ranks(2).run(reduce_in_a_bar) == [[2, 4], [2, 4]]
