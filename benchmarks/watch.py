"""`slipstream watch` with eight runs of 100,000 points, while more points arrive: its memory and response times.

    python benchmarks/watch.py [--quick] [--json FILE]

Each run has a file of 100,000 lines with two values each and 4,000 seconds of a ledger of four ranks; during the measurement every run gets
a hundred lines a second more, a page listens to the events, and views of all runs are requested in turn: whole ones, and zoomed
curves. Goals:

- memory of the process, after it has read everything and answered    at most 200 MB
- an answer, p99                                                      at most 100 ms
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


def measure(quick: bool) -> list[Figure]:
    """Start the command, send requests, and return the figures."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "runs" / f"run-{number}" for number in range(RUNS)]
        make(folders[0], POINTS)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        watch = subprocess.Popen([sys.executable, "-m", "slipstream", "watch", name, "--port", "0"], stdout=subprocess.PIPE, text=True)
        stop, heard = threading.Event(), [0]
        threads: list[threading.Thread] = []
        try:
            assert watch.stdout is not None
            port = int(watch.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            first = [ask(connection, f"/api/view?run={folder.name}")[0] for folder in folders]
            threads += [
                threading.Thread(target=grow, args=(folders, POINTS, stop)),
                threading.Thread(target=listen, args=(port, stop, heard)),
            ]
            for thread in threads:
                thread.start()
            times, sizes = [], []
            before = sum(psutil.Process(watch.pid).cpu_times()[:2])
            for turn in range(20 if quick else 60):
                for folder in folders:
                    part = "" if turn % 3 else f"&low={turn * 1000}&high={turn * 1000 + 20000}&only=series"
                    took, size = ask(connection, f"/api/view?run={folder.name}{part}")
                    times.append(took)
                    sizes.append(size)
                time.sleep(0.1)
            busy = (sum(psutil.Process(watch.pid).cpu_times()[:2]) - before) / len(times)
            memory = psutil.Process(watch.pid).memory_info().rss / 1e6
            connection.close()
        finally:
            stop.set()
            watch.terminate()
            watch.wait()
            for thread in threads:
                thread.join()
    times.sort()
    spread = f"p50 {times[len(times) // 2] * 1000:.0f} ms, {len(times)} answers of {max(sizes) // 1000} KB, {heard[0]} messages"
    return [
        Figure(f"memory with {RUNS} runs of {POINTS:,} points (two curves each)", memory, "MB", goal=200.0),
        Figure("an answer while points arrive, p99", times[int(len(times) * 0.99)] * 1000, "ms", goal=100.0, spread=spread),
        Figure("processor time for each answer, reading and telling news included", busy * 1000, "ms"),
        Figure("reading a run of 100,000 points and the first answer, mean", sum(first) / len(first), "s"),
    ]


def main() -> None:
    parser = options(__doc__)
    given = parser.parse_args()
    found = measure(given.quick)
    report("watch", found, given)


if __name__ == "__main__":
    main()
