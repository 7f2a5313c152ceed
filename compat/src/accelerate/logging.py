"""Loggers that know their process: `get_logger(name)`.

They are Slipstream's, with two habits of Accelerate: `stacklevel` counts this adapter's own frame, so that 2 is the caller (adapters of
scripts that wrap it pass such numbers), and a level that is given, or ACCELERATE_LOG_LEVEL, is also that of the root logger, because
scripts configure their handlers there. A logger works before there is a state.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from accelerate._forwarding import forward_names
from slipstream.logging import MultiProcessAdapter as _MultiProcessAdapter, get_logger as _get_logger

_forwarded, __getattr__, __dir__ = forward_names(
    __name__, {"accelerate.state": "PartialState"}, unlisted={"slipstream.logging": "JsonFormatter"}
)
__all__ = ["MultiProcessAdapter", "get_logger", *_forwarded]


class MultiProcessAdapter(_MultiProcessAdapter):
    """A logger whose calls take `main_process_only` (by default True) and `in_order`."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # type: ignore[override]
        """Log on the processes that the keywords select."""
        kwargs.setdefault("stacklevel", 2)  # this frame is the first
        super().log(level, msg, *args, **kwargs)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning once, however often it is called with the same message."""
        key = repr((args, sorted(kwargs.items())))
        if key not in self._said:
            self._said.add(key)
            self.log(logging.WARNING, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger whose messages come from the main process only, unless a call says otherwise.

    >>> get_logger("doctest.accelerate").isEnabledFor(logging.ERROR)
    True
    """
    chosen = log_level if log_level is not None else os.environ.get("ACCELERATE_LOG_LEVEL")
    made = _get_logger(name, chosen or None)
    if chosen:
        logging.root.setLevel(chosen.upper() if isinstance(chosen, str) else chosen)
    adapter = MultiProcessAdapter(made.logger, {})
    adapter.formatter = made.formatter
    return adapter
