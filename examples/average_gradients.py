"""Training without `prepare`: every process computes the gradient of its share of each batch, and `reduce` adds them up.

    slipstream launch --cpu --num_processes 2 examples/average_gradients.py

The result is the same on any number of processes, because the loss is defined over samples: each process divides by the size of the whole
batch, so uneven shares have the right weight.
"""

import torch

from slipstream import PartialState
from slipstream.utils import set_seed

SAMPLES, BATCH, STEPS, RATE = 70, 7, 40, 0.3


def main() -> None:
    state = PartialState()
    set_seed(0)  # the same data and the same model on every process
    inputs = torch.randn(SAMPLES, 3, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    model = torch.nn.Linear(3, 1, dtype=torch.float64).to(state.device)

    for step in range(STEPS):
        start = step * BATCH % SAMPLES
        batch = {"inputs": inputs[start : start + BATCH], "targets": targets[start : start + BATCH]}
        with state.split_between_processes(batch) as share:  # seven rows do not divide by two, which is fine
            predicted = model(share["inputs"].to(state.device))
            loss = ((predicted - share["targets"].to(state.device)) ** 2).sum() / BATCH
        model.zero_grad()
        loss.backward()
        # One call for all gradients and the loss. Any torch optimizer can take the step; this is plain gradient descent.
        gradients, loss = state.reduce(([weight.grad for weight in model.parameters()], loss.detach()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= RATE * gradient
        if step % 10 == 9:
            state.print(f"step {step + 1:3d}  loss {loss.item():.2e}")

    state.verify_replicas(model=model)  # raises on every process if their weights differ
    weights = [round(value, 3) for value in model.weight.flatten().tolist()]
    state.print(f"learned {weights} on {state.num_processes} process(es)")
    assert weights == [1.0, -2.0, 0.5]


if __name__ == "__main__":
    main()
