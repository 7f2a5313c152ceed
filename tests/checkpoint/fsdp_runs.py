"""A run under any strategy, and all of its state put together, so that runs of different strategies and world sizes can be compared."""

from __future__ import annotations

from typing import Any

import torch
from sharded_training import adamw, batches, loss_of, net
from sharding import whole
from torch.nn import functional as F

from slipstream import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

GRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


class Counter:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


class Run:
    """A model under one strategy ("single", "ddp", "fsdp", "hsdp"), trained in windows of `steps` batches."""

    def __init__(
        self,
        strategy: str,
        *,
        seed: int = 0,
        steps: int = 1,
        weighted: bool = False,
        plugin: dict[str, Any] | None = None,
        model: torch.nn.Module | None = None,
        **options: Any,
    ) -> None:
        if strategy in ("fsdp", "hsdp"):
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**(plugin or {}))
        if strategy == "hsdp":
            options["parallelism_config"] = ParallelismConfig(**GRID)
        self.weighted = weighted
        self.accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
        model = model or net(seed)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, adamw(model), batches(self.accelerator, 96))
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self._batches: Any = None

    def train(self, count: int) -> None:
        """Train on the next batches."""
        accelerator = self.accelerator
        if self._batches is None:
            self._batches = iter(self.loader)
        for _ in range(count):
            words, following = next(self._batches)
            with accelerator.accumulate(self.model):
                outputs = self.model(words)
                if self.weighted:  # by the words that count, of which ranks have different numbers
                    counted = following > 2
                    losses = F.cross_entropy(outputs.flatten(0, 1), following.flatten(), reduction="none")
                    accelerator.backward((losses * counted.flatten()).sum(), weight=counted.sum())
                else:
                    accelerator.backward(loss_of(outputs, following))
                accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.counter.seen += 1

    def state(self) -> dict[str, Any]:
        """Weights and the state of the optimizer, whole. All ranks have to ask."""
        weights = {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}
        return {"weights": weights, "optimizer": whole(self.optimizer.state_dict()["state"]), "seen": self.counter.seen.clone()}


def differences(found: Any, expected: Any, atol: float = 1e-6, where: str = "") -> list[str]:
    """Where two states differ."""
    if isinstance(expected, torch.Tensor):
        if found.shape != expected.shape:
            return [f"{where}: {tuple(found.shape)}, {tuple(expected.shape)}"]
        same = torch.allclose(found.float(), expected.float(), atol=atol, rtol=1e-5 if atol else 0.0)
        return [] if same else [f"{where}: {(found.float() - expected.float()).abs().max()}"]
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{where}: {sorted(map(str, found.keys() ^ expected.keys()))}"]
        return [line for key in expected for line in differences(found[key], expected[key], atol, f"{where}/{key}")]
    return [] if found == expected else [f"{where}: {found} {expected}"]
