"""An average of sharded weights: torch's AveragedModel, made before `prepare`, trains, saves and loads like any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sharded_training import adamw, batches, loss_of, net, same
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from slipstream import Accelerator, FullyShardedDataParallelPlugin


def train(shards: bool, folder: Path | None, loads: bool, epochs: int) -> Any:
    """Train with an average beside the model; return the average and its outputs."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if shards else None)
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True).requires_grad_(False)
    model, average, optimizer, loader = accelerator.prepare(model, average, adamw(model), batches(accelerator))
    if loads:
        accelerator.load_state(folder)
    for _ in range(epochs):
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
    if folder is not None and not loads:
        accelerator.save_state(folder)
    with torch.no_grad():
        outputs = average(torch.arange(10, device=accelerator.device).view(2, 5))
    return accelerator.get_state_dict(average), outputs


def test_average_of_shards(ranks: Any, tmp_path: Path) -> None:
    """The average is that of one process, and goes on after it was loaded on another number of ranks."""
    weights, outputs = ranks(1).run(train, False, None, False, 3)[0]
    assert int(weights["n_averaged"]) == 6
    for found in ranks(2).run(train, True, None, False, 3):
        same(found[0], weights)
        assert torch.allclose(found[1], outputs, atol=1e-5)
    ranks(2).run(train, True, tmp_path, False, 2)
    for world in (1, 3):
        for found in ranks(world).run(train, world > 1, tmp_path, True, 1):
            same(found[0], weights)
