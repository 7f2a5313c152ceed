"""Silence for libraries that report what is no trouble for the user while they are imported, or while a model is built or measured."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

__all__ = ["quiet"]

_SAID_ELSEWHERE: Final = logging.CRITICAL
_NOISY: Final = (
    ("torchao", logging.WARNING),  # kernels for other hardware
    ("torch.utils._pytree", logging.WARNING),
    ("transformers", logging.WARNING),  # advice on what would be faster
    ("torch._subclasses.fake_tensor", _SAID_ELSEWHERE),  # errors that are raised too
)


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, what these libraries log up to these levels is not shown, and no warning is.

    >>> with quiet():
    ...     logging.getLogger("torchao").warning("no kernel")
    """
    with ExitStack() as after, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, level in _NOISY:
            logger = logging.getLogger(name)
            for place in (logger, *logger.handlers):  # a logger's filter does not see what those below it log; its handlers do
                refuse = _above(level)
                place.addFilter(refuse)
                after.callback(place.removeFilter, refuse)
        yield


def _above(level: int) -> Any:
    def is_above(record: logging.LogRecord) -> bool:
        return record.levelno > level

    return is_above
