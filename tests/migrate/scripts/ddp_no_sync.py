"""Accumulation under `no_sync`, and a model whose parts are reached through the wrapper."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.embed(x).tanh())

    def configure_optimizers(self, lr):
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
        return optimizer


def batches(rank, world_size):
    generator = torch.Generator().manual_seed(4)
    for _ in range(8):
        x = torch.randn(4, 4, generator=generator)
        yield x[rank::world_size], x.sum(1, keepdim=True)[rank::world_size]


def train(model, optimizer, rank, world_size):
    for step, (x, y) in enumerate(batches(rank, world_size)):
        last = (step + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = (model(x) - y).pow(2).mean() / ACCUMULATE
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the wrapper gives everyone the weights of rank 0
    model = Model()
    model = DDP(model)
    optimizer = model.module.configure_optimizers(lr=0.01)
    train(model, optimizer, rank, world_size)
    if os.environ["RANK"] == "0":
        print(f"weights {sum(parameter.abs().sum().item() for parameter in model.module.head.parameters()):.5f}")
    dist.destroy_process_group()
