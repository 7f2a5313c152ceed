"""Checkpoints: saving, saving behind the training, loading, in turns with Accelerate and with `torch.save`; best and median of the rounds.

    python benchmarks/checkpoints.py [--quick] [--megabytes 400] [--rounds 7] [--folder FOLDER] [--json FILE]

A model of 400 MB with the state of its AdamW, 1.2 GB in all, in one process for each library, which live through all rounds. Every save
goes into a folder of its own, after everything that was written before has reached the disk. Ours is durable and checksummed when it
returns; Accelerate and `torch.save` leave their bytes in the page cache. Loads go into a model whose optimizer has no state, as after a
restart, once with all files in the page cache and once with none. Goals:

- a durable, checksummed save                   at most 1.15 x Accelerate's
- writing a large file durably                  at most a third of the time of buffered writes and fsync
- stall of the training by `async_save=True`    at most 0.10 x Accelerate's save
- a load                                        at most 0.6 x Accelerate's, with at most one copy of the checkpoint as peak memory
- ten saves with `dedup=True`, 95 % frozen      at most 2.5 x the bytes of one

Files are written beside this script, or in `--folder`, and removed; a memory file system would measure something else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from figures import HERE, Figure, save, table

Times = dict[str, list[float]]
"""Seconds, or bytes, one for each round, by what was measured."""
LIBRARIES = ("ours", "accelerate", "torch", "torch, synced")
MEGABYTES, QUICK_MEGABYTES = 400.0, 100.0


class Worker:
    """A process that holds a model of one library."""

    def __init__(self, library: str, megabytes: float) -> None:
        command = [sys.executable, str(HERE / "_checkpoints_worker.py"), library, "--megabytes", str(megabytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, do: str, **values: Any) -> Any:
        """What it says to an order, once it is carried out."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        return json.loads(line)


class Rounds:
    """The workers, a folder, and what was measured so far."""

    def __init__(self, folder: Path, workers: dict[str, Worker]) -> None:
        self.folder = folder
        self.workers = workers
        self.times: Times = {}
        self._made = 0

    def note(self, what: str, value: float) -> None:
        self.times.setdefault(what, []).append(value)

    def fresh(self) -> str:
        """A folder that is not there yet, on a disk that has nothing left to write."""
        os.sync()
        self._made += 1
        return str(self.folder / f"made-{self._made}")

    def shuffled(self, *names: str) -> list[str]:
        """An order of turns, another one in every round, the same in every run."""
        return random.Random(self._made).sample(names, len(names))

    def save_and_load(self) -> None:
        """One round of everything large; the files of each library are loaded by it and then removed."""
        made = {}
        for name in self.shuffled(*LIBRARIES, "behind", "behind, first"):
            library, path = name.partition(" ")[0].rstrip(",") if name.startswith("behind") else name, self.fresh()
            if library == "behind":
                stall, committed = self.workers["ours"].ask("save_behind", folder=path, fresh=name.endswith("first"))
                self.note(f"{name}: stall", stall)
                self.note(f"{name}: committed", committed)
                shutil.rmtree(path)
            else:
                self.note(f"{name}: save", self.workers[name].ask("save", folder=path))
                made[name] = path
        for name in self.shuffled("ours", "accelerate", "torch"):
            os.sync()
            forget_files(made[name])
            self.note(f"{name}: cold load", self.workers[name].ask("load", folder=made[name]))
            read_files(made[name])
            self.note(f"{name}: warm load", self.workers[name].ask("load", folder=made[name]))
            resident, anonymous = self.workers[name].ask("memory", folder=made[name])
            self.note(f"{name}: peak", resident)
            self.note(f"{name}: anonymous peak", anonymous)
        for path in made.values():
            shutil.rmtree(path)

    def write(self, megabytes: float) -> None:
        """One round of plain bytes."""
        for name in self.shuffled("direct", "buffered"):
            path = self.fresh()
            self.note(name, self.workers["ours"].ask("write", path=path, megabytes=megabytes, direct=name == "direct"))
            os.unlink(path)

    def save_small(self) -> None:
        """One round of a model of a megabyte."""
        for name in self.shuffled("ours", "accelerate", "torch", "torch, synced"):
            self.note(f"{name}: small save", self.workers[name].ask("save", folder=self.fresh(), small=True))
        stall, committed = self.workers["ours"].ask("save_behind", folder=self.fresh(), small=True)
        self.note("behind: small stall", stall)
        self.note("behind: small committed", committed)


def measure(quick: bool = False, megabytes: float | None = None, rounds: int | None = None, folder: Path | None = None) -> Times:
    """Everything, in turns."""
    megabytes = megabytes or (QUICK_MEGABYTES if quick else MEGABYTES)
    rounds = rounds or (3 if quick else 7)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=folder or HERE)))
        workers = {name: stack.enter_context(running(name, megabytes)) for name in LIBRARIES}
        all_rounds = Rounds(place, workers)
        all_rounds.note("size", workers["ours"].ask("size"))
        for _ in range(rounds):
            all_rounds.save_and_load()
            all_rounds.write(megabytes)
        for _ in range(10 if quick else 40):
            all_rounds.save_small()
        for saves in (1, 10):
            path = Path(all_rounds.fresh())
            workers["ours"].ask("dedup", folder=str(path), megabytes=megabytes / 4, saves=saves)
            all_rounds.note(f"{saves} saves", on_disk(path))
    return all_rounds.times


@contextmanager
def running(library: str, megabytes: float) -> Iterator[Worker]:
    worker = Worker(library, megabytes)
    try:
        yield worker
    finally:
        worker.close()


def files_in(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def forget_files(folder: str) -> None:
    """Take the files of a folder, which are on the disk already, out of the page cache."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_files(folder: str) -> None:
    """Bring the files of a folder into the page cache."""
    for path in files_in(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass


def on_disk(folder: Path) -> float:
    """Bytes that the files of a folder take, those with several names once."""
    known = {(found.st_dev, found.st_ino): found.st_blocks * 512.0 for path in files_in(str(folder)) for found in [path.stat()]}
    return sum(known.values())


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(times: Times) -> list[Figure]:
    """The best rounds against each other; behind them the medians, and what others need."""
    size = times["size"][0]
    whole = f"{size / 1e9:.1f} GB"
    plain = ("torch: save", "torch, synced: save")
    found = [
        _compared(times, f"save, {whole}, durable and checksummed", "ours: save", "accelerate: save", 1.15, *plain),
        _compared(times, "a large file, durable, against write and fsync", "direct", "buffered", 1 / 3),
        _compared(times, "async_save: stall of the first one", "behind, first: stall", "accelerate: save", 0.10),
        _compared(times, "async_save: stall of later ones", "behind: stall", "accelerate: save", 0.10),
        _compared(times, "async_save: until it is committed", "behind: committed", "accelerate: save", None),
        _compared(times, "load, files in the page cache", "ours: warm load", "accelerate: warm load", 0.6, "torch: warm load"),
        _compared(times, "load, page cache empty", "ours: cold load", "accelerate: cold load", 0.6, "torch: cold load"),
    ]
    copies = {name: max(times[f"{name}: peak"]) / size for name in ("ours", "accelerate", "torch")}
    anonymous = {name: max(times[f"{name}: anonymous peak"]) / size for name in copies}
    small = "accelerate: small save"
    without = ", ".join(f"{name} {value:.2f}" for name, value in anonymous.items())
    found += [
        Figure(
            "load: peak memory, in copies of the checkpoint",
            copies["ours"],
            "copies",
            goal=1.02,
            spread=f"(accelerate {copies['accelerate']:.2f}, torch {copies['torch']:.2f}; without pages of files: {without})",
        ),  # fmt: skip
        Figure("ten saves with dedup, 95 % frozen", times["10 saves"][0] / 1e6, "MB", times["1 saves"][0] / 1e6, "one", goal=2.5),
        _compared(times, "small save, durable", "ours: small save", small, None, "torch: small save", "torch, synced: small save"),
        _compared(times, "small save, async_save: stall", "behind: small stall", small, None),
        _compared(times, "small save, async_save: until it is committed", "behind: small committed", small, None),
    ]
    return found


def _compared(times: Times, what: str, ours: str, theirs: str, goal: float | None, *others: str) -> Figure:
    one, other = times[ours], times[theirs]
    middle, their_middle = statistics.median(one), statistics.median(other)
    words = [f"median {middle * 1e3:.3g} ms, {middle / their_middle:.2f}"]
    words += [f"{name.partition(':')[0]} {min(times[name]) * 1e3:.3g} ms" for name in others]
    name = theirs.partition(":")[0]
    return Figure(what, min(one) * 1e3, "ms", min(other) * 1e3, name, goal=goal, spread=f"({'; '.join(words)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the bytes, and fewer rounds")
    parser.add_argument("--megabytes", type=float, help="size of the weights; AdamW has twice that")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--folder", type=Path, help="where files are written, on the disk that is meant")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = figures(measure(options.quick, options.megabytes, options.rounds, options.folder))
    print(table("checkpoints", found))
    if options.json:
        save(options.json, {"checkpoints": found})


if __name__ == "__main__":
    main()
