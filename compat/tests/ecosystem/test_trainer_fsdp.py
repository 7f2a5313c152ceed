"""transformers' Trainer under FSDP through TrainingArguments: two processes train as one, save, and resume exactly."""

from __future__ import annotations

import pytest
from client_runs import Reports, approx, find_report, run_program

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]
PROGRAM = "trainer_fsdp_cases.py"


@pytest.fixture(scope="module")
def two() -> Reports:
    return run_program(PROGRAM, 2)


def test_trains_as_one_process(two):
    """Losses, norms and weights of two sharded processes are those of one process."""
    expected, found = find_report(run_program(PROGRAM, 1), "whole"), find_report(two, "plain_sharded")
    assert found["losses"] == approx(expected["losses"], rel=1e-5)
    assert found["norms"] == approx(expected["norms"], rel=1e-4)
    assert found["weights"] == approx(expected["weights"], rel=1e-5)


@pytest.mark.parametrize(
    "case",
    ["full", "sharded", "sharded_for_accelerate", "version_1", "version_1_sharded", "adapter", "adapter_version_1", "other_kind"],
)
def test_resumes_exactly(two, case):
    """A run that is resumed after half of the updates ends with the numbers of the undisturbed one, to the last digit."""
    report = find_report(two, case)
    assert report["resumed"]["steps"] == 6
    assert {name: report["resumed"][name] for name in ("losses", "norms", "rates", "weights")} == {
        name: report[name] for name in ("losses", "norms", "rates", "weights")
    }


FILES = {
    "full": {"pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors", "scheduler.pt"},
    "version_1": {"pytorch_model_fsdp.bin", "optimizer.bin", "model.safetensors", "scheduler.pt"},
    "sharded": {"scheduler.pt"},
    "sharded_for_accelerate": {"pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "scheduler.pt"},
}


@pytest.mark.parametrize("case", FILES)
def test_writes_the_files_that_trainer_looks_for(two, case):
    """The folder has the names of Accelerate, whole or in shards, and no pickle in shards unless that was asked for."""
    files = find_report(two, case)["files"]
    assert FILES[case] <= set(files)
    if case == "sharded":
        assert [name for name in files if name.startswith(("pytorch_model_fsdp_0/shard-", "optimizer_0/shard-"))]
        assert not [name for name in files if "/" in name and not name.endswith((".safetensors", ".json"))]


def test_from_pretrained_reads_a_sharded_run(two):
    """The weights beside a full state dict are whole."""
    report = find_report(two, "full")
    assert report["loaded"] == approx(report["weights"])


def test_adapter_alone_is_saved(two):
    """With PEFT the shards have the adapter and not the base model."""
    names = find_report(two, "adapter")["names"]
    assert len(names) == 4  # two layers with two matrices
    assert all("lora_" in name for name in names)


def test_loads_the_best_model_at_the_end(two):
    """The evaluation after training is that of the best checkpoint."""
    report = find_report(two, "best")
    assert report["checkpoint"] == "3"
    assert report["loss"] == approx(report["best"])
