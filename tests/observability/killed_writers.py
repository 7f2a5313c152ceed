"""Writers that are killed at random moments: `python killed_writers.py FOLDER ROUNDS`.

Each round is a process that logs as fast as it can and says, in memory that it shares, how far it is; it is killed without warning, and
the next one goes on in the same run. The line FOUND of the output says what was confirmed, and what can be read.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

from slipstream.observability.trackers.local import LocalTracker


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(7)
    shared = mmap.mmap(-1, 16)
    confirmed, unreadable_meanwhile = [], 0
    for attempt in range(rounds):
        shared[:16] = struct.pack("<qq", attempt * 1_000_000_000, 0)
        parent, writer = os.getpid(), os.fork()
        if writer == 0:
            write(folder, shared, attempt, parent)
        while struct.unpack_from("<q", shared, 8) == (0,):  # until it has begun to log
            assert os.waitpid(writer, os.WNOHANG) == (0, 0), "the writer ended by itself"
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.02)
        unreadable_meanwhile += read(folder)[1]
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        confirmed.append([attempt * 1_000_000_000, struct.unpack_from("<q", shared, 0)[0]])
    steps, unreadable = read(folder)
    runs = [[step for step in steps if first <= step < first + 1_000_000_000] for first, _ in confirmed]
    whole = [found[: last - first] == list(range(first + 1, last + 1)) for found, (first, last) in zip(runs, confirmed, strict=True)]
    more = [len(found) - (last - first) for found, (first, last) in zip(runs, confirmed, strict=True)]
    lines = sum(last - first for first, last in confirmed)
    print("FOUND " + json.dumps({"whole": whole, "more": more, "unreadable": unreadable + unreadable_meanwhile, "lines": lines}))


def write(folder: Path, shared: mmap.mmap, attempt: int, parent: int) -> None:
    tracker = LocalTracker("killed", folder, name="run", resume=attempt > 0)
    tracker.start()
    first = attempt * 1_000_000_000 + 1
    for step in range(first, first + 3000):
        tracker.log({"loss": 1 / step, "lr": 0.1}, step=step)
        struct.pack_into("<qq", shared, 0, step, 1)
    while os.getppid() == parent:  # a slow machine has not killed it yet, and the file is long enough
        time.sleep(0.001)
    os._exit(1)


def read(folder: Path) -> tuple[list[int], int]:
    """The steps that can be read, and how many lines with an end cannot."""
    text = (folder / "runs" / "run" / "metrics.jsonl").read_text()
    steps, bad = [], 0
    for line in text.split("\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            bad += bool(line)
            continue
        if "values" in record:
            steps.append(record["step"])
    return steps, bad


if __name__ == "__main__":
    main()
