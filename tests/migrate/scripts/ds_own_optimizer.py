"""A class around the engine, with an optimizer and a schedule of its own, accumulation, and resuming."""

import os

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 0},
}


class Runner:
    def __init__(self, model, folder):
        optimizer = FusedAdam(model.parameters(), lr=0.05, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
        )
        self.folder = folder
        if os.path.isdir(os.path.join(folder, "last")):
            self.engine.load_checkpoint(folder, "last")

    def fit(self, batches):
        for x, y in batches:
            output = self.engine(x)  # in the precision of the configuration
            loss = nn.functional.mse_loss(output, y)
            self.engine.backward(loss)
            self.engine.step()
        self.engine.save_checkpoint(self.folder, "last")
        return self.engine.get_lr()


def main():
    deepspeed.init_distributed()
    torch.manual_seed(0)
    runner = Runner(nn.Linear(3, 1), "runner")
    rank, world_size = runner.engine.global_rank, runner.engine.world_size
    data = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(3))
    batches = [(x[rank::world_size], x[rank::world_size].sum(1, keepdim=True)) for x in data]
    rates = runner.fit(batches)
    if rank == 0:
        print(f"epoch 0 rate {rates[0]:.5f}")
        print(f"weights {sum(parameter.abs().sum().item() for parameter in runner.engine.module.parameters()):.4f}")


if __name__ == "__main__":
    main()
