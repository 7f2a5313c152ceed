"""What is restored lies in memory like what a live run has: at multiples of 64 bytes, and not as a part of a larger buffer.

Kernels round differently at other addresses, so that a resumed run would not be equal bit by bit; and a small tensor would keep a whole
file in memory.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import accelerate_layout as layout
import pytest
import torch
from safetensors.torch import load_file
from sharding import Average, by_columns, filled, fully, not_at_all, prepared
from torch.utils.data import DataLoader, TensorDataset

from own_memory import misplaced
from slipstream import Accelerator, load_checkpoint_in_model
from slipstream.checkpoint.locate import open_checkpoint
from slipstream.checkpoint.model_io import merge_weights, save_model
from slipstream.utils import load, save

Ranks = Any
STATE = {"step": torch.tensor(3.0), "odd": torch.randn(3), "even": torch.randn(64), "flags": torch.ones(5, dtype=torch.bool), "n": 7}


class Object:
    """An object of the script's own with tensors of many kinds."""

    def __init__(self) -> None:
        self.held: Any = {
            "mean": torch.randn(5),
            "list": [torch.randn(3), (torch.ones(2, dtype=torch.bfloat16), torch.arange(7))],
            "complex": torch.randn(3, dtype=torch.complex128),
            "parameter": torch.nn.Parameter(torch.randn(9)),
            "empty": torch.empty(0),
        }

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


def run(optimizer: str = "Adam") -> tuple[Any, ...]:
    accelerator = Accelerator(gradient_accumulation_steps=1 if optimizer == "LBFGS" else 2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    data = TensorDataset(torch.randn(32, 5))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    held = Object()
    accelerator.register_for_checkpointing(held)
    return accelerator, held, *accelerator.prepare(model, made, loader)


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, batches: int) -> None:
    for number, (x,) in enumerate(loader):
        if number == batches:
            break

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            value: torch.Tensor = model(x).square().mean()
            accelerator.backward(value)
            return value

        with accelerator.accumulate(model):
            if isinstance(optimizer.optimizer, torch.optim.LBFGS):
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "LBFGS", "Adafactor", "ASGD"])
def test_load_state(tmp_path: Path, optimizer: str) -> None:
    """Weights, buffers, gradients of an open window, states of optimizers and registered objects have memory of their own."""
    accelerator, _, *rest = run(optimizer)
    train(accelerator, *rest, 3)  # in the middle of a window
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    accelerator, held, model, again, loader = run(optimizer)
    accelerator.load_state(tmp_path / "saved")
    assert misplaced(dict(model.named_parameters())) == {}
    assert misplaced(dict(model.named_buffers())) == {}
    assert misplaced(again.optimizer.state_dict()) == {}
    assert misplaced(held.held) == {}
    if optimizer != "LBFGS":
        assert all(parameter.grad is not None for parameter in model.parameters())
    train(accelerator, model, again, loader, 2)
    assert misplaced(again.optimizer.state_dict()) == {}
    accelerator.end_training()


def test_every_part_of_checkpoint(tmp_path: Path) -> None:
    """So do random states, states of loaders and gradients, while they are still parts of the checkpoint."""
    accelerator, _, *rest = run()
    train(accelerator, *rest, 3)
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    checkpoint = open_checkpoint(tmp_path / "saved")
    manifest = checkpoint.manifest
    assert misplaced(checkpoint.weights(0)) == {}
    rank = checkpoint.rank(0)
    assert rank is not None
    assert misplaced(rank["random"]) == {}
    assert misplaced(rank["gradients"]) == {}
    assert misplaced([checkpoint.part(name) for name in (*manifest.optimizers, *manifest.objects)]) == {}


@pytest.mark.parametrize("kind", ["ours", "plain", "torch", "open file", "open torch file"])
def test_load(tmp_path: Path, kind: str) -> None:
    """`load` gives each tensor memory of its own, from our files, those of safetensors and those of torch.save."""
    value = {name: tensor for name, tensor in STATE.items() if isinstance(tensor, torch.Tensor)} if kind == "plain" else STATE
    path = tmp_path / "state"
    save(value, path, safe_serialization="torch" not in kind)
    found = load(io.BytesIO(path.read_bytes()) if "open" in kind else path)
    assert misplaced(found) == {}
    assert all(torch.equal(found[name], tensor) for name, tensor in value.items() if isinstance(tensor, torch.Tensor))


def test_tensors_of_storage_stay_together(tmp_path: Path) -> None:
    """Two views of one storage in a file of torch.save share one storage afterwards, as torch.load gives it."""
    base = torch.arange(64.0)
    torch.save({"all": base, "part": base[16:32]}, tmp_path / "state.pt")
    found = load(tmp_path / "state.pt")
    found["all"][16] = -1
    assert found["part"][0] == -1
    assert found["all"].untyped_storage().resizable()


@pytest.mark.parametrize("way", ["one file", "shards", "torch", "checkpoint", "merged"])
def test_weights_loaded_into_model(tmp_path: Path, way: str) -> None:
    """`load_checkpoint_in_model` copies weights into memory of the model, or of its own where the model had none."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    if way == "checkpoint":
        accelerator = Accelerator()
        accelerator.prepare(model)
        accelerator.save_state(tmp_path / "saved")
        accelerator.end_training()
    else:
        largest = 100 if way in ("shards", "merged") else "1GB"
        save_model(model, tmp_path / "saved", max_shard_size=largest, safe_serialization=way != "torch")
    if way == "merged":
        merge_weights(tmp_path / "saved", tmp_path / "whole")
    folder = tmp_path / ("whole" if way == "merged" else "saved")
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    for target in (empty, torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))):
        load_checkpoint_in_model(target, folder, strict=True)
        assert misplaced(dict(target.state_dict())) == {}
        assert all(torch.equal(tensor, model.state_dict()[name].cpu()) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("safe", [True, False])
def test_checkpoint_of_accelerate(tmp_path: Path, safe: bool) -> None:
    """What is taken over from a checkpoint of Accelerate has memory of its own too."""
    accelerator, held, model, optimizer, loader = run()
    train(accelerator, model, optimizer, loader, 4)
    layout.write(
        tmp_path / "saved", models=[model.state_dict()], safe=safe, optimizers=[optimizer.state_dict()], objects=[{"mean": torch.randn(5)}]
    )
    accelerator.end_training()
    accelerator, held, model, again, loader = run()
    accelerator.load_state(tmp_path / "saved")
    assert misplaced(dict(model.state_dict())) == {}
    assert misplaced(again.optimizer.state_dict()) == {}
    assert misplaced(held.held) == {}
    assert all(torch.equal(entry, other) for entry, other in zip(_flat(again), _flat(optimizer), strict=True))
    accelerator.end_training()


def _flat(optimizer: Any) -> list[torch.Tensor]:
    return [value for entries in optimizer.state_dict()["state"].values() for value in entries.values() if isinstance(value, torch.Tensor)]


def sharded(folder: Path) -> None:
    for name, shard in (("whole", by_columns), ("shards", by_columns), ("shards", fully)):
        accelerator, model, optimizer = prepared(shard, seed=5)
        average = Average(model)
        accelerator.register_for_checkpointing(average)
        accelerator.load_state(folder / name)
        assert misplaced(optimizer.optimizer.state_dict()) == {}, (name, shard)
        assert misplaced(dict(accelerator.unwrap_model(model).state_dict())) == {}, (name, shard)
        accelerator.end_training()


def save_sharded(folder: Path, shard: Any) -> None:
    accelerator, model, optimizer = prepared(shard)
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    filled(accelerator, model, optimizer)
    accelerator.save_state(folder)
    accelerator.end_training()


def test_what_sharded(tmp_path: Path, ranks: Ranks) -> None:
    """What a rank holds of sharded tensors has memory of its own, whether it was stored whole or in shards."""
    save_sharded(tmp_path / "whole", not_at_all)
    ranks(2).run(save_sharded, tmp_path / "shards", fully)
    ranks(2).run(sharded, tmp_path)


def test_files_we_write(tmp_path: Path) -> None:
    """In our files the data, and every tensor whose bytes are a multiple of 64, begins at a multiple of 64: a mapped one is aligned."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.nn.Linear(7, 16))
    save_model(model, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    entries = open_layout(data)
    assert entries.data_start % 64 == 0
    multiples = [entry for entry in entries.entries.values() if (entry.end - entry.start) % 64 == 0]
    assert len(multiples) == 4
    assert all(entry.start % 64 == 0 for entry in multiples)
    assert all(torch.equal(tensor, model.state_dict()[name].cpu()) for name, tensor in load_file(tmp_path / "model.safetensors").items())


def open_layout(data: bytes) -> Any:
    from slipstream.files.safetensors_layout import read_layout

    return read_layout(lambda offset, count: data[offset : offset + count], len(data), "model.safetensors")
