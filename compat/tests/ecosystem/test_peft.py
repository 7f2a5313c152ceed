"""peft's adapters with transformers' Trainer on the drop-in, on one and two processes, replicated and sharded."""

from __future__ import annotations

import pytest
from client_runs import REAL, Reports, approx, find_report, run_program

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]
PROGRAM = "peft_cases.py"


@pytest.fixture(scope="module")
def one() -> Reports:
    return run_program(PROGRAM, 1)


@pytest.fixture(scope="module")
def two() -> Reports:
    return run_program(PROGRAM, 2)


def test_two_processes_train_like_one(one, two):
    """Losses and norms of LoRA agree, and only the adapter is trained."""
    expected, found = find_report(one, "train_lora"), find_report(two, "train_lora")
    assert found["losses"] == approx(expected["losses"])
    assert found["norms"] == approx(expected["norms"], rel=2e-5)
    assert found["counts"] == expected["counts"]
    assert expected["counts"][0] < expected["counts"][1] / 4
    assert found["kind"] == "PeftModelForCausalLM"


@pytest.mark.parametrize("processes", [1, 2])
def test_saves_merged_and_unmerged(one, two, processes):
    """The saved adapter on a new base, and the merged model, compute what the trained model does."""
    report = find_report(one if processes == 1 else two, "train_lora")
    assert report["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert report["tensors"] == 4  # A and B of two layers
    assert report["from adapter"] == approx(report["trained"], rel=1e-5)
    assert report["from merged"] == approx(report["trained"], rel=1e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_resumes_exactly(one, two, processes):
    """An adapter goes on from its checkpoint, with dropout, to the last digit."""
    report = find_report(one if processes == 1 else two, "resume_lora")
    assert "adapter_model.safetensors" in report["files"]
    for name in ("losses", "norms", "rates", "weights"):
        assert report["from 3"][name] == report[name], name


def test_loads_the_best_adapter(one, two):
    """The same checkpoint is the best on one and two processes."""
    assert find_report(one, "best_lora")["best"] == find_report(two, "best_lora")["best"] != "None"


@pytest.mark.parametrize("kind", ["dora", "head", "ia3", "prompt", "checkpointed", "half"])
def test_other_adapters(one, two, kind):
    """Other kinds of adapters, and options of the run, train alike on one and two processes."""
    expected, found = find_report(one, "variants")[kind], find_report(two, "variants")[kind]
    assert found == approx(expected, rel=5e-3 if kind == "half" else 5e-6)


def test_shards_with_an_adapter(two):
    """LoRA on a sharded model trains as on a replicated one, and its adapter is saved whole."""
    found, expected = find_report(two, "sharded_lora"), find_report(two, "train_lora")
    assert found["kinds"] == ["DTensor"]
    assert found["losses"] == approx(expected["losses"])
    assert found["tensors"] == expected["tensors"]
    assert found["from adapter"] == approx(expected["from adapter"], rel=1e-4)
    assert found["from merged"] == approx(expected["from merged"], rel=1e-3)


def test_resumes_sharded_with_an_adapter(two):
    """A checkpoint of an adapter on a sharded model is resumed from exactly."""
    report = find_report(two, "resume_sharded_lora")
    assert report["from 3"]["losses"] == report["losses"]


@pytest.mark.skipif(REAL is None, reason="REAL_ACCELERATE does not name a folder with Accelerate 1.15")
@pytest.mark.parametrize("processes", [1, 2])
def test_same_digits_as_accelerate(one, two, processes):
    """Every number of the runs that do not shard is that of Accelerate 1.15, to the last digit."""
    ours, theirs = one if processes == 1 else two, run_program(PROGRAM, processes, real=True)
    compared = [case for case in theirs if "sharded" not in case]
    assert [case for case in compared if {**ours[case], "rank": 0} != {**theirs[case], "rank": 0}] == []
