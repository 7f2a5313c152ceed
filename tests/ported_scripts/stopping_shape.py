"""Early stopping: one process sets the trigger, and all of them leave the loop at that batch."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Accuracy, Classifier, Rows, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 3


class EarlyStoppingCallback:
    """Detect that the loss has not fallen for some batches."""

    def __init__(self, min_delta: float = 0.0, patience: int = 5) -> None:
        self.min_delta, self.patience = min_delta, patience
        self.counter, self.lowest_loss = 0, float("inf")

    def check_early_stopping(self, loss: float) -> bool:
        if self.lowest_loss - loss >= self.min_delta:
            self.lowest_loss, self.counter = loss, 0
            return False
        self.counter += 1
        return self.counter >= self.patience


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    callback = EarlyStoppingCallback(min_delta=args.min_delta, patience=2)
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, **ours(args))
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size, Rows(25, seed=0), drop_last=True)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics, steps = [], 0
    for _ in range(NUM_EPOCHS):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if callback.check_early_stopping(loss.item()) and accelerator.is_last_process:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        metrics.append(metric.compute())
    return {"weights": weights_of(model), "metrics": metrics, "steps": steps}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--min_delta", type=float, default=0.0)
    RESULT = training_function(parser.parse_args())
