"""`save_state` and `load_state` on one process, as a script uses them: what comes back, what is said, and what is refused."""

from __future__ import annotations

import copy
import gc
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from runs import Counter, Run, begin, rows, steps
from safetensors.torch import load_file
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

from slipstream import Accelerator, CheckpointError, ConfigError, load_checkpoint_in_model
from slipstream.files.disk import Disk, FileEntry
from slipstream.utils import ProjectConfiguration


def trained(batches: int = 3, **options: Any) -> Run:
    run = begin(**options)
    train(run, batches)
    return run


def train(run: Run, batches: int) -> None:
    for number, _ in enumerate(steps(run, run.loader), 1):
        if number == batches:
            break


def numbering(folder: Path, **options: Any) -> dict[str, Any]:
    return {"project_config": ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **options)}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- what comes back --------------------------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path: Path) -> None:
    run = trained(4)
    optimizer = copy.deepcopy(run.optimizer.state_dict())
    before = run.weights().clone(), optimizer, run.scheduler.state_dict(), list(run.counter.seen), torch.get_rng_state()
    where = run.accelerator.save_state(tmp_path / "first")
    drawn = torch.rand(3)
    train(run, 6)
    assert run.accelerator.load_state(where) == where
    after = run.weights(), run.optimizer.state_dict(), run.scheduler.state_dict(), list(run.counter.seen), torch.get_rng_state()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[4], after[4])
    assert torch.equal(torch.rand(3), drawn)
    assert before[2:4] == after[2:4]
    for entry, other in zip(before[1]["state"].values(), after[1]["state"].values(), strict=True):
        assert all(torch.equal(entry[name], other[name]) for name in entry)
    assert run.optimizer.updates == 4


def test_saving_changes_nothing(tmp_path: Path) -> None:
    def losses(saving: bool) -> list[Any]:
        run = begin(gradient_accumulation_steps=3, mixed_precision="fp16")
        found = []
        for number, step in enumerate(steps(run, run.loader)):
            found.append(step)
            if saving:
                run.accelerator.save_state(tmp_path / f"{number % 2}", async_save=number % 3 == 0)
        run.accelerator.end_training()
        return found

    assert losses(True) == losses(False)


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda entry: schedules.LambdaLR(entry, lambda step: 0.9**step),
    "MultiplicativeLR": lambda entry: schedules.MultiplicativeLR(entry, lambda step: 0.9),
    "MultiStepLR": lambda entry: schedules.MultiStepLR(entry, [2, 7]),
    "PolynomialLR": schedules.PolynomialLR,
    "CosineAnnealingLR": lambda entry: schedules.CosineAnnealingLR(entry, 10),
    "CosineAnnealingWarmRestarts": lambda entry: schedules.CosineAnnealingWarmRestarts(entry, 3),
    "OneCycleLR": lambda entry: schedules.OneCycleLR(entry, 0.1, total_steps=30),
    "CyclicLR": lambda entry: schedules.CyclicLR(entry, 0.01, 0.1, step_size_up=3),
    "SequentialLR": lambda entry: schedules.SequentialLR(entry, [schedules.LinearLR(entry), schedules.ExponentialLR(entry, 0.9)], [7]),
    "ChainedScheduler": lambda entry: schedules.ChainedScheduler([schedules.ConstantLR(entry), schedules.ExponentialLR(entry, 0.9)], entry),
    "ReduceLROnPlateau": lambda entry: schedules.ReduceLROnPlateau(entry, patience=0),
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Adafactor", "LBFGS")


@pytest.mark.parametrize(("optimizer", "schedule"), [*(("SGD", name) for name in SCHEDULES), *((name, "LambdaLR") for name in OPTIMIZERS)])
def test_every_optimizer_and_scheduler(tmp_path: Path, optimizer: str, schedule: str) -> None:
    """Every optimizer and schedule of torch goes on exactly."""
    def prepared() -> tuple[Any, ...]:
        accelerator = Accelerator()
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        momentum = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **momentum)
        return accelerator, *accelerator.prepare(model, made, SCHEDULES[schedule](made))

    def updates(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            inputs = torch.randn(8, 4).to(accelerator.device)

            def loss() -> torch.Tensor:
                optimizer.zero_grad()
                value = model(inputs).square().mean()  # noqa: B023
                accelerator.backward(value)
                return value

            losses.append(optimizer.step(loss).item())
            scheduler.step(*[losses[-1]] * (schedule == "ReduceLROnPlateau"))
        return [*losses, optimizer.param_groups[0]["lr"]]

    run, again = prepared(), prepared()
    updates(*run, 5)
    where = run[0].save_state(tmp_path / "first")
    expected = updates(*run, 6)
    again[0].load_state(where, strict=True)
    assert updates(*again, 6) == expected


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizer_of_parameters_in_other_layouts(tmp_path: Path, optimizer: str, registered: bool) -> None:
    """Fused optimizers, which go through memory in order, go on exactly with weights in channels_last and transposed ones."""

    def prepared() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        pictures = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model = torch.nn.Sequential(pictures, torch.nn.Flatten(), torch.nn.Linear(36, 2))
        model[2].weight = torch.nn.Parameter(torch.randn(36, 2).t())
        momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, fused=True, **momentum)
        if registered:  # and stepped by the script itself
            accelerator.register_for_checkpointing(made)
            return accelerator, accelerator.prepare(model), made
        return accelerator, *accelerator.prepare(model, made)

    def update(accelerator: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
        accelerator.backward(model(torch.linspace(-1, 1, 150).view(2, 3, 5, 5)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    run, again = prepared(), prepared()
    update(*run)
    where = run[0].save_state(tmp_path / "first")
    expected = update(*run)
    again[0].load_state(where)
    assert all(map(torch.equal, update(*again), expected))


def test_run_not_begun_can_saved(tmp_path: Path) -> None:
    """A run that has not begun can be saved."""
    run = begin()
    where = run.accelerator.save_state(tmp_path / "first")
    losses = list(steps(run, run.loader))
    again = begin(seed=5)
    again.accelerator.load_state(where, strict=True)
    assert list(steps(again, again.loader)) == losses


def test_nothing_prepared(tmp_path: Path) -> None:
    """Nothing needs to be prepared but something to be loaded into."""
    where = trained().accelerator.save_state(tmp_path / "first")
    with pytest.raises(CheckpointError, match=r"called before prepare\(\).*Prepare first"):
        Accelerator().load_state(where)


def test_replaced_checkpoint_keeps_foreign_files(tmp_path: Path) -> None:
    """One checkpoint replaces another and leaves files of others."""
    run = trained()
    where = Path(run.accelerator.save_state(tmp_path / "out" / "last"))
    (where / "notes.txt").write_text("mine")
    train(run, 2)
    run.accelerator.save_state(where, max_shard_size=100)
    assert "model.safetensors" not in names(where)
    assert (where / "notes.txt").read_text() == "mine"
    assert names(tmp_path / "out") == ["last"]
    run.accelerator.load_state(where)
    assert run.optimizer.updates == 5


def test_save_interrupted_leaves_what(tmp_path: Path) -> None:
    """A save that is interrupted leaves what was there."""
    class Interrupted(Disk):
        def write_unsynced(self, path: Path, chunks: Any, size: int) -> tuple[int, FileEntry]:
            if path.name == "optimizer.safetensors":
                raise KeyboardInterrupt
            return super().write_unsynced(path, chunks, size)

    run = trained(2)
    run.accelerator.save_state(tmp_path / "out" / "first")
    train(run, 1)
    run.accelerator._saver.disk = Interrupted()
    for name in ("first", "second"):
        with pytest.raises(KeyboardInterrupt):
            run.accelerator.save_state(tmp_path / "out" / name)
    assert names(tmp_path / "out") == ["first"]
    run.accelerator.load_state(tmp_path / "out" / "first")
    assert run.optimizer.updates == 2
    run.accelerator._saver.disk = Disk()
    run.accelerator.save_state(tmp_path / "out" / "second")
    assert names(tmp_path / "out") == ["first", "second"]


def test_two_accelerators_in_process_save_apart(tmp_path: Path) -> None:
    """Two accelerators in one process save apart."""
    first, second = trained(2), trained(5, seed=9)
    entry, other = first.accelerator.save_state(tmp_path / "one"), second.accelerator.save_state(tmp_path / "two")
    weights = first.weights().clone(), second.weights().clone()
    train(first, 1), train(second, 1)
    first.accelerator.load_state(entry), second.accelerator.load_state(other)
    assert torch.equal(first.weights(), weights[0])
    assert torch.equal(second.weights(), weights[1])
    assert (first.optimizer.updates, second.optimizer.updates) == (2, 5)


def test_saving_inside_of_evaluation(tmp_path: Path) -> None:
    """The training goes on with the next batch; an evaluation that was under way within a batch begins anew."""

    def evaluation(run: Run) -> Any:
        return run.accelerator.prepare_data_loader(DataLoader(rows(), batch_size=8))

    run, seen = begin(), []
    loader = evaluation(run)
    for batch, _ in enumerate(steps(run, run.loader)):
        if batch == 3:
            for number, (_, _, index) in enumerate(loader):
                seen += index.tolist()
                if number == 6:
                    run.accelerator.save_state(tmp_path / "middle")
    again = begin()
    loader = evaluation(again)
    again.accelerator.load_state(tmp_path / "middle", resume=True)
    assert [entry for _, _, index in loader for entry in index.tolist()] == seen
    assert len(list(steps(again, again.loader))) == 40 - 4
    assert torch.equal(again.weights(), run.weights())


def test_nothing_keeps_freed_model_alive(tmp_path: Path) -> None:
    """Nothing keeps a freed model alive."""
    run = trained()
    accelerator, model = run.accelerator, weakref.ref(run.model)
    optimizer = weakref.ref(run.optimizer)
    accelerator.save_state(tmp_path / "first", async_save=True)
    accelerator.save_state(tmp_path / "second", dedup=True)
    accelerator.load_state(tmp_path / "first")
    run.model, run.optimizer, run.scheduler, run.loader = accelerator.free_memory(run.model, run.optimizer, run.scheduler, run.loader)
    gc.collect()
    assert model() is None
    assert optimizer() is None


# -- numbered checkpoints ---------------------------------------------------------------------------------------------


def test_numbered_checkpoints_rotate_and_newest_loaded(tmp_path: Path) -> None:
    """Numbered checkpoints rotate and the newest is loaded."""
    run = begin(**numbering(tmp_path, total_limit=2))
    weights = []
    for _ in range(4):
        train(run, 1)
        run.accelerator.save_state()
        weights.append(run.weights().clone())
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3", "latest"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "checkpoint_3\n"
    again = begin(**numbering(tmp_path, total_limit=2))
    assert again.accelerator.load_state() == str(tmp_path / "checkpoints" / "checkpoint_3")
    assert torch.equal(again.weights(), weights[3])
    again.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")
    assert torch.equal(again.weights(), weights[2])
    plain = begin()
    plain.accelerator.load_state(tmp_path / "checkpoints")  # a folder of numbered ones means the newest, too
    assert torch.equal(plain.weights(), weights[3])


def test_numbers_go_on_after_restart(tmp_path: Path) -> None:
    """Numbers go on after a restart."""
    for expected in (0, 1):  # without loading
        run = trained(1, **numbering(tmp_path))
        assert run.accelerator.save_iteration == expected
        assert Path(run.accelerator.save_state()).name == f"checkpoint_{expected}"
    run = begin(**numbering(tmp_path))
    run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")  # an older one: newer ones are not overwritten
    assert Path(run.accelerator.save_state()).name == "checkpoint_2"
    run = begin(**numbering(tmp_path, iteration=7))  # as in scripts for Accelerate
    run.accelerator.load_state()
    assert Path(run.accelerator.save_state()).name == "checkpoint_7"


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_best_stay_besides_newest(tmp_path: Path, mode: str, best: int) -> None:
    """The best stay besides the newest."""
    run = trained(1, **numbering(tmp_path, total_limit=1, keep_best=1, best_mode=mode))
    for metric in (0.5, 0.1, torch.tensor(0.9), 0.4, None):
        run.accelerator.save_state(metric=metric)
    assert names(tmp_path / "checkpoints") == [f"checkpoint_{best}", "checkpoint_4", "latest"]


@pytest.mark.parametrize("damage", ["flipped", "short", "no manifest", "missing"])
def test_broken_newest_checkpoint_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """A broken newest checkpoint is passed over."""
    run = trained(1, **numbering(tmp_path))
    run.accelerator.save_state()
    good = run.weights().clone()
    train(run, 2)
    newest = Path(run.accelerator.save_state())
    weights = newest / "model.safetensors"
    {
        "flipped": lambda: flip(weights),
        "short": lambda: os.truncate(weights, 100),
        "no manifest": (newest / "MANIFEST.json").unlink,
        "missing": weights.unlink,
    }[damage]()
    again = begin(**numbering(tmp_path))
    assert Path(again.accelerator.load_state()).name == "checkpoint_0"
    assert torch.equal(again.weights(), good)
    said = warnings_of(caplog)
    assert "checkpoint_1 was passed over for checkpoint_0" in said
    assert ("MANIFEST.json" if damage == "no manifest" else "model.safetensors") in said
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json" if damage == "no manifest" else r"model\.safetensors"):
        again.accelerator.load_state(newest)
    assert torch.equal(again.weights(), good)  # nothing changes before all of it is verified
    assert Path(again.accelerator.save_state()).name == "checkpoint_2"  # and what is left of it is not overwritten


def test_without_any_whole_checkpoint_each_named(tmp_path: Path) -> None:
    """Without any whole checkpoint each is named."""
    run = trained(1, **numbering(tmp_path))
    with pytest.raises(CheckpointError, match="there is no checkpoint in .* yet"):
        run.accelerator.load_state()
    for _ in range(2):
        flip(Path(run.accelerator.save_state(), "optimizer.safetensors"))
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints(.|\n)*checkpoint_1: (.|\n)*checkpoint_0: "):
        run.accelerator.load_state()


def test_project_in_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for number in range(2):
        run = trained(1, **numbering(Path("~/project")))
        assert run.accelerator.save_state() == str(tmp_path / "project" / "checkpoints" / f"checkpoint_{number}")
        assert run.accelerator.load_state() == str(tmp_path / "project" / "checkpoints" / f"checkpoint_{number}")
    run.accelerator.load_state("~/project/checkpoints/checkpoint_0")


def test_folder_numbering_overrides_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that numbering overrides is said once."""
    run = trained(1, **numbering(tmp_path))
    assert Path(run.accelerator.save_state("best")).name == "checkpoint_0"
    run.accelerator.save_state("best")
    assert warnings_of(caplog).count("because checkpoints are numbered") == 1


# -- what fits, and what it meant -------------------------------------------------------------------------------------


class Larger(torch.nn.Sequential):
    """The model of `begin` with a head more."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1), torch.nn.Linear(1, 1))


def test_weights_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that do not fit."""
    run = trained()
    where = run.accelerator.save_state(tmp_path / "first")
    accelerator = Accelerator()
    model = accelerator.prepare(Larger())
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=r"2 are missing in the file: 4\.weight, 4\.bias"):
        accelerator.load_state(where)
    assert all(torch.equal(entry, other) for entry, other in zip(before, model.parameters(), strict=True))
    accelerator.load_state(where, strict=False)
    assert torch.equal(model[3].weight, run.accelerator.unwrap_model(run.model)[3].weight)
    assert torch.equal(model[4].weight, before[4])
    assert "4.weight" in warnings_of(caplog)


def other(*, short: bool) -> Run:
    """A run like that of `begin` with less data, or with another schedule."""
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5 if short else 9, gamma=0.7)
    data = DataLoader(rows(100 if short else 160), batch_size=4, shuffle=True)
    run = Run(accelerator, *accelerator.prepare(model, optimizer, data, scheduler), Counter())
    accelerator.register_for_checkpointing(run.counter)
    return run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: begin(batch_size=8), "the effective batch size is 8 now and was 4"),
        (lambda: begin(gradient_accumulation_steps=4), "the effective batch size is 16 now and was 4"),
        (lambda: begin(mixed_precision="bf16"), "mixed_precision is 'bf16' now and was 'no'"),
        (lambda: begin(mixed_precision="fp16"), "mixed_precision is 'fp16' now and was 'no'"),
        (lambda: other(short=True), "loader 0 reads different data: length 100 now, 160 before"),
        (lambda: other(short=False), "step_size 9 in the script, 5 in the checkpoint"),
    ],
    ids=["batch", "accumulation", "bf16", "fp16", "data", "schedule"],
)
def test_what_changes_meaning_of_run_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, words: str) -> None:
    """What changes the meaning of a run is said."""
    where = trained().accelerator.save_state(tmp_path / "first")
    run = change()
    before = run.weights().clone()
    with pytest.raises(CheckpointError, match="run with different settings") as raised:
        run.accelerator.load_state(where, strict=True)
    assert words in str(raised.value)
    assert torch.equal(run.weights(), before)
    run.accelerator.load_state(where)
    assert words in warnings_of(caplog)
    assert not torch.equal(run.weights(), before)
    train(run, 2)
    back = begin()
    back.accelerator.load_state(run.accelerator.save_state(tmp_path / "second"))  # and back again
    assert torch.equal(back.weights(), run.weights())


def test_same_run_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same run is told nothing."""
    where = trained().accelerator.save_state(tmp_path / "first")
    begin().accelerator.load_state(where, strict=True)
    assert warnings_of(caplog) == ""


def test_other_numbers_of_things(tmp_path: Path) -> None:
    where = trained().accelerator.save_state(tmp_path / "first")
    for add, words in (
        (lambda run: run.accelerator.register_for_checkpointing(Counter()), "1 registered object, and this run has 2"),
        (lambda run: run.accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])), r"1 optimizer, .* 2 \(AdamW, SGD\)"),
        (lambda run: run.accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(run.optimizer.optimizer)), r"2 \(StepLR, ConstantLR\)"),
        (lambda run: run.accelerator.prepare(torch.nn.Linear(1, 1)), r"no weights of model 1 \(Linear\)"),
    ):
        run = begin()
        before = run.weights().clone()
        add(run)
        for strict in (None, True):
            with pytest.raises(CheckpointError, match=words):
                run.accelerator.load_state(where, strict=strict)
        assert torch.equal(before, run.weights())
        run.accelerator.load_state(where, strict=False)
        assert run.optimizer.updates == 3
        assert not torch.equal(before, run.weights())


def test_fewer_things_than_saved(tmp_path: Path) -> None:
    """Fewer things than were saved."""
    run = begin()
    run.accelerator.prepare(torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    train(run, 3)
    where = run.accelerator.save_state(tmp_path / "first")
    again = begin()
    with pytest.raises(CheckpointError, match=r"holds 2 models, and this run has 1 \(Sequential\): prepare the same ones.*strict=False"):
        again.accelerator.load_state(where)
    again.accelerator.load_state(where, strict=False)
    assert torch.equal(again.weights(), run.weights())
    assert again.optimizer.updates == 3


def test_evaluation_loads_what_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation loads what it has prepared."""
    run = trained()
    where = run.accelerator.save_state(tmp_path / "first")
    accelerator = Accelerator()
    model = accelerator.prepare(begin(seed=8).accelerator.unwrap_model(begin(seed=8).model))
    with pytest.raises(CheckpointError, match="holds 1 optimizer, and this run has none"):
        accelerator.load_state(where, strict=True)
    accelerator.load_state(where)
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), run.weights().cpu())
    said = warnings_of(caplog)
    for what in ("1 optimizer,", "1 scheduler,", "1 registered object,"):
        assert f"holds {what} and this run has none: it is ignored, which is fine for evaluation" in said


def test_another_optimizer_told_by_parameters(tmp_path: Path) -> None:
    """Another optimizer is told by its parameters."""
    where = trained().accelerator.save_state(tmp_path / "first")
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5))
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match=r"optimizer 0 \(AdamW\) was saved with groups of \[4\] parameters and has \[1, 1, 1, 1\]"):
        accelerator.load_state(where)


# -- hooks and objects ------------------------------------------------------------------------------------------------


def test_save_hook_takes_over_weights(tmp_path: Path) -> None:
    """A save hook writes files of its own and takes weights over."""
    run = trained()

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        assert len(models) == len(weights) == 1
        Path(folder, "unet").mkdir()
        torch.save(weights.pop(), Path(folder, "unet", "weights.pt"))

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder, "unet", "weights.pt"), weights_only=True))

    handle = run.accelerator.register_save_state_pre_hook(save)
    where = Path(run.accelerator.save_state(tmp_path / "first"))
    assert "model.safetensors" not in names(where)
    assert names(where / "unet") == ["weights.pt"]
    again = begin()
    with pytest.raises(CheckpointError, match=r"no weights of model 0 \(Sequential\).*a save hook removed them.*register_load_state"):
        again.accelerator.load_state(where)
    loading = again.accelerator.register_load_state_pre_hook(load)
    again.accelerator.load_state(where)
    assert torch.equal(again.weights(), run.weights())
    flip(where / "unet" / "weights.pt")  # files of hooks are verified, too
    with pytest.raises(CheckpointError, match=r"unet/weights\.pt is damaged"):
        again.accelerator.load_state(where)
    handle.remove()
    loading.remove()
    run.accelerator.save_state(where)
    assert "model.safetensors" in names(where)
    again.accelerator.load_state(where)


def test_hook_raises_leaves_everything_as(tmp_path: Path) -> None:
    """A hook that raises leaves everything as it was."""
    run = trained()
    where = Path(run.accelerator.save_state(tmp_path / "out" / "first"))
    train(run, 1)
    handle = run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.accelerator.save_state(where)
    handle.remove()
    assert names(tmp_path / "out") == ["first"]
    run.accelerator.load_state(where)
    assert run.optimizer.updates == 3
    with pytest.raises(ConfigError, match="a hook is a function, and not a int"):
        run.accelerator.register_load_state_pre_hook(3)  # type: ignore[arg-type]


class Holding:
    """An object with the state that it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_registered_objects_come_back_as(tmp_path: Path) -> None:
    """Registered objects come back as they were."""
    run = trained()
    states = [{"step": 3, (1, 2): float("inf")}, [torch.arange(3), {"deep": (1, True, None)}], {}]
    objects = [Holding(state) for state in states]
    run.accelerator.register_for_checkpointing(*objects, objects[0])  # the same one twice is one
    where = run.accelerator.save_state(tmp_path / "first")
    for thing in objects:
        thing.state = "something else"
    run.accelerator.load_state(where)
    assert objects[0].state == states[0]
    assert torch.equal(objects[1].state[0], torch.arange(3))
    assert objects[1].state[1] == {"deep": (1, True, None)}
    assert type(objects[1].state[1]["deep"][1]) is bool
    assert objects[2].state == {}


def test_what_cannot_registered(tmp_path: Path) -> None:
    """What cannot be registered."""
    run = trained()
    register = run.accelerator.register_for_checkpointing
    for given, words in (
        (3, "a int without state_dict and load_state_dict"),
        (Counter, "the class Counter: register an object of it"),
        (run.model, "that is prepared"),
        (run.optimizer, "that is prepared"),
        (run.optimizer.optimizer, "that is prepared"),
        (run.scheduler, "that is prepared"),
        (run.loader, "that is prepared"),
    ):
        with pytest.raises(ConfigError, match=words):
            register(Holding(1), given)
    run.accelerator.load_state(run.accelerator.save_state(tmp_path / "first"))  # none was taken in halfway


def test_state_cannot_stored_named(tmp_path: Path) -> None:
    """State that cannot be stored is named."""
    run = trained()
    run.accelerator.save_state(tmp_path / "out" / "first")
    run.accelerator.register_for_checkpointing(Holding({"ema": {"decay": [0.9, lambda step: step]}}))
    for behind in (False, True):  # behind the training, too, it is said at once
        with pytest.raises(CheckpointError, match=r"registered object 1 \(Holding\)\['ema'\]\['decay'\]\[1\] is a function"):
            run.accelerator.save_state(tmp_path / "out" / "first", async_save=behind)
    assert names(tmp_path / "out") == ["first"]


# -- arguments and places ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "called without a folder"),
        ({"output_dir": ""}, "called without a folder"),
        ({"output_dir": 5}, "int is not a path"),
        ({"output_dir": b"bytes"}, "bytes is not a path"),
        ({"output_dir": "a file"}, "there is a file of that name.*a separate folder, such as"),
        ({"output_dir": "a\0b"}, "null byte"),
        ({"output_dir": "."}, "holds the working directory"),
        ({"output_dir": "/"}, "the root of the file system"),
        ({"output_dir": "a link"}, "symbolic link"),
        ({"output_dir": "x", "metric": float("nan")}, "metric=nan"),
        ({"output_dir": "x", "metric": "0.3"}, "metric='0.3'"),
        ({"output_dir": "x", "metric": torch.ones(2)}, "it is one number"),
        ({"output_dir": "x", "async_save": "yes"}, "write True or False"),
        ({"output_dir": "x", "dedup": 1}, "write True or False"),
        ({"output_dir": "x", "max_shard_size": "ten"}, "is not a size"),
        ({"output_dir": "x", "asynchronous": True}, "got asynchronous, which it does not know"),
    ],
    ids=str,
)
def test_what_save_state_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").write_text("")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a link").symlink_to("a folder")
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        trained(1).accelerator.save_state(**arguments)
    assert names(tmp_path) == ["a file", "a folder", "a link"]


@pytest.mark.parametrize(
    "wrong", [{"total_limit": 0}, {"total_limit": "3"}, {"iteration": "3"}, {"iteration": -1}, {"keep_best": True}], ids=str
)
def test_what_numbering_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        ProjectConfiguration(**wrong)


def test_place_cannot_written_told_with_remedy(tmp_path: Path) -> None:
    """A place that cannot be written is told with the remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/first could not be saved: (.|\n)*is a file where a folder should be"):
        trained(1).accelerator.save_state(tmp_path / "file" / "first")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ConfigError, "called without a folder"),
        ({"input_dir": ""}, ConfigError, "called without a folder"),
        ({"input_dir": 5}, ConfigError, "int is not a path"),
        ({"input_dir": "nowhere"}, CheckpointError, "there is no checkpoint at nowhere; in . there are first"),
        ({"input_dir": "file"}, CheckpointError, "file is a file"),
        ({"input_dir": "first", "strict": 1}, ConfigError, "write True or False"),
        ({"input_dir": "first", "load_kwargs": {"strict": False}}, ConfigError, "as arguments of its own"),
        ({"input_dir": "first", "load_kwargs": "cpu"}, ConfigError, "it is a dict"),
        ({"input_dir": "first", "weights": True}, ConfigError, "got weights, which it does not know"),
    ],
    ids=str,
)
def test_what_load_state_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    run = trained(1)
    run.accelerator.save_state("first")
    with pytest.raises(error, match=words):
        run.accelerator.load_state(**arguments)


def test_what_no_effect_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What has no effect is said."""
    run = trained(1)
    where = Path(run.accelerator.save_state(tmp_path / "first", safe_serialization=False))
    assert "safe_serialization=False) has no effect" in warnings_of(caplog)
    assert not [name for name in names(where) if not name.endswith((".safetensors", ".json"))]
    run.accelerator.load_state(where, load_kwargs={"map_location": "cpu", "weights_only": True})


# -- weights ----------------------------------------------------------------------------------------------------------


def test_other_libraries_read_weights(tmp_path: Path) -> None:
    """Other libraries read the weights."""
    run = trained()
    expected = run.accelerator.get_state_dict(run.model)
    for number, size in enumerate((None, 200, "1KB")):
        where = Path(run.accelerator.save_state(tmp_path / f"{number}", max_shard_size=size))
        files = sorted(where.glob("model*.safetensors"))
        assert (len(files) > 1) == (size == 200)
        read = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name].cpu()) for name in read)
        again = begin()
        again.accelerator.load_state(where)
        assert torch.equal(again.weights(), run.weights())


def test_checkpoint_gives_model_alone_weights(tmp_path: Path) -> None:
    """A checkpoint gives a model alone its weights."""
    run = trained()
    where = run.accelerator.save_state(tmp_path / "first", max_shard_size=200)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    load_checkpoint_in_model(model, where)
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), run.weights().cpu())


def test_two_models_with_optimizers_of_own(tmp_path: Path) -> None:
    """Two models with optimizers of their own."""
    def prepared(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        accelerator = Accelerator()
        generator, critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        slow, fast = torch.optim.Adam(generator.parameters(), lr=1e-3), torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
        return accelerator, *accelerator.prepare(generator, critic, slow, fast)

    accelerator, generator, critic, slow, fast = prepared(1)
    for number in range(6):
        accelerator.backward(critic(generator(torch.ones(2, 3, device=accelerator.device))).mean())
        fast.step()
        if number % 3 == 0:
            slow.step()
        fast.zero_grad(), slow.zero_grad()
    where = accelerator.save_state(tmp_path / "first")
    assert {"model.safetensors", "model_1.safetensors", "optimizer.safetensors", "optimizer_1.safetensors"} <= set(names(Path(where)))
    again, other_generator, other_critic, other_slow, other_fast = prepared(2)
    again.load_state(where)
    assert torch.equal(generator.weight, other_generator.weight)
    assert torch.equal(critic.weight, other_critic.weight)
    assert (other_slow.updates, other_fast.updates) == (2, 6)
    momentum = [entry.state[entry.param_groups[0]["params"][0]]["momentum_buffer"] for entry in (fast, other_fast)]
    assert torch.equal(*momentum)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 6)
        self.head = torch.nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def test_tied_weights_written_once(tmp_path: Path) -> None:
    """Tied weights are written once and stay tied."""
    accelerator = Accelerator()
    model = accelerator.prepare(Tied())
    where = Path(accelerator.save_state(tmp_path / "first"))
    assert list(load_file(where / "model.safetensors")) == ["embedding.weight"]
    other = Accelerator()
    again = other.prepare(Tied())
    other.load_state(where)
    assert again.head.weight is again.embedding.weight
    assert torch.equal(again.head.weight, model.head.weight)


def test_compiled_model_and_plain_same_checkpoint(tmp_path: Path) -> None:
    """A compiled model and a plain one have the same checkpoint."""
    run = trained(2)
    plain = Path(run.accelerator.save_state(tmp_path / "plain"))
    compiled = begin(dynamo_backend="eager")
    compiled.accelerator.load_state(plain)
    assert torch.equal(compiled.weights(), run.weights())
    train(compiled, 1)
    where = Path(compiled.accelerator.save_state(tmp_path / "compiled"))
    assert load_file(where / "model.safetensors").keys() == load_file(plain / "model.safetensors").keys()
    run.accelerator.load_state(where)
    assert torch.equal(compiled.weights(), run.weights())


# -- dedup ------------------------------------------------------------------------------------------------------------


class CountingDisk(Disk):
    """Counts the bytes of files that are written."""

    def __init__(self) -> None:
        self.written = 0

    def write_unsynced(self, path: Path, chunks: Any, size: int) -> tuple[int, FileEntry]:
        self.written += size
        return super().write_unsynced(path, chunks, size)


def frozen() -> tuple[Accelerator, Any, Any]:
    """A model of which 95 % are not trained."""
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(190, 500, bias=False), torch.nn.Linear(500, 10, bias=False))
    model[0].requires_grad_(False)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9))


def update(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.randn(4, 190).to(accelerator.device)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_dedup_links_unchanged_weights(tmp_path: Path) -> None:
    """Unchanged weights are linked and not written again."""
    accelerator, model, optimizer = frozen()
    accelerator._saver.disk = disk = CountingDisk()
    sizes = []
    for number in range(10):
        update(accelerator, model, optimizer)
        accelerator.save_state(tmp_path / f"{number}", dedup=True)
        sizes.append(disk.written)
    assert disk.written <= 2.75 * sizes[0]
    taken = {entry.stat().st_ino: entry.stat().st_size for entry in tmp_path.rglob("*") if entry.is_file()}
    assert sum(taken.values()) <= 2.75 * sizes[0]
    weights = {}
    for number in range(10):
        accelerator.load_state(tmp_path / f"{number}")
        weights[number] = model[1].weight.clone()
    assert len({weight.sum().item() for weight in weights.values()}) == 10
    read = {name: tensor for file in (tmp_path / "9").glob("model*.safetensors") for name, tensor in load_file(file).items()}
    assert torch.equal(read["1.weight"], weights[9].cpu())
    assert torch.equal(read["0.weight"], model[0].weight.cpu())


@pytest.mark.parametrize("place", ["numbered", "one folder"])
def test_dedup_survives_rotation(tmp_path: Path, place: str) -> None:
    """Linked checkpoints stay whole when older ones go."""
    accelerator, model, optimizer = frozen()
    saver = accelerator._saver
    if place == "numbered":
        saver.project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    saver.disk = disk = CountingDisk()
    for number in range(4):
        update(accelerator, model, optimizer)
        where = accelerator.save_state(None if place == "numbered" else tmp_path / "one", dedup=True)
        if not number:
            first = disk.written
    assert disk.written <= 2 * first
    expected = [parameter.clone() for parameter in model.parameters()]
    update(accelerator, model, optimizer)
    accelerator.load_state(where)
    assert all(torch.equal(entry, other) for entry, other in zip(expected, model.parameters(), strict=True))
    with torch.no_grad():
        model[0].weight += 1.0  # frozen, and changed all the same: it is compared, not believed
    where = accelerator.save_state(None if place == "numbered" else tmp_path / "one", dedup=True)
    update(accelerator, model, optimizer)
    accelerator.load_state(where)
    assert torch.equal(model[0].weight, expected[0] + 1.0)


class TensorsWithoutElements:
    """An object whose tensors are made anew by a load: empty ones, and of dtypes that are stored as bytes."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {
            "empty": torch.empty(0, 3),
            "no numbers": torch.empty(0, dtype=torch.complex128),
            "numbers": torch.ones(2, dtype=torch.complex128),
            "array": numpy.empty((0, 2)),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def test_default_device(tmp_path: Path) -> None:
    """A default device of torch changes nothing: what is stored and restored lies where it was."""
    run = trained(2)
    held = TensorsWithoutElements()
    run.accelerator.register_for_checkpointing(held)
    try:
        torch.set_default_device("meta")
        run.accelerator.save_state(tmp_path / "first")
        run.accelerator.save_state(tmp_path / "second", async_save=True)
        run.accelerator._saver.settle()
        held.held = {}
        run.accelerator.load_state(tmp_path / "second")
    finally:
        torch.set_default_device(None)
    assert {name: value.device.type for name, value in held.held.items() if name != "array"} == dict.fromkeys(
        ("empty", "no numbers", "numbers"), "cpu"
    )
    assert held.held["numbers"].tolist() == [1, 1]
    run.accelerator.end_training()
