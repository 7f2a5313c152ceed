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
from slipstream.distributed.guard import Limits, SingleProcessChannel
from slipstream.distributed.heartbeat import StackSignal, read_stack_by_signal


class Recorder(SingleProcessChannel):
    """A channel of one process that keeps where it was called."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    def turn(self, call: Any, limits: Limits, *, patient: bool = False) -> SingleProcessChannel:
        self.sites.append(call.site)
        return self


def test_a_collective_in_a_backward_pass_is_shown_at_the_line_that_called_backward() -> None:
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
        return read_stack_by_signal({**signal.note(), "pid": os.getpid()})
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
def test_a_deep_library_does_not_push_out_the_lines_of_the_user(look: Any) -> None:
    frames = look_from_a_library(look)
    assert any("in look_from_a_library" in line for line in frames), frames
    assert any("in test_a_deep_library" in line for line in frames), frames
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
    print("by signal", *read_stack_by_signal({**signal.note(), "pid": os.getpid()}), sep="\\n")

work()
"""


def test_what_runs_the_script_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "cProfile", "-o", str(tmp_path / "profile"), str(script)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    inside, _, signalled = output.partition("by signal\n")
    assert [line.rpartition(" in ")[2] for line in inside.splitlines()] == ["<module>", "work"], output
    if hasattr(os, "memfd_create"):
        assert signalled.startswith(f'File "{script}", line 12, in <module>\n'), output
        assert "cProfile" not in signalled
