"""Two models that train against each other, each with its own optimizer and its own updates.

    slipstream launch --cpu --num_processes 2 examples/gan.py

The maker learns to turn noise into numbers that look like the real ones (mean 4, deviation 0.5); the judge learns to tell them apart.
"""

import math

import torch
from torch.utils.data import DataLoader

from slipstream import Accelerator
from slipstream.utils import set_seed

STEPS = 2  # batches per update, for each of the models


def wrong(judge: torch.nn.Module, numbers: torch.Tensor, real: bool) -> torch.Tensor:
    """Return the loss of the judge for numbers that are real, or not."""
    verdicts = judge(numbers)
    return torch.nn.functional.binary_cross_entropy_with_logits(verdicts, torch.full_like(verdicts, float(real)))


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    set_seed(0)  # the same models on every process
    maker = torch.nn.Linear(1, 1)
    judge = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.LeakyReLU(), torch.nn.Linear(16, 1))
    make = torch.optim.Adam(maker.parameters(), lr=5e-2, betas=(0.0, 0.99))
    tell = torch.optim.Adam(judge.parameters(), lr=5e-2, betas=(0.0, 0.99))
    real = 4 + 0.5 * torch.randn(1024, 1)
    data = DataLoader(real, batch_size=128 // STEPS // accelerator.num_processes, shuffle=True)
    maker, judge, make, tell, data = accelerator.prepare(maker, judge, make, tell, data)
    set_seed(1, device_specific=True)  # from here on different noise on each process

    updates = {"judge": 0, "maker": 0}
    for _ in range(20):
        for numbers in data:
            noise = torch.randn_like(numbers)

            with accelerator.accumulate(judge):  # the judge's own window
                loss = wrong(judge, numbers, real=True) + wrong(judge, maker(noise).detach(), real=False)
                accelerator.backward(loss)
                tell.step()
                tell.zero_grad()
                updates["judge"] += accelerator.sync_gradients

            judge.requires_grad_(False)  # the maker's loss passes through the judge, without gradients for it
            with accelerator.accumulate(maker):
                accelerator.backward(wrong(judge, maker(noise), real=True))
                make.step()
                make.zero_grad()
                updates["maker"] += accelerator.sync_gradients
            judge.requires_grad_(True)

    inner = accelerator.unwrap_model(maker)  # made = weight * noise + bias, so these are deviation and mean
    mean, deviation = inner.bias.item(), abs(inner.weight.item())
    accelerator.print(f"{updates['judge']} and {updates['maker']} updates; made: mean {mean:.2f}, deviation {deviation:.2f}")
    assert updates["judge"] == updates["maker"] == 20 * math.ceil(len(data) / STEPS)
    assert abs(mean - 4) < 0.5, mean
    accelerator.end_training()


if __name__ == "__main__":
    main()
