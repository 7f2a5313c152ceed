"""Checkpoints: saving, async saving, loading, interleaved with Accelerate and `torch.save`; best and median of the rounds.

    python benchmarks/checkpoints.py [--quick] [--megabytes 400] [--rounds 7] [--only PART] [--folder FOLDER] [--json FILE]

A model of 400 MB with the state of its AdamW, 1.2 GB in all, in one process per library, which lives through all rounds. Every save
goes into a new folder, after all earlier writes have reached the disk. Ours is durable and checksummed when it
returns; Accelerate and `torch.save` leave their bytes in the page cache. Loads go into a model whose optimizer has no state, as after a
restart, once with all files in the page cache and once with none. Goals:

- a durable, checksummed save                   at most 0.9 x Accelerate's, which is not durable
- writing a large file durably                  at most a third of the time of buffered writes and fsync
- stall of the training by `async_save=True`    at most 0.10 x our synchronous save, that of the first one 0.25
- a load                                        at most 0.5 x Accelerate's, with at most one copy of the checkpoint as peak memory
- a durable save of a megabyte                  at most 5 ms
- ten saves with `dedup=True`, 95 % frozen      at most 2.5 x the bytes of one

The ratio of the best rounds is followed by the ratio of the medians and that of the CPU times of all threads of the process, which is
stable when others use the cores too. Files are written beside this script, or in `--folder`, and removed; a memory file system would
measure something else.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from figures import HERE, Figure, options, report, require, spread_of
from worker_process import WorkerProcess

Times = dict[str, list[float]]
"""Seconds, or bytes, one for each round, by what was measured."""
LIBRARIES = ("ours", "accelerate", "torch", "torch, synced")
PARTS = ("save", "load", "write", "small", "dedup")
MEGABYTES = 400.0


class Rounds:
    """The workers, a folder, and the measurements so far."""

    def __init__(self, folder: Path, workers: dict[str, WorkerProcess]) -> None:
        self.folder = folder
        self.workers = workers
        self.times: Times = {}
        self._made = 0
        self._saved: dict[str, str] = {}

    def note(self, what: str, clocks: list[float]) -> None:
        """Record one round: wall and CPU seconds."""
        self.times.setdefault(what, []).append(clocks[0])
        self.times.setdefault(f"{what}, cpu", []).append(clocks[1])

    def fresh(self) -> str:
        """Return a new folder path, after all pending writes have reached the disk."""
        os.sync()
        self._made += 1
        return str(self.folder / f"made-{self._made}")

    def shuffled(self, *names: str) -> list[str]:
        """Return the order of a round: it changes between rounds, and is the same in every run."""
        return random.Random(self._made).sample(names, len(names))

    def save(self) -> None:
        """Run one round of all large saves; later loads use the last one of each library."""
        for name in self.shuffled(*LIBRARIES, "behind", "behind, first"):
            path = self.fresh()
            if name.startswith("behind"):
                stall, committed = self.workers["ours"].ask("save_behind", folder=path, fresh=name.endswith("first"))
                self.note(f"{name}: stall", stall)
                self.note(f"{name}: committed", committed)
                shutil.rmtree(path)
                continue
            self.note(f"{name}: save", self.workers[name].ask("save", folder=path))
            if name in self._saved:
                shutil.rmtree(self._saved[name])
            self._saved[name] = path

    def load(self) -> None:
        """Run one round of loads, with a warm and a cold page cache."""
        for name in self.shuffled("ours", "accelerate", "torch"):
            if name not in self._saved:
                self._saved[name] = self.fresh()
                self.workers[name].ask("save", folder=self._saved[name])
            path = self._saved[name]
            os.sync()
            forget_files(path)
            self.note(f"{name}: cold load", self.workers[name].ask("load", folder=path))
            read_files(path)
            self.note(f"{name}: warm load", self.workers[name].ask("load", folder=path))
            if f"{name}: peak" not in self.times:
                resident, anonymous = self.workers[name].ask("memory", folder=path)
                self.times[f"{name}: peak"] = [resident]
                self.times[f"{name}: anonymous peak"] = [anonymous]

    def write(self, megabytes: float) -> None:
        """Run one round of plain file writes."""
        for name in self.shuffled("direct", "buffered"):
            path = self.fresh()
            self.note(name, self.workers["ours"].ask("write", path=path, megabytes=megabytes, direct=name == "direct"))
            os.unlink(path)

    def save_small(self) -> None:
        """Run one round with a model of a megabyte."""
        for name in self.shuffled("ours", "accelerate", "torch", "torch, synced"):
            self.note(f"{name}: small save", self.workers[name].ask("save", folder=self.fresh(), small=True))
        stall, committed = self.workers["ours"].ask("save_behind", folder=self.fresh(), small=True)
        self.note("behind: small stall", stall)
        self.note("behind: small committed", committed)


def run(
    quick: bool,
    megabytes: float | None = None,
    rounds: int | None = None,
    folder: Path | None = None,
    parts: Sequence[str] = PARTS,
) -> Times:
    """Measure everything, interleaved."""
    megabytes = megabytes or MEGABYTES
    rounds = rounds or (3 if quick else 7)
    require("accelerate")
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=folder or HERE)))
        workers = {name: stack.enter_context(running(name, megabytes=megabytes)) for name in LIBRARIES}
        every = Rounds(place, workers)
        every.times["size"] = [workers["ours"].ask("size")]
        for _ in range(rounds):
            if "save" in parts:
                every.save()
            if "load" in parts:
                every.load()
            if "write" in parts:
                every.write(megabytes)
        if "small" in parts:
            for _ in range(10 if quick else 40):
                every.save_small()
        for saves in (1, 10) if "dedup" in parts else ():
            path = Path(every.fresh())
            workers["ours"].ask("dedup", folder=str(path), megabytes=megabytes / 4, saves=saves)
            every.times[f"{saves} saves"] = [on_disk(path)]
    return every.times


def running(library: str, **model: float) -> WorkerProcess:
    """Return a process with a model of so many `megabytes`, or of so many `tensors` with so many `elements`."""
    return WorkerProcess("_checkpoints_worker.py", library, *(word for name in model for word in (f"--{name}", str(model[name]))))


def files_in(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def forget_files(folder: str) -> None:
    """Evict the files of a folder, which are already on disk, from the page cache."""
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
    """Return the bytes of the files of a folder, hard links counted once."""
    known = {(found.st_dev, found.st_ino): found.st_blocks * 512.0 for path in files_in(str(folder)) for found in [path.stat()]}
    return sum(known.values())


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(times: Times) -> list[Figure]:
    """Return the figures: the ratios of the best rounds, then medians, CPU times, and the other contenders."""
    save, small, size = "accelerate: save", "accelerate: small save", times["size"][0]
    rows: list[tuple[str, str, str, float | None, tuple[str, ...]]] = [
        (f"save, {size / 1e9:.1f} GB, durable and checksummed", "ours: save", save, 0.9, ("torch: save", "torch, synced: save")),
        ("a large file, durable, against write and fsync", "direct", "buffered", 0.33, ()),
        ("async_save: stall of the first one", "behind, first: stall", "ours: save", 0.25, (save,)),
        ("async_save: stall of later ones", "behind: stall", "ours: save", 0.10, (save,)),
        ("async_save: until it is committed", "behind: committed", "ours: save", None, (save,)),
        ("load, files in the page cache", "ours: warm load", "accelerate: warm load", 0.5, ("torch: warm load",)),
        ("load, page cache empty", "ours: cold load", "accelerate: cold load", 0.5, ("torch: cold load",)),
        ("save of 1 MB, durable", "ours: small save", small, None, ("torch: small save", "torch, synced: small save")),
        ("save of 1 MB, async_save: stall", "behind: small stall", small, None, ()),
        ("save of 1 MB, async_save: until it is committed", "behind: small committed", small, None, ()),
    ]
    found = [_compared(times, *row) for row in rows if row[1] in times]
    if "ours: small save" in times:
        low, high = spread_of(small_saves := [seconds * 1e3 for seconds in times["ours: small save"]])
        found.append(Figure("save of 1 MB, durable, in ms", statistics.median(small_saves), "ms", goal=5.0, low=low, high=high))
    if "ours: peak" in times:
        found.append(_memory(times))
    if "10 saves" in times:
        entry, ten = (times[f"{saves} saves"][0] / 1e6 for saves in (1, 10))
        found.append(Figure("ten saves with dedup, 95 % frozen", ten, "MB", entry, "one", goal=2.5))
    return found


def _compared(times: Times, what: str, ours: str, theirs: str, goal: float | None, others: Sequence[str]) -> Figure:
    entry, other = times[ours], times[theirs]
    middle = {name: statistics.median(times[name]) for name in (ours, theirs, f"{ours}, cpu", f"{theirs}, cpu")}
    words = [f"median {middle[ours] * 1e3:.3g} ms, {middle[ours] / middle[theirs]:.2f}"]
    words.append(f"cpu {middle[f'{ours}, cpu'] * 1e3:.3g} ms, {middle[f'{ours}, cpu'] / middle[f'{theirs}, cpu']:.2f}")
    words += [f"{name.partition(':')[0]} {min(times[name]) * 1e3:.3g} ms" for name in others]
    low, high = spread_of([mine / base for mine, base in zip(entry, other, strict=False)])
    name, note = theirs.partition(":")[0].replace("ours", "synchronous"), f"({'; '.join(words)})"
    return Figure(what, min(entry) * 1e3, "ms", min(other) * 1e3, name, goal=goal, spread=note, low=low, high=high)


def _memory(times: Times) -> Figure:
    size = times["size"][0]
    said = {
        name: (times[f"{name}: peak"][0] / size, times[f"{name}: anonymous peak"][0] / size) for name in ("ours", "accelerate", "torch")
    }
    words = [f"{name} {resident:.2f}" for name, (resident, _) in said.items() if name != "ours"]
    words.append("without pages of files: " + ", ".join(f"{name} {anonymous:.2f}" for name, (_, anonymous) in said.items()))
    return Figure("load: peak memory, in copies of the checkpoint", said["ours"][0], "copies", goal=1.02, spread=f"({'; '.join(words)})")


def measure(quick: bool) -> list[Figure]:
    """Return the figures of all parts."""
    return figures(run(quick))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--megabytes", type=float, help="size of the weights; AdamW has twice that")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--folder", type=Path, help="where files are written, on the disk that is meant")
    given = parser.parse_args()
    found = figures(run(given.quick, given.megabytes, given.rounds, given.folder, given.only or PARTS))
    report("checkpoints", found, given)


if __name__ == "__main__":
    main()
