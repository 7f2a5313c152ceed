"""SyncBatchNorm, unused parameters, a long timeout, and loaders that a function returns with their samplers."""

import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def get_loaders(train_set, val_set, batch_size):
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=train_sampler, num_workers=4, pin_memory=True)
    val_loader = DataLoader(val_set, batch_size=batch_size)  # every process evaluates everything
    return train_loader, val_loader, train_sampler


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x, left=True):
        x = self.stem(x).mean((2, 3))
        return self.left(x) if left else self.right(x)


def main(train_set, val_set):
    dist.init_process_group(backend="nccl", init_method="env://", timeout=datetime.timedelta(hours=2))
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = Branches().cuda()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    train_loader, val_loader, train_sampler = get_loaders(train_set, val_set, 32)

    for epoch in range(10):
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if local_rank == 0:
            torch.save({"model": model.module.state_dict()}, f"epoch_{epoch}.pt")
        dist.barrier(device_ids=[local_rank])
