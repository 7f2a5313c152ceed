"""Scripts in the style of Accelerate's examples run on one and on two processes, with the same results.

Each file beside this one is such a script. One process with the global batch is the oracle; a script gives no unnecessary warnings.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from log_capture import captured_log

FOLDER = Path(__file__).parent
GLOBAL_BATCH = 8
RULE = "--scheduler_steps_per_process"


class Ran(NamedTuple):
    """The result and the messages of a script on one rank."""

    result: dict[str, Any]
    messages: list[str]


@contextlib.contextmanager
def captured_messages() -> Iterator[list[str]]:
    """Capture the warnings of a block, from `logging` and from `warnings`."""
    with captured_log(level=logging.WARNING) as messages:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            yield messages
        messages.extend(str(warning.message) for warning in given)


def run(name: str, arguments: tuple[str, ...], folder: Path) -> Ran:
    """Run a script on one rank, in a folder that the processes share."""
    before, here, path = sys.argv, os.getcwd(), str(FOLDER / f"{name}.py")
    sys.argv, sys.path = [path, *arguments], [str(FOLDER), *sys.path]
    try:
        os.chdir(folder)
        with captured_messages() as messages, contextlib.redirect_stdout(io.StringIO()):
            names = runpy.run_path(path, run_name="__main__")
        return Ran(names["RESULT"], messages)
    finally:
        os.chdir(here)
        sys.argv, sys.path = before, sys.path[1:]


Script = Callable[..., Ran]


@pytest.fixture
def script(ranks: Any, tmp_path: Path) -> Script:
    """Return a function that runs a script: `script("text_shape", 2, "--cpu")` is the result of rank 0, equal on the others."""

    def of(name: str, world: int, *arguments: str) -> Ran:
        first, *others = ranks(world).run(run, name, arguments, tmp_path, timeout=60)
        for other in others:
            if "weights" in first.result:
                assert torch.equal(first.result["weights"], other.result["weights"]), "replicas differ"
        return first

    return of


TEXTS = ("completions", "written", "traces")


def same(single: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two results are the same, numbers up to rounding."""
    assert {name: single.get(name) for name in TEXTS} == {name: other.get(name) for name in TEXTS}
    numbers, others = ({name: value for name, value in result.items() if name not in TEXTS} for result in (single, other))
    torch.testing.assert_close(others, numbers, rtol=1e-6, atol=1e-9)


def batch(world: int, size: int = GLOBAL_BATCH) -> tuple[str, str]:
    return "--batch_size", str(size // world)


ALIKE: dict[str, Callable[[int], tuple[str, ...]]] = {
    "text_shape": lambda world: (*batch(world), RULE),
    "resume_shape": lambda world: (*batch(world), RULE),
    "accumulation_shape": lambda world: (*batch(world), RULE),
    "batch_size_shape": lambda world: (*batch(world, 16), "--largest_batch_size", str(8 // world), RULE),
    "tokens_shape": batch,
    "stopping_shape": lambda world: (*batch(world), "--min_delta", "10", RULE),
    "local_sgd_shape": lambda world: (*batch(world), "--local_sgd_steps", "1", RULE),
    "trimmed_shape": lambda world: (*batch(world), RULE),
    "comm_hook_shape": lambda world: (*batch(world), RULE),
    "schedule_free_shape": batch,
    "prompts_shape": lambda world: (),
    "captions_shape": lambda world: ("captions", str(4 // world)),
}
"""Scripts with the same results on any number of processes, and their arguments."""


IN_UPDATES = "build the schedule after prepare, for math.ceil(len(loader) / accelerator.gradient_accumulation_steps) updates"
EXPECTED_WARNINGS = {"accumulation_shape": IN_UPDATES, "batch_size_shape": IN_UPDATES}
"""Scripts whose schedule counts batches where an update takes two, and the warning on two processes."""


def messages_of(ran: Ran) -> list[str]:
    """Return the messages of a script, except those about a batch size that did not fit."""
    return [message for message in ran.messages if "did not fit" not in message]


@pytest.mark.parametrize("name", ALIKE)
def test_alike(script: Script, name: str) -> None:
    """Two processes give the result of one process with the global batch, without unnecessary warnings."""
    single, two = (script(name, world, *ALIKE[name](world)) for world in (1, 2))
    same(single.result, two.result)
    assert messages_of(single) == []
    expected = [True] * (name in EXPECTED_WARNINGS)
    assert [EXPECTED_WARNINGS.get(name, message) in message for message in messages_of(two)] == expected


COUNTED_BEFORE = {
    "text_shape": "scheduler_steps_per_process=True",
    "resume_shape": "scheduler_steps_per_process=True",
    "trimmed_shape": "scheduler_steps_per_process=True",
    "accumulation_shape": IN_UPDATES,
}
"""Scripts that compute the length of their schedule before `prepare`, and the remedy."""


@pytest.mark.parametrize("name", COUNTED_BEFORE)
def test_schedule(script: Script, name: str) -> None:
    """A schedule of the length before `prepare` works as written; on two processes a warning says what to write instead."""
    single, two = (script(name, world, *batch(world)) for world in (1, 2))
    assert single.messages == []
    (message,) = two.messages
    assert COUNTED_BEFORE[name] in message
    for metrics in (single.result["metrics"], two.result["metrics"]):
        assert {measured["seen"] for measured in (metrics.values() if isinstance(metrics, dict) else metrics)} == {13}


SAVED = (("1", "step_4"), ("3", "step_3"), ("epoch", "epoch_1"))
CUTS = [("resume_shape", ("--checkpointing_steps", every), name) for every, name in SAVED]
CUTS += [("vision_shape", ("--checkpointing_steps", "1", "--log_with", "local"), name) for name in ("step_1", "step_3", "step_5")]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "saving", "checkpoint"), CUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_resume(script: Script, tmp_path: Path, world: int, name: str, saving: tuple[str, ...], checkpoint: str) -> None:
    """A script that skips batches by its own arithmetic resumes exactly: it ends with the weights of the uninterrupted run."""
    whole = script(name, world, *batch(world), *saving, "--output_dir", "whole")
    resumed = ("--output_dir", "rest", "--resume_from_checkpoint", str(tmp_path / "whole" / checkpoint))
    rest = script(name, world, *batch(world), *saving, *resumed)
    assert torch.equal(whole.result["weights"], rest.result["weights"])
    assert rest.result["metrics"] == {epoch: whole.result["metrics"][epoch] for epoch in rest.result["metrics"]}
    assert all("schedule" in message for message in whole.messages + rest.messages)
    assert world == 2 or not whole.messages + rest.messages


def test_vision(script: Script) -> None:
    """The samples of an epoch, and those of the validation, are the same on two processes."""
    for world in (1, 2):
        ran = script("vision_shape", world, *batch(world), "--log_with", "local")
        assert ran.result["steps"] == 9
        assert [metrics["seen"] for metrics in ran.result["metrics"].values()] == [6, 6, 6]


def test_folds(script: Script) -> None:
    """Every process reads a test loader that is not prepared, and none of its rows is dropped."""
    single, two = (script("folds_shape", world, *batch(world), RULE) for world in (1, 2))
    assert (single.result.pop("rows"), two.result.pop("rows")) == (13, 26)
    same(single.result, two.result)
    assert single.messages == two.messages == []


def test_profile(script: Script) -> None:
    """`profile` around an epoch changes nothing, returns a table, and writes a trace of every process."""
    single, two = (script("profiler_shape", world, *batch(world), "--output_trace_dir", f"traces_{world}", RULE).result for world in (1, 2))
    assert (single.pop("traces"), two.pop("traces")) == (["profile_0.json"], ["profile_0.json", "profile_1.json"])
    same(single, two)
    assert single["found"] == [True, True]


def test_tokens(script: Script) -> None:
    """Dividing by the tokens of all processes gives the same result on two; with manual accumulation a warning says what to change."""
    single, two = (script("tokens_shape", world, *batch(world, 4), "--gradient_accumulation_steps", "2") for world in (1, 2))
    same(single.result, two.result)
    for ran in (single, two):
        (message,) = ran.messages
        assert "leave out a factor of 2 that makes up for it" in message


@pytest.mark.parametrize("even", ["yes", "no"])
def test_join(script: Script, even: str) -> None:
    """In `join_uneven_inputs`, too, a sample of a short last batch has the weight of any other."""
    single, two = (script("join_shape", world, *batch(world), "--even_batches", even) for world in (1, 2))
    torch.testing.assert_close(two.result["weights"], single.result["weights"])
    assert single.messages == two.messages == []


@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd"])
def test_comm_hook(script: Script, hook: str) -> None:
    """A communication hook that compresses gradients trains nearly the same model."""
    single, two = (script("comm_hook_shape", world, *batch(world), "--ddp_comm_hook", hook, RULE) for world in (1, 2))
    torch.testing.assert_close(two.result["weights"], single.result["weights"], rtol=0.05, atol=0.05)
    assert single.messages == two.messages == []


def test_local_sgd(script: Script) -> None:
    """Local SGD with several steps ends with equal replicas, and evaluates every sample once."""
    ran = script("local_sgd_shape", 2, *batch(2), "--gradient_accumulation_steps", "2", "--local_sgd_steps", "2", RULE)
    assert [metrics["seen"] for metrics in ran.result["metrics"]] == [13, 13]
    assert all(IN_UPDATES in message for message in ran.messages)
