"""A DDP communication hook, selected by an option."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    ddp_kwargs = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(args.ddp_comm_hook), comm_wrapper=DDPCommunicationHookType(args.ddp_comm_wrapper)
    )
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, kwargs_handlers=[ddp_kwargs], **ours(args))
    set_seed(42)
    train_dataloader, _ = get_dataloaders(args.batch_size)
    model = Classifier().float().to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.5)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
    for _ in range(NUM_EPOCHS):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["inputs"].float(), batch["labels"]).loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
    return {"weights": weights_of(model)}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--ddp_comm_hook", default="no", choices=["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"])
    parser.add_argument("--ddp_comm_wrapper", default="no", choices=["no", "fp16", "bf16"])
    RESULT = training_function(parser.parse_args())
