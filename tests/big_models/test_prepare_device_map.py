"""`prepare(model, device_map=...)`: parts of a model on a disk, results as without, adapters that train on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Accelerator
from slipstream.errors import ConfigError


class Adapted(torch.nn.Module):
    """Two frozen layers, and a small one beside the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.down, self.up = torch.nn.Linear(16, 2, bias=False), torch.nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden) + self.up(self.down(hidden))


MAP = {"first": "disk", "second": "disk", "down": "cpu", "up": "cpu"}


def adapted() -> Adapted:
    torch.manual_seed(0)
    model = Adapted().double()
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    return model


def trained(model: Any, accelerator: Accelerator | None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, device_map=MAP), accelerator.prepare(optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        loss = model(torch.randn(3, 8, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [model.down.weight.detach(), model.up.weight.detach()]


def test_adapters_on_disk_weights() -> None:
    """Adapters train on frozen weights that are on a disk."""
    for ours, plain in zip(trained(adapted(), Accelerator(cpu=True)), trained(adapted(), None), strict=True):
        assert torch.equal(ours, plain)


def test_dispatched_model_saved_whole(tmp_path: Path) -> None:
    """A dispatched model is left where it is and saved whole."""
    accelerator, model = Accelerator(cpu=True), adapted()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = accelerator.prepare(model, device_map=MAP, offload_folder=tmp_path / "weights")
    assert accelerator.verify_device_map(model)
    assert not accelerator.verify_device_map(adapted())
    assert model.first.weight.is_meta
    assert (tmp_path / "weights").is_dir()
    for found in (model.state_dict(), accelerator.get_state_dict(model)):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    accelerator.save_model(model, tmp_path / "saved")
    other = adapted()
    with torch.no_grad():
        other.first.weight.zero_()
    from slipstream import load_checkpoint_in_model

    load_checkpoint_in_model(other, tmp_path / "saved")
    assert torch.equal(other.first.weight, wanted["first.weight"])
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.free_memory()


def test_what_cannot_be_spread_says_why(tmp_path: Path) -> None:
    """What cannot be dispatched says why."""
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="2 models"):
        accelerator.prepare(adapted(), adapted(), device_map=MAP)
    with pytest.raises(ConfigError, match="needs device_map"):
        accelerator.prepare(adapted(), offload_folder=tmp_path)
    model = accelerator.prepare(adapted(), device_map=MAP)
    with pytest.raises(ConfigError, match="before"):
        accelerator.prepare(model, device_map=MAP)
    assert accelerator.prepare(model) is model


def inference() -> tuple[bool, str]:
    accelerator = Accelerator(cpu=True)
    plain = adapted().eval()
    x = torch.randn(3, 8, dtype=torch.float64)
    wanted = plain(x)
    model = accelerator.prepare(adapted().eval(), device_map=MAP)
    with torch.no_grad():
        same = torch.equal(model(x), wanted)
    try:
        accelerator.prepare(adapted(), device_map=MAP)
    except ConfigError as error:
        return same, str(error)
    return same, ""


def test_several_processes_infer_only(ranks: Any) -> None:
    """Several processes run a dispatched model and cannot train it."""
    for same, said in ranks(2).run(inference):
        assert same
        assert "2 processes cannot train" in said
