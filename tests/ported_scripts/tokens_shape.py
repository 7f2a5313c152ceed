"""A mean over all tokens of an update: batches are read ahead, tokens are counted over all processes, and `no_sync` is called by hand."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

import torch
from tiny import Encoding, get_parser, weights_of
from torch.utils.data import DataLoader

from slipstream import Accelerator
from slipstream.utils import set_seed

NUM_EPOCHS, WORDS, TEXTS = 2, 11, 24


def texts(size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (size,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator).tolist() for length in lengths]


def collate_fn(samples: list[list[int]]) -> Encoding:
    longest = max(map(len, samples)) + 1
    rows = torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])
    labels = rows[:, 1:]
    return Encoding(input_ids=rows[:, :-1], labels=torch.where(labels == 0, -100, labels))


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, WORDS, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None) -> torch.Tensor:
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        if num_items_in_batch is None:
            return torch.nn.functional.cross_entropy(logits, labels.flatten())
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def training_function(args: argparse.Namespace) -> dict[str, Any]:
    gradient_accumulation_steps = int(args.gradient_accumulation_steps)
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=gradient_accumulation_steps
    )
    set_seed(42)
    with accelerator.local_main_process_first():
        train, validation = texts(TEXTS, 0), texts(10, 1)
    train_dataloader = DataLoader(train, shuffle=False, collate_fn=collate_fn, batch_size=args.batch_size)
    eval_dataloader = DataLoader(validation, shuffle=False, collate_fn=collate_fn, batch_size=4)
    model = LanguageModel().to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.5)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    remainder = len(train_dataloader) % gradient_accumulation_steps or gradient_accumulation_steps
    total_gradient_updates = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    metrics = []
    for _ in range(NUM_EPOCHS):
        model.train()
        training_iterator = iter(train_dataloader)
        for update_step in range(total_gradient_updates):
            is_last = update_step == total_gradient_updates - 1
            batch_samples = [next(training_iterator) for _ in range(remainder if is_last else gradient_accumulation_steps)]
            local_num_items_in_batch = sum((batch["labels"].ne(-100)).sum() for batch in batch_samples)
            num_items_in_batch = accelerator.gather(local_num_items_in_batch).sum().item()
            losses = []
            for number, batch in enumerate(batch_samples):
                waits = number < len(batch_samples) - 1 and accelerator.num_processes > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss = model(**batch, num_items_in_batch=num_items_in_batch)
                    loss = loss * gradient_accumulation_steps * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach())
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            loss = accelerator.gather(sum(losses)).sum().item() / (accelerator.num_processes * gradient_accumulation_steps)
            metrics.append((num_items_in_batch, grad_norm.item(), loss))
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(**batch)
            losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
        metrics.append((len(torch.cat(losses)),))
    accelerator.end_training()
    return {"weights": weights_of(model), "metrics": metrics}


if __name__ == "__main__":
    parser = get_parser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    RESULT = training_function(parser.parse_args())
