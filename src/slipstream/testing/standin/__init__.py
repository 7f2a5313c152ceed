"""A stand-in accelerator: a torch device on the processor that is as strict as a GPU, to run accelerator code where there is none.

    from slipstream.testing import standin

    standin.enable()
    x = torch.ones(3, device="standin:1")

Its memory cannot be read by the host, its copies and collectives complete late, its memory ends, and mixing devices is an error. Kernels
are those of the CPU, so results equal the CPU's bit for bit. `slipstream launch --device standin --num_processes 4 train.py` runs a
script on it. The device is a C++ extension (`csrc/`) that is built once per torch version into a cache folder (`build.py`) and loaded by
`extension.py`; `device_module.py` is `torch.standin`, and `registration.py` makes both known to torch.
"""

from __future__ import annotations

import sys as _sys

from slipstream.errors import StateError as _StateError
from slipstream.testing.standin.build import StandinUnavailable, extension_file

__all__ = ["StandinUnavailable", "enable", "extension_file", "is_enabled"]

_DEVICE_MODULE = "slipstream.testing.standin.device_module"


def is_enabled() -> bool:
    """Return whether this process has the device.

    >>> is_enabled() in (True, False)
    True
    """
    return _DEVICE_MODULE in _sys.modules and hasattr(_sys.modules.get("torch"), "standin")


def enable() -> None:
    """Build (once) and load the device: afterwards torch has `torch.device("standin")`, `torch.standin`, and a backend for collectives.

    Raises `StandinUnavailable` with the reason if it cannot be built here. A second call does nothing.
    """
    if is_enabled():
        return
    import torch

    # torch internals: the name of the out-of-tree device has no public question (torch 2.13; tests/testing/test_standin.py notices).
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "standin"):
        raise _StateError(
            f"torch has one place for a device from outside, and {name!r} is in it; run without the package that adds it"
        )
    from slipstream.testing.standin import registration

    registration.register()
