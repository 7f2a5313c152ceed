"""A script whose configuration is a JSON file beside it; training is a function, and the loader has a DistributedSampler."""

import deepspeed
import deepspeed.comm as dist
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(engine, loader, epochs):
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader):.4f}")
        engine.save_checkpoint("checkpoints", tag=f"epoch_{epoch}")


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=DistributedSampler(dataset, shuffle=False))
    model = nn.Linear(4, 1)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
    train(engine, loader, 2)
    if engine.global_rank == 0:
        print(f"weights {sum(parameter.abs().sum().item() for parameter in engine.module.parameters()):.4f}")


if __name__ == "__main__":
    main()
