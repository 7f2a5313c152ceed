"""Metrics by `gather`, with the repeated samples of the last batch removed by hand."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Accuracy, Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, **ours(args))
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics, rows = [], []
    for _ in range(NUM_EPOCHS):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        samples_seen = 0
        for step, batch in enumerate(eval_dataloader):
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather((outputs.logits.argmax(dim=-1), batch["labels"]))
            if accelerator.use_distributed:
                if step == len(eval_dataloader) - 1:
                    predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                    references = references[: len(eval_dataloader.dataset) - samples_seen]
                else:
                    samples_seen += references.shape[0]
            metric.add_batch(predictions=predictions, references=references)
            rows += references.tolist()
        metrics.append(metric.compute())
    return {"weights": weights_of(model), "metrics": metrics, "rows": rows}


if __name__ == "__main__":
    RESULT = training_function(get_parser().parse_args())
