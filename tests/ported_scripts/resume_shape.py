"""Checkpoints every few steps or every epoch, and the arithmetic by which such scripts resume."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from tiny import Accuracy, Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 3


def started(args: argparse.Namespace, accelerator: Accelerator, batches: int) -> tuple[int, int | None]:
    """Return the first epoch, and how many of its batches were trained on."""
    if not args.resume_from_checkpoint:
        return 0, None
    accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
    accelerator.load_state(args.resume_from_checkpoint)
    name = os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0]
    if "epoch" in name:
        return int(name.replace("epoch_", "")) + 1, None
    resume_step = int(name.replace("step_", ""))
    starting_epoch = resume_step // batches
    return starting_epoch, resume_step - starting_epoch * batches


def evaluate(accelerator: Accelerator, model: torch.nn.Module, eval_dataloader: Any) -> dict[str, float]:
    metric = Accuracy()
    model.eval()
    for batch in eval_dataloader:
        batch.to(accelerator.device)
        with torch.no_grad():
            outputs = model(**batch)
        predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, **ours(args))
    checkpointing_steps = int(args.checkpointing_steps) if args.checkpointing_steps.isdigit() else args.checkpointing_steps
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    set_seed(42)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = 0
    starting_epoch, resume_step = started(args, accelerator, len(train_dataloader))
    metrics, trained = {}, []
    for epoch in range(starting_epoch, NUM_EPOCHS):
        model.train()
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        for batch in active_dataloader:
            batch.to(accelerator.device)
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            trained.append(epoch)
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        metrics[epoch] = evaluate(accelerator, model, eval_dataloader)
        accelerator.print(f"epoch {epoch}:", metrics[epoch])
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    return {"weights": weights_of(model), "metrics": metrics, "trained": trained}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--checkpointing_steps", default="none")
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--output_dir", default=".")
    RESULT = training_function(parser.parse_args())
