"""Slipstream: plain PyTorch scripts, run distributed.

    from slipstream import PartialState

    state = PartialState()
    with state.split_between_processes(prompts) as mine:
        texts = generate(mine)
    everything = state.gather(texts)

The public names are found when they are first used, so `import slipstream` imports no torch. Helpers are in `slipstream.utils`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.lazy import lazily as _lazily

if TYPE_CHECKING:
    from slipstream.accelerator import Accelerator as Accelerator
    from slipstream.devices.packages import is_rich_available as is_rich_available
    from slipstream.devices.table import DistributedType as DistributedType
    from slipstream.errors import (
        ConfigError as ConfigError,
        DistributedOperationException as DistributedOperationException,
        LaunchError as LaunchError,
        MismatchError as MismatchError,
        PeerLostError as PeerLostError,
        SlipstreamError as SlipstreamError,
        StateError as StateError,
        WaitTimeoutError as WaitTimeoutError,
    )
    from slipstream.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
    from slipstream.runtime.state import AcceleratorState as AcceleratorState, PartialState as PartialState

__version__ = "0.1.0"

_HOMES = {
    "slipstream.accelerator": ("Accelerator",),
    "slipstream.devices.packages": ("is_rich_available",),
    "slipstream.devices.table": ("DistributedType",),
    "slipstream.errors": (
        "ConfigError",
        "DistributedOperationException",
        "LaunchError",
        "MismatchError",
        "PeerLostError",
        "SlipstreamError",
        "StateError",
        "WaitTimeoutError",
    ),
    "slipstream.notebook": (
        "debug_launcher",
        "notebook_launcher",
    ),
    "slipstream.runtime.state": (
        "AcceleratorState",
        "PartialState",
    ),
}

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "ConfigError",
    "DistributedOperationException",
    "DistributedType",
    "LaunchError",
    "MismatchError",
    "PartialState",
    "PeerLostError",
    "SlipstreamError",
    "StateError",
    "WaitTimeoutError",
    "debug_launcher",
    "is_rich_available",
    "notebook_launcher",
]

__getattr__, __dir__ = _lazily(__name__, _HOMES)
