"""The largest batch size that fits, with enough accumulation to keep the effective batch size."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Accuracy, Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import find_executable_batch_size, set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, **ours(args))
    metric = Accuracy()
    observed_batch_size = int(args.batch_size)
    tried = []

    @find_executable_batch_size(starting_batch_size=int(observed_batch_size))
    def inner_training_loop(batch_size: int) -> dict[str, Any]:
        nonlocal accelerator
        tried.append(batch_size)
        accelerator.gradient_accumulation_steps = observed_batch_size // batch_size
        accelerator.free_memory()
        set_seed(42)
        model = Classifier().to(accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
        train_dataloader, eval_dataloader = get_dataloaders(batch_size)
        lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
        metrics = []
        for _ in range(NUM_EPOCHS):
            model.train()
            for batch in train_dataloader:
                with accelerator.accumulate(model):
                    batch.to(accelerator.device)
                    if batch_size > args.largest_batch_size:
                        raise RuntimeError("CUDA out of memory.")
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
            model.eval()
            for batch in eval_dataloader:
                batch.to(accelerator.device)
                with torch.no_grad():
                    outputs = model(**batch)
                predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
                metric.add_batch(predictions=predictions, references=references)
            metrics.append(metric.compute())
        return {"weights": weights_of(model), "metrics": metrics}

    return {**inner_training_loop(), "tried": len(tried)}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--largest_batch_size", type=int, required=True)
    RESULT = training_function(parser.parse_args())
