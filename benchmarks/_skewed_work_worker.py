"""The worker of `skewed_work.py` on every rank: the same items shared in several ways, interleaved.

An item of cost c sleeps c units, so that the cores of the machine do not matter. A round begins with a barrier and ends when the last
process has all results. No way of sharing can be faster than the total time of the items divided by the processes, or than the
longest item: that is the ideal of the round. It writes the seconds of every round and its ideal by contender, and the cost of a request
to the queue and of a tiny item.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import PartialState
from slipstream.distributed.current import current
from slipstream.distributed.work_queue.queue import WorkQueue

UNIT = 0.005
TINY = 20_000


def costs(count: int, seed: int) -> list[float]:
    """Return costs from 1 to 50 with a heavy tail: half of them below 2, one in forty at the upper end."""
    draw = random.Random(seed)
    return [min(50.0, draw.paretovariate(1.0)) for _ in range(count)]


TOOK: list[float] = []
"""What the items of this process have taken in this round."""


def work(cost: float) -> float:
    start = time.perf_counter()
    time.sleep(cost * UNIT)
    TOOK.append(time.perf_counter() - start)
    return cost


def static(state: PartialState, items: list[float]) -> list[float]:
    with state.split_between_processes(items) as mine:
        results = [work(cost) for cost in mine]
    gathered: list[float] = state.gather(results)
    return gathered


def dynamic(state: PartialState, items: list[float]) -> list[float]:
    return state.map_across_processes(work, items)


def dynamic_by_cost(state: PartialState, items: list[float]) -> list[float]:
    return state.map_across_processes(work, items, key=float)


CONTENDERS: dict[str, Callable[[PartialState, list[float]], list[float]]] = {
    "static": static,
    "dynamic": dynamic,
    "dynamic, key": dynamic_by_cost,
}


def timed(state: PartialState, act: Callable[[], Any]) -> float:
    """Return the seconds until the last process is done."""
    state.wait_for_everyone()
    start = time.perf_counter()
    act()
    return max(state.gather([time.perf_counter() - start]))


def one_round(state: PartialState, name: str, items: list[float]) -> tuple[float, float]:
    """Return the makespan and its ideal."""
    TOOK.clear()
    results: list[float] = []
    seconds = timed(state, lambda: results.extend(CONTENDERS[name](state, items)))
    assert results == items, f"{name} lost the order"
    took = state.gather_object(list(TOOK))
    return seconds, max(sum(took) / state.num_processes, max(took))


def round_trip(state: PartialState) -> float:
    """Return the seconds of one claim while all processes claim at once."""
    queue = WorkQueue(current().store, "round-trip", state.process_index, state.num_processes)
    state.wait_for_everyone()
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        queue.take(1)
        times.append(time.perf_counter() - start)
    queue.leave(early=False)
    return max(state.gather([statistics.median(times)]))


def identity(value: int) -> int:
    return value


def main(output: Path, rounds: int, count: int) -> None:
    state = PartialState()
    names = list(CONTENDERS)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    shuffle = random.Random(0).shuffle
    for number in range(rounds):
        shuffle(names)
        items = costs(count, seed=number)
        for name in names:
            times[name].append(one_round(state, name, items))
    tiny = [timed(state, lambda: state.map_across_processes(identity, range(TINY))) / TINY for _ in range(rounds)]
    found = {"times": times, "round_trip": round_trip(state), "tiny": min(tiny)}
    if state.is_main_process:
        output.write_text(json.dumps(found))
    state.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
