"""Checkpoints of the drop-in: both formats, hooks, numbering, what scripts written for Accelerate find in a folder, and what is refused."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, load_custom_state, save_accelerator_state, save_custom_state
from accelerate.utils import ProjectConfiguration, load, save, set_seed

from slipstream.errors import CheckpointError, ConfigError

FORMATS = ["slipstream", "accelerate"]


class Counter:
    """A registered object."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def make(seed: int = 0, **options: Any) -> tuple[Any, ...]:
    """Return an Accelerator, two models with one optimizer and scheduler, and a loader, prepared."""
    accelerator = Accelerator(cpu=True, **options)
    set_seed(seed)
    first, second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(12, 2), batch_size=2)
    return accelerator, *accelerator.prepare(first, second, optimizer, scheduler, loader)


def train(run: tuple[Any, ...], batches: Any) -> list[float]:
    accelerator, first, second, optimizer, scheduler, _ = run
    losses = []
    for batch in batches:
        loss = second(torch.tanh(first(batch))).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# -- save_state and load_state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_goes_on_as_if_undisturbed(tmp_path, form):
    """Weights, optimizer, schedule, random states and objects come back; the script skips the batches that it has seen."""
    run = make()
    accelerator, counter = run[0], Counter([1, "two"])
    accelerator.register_for_checkpointing(counter)
    train(run, list(run[5])[:3])
    assert accelerator.save_state(tmp_path / "saved", checkpoint_format=form) == str(tmp_path / "saved")
    numbers = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    expected = train(run, list(run[5])[3:])
    run = make(seed=9)
    counter.value = None
    run[0].register_for_checkpointing(counter)
    run[0].load_state(tmp_path / "saved")
    assert [random.random(), numpy.random.rand(), torch.rand(1).item()] == numbers
    assert counter.value == [1, "two"]
    assert train(run, run[0].skip_first_batches(run[5], 3)) == expected


def test_files_of_each_format(tmp_path, monkeypatch):
    """The default has a manifest and no pickle; the variable or the argument asks for Accelerate's names."""
    accelerator = make()[0]
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(tmp_path / "own")
    assert "MANIFEST.json" in files(tmp_path / "own")
    assert all(name.endswith((".json", ".safetensors")) for name in files(tmp_path / "own"))
    theirs = {"model.safetensors", "model_1.safetensors", "optimizer.bin", "scheduler.bin"}
    theirs |= {"random_states_0.pkl", "custom_checkpoint_0.pkl"}
    accelerator.save_state(tmp_path / "argument", checkpoint_format="accelerate")
    monkeypatch.setenv("ACCELERATE_CHECKPOINT_FORMAT", "accelerate")
    accelerator.save_state(tmp_path / "variable", safe_serialization=False)
    assert files(tmp_path / "argument") == theirs
    assert files(tmp_path / "variable") == {name.replace("model", "pytorch_model").replace("safetensors", "bin") for name in theirs}
    accelerator.save_state(tmp_path / "overruled", checkpoint_format="slipstream")
    assert "MANIFEST.json" in files(tmp_path / "overruled")
    assert sorted(os.listdir(tmp_path)) == ["argument", "overruled", "own", "variable"]


def test_bin_files_beside_the_own_format(tmp_path):
    """`safe_serialization=False` adds the file that the script will look for, loadable by `torch.load` with `weights_only`."""
    accelerator, first, *_ = make()
    accelerator.save_state(tmp_path / "saved", safe_serialization=False)
    found = torch.load(tmp_path / "saved" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found["weight"], accelerator.unwrap_model(first).weight)
    accelerator.load_state(tmp_path / "saved")


def test_missing_folder_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint"):
        Accelerator(cpu=True).load_state(tmp_path / "missing")


def test_numbering_and_limit(tmp_path):
    """Automatic names count from 0 in either format, and the oldest go; without a folder the newest is loaded."""
    for form in FORMATS:
        root = tmp_path / form
        config = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = make(project_config=config)[0]
        for _ in range(4):
            accelerator.save_state(checkpoint_format=form)
        assert accelerator.save_iteration == 4
        folders = sorted(path.name for path in (root / "checkpoints").iterdir() if path.is_dir() and not path.name.startswith("."))
        assert folders == ["checkpoint_2", "checkpoint_3"]
        assert accelerator.load_state().endswith("checkpoint_3")


def test_failed_save_leaves_the_one_before(tmp_path):
    """A save in Accelerate's format that fails half-way changes nothing under its name."""
    accelerator = make()[0]
    counter = Counter(1)
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path / "saved", checkpoint_format="accelerate")
    before = {name: (tmp_path / "saved" / name).read_bytes() for name in files(tmp_path / "saved")}
    counter.value = lambda: None  # cannot be pickled
    with pytest.raises(Exception, match=r"pickle|lambda"):
        accelerator.save_state(tmp_path / "saved", checkpoint_format="accelerate")
    assert {name: (tmp_path / "saved" / name).read_bytes() for name in files(tmp_path / "saved")} == before
    assert sorted(os.listdir(tmp_path)) == ["saved"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_format": "zip"}, "no such format"),
        ({"checkpoint_format": "accelerate", "async_save": True}, "async_save"),
        ({"safe_serialization": "yes"}, "True or False"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_wrong_options_of_save_state(tmp_path, options, message):
    with pytest.raises((ConfigError, TypeError), match=message):
        make()[0].save_state(tmp_path / "saved", **options)


def test_map_location_and_strict(tmp_path):
    """As in Accelerate, other places than "cpu" and "on_device" are a TypeError; `strict=False` loads what fits."""
    accelerator = make()[0]
    accelerator.save_state(tmp_path / "saved")
    for place in ("cpu", "on_device"):
        accelerator.load_state(tmp_path / "saved", map_location=place, strict=True)
    with pytest.raises(TypeError, match="Unsupported optimizer map location passed"):
        accelerator.load_state(tmp_path / "saved", map_location="nowhere")


# -- hooks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_hooks_save_and_load_by_themselves(tmp_path, form):
    """The way of diffusers' scripts: the hook writes the model and removes its weights; the other model is saved as usual."""
    run = make()
    accelerator, first, second = run[:3]
    seen = []

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert [type(model) for model in models] == [torch.nn.Linear, torch.nn.Linear]
        torch.save(models[0].state_dict(), Path(output_dir) / "mine.bin")
        weights.pop(0)

    def load_hook(models: list[Any], input_dir: str) -> None:
        seen.append(input_dir)
        models.pop(0).load_state_dict(torch.load(Path(input_dir) / "mine.bin", weights_only=True))

    handles = accelerator.register_save_state_pre_hook(save_hook), accelerator.register_load_state_pre_hook(load_hook)
    accelerator.save_state(tmp_path / "saved", checkpoint_format=form)
    names = files(tmp_path / "saved")
    assert "mine.bin" in names
    left = "model.safetensors" if form == "accelerate" else "model_1.safetensors"  # Accelerate counts what is left
    assert [name for name in names if name.startswith("model")] == [left]
    expected = [model.weight.detach().clone() for model in (first, second)]
    for model in (first, second):
        torch.nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "saved")
    assert all(torch.equal(model.weight, value) for model, value in zip((first, second), expected, strict=True))
    assert seen == [str(tmp_path / "saved")]
    for handle in handles:
        handle.remove()
    accelerator.save_state(tmp_path / "again", checkpoint_format=form)
    assert "mine.bin" not in files(tmp_path / "again")
    assert not accelerator._save_model_state_pre_hook


# -- functions ------------------------------------------------------------------------------------------------------------


def test_functions_write_and_read_one_folder(tmp_path):
    """`save_accelerator_state` and `load_accelerator_state`, with a loss scaler and more models than are loaded."""
    accelerator, first, second, optimizer, scheduler, loader = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    states = [first.state_dict(), second.state_dict()]
    save_accelerator_state(str(tmp_path), states, [optimizer], [scheduler], [loader], 0, 5, scaler)
    expected_files = {"model.safetensors", "model_1.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"}
    assert files(tmp_path) == expected_files
    expected = torch.rand(1)
    other, new = torch.nn.Linear(2, 3), torch.amp.GradScaler("cpu", init_scale=2.0)
    assert load_accelerator_state(str(tmp_path), [other], [optimizer], [scheduler], [loader], 0, new, "cpu") == {"step": 5}
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(other.weight, first.weight)
    assert new.get_scale() == 32.0
    with pytest.raises(CheckpointError, match="2 models, and 3"):
        load_accelerator_state(str(tmp_path), [other, other, other], [], [], [], 0)


def test_custom_states(tmp_path):
    save_custom_state(Counter({"deep": [1.5]}), tmp_path, 3)
    assert files(tmp_path) == {"custom_checkpoint_3.pkl"}
    other = Counter()
    load_custom_state(other, tmp_path, 3)
    assert other.value == {"deep": [1.5]}


def test_one_object_in_one_file(tmp_path):
    """`save` is `torch.save` unless `safe_serialization`; `load` builds objects of other classes only when asked."""
    state = {"weight": torch.ones(2)}
    save(state, tmp_path / "plain.bin")
    assert torch.equal(torch.load(tmp_path / "plain.bin", weights_only=True)["weight"], state["weight"])
    save(state, tmp_path / "safe.safetensors", safe_serialization=True)
    assert not (tmp_path / "safe.safetensors").read_bytes().startswith(b"PK")
    Accelerator(cpu=True).save(Counter(7), tmp_path / "object.bin")
    with pytest.raises(Exception, match=r"(?i)counter"):
        load(tmp_path / "object.bin")
    assert load(tmp_path / "object.bin", weights_only=False).value == 7


def test_only_objects_with_state_are_registered():
    with pytest.raises(ValueError, match="Item at index 1"):
        Accelerator(cpu=True).register_for_checkpointing(Counter(), 5)


# -- two processes --------------------------------------------------------------------------------------------------------


def save_on_two(folder: str, form: str) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    run = make()
    seen = []

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.extend(type(model).__name__ for model in models)

    run[0].register_save_state_pre_hook(hook)
    train(run, list(run[5])[:2])
    run[0].save_state(folder, checkpoint_format=form)
    if run[0].is_main_process:  # scripts save on the main process alone, too
        run[0].save_state(folder + "-alone", checkpoint_format=form)
    number = torch.rand(1).item()
    losses = train(run, list(run[5])[2:])
    run[0].wait_for_everyone()
    again = make(seed=5)
    again[0].load_state(folder)
    loaded = torch.rand(1).item()
    return seen[:2], number == loaded, losses == train(again, again[0].skip_first_batches(again[5], 2))


@pytest.mark.parametrize("form", FORMATS)
def test_two_processes(ranks, tmp_path, form):
    """Every process gets its random states back; hooks see models without their wrapper; the main process may save alone."""
    found = ranks(2).run(save_on_two, str(tmp_path / "saved"), form)
    assert found == [(["Linear", "Linear"], True, True)] * 2
    names = files(tmp_path / "saved")
    assert form != "accelerate" or {"random_states_0.pkl", "random_states_1.pkl"} <= names
    assert {"model.safetensors", "model_1.safetensors"} <= files(tmp_path / "saved-alone")
