"""A frozen base, a one-cycle schedule, normalised inputs, checkpoints and a tracker; on resume the rest of the loader replaces it."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
from tiny import FEATURES, Classifier, Rows, get_parser, weights_of
from torch.utils.data import DataLoader, Subset

from slipstream import Accelerator

NUM_EPOCHS, SEED = 3, 42


def splits(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    data = Rows(30, seed=0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    order = np.random.permutation(len(data))
    cut = int(0.8 * len(data))
    train, rest = Subset(data, order[:cut].tolist()), Subset(data, order[cut:].tolist())
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(rest, shuffle=False, batch_size=batch_size)


def frozen_model() -> Classifier:
    model = Classifier()
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    return model


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, log_with=args.log_with, project_dir=args.project_dir
    )
    config = {"lr": 3e-2, "num_epochs": NUM_EPOCHS, "seed": SEED, "batch_size": args.batch_size, "image_size": (2, 2)}
    accelerator.init_trackers(os.path.split(__file__)[-1].split(".")[0], config)
    train_dataloader, eval_dataloader = splits(args.batch_size)
    model = frozen_model().to(accelerator.device)
    mean, std = (torch.full((1, FEATURES), value, dtype=torch.float64).to(accelerator.device) for value in (0.1, 2.0))
    optimizer = torch.optim.Adam(params=model.parameters(), lr=config["lr"] / 25)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=NUM_EPOCHS, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        resume_step = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
    metrics = {}
    for epoch in range(starting_epoch, NUM_EPOCHS):
        model.train()
        total_loss = 0
        if epoch == starting_epoch and resume_step is not None:
            train_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        for batch in train_dataloader:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            outputs = model((batch["inputs"] - mean) / std).logits
            loss = torch.nn.functional.cross_entropy(outputs, batch["labels"])
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            with torch.no_grad():
                outputs = model((batch["inputs"] - mean) / std).logits
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["labels"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        metrics[epoch] = {"accuracy": 100 * accurate.item() / num_elems, "seen": num_elems}
        accelerator.log({**metrics[epoch], "train_loss": total_loss.item() / len(train_dataloader), "epoch": epoch}, step=overall_step)
    accelerator.end_training()
    return {"weights": weights_of(model), "metrics": metrics, "steps": overall_step}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--checkpointing_steps", type=int, default=1000)
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--log_with", default="all")
    parser.add_argument("--project_dir", default="logs")
    RESULT = training_function(parser.parse_args())
