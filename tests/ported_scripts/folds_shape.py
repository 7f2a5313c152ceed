"""Cross validation: a model for each fold, and a test loader that is not prepared, so that every process reads all of it."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import VALIDATION, Accuracy, Classifier, Rows, collate_fn, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of
from torch.utils.data import DataLoader, Subset

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    test_predictions, test_references, metrics, weights = [], [], [], []
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, **ours(args))
    metric = Accuracy()
    set_seed(42)
    data = Rows(44, seed=0)
    for fold in range(args.num_folds):
        chosen = [index for index in range(len(data)) if index % args.num_folds != fold]
        with accelerator.main_process_first():
            train_dataloader, eval_dataloader = get_dataloaders(args.batch_size, Subset(data, chosen))
        test_dataloader = DataLoader(Rows(VALIDATION, seed=2), shuffle=False, collate_fn=collate_fn, batch_size=4)
        model = Classifier().to(accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
        lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
        for _ in range(NUM_EPOCHS):
            model.train()
            for batch in train_dataloader:
                accelerator.backward(model(**batch.to(accelerator.device)).loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            model.eval()
            for batch in eval_dataloader:
                with torch.no_grad():
                    outputs = model(**batch.to(accelerator.device))
                predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
                metric.add_batch(predictions=predictions, references=references)
            metrics.append(metric.compute())
        fold_predictions = []
        for batch in test_dataloader:
            with torch.no_grad():
                outputs = model(**batch.to(accelerator.device))
            predictions, references = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
            fold_predictions.append(predictions.cpu())
            if fold == 0:
                test_references.append(references.cpu())
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        weights.append(weights_of(model))
        accelerator.free_memory()
    preds = torch.stack(test_predictions, dim=0).sum(dim=0).div(args.num_folds).argmax(dim=-1)
    metric.add_batch(predictions=preds, references=torch.cat(test_references, dim=0))
    average = metric.compute()
    accelerator.print("Average test metrics from all folds:", average)
    return {"weights": torch.cat(weights), "metrics": metrics, "average": average["accuracy"], "rows": average["seen"]}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--num_folds", type=int, default=2)
    RESULT = training_function(parser.parse_args())
