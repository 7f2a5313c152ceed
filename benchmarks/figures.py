"""Figures: a measurement, its baseline, its spread, and whether the goal is met; printed as a table, kept as JSON.

A figure is a ratio of two measurements of one run, or one measurement with a limit in its own unit. Figures without a goal are for
information. A file of figures has a record for each group of them: the figures, and the command, machine, commit and date they come
from. Every script of this folder is a `measure(quick)` that returns figures, between `options(__doc__)` and `report(...)`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TITLES = ("what", "ours", "other", "ratio", "spread", "at most", "", "notes")


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    ours: float
    unit: str
    theirs: float | None = None
    other: str = ""
    """What `theirs` is the time of."""
    goal: float | None = None
    """The largest ratio that is good enough; the largest value where there is nothing to compare with."""
    spread: str = ""
    """A note: other ways to compare, other contenders."""
    paired: float | None = None
    """The ratio, if it comes from neighbouring rounds and not from the two times."""
    low: float | None = None
    high: float | None = None
    """Between which the ratio was (without one, `ours`), over the rounds or the runs."""

    @property
    def ratio(self) -> float | None:
        if self.paired is not None:
            return self.paired
        return None if self.theirs is None else self.ours / self.theirs

    @property
    def value(self) -> float:
        """What is compared with the goal, and lies between `low` and `high`: less is better."""
        return self.ours if self.ratio is None else self.ratio

    @property
    def interval(self) -> tuple[float, float]:
        """The spread, which is at least the value itself."""
        ends = [end for end in (self.value, self.low, self.high) if end is not None]
        return min(ends), max(ends)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        return None if self.goal is None else self.value <= self.goal

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.met]

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of the table, as text."""
        other = "" if self.theirs is None else f"{self.other} {number(self.theirs)} {self.unit}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        unit = f" {self.unit}" if self.ratio is None else ""
        spread = "" if self.low is None else " to ".join(number(end) if unit else f"{end:.2f}" for end in self.interval) + unit
        goal = "" if self.goal is None else f"{self.goal:g}{unit}"
        return self.what, f"{number(self.ours)} {self.unit}", other, ratio, spread, goal, self.verdict, self.spread


def number(value: float) -> str:
    """Format three significant digits, without exponents."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(title: str, figures: Iterable[Figure]) -> str:
    """Return the figures as aligned columns, without empty ones.

    >>> print(table("waiting", [Figure("a barrier", 2.0, "ms", 4.0, "torch", goal=0.6, low=0.4, high=0.55)]))
    waiting
      what       ours  other       ratio  spread        at most
      a barrier  2 ms  torch 4 ms  0.50   0.40 to 0.55  0.6      met
    """
    rows = [figure.cells for figure in figures]
    used = [column for column in range(len(TITLES)) if any(row[column] for row in rows)]
    rows = [TITLES, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    lines = ["  " + "  ".join(row[column].ljust(widths[column]) for column in used).rstrip() for row in rows]
    return "\n".join([title, *lines])


# -- spread -----------------------------------------------------------------------------------------------------------


def spread_of(values: Sequence[float], parts: int = 5) -> tuple[float, float]:
    """Return the lowest and the highest median of the parts of a run: of each round where there are few, else of so many stretches.

    >>> spread_of([1.0, 3.0, 2.0]), spread_of([1.0] * 50 + [2.0] * 50)
    ((1.0, 3.0), (1.0, 2.0))
    """
    size = max(1, len(values) // parts) if len(values) > 2 * parts else 1
    medians = [statistics.median(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
    return min(medians), max(medians)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def best_of(
    what: str, unit: str, ours: Sequence[float], theirs: Sequence[float], other: str, goal: float | None = None, note: str = ""
) -> Figure:
    """Compare the best rounds; the spread is that of the ratios of neighbouring rounds, and a note has the ratio of the medians.

    >>> best_of("a save", "ms", [4.0, 2.0, 6.0], [5.0, 4.0, 4.0], "torch").cells[3:]
    ('0.50', '0.50 to 1.50', '', '', '(medians 1.00)')
    """
    low, high = spread_of([entry / base for entry, base in zip(ours, theirs, strict=False)])
    notes = [f"medians {statistics.median(ours) / statistics.median(theirs):.2f}", *([note] if note else [])]
    return Figure(what, min(ours), unit, min(theirs), other, goal, f"({'; '.join(notes)})", low=low, high=high)


def over_runs(runs: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return the figures of the run in the middle, for each figure, with the spread over all runs.

    >>> over_runs([[Figure("a", 3.0, "s")], [Figure("a", 1.0, "s")], [Figure("a", 2.0, "s")]])[0].cells[:5]
    ('a', '2 s', '', '', '1 to 3 s')
    """
    if len(runs) == 1:
        return list(runs[0])
    found = []
    for same in zip(*runs, strict=True):
        ordered = sorted(same, key=lambda figure: figure.value)
        middle = asdict(ordered[(len(ordered) - 1) // 2])
        found.append(Figure(**{**middle, "low": ordered[0].value, "high": ordered[-1].value}))
    return found


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The figures of a group, and where they come from."""

    figures: tuple[Figure, ...]
    command: str
    machine: dict[str, Any]
    commit: str
    date: str


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    versions = {}
    for name in ("slipstream", "torch", "accelerate", "lightning"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version(), **versions}


def provenance(command: str) -> dict[str, Any]:
    """Return what a saved result says about where it comes from: its command, machine, commit and date."""
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return {
        "command": command,
        "machine": machine(),
        "commit": found.stdout.strip() or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def own_command() -> str:
    """Return the command of this script, without the options that say where its results go.

    >>> own_command().startswith("python benchmarks/")
    True
    """
    words = iter(word for word in sys.argv[1:] if word != "--draw")
    kept = [word for word in words if not word.startswith("--json=") and (word != "--json" or not next(words, ""))]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept])


def save(path: Path, groups: dict[str, Sequence[Figure]], command: str = "") -> None:
    """Save a record for each group as JSON; other groups that the file has are kept."""
    made = {name: Record(tuple(found), **provenance(command or own_command())) for name, found in groups.items()}
    records = {**(load(path) if path.exists() else {}), **made}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(record) for name, record in records.items()}, indent=1) + "\n")


def load(path: Path) -> dict[str, Record]:
    """Return the records of a file that `save` wrote, by group; raise SystemExit with a reason where it is not such a file."""
    known = {field.name for field in fields(Figure)}
    try:
        entries = json.loads(path.read_text())
        figures = {name: tuple(Figure(**{key: row[key] for key in known}) for row in entry["figures"]) for name, entry in entries.items()}
        return {name: Record(**{**entry, "figures": figures[name]}) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise SystemExit(f"{path} is not a file of figures ({why}); `python benchmarks/run.py --help` says what writes one") from None


# -- the program of a script ------------------------------------------------------------------------------------------


class Missing(SystemExit):
    """Something that a measurement needs is not installed here; the message says what, and how to get it."""


def require(*modules: str) -> None:
    """Raise `Missing` unless these modules can be imported: the libraries that a measurement compares with."""
    if gone := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise Missing(f"this needs {' and '.join(gone)}, not installed in {sys.prefix}: `make bench` makes an environment with it")


def above_zero(text: str) -> float:
    """Return a number that is given on the command line, if it is above zero and finite.

    >>> above_zero("10")
    10.0
    """
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above zero")
    return number


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file, with the command, the machine, the commit and the date")
    return parser


def report(group: str, figures: Sequence[Figure], given: argparse.Namespace) -> None:
    """Print the figures, and save them where the options say so."""
    print(table(group, figures), flush=True)
    if given.json:
        save(given.json, {group: figures})


# -- commands ---------------------------------------------------------------------------------------------------------


def slipstream(*words: str) -> list[str]:
    """Return a Slipstream command, run by the current interpreter."""
    return [str(Path(sys.executable).parent / "slipstream"), *words]


def launch(workers: int, script: str, *words: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a script of this folder on CPU workers."""
    return slipstream("launch", "--cpu", "--num_processes", str(workers), *options, str(HERE / script), *words)


def quiet_environment(**more: str) -> dict[str, str]:
    """Return the environment of a measured command: one thread per process, because the cores are shared."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Run a command that must succeed; return its wall and CPU seconds, those of its own processes included."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet_environment())
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime


def job(ranks: int, worker: str, *words: str, limit: float = 1800, apart: bool = False) -> Any:
    """Run a worker of this folder, on one rank without the launcher, and return the JSON that it wrote to its first argument.

    With `apart` it runs in a temporary folder, for libraries that write into the current one.
    """
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "found.json"
        all_words = [str(output), *words]
        command = [sys.executable, str(HERE / worker), *all_words] if ranks == 1 else launch(ranks, worker, *all_words)
        subprocess.run(command, check=True, timeout=limit, env=quiet_environment(), cwd=name if apart else None)
        return json.loads(output.read_text())
