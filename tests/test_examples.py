"""The examples run on one process and on several, with the same results; the demo runs through the real command line, as in `make demo`."""

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
    """Run a file as a script on one rank, in a folder that the processes share; return what it printed."""
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
    """Return what an example printed on each rank; each example runs once for all tests of this file."""

    def of(name: str, size: int, *arguments: str, device: str | None = None) -> list[str]:
        key = (name, size, device, *arguments)
        if key not in done:
            done[key] = ranks(size, device).run(run, FOLDER / f"{name}.py", arguments, tmp_path_factory.mktemp(name), timeout=100)
        return done[key]

    return of


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(outputs: Outputs, name, size):
    """Every example runs, and only the main process prints."""
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
def test_results_independent_of_world_size(outputs: Outputs, name):
    """Results do not depend on the number of processes."""
    alone, *others = (re.findall(SAME[name], outputs(name, size)[0], re.MULTILINE) for size in (1, 2, 4))
    assert len(alone) > 2
    assert others == [alone, alone]


@pytest.mark.parametrize("name", ["batch_inference", "fsdp", "fsdp_frozen", "template", "watching"])
def test_on_an_accelerator(outputs: Outputs, name):
    """Examples that make tensors of their own keep them on the device, and print there what they print on the CPU."""
    found = outputs(name, 2, device="standin")[0]
    assert found
    if name in SAME:
        assert re.findall(SAME[name], found, re.MULTILINE) == re.findall(SAME[name], outputs(name, 2)[0], re.MULTILINE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_template_precision(outputs: Outputs, precision):
    """The template runs in every precision."""
    text = outputs("template", 2, "--mixed_precision", precision)[0]
    assert text.startswith(f"{precision}: parameters float32, compute {'bfloat16' if precision == 'bf16' else 'float16'}")


def test_template_time_limit(outputs: Outputs):
    """The template stops in time on every process."""
    text = outputs("template", 2, "--seconds", "0")[0]
    assert "epoch 0  update   1 " in text
    assert "the time is up" in text


def test_batch_inference_mismatch(outputs: Outputs):
    """A mistake between processes is explained."""
    text = outputs("batch_inference", 2)[0]
    assert "process 0  a quiet film that stays with you" in text
    assert "process 1  seen it twice already" in text
    assert "MismatchError on every process" in text
    assert "rank 1: reduce(sum) float32(3,) at batch_inference.py:" in text
    assert "7 reviews were scored by all of them" in text


def test_uneven_data_counts(outputs: Outputs):
    """The example shows how many samples are repeated with and without `even_batches`."""
    text = outputs("uneven_data", 2)[0]
    assert "even_batches=False: 15 samples were handed out for 13" in text
    assert "even_batches=True: 16 samples were handed out for 13" in text


def test_fsdp(outputs: Outputs):
    """Shards train as one process does, and a process of two holds half of the state."""
    alone, shared = outputs("fsdp", 1)[0], outputs("fsdp", 2)[0]
    assert "holds 1.00 of the training state" in alone
    assert "holds 0.50 of the training state" in shared
    assert alone.splitlines()[1:2] == shared.splitlines()[1:2]
    assert outputs("fsdp_frozen", 1)[0].splitlines()[:1] == outputs("fsdp_frozen", 2)[0].splitlines()[:1]


def test_automatic_batch_size(outputs: Outputs):
    """The batch that fits is the same on all processes."""
    assert "batches of 16 fit" in outputs("automatic_batch_size", 1)[0]
    assert "batches of 8 fit" in outputs("automatic_batch_size", 2)[0]


@pytest.mark.launched
def test_demo_launched(tmp_path):
    """The demo runs through the command line."""
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
