"""Early stopping: one process decides to stop, and all of them stop at the same step.

    slipstream launch --cpu --num_processes 2 examples/early_stopping.py

`set_trigger()` sets a flag on the process that calls it. `check_trigger()`, which every process calls, says whether any process did.
A plain `break` on one process would leave the others waiting for it; Slipstream turns that into an error that names the process.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import set_seed

PATIENCE = 3


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    x = torch.randn(128, 8)
    y = x[:, :1] + torch.randn(128, 1)  # mostly noise: the model overfits, and gets worse on unseen data
    train_loader = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=8 // accelerator.num_processes, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=48)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    best, since, epoch = float("inf"), 0, 0
    for epoch in range(50):
        for inputs, targets in train_loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

        with torch.no_grad():
            errors = [accelerator.gather_for_metrics((model(inputs) - targets).square()) for inputs, targets in test_loader]
        loss = torch.cat(errors).mean().item()

        if accelerator.is_main_process:  # only the main process keeps count
            best, since = (loss, 0) if loss < best else (best, since + 1)
            print(f"epoch {epoch:2d}  test loss {loss:.3f}{'' if since else '  best so far'}")
            if since == PATIENCE:
                accelerator.set_trigger()
        if accelerator.check_trigger():  # called by every process
            break

    stopped = accelerator.gather([epoch])
    accelerator.print(f"all {accelerator.num_processes} process(es) stopped after epoch {epoch}")
    assert set(stopped) == {epoch}
    assert epoch < 49
    accelerator.end_training()


if __name__ == "__main__":
    main()
