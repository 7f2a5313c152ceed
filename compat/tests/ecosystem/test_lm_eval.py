"""lm-eval on the drop-in, on one and two processes: the same scores and answers."""

from __future__ import annotations

import pytest
from client_runs import REAL, approx, find_report, run_program

pytestmark = [pytest.mark.launched, pytest.mark.timeout(300)]
PROGRAM = "lm_eval_cases.py"


@pytest.mark.parametrize("case", ["shared", "as_released"])
@pytest.mark.parametrize("started_by", ["torchrun", "accelerate"])
def test_two_processes_answer_like_one(case, started_by):
    expected, found = find_report(run_program(PROGRAM, 1), case), find_report(run_program(PROGRAM, 2, started_by), case)
    assert found["processes"] == 2
    assert found["scores"] == expected["scores"]
    assert [len(rows) for rows in found["answers"].values()] == [11, 11]
    assert found["answers"]["tiny_generate"] == expected["answers"]["tiny_generate"]
    for row, wanted in zip(found["answers"]["tiny_choice"], expected["answers"]["tiny_choice"], strict=True):
        assert [likelihood for likelihood, _ in row] == approx([likelihood for likelihood, _ in wanted])


@pytest.mark.skipif(REAL is None, reason="REAL_ACCELERATE names no folder with Accelerate 1.15")
@pytest.mark.parametrize("processes", [1, 2])
def test_equal_to_accelerate(processes):
    expected, found = run_program(PROGRAM, processes, real=True), run_program(PROGRAM, processes)
    for case in ("shared", "as_released"):
        assert find_report(found, case) == find_report(expected, case)
