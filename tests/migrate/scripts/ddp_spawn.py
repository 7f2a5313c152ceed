"""An image classifier with one process per device, started by `mp.spawn`, in the style of the ImageNet examples."""

import argparse
import os

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.parallel
import torch.utils.data
import torch.utils.data.distributed

parser = argparse.ArgumentParser(description="Train a classifier")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int, help="of all devices of this machine")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--resume", default="", type=str, help="path of the latest checkpoint")
parser.add_argument("--world-size", default=1, type=int, help="number of machines")
parser.add_argument("--rank", default=0, type=int, help="rank of this machine")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:29611", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--devices", default=2, type=int)
parser.add_argument("--output", default="checkpoint.pth.tar", type=str)

best_acc1 = 0


def main():
    args = parser.parse_args()
    args.distributed = True
    # one process per device
    ngpus_per_node = torch.cuda.device_count() or args.devices
    args.world_size = ngpus_per_node * args.world_size
    mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))


def main_worker(gpu, ngpus_per_node, args):
    global best_acc1
    args.gpu = gpu

    if args.distributed:
        # the rank of this process among all
        args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(
            backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    if torch.cuda.is_available():
        torch.cuda.set_device(args.gpu)
        model.cuda(args.gpu)
    # the batch size is given for the machine
    args.batch_size = int(args.batch_size / ngpus_per_node)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu] if torch.cuda.is_available() else None)

    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    if args.resume and os.path.isfile(args.resume):
        loc = "cuda:{}".format(args.gpu)
        checkpoint = torch.load(args.resume, map_location=loc)
        args.start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    cudnn.benchmark = True

    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(32, 3, 2, 2, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    train_dataset = torch.utils.data.TensorDataset(images, labels)
    val_dataset = torch.utils.data.TensorDataset(images[:8], labels[:8])

    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, shuffle=False)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    else:
        train_sampler = None
        val_sampler = None

    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=0, sampler=train_sampler)  # fmt: skip

    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False,
        num_workers=0, sampler=val_sampler)  # fmt: skip

    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)

        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()

        best_acc1 = max(acc1, best_acc1)
        if args.rank % ngpus_per_node == 0:
            print(f"epoch {epoch} accuracy {acc1:.4f} best {best_acc1:.4f}")
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.output)

    if args.rank == 0:
        print(f"weights {sum(parameter.abs().sum().item() for parameter in model.parameters()):.5f}")
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, args):
    model.train()
    for images, target in train_loader:
        if torch.cuda.is_available():
            images = images.cuda(args.gpu, non_blocking=True)
            target = target.cuda(args.gpu, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model, criterion, args):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            right += torch.tensor([(output.argmax(1) == target).sum().item(), len(target)])
    if args.distributed:
        dist.all_reduce(right, op=dist.ReduceOp.SUM)
    return (right[0] / right[1]).item()


if __name__ == "__main__":
    main()
