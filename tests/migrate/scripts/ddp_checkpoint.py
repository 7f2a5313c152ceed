"""Setup and cleanup functions, a checkpoint that rank 0 saves, and every rank loads with a map of devices."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29633"
    # every process joins the group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def demo_checkpoint(rank, world_size, steps):
    print(f"Running on rank {rank}.")
    setup(rank, world_size)

    torch.manual_seed(0)
    model = torch.nn.Linear(10, 5)
    if torch.cuda.is_available():
        model = model.to(rank)
    ddp_model = DDP(model)
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01)

    path = os.path.join(tempfile.gettempdir(), "model_of_the_migrated_script.checkpoint")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    # the others wait for the file
    dist.barrier()
    map_location = {"cuda:%d" % 0: "cuda:%d" % rank}
    ddp_model.load_state_dict(torch.load(path, map_location=map_location if torch.cuda.is_available() else "cpu"))

    for step in range(steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.ones(4, 10) * (step + 1))
        labels = torch.zeros(4, 5)
        torch.nn.functional.mse_loss(outputs, labels).backward()
        optimizer.step()

    dist.barrier()
    if rank == 0:
        os.remove(path)
        print(f"weights {sum(parameter.abs().sum().item() for parameter in ddp_model.parameters()):.5f}")
    cleanup()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn, args=(world_size, 3), nprocs=world_size, join=True)


if __name__ == "__main__":
    n_gpus = torch.cuda.device_count() or 2
    run_demo(demo_checkpoint, n_gpus)
