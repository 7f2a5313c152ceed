"""Scripts in the shape of those that were written for Accelerate run on one and on two processes, and mean the same there.

Each file beside this one is such a script. One process with the batch of both is the oracle; a script says nothing but what it has to.
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

FOLDER = Path(__file__).parent
GLOBAL_BATCH = 8
RULE = "--scheduler_steps_per_process"


class Ran(NamedTuple):
    """What one rank made of a script."""

    result: dict[str, Any]
    messages: list[str]


class _Kept(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def messages_kept() -> Iterator[list[str]]:
    """The warnings of a block, from both of the ways in which they are given."""
    messages: list[str] = []
    handler, logger = _Kept(messages), logging.getLogger("slipstream")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            yield messages
        messages.extend(str(warning.message) for warning in given)
    finally:
        logger.removeHandler(handler)


def run(name: str, arguments: tuple[str, ...], folder: Path) -> Ran:
    """Runs a script on one rank, in a folder that the processes share."""
    before, here, path = sys.argv, os.getcwd(), str(FOLDER / f"{name}.py")
    sys.argv, sys.path = [path, *arguments], [str(FOLDER), *sys.path]
    try:
        os.chdir(folder)
        with messages_kept() as messages, contextlib.redirect_stdout(io.StringIO()):
            made = runpy.run_path(path, run_name="__main__")
        return Ran(made["RESULT"], messages)
    finally:
        os.chdir(here)
        sys.argv, sys.path = before, sys.path[1:]


Script = Callable[..., Ran]


@pytest.fixture
def script(ranks: Any, tmp_path: Path) -> Script:
    """`script("text_shape", 2, "--cpu")`: what rank 0 made of it; the others have made the same."""

    def of(name: str, world: int, *arguments: str) -> Ran:
        first, *others = ranks(world).run(run, name, arguments, tmp_path, timeout=60)
        for other in others:
            if "weights" in first.result:
                assert torch.equal(first.result["weights"], other.result["weights"]), "replicas differ"
        return first

    return of


TEXTS = ("completions", "written", "traces")


def same(entry: dict[str, Any], other: dict[str, Any]) -> None:
    """Asserts that two results are the same, numbers up to rounding."""
    assert {name: entry.get(name) for name in TEXTS} == {name: other.get(name) for name in TEXTS}
    numbers, others = ({name: value for name, value in result.items() if name not in TEXTS} for result in (entry, other))
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
"""Scripts that mean the same on any number of processes, and their arguments."""


IN_UPDATES = "build the schedule after prepare, for math.ceil(len(loader) / accelerator.gradient_accumulation_steps) updates"
TOLD = {"accumulation_shape": IN_UPDATES, "batch_size_shape": IN_UPDATES}
"""Those whose schedule counts batches where an update takes two, and what they are told on two processes."""


def said(ran: Ran) -> list[str]:
    """The messages of a script, but those that tell of a batch size that did not fit."""
    return [message for message in ran.messages if "did not fit" not in message]


@pytest.mark.parametrize("name", ALIKE)
def test_alike(script: Script, name: str) -> None:
    """Two processes make of a script what one process with the whole batch makes of it, and nothing is said without a reason."""
    entry, two = (script(name, world, *ALIKE[name](world)) for world in (1, 2))
    same(entry.result, two.result)
    assert said(entry) == []
    assert [TOLD.get(name, message) in message for message in said(two)] == [True] * (name in TOLD)


COUNTED_BEFORE = {
    "text_shape": "scheduler_steps_per_process=True",
    "resume_shape": "scheduler_steps_per_process=True",
    "trimmed_shape": "scheduler_steps_per_process=True",
    "accumulation_shape": IN_UPDATES,
}
"""Scripts that count their schedule before `prepare`, and the remedy."""


@pytest.mark.parametrize("name", COUNTED_BEFORE)
def test_schedule(script: Script, name: str) -> None:
    """A script that counts its schedule before `prepare` runs as it was written; on two processes it is told what to write instead."""
    entry, two = (script(name, world, *batch(world)) for world in (1, 2))
    assert entry.messages == []
    (message,) = two.messages
    assert COUNTED_BEFORE[name] in message
    for metrics in (entry.result["metrics"], two.result["metrics"]):
        assert {measured["seen"] for measured in (metrics.values() if isinstance(metrics, dict) else metrics)} == {13}


SAVED = (("1", "step_4"), ("3", "step_3"), ("epoch", "epoch_1"))
CUTS = [("resume_shape", ("--checkpointing_steps", every), name) for every, name in SAVED]
CUTS += [("vision_shape", ("--checkpointing_steps", "1", "--log_with", "local"), name) for name in ("step_1", "step_3", "step_5")]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "saving", "checkpoint"), CUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_resume(script: Script, tmp_path: Path, world: int, name: str, saving: tuple[str, ...], checkpoint: str) -> None:
    """A script that skips the batches of a checkpoint by its own arithmetic ends with the weights of the run that was never cut."""
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
    """A test loader that is not prepared is read by every process, and none of its rows is dropped."""
    entry, two = (script("folds_shape", world, *batch(world), RULE) for world in (1, 2))
    assert (entry.result.pop("rows"), two.result.pop("rows")) == (13, 26)
    same(entry.result, two.result)
    assert entry.messages == two.messages == []


def test_profile(script: Script) -> None:
    """`profile` around an epoch changes nothing, gives a table, and leaves a trace of every process."""
    entry, two = (script("profiler_shape", world, *batch(world), "--output_trace_dir", f"traces_{world}", RULE).result for world in (1, 2))
    assert (entry.pop("traces"), two.pop("traces")) == (["profile_0.json"], ["profile_0.json", "profile_1.json"])
    same(entry, two)
    assert entry["found"] == [True, True]


def test_tokens(script: Script) -> None:
    """A script that divides by the tokens of all processes means the same on two; with accumulation by hand it is told what to change."""
    entry, two = (script("tokens_shape", world, *batch(world, 4), "--gradient_accumulation_steps", "2") for world in (1, 2))
    same(entry.result, two.result)
    for ran in (entry, two):
        (message,) = ran.messages
        assert "leave out a factor of 2 that makes up for it" in message


@pytest.mark.parametrize("even", ["yes", "no"])
def test_join(script: Script, even: str) -> None:
    """In `join_uneven_inputs` too, a sample of a short last batch counts as much as any other."""
    entry, two = (script("join_shape", world, *batch(world), "--even_batches", even) for world in (1, 2))
    torch.testing.assert_close(two.result["weights"], entry.result["weights"])
    assert entry.messages == two.messages == []


@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd"])
def test_comm_hook(script: Script, hook: str) -> None:
    """A communication hook that compresses gradients trains nearly the same model."""
    entry, two = (script("comm_hook_shape", world, *batch(world), "--ddp_comm_hook", hook, RULE) for world in (1, 2))
    torch.testing.assert_close(two.result["weights"], entry.result["weights"], rtol=0.05, atol=0.05)
    assert entry.messages == two.messages == []


def test_local_sgd(script: Script) -> None:
    """Local SGD with several steps ends with replicas that are the same, and evaluates every sample once."""
    ran = script("local_sgd_shape", 2, *batch(2), "--gradient_accumulation_steps", "2", "--local_sgd_steps", "2", RULE)
    assert [metrics["seen"] for metrics in ran.result["metrics"]] == [13, 13]
    assert all(IN_UPDATES in message for message in ran.messages)
