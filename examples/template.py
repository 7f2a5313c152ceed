"""A complete template of a training script: insert your model and your data.

    python examples/template.py
    slipstream launch --cpu --num_processes 2 examples/template.py --mixed_precision bf16 --project_dir runs/template

The effective batch size (64 samples), the order of the data, the learning rates and the metric are the same on any number of processes.
A run that was stopped or killed resumes from its newest valid checkpoint when it is started again with the same --project_dir.
"""

import argparse
import math
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, PartialState
from slipstream.utils import ProjectConfiguration, broadcast_object_list, set_seed


def dataset(count: int, seed: int) -> TensorDataset:
    """Points in the plane; the label says whether both coordinates have the same sign."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.prod(dim=1) > 0).long())


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = total = 0
    for points, labels in loader:
        with torch.no_grad():
            predicted = model(points).argmax(dim=1)
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))  # from all processes, every sample once
        right += (predicted == labels).sum().item()
        total += len(labels)
    model.train()
    return right / total


def train(options: argparse.Namespace, folder: str) -> float:
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        effective_batch_size=options.batch_size,  # samples per update, over all processes; accumulation follows from it
        log_with="local",  # one line of JSON for each log(); "wandb" and "tensorboard" work the same way
        # the two newest checkpoints and the best one stay, in folder/checkpoints
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2, keep_best=1, best_mode="max"),
    )
    accelerator.init_trackers("template", config=vars(options))
    set_seed(options.seed)  # before the model is built, and before prepare: it also seeds the order of the data

    # Plain PyTorch.
    train_set, test_set = dataset(503, seed=1), dataset(201, seed=2)
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)  # 16: the largest that fits on a device
    test_loader = DataLoader(test_set, batch_size=64)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    updates = options.epochs * math.ceil(len(train_set) / options.batch_size)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates)  # counted in updates

    # In any order; they come back in the same order.
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, test_loader, scheduler)
    accelerator.print(accelerator.precision)

    deadline = time.monotonic() + options.seconds
    accuracy, stop = 0.0, False
    if accelerator.save_iteration:  # the number of the next checkpoint: some exist
        path = accelerator.load_state()  # the newest valid one; the next loop over a loader continues at its position
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.print(f"goes on from {path}: epoch {train_loader.epoch}, accuracy {accuracy:.3f}")
    for epoch in range(train_loader.epoch, options.epochs):
        for points, labels in train_loader:
            with accelerator.accumulate(model):
                # The mean over this batch: do not divide it by accumulation steps or the number of processes.
                loss = torch.nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)  # acts once per update
                optimizer.step()  # so does this
                scheduler.step()  # and this
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # this batch ended an update
                accelerator.log({"loss": loss.item(), "lr": scheduler.get_last_lr()[0]}, step=optimizer.updates)
                if time.monotonic() > deadline:  # clocks differ: the first process that sees it sets the trigger,
                    accelerator.set_trigger()
                stop = accelerator.check_trigger()  # and all of them leave the loop at the same batch
                if stop:
                    accelerator.save_state()  # before leaving the loop: the epoch is not over
                    break
        accuracy = evaluate(accelerator, model, test_loader)
        accelerator.log({"accuracy": accuracy}, step=optimizer.updates)
        accelerator.print(f"epoch {epoch}  update {optimizer.updates:3d}  accuracy {accuracy:.3f} over {len(test_set)} samples")
        if not stop:
            accelerator.save_state(metric=accuracy)
        else:
            accelerator.print("the time is up")
            break

    weights = accelerator.get_state_dict(model)  # under the names of your model, without wrappers
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    accelerator.end_training()  # closes the trackers and the process group
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], help="without it: the launcher's --mixed_precision")
    parser.add_argument("--batch_size", type=int, default=64, help="samples per update, over all processes")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long, whatever is done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--project_dir", help="where the run keeps its files; without it: a folder that is removed at the end")
    options = parser.parse_args()
    PartialState()
    with tempfile.TemporaryDirectory(prefix="slipstream-example-") as mine:
        folder = options.project_dir or broadcast_object_list([mine])[0]  # the same one for all processes
        accuracy = train(options, folder)
    assert accuracy > 0.9 or options.seconds < 60, accuracy


if __name__ == "__main__":
    main()
