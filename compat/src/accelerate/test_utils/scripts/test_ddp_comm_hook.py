"""Checks that communication hooks of DDP are used: gradients in a half format are equal on all processes and close to exact ones."""

from __future__ import annotations

import torch

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState
from accelerate.test_utils.scripts._checks import expect, expect_close, run_checks
from accelerate.utils import set_seed

_HOOKS = (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)


def _gradient(hook: DDPCommunicationHookType) -> torch.Tensor:
    AcceleratorState._reset_state()
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    set_seed(0)
    model = accelerator.prepare(torch.nn.Linear(4, 2, bias=False))
    rows = torch.arange(8.0, device=accelerator.device).reshape(2, 4) + accelerator.process_index
    accelerator.backward(model(rows).square().mean())
    gradient = accelerator.unwrap_model(model).weight.grad
    everywhere = accelerator.gather(gradient[None])
    expect(all(torch.equal(everywhere[0], row) for row in everywhere), True, f"gradients are equal with the hook {hook}")
    return gradient


def check_hooks() -> None:
    """Every hook gives the gradients of none, up to its number format"""
    exact, *others = [_gradient(hook) for hook in _HOOKS]
    for hook, gradient in zip(_HOOKS[1:], others, strict=True):
        expect_close(gradient / exact.abs().max(), exact / exact.abs().max(), f"the gradient with the hook {hook}", 1e-2)


def main() -> None:
    """Run the check."""
    run_checks((check_hooks,))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
