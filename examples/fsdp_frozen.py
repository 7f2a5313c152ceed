"""Fine-tuning with frozen parameters under sharding: a large base that stays as it is, and small adapters that learn.

    slipstream launch --cpu --num_processes 2 examples/fsdp_frozen.py

The base is in bfloat16 and frozen; it is sharded like everything else, but has no gradients and no optimizer state. Only the adapters are
saved.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, FullyShardedDataParallelPlugin

WIDTH, RANK = 64, 4


class Adapted(torch.nn.Module):
    """A frozen layer, and a product of two small matrices beside it (LoRA)."""

    def __init__(self, base):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Adapted(torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


def main():
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(WIDTH, 1))
    base = model[0].layer.base.weight.detach().clone()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    share = sum(parameter.numel() for parameter in trained) / sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    inputs = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :4].prod(1, keepdim=True).sign())
    loader = DataLoader(data, batch_size=32 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(8):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    weights = accelerator.get_state_dict(model)
    assert torch.equal(weights["0.layer.base.weight"], base), "the base was trained"
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    accelerator.save({name: value for name, value in weights.items() if name in names}, "adapters.safetensors", safe_serialization=True)
    accelerator.print(f"{share:.0%} of the parameters are trained; loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < losses[0]
    accelerator.end_training()


if __name__ == "__main__":
    main()
