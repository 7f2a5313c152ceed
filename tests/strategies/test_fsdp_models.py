"""Random small models train the same sharded as in plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from random_models import GLOBAL, Model, Training, models, optimizer_of, rows, train_plain, trainings
from torch.utils.data import DataLoader

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.errors import ConfigError

Result = tuple[list[float], dict[str, torch.Tensor]]


def train(described: Model, training: Training) -> Result | str:
    """Two passes over sharded shards: the norms, and the gathered weights; or why the model cannot be sharded so."""
    plugin = dict(training.plugin)
    if plugin.get("auto_wrap_policy") == "function":
        plugin["auto_wrap_policy"] = lambda module: isinstance(module, torch.nn.Linear)
    accelerator = Accelerator(
        gradient_accumulation_steps=training.steps, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin)
    )
    model = described.build()
    optimizer = optimizer_of(model, training.optimizer)
    loader = DataLoader(rows(), batch_size=GLOBAL // accelerator.num_processes)
    try:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    except ConfigError as error:
        return str(error)
    norms = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = model(batch).square()
                if training.weighs:
                    accelerator.backward(outputs.sum(), weight=len(batch))
                else:
                    accelerator.backward(outputs.mean())
                if training.clips and accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                optimizer.zero_grad()
    return norms, accelerator.get_state_dict(model)


def check(ranks: Any, described: Model, training: Training) -> None:
    norms, weights = train_plain(described, training)
    for world in (2, 3):
        results = ranks(world).run(train, described, training)
        for found in results:
            if isinstance(found, str):
                assert all(isinstance(other, str) for other in results), "refused on some ranks only"
                assert any(reason in found for reason in ("shared", "shares", "no module", "No module", "matches no", "covers all")), found
                continue
            assert found[0] == pytest.approx(norms, abs=1e-7)
            assert list(found[1]) == list(weights)
            for name, value in weights.items():
                assert torch.allclose(found[1][name], value, rtol=1e-6, atol=1e-8), (world, name, found[1][name] - value)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_models(ranks: Any, rounds: Callable[..., int]) -> None:
    """Norms and weights, for any combination of layers, blocks, ties, options of sharding, optimizers and windows."""
    count = rounds(ci=15, soak=2000)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=count < 100)
    @given(described=models(), training=trainings())
    @example(Model((("block", ("linear", ("tied", 0))), ("block", ("linear", "unused")))), Training())
    def run(described: Model, training: Training) -> None:
        check(ranks, described, training)

    run()
