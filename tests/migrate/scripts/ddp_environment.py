"""A short script for torchrun that reads its variables, and shares the work of a sampler that drops the rest."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])

dist.init_process_group(backend="gloo", rank=rank, world_size=world_size)
torch.manual_seed(0)

x = torch.randn(48, 3, generator=torch.Generator().manual_seed(9))
dataset = TensorDataset(x, x.prod(dim=1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False, drop_last=True)
loader = DataLoader(dataset, batch_size=8 // world_size, sampler=sampler, drop_last=True)

model = DDP(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(3):
    sampler.set_epoch(epoch)
    running = torch.zeros(1)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
    # the mean over all processes
    dist.all_reduce(running, op=dist.ReduceOp.SUM)
    running /= world_size
    if rank == 0:
        print(f"epoch {epoch} loss {running.item() / len(loader):.5f}")

dist.barrier()
if dist.get_rank() == 0:
    print(f"weights {sum(parameter.abs().sum().item() for parameter in model.parameters()):.5f}")
dist.destroy_process_group()
