"""What the soak makes of its samples and of its parts: slopes, verdicts, schedules, exit codes. Nothing is disturbed here."""

from __future__ import annotations

import doctest
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import soak_faults  # noqa: E402
import soak_usage  # noqa: E402


def samples(per_hour: float, *, processes: int = 6, noise: float = 0.0) -> list[dict[str, Any]]:
    """Processes one after the other, each of which begins at 300 MB and grows by so much."""
    chance = random.Random(0)
    return [
        {"process": str(process), "work": minute, "time": 600.0 * process + 60.0 * minute, "files": 30, "threads": 6, "children": 1}
        | {"memory": 300.0 + per_hour * minute / 60 + chance.gauss(0, noise) + (10 if minute < 2 else 0)}
        for process in range(processes)
        for minute in range(10)
    ]


def slope(found: list[soak_usage.Slope], what: str, scope: str) -> soak_usage.Slope:
    return next(entry for entry in found if (entry.what, entry.scope) == (what, scope))


def test_examples_in_docstrings() -> None:
    """The examples in the docstrings are right."""
    assert doctest.testmod(soak_usage) == (0, 1)


def test_growth_within_processes() -> None:
    """Growth that begins anew with every process is found, whatever the noise, and the warm-up is left out."""
    found = soak_usage.slopes("worker", samples(60.0, noise=0.2), warm_up=2)
    within = slope(found, "memory", "within")
    assert within.grows
    assert within.per_hour == pytest.approx(60.0, rel=0.1)
    assert not slope(found, "memory", "process to process").grows
    assert not slope(found, "files", "within").grows


def test_growth_from_process_to_process() -> None:
    """Growth that a new process inherits is found, and is none within."""
    inherited = [{**sample, "files": 30 + int(sample["process"])} for sample in samples(0.0)]
    found = soak_usage.slopes("worker", inherited, warm_up=2)
    assert slope(found, "files", "process to process").grows
    assert not slope(found, "files", "within").grows


def test_roles_are_compared_with_themselves() -> None:
    """A rank that holds more than another is no growth, whichever comes later."""
    roles = [{**sample, "role": str(int(sample["process"]) // 3), "files": 30 + int(sample["process"]) // 3} for sample in samples(0.0)]
    assert slope(soak_usage.slopes("worker", roles, warm_up=2), "files", "process to process").per_hour == 0


def test_noise_is_no_growth() -> None:
    """Noise is not taken for growth, and neither are too few samples."""
    assert not any(entry.grows for entry in soak_usage.slopes("worker", samples(0.0, noise=3.0), warm_up=2))
    assert not any(entry.grows for entry in soak_usage.slopes("worker", samples(900.0)[:4], warm_up=2))


@pytest.mark.parametrize(("machines", "is_root"), [(1, False), (1, True), (2, True)])
def test_schedule_follows_from_seed(machines: int, is_root: bool) -> None:
    """The same seed gives the same faults; every kind that can strike comes, and the last one ends the launch."""
    job: Any = SimpleNamespace(machines=machines, is_root=is_root)
    first = [soak_faults.schedule(7, number, job) for number in range(30)]
    assert first == [soak_faults.schedule(7, number, job) for number in range(30)]
    assert first != [soak_faults.schedule(8, number, job) for number in range(30)]
    kinds = {fault.kind for faults in first for fault in faults if fault is not None}
    missing = (set() if is_root else {"disk full"}) | (set() if machines > 1 else {"network blip", "network cut"})
    assert kinds == set(soak_faults.KINDS) - missing
    assert {faults[-1].kind for faults in first if faults[-1] is not None} <= {"network cut", "launcher killed"}
    assert all(faults.count(None) == 1 for faults in first)


def test_parts_run_after_a_failure(tmp_path: Path) -> None:
    """A part that fails is reported at the end, the next one runs nevertheless, and the exit code says it."""
    program = (
        "import sys, soak\n"
        "soak.parts = lambda hours, results: {'bad': ['-c', 'print(1); raise SystemExit(3)'], 'good': ['-c', 'print(2)']}\n"
        f"sys.argv = ['soak.py', '--results', {str(tmp_path / 'results.md')!r}]\nsoak.main()"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "1 of 2 parts passed" in ended.stdout
    assert "FAILED: bad" in ended.stdout
    rows = (tmp_path / "results.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| bad", "| good"]
    assert ["FAILED (3)" in rows[0], "passed" in rows[1]] == [True, True]
    assert (tmp_path / "good.log").read_text() == "2\n"
