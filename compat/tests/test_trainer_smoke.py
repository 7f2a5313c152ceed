"""transformers' Trainer on the drop-in, as far as every change has to keep it: it trains, evaluates, predicts, saves and resumes.

The programs are those of `ecosystem/`, where all cases and other clients are tested.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ecosystem"))

from client_runs import Reports, approx, find_report, run_program  # noqa: E402 - the path comes first

pytestmark = pytest.mark.launched
CASES = ("plain", "ordered", "ragged", "predict", "resume")


@pytest.fixture(scope="module")
def one() -> Reports:
    return run_program("trainer_cases.py", 1, "accelerate", *CASES)


@pytest.fixture(scope="module")
def two() -> Reports:
    return run_program("trainer_cases.py", 2, "accelerate", *CASES)


def test_trains_like_a_plain_loop(one, two):
    """Losses, clipped norms and weights are those of a loop in plain PyTorch, on one and two processes."""
    expected = find_report(one, "plain")
    for reports in (one, two):
        for name in ("losses", "norms", "weights"):
            assert find_report(reports, "ordered")[name] == approx(expected[name]), name


def test_accumulates_and_evaluates(one, two):
    """The mean of an accumulated update is over the tokens of all processes."""
    expected, found = find_report(one, "ragged"), find_report(two, "ragged")
    assert found["losses"] == approx(expected["losses"])
    assert found["norms"] == approx(expected["norms"], rel=2e-5)
    assert found["evaluated"] == approx(expected["evaluated"], rel=5e-3)  # Trainer averages over batches


def test_predicts_every_sample_once(one, two):
    """Predictions are in the order of the samples, without those that fill the last batch."""
    for reports in (one, two):
        report = find_report(reports, "predict")
        assert report["plain labels"]
        assert report["plain"] == approx(find_report(one, "predict")["plain"])


@pytest.mark.parametrize("processes", [1, 2])
def test_resumes_exactly(one, two, processes):
    """A run from a checkpoint in the middle of an epoch is the undisturbed one, to the last digit."""
    report = find_report(one if processes == 1 else two, "resume")
    for part in ("from 5", "from 10"):
        for name in ("losses", "norms", "rates", "weights"):
            assert report[part][name] == report[name], (part, name)
