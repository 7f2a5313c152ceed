"""Silence for libraries that report what is no trouble for the user while they are imported, or while a model is built or measured."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from slipstream.errors import ConfigError

__all__ = ["import_quietly", "quiet"]

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


def import_quietly(package: str, what: str, remedy: str) -> Any:
    """A package that `what` needs; a ConfigError with the remedy where it is not installed.

    >>> import_quietly("nothing_like_that", "this", "pip install it.")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: this, which is not installed (No module named 'nothing_like_that'): pip install it.
    """
    try:
        with quiet():
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what}, which is not installed ({error}): {remedy}") from None


def _above(level: int) -> Any:
    def is_above(record: logging.LogRecord) -> bool:
        return record.levelno > level

    return is_above
