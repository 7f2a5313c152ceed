"""Hours of training on four processes with random faults: the run must end with the bits of an undisturbed one, and nothing may grow.

    python benchmarks/soak_training.py [--hours 2 | --minutes 40] [--seed 0] [--json FILE] [--folder DIR]

Faults, in an order that follows from the seed: kill -9 of a rank; a rank that is stopped for some seconds, or for good; a slow rank; a full
disk while a checkpoint is written; the network between two hosts down for some seconds, or for good; kill -9 of a launcher. Without root
only those of ranks and launchers, and the first line says so. Then the same number of steps is trained without faults, and losses of every
step on every rank, weights, optimizer, schedule and random states are compared bit for bit.

What processes hold is sampled at the end of every epoch (workers), before every fault (launchers, `slipstream watch`), and fitted by least
squares: `soak_usage.py`. A line is printed for every fault, and the JSON file is written anew after each, so that a soak that was ended
early has its figures too. Exits with 1 if something is off; the folder is then kept, and named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from figures import above_zero, machine, quiet_environment, slipstream
from soak_faults import KINDS, OF_MACHINES, Fault, Outcome, Unexpected, schedule
from soak_job import RANKS, Job, JobEnded, make_job
from soak_usage import TITLES, Slope, job_slopes, read_lines, slopes, usage

CALM = 240.0
"""Seconds without a fault, once in every round, in which growth within a process can be seen."""
WARM_UP_STEPS = 1000
"""Steps of a worker before its memory is compared: caches and allocators fill."""
MARGIN = 200
"""Steps from the one at which the end is decided to the last one: no rank can be there before it has read of it."""

WITHOUT_ROOT = "NOT AS ROOT: no full disk, no network, one host; faults of ranks and launchers alone"
HELD_BY_ALL = ("zombies", "files in /dev/shm", "folders in TMPDIR", "files in TMPDIR")


class Soak:
    """One soak: the job, what has happened to it, and what it held."""

    def __init__(self, job: Job, options: argparse.Namespace) -> None:
        self.job = job
        self.options = options
        self.began = time.monotonic()
        self.seconds = options.hours * 3600 if options.minutes is None else options.minutes * 60
        self.outcomes: list[Outcome] = []
        self.troubles: list[str] = []
        self.samples: dict[str, list[dict[str, Any]]] = {"launcher": [], "watch": [], "job": []}
        self.watch: subprocess.Popen[bytes] | None = None
        self.state = "running"
        self.checks: dict[str, str] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(self.elapsed), 60)
        print(f"[{minutes // 60}:{minutes % 60:02}:{seconds:02} of {self.seconds / 3600:.2g} h] {text}", flush=True)

    # the disturbed run

    def run(self) -> None:
        """Disturb the job until the time is over, then let it end."""
        self.job.start()
        self.job.wait("the first step", lambda: self.job.attempt() >= 0)
        with (self.job.folder / "watch.txt").open("wb") as output:
            command = slipstream("watch", str(self.job.project), "--port", "0")
            self.watch = subprocess.Popen(command, stdout=output, stderr=output, env=quiet_environment())
        number = 0
        while self.elapsed < self.seconds:
            for fault in schedule(self.options.seed, number, self.job):
                if self.elapsed > self.seconds:
                    break
                self._settle(self.options.calm if fault is None else 4.0 + fault.seconds)
                if fault is not None:
                    self._strike(fault)
            number += 1
        self.say("no more faults; training to the end")
        (self.job.folder / "until.part").write_text(str(self.job.step() + MARGIN))
        (self.job.folder / "until.part").rename(self.job.folder / "until")
        left = self.job.await_end(300)
        codes = [launcher.returncode for launcher in self.job.launchers]
        if any(codes) or left:
            self.troubles.append(f"the end: exit codes {codes}, processes left behind {left}")
        self.sample_job()

    def _settle(self, seconds: float) -> None:
        """Let the job train, and sample."""
        end = time.monotonic() + min(seconds, max(0.0, self.seconds - self.elapsed))
        while time.monotonic() < end:
            time.sleep(min(5.0, max(0.0, end - time.monotonic())))
            self.sample()

    def _strike(self, fault: Fault) -> None:
        job = self.job
        outcome = Outcome(len(self.outcomes), fault.kind, fault.victim, job.launches, job.machines, job.step(), round(self.elapsed, 1))
        attempt = job.attempt()
        try:
            if job.ended():
                raise JobEnded("the job had ended before the fault")
            outcome.recovery = round(KINDS[fault.kind](job, fault), 2)
        except Unexpected as error:
            outcome.recovery = error.recovery
            outcome.troubles.append(str(error))
        except (JobEnded, OSError, IndexError) as error:
            outcome.troubles.append(f"{type(error).__name__}: {error}")
            self._start_anew(outcome)
        outcome.restarts = max(0, job.attempt() - attempt) if outcome.launch == job.launches else 1
        self.outcomes.append(outcome)
        self.troubles += [f"fault {outcome.number} ({outcome.kind}, {job.output.name}): {trouble}" for trouble in outcome.troubles]
        came = f"next step after {outcome.recovery:.2f} s" if outcome.recovery is not None else "DID NOT COME BACK"
        where = f"{'machine' if fault.kind in OF_MACHINES else 'rank'} {fault.victim}"
        self.say(f"fault {outcome.number}: {fault.kind}, {where}: {came}; step {job.step()}, {self.restarts} restarts")
        for trouble in outcome.troubles:
            print(f"  {trouble}", flush=True)
        self.sample_job()
        self.write()

    def _start_anew(self, outcome: Outcome) -> None:
        """Bring back a job that did not come back by itself: the soak goes on."""
        self.job.close()
        self.job.start()
        try:
            self.job.wait("the first step", lambda: self.job.attempt() >= 0)
        except JobEnded as error:
            outcome.troubles.append(str(error))

    @property
    def restarts(self) -> int:
        return sum(outcome.restarts for outcome in self.outcomes)

    # samples

    def sample(self) -> None:
        """Sample the launchers and the watcher."""
        for kind, processes in (("launcher", self.job.launchers), ("watch", [self.watch] if self.watch else [])):
            for index, popen in enumerate(processes):
                try:
                    held = usage(psutil.Process(popen.pid))
                except (psutil.Error, OSError):
                    continue
                work = max(0, self.job.attempt()) if kind == "launcher" else self.job.step()
                role = f"{index} of {self.job.machines} machines"
                self.samples[kind].append({"process": f"{popen.pid}.{index}", "role": role, "work": work, **held})

    def sample_job(self) -> None:
        """Sample what belongs to no single process."""
        zombies = sum(sample["zombies"] for sample in self.samples["launcher"][-2:])
        files = self.job.files_left()
        held = dict(zip(HELD_BY_ALL, (zombies, files["shm"], self.job.folders_left(), files["tmp"]), strict=True))
        self.samples["job"].append({"time": time.time(), **held})

    def growth(self) -> list[Slope]:
        """Return all slopes so far."""
        workers = [sample for rank in range(RANKS) for sample in read_lines(self.job.folder / f"usage-{rank}.jsonl")]
        found = slopes("worker", workers, warm_up=WARM_UP_STEPS)
        found += slopes("launcher", self.samples["launcher"], warm_up=1)  # the first restart opens a second store
        found += slopes("watch", self.samples["watch"], warm_up=0)
        return found + job_slopes(self.samples["job"], HELD_BY_ALL)

    # the undisturbed run, and the comparison

    def compare(self) -> None:
        """Train as many steps without faults, and compare everything."""
        folder = self.job.folder / "undisturbed"
        folder.mkdir()
        steps = int((self.job.folder / "until").read_text())
        (folder / "until").write_text(str(steps))
        self.say(f"the same {steps} steps without faults")
        calm = Job(folder, 0.0, None, folder, self.job.memory, self.job.is_root)
        calm.start()
        try:
            began = time.monotonic()
            while not calm.ended():
                time.sleep(30 if time.monotonic() > began + 30 else 1)
                self.say(f"undisturbed: step {calm.step()} of {steps}")
            left = calm.await_end(60)
        finally:
            calm.close()
        if any(launcher.returncode for launcher in calm.launchers) or left:
            self.troubles.append(f"the undisturbed run failed, see {calm.output}")
        for rank in range(RANKS):
            self._compare_rank(rank, folder, steps)
        again = read_lines(self.job.folder / "differences.jsonl")
        self._check("steps that were repeated gave the same bits", not again, f"{len(again)} differ, the first is {again[:1]}")
        self._compare_metrics(steps)

    def _check(self, what: str, holds: bool, otherwise: str) -> None:
        self.checks[what] = "yes" if holds else f"NO: {otherwise}"
        if not holds:
            self.troubles.append(f"{what}: {otherwise}")

    def _compare_rank(self, rank: int, calm: Path, steps: int) -> None:
        ours, theirs = ((folder / f"losses-{rank}").read_bytes() for folder in (self.job.folder, calm))
        first = next((at // 8 for at in range(0, 8 * steps + 8, 8) if ours[at : at + 8] != theirs[at : at + 8]), None)
        same = first is None and len(ours) == len(theirs) == 8 * steps + 8
        sizes = f"{len(ours)} and {len(theirs)} bytes"
        self._check(f"rank {rank}: the same {steps} losses", same, f"the first that differs is step {first}; {sizes}")
        try:
            ours_end, theirs_end = (json.loads((folder / f"final-{rank}.json").read_text()) for folder in (self.job.folder, calm))
        except FileNotFoundError as error:
            return self._check(f"rank {rank}: the same end", False, f"{error.filename} is missing")
        different = [name for name in theirs_end if ours_end[name] != theirs_end[name]]
        return self._check(f"rank {rank}: the same {', '.join(theirs_end)} at the end", not different, f"{different} differ")

    def _compare_metrics(self, steps: int) -> None:
        """Every step stands in the metrics of the run folder, with one value, that of the undisturbed run."""
        found: list[dict[int, set[float]]] = []
        for project in (self.job.project, self.job.folder / "undisturbed" / "project"):
            values: dict[int, set[float]] = {}
            for line in read_lines(project / "runs" / "soak" / "metrics.jsonl"):
                if "values" in line:
                    values.setdefault(line["step"], set()).add(line["values"]["loss"])
            found.append(values)
        missing = [step for step in range(1, steps + 1) if step not in found[0]]
        other = [step for step in found[0] if found[0][step] != found[1].get(step)]
        self._check("every step is in metrics.jsonl", not missing, f"{len(missing)} are not, from step {missing[:1]} on")
        self._check("with the loss of the undisturbed run", not other, f"{len(other)} differ, from step {other[:1]} on")

    # the report

    def write(self) -> None:
        """Write the JSON file with everything so far."""
        if self.options.json is None:
            return
        content = {
            "machine": machine(),
            "state": self.state,
            "seed": self.options.seed,
            "hours": round(self.elapsed / 3600, 3),
            "steps": self.job.step(),
            "launches": self.job.launches,
            "restarts": self.restarts,
            "checks": self.checks,
            "troubles": self.troubles,
            "faults": [asdict(outcome) for outcome in self.outcomes],
            "growth": [{**asdict(slope), "grows": slope.grows} for slope in self.growth()],
        }
        part = self.options.json.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.rename(self.options.json)

    def report(self) -> str:
        """Return the tables of the end, as Markdown."""
        rows = []
        for kind in KINDS:
            some = [outcome for outcome in self.outcomes if outcome.kind == kind]
            times = [outcome.recovery for outcome in some if outcome.recovery is not None]
            spread = (f"{statistics.median(times):.2f} s", f"{max(times):.2f} s") if times else ("", "")
            off = sum(bool(outcome.troubles) for outcome in some)
            rows.append((kind, str(len(some)), str(sum(outcome.restarts for outcome in some)), *spread, str(off)))
        parts = [markdown(("fault", "times", "restarts", "next step, median", "longest", "not as promised"), rows)]
        parts.append(markdown(TITLES, [slope.row() for slope in self.growth() if slope.samples > 2]))
        parts.append(markdown(("check", ""), [*self.checks.items()]))
        return "\n\n".join(parts)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are aligned also as plain text."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in (titles, *rows)]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Run the whole, print the report, and return the exit code."""
    with make_job(folder, options.pace) as job:
        found = Soak(job, options)
        found.say("faults of ranks, disk, network and launchers" if job.is_root else WITHOUT_ROOT)
        try:
            found.run()
            found.compare()
        except JobEnded as error:
            found.troubles.append(f"the soak could not go on: {error}")
        finally:
            if found.watch is not None:
                found.watch.terminate()
                found.watch.wait(10)
            found.troubles += [f"growth: {' '.join(slope.row())}" for slope in found.growth() if slope.grows]
            found.state = "done"
            found.write()
            if found.troubles:
                shutil.copytree(job.disk, folder / "kept", dirs_exist_ok=True)
        text = found.report()
        for place in [folder / "report.md", *([options.json.with_suffix(".md")] if options.json else [])]:
            place.write_text(text + "\n")
        print(text)
    verdict = "SOMETHING IS OFF" if found.troubles else "The run ended as if nothing had happened"
    for trouble in found.troubles:
        print(trouble)
    print(f"{verdict}: {len(found.outcomes)} faults, {found.restarts} restarts, {job.launches} launches in {found.elapsed / 3600:.2f} h.")
    return 1 if found.troubles else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=above_zero, default=2.0)
    parser.add_argument("--minutes", type=above_zero, help="instead of --hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.08, help="seconds that a rank sleeps after each step")
    parser.add_argument("--calm", type=float, default=CALM, help="seconds of the stretch without faults in every round")
    parser.add_argument("--json", type=Path, help="write the figures to this file, anew after every fault, and the tables beside it (.md)")
    parser.add_argument("--folder", type=Path, help="where to work; by default a temporary folder, removed if all is well")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="slipstream-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = soak(options, folder.resolve())
    if code:
        print(f"Everything that the job has left is in {folder}")
    elif options.folder is None:
        shutil.rmtree(folder)
    sys.exit(code)


if __name__ == "__main__":
    main()
