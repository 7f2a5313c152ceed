"""What the scripts of this folder would take from other libraries: data, models, a schedule and a metric, all tiny and in float64.

The scripts have the structure of training scripts that were written for Accelerate, with the calls that those make, in their order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

TRAIN, VALIDATION, FEATURES, CLASSES = 22, 13, 5, 3


class Rows(Dataset[dict[str, Any]]):
    """Samples whose label depends on their features."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = self.inputs[:, :CLASSES].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Encoding(dict[str, torch.Tensor]):
    """A batch that moves itself, as those of tokenizers do."""

    def to(self, device: torch.device | str) -> Encoding:
        for name, tensor in self.items():
            self[name] = tensor.to(device)
        return self


@dataclass
class Output:
    """What a model gives back."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Classifier(torch.nn.Module):
    """A base and a classifier on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(FEATURES, 8, dtype=torch.float64)
        self.classifier = torch.nn.Linear(8, CLASSES, dtype=torch.float64)

    def get_classifier(self) -> torch.nn.Module:
        return self.classifier

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.classifier(self.base(inputs).tanh())
        return Output(logits, None if labels is None else torch.nn.functional.cross_entropy(logits, labels))


class Accuracy:
    """A metric that is updated batch by batch."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def add_batch(self, *, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self) -> dict[str, float]:
        right, seen = self.right, self.seen
        self.right = self.seen = 0
        return {"accuracy": right / seen, "seen": seen}


def collate_fn(samples: Sequence[dict[str, Any]]) -> Encoding:
    return Encoding({name: torch.stack([sample[name] for sample in samples]) for name in samples[0]})


def get_dataloaders(batch_size: int, train: Dataset[Any] | None = None, **options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A loader for training and one for validation; neither size divides by much."""
    data = Rows(TRAIN, seed=0) if train is None else train
    return (
        DataLoader(data, shuffle=True, collate_fn=collate_fn, batch_size=batch_size, **options),
        DataLoader(Rows(VALIDATION, seed=1), shuffle=False, collate_fn=collate_fn, batch_size=4),
    )


def get_linear_schedule(optimizer: torch.optim.Optimizer, num_training_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_training_steps))


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--scheduler_steps_per_process", action="store_true", help="the one argument that is ours: see `ours`")
    return parser


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """What is added to a script whose schedule was counted in batches of all processes; nothing, if it runs as it was written."""
    return {"scheduler_steps_per_process": True} if args.scheduler_steps_per_process else {}


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
