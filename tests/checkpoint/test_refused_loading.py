"""A checkpoint that cannot be loaded changes nothing: no weight, no state of an optimizer, no random state, on no rank."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import numpy
import pytest
import torch
import twisted
from damage import MUTATIONS
from runs import Run, begin, steps

from slipstream.checkpoint.serialize import flatten
from slipstream.errors import CheckpointError
from slipstream.utils import GradScalerKwargs

pytestmark = pytest.mark.timeout(1200)  # for `--soak`

SHAPES = (([2], "F32"), ([], "F32"), ([0], "F32"), ([3], "C64"), ([5], "U8"), ([2, 2], "I64"), ([1], "BOOL"))


def living(run: Run) -> tuple[Any, dict[str, bytes]]:
    """Everything that loading could change, bit for bit."""
    parts = run.accelerator._components
    optimizer = run.optimizer.optimizer
    everything = {
        "weights": [parameter.detach() for parameter in run.model.parameters()],
        "gradients": [parameter.grad for parameter in run.model.parameters()],
        "moments": [dict(optimizer.state[parameter]) for parameter in run.model.parameters() if parameter in optimizer.state],
        "groups": [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups],
        "counts": [run.optimizer.updates, run.optimizer.step_was_skipped, run.accelerator.sync_gradients],
        "scheduler": run.scheduler.state_dict(),
        "loader": run.loader.state_dict(),
        "object": run.counter.state_dict(),
        "loop": parts.stepper.loop_state(),
        "scale": parts.precision.scaler.state_dict(),
        "random": [
            torch.get_rng_state(),
            list(random.getstate()[1]),
            numpy.random.get_state(legacy=True)[1],
            numpy.random.get_state(legacy=True)[2],
        ],
    }
    tree, tensors = flatten(everything, "the run")
    return tree, {
        name: tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items() if tensor.numel()
    }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run in the middle of an update, with a checkpoint of an earlier moment (`early`) and of now (`now`)."""
    handlers = [GradScalerKwargs(init_scale=2.0**10, growth_interval=3)]
    run = begin(gradient_accumulation_steps=4, mixed_precision="fp16", kwargs_handlers=handlers)
    for number, _ in enumerate(steps(run, run.loader)):
        if number in (13, 26):
            run.accelerator.save_state(tmp_path / ("early" if number == 13 else "now"))
        if number == 26:
            break
    yield run
    run.accelerator.free_memory()


def attempt(run: Run, folder: Path, before: Any) -> str:
    """Loads; a refusal has to be ours, name the folder, and change nothing."""
    problem = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run.accelerator.load_state(folder)
        except CheckpointError as error:
            problem = str(error)
    if problem is None:
        return "loaded"
    assert str(folder) in problem
    assert living(run) == before, problem
    return "refused"


def test_damage_refused_and_changes_nothing(run: Run, tmp_path: Path, rounds: Callable[..., int]) -> None:
    """Damage is refused and changes nothing."""
    before, folder = living(run), tmp_path / "case"
    for seed in range(rounds(ci=3, soak=40) * len(MUTATIONS)):
        shutil.copytree(tmp_path / "early", folder)
        MUTATIONS[seed % len(MUTATIONS)](random.Random(seed), folder, tmp_path / "now")
        assert attempt(run, folder, before) == "refused", seed
        shutil.rmtree(folder)


def test_wrong_value_loaded_or_refused(run: Run, tmp_path: Path, rounds: Callable[..., int]) -> None:
    """A state with a wrong value is loaded or changes nothing."""
    early, folder = tmp_path / "early", tmp_path / "case"
    cases: list[tuple[Callable[..., None], Any, Any]] = [
        *((twisted.twist, place, (value,)) for place in twisted.places(early) for value in (..., *twisted.VALUES)),
        *((twisted.reshape, place, shape) for place in twisted.tensors(early) for shape in SHAPES),
    ]
    random.Random(0).shuffle(cases)
    run.accelerator.load_state(tmp_path / "now")
    before, outcomes = living(run), []
    for twist, place, value in cases[: rounds(ci=100, soak=len(cases))]:
        shutil.copytree(early, folder)
        twist(folder, place, *value)
        outcomes.append(attempt(run, folder, before))
        shutil.rmtree(folder)
        if outcomes[-1] == "loaded":
            run.accelerator.load_state(tmp_path / "now")
            before = living(run)  # a scheduler keeps entries that it does not know, for example
    assert outcomes.count("refused") > len(outcomes) // 4
    assert "loaded" in outcomes


class Stubborn:
    """An object that does not take what it gave."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("patience")


def test_object_refuses_leaves_rest_as(run: Run, tmp_path: Path) -> None:
    """An object that refuses leaves the rest as it was."""
    run.accelerator.register_for_checkpointing(Stubborn())
    run.accelerator.save_state(tmp_path / "more")
    next(iter(steps(run, run.loader)))
    run.counter.seen = []
    before = living(run)
    with pytest.raises(CheckpointError, match=r"registered object 1 \(Stubborn\) rejected its state \(KeyError: 'patience'\)"):
        run.accelerator.load_state(tmp_path / "more")
    after = living(run)
    assert after[0].pop("object") != before[0].pop("object")  # objects before it have no way back
    assert after == before


def test_if_rank_refuses_no_rank_changes(tmp_path: Path, ranks: Any) -> None:
    """If one rank refuses no rank changes."""
    folder = tmp_path / "checkpoint"

    def train() -> None:
        run = begin(gradient_accumulation_steps=2)
        for number, _ in enumerate(steps(run, run.loader)):
            if number == 4:
                run.accelerator.save_state(folder)
                run.accelerator.wait_for_everyone()
                if run.accelerator.is_main_process:  # a state of the optimizer's that it refuses itself, in what both ranks read
                    twisted.twist(folder, ("optimizer.safetensors", ("state", "$dict", 1, 1)), "x")
                run.accelerator.wait_for_everyone()
            if number == 6:
                break
        if run.accelerator.process_index == 1:  # this rank takes it
            run.optimizer.optimizer.load_state_dict = lambda state: None
        before = living(run)
        with pytest.raises(Exception, match="optimizer 0") as caught:
            run.accelerator.load_state(folder)
        assert isinstance(caught.value, RuntimeError)
        assert living(run) == before

    ranks(2).run(train)


def test_twist_changes_what_says(tmp_path: Path, run: Run) -> None:
    """What the tests above stand on: a value that is put back is loaded as before."""
    run.accelerator.load_state(tmp_path / "now")
    before = living(run)
    shutil.copytree(tmp_path / "now", tmp_path / "case")
    twisted.twist(tmp_path / "case", ("optimizer.safetensors", ("param_groups", 0, "lr")), 0.5)
    run.accelerator.load_state(tmp_path / "case")
    assert run.optimizer.param_groups[0]["lr"] == 0.5
    run.accelerator.load_state(tmp_path / "now")
    assert living(run) == before
    assert hostile.body_of(tmp_path / "case")["step"] == hostile.body_of(tmp_path / "now")["step"]
