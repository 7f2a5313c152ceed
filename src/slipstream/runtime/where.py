"""Which process this is, asked without making a state, without opening anything, and without importing torch."""

from __future__ import annotations

import sys

from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.runtime.clusters import detect
from slipstream.runtime.process import Process

__all__ = ["this_process"]


def this_process() -> Process:
    """This process as the runtime knows it, or else the variables of the launcher; broken ones are for a state to report.

    >>> this_process().is_main
    True
    """
    module = sys.modules.get("slipstream.runtime.current")  # where it is not loaded there is no runtime
    current_or_none = getattr(module, "current_or_none", None)  # absent while the module itself is being loaded
    runtime = None if current_or_none is None else current_or_none()
    if runtime is not None:
        process: Process = runtime.process
        return process
    try:
        return detect(environment())
    except ConfigError:
        return Process()
