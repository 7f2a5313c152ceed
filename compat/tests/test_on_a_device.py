"""Scripts written for Accelerate on an accelerator: the stand-in device, whose memory the host cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

Ranks = Any

SCRIPT = """
    import sys
    import torch
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import set_seed

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=12 // accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            assert batch.device == accelerator.device
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    total = sum(float(value.double().sum()) for value in accelerator.get_state_dict(model).values())
    accelerator.print("kind", accelerator.distributed_type, accelerator.device.type, accelerator.use_distributed)
    accelerator.print("total", total)
"""


def launched(text: str) -> tuple[list[str], float]:
    """The words after `kind`, and the number after `total`."""
    found = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(("kind", "total"))}
    return found["kind"], float(found["total"][0])


def test_launched(launch: Any, standin: str) -> None:
    """`accelerate launch` with a named device trains there, replicated and sharded, as one process of the CPU does."""
    on_device = {"SLIPSTREAM_DEVICE": standin}
    kind, expected = launched(launch(SCRIPT))
    assert kind == ["NO", "cpu", "False"]
    kind, total = launched(launch(SCRIPT, 2, environ=on_device))
    assert (kind, total) == (["MULTI_GPU", "standin", "True"], pytest.approx(expected, abs=1e-5))
    kind, total = launched(launch(SCRIPT, 2, environ=on_device, options=("--use_fsdp", "--fsdp_version", "2")))
    assert (kind, total) == (["FSDP", "standin", "True"], pytest.approx(expected, abs=1e-5))


def begin() -> None:
    """Forget the states of the run before: they are shared by the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def checkpointed(folder: Path, device: str, loads: bool) -> list[list[float]]:
    """Train with dropout, save in the middle or load there, and return the weights at the end."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    begin()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, non_blocking=True))
    assert accelerator.device.type == device
    set_seed(3 if loads else 0, device_specific=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    rows = torch.arange(96.0).view(24, 4) / 100
    loader = torch.utils.data.DataLoader(rows, batch_size=4, pin_memory=device != "cpu")
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    if loads:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, 1)
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and not loads:
            accelerator.save_state(str(folder))
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {value.device for value in states} == {accelerator.device}
    return [value.tolist() for value in accelerator.get_state_dict(model).values()]


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """`save_state` and `load_state` on devices: the weights go on exactly, with the random numbers of each device."""
    saved = ranks(2, device="standin").run(checkpointed, tmp_path / "saved", "standin", False)
    assert ranks(2, device="standin").run(checkpointed, tmp_path / "saved", "standin", True) == saved


def collected() -> Any:
    from accelerate import Accelerator, utils

    begin()
    accelerator = Accelerator()
    own = utils.send_to_device({"x": torch.full((2 + accelerator.process_index, 3), 1.0), "text": "a"}, accelerator.device)
    assert own["x"].device == accelerator.device
    padded = utils.pad_across_processes(own["x"], dim=0)
    results = {"padded": padded, "gathered": utils.gather(padded), "sum": utils.reduce(torch.ones(2, device=accelerator.device), "sum")}
    results["first"] = utils.broadcast(torch.full((2,), float(accelerator.process_index), device=accelerator.device))
    assert {value.device for value in results.values()} == {accelerator.device}
    module = torch.get_device_module(accelerator.device)
    before = module.memory_allocated()
    big = torch.ones(1 << 20, device=accelerator.device)
    assert module.memory_allocated() >= before + big.nbytes
    (big,) = utils.release_memory(big)
    assert big is None
    assert module.memory_allocated() == before
    return utils.find_batch_size(own), utils.gather_object([accelerator.process_index]), results


def test_collectives_and_memory(ranks: Ranks) -> None:
    """Results of collectives are on the device of each process, and released memory is free."""
    for rank, (size, objects, results) in enumerate(ranks(2, device="standin").run(collected)):
        assert (size, objects) == (2 + rank, [0, 1])
        assert [tuple(value.shape) for value in results.values()] == [(3, 3), (6, 3), (2,), (2,)]
        assert results["sum"].tolist() == [2.0, 2.0]
        assert results["first"].tolist() == [0.0, 0.0]
