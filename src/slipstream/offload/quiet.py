"""Silence for libraries that report what is no trouble for the user while they are imported, or while a model is built."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["quiet"]

_NOISY: Final = ("torchao", "torch.utils._pytree", "transformers", "transformers.modeling_utils", "transformers.loss.loss_utils")


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, warnings of these libraries are not shown: kernels for other hardware that torchao lacks, advice of transformers.

    >>> with quiet():
    ...     logging.getLogger("torchao").warning("no kernel")
    """

    def refuse(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    loggers = [logging.getLogger(name) for name in _NOISY]
    for logger in loggers:
        logger.addFilter(refuse)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(refuse)
