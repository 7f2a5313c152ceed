"""What the bundled scripts share: comparing with a reason, and running checks one after the other on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerate import PartialState

__all__ = ["expect", "expect_close", "run_checks"]


def expect(found: Any, wanted: Any, what: str) -> None:
    """Raise AssertionError unless two values are equal."""
    equal = torch.equal(found.cpu(), wanted.cpu()) if isinstance(found, torch.Tensor) else found == wanted
    if not equal:
        raise AssertionError(f"{what}: got {found!r} instead of {wanted!r} (rank {PartialState().process_index})")


def expect_close(found: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float = 1e-6) -> None:
    """Raise AssertionError unless two tensors are equal up to `tolerance`."""
    if not torch.allclose(found.detach().cpu().float(), wanted.detach().cpu().float(), atol=tolerance, rtol=1e-4):
        raise AssertionError(f"{what}: got {found!r} instead of {wanted!r} (rank {PartialState().process_index})")


def run_checks(checks: Sequence[Callable[[], None]]) -> None:
    """Run checks on all processes; the main process prints what each is about."""
    state = PartialState()
    for check in checks:
        title = (check.__doc__ or check.__name__).strip().splitlines()[0]
        if state.is_main_process:
            print(f"** {title}", flush=True)
        check()
        state.wait_for_everyone()
