"""Accumulation by `accumulate`, with a schedule whose length is counted in batches."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Accuracy, Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator, DistributedType
from slipstream.utils import set_seed

NUM_EPOCHS = 3


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    gradient_accumulation_steps = int(args.gradient_accumulation_steps)
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=gradient_accumulation_steps, **ours(args)
    )
    if accelerator.distributed_type == DistributedType.XLA and gradient_accumulation_steps > 1:
        raise NotImplementedError("no accumulation here")
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics, updates = [], 0
    for epoch in range(NUM_EPOCHS):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            with accelerator.accumulate(model):
                output = model(**batch)
                accelerator.backward(output.loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        metrics.append(metric.compute())
        accelerator.print(f"epoch {epoch}:", metrics[-1])
    return {"weights": weights_of(model), "metrics": metrics, "updates": updates}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    RESULT = training_function(parser.parse_args())
