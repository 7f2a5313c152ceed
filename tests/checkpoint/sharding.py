"""A run whose state is sharded over ranks, in the ways that strategies will do it; and what a whole one would hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream import Accelerator
from slipstream.strategies.base import Strategy


class Sharded(Strategy):
    """A strategy for models that were sharded before they are prepared."""

    name = "sharded"
    replicated = False

    def check(self, model: torch.nn.Module, device: torch.device) -> None:
        """Take every model, those with sharded parameters too."""


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, tied weights, buffers, a layer with a version, and a frozen one."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(width, 5, bias=False)
        self.norm = torch.nn.BatchNorm1d(5)
        self.mid = torch.nn.Linear(5, 3)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.head = torch.nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.mid(self.norm(self.embed(x) * self.head(x).tanh())))


def net(seed: int, width: int = 7) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(width)


Shard = Callable[[torch.nn.Module], None]


def not_at_all(model: torch.nn.Module) -> None:
    """Every rank has all of it."""


def fully(model: torch.nn.Module) -> None:
    """As torch's FSDP shards: by the first dim, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh(Accelerator().device.type, (torch.distributed.get_world_size(),)))


def replicated_too(model: torch.nn.Module) -> None:
    """Two groups of ranks that hold the same, sharded within each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sizes = 2, torch.distributed.get_world_size() // 2
    fully_shard(model, mesh=init_device_mesh(Accelerator().device.type, sizes, mesh_dim_names=("replicate", "shard")))


def by_columns(model: torch.nn.Module) -> None:
    """By the last dim, as a layer that is parallel in its inputs; what has one dim only is held by all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(Accelerator().device.type, (torch.distributed.get_world_size(),))
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                placements = [Shard(parameter.dim() - 1) if parameter.dim() > 1 else Replicate()]
                with torch.no_grad():
                    made[id(parameter)] = torch.nn.Parameter(distribute_tensor(parameter, mesh, placements), parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])


def prepared(shard: Shard, seed: int = 0, width: int = 7, **options: Any) -> tuple[Accelerator, torch.nn.Module, Any]:
    """An accelerator, a sharded model and its optimizer, ready to be saved and loaded."""
    accelerator = Accelerator(**options)
    if shard is not not_at_all:
        accelerator._components.strategy = accelerator._components.stepper.engine = Sharded()
    model = net(seed, width)
    shard(model)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def filled(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, seed: int = 1) -> None:
    """One update with gradients that do not depend on how it is sharded."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in accelerator.unwrap_model(model).parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            parameter.grad = _like(parameter, gradient)
    optimizer.step()
    optimizer.zero_grad()


def _like(parameter: Any, full: torch.Tensor) -> Any:
    if not hasattr(parameter, "placements"):
        return full.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(parameter.device), parameter.device_mesh, parameter.placements)


def whole(value: Any) -> Any:
    """A state with every sharded tensor put together; all ranks have to ask."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, (list, tuple)) else value


def state(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """All weights and the state of the optimizer, whole."""
    return whole(dict(accelerator.unwrap_model(model).state_dict())), whole(optimizer.state_dict()["state"])


def equal(value: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(equal(item, other[key]) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(equal, value, other))
    return bool(value == other)


def local(value: Any) -> Any:
    """What this rank holds of a state."""
    if isinstance(value, torch.Tensor):
        return (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
    return {key: local(item) for key, item in value.items()}


class Average:
    """An object of the script's own that keeps sharded tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: torch.zeros_like(parameter.detach()) for name, parameter in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].mul_(0.5).add_(parameter.detach())

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values)}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        for name, value in given["values"].items():
            self.values[name].copy_(value)
