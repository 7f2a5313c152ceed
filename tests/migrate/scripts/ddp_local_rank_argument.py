"""A script for `torch.distributed.launch`, which gives `--local_rank`; it also runs alone, with -1."""

import argparse
import os
import random

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def set_seed(args):
    random.seed(args.seed)
    torch.manual_seed(args.seed)


def train(args, dataset, model):
    sampler = RandomSampler(dataset) if args.local_rank == -1 else DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=args.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    if args.local_rank != -1:
        model = DistributedDataParallel(
            model,
            device_ids=[args.local_rank] if args.n_gpu else None,
            find_unused_parameters=True,
        )

    total = 0.0
    for epoch in range(args.epochs):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            model.train()
            inputs, labels = inputs.to(args.device), labels.to(args.device)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            model.zero_grad()
            if args.local_rank in [-1, 0] and step == 0:
                print(f"epoch {epoch} started")
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)), help="given by the launcher")
    args = parser.parse_args()

    # one process per device, or one process
    if args.local_rank == -1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        args.n_gpu = torch.cuda.device_count()
    else:
        args.n_gpu = int(torch.cuda.is_available())
        if args.n_gpu:
            torch.cuda.set_device(args.local_rank)
        device = torch.device("cuda", args.local_rank) if args.n_gpu else torch.device("cpu")
        torch.distributed.init_process_group(backend="gloo")
    args.device = device

    set_seed(args)
    if args.local_rank not in [-1, 0]:
        torch.distributed.barrier()  # only the first process downloads
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    if args.local_rank == 0:
        torch.distributed.barrier()

    model = torch.nn.Linear(4, 2)
    model.to(args.device)
    model = train(args, dataset, model)
    if args.local_rank in [-1, 0]:
        saved = model.module if hasattr(model, "module") else model
        print(f"weights {sum(parameter.abs().sum().item() for parameter in saved.parameters()):.5f}")
    if args.local_rank != -1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
