"""What tensors are called: those of models and optimizers, with what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

__all__ = ["Named", "named_tensors"]

Named = tuple[str, str, torch.Tensor]
"""What it is (parameter, buffer, gradient, optimizer state), its name, and the tensor."""


def named_tensors(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> Iterator[Named]:
    """The parameters, buffers and gradients of models, and what optimizers keep for each parameter.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> [(kind, name) for kind, name, _ in named_tensors([model], [optimizer])]
    [('parameter', 'weight'), ('gradient', 'weight'), ('optimizer state', 'momentum_buffer of weight')]
    """
    names: dict[int, str] = {}
    several = list(models)
    for number, model in enumerate(several):
        prefix = f"model {number}: " if len(several) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{prefix}{name}")
            yield "parameter", f"{prefix}{name}", parameter
            if parameter.grad is not None:
                yield "gradient", f"{prefix}{name}", parameter.grad
        for name, buffer in model.named_buffers():
            yield "buffer", f"{prefix}{name}", buffer
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            whose = names.get(id(owner), "a parameter of no prepared model")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield "optimizer state", f"{key} of {whose}", value
