"""The examples run: on one rank and on several, and through the real command line as `make demo` does."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
DEMO = next(path for path in EXAMPLES if path.name == "batch_inference.py")


def run(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(ranks, path, size):
    ranks(size).run(run, path)


def test_the_demo_shows_the_work_shared_and_the_mistake_explained(ranks):
    main, other = (outcome.output for outcome in ranks(2).outcomes(run, DEMO))
    assert "process 0  a quiet film that stays with you" in main
    assert "process 1  seen it twice already" in main
    assert "MismatchError on every process" in main
    assert "rank 1: reduce(sum) float32(3,) at batch_inference.py:" in main
    assert "7 reviews were scored by all of them" in main
    assert other == "", "only the main process speaks"


def test_the_results_do_not_depend_on_the_number_of_processes(ranks):
    def scores(size):
        text = ranks(size).outcomes(run, DEMO)[0].output
        return [(line.split()[0], line.split()[3:]) for line in text.splitlines() if line.startswith("  ") and "process" in line]

    assert len(scores(1)) == 7
    assert scores(1) == scores(2) == scores(4)


@pytest.mark.launched
def test_the_demo_runs_through_the_command_line(tmp_path):
    command = [Path(sys.executable).with_name("slipstream"), "launch", "--cpu", "--num_processes", "2", DEMO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "7 reviews were scored by all of them" in done.stdout
