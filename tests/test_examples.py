"""The examples run, on one process and on several, and say the same; the demo runs through the real command line, as `make demo` does."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))

Outputs = Callable[..., list[str]]


def run(path: Path, arguments: tuple[str, ...], folder: Path) -> str:
    """Runs a file as a script, on one rank, in a folder that the processes share; what it printed."""
    before, here, sys.argv = sys.argv, os.getcwd(), [str(path), *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            os.chdir(folder)
            runpy.run_path(str(path), run_name="__main__")
    finally:
        os.chdir(here)
        sys.argv = before
    return printed.getvalue()


@pytest.fixture(scope="module")
def done() -> dict[object, list[str]]:
    return {}


@pytest.fixture
def outputs(ranks, done, tmp_path_factory) -> Outputs:
    """What an example printed on each of so many ranks; it is run once for all tests of this file."""

    def of(name: str, size: int, *arguments: str) -> list[str]:
        key = (name, size, *arguments)
        if key not in done:
            done[key] = ranks(size).run(run, FOLDER / f"{name}.py", arguments, tmp_path_factory.mktemp(name), timeout=100)
        return done[key]

    return of


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_the_main_process_alone_speaks(outputs: Outputs, name, size):
    main, *others = outputs(name, size)
    assert main
    assert set(others) <= {""}


SAME = {
    "batch_inference": r"^  ([+-]\d\.\d{3})  process \d (.*)",
    "cross_validation": r"^fold .*|^error over all .*",
    "dynamic_inference": r"^ +.* -> .*|^padding: .*|^words .*",
    "early_stopping": r"^epoch .*",
    "effective_batch": r"^losses .*",
    "language_model": r"^epoch .*",
    "larger_than_memory": r"^text \d.*",
    "pipeline_inference": r"^\d+ rows: .*",
    "template": r"^epoch .*",
}


@pytest.mark.parametrize("name", SAME)
def test_results_do_not_depend_on_the_number_of_processes(outputs: Outputs, name):
    alone, *others = (re.findall(SAME[name], outputs(name, size)[0], re.MULTILINE) for size in (1, 2, 4))
    assert len(alone) > 2
    assert others == [alone, alone]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_template_learns_in_every_precision(outputs: Outputs, precision):
    text = outputs("template", 2, "--mixed_precision", precision)[0]
    assert text.startswith(f"{precision}: parameters float32, compute {'bfloat16' if precision == 'bf16' else 'float16'}")


def test_the_template_stops_in_time_on_every_process(outputs: Outputs):
    text = outputs("template", 2, "--seconds", "0")[0]
    assert "epoch 0  update   1 " in text
    assert "the time is up" in text


def test_a_mistake_between_processes_is_explained(outputs: Outputs):
    text = outputs("batch_inference", 2)[0]
    assert "process 0  a quiet film that stays with you" in text
    assert "process 1  seen it twice already" in text
    assert "MismatchError on every process" in text
    assert "rank 1: reduce(sum) float32(3,) at batch_inference.py:" in text
    assert "7 reviews were scored by all of them" in text


def test_uneven_data_shows_what_is_repeated_and_what_is_not(outputs: Outputs):
    text = outputs("uneven_data", 2)[0]
    assert "even_batches=False: 15 samples were handed out for 13" in text
    assert "even_batches=True: 16 samples were handed out for 13" in text


def test_the_batch_that_fits_is_the_same_on_all_processes(outputs: Outputs):
    assert "batches of 16 fit" in outputs("automatic_batch_size", 1)[0]
    assert "batches of 8 fit" in outputs("automatic_batch_size", 2)[0]


@pytest.mark.launched
def test_the_demo_runs_through_the_command_line(tmp_path):
    command = [Path(sys.executable).with_name("slipstream"), "launch", "--cpu", "--num_processes", "2", FOLDER / "demo.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 8: \d+ of 1001 test samples are right", done.stdout)
    assert re.search(r"^\d+ samples/s over 2 process\(es\)", done.stdout, re.MULTILINE)
    assert "\r" not in done.stderr, "the bar is quiet without a terminal"
    assert "where the time went on 2 processes: 320 steps" in done.stderr
    report = re.search(r"^report: (.*report\.html)\Z", done.stderr.rstrip(), re.MULTILINE)
    assert report, "the path of the report comes last"
    assert Path(report[1]).read_text().startswith("<!doctype html>")
