"""Text classification in the shape of Accelerate's first example, on tiny data: schedule from the length of the loader, metrics."""

import argparse

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DistributedType
from accelerate.utils import (
    gather_object,
    set_seed,  # also for numpy
)

########################################################################
# Runs on one process, on several, and in mixed precision.
########################################################################

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 8


def get_dataloaders(accelerator: Accelerator, batch_size: int = 16):
    # the main process prepares the data first
    with accelerator.main_process_first():
        x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, x[:, :3].argmax(1))
    if accelerator.distributed_type == DistributedType.XLA:
        raise SystemExit("not here")
    train = DataLoader(data, shuffle=False, batch_size=batch_size, drop_last=True)
    return train, DataLoader(data, shuffle=False, batch_size=EVAL_BATCH_SIZE)


def training_function(config, args):
    # Initialize accelerator
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, seed, batch_size = config["lr"], int(config["num_epochs"]), int(config["seed"]), int(config["batch_size"])
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE

    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    steps = (len(train_dataloader) * num_epochs) // gradient_accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = seen = 0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right, seen = right + (predictions == references).sum().item(), seen + len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f} of {seen}")
    names = gather_object([accelerator.process_index])
    accelerator.print(f"weights {sum(parameter.abs().sum().item() for parameter in model.parameters()):.4f} on {len(names)}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 2e-2, "num_epochs": 2, "seed": 42, "batch_size": 4}, args)


if __name__ == "__main__":
    main()
