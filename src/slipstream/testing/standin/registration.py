"""Make the stand-in device known to torch: its name, `torch.standin`, and the backend for collectives."""

from __future__ import annotations

import atexit
import faulthandler
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from slipstream.testing.standin.extension import load_extension

__all__ = ["register"]


def register() -> None:
    """Name the device, and add `torch.standin` and the backend."""
    load_extension()
    rename_privateuse1_backend("standin")
    from slipstream.testing.standin import device_module

    # torch internals: the door for out-of-tree devices, documented but private by name (torch 2.13; tests/testing/test_standin.py notices).
    torch._register_device_module("standin", device_module)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("standin", _make_backend, devices=["standin"])
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a host that touches device memory ends the process: show where
    sys.modules["torch.standin"] = device_module
    atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    """Give the threads of autograd time to drop their last references.

    A device has threads of its own for backward. One that still needs Python's lock when the interpreter ends is unwound through C++ code,
    which aborts the process: seen with torch 2.13 on Python 3.11 in programs that end right after a backward.
    """
    if load_extension().is_initialized():
        time.sleep(0.05)


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    # torch internals: the stubs of torch.distributed do not export this class (torch 2.13; mypy notices when they do).
    from torch._C._distributed_c10d import ProcessGroupGloo

    return load_extension().Backend(ProcessGroupGloo(store, rank, size, timeout))
