"""`join_uneven_inputs` around a loop whose processes run out of batches at different times."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import Classifier, get_dataloaders, get_parser, weights_of

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS = 2


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(42)
    train_dataloader, _ = get_dataloaders(args.batch_size)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.5)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    batches = []
    for _ in range(NUM_EPOCHS):
        model.train()
        with accelerator.join_uneven_inputs([model], even_batches=args.even_batches == "yes"):
            for batch in train_dataloader:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                batches.append(len(batch["labels"]))
    accelerator.wait_for_everyone()
    return {"weights": weights_of(model), "batches": batches}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--even_batches", choices=["yes", "no"], default="no")
    RESULT = training_function(parser.parse_args())
