"""An epoch inside `profile`, and its operator table."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from tiny import Classifier, get_dataloaders, get_linear_schedule, get_parser, ours, weights_of

from slipstream import Accelerator
from slipstream.utils import ProfileKwargs, set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    profile_kwargs = ProfileKwargs(
        activities=["cpu"],
        record_shapes=args.record_shapes,
        profile_memory=args.profile_memory,
        with_flops=args.with_flops,
        output_trace_dir=args.output_trace_dir,
    )
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, kwargs_handlers=[profile_kwargs], **ours(args)
    )
    set_seed(42)
    train_dataloader, _ = get_dataloaders(args.batch_size)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
    lr_scheduler = get_linear_schedule(optimizer, len(train_dataloader) * NUM_EPOCHS)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
    tables = []
    for _ in range(NUM_EPOCHS):
        model.train()
        with accelerator.profile() as prof:
            for batch in train_dataloader:
                batch.to(accelerator.device)
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
        tables.append(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=-1))
        accelerator.print(tables[-1])
    accelerator.wait_for_everyone()
    traces = sorted(name for name in os.listdir(args.output_trace_dir) if name.startswith("profile_") and name[8].isdigit())
    return {"weights": weights_of(model), "traces": traces, "found": ["aten::addmm" in table for table in tables]}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--record_shapes", action="store_true")
    parser.add_argument("--profile_memory", action="store_true")
    parser.add_argument("--with_flops", action="store_true")
    parser.add_argument("--output_trace_dir", default=None)
    RESULT = training_function(parser.parse_args())
