"""The worker of `false_alarms.py` on every rank: small collectives with random pauses, some of them long, for a given time.

Rank 0 decides when to stop and prints the number of calls.
"""

from __future__ import annotations

import random
import sys
import time

import torch

from slipstream import PartialState


def pause(longest: float) -> float:
    """Pause: usually not at all or briefly, sometimes up to the longest pause."""
    return random.choices([0.0, random.uniform(0, 0.02), random.uniform(0, longest)], weights=[60, 38, 2])[0]


def main(seconds: float, longest: float) -> None:
    state = PartialState()
    random.seed(state.process_index)
    start = time.monotonic()
    calls = 0
    while True:
        time.sleep(pause(longest))
        state.gather(torch.ones(4))
        time.sleep(pause(longest))
        state.reduce({"loss": torch.ones(()), "hits": torch.ones(4)})
        time.sleep(pause(longest))
        state.wait_for_everyone()
        over = state.gather_object([time.monotonic() - start > seconds])[0]
        calls += 4
        if over:
            break
    if state.is_main_process:
        print(calls)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
