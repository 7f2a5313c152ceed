"""Local SGD around an epoch, with accumulation inside it."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from slipstream.local_sgd import LocalSGD
from tiny import Accuracy, Classifier, Rows, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator, DistributedType
from slipstream.utils import set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps, **ours(args)
    )
    if accelerator.distributed_type not in [DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU]:
        raise NotImplementedError("LocalSGD is for replicas")
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size, Rows(25, seed=0), drop_last=True)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.5)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    metrics = []
    for _ in range(NUM_EPOCHS):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps, enabled=args.local_sgd_steps is not None
        ) as local_sgd:
            for batch in train_dataloader:
                batch.to(accelerator.device)
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        metrics.append(metric.compute())
    return {"weights": weights_of(model), "metrics": metrics}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--local_sgd_steps", type=int, default=8)
    RESULT = training_function(parser.parse_args())
