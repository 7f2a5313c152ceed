"""The demo: a small model learns which arm of a spiral a point lies on, on any number of processes.

    slipstream launch --cpu --num_processes 2 examples/demo.py

It shows the predictions over the plane before and after training, the accuracy over every test sample, where the time went, and the path of
a report to open in a browser. The same file runs as `python examples/demo.py`, on one process; the batches are
the same, so the result is too, up to rounding.
"""

import math
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import set_seed, tqdm

EPOCHS, BATCH = 8, 256
WIDTH, HEIGHT = 35, 17


def spiral(count: int, seed: int) -> TensorDataset:
    """Return points on two interleaved spiral arms."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.arange(count) % 2
    distance = torch.rand(count, generator=generator).sqrt()
    angle = 2.5 * math.pi * distance + math.pi * arm
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * distance[:, None]
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), arm)


def picture(model: torch.nn.Module, device: torch.device) -> list[str]:
    """Return the prediction for each place in the plane, as text."""
    rows, columns = torch.linspace(1, -1, HEIGHT), torch.linspace(-1, 1, WIDTH)
    plane = torch.cartesian_prod(rows, columns).flip(1).to(device)
    with torch.no_grad():
        arms = model(plane).argmax(dim=1).reshape(HEIGHT, WIDTH).tolist()
    return ["".join("#" if arm else "." for arm in row) for row in arms]


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> tuple[int, int]:
    right = total = 0
    for points, arms in loader:
        with torch.no_grad():
            predicted = model(points).argmax(dim=1)
        predicted, arms = accelerator.gather_for_metrics((predicted, arms))  # from all processes, every sample once
        right += (predicted == arms).sum().item()
        total += len(arms)
    return right, total


def main() -> None:
    accelerator = Accelerator(effective_batch_size=BATCH, project_dir="outputs/demo")
    accelerator.init_trackers("spiral", config={"epochs": EPOCHS, "batch": BATCH, "lr": 1e-2})
    set_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 128), torch.nn.Tanh(), torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.Linear(128, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader = DataLoader(spiral(10005, seed=1), batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(spiral(1001, seed=2), batch_size=BATCH)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    accelerator.print(
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, {train_loader.batch_size} samples each: "
        f"{BATCH} per update, {len(train_loader)} batches per epoch\n"
    )

    before = picture(accelerator.unwrap_model(model), accelerator.device)
    started, samples, step, right, total = time.perf_counter(), 0, 0, 0, 0
    epochs = tqdm(range(EPOCHS), unit="epoch", disable=None)  # shown once, and only on a terminal (None)
    for epoch in epochs:
        for points, arms in train_loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(points), arms)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            samples, step = samples + len(points), step + 1
            accelerator.log({"loss": loss.item()}, step=step)
        epochs.set_postfix(loss=f"{loss.item():.3f}")
        if epoch % 2:
            right, total = evaluate(accelerator, model, test_loader)
            accelerator.log({"test/accuracy": right / total}, step=step)
            accelerator.save_state("outputs/demo/checkpoint")
            if accelerator.is_main_process:
                epochs.write(f"epoch {epoch + 1}: {right} of {total} test samples are right ({right / total:.1%})")
    seconds = time.perf_counter() - started

    after = picture(accelerator.unwrap_model(model), accelerator.device)
    accelerator.print(f"\n{'before':{WIDTH}}   after")
    for left, line in zip(before, after, strict=True):
        accelerator.print(f"{left}   {line}")
    samples = accelerator.reduce(samples)  # of all processes
    accelerator.print(f"\n{samples / seconds:.0f} samples/s over {accelerator.num_processes} process(es), evaluation included")
    assert right / total > 0.95
    accelerator.end_training()


if __name__ == "__main__":
    main()
