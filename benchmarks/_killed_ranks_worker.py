"""The worker of `killed_ranks.py` on every rank: collectives of all kinds in an endless loop, and a record of the exception that ends them.

The first argument is the folder of the records: `up-RANK` holds the process id once the group is open, `raised-RANK` the time and
the message of the exception. The worker then fails with it, like a script that catches nothing.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from slipstream import PartialState


def note(path: Path, **facts: object) -> None:
    """Write a record atomically: the reader may look at any moment."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(facts))
    part.rename(path)


def work(state: PartialState) -> None:
    """Run one step: some computation, and each of the collectives, small and too large for the header."""
    time.sleep(random.random() * 0.02)
    state.gather(torch.ones(8))
    state.reduce({"loss": torch.ones(()), "hits": torch.ones(4)})
    state.gather_object([{"id": state.process_index}])
    state.broadcast(torch.ones(20_000))
    state.gather(torch.ones(50_000))
    state.reduce(torch.ones(50_000))
    state.wait_for_everyone()


def main(folder: Path) -> None:
    state = PartialState()
    state.wait_for_everyone()
    note(folder / f"up-{state.process_index}", pid=os.getpid())
    try:
        while True:
            work(state)
    except BaseException as error:
        note(folder / f"raised-{state.process_index}", when=time.time(), type=type(error).__name__, message=str(error))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
