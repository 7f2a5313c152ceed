"""Training steps on a CUDA device that is not there. Run as a program: it prints one line of JSON with what each scenario found.

`python fake_cuda_steps.py absent_cuda.so`: the library has to be loaded before torch, which is why this is a program of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from fake_device import FakeDevice, fake_device  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from slipstream import Accelerator, dispatch_model  # noqa: E402
from slipstream.strategies.base import Strategy  # noqa: E402
from slipstream.strategies.ddp import Replicated  # noqa: E402
from slipstream.utils import DataLoaderConfiguration, send_to_device  # noqa: E402

Facts = dict[str, Any]
UPDATES = 2


class Net(nn.Module):
    """Normalisation with buffers, dropout, and a note of the format that it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1)
        self.computed: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.computed.add(str(hidden.dtype))
        return self.last(self.drop(torch.relu(self.norm(hidden))))


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter([(torch.randn(2), torch.randn(1)) for _ in range(12)])


def places(tensors: Any) -> list[str]:
    return sorted({str(tensor.device) for tensor in tensors})


def batches(stream: bool = False) -> DataLoader[Any]:
    return DataLoader(Stream() if stream else TensorDataset(torch.randn(12, 2), torch.randn(12, 1)), batch_size=3)


def train(
    device: FakeDevice, plant: Callable[..., Any] | None = None, stream: bool = False, placement: Any = None, **options: Any
) -> Facts:
    """Train two updates of two batches. `plant` is a mistake: it gets the parts and the batch, and returns the loss."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    model, loader = Net(), batches(stream)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameters = list(model.parameters())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader, device_placement=placement)
    facts: Facts = {"device": str(accelerator.device), "parameters": places(parameters), "buffers": places(model.buffers())}
    device.reads.clear()
    for x, y in loader:
        with accelerator.accumulate(model):
            output = model(x)
            loss = nn.functional.mse_loss(output, y) if plant is None else plant(accelerator, model, optimizer, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                facts["gradients"] = places(parameter.grad for parameter in parameters)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        facts["reads"] = list(device.reads)
        gathered = accelerator.gather_for_metrics((output.detach(), y))
        facts["batch"], facts["gathered"] = places([x, y]), places(gathered)
    facts["norm"] = places([norm])
    facts["output"], facts["computed"] = str(output.dtype), sorted(accelerator.unwrap_model(model).computed)
    states = [entry for state in optimizer.state.values() for entry in (state["exp_avg"], state["exp_avg_sq"])]
    facts["state"] = places(states)
    accelerator.free_memory()
    return facts


def collectives(device: FakeDevice) -> Facts:
    """What one process gathers, reduces, pads and sends stays on its device."""
    accelerator = Accelerator()
    rows = torch.ones(3, 2, device=accelerator.device)
    found = {
        "gather": accelerator.gather(rows),
        "reduce": accelerator.reduce(rows, reduction="mean"),
        "pad": accelerator.pad_across_processes(rows, dim=1),
        "nested": accelerator.gather({"a": [rows]})["a"][0],
        "sent": send_to_device([torch.ones(2)], accelerator.device, non_blocking=True)[0],
    }
    return {name: places([value]) for name, value in found.items()}


def replicas(device: FakeDevice) -> Facts:
    """The step of a replica in a group of two: the gradients that it sends are on its device."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sent: list[torch.Tensor] = []

    def average(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, if there are any, with its classes
        sent.append(bucket.buffer())
        distributed.all_reduce(sent[-1])
        result = torch.futures.Future()
        result.set_result(sent[-1].div_(2))
        return result

    try:
        model = Net().to("cuda:0")
        # The group gives zeros, so the comparison of the replicas at the start is left out.
        replicated = Replicated(model, lambda: True, device_ids=[0], init_sync=False)
        replicated.register_comm_hook(None, average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replicated(torch.ones(3, 2, device="cuda:0")).sum().backward()
        optimizer.step()
        return {"sent": places(sent), "gradients": places(parameter.grad for parameter in model.parameters())}
    finally:
        distributed.destroy_process_group()


def two_devices(device: FakeDevice) -> Facts:
    """A model over two devices: its inputs follow its weights."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model = dispatch_model(model, {"0": "cuda:0", "1": "cuda:1", "2": "cuda:0"}, main_device="cuda:0")
    output = model(torch.ones(3, 2))
    return {"weights": [str(layer.weight.device) for layer in model], "output": str(output.device)}


# --- mistakes, which have to be noticed --------------------------------------------------------------------------------------------


def host_target(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    return nn.functional.mse_loss(model(x), torch.ones(len(y), 1))


def host_input(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    return nn.functional.mse_loss(model(torch.ones(len(x), 2)), y)


def host_state(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    for parameter in optimizer.state:
        optimizer.state[parameter]["exp_avg"] = torch.zeros(parameter.shape)
    return nn.functional.mse_loss(model(x), y)


def other_device(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    return nn.functional.mse_loss(model(x), y.to("cuda:1"))


def read_each_step(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = nn.functional.mse_loss(model(x), y)
    loss.item()
    return loss


def unmoved_model(device: FakeDevice) -> Facts:
    move, Strategy.move = Strategy.move, lambda *_: None  # type: ignore[method-assign]
    try:
        return train(device)
    finally:
        Strategy.move = move  # type: ignore[method-assign]


DISPATCH = {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}

SCENARIOS: dict[str, Callable[[FakeDevice], Facts]] = {
    "no": lambda device: train(device, mixed_precision="no"),
    "bf16": lambda device: train(device, mixed_precision="bf16"),
    "fp16": lambda device: train(device, mixed_precision="fp16"),
    "stream": lambda device: train(device, stream=True),
    "dispatch": lambda device: train(device, stream=True, **DISPATCH),
    "guarded": lambda device: train(device, on_nan="raise"),
    "collectives": collectives,
    "two devices": two_devices,
    "replicas": replicas,
    "mistake: target on the host": lambda device: train(device, host_target),
    "mistake: input on the host": lambda device: train(device, host_input),
    "mistake: optimizer state on the host": lambda device: train(device, host_state),
    "mistake: target on the other device": lambda device: train(device, other_device),
    "mistake: batches not moved": lambda device: train(device, placement=[True, True, True, False]),
    "mistake: model not moved": unmoved_model,
    "mistake: loss read": lambda device: train(device, read_each_step),
}


def main() -> None:
    found: dict[str, Facts] = {}
    for name, scenario in SCENARIOS.items():
        with fake_device("cuda") as device:
            try:
                found[name] = scenario(device)
            except Exception as error:  # what a scenario raises is what it found
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
