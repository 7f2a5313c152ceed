"""The plainest script: a schedule from the length of the loader, accumulation by hand, metrics over all processes."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Accuracy, Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 3


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, **ours(args))
    metric = Accuracy()
    batch_size, gradient_accumulation_steps = args.batch_size, 1
    if batch_size > args.max_batch_size:
        gradient_accumulation_steps = batch_size // args.max_batch_size
        batch_size = args.max_batch_size
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = get_linear_schedule(optimizer, (len(train_dataloader) * NUM_EPOCHS) // gradient_accumulation_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics = []
    for epoch in range(NUM_EPOCHS):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            loss = model(**batch).loss
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        metrics.append(metric.compute())
        accelerator.print(f"epoch {epoch}:", metrics[-1])
    accelerator.end_training()
    return {"weights": weights_of(model), "metrics": metrics}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--max_batch_size", type=int, default=8)
    RESULT = training_function(parser.parse_args())
