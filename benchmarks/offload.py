"""Models larger than memory: ours, Accelerate and plain PyTorch side by side, their outputs compared bit for bit.

    python benchmarks/offload.py [--quick] [--only PART] [--rounds 15] [--folder FOLDER] [--json FILE]

- warm      24 blocks of width 1024 on disk, head and tail in memory, pages cached: time of a forward, from a file of ours, whose data
            begins at a page, and from one of safetensors, whose data begins anywhere; and memory under a limit
- cold      the same with a cold page cache: bytes per second against direct reads from the disk; once where the
            cache has room for the file, once in a control group where it does not
- generate  64 sequences from a language model four times as large as the memory of its control group
- load      `load_checkpoint_and_dispatch` of 2 GB of safetensors into main memory, and with its blocks on the disk and their hooks
            attached, against the file mapped and assigned
- tensors   the same for 1,000 to 100,000 tiny tensors: time for each
- shared    two processes that load the same file and read all of it: memory of each

Goals:

- a forward with cached pages                at most 1.02 x that of the model in memory; memory within the limit that was given
- a forward with an empty page cache         at least 85 % of the disk's own speed
- generation                                 at least 10 x the tokens per second of Accelerate
- loading, loading and dispatching           at most 1.5 x `load_file` and `load_state_dict(assign=True)`, peak memory below 5 % of the file
- 100,000 tensors                            each at most 2 x the time of one of 1,000
- two processes                              each has half of the file

Times are compared within a round if one process holds all contenders (warm, load), else by the best rounds. Files are written
beside this script, or in `--folder`, and removed; a memory file system would measure something else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import HERE, Figure, options, report, require, spread_of
from turns import ratio, ratios
from worker_process import Killed, WorkerProcess

SHARE = 0.85
"""Of the disk's speed, at least."""
MORE = 10
"""Times the tokens per second of Accelerate, at least."""


class Group:
    """A control group (version 1) below that of this process; `why_not` says why there is none."""

    def __init__(self) -> None:
        own = next((line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
        self.path = Path("/sys/fs/cgroup/memory", (own or "/").lstrip("/"), f"slipstream-bench-{os.getpid()}")
        self.why_not = "" if own else "no control groups of the first version for memory"
        if own:
            try:
                self.path.mkdir()
            except OSError as error:
                self.why_not = f"no control group can be made: {error}"

    def allow(self, more: int) -> int:
        """Limit memory to this much beyond what is in use, page cache included; return what is in use."""
        found = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        used = int(found["total_rss"]) + int(found["total_mapped_file"])
        (self.path / "memory.limit_in_bytes").write_text(str(used + more))
        return used

    def close(self) -> None:
        for _ in range(50 if not self.why_not else 0):
            try:
                self.path.rmdir()
                return
            except OSError:  # its processes have ended, but are not forgotten yet
                time.sleep(0.1)


@dataclass(frozen=True)
class Place:
    """The folder and the time limit of a part."""

    folder: Path
    quick: bool
    rounds: int

    def worker(self, group: Group | None = None, threads: int = 1) -> WorkerProcess:
        """Return a process that runs commands; in a control group if there is one."""
        words = ["--threads", str(threads), *(["--group", str(group.path)] if group else [])]
        return WorkerProcess("_offload_worker.py", *words, environment={**os.environ, "OMP_NUM_THREADS": str(threads)})

    @contextmanager
    def file(self, shape: Sequence[Any], library: str = "safetensors") -> Iterator[tuple[str, int]]:
        """Return a file with the weights of a model, and their bytes."""
        path = self.folder / f"{library}-{'-'.join(map(str, shape))}.safetensors"
        try:
            with self.worker() as worker:
                size = worker.ask("save", shape=shape, path=str(path), library=library)
            yield str(path), size
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def group(self) -> Iterator[Group]:
        group = Group()
        try:
            yield group
        finally:
            group.close()

    def parked(self, shape: Sequence[Any], path: str) -> str:
        """Return an offload folder for Accelerate with the weights of a file."""
        folder = str(self.folder / "theirs")
        if not os.path.exists(folder):
            with self.worker() as worker:
                worker.ask("park", shape=shape, path=path, folder=folder)
        return folder


def tower(place: Place) -> tuple[str, int, int]:
    return ("tower", 24, 2048 if place.quick else 4096)


def block_bytes(shape: Sequence[Any]) -> int:
    """Return the bytes of one block of a tower."""
    return (2 * 1024 * shape[2] + shape[2] + 1024) * 4


# -- warm -----------------------------------------------------------------------------------------------------------------------


def warm(place: Place) -> list[Figure]:
    shape = tower(place)
    blocks, entry = block_bytes(shape) * shape[1], block_bytes(shape)
    limit = 8 * entry
    grown = {}
    with place.file(shape) as (path, _), place.file(shape, "ours") as (own, _):
        folder = place.parked(shape, path)
        plain = {"library": "plain", "path": own}
        ways = {
            "own": {"library": "ours", "path": own},
            "ours": {"library": "ours", "path": path},
            "limited": {"library": "ours", "path": path, "limit": limit},
            "accelerate": {"library": "accelerate", "path": path},
        }
        with place.worker() as worker:
            for name, way in {"plain": plain, **ways}.items():
                worker.ask("open", name=name, shape=shape, folder=folder, **way)
            seen = worker.ask("warm", names=["plain", *ways], rounds=3 * place.rounds)
        for name, way in ways.items():
            with place.worker() as worker:
                worker.ask("ready", library=way["library"])
                worker.ask("open", name=name, shape=shape, folder=folder, **way)
                grown[name] = worker.ask("growth", name=name)[0]
    check(seen["equal"], "warm: outputs are not those of the plain model")
    times = seen["times"]
    most = f"limit {megabytes(limit)}"
    others = f"(accelerate {megabytes(grown['accelerate'])})"
    return [
        forward(f"forward, {shape[1]} blocks on disk ({megabytes(blocks)}), pages cached", times, "own", 1.02),
        forward("the same, a file that safetensors wrote", times, "ours", None),
        forward(f"that file, {most}", times, "limited", None),
        forward("that file, Accelerate", times, "accelerate", None),
        Figure(f"memory beyond before, {most}", grown["limited"] / 1e6, "MB", limit / 1e6, "limit", goal=1.0),
        Figure("memory beyond before, no limit", grown["ours"] / 1e6, "MB", spread=others),
    ]


def forward(what: str, times: dict[str, dict[str, list[float]]], name: str, goal: float | None) -> Figure:
    """Compare a contender with the plain model, round by round; then in other ways, and the plain model with itself."""
    ours, plain = times[name], times["plain"]
    words = [f"cpu {ratio(ours['cpu'], plain['cpu']):.2f}", f"best rounds {min(ours['wall']) / min(plain['wall']):.2f}"]
    words.append(f"plain/plain {ratio(times['plain, again']['wall'], plain['wall']):.3f}")
    entry, other = (statistics.median(found["wall"]) * 1e3 for found in (ours, plain))
    paired = ratio(ours["wall"], plain["wall"])
    low, high = spread_of(ratios(ours["wall"], plain["wall"]))
    return Figure(what, entry, "ms", other, "plain", goal=goal, spread=f"({'; '.join(words)})", paired=paired, low=low, high=high)


def megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


# -- cold -----------------------------------------------------------------------------------------------------------------------


def cold(place: Place) -> list[Figure]:
    shape = tower(place)
    found = []
    with place.file(shape) as (path, _), place.worker() as disk, place.group() as group:
        found += cold_rounds(place, shape, path, disk, "room in the page cache", None)
        if group.why_not:
            found.append(Figure("cold forward without room in the cache", 0, "s/GB", spread=f"(not measured: {group.why_not})"))
        else:
            found += cold_rounds(place, shape, path, disk, "memory for a quarter", group)
    return found


def cold_rounds(place: Place, shape: Sequence[Any], path: str, disk: WorkerProcess, case: str, group: Group | None) -> list[Figure]:
    """Run rounds of the disk, a library, the disk again."""
    with place.worker() as plain:
        plain.ask("open", library="plain", shape=shape, path=path, folder="")
        output = plain.ask("growth", name="plain", passes=1)[1]
    folder, entry = place.parked(shape, path), block_bytes(shape)
    files = {"ours": [path], "accelerate": [str(path) for path in Path(folder).glob("*.dat")]}
    speeds: dict[str, list[tuple[float, float]]] = {}
    words: dict[str, list[str]] = {}
    for library in ("ours", "accelerate"):
        for blocks in (6, 12, 24, 48):
            with contextlib.suppress(Killed), place.worker(group=group) as worker:
                words[library], speeds[library] = [], []
                worker.ask("ready", library=library)
                if group is not None:
                    group.allow(blocks * entry + (16 << 20))
                    words[library] = [f"memory for {blocks} of {shape[1]} blocks, others were too few" if blocks > 6 else ""]
                worker.ask("open", library=library, shape=shape, path=path, folder=folder, limit=blocks * entry if group else None)
                for _ in range(place.rounds):
                    before = disk.ask("disk", path=path)
                    seen = worker.ask("cold", name=library, paths=files[library])
                    around = (before + disk.ask("disk", path=path)) / 2
                    speeds[library].append((shape[1] * entry / seen["seconds"], around))
                    check(seen["bytes"] > 0.95 * shape[1] * entry, f"cold: {library} read {megabytes(seen['bytes'])} alone from the disk")
                    check(seen["output"] == output, f"cold: the output of {library} is not that of the plain model")
                    words[library] += [f"up to {seen['cached']:.0%} was cached"] if seen["cached"] > 0.02 else []
                    words[library] += [] if library != "ours" else ["read past the cache" if seen["direct"] else "read through the cache"]
                break
    return [share(f"{library}: cold forward, {case}", speeds[library], words[library], library == "ours") for library in words]


def check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise SystemExit(otherwise)


def share(what: str, speeds: Sequence[tuple[float, float]], words: Sequence[str], has_goal: bool) -> Figure:
    """Return the seconds per gigabyte (less is better); each round against the disk just before and after it."""
    ours, disk = ([1e9 / found for found in column] for column in zip(*speeds, strict=True))
    paired = ratio(ours, disk)
    said = [f"{1 / paired:.0%} of the disk", f"best rounds {1 / min(ours):.2f} of {1 / min(disk):.2f} GB/s"]
    said += dict.fromkeys(filter(None, words))
    goal = round(1 / SHARE, 3) if has_goal else None
    (low, high), note = spread_of(ratios(ours, disk)), f"({'; '.join(said)})"
    entry, other = statistics.median(ours), statistics.median(disk)
    return Figure(what, entry, "s/GB", other, "disk", goal=goal, spread=note, paired=paired, low=low, high=high)


# -- generate ---------------------------------------------------------------------------------------------------------------------


def generate(place: Place) -> list[Figure]:
    layers, count = (16, 4) if place.quick else (24, 12)
    shape, threads = ("writer", layers), os.cpu_count() or 1
    with place.group() as group, place.file(shape) as (path, size):
        if group.why_not:
            return [Figure("tokens of 64 sequences", 0, "ms", spread=f"(not measured: {group.why_not})")]
        with place.worker(threads=threads) as worker:
            worker.ask("open", library="plain", shape=shape, path=path, folder="")
            plain = worker.ask("write", name="plain", sequences=64, rows=64, count=count)
        job = Writing(place, group, shape, path, size, count, plain["tokens"], threads)
        ours, entry, many = [], [], []
        for _ in range(2 if place.quick else 5):  # in turns
            ours += [job.run("ours", 64, 64 // lanes, lanes) for lanes in (1, 2, 4)]
            many.append(job.run("accelerate", 64, 64))
            entry.append(job.run("accelerate", 1, 1))
    what = f"a token of 64 sequences, {megabytes(size)} of weights in {megabytes(size // 4)}"
    memory = f"all in memory: {64 * count / plain['seconds']:.3g} tokens/s"
    return [token(what, ours, entry, "one by one", memory), token("the same", ours, many, "64 at once", memory)]


def token(what: str, ours: list[tuple[float, str]], theirs: list[tuple[float, str]], how: str, words: str) -> Figure:
    """Compare the best rounds, then the medians; `how` describes the other contender."""
    (entry, way), (other, their_way) = min(ours), min(theirs)
    middle = statistics.median(each for each, _ in theirs) / statistics.median(each for each, _ in ours)
    said = [f"{other / entry:.1f} x, medians {middle:.1f} x the tokens per second", f"ours {1 / entry:.3g} with {way}", words]
    spread = f"({'; '.join(said)}; accelerate: {their_way})"
    return Figure(what, entry * 1e3, "ms", other * 1e3, f"accelerate, {how}", goal=1 / MORE, spread=spread)


@dataclass(frozen=True)
class Writing:
    """Generation in a control group with memory for a quarter of the weights, beside the interpreter and its libraries."""

    place: Place
    group: Group
    shape: Sequence[Any]
    path: str
    size: int
    count: int
    tokens: list[list[int]]
    """What the plain model wrote."""
    threads: int

    def run(self, library: str, sequences: int, rows: int, lanes: int = 0) -> tuple[float, str]:
        """Return the seconds per token, and how; with more memory if the library cannot run otherwise."""
        folder = self.place.parked(self.shape, self.path)
        allowed = self.size // 4
        for more in (1, 2, 4, 8):
            forget_all(self.place.folder)
            with contextlib.suppress(Killed), self.place.worker(group=self.group, threads=self.threads) as worker:
                worker.ask("ready", library=library)
                self.group.allow(more * allowed)
                worker.ask("open", library=library, shape=self.shape, path=self.path, folder=folder, limit=int(allowed * 0.6))
                seen = worker.ask("write", name=library, sequences=sequences, rows=rows, count=self.count, lanes=lanes)
                check(seen["tokens"] == self.tokens[:sequences], f"generate: {library} wrote other tokens than the plain model")
                each = seen["seconds"] / sequences / self.count
                how = f"{lanes or 1} x {rows} sequences" + (f", {more} x the memory, killed with less" if more > 1 else "")
                print(f"  {library}, {how}: {1 / each:.3g} tokens/s", file=sys.stderr, flush=True)
                return each, how
        raise SystemExit(f"generate: {library} could not run {rows} sequences in twice the memory of the weights")


def forget_all(folder: Path) -> None:
    """Evict all files of a folder from the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# -- load -------------------------------------------------------------------------------------------------------------------------

LIBRARIES = ("plain", "ours", "accelerate")


def load(place: Place) -> list[Figure]:
    shape = ("tower", 15 if place.quick else 60, 4096)
    with place.file(shape) as (path, size):
        with place.worker() as worker:
            libraries = (*LIBRARIES, "ours, dispatched")
            times = worker.ask("load", libraries=libraries, shape=shape, path=path, rounds=3 * place.rounds)
            whole = worker.ask("load", libraries=("plain", "ours, dispatched"), shape=shape, path=path, rounds=3 * place.rounds, build=True)
        grown, sums = {}, set()
        for library in LIBRARIES:
            with place.worker() as worker:
                grown[library] = worker.ask("load_memory", library=library, shape=shape, path=path)
                sums.add(worker.ask("touch", library=library)[1])
    check(len(sums) == 1, "load: the weights are not the same")
    others = ", ".join(f"{name} {grown[name] / size:.1%}" for name in ("plain", "accelerate"))
    return [
        against(f"load {megabytes(size)} into memory", times, "ours", 1.5),
        against("Accelerate, the same", times, "accelerate", None),
        against("load + dispatch, blocks on the disk", times, "ours, dispatched", 1.5),
        against("the same, with making the empty model", whole, "ours, dispatched", 1.5),
        Figure("peak memory of a load, in percent of the file", grown["ours"] / size * 100, "%", goal=5, spread=f"({others})"),
    ]


def against(what: str, times: dict[str, dict[str, list[float]]], name: str, goal: float | None) -> Figure:
    """Compare a contender with plain PyTorch: the best rounds, then the medians of the ratios."""
    entry, plain = (min(times[key]["wall"]) * 1e3 for key in (name, "plain"))
    middle = {clock: ratio(times[name][clock], times["plain"][clock]) for clock in ("wall", "cpu")}
    note = f"(medians of the ratios: wall {middle['wall']:.2f}, cpu {middle['cpu']:.2f})"
    low, high = spread_of(ratios(times[name]["wall"], times["plain"]["wall"]))
    return Figure(what, entry, "ms", plain, "plain", goal=goal, spread=note, low=low, high=high)


# -- tensors ----------------------------------------------------------------------------------------------------------------------


def tensors(place: Place) -> list[Figure]:
    counts = (1_000, 10_000) if place.quick else (1_000, 10_000, 100_000)
    each: dict[str, dict[int, float]] = {library: {} for library in LIBRARIES}
    found = []
    for count in counts:
        shape = ("crowd", count)
        with place.file(shape) as (path, _), place.worker() as worker:
            times = worker.ask("load", libraries=LIBRARIES, shape=shape, path=path, rounds=place.rounds if count < 100_000 else 1)
        for library in LIBRARIES:
            each[library][count] = min(times[library]["wall"]) / count * 1e6
        others = f"(accelerate {each['accelerate'][count]:.3g} us)"
        found.append(
            Figure(f"load {count:,} tensors: each", each["ours"][count], "us", each["plain"][count], "plain", spread=others)
        )
    last = counts[-1]
    others = "; ".join(f"{name} {each[name][last] / each[name][1_000]:.2f}" for name in ("plain", "accelerate"))
    few, many = each["ours"][1_000], each["ours"][last]
    return [*found, Figure(f"one of {last:,} against one of 1,000", many, "us", few, "one of 1,000", goal=2.0, spread=f"({others})")]


# -- shared -----------------------------------------------------------------------------------------------------------------------


def shared(place: Place) -> list[Figure]:
    shape = ("tower", 15, 4096)
    held: dict[str, list[float]] = {}
    with place.file(shape) as (path, size):
        for library in LIBRARIES:
            with ExitStack() as stack:
                workers = [stack.enter_context(place.worker()) for _ in range(2)]
                for worker in workers:
                    worker.ask("load_memory", library=library, shape=("tower", 1, 64), path=tiny(place))
                before = [worker.ask("held")["Pss"] for worker in workers]
                for worker in workers:
                    worker.ask("load_memory", library=library, shape=shape, path=path)
                    worker.ask("touch", library=library)
                held[library] = [worker.ask("held")["Pss"] - entry for worker, entry in zip(workers, before, strict=True)]
    most = {library: max(found) / size * 100 for library, found in held.items()}
    others = ", ".join(f"{name} {most[name]:.0f} %" for name in ("plain", "accelerate"))
    what = f"two processes with the same {megabytes(size)}: percent of it in each"
    return [Figure(what, most["ours"], "%", goal=55, spread=f"({others})")]


def tiny(place: Place) -> str:
    path = place.folder / "tiny.safetensors"
    if not path.exists():
        with place.worker() as worker:
            worker.ask("save", shape=("tower", 1, 64), path=str(path), library="safetensors")
    return str(path)


PARTS: dict[str, Callable[[Place], list[Figure]]] = {
    "warm": warm,
    "cold": cold,
    "generate": generate,
    "load": load,
    "tensors": tensors,
    "shared": shared,
}


def measure(quick: bool, rounds: int | None = None, folder: Path | None = None, parts: Sequence[str] = ()) -> list[Figure]:
    """Return the figures of all parts, or of the given ones."""
    require("accelerate")
    found = []
    for part in parts or PARTS:
        with tempfile.TemporaryDirectory(prefix=".offload-", dir=folder or HERE) as name:
            found += PARTS[part](Place(Path(name), quick, rounds or (5 if quick else 15)))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--folder", type=Path, help="where files are written, on the disk that is meant")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # files go then, too
    found = measure(given.quick, given.rounds, given.folder, given.only or ())
    report("offload", found, given)


if __name__ == "__main__":
    main()
