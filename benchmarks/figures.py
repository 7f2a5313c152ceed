"""Figures: a measurement, its baseline, and whether the goal is met; printed as a table, saved as JSON.

A figure is a ratio of two measurements of one run, or one measurement with a limit in its own unit. Figures without a goal are for
information. Nothing here measures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TITLES = ("what", "ours", "other", "ratio", "goal", "verdict", "")


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
    """The ratio of the medians, or another note on the uncertainty."""
    paired: float | None = None
    """The ratio, if it comes from neighbouring rounds and not from the two times."""

    @property
    def ratio(self) -> float | None:
        if self.paired is not None:
            return self.paired
        return None if self.theirs is None else self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return (self.ours if self.ratio is None else self.ratio) <= self.goal

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.met]


def table(title: str, figures: Iterable[Figure]) -> str:
    """Return the figures as aligned columns, without empty ones.

    >>> print(table("waiting", [Figure("a barrier", 2.0, "ms", 4.0, "torch", goal=0.6)]))
    waiting
      what       ours  other       ratio  goal    verdict
      a barrier  2 ms  torch 4 ms  0.50   <= 0.6  met
    """
    rows = [_cells(figure) for figure in figures]
    used = [column for column in range(len(TITLES)) if any(row[column] for row in rows)]
    rows = [TITLES, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    lines = ["  " + "  ".join(row[column].ljust(widths[column]) for column in used).rstrip() for row in rows]
    return "\n".join([title, *lines])


def _cells(figure: Figure) -> tuple[str, ...]:
    other = "" if figure.theirs is None else f"{figure.other} {_number(figure.theirs)} {figure.unit}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    goal = "" if figure.goal is None else f"<= {figure.goal:g}" + ("" if figure.theirs is not None else f" {figure.unit}")
    return figure.what, f"{_number(figure.ours)} {figure.unit}", other, ratio, goal, figure.verdict, figure.spread


def _number(value: float) -> str:
    """Format three significant digits, without exponents."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    versions = {}
    for name in ("slipstream", "torch", "accelerate", "lightning-fabric"):
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


def save(path: Path, groups: dict[str, Sequence[Figure]]) -> None:
    """Save all figures, with a description of the machine, as JSON."""
    figures = {name: [{**asdict(figure), "ratio": figure.ratio, "met": figure.met} for figure in found] for name, found in groups.items()}
    path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1) + "\n")


def slipstream(*words: str) -> list[str]:
    """Return a Slipstream command, run by the current interpreter."""
    return [str(Path(sys.executable).parent / "slipstream"), *words]


def launch(workers: int, script: str, *words: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a script of this folder on CPU workers."""
    return slipstream("launch", "--cpu", "--num_processes", str(workers), *options, str(HERE / script), *words)


def quiet_environment(**more: str) -> dict[str, str]:
    """Return the environment of a measured command: one thread per process, because the cores are shared."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}
