"""Run a program of `programs/` once for all tests that look at its results: on one process, or on two by torchrun or `accelerate launch`.

`REAL_ACCELERATE` may name a folder with Accelerate 1.15 (`pip install --no-deps --target FOLDER accelerate==1.15.0`); the programs can then
also run on it, and tests compare digit by digit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
REAL = os.environ.get("REAL_ACCELERATE")
Reports = dict[str, dict[str, Any]]

_STARTS = {
    "python": lambda processes: [],
    "torchrun": lambda processes: ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)],
    "accelerate": lambda processes: ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)],
    "accelerate on a device": lambda processes: ["-m", "accelerate.commands.launch", "--num_processes", str(processes)],
}
_ON_A_DEVICE = {"ACCELERATE_USE_CPU": "false", "SLIPSTREAM_DEVICE": "standin", "ACCELERATE_TORCH_DEVICE": "standin"}
"""The stand-in accelerator, for us and for transformers, which asks the last variable about families that it does not know."""


@functools.cache
def run_program(
    program: str,
    processes: int,
    started_by: str = "torchrun",
    *cases: str,
    options: tuple[str, ...] = (),
    real: bool = False,
    folder: str = "",
) -> Reports:
    """Return the report of each case that the program ran. An error of a case is in its report; the program itself has to end well.

    `options` are those of the launcher.
    """
    with tempfile.TemporaryDirectory() as own:
        variables = {
            "CASE_FOLDER": folder or own, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "REPORT_FOLDER": own,
        }  # fmt: skip
        if started_by == "accelerate on a device":
            variables |= _ON_A_DEVICE
        if real:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [REAL, os.environ.get("PYTHONPATH")]))
        start = _STARTS["python" if processes == 1 and started_by == "torchrun" else started_by](processes)
        words = [sys.executable, *start, *options, str(PROGRAMS / program), *cases]
        ended = subprocess.run(
            words, env={**os.environ, **variables}, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=400, cwd=own
        )
        lines = [line for file in sorted(Path(own).glob("rank*.jsonl")) for line in file.read_text().splitlines()]
    if ended.returncode:
        output = f"{ended.stdout}\n{ended.stderr}"
        pytest.fail(f"`{' '.join(words)}` ended with exit code {ended.returncode} and wrote:\n{output}", pytrace=False)
    reports: Reports = {}
    for line in lines:
        report = json.loads(line)
        if "error" not in reports.get(report["case"], {}):
            reports[report["case"]] = report
    return reports


def find_report(reports: Reports, case: str) -> dict[str, Any]:
    """Return the report of a case; fail with its traceback if it did not end well."""
    report = reports[case]
    if "error" in report:
        pytest.fail(f"{case} (rank {report['rank']}): {report['traceback']}", pytrace=False)
    return report


def approx(values: Any, rel: float = 2e-6) -> Any:
    """Return what equals values up to the rounding of another order of additions."""
    return pytest.approx(values, rel=rel, abs=1e-7)
