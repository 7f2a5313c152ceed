"""Capture what this process logs, also inside of a function that runs on ranks, where pytest's `caplog` does not reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def captured_log(logger: str = "slipstream", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Give the messages of a logger that come during the block."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(logger).removeHandler(handler)
