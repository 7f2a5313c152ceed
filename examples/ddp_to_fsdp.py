"""Train in stages with different strategies: replicas first, then shards, then an evaluation on one process.

    slipstream launch --cpu --num_processes 2 examples/ddp_to_fsdp.py

The first stage trains the head alone and replicates the model (DDP). The process group is released, and the second stage trains all of it
sharded (FSDP2), with the same optimizer and its state. At the end one process evaluates the whole model by itself.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, FullyShardedDataParallelPlugin


class Block(torch.nn.Module):
    """A residual block, the unit that is sharded."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU())
        self.back = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.back(self.layers(x))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), Block(32), Block(32), torch.nn.Linear(32, 1))


def make_loader():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)


def train(accelerator, model, optimizer, epochs):
    prepared, prepared_optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(prepared(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            prepared_optimizer.step()
            prepared_optimizer.zero_grad()
    return prepared, accelerator.reduce(loss.detach(), "mean").item()


def main():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    accelerator = Accelerator()
    model[:-1].requires_grad_(False)
    _, loss = train(accelerator, model, optimizer, epochs=1)
    accelerator.print(f"replicas, the head alone: loss {loss:.4f}")
    accelerator.state.destroy_process_group()

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model.requires_grad_(True)
    prepared, loss = train(accelerator, model, optimizer, epochs=3)
    accelerator.print(f"shards, the whole model: loss {loss:.4f}")

    weights = accelerator.get_state_dict(prepared)  # every process takes part
    if accelerator.is_main_process:
        plain = make_model()
        plain.load_state_dict(weights)
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            error = torch.nn.functional.mse_loss(plain(inputs), inputs.sum(1, keepdim=True)).item()
        print(f"one process, all weights: error {error:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
