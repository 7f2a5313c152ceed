"""Which process this is, asked without making a state and without opening anything."""

from __future__ import annotations

from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.runtime.clusters import detect
from slipstream.runtime.current import current_or_none
from slipstream.runtime.process import Process

__all__ = ["this_process"]


def this_process() -> Process:
    """This process as the runtime knows it, or else the variables of the launcher; broken ones are for a state to report.

    >>> this_process().is_main
    True
    """
    runtime = current_or_none()
    if runtime is not None:
        return runtime.process
    try:
        return detect(environment())
    except ConfigError:
        return Process()
