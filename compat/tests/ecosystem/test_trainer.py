"""transformers' Trainer on the drop-in, on one and two processes.

What is expected comes from a plain loop, from one process, or from the undisturbed run; where Accelerate is at hand (see `client_runs`),
also from the same program on it, to the last digit.
"""

from __future__ import annotations

import pytest
from client_runs import REAL, Reports, approx, find_report, run_program

pytestmark = [pytest.mark.launched, pytest.mark.timeout(600)]
PROGRAM = "trainer_cases.py"


@pytest.fixture(scope="module")
def one() -> Reports:
    return run_program(PROGRAM, 1)


@pytest.fixture(scope="module")
def two() -> Reports:
    return run_program(PROGRAM, 2)


# -- the same as a plain loop, and the same on two processes as on one ----------------------------------------------------


@pytest.mark.parametrize("case", ["ordered", "accumulated"])
def test_trains_like_a_plain_loop(one, two, case):
    """Losses, clipped norms and weights are those of a loop in plain PyTorch, on any number of processes."""
    expected = find_report(one, "plain")
    for reports in (one, two):
        found = find_report(reports, case)
        for name in ("losses", "norms", "weights"):
            assert found[name] == approx(expected[name]), name


SAME_ON_TWO = [
    "ordered", "accumulated", "shuffled", "ragged", "last_window", "grouped", "rebalanced", "smoothed", "streamed", "dispatched", "split",
    "workers", "dropped", "own_loss", "own_optimizer", "compiled", "whole",
]  # fmt: skip


@pytest.mark.parametrize("case", SAME_ON_TWO)
def test_two_processes_train_like_one(one, two, case):
    """The same global batches and the same mean over tokens: losses, norms and rates agree."""
    expected, found = find_report(one, case), find_report(two, case)
    assert found["steps"] == expected["steps"]
    assert found["rates"] == approx(expected["rates"])
    assert found["losses"] == approx(expected["losses"], rel=5e-6)
    assert found["norms"] == approx(expected["norms"], rel=2e-5)


def test_half_precision(one, two):
    """bf16 trains, close to fp32."""
    for reports in (one, two):
        assert find_report(reports, "half")["losses"] == approx(find_report(reports, "whole")["losses"], rel=5e-3)


@pytest.mark.parametrize("case", ["checkpointed", "counted", "uneven", "filled", "tokens_per_device", "streamed_apart", "seeded_sampler"])
def test_runs(one, two, case):
    """Runs whose numbers depend on the processes (dropout, filled batches, means per device) end after all steps."""
    for reports in (one, two):
        report = find_report(reports, case)
        assert len(report["losses"]) == report["steps"]
        assert all(0 < loss < 5 for loss in report["losses"])


def test_tokens_are_counted(one, two):
    """The tokens seen are those of all processes."""
    assert find_report(one, "counted")["tokens"] == find_report(two, "counted")["tokens"] == 6 * 8 * 12


def test_compiles(one, two):
    """torch_compile compiles the model that the Trainer calls, and the losses stay what they are."""
    for reports in (one, two):
        assert find_report(reports, "compiled")["compiled"]
        assert find_report(reports, "compiled")["losses"] == approx(find_report(reports, "whole")["losses"])


def test_schedules(one, two):
    """A schedule moves once per update on any number of processes: the Trainer does not prepare its scheduler."""
    expected = find_report(one, "schedules")["rates"]
    assert find_report(two, "schedules")["rates"] == expected
    assert len({tuple(rates) for rates in expected.values()}) == len(expected)


# -- evaluation -----------------------------------------------------------------------------------------------------------


def test_best_model_and_early_stopping(one, two):
    """The same steps are evaluated, the same checkpoint is the best, training stops early, and the best model is loaded."""
    expected, found = find_report(one, "classify"), find_report(two, "classify")
    for report in (expected, found):
        assert report["steps"] < 40
        assert report["best"] in report["kept"]
        assert report["final"] == report["metric"]
        assert all(entry["eval_seen"] == 21 for entry in report["evaluations"])
    for name in ("best", "metric", "steps", "kept"):
        assert found[name] == expected[name]
    assert [entry["eval_accuracy"] for entry in found["evaluations"]] == [entry["eval_accuracy"] for entry in expected["evaluations"]]


def test_predict(one, two):
    """Predictions come back in order, each sample once, also where they are moved in between or returned by batches."""
    expected, found = find_report(one, "predict"), find_report(two, "predict")
    for report in (expected, found):
        assert report["plain labels"]
        assert report["moved labels"]
        assert report["lists labels"]
        assert report["plain"] == report["moved"] == report["lists"]
    assert found["plain"] == approx(expected["plain"])
    assert found["batch metrics"] == expected["batch metrics"] == [expected["batch metrics"][0], 21.0]


def test_predictions_gathered_as_objects(one, two):
    """eval_use_gather_object returns each sample once."""
    for reports in (one, two):
        assert find_report(reports, "objects")["count"] == 21
        assert find_report(reports, "objects")["right"]


def test_sets_smaller_than_the_processes(one, two):
    """An evaluation set of one sample ends on two processes."""
    assert find_report(two, "several_sets").keys() == find_report(one, "several_sets").keys()


def test_generate(one, two):
    """Seq2SeqTrainer pads what it generates to one length and gathers it in order."""
    expected, found = find_report(one, "generate"), find_report(two, "generate")
    assert found["generated"] == expected["generated"]
    assert found["sum"] == expected["sum"]


# -- failures and restarts ------------------------------------------------------------------------------------------------


def test_finds_a_batch_size(one, two):
    """A full device leads to smaller batches, by Accelerate's factor, until they fit."""
    for reports in (one, two):
        tried = find_report(reports, "find_batch_size")["tried"]
        assert tried == [16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 4, 4]


@pytest.mark.parametrize(
    ("case", "parts"), [("resume", ["from 5", "from 10"]), ("resume_accumulated", ["from 2"]), ("resume_stream", ["from 3"])]
)
@pytest.mark.parametrize("processes", [1, 2])
def test_resumes_exactly(one, two, case, parts, processes):
    """A run that goes on from a checkpoint in the middle of an epoch is the undisturbed one, to the last digit."""
    report = find_report(one if processes == 1 else two, case)
    for part in parts:
        for name in ("losses", "norms", "rates", "weights"):
            assert report[part][name] == report[name], (part, name)


@pytest.mark.parametrize("started_by", ["python", "torchrun", "accelerate"])
def test_resumes_in_a_new_process(one, two, tmp_path, started_by):
    """A run that was stopped goes on in another process as if nothing had happened."""
    processes = 1 if started_by == "python" else 2
    run_program(PROGRAM, processes, started_by, "stopped", folder=str(tmp_path))
    found = find_report(run_program(PROGRAM, processes, started_by, "continued", folder=str(tmp_path)), "continued")
    expected = find_report(one if processes == 1 else two, "undisturbed")
    assert len(expected["losses"]) == 12
    for name in ("losses", "norms", "rates", "weights"):
        assert found[name] == expected[name], name


def test_accelerate_launch(two):
    """`accelerate launch --cpu --num_processes 2` gives the numbers of torchrun."""
    found = run_program(PROGRAM, 2, "accelerate", "ordered", "shuffled", "predict")
    for case in ("ordered", "shuffled", "predict"):
        expected = find_report(two, case)
        assert {name: value for name, value in find_report(found, case).items() if name != "rank"} == {
            name: value for name, value in expected.items() if name != "rank"
        }


@pytest.mark.parametrize("case", ["ordered", "accumulated", "shuffled", "dispatched", "predict", "generate"])
def test_on_an_accelerator(two, standin, case):
    """Two processes with a stand-in accelerator each give the numbers of the CPU."""
    found = run_program(PROGRAM, 2, "accelerate on a device", "ordered", "accumulated", "shuffled", "dispatched", "predict", "generate")
    expected = find_report(two, case)
    for name, value in find_report(found, case).items():
        if name in ("losses", "norms", "weights", "rates", "steps", "plain"):
            assert value == approx(expected[name]), name
        if name == "generated":
            assert value == expected[name]


# -- sharded --------------------------------------------------------------------------------------------------------------


def test_shards_through_training_arguments(two):
    """fsdp_config shards the model, and trains and evaluates as without."""
    found, expected = find_report(two, "sharded"), find_report(two, "whole")
    assert found["enabled"]
    assert found["kind"] == "DTensor"
    assert found["losses"] == approx(expected["losses"])
    assert found["norms"] == approx(expected["norms"], rel=1e-5)
    assert [entry["eval_loss"] for entry in found["evaluations"]] == approx([entry["eval_loss"] for entry in expected["evaluations"]])


@pytest.mark.parametrize(
    "option", ["offloaded", "recomputed", "kept", "by size", "accumulated", "half", "version 1", "version 1, gradients"]
)
def test_options_of_sharding(two, option):
    """Options change memory and speed, not the losses; those of version 1 are translated."""
    expected = find_report(two, "whole")["losses"]
    assert find_report(two, "sharded_options")[option] == approx(expected, rel=5e-3 if option == "half" else 2e-6)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_saves_and_resumes_sharded(two, kind):
    """A sharded run goes on from its checkpoint exactly; a full state dict is read by from_pretrained."""
    report = find_report(two, "sharded_saved")[kind]
    for name in ("losses", "norms", "weights"):
        assert report["from 3"][name] == report[name], name
    assert report.get("loaded", report["weights"]) == approx(report["weights"])


def test_shards_by_the_launcher(two):
    """`accelerate launch --use_fsdp` shards without a word in TrainingArguments."""
    flags = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    layers = ("--fsdp_transformer_layer_cls_to_wrap", "GPT2Block")
    found = find_report(run_program(PROGRAM, 2, "accelerate", "whole", options=(*flags, *layers)), "whole")
    assert found["enabled"]
    assert found["kind"] == "DTensor"
    assert found["losses"] == approx(find_report(two, "whole")["losses"])


def test_sharding_needs_processes(one):
    """On one process the Trainer refuses."""
    assert "distributed" in one["sharded"]["error"]


# -- side by side ---------------------------------------------------------------------------------------------------------

NOT_COMPARED = {"sharded", "sharded_options", "sharded_saved"}
"""Accelerate does not shard on CPU."""


@pytest.mark.skipif(REAL is None, reason="REAL_ACCELERATE does not name a folder with Accelerate 1.15")
@pytest.mark.parametrize("processes", [1, 2])
def test_same_digits_as_accelerate(one, two, processes):
    """Every number of every run is that of Accelerate 1.15, to the last digit."""
    ours, theirs = one if processes == 1 else two, run_program(PROGRAM, processes, real=True)
    different = [case for case in theirs if case not in NOT_COMPARED and {**ours[case], "rank": 0} != {**theirs[case], "rank": 0}]
    assert different == []
