"""Checkpoints of a run on an accelerator: what was on the device is saved, comes back to it, and costs no more than it must."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from runs import Run, begin, steps
from test_exact_resume import HARD, compare_all, scaled

from slipstream import Accelerator, CheckpointError
from slipstream.utils import ProjectConfiguration, load, load_checkpoint_in_model, save

DELAY = 0.05


def trained(count: int = 3, **options: Any) -> Run:
    run = begin(**options)
    list(islice(steps(run, run.loader), count))
    return run


def device_tensors(run: Run) -> list[torch.Tensor]:
    """What a save has to copy from the device: weights, states of the optimizer, and the norm of the last clipping."""
    state = [value for entries in run.optimizer.optimizer.state.values() for value in entries.values() if not value.is_cpu]
    return [*run.accelerator.unwrap_model(run.model).state_dict().values(), *state, torch.empty(1)]


@pytest.mark.parametrize(("world", "every"), [(1, 13), (2, 19), (4, 25)])
def test_resumed_run_equals_undisturbed_one(ranks: Any, tmp_path: Path, world: int, every: int) -> None:
    """Loss scale, dropout on the device, shuffled data and open accumulation go on bit for bit."""

    def cut() -> tuple[int, str]:
        compared = compare_all(tmp_path, every, by_itself=True, batch_size=4 // world, **scaled())
        return compared, begin().weights().device.type

    assert ranks(world, device="standin").run(cut) == [(len(range(0, 40, every)), "standin")] * world


def test_state_comes_back_to_its_device(ranks: Any, tmp_path: Path) -> None:
    """Weights, states of optimizers and gradients are on the device of their rank; counters of steps stay where torch has them."""

    def check() -> set[str]:
        run = trained(3, **HARD)
        run.accelerator.save_state(tmp_path / "first")
        run.accelerator.wait_for_everyone()
        again = begin(**HARD)
        again.accelerator.load_state(tmp_path / "first")
        model, device = again.accelerator.unwrap_model(again.model), again.accelerator.device
        places = {name: tensor.device for name, tensor in model.state_dict().items()}
        for parameter, entries in again.optimizer.optimizer.state.items():
            assert entries["step"].is_cpu
            places |= {f"{id(parameter)}.{name}": entries[name].device for name in ("exp_avg", "exp_avg_sq")}
        places |= {f"{name}.grad": parameter.grad.device for name, parameter in model.named_parameters()}
        assert set(places.values()) == {device}
        return {str(place) for place in places.values()}

    assert ranks(2, device="standin").run(check) == [{"standin:0"}, {"standin:1"}]


def test_norm_comes_back_to_its_device(ranks: Any, tmp_path: Path) -> None:
    """Between updates, clipping in a resumed run returns the norm of the last update before the save, where the gradients are."""

    def check() -> tuple[bool, str]:
        run = begin(gradient_accumulation_steps=2)
        *_, (_, expected, _) = islice(steps(run, run.loader), 2)
        run.accelerator.save_state(tmp_path / "first")
        again = begin(gradient_accumulation_steps=2)
        again.accelerator.load_state(tmp_path / "first")
        x, y, _ = next(iter(again.loader))
        with again.accelerator.accumulate(again.model):
            again.accelerator.backward(torch.nn.functional.mse_loss(again.model(x), y))
            norm = again.accelerator.clip_grad_norm_(again.model.parameters(), 1.0)
        return norm.item() == expected, str(norm.device)

    assert ranks(2, device="standin").run(check) == [(True, "standin:0"), (True, "standin:1")]


@pytest.mark.parametrize(("before", "after"), [("standin", "cpu"), ("cpu", "standin")])
def test_other_device(ranks: Any, tmp_path: Path, before: str, after: str) -> None:
    """A checkpoint of one device continues on another, with the same values, and says which random states it has not."""

    def straight() -> Any:
        run = begin()
        run.model.eval()
        for number, _ in enumerate(steps(run, run.loader)):
            if number == 5:
                run.accelerator.save_state(tmp_path / "middle")
        return run.weights().cpu()

    def elsewhere() -> Any:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("slipstream").addHandler(handler)
        run = begin(seed=11)
        run.accelerator.load_state(tmp_path / "middle")
        logging.getLogger("slipstream").removeHandler(handler)
        run.model.eval()
        list(steps(run, run.loader))
        state = next(iter(run.optimizer.optimizer.state.values()))
        return run.weights().cpu(), state["exp_avg"].device.type, said

    (expected,) = ranks(1, device=before).run(straight)
    ((weights, place, said),) = ranks(1, device=after).run(elsewhere)
    assert torch.equal(weights, expected)
    assert place == after
    assert any(f"is on a {after} device now and was on {before} when saved" in line for line in said), said
    missing = "random state of standin devices" if before == "standin" else "was not saved on a standin device"
    assert any(missing in line for line in said), said


def test_async_save_keeps_the_moment_of_the_call(ranks: Any, tmp_path: Path) -> None:
    """Copies that arrive late have the values of the call although the run goes on, and the call waits for none of them."""

    def race() -> Any:
        run = trained(3)
        model = run.accelerator.unwrap_model(run.model)
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        momentum = [entries["exp_avg"].cpu() for entries in run.optimizer.optimizer.state.values()]
        expected = len(device_tensors(run))
        torch.standin.synchronize()
        torch.standin.reset_counters()
        torch.standin.set_delay(copies=DELAY)
        run.accelerator.save_state(tmp_path / "first", async_save=True)
        copied = torch.standin.current_stream().query()
        costs = torch.standin.counters()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        list(islice(steps(run, run.loader), 2))
        torch.standin.set_delay(copies=0.0)
        run.accelerator.end_training()
        again = begin()
        again.accelerator.load_state(tmp_path / "first")
        loaded = again.accelerator.unwrap_model(again.model).state_dict()
        assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in weights.items())
        states = again.optimizer.optimizer.state.values()
        assert all(torch.equal(entries["exp_avg"].cpu(), kept) for entries, kept in zip(states, momentum, strict=True))
        return copied, expected, costs.copies_to_host, costs.synchronizations

    ((copied, expected, copies, waits),) = ranks(1, device="standin").run(race)
    assert copies == expected
    assert waits <= 1  # of the thread that writes
    assert not copied


def test_async_save_in_the_middle_of_an_update(ranks: Any, tmp_path: Path) -> None:
    """Gradients that are open on every rank are those of the call, although the next batches change them while they are copied."""

    def race() -> bool:
        run = begin(batch_size=2, **HARD)
        came = []
        for number, step in enumerate(steps(run, run.loader)):
            came.append(step)
            if number == 5:
                torch.standin.set_delay(copies=DELAY / 10)
                run.accelerator.save_state(tmp_path / "middle", async_save=True)
            elif number == 9:
                torch.standin.set_delay(copies=0.0)
        run.accelerator.end_training()
        run.accelerator.wait_for_everyone()
        again = begin(batch_size=2, seed=11, **HARD)
        again.accelerator.load_state(tmp_path / "middle")
        rest = list(steps(again, again.loader))
        return rest == came[6:] and torch.equal(again.weights(), run.weights())

    assert ranks(2, device="standin").run(race) == [True, True]


def adam(size: int = 300, **options: bool) -> tuple[Accelerator, torch.nn.Module, Any]:
    """A model of a few tensors with an optimizer that has stepped."""
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Linear(size, size))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, **options))
    model(torch.ones(2, size, device=accelerator.device)).sum().backward()  # not by the accelerator, which reads the loss a little later
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def test_costs_of_saving_and_loading(ranks: Any, tmp_path: Path) -> None:
    """A save copies every tensor once and needs no memory of the device. A load into a running run needs that of one tensor at most."""

    def measure(start: Any) -> Any:
        standin = torch.standin
        before = standin.memory_allocated()
        standin.reset_counters()
        standin.reset_peak_memory_stats()
        start()
        return standin.counters(), standin.max_memory_allocated() - before, standin.memory_allocated() - before

    def costs() -> Any:
        accelerator, model, _ = adam()
        saved = measure(lambda: accelerator.save_state(tmp_path / "first"))
        loaded = measure(lambda: accelerator.load_state(tmp_path / "first"))
        return saved, loaded, sum(parameter.nbytes for parameter in model.parameters())

    (((saved, peak, _), (loaded, loading, left), size),) = ranks(1, device="standin").run(costs)
    count = 4 + 2 * 4  # weights and the two averages
    assert (saved.copies_to_host, saved.copies_to_device, saved.synchronizations, peak) == (count, 0, count, 0)
    assert (loaded.copies_to_device, loaded.copies_to_host) == (count, 2 * 4)  # the averages wait on the host, for the case of an error
    assert loading <= size / 2, (loading, size)
    assert left <= 0


def test_out_of_memory_leaves_everything_as_it_was(ranks: Any, tmp_path: Path) -> None:
    """Memory that ends while a state is loaded is a clear error, and the run goes on as if nothing had been tried."""

    def attempt(accelerator: Accelerator, room: int) -> str:
        torch.standin.empty_cache()
        torch.standin.set_capacity(torch.standin.memory_reserved() + room)
        try:
            accelerator.load_state(tmp_path / "first")
        except CheckpointError as error:
            return str(error)
        finally:
            torch.standin.set_capacity(4 << 30)
        return ""

    def run() -> Any:
        accelerator, model, optimizer = adam()
        accelerator.save_state(tmp_path / "first")
        accelerator.free_memory()
        fresh = Accelerator()
        other = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
        before = [parameter.detach().clone() for parameter in other.parameters()]
        other, optimizer = fresh.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.1))
        said = attempt(fresh, 300 * 300 * 4 * 2)
        assert all(torch.equal(parameter.cpu(), kept) for parameter, kept in zip(other.parameters(), before, strict=True))
        assert not optimizer.optimizer.state
        fresh.backward(other(torch.ones(2, 300, device=fresh.device)).sum())
        optimizer.step()
        fresh.load_state(tmp_path / "first")
        assert all(map(torch.equal, other.parameters(), model.parameters()))
        return said

    (said,) = ranks(1, device="standin").run(run)
    assert "memory ran out while optimizer 0 (AdamW) was loaded" in said
    assert "as it was before" in said


def test_out_of_memory_in_a_running_run(ranks: Any, tmp_path: Path) -> None:
    """States that were moved to the host for a load that fails come back to the device, where the failed load has left nothing."""

    def run() -> str:
        saved, _, _ = adam(amsgrad=True)
        where = saved.save_state(tmp_path / "first")
        saved.free_memory()
        accelerator, model, optimizer = adam()  # has two averages where the checkpoint has three
        for entries in optimizer.optimizer.state.values():
            entries["exp_avg"].fill_(3.0)
        torch.standin.empty_cache()
        torch.standin.set_capacity(torch.standin.memory_reserved() + 300 * 300 * 4)
        try:
            with pytest.raises(CheckpointError) as caught:
                accelerator.load_state(where)
            for parameter, entries in optimizer.optimizer.state.items():
                assert torch.equal(entries["exp_avg"], torch.full_like(parameter, 3.0))
                assert {entries["exp_avg"].device, entries["exp_avg_sq"].device} == {accelerator.device}
        finally:
            torch.standin.set_capacity(4 << 30)
        return str(caught.value)

    (said,) = ranks(1, device="standin").run(run)
    assert "memory ran out while optimizer 0 (AdamW) was loaded" in said


def test_weight_files_from_a_device(ranks: Any, tmp_path: Path) -> None:
    """Tied, transposed and strided tensors of a device are written as those of the host, and loaded to where the model is."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.turned = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
            self.register_buffer("strided", torch.arange(9.0)[::2])
            self.images = torch.nn.Parameter(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))

    def write(name: str) -> Any:
        accelerator = Accelerator()
        model = accelerator.prepare(Tied())
        accelerator.save_model(model, tmp_path / name)
        accelerator.save_model(model, tmp_path / f"{name}-bin", safe_serialization=False)
        state = accelerator.get_state_dict(model)
        part = {"turned": model.turned.detach()[1:], "again": model.embed.weight.detach(), "array": numpy.arange(3)}
        save({"state": state, **part}, tmp_path / f"{name}.safetensors")
        other = accelerator.prepare(Tied())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        for folder in (name, f"{name}-bin"):
            load_checkpoint_in_model(other, tmp_path / folder)
            assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
            assert other.head.weight is other.embed.weight
            assert {tensor.device for tensor in other.state_dict().values()} == {accelerator.device}
        found = load(tmp_path / f"{name}.safetensors", map_location=accelerator.device)
        assert torch.equal(found["turned"], model.turned[1:])
        assert found["again"].data_ptr() == found["state"]["embed.weight"].data_ptr()
        assert found["array"].tolist() == [0, 1, 2]
        assert {tensor.device for tensor in found["state"].values()} == {accelerator.device}
        return (tmp_path / name / "model.safetensors").read_bytes(), (tmp_path / f"{name}.safetensors").read_bytes()

    (of_device,) = ranks(1, device="standin").run(write, "device")
    (of_host,) = ranks(1, device="cpu").run(write, "host")
    assert of_device == of_host
    for options in ({}, {"map_location": "cpu"}, {"weights_only": False}):  # in a process without the device
        elsewhere = load(tmp_path / "device-bin" / "pytorch_model.bin", **options)
        assert torch.equal(elsewhere["turned"], torch.arange(12.0).reshape(3, 4).t())


def test_registered_average_comes_back(ranks: Any, tmp_path: Path) -> None:
    """A moving average of the weights that the script registers is saved from the device and loaded to it."""

    def run() -> None:
        accelerator, model, optimizer = adam(8)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        accelerator.register_for_checkpointing(average)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).square().sum())
            optimizer.step()
            average.update_parameters(model)
        where = accelerator.save_state(tmp_path / "first")
        kept = [tensor.clone() for tensor in average.state_dict().values()]
        average.update_parameters(model)
        accelerator.load_state(where)
        assert all(map(torch.equal, average.state_dict().values(), kept))
        assert {parameter.device for parameter in average.parameters()} == {accelerator.device}

    ranks(1, device="standin").run(run)


def test_receipt_names_the_device(ranks: Any, tmp_path: Path) -> None:
    """The manifest says on which device a checkpoint was saved; numbered checkpoints of a device rotate, and the newest is loaded."""

    def run() -> list[Any]:
        project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        run = trained(2, project_config=project)
        for _ in range(3):
            where = run.accelerator.save_state()
        run.accelerator.wait_for_everyone()
        run.accelerator.load_state()
        receipt = json.loads((Path(where) / "MANIFEST.json").read_text())["receipt"]
        return [receipt["device"], receipt["device_name"], Path(where).name]

    assert ranks(2, device="standin").run(run) == [["standin", "stand-in accelerator 0", "checkpoint_2"]] * 2
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2", "latest"]
