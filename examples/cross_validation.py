"""Cross-validation: a fresh model for every fold, one Accelerator for all of them, and a prediction for every sample.

    slipstream launch --cpu --num_processes 2 examples/cross_validation.py
"""

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from slipstream import Accelerator
from slipstream.utils import set_seed

FOLDS, SAMPLES = 5, 103  # 103 does not divide evenly, which is fine


def main() -> None:
    accelerator = Accelerator()  # exact: the errors are those of one process
    set_seed(0)
    x = torch.randn(SAMPLES, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]]) + 0.1 * torch.randn(SAMPLES, 1)
    data = TensorDataset(x, y)
    folds = torch.randperm(SAMPLES).tensor_split(FOLDS)  # the same on every process, because of the seed

    predictions = torch.full((SAMPLES, 1), float("nan"))
    for number, held_out in enumerate(folds):
        others = torch.cat([fold for fold in folds if fold is not held_out])
        train_loader = DataLoader(Subset(data, others.tolist()), batch_size=16 // accelerator.num_processes, shuffle=True)
        test_loader = DataLoader(Subset(data, held_out.tolist()), batch_size=8)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

        for _ in range(4):
            for inputs, targets in train_loader:
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        with torch.no_grad():
            found = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in test_loader]
        predictions[held_out] = torch.cat(found).cpu()  # in the order of the fold, without repeated samples
        error = (predictions[held_out] - y[held_out]).square().mean().item()
        accelerator.print(f"fold {number}: {len(others)} samples to learn from, {len(held_out)} held out, error {error:.4f}")

        # Keep nothing of this fold: neither in the Accelerator, nor under these names.
        model, optimizer, train_loader, test_loader = accelerator.free_memory(model, optimizer, train_loader, test_loader)

    assert not predictions.isnan().any()  # every sample was held out once
    error = (predictions - y).square().mean().item()
    accelerator.print(f"error over all {SAMPLES} samples: {error:.4f}")
    assert error < 0.1
    accelerator.end_training()


if __name__ == "__main__":
    main()
