"""An optimizer with two modes: it trains one set of weights and evaluates another, switched by `train` and `eval`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from tiny import Accuracy, Classifier, get_dataloaders, get_parser, weights_of

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 2


class AveragingSGD(torch.optim.SGD):
    """SGD that is evaluated at the mean of its past weights."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        result = super().step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter, 1 / self.steps)
        return result

    def train(self) -> None:
        self._swap("evaluated", "trained")

    def eval(self) -> None:
        self._swap("trained", "evaluated")

    @torch.no_grad()
    def _swap(self, present: str, wanted: str) -> None:
        for group in self.param_groups:
            if group.get("mode", "trained") == present:
                group["mode"] = wanted
                for parameter in group["params"]:
                    other = self.state[parameter]["mean"]
                    kept = parameter.clone()
                    parameter.copy_(other)
                    other.copy_(kept)


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = Classifier().to(accelerator.device)
    optimizer = AveragingSGD(model.parameters(), lr=0.5)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(model, optimizer, train_dataloader, eval_dataloader)
    metrics, seen = [], []
    for _ in range(NUM_EPOCHS):
        model.train()
        optimizer.train()
        seen.append(weights_of(model))
        for batch in train_dataloader:
            batch.to(accelerator.device)
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        optimizer.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        metrics.append(metric.compute())
        seen.append(weights_of(model))
    accelerator.end_training()
    return {"weights": torch.cat(seen), "metrics": metrics}


if __name__ == "__main__":
    RESULT = training_function(get_parser().parse_args())
