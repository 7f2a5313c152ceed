"""The worker of `growth_ranks.py` on every rank: ours and bare torch in turns. Rank 0 writes the best seconds per call as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _collectives_worker import all_gather_single, seconds

from slipstream import PartialState


def main() -> None:
    output, rounds, calls = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    state = PartialState(hang_warning=0)
    entry, kept = torch.full((16,), float(state.process_index)), torch.empty(16 * state.num_processes)
    contenders: dict[str, Callable[[], Any]] = {
        "gather": lambda: state.gather(entry),
        "gather, torch": lambda: all_gather_single(kept, entry),
        "barrier": state.wait_for_everyone,
        "barrier, torch": dist.barrier,
    }
    all_gather_single(kept, entry)
    assert torch.equal(state.gather(entry), kept)
    found = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, call in contenders.items():
            found[name] = min(found[name], seconds(call, calls))
    if state.is_main_process:
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
