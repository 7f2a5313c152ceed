"""`slipstream watch` with eight runs of 100,000 points, while more points arrive: its memory and response times.

    python benchmarks/watch.py [--quick] [--month] [--json FILE]

Each run has a file of 100,000 lines with two values each and 4,000 seconds of a ledger of four ranks; during the measurement every run gets
a hundred lines a second more, a page listens to the events, and views of all runs are requested in turn: whole ones, and zoomed
curves. Goals:

- memory of the process, after it has read everything and answered    at most 200 MB
- an answer, p99                                                      at most 100 ms

`--month` opens one run of 10,000,000 lines, with the same goals for its answers and its memory.
The first answer shows what was read within a tenth of a second; the page says how much that is, and shows more every two seconds.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from figures import Figure, options, report

RUNS, POINTS, RANKS = 8, 100_000, 4
PHASES = ("data", "forward", "backward", "communication", "waiting", "optimizer", "checkpoint", "evaluation", "other")


def line(step: int) -> str:
    values = {"train/loss": 3.0 / (1 + step / 5000) + random.random() / 10, "train/learning_rate": 1e-3 * (1 - step / 1e6)}
    return json.dumps({"step": step, "time": 1.7e9 + step / 50, "values": values}, separators=(",", ":")) + "\n"


def make(folder: Path, points: int) -> None:
    folder.mkdir(parents=True)
    info = {"format": "slipstream run", "version": 1, "name": folder.name, "project": "bench", "started": 1.7e9, "ended": None}
    (folder / "run.json").write_text(json.dumps({**info, "state": "running"}))
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(map(line, range(points)))
    with open(folder / "ledger.jsonl", "w") as file:
        for second in range(4000):
            phases = {name: [round(random.random() / 9, 6) for _ in range(RANKS)] for name in PHASES}
            memory = {"host": [10**9] * RANKS, "device": None}
            interval = {"time": 1.7e9 + second, "seconds": 1.0, "first": second * 25, "last": second * 25 + 24, "steps": 25, "samples": 800}
            file.write(json.dumps({**interval, "phases": phases, "slowest": [7, 6, 6, 6], "memory": memory}) + "\n")


def grow(folders: list[Path], points: int, stop: threading.Event) -> None:
    files = [os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND) for folder in folders]
    step = points
    while not stop.wait(0.05):
        for file in files:
            os.write(file, "".join(line(step + index) for index in range(5)).encode())
        step += 5
    for file in files:
        os.close(file)


def listen(port: int, stop: threading.Event, heard: list[int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    while not stop.is_set() and (text := answer.readline()):
        heard[0] += text.startswith(b"data: ")
    connection.close()


def ask(connection: http.client.HTTPConnection, path: str) -> tuple[float, int]:
    before = time.perf_counter()
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    size = len(connection.getresponse().read())
    return time.perf_counter() - before, size


@contextmanager
def watching(name: str) -> Iterator[tuple[psutil.Process, int]]:
    """Start the command; return its process and its port."""
    watch = subprocess.Popen([sys.executable, "-m", "slipstream", "watch", name, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert watch.stdout is not None
        yield psutil.Process(watch.pid), int(watch.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
    finally:
        watch.terminate()
        watch.wait()


@contextmanager
def growing(folders: list[Path], points: int, port: int) -> Iterator[list[int]]:
    """Let points arrive, and a page listen, during the block; return the number of messages so far."""
    stop, heard = threading.Event(), [0]
    threads = [threading.Thread(target=grow, args=(folders, points, stop)), threading.Thread(target=listen, args=(port, stop, heard))]
    for thread in threads:
        thread.start()
    try:
        yield heard
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ask_in_turns(connection: http.client.HTTPConnection, folders: list[Path], turns: int, step: int) -> tuple[list[float], int]:
    """Ask for whole views and for zoomed curves; return the sorted times, and the size of the largest answer."""
    times, sizes = [], []
    for turn in range(turns):
        for folder in folders:
            part = "" if turn % 3 else f"&low={turn * step}&high={turn * step + 20 * step}&only=series"
            took, size = ask(connection, f"/api/view?run={folder.name}{part}")
            times.append(took)
            sizes.append(size)
        time.sleep(0.1)
    return sorted(times), max(sizes)


def answers(what: str, times: list[float], size: int, more: str = "", goal: float | None = 100.0) -> Figure:
    spread = f"p50 {times[len(times) // 2] * 1000:.0f} ms, {len(times)} answers of {size // 1000} KB{more}"
    return Figure(what, times[int(len(times) * 0.99)] * 1000, "ms", goal=goal, spread=spread)


def measure(quick: bool) -> list[Figure]:
    """Start the command, send requests, and return the figures."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "runs" / f"run-{number}" for number in range(RUNS)]
        make(folders[0], POINTS)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        with watching(name) as (process, port):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            first = [read_whole(connection, folder) for folder in folders]
            with growing(folders, POINTS, port) as heard:
                before = sum(process.cpu_times()[:2])
                times, size = ask_in_turns(connection, folders, 20 if quick else 60, 1000)
                busy = (sum(process.cpu_times()[:2]) - before) / len(times)
                memory = process.memory_info().rss / 1e6
            connection.close()
    return [
        Figure(f"memory with {RUNS} runs of {POINTS:,} points (two curves each)", memory, "MB", goal=200.0),
        answers("an answer while points arrive, p99", times, size, f", {heard[0]} messages"),
        Figure("processor time for each answer, reading and telling news included", busy * 1000, "ms"),
        Figure("until a run of 100,000 points is read and answered, mean", sum(first) / len(first), "s"),
    ]


def read_whole(connection: http.client.HTTPConnection, folder: Path) -> float:
    """Return the seconds until a view has all of a run."""
    before = time.perf_counter()
    while True:
        connection.request("GET", f"/api/view?run={folder.name}")
        if json.loads(connection.getresponse().read()).get("read", 1) == 1:
            return time.perf_counter() - before
        time.sleep(0.05)


# -- a month ----------------------------------------------------------------------------------------------------------

MONTH = 10_000_000


def measure_month(quick: bool) -> list[Figure]:
    """A run folder with the lines of a month: what the first answer takes, those while it is read, those afterwards, and memory."""
    lines = MONTH // 10 if quick else MONTH
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs" / "month"
        make(folder, lines)
        with watching(name) as (process, port):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            begin = time.perf_counter()
            first = ask(connection, "/api/view?run=month")[0]
            meanwhile, peak = [], 0
            while True:
                took = time.perf_counter()
                connection.request("GET", "/api/view?run=month")
                view = json.loads(connection.getresponse().read())
                meanwhile.append(time.perf_counter() - took)
                peak = max(peak, process.memory_info().rss)
                if view["read"] == 1:
                    break
                time.sleep(0.25)
            whole = time.perf_counter() - begin
            with growing([folder], lines, port) as heard:
                times, size = ask_in_turns(connection, [folder], 50 if quick else 400, lines // 100)
            peak = max(peak, process.memory_info().rss)
            connection.close()
        assert view["series"]["train/loss"]["count"] >= lines
    meanwhile.sort()
    return [
        Figure(f"a run of {lines:,} lines: first answer", first * 1000, "ms", goal=500.0),
        answers("the same: an answer while it is being read, p99", meanwhile, size, goal=None),
        answers("the same: an answer while points arrive, p99", times, size, f", {heard[0]} messages"),
        Figure("the same: until all of it is shown", whole, "s", spread=f"{whole / lines * 1e6:.1f} us for a line"),
        Figure("the same: most memory", peak / 1e6, "MB", goal=200.0),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--month", action="store_true", help="one run of 10,000,000 lines instead (with --quick, a tenth of them)")
    given = parser.parse_args()
    if given.month:
        report("watch, a month", measure_month(given.quick), given)
    else:
        report("watch", measure(given.quick), given)


if __name__ == "__main__":
    main()
