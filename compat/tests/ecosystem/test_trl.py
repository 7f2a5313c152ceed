"""trl's trainers on the drop-in, on one and two processes.

What is expected comes from one process or from the undisturbed run; where Accelerate is at hand (see `client_runs`), also from the same
program on it, to the last digit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from client_runs import PROGRAMS, REAL, Reports, approx, find_report, run_program

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]
PROGRAM = "trl_cases.py"
CASES = ["sft", "sft_packed", "sft_lora", "sft_resumed", "dpo", "dpo_lora", "reward", "grpo", "drawn_apart"]


@pytest.fixture(scope="module")
def one() -> Reports:
    return run_program(PROGRAM, 1)


@pytest.fixture(scope="module")
def two() -> Reports:
    return run_program(PROGRAM, 2)


@pytest.mark.parametrize("case", ["sft", "sft_lora", "dpo", "dpo_lora", "reward"])
def test_two_processes_train_like_one(one, two, case):
    """The same global batches: losses, norms, rates and weights agree."""
    expected, found = find_report(one, case), find_report(two, case)
    assert found["steps"] == expected["steps"]
    assert found["rates"] == approx(expected["rates"])
    assert found["losses"] == approx(expected["losses"], rel=5e-6)
    assert found["norms"] == approx(expected["norms"], rel=2e-5)
    assert found["weights"] == approx(expected["weights"])


@pytest.mark.parametrize("processes", [1, 2])
def test_resume_is_exact(processes):
    report = find_report(run_program(PROGRAM, processes), "sft_resumed")
    assert report["resumed"] == report["whole"]


def test_started_by_the_command(two):
    found = run_program(PROGRAM, 2, "accelerate", "sft", "grpo")
    for case in ("sft", "grpo"):
        assert find_report(found, case)["losses"] == find_report(two, case)["losses"]


def test_each_process_draws_its_own_completions(one, two):
    assert find_report(two, "drawn_apart")["different"] == 2
    for reports in (one, two):
        assert len(set(find_report(reports, "grpo")["rewards"])) > 1


@pytest.mark.skipif(REAL is None, reason="REAL_ACCELERATE names no folder with Accelerate 1.15")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("processes", [1, 2])
def test_equal_to_accelerate(processes, case):
    expected, found = run_program(PROGRAM, processes, real=True), run_program(PROGRAM, processes)
    assert find_report(found, case) == find_report(expected, case)


def test_command_line(tmp_path):
    """`trl sft` starts its script through the drop-in's launcher."""
    make = "from trl_cases import qwen2, texts; from words import make_tokenizer; import sys; folder = sys.argv[1]; "
    make += "qwen2().save_pretrained(folder + '/model'); make_tokenizer().save_pretrained(folder + '/model'); "
    make += "texts().to_json(folder + '/data/train.jsonl')"
    (tmp_path / "data").mkdir()
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], check=True, cwd=PROGRAMS)
    launcher = ["--cpu", "--num_processes", "2"]
    data = ["--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out"]
    training = ["--max_steps", "2", "--report_to", "none", "--use_cpu", "--bf16", "false", "--max_length", "8"]
    words = [str(Path(sys.executable).parent / "trl"), "sft", *data, *training, *launcher]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
