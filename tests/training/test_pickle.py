"""Models that are pickled or saved whole: what is read back is the user's own model, with nothing of Slipstream in it."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251  # what users do with their models
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Accelerator, AcceleratorState, GradientState, PartialState
from slipstream.utils import GuardKwargs, LedgerKwargs

X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp16 in float32": {"mixed_precision": "fp16", "outputs_to_fp32": True},
    "compiled": {"dynamo_backend": "eager"},
    "guarded": {"on_nan": "raise"},
    "skipping": {"kwargs_handlers": [GuardKwargs(on_nan="skip")]},
    "unwatched": {"kwargs_handlers": [LedgerKwargs(enabled=False)]},
}

READER = """
import sys
sys.modules["slipstream"] = None  # nothing of it can be imported
import torch

x = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
for path in sys.argv[1:]:
    saved = torch.load(path, weights_only=False, map_location="cpu")
    model = saved["model"]
    assert type(model) is torch.nn.Sequential, (path, type(model))
    assert model is saved["again"], path
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"], path
    output = model(x)
    assert output.dtype is torch.float32, (path, output.dtype)
    torch.testing.assert_close(output, saved["expected"])
    output.sum().backward()
    assert model[0].weight.grad is not None, path
"""


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def trained(way: dict[str, Any]) -> tuple[Accelerator, torch.nn.Module]:
    accelerator = Accelerator(**way)
    model = small()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(X.to(accelerator.device)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model


def save_whole(folder: Path) -> None:
    for name, way in WAYS.items():
        accelerator, model = trained(way)
        expected = small()
        expected.load_state_dict(accelerator.unwrap_model(model).state_dict())  # copied to the host
        whole = {"model": model, "again": accelerator.unwrap_model(model), "expected": expected(X).detach()}
        torch.save(whole, folder / f"{name} {accelerator.process_index} of {accelerator.num_processes}.pt")
        torch._dynamo.reset()


def test_saved_whole(ranks: Any, tmp_path: Path) -> None:
    """What torch.save writes of a prepared model loads where there is no Slipstream, from one process and from two."""
    for world in (1, 2):
        ranks(world).run(save_whole, tmp_path)
    files = sorted(map(str, tmp_path.glob("*.pt")))
    assert len(files) == 3 * len(WAYS)
    done = subprocess.run([sys.executable, "-c", READER, *files], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_pickled_forward() -> None:
    """A forward of the user's own on the instance is what a pickled model has again."""
    model = small()
    model.forward = model[0].forward
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    twin = pickle.loads(pickle.dumps(prepared))
    assert torch.equal(twin(X), twin[0](X))
    assert twin(X).dtype is torch.float32


def test_copies(ranks: Any) -> None:
    """copy.copy and copy.deepcopy of a prepared model are prepared models; a pickle of it is the bare one."""

    def run() -> Any:
        accelerator, model = trained({})
        deep, shallow = copy.deepcopy(model), copy.copy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        assert shallow[0] is model[0]
        assert deep[0] is not model[0]
        x = X.to(accelerator.device)
        assert torch.equal(deep(x), model(x))
        deep(x).sum().backward()
        deep.zero_grad()
        read = pickle.loads(pickle.dumps(model))
        return [type(each).__name__ for each in (deep, shallow, read, torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))]

    assert ranks(1).run(run) == [["Sequential"] * 4]
    assert ranks(2).run(run) == [["Replicated", "Replicated", "Sequential", "Sequential"]] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_prepare_pickled(ranks: Any, world: int) -> None:
    """A model that was read from a pickle can be prepared, in another precision too."""

    def run() -> Any:
        accelerator, model = trained({"mixed_precision": "bf16"})
        twin = pickle.loads(pickle.dumps(model))
        again = Accelerator(mixed_precision="bf16").prepare(twin)
        plain = Accelerator().prepare(copy.deepcopy(pickle.loads(pickle.dumps(again))))
        x = X.to(accelerator.device)
        return torch.equal(again(x), model(x)), plain(x).dtype is torch.float32

    assert ranks(world).run(run) == [(True, True)] * world


class Configured(Accelerator):
    """A subclass with a signature and an attribute of its own."""

    def __init__(self, project: str) -> None:
        super().__init__(mixed_precision="bf16")
        self.project = project


@pytest.mark.parametrize("world", [1, 2])
def test_accelerator(ranks: Any, world: int) -> None:
    """An Accelerator that was pickled is read back as one of the same process with the same settings, and it trains."""

    def run() -> Any:
        accelerator = Accelerator(
            mixed_precision="bf16",
            gradient_accumulation_steps=2,
            split_batches=True,
            project_dir="somewhere",
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[LedgerKwargs(enabled=False)],
            dynamo_backend="eager",
            timeout=60,
        )
        accelerator.gradient_accumulation_steps = 3
        accelerator.even_batches = not accelerator.even_batches
        accelerator.note = "mine"
        accelerator.prepare(small())
        results = []
        for twin in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
            for name in ("process_index", "num_processes", "device", "mixed_precision", "gradient_accumulation_steps", "split_batches"):
                assert getattr(twin, name) == getattr(accelerator, name), name
            for name in ("even_batches", "project_dir", "step_scheduler_with_optimizer", "note"):
                assert getattr(twin, name) == getattr(accelerator, name), name
            assert twin.state.dynamo_plugin == accelerator.state.dynamo_plugin is not None
            assert twin.state.limits == accelerator.state.limits
            assert twin._components.stepper.models == []
            model = small()
            model, optimizer = twin.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            twin.backward(model(X.to(twin.device)).float().sum())
            optimizer.step()
            results.append(twin.gather(torch.tensor([twin.process_index], device=twin.device)).tolist())
            torch._dynamo.reset()
        return results

    assert ranks(world).run(run) == [[list(range(world))] * 2] * world


def test_settings_as_given() -> None:
    """What was not asked for stays open: defaults, an effective batch size, arguments of a subclass."""
    twin = pickle.loads(pickle.dumps(Accelerator()))
    assert (twin.mixed_precision, twin.gradient_accumulation_steps, twin.project_dir) == ("no", 1, None)
    twin = pickle.loads(pickle.dumps(Accelerator(cpu=True, effective_batch_size=12)))
    assert twin.effective_batch_size == 12
    twin = pickle.loads(pickle.dumps(Configured("mnist")))
    assert (type(twin), twin.project, twin.mixed_precision) == (Configured, "mnist", "bf16")


def test_states() -> None:
    """A pickled state is a state of the process that reads it, with the same settings."""
    for state in (PartialState(cpu=True, timeout=60), AcceleratorState("bf16", cpu=True), GradientState()):
        twin = pickle.loads(pickle.dumps(state))
        assert repr(twin) == repr(copy.deepcopy(state)) == repr(state)
    assert pickle.loads(pickle.dumps(AcceleratorState("bf16"))).mixed_precision == "bf16"
    assert pickle.loads(pickle.dumps(PartialState(timeout=60)))._limits == PartialState(timeout=60)._limits


def test_optimizer_and_scheduler() -> None:
    """A prepared optimizer or scheduler is not pickled, and the error says what to save."""
    accelerator = Accelerator(cpu=True)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for prepared, inside in ((optimizer, ".optimizer"), (scheduler, ".scheduler")):
        for make in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=rf"copy its state_dict\(\), or the \w+ inside \({inside}\)"):
                make(prepared)
