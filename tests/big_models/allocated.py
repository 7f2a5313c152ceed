"""The most memory that something allocates at a time, by the account of torch's own allocator, in a process that does nothing else.

Run as a program it is that process: `allocated.py MODULE:FUNCTION ARGUMENT ...` calls the function with each argument, in a fork for each,
and measures what the function gave back. A process of its own, because torch keeps its table of blocks for as long as a process lives, and
takes blocks of earlier measurements, at the same addresses, for those of later ones; and because the garbage of other tests would count.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def most_allocated(setup: str, *arguments: str) -> dict[str, int]:
    """For each argument, the most bytes that `setup(argument)()` has allocated at a time; `setup` is written `module:function`."""
    folder = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), *sys.path])}
    command = [sys.executable, "-W", "ignore", __file__, setup, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(run: Callable[[], object]) -> int:
    gc.collect()
    gc.disable()  # when it comes depends on what ran before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    roots: Any = recorded.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    totals = [event.extra_fields.total_allocated for event in _all(roots) if event.tag == _EventType.Allocation]
    return max(totals)  # counted by the allocator itself: the order of events in time does not matter


def _all(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def _in_a_fork(make: Callable[[str], Callable[[], object]], argument: str) -> int:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(_measured(make(argument))).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0, f"{argument} could not be measured"
    return int(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    module, _, function = sys.argv[1].partition(":")
    found = getattr(importlib.import_module(module), function)
    print(json.dumps({argument: _in_a_fork(found, argument) for argument in sys.argv[2:]}))
