"""Gradient accumulation, clipping, a trigger that stops early, and a checkpoint, in the shape of Accelerate's by_feature examples."""

import os

import torch
from torch.utils.data import DataLoader, TensorDataset

import accelerate
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils.dataclasses import ProjectConfiguration

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(project_dir="accumulated", automatic_checkpoint_naming=True, total_limit=2),
)
accelerate.utils.set_seed(1)
x = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8 // accelerator.num_processes)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"epoch {epoch} loss {mean.item():.4f}")
    accelerator.save_state()
    if epoch == 2:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
accelerator.print(f"weights {sum(parameter.abs().sum().item() for parameter in unwrapped.parameters()):.4f} {GradientState().sync_gradients}")
if accelerator.is_main_process:
    assert "checkpoint_2" in os.listdir("accumulated/checkpoints")
accelerator.end_training()
