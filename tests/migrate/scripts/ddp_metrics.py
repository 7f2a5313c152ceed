"""Metrics over all processes: helper functions for reductions, gathered predictions, an object of each process."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


def reduce_mean(tensor):
    if not dist.is_available() or not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
    return tensor


def gather_predictions(predictions):
    world_size = dist.get_world_size()
    parts = [torch.zeros_like(predictions) for _ in range(world_size)]
    dist.all_gather(parts, predictions)
    return torch.cat(parts)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    rows, total = [], torch.zeros(2)
    for x, y in loader:
        predictions = model(x).argmax(1)
        rows.append(predictions)
        total += torch.tensor([(predictions == y).sum(), len(y)])
    dist.all_reduce(total)
    everything = gather_predictions(torch.cat(rows))
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, {"rows": len(rows)})
    return (total[0] / total[1]).item(), everything, sizes


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    train_data = TensorDataset(x, x[:, :3].argmax(1))
    train_loader = DataLoader(train_data, batch_size=4, sampler=DistributedSampler(train_data, shuffle=False))
    test_loader = DataLoader(train_data, batch_size=4, sampler=DistributedSampler(train_data, shuffle=False))
    model = DDP(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        for inputs, targets in train_loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        best = torch.tensor(float(epoch + dist.get_rank()))
        dist.all_reduce(best, op=dist.ReduceOp.MAX)
        dist.broadcast(best, src=0)
        accuracy, everything, sizes = evaluate(model, test_loader)
        mean = reduce_mean(torch.tensor([float(len(everything))]))
        if is_main():
            print(f"epoch {epoch} accuracy {accuracy:.4f} rows {len(everything)} mean {mean.item():.1f} best {best.item():.0f} of {len(sizes)}")
    if is_main():
        print(f"weights {sum(parameter.abs().sum().item() for parameter in model.parameters()):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
