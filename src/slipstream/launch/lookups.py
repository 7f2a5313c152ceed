"""Short name look-ups while torch's store connects.

For its log, torch asks the name server for the name of every address that it connects to, loopback included, and waits for the answer.
One lost packet costs five seconds at the start of a process; a laptop that is offline pays that for every connection. While a
connection is opened the resolver is told to ask once and give up after a second; afterwards it is as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

__all__ = ["short_lookups"]

_VARIABLE = "RES_OPTIONS"


@contextlib.contextmanager
def short_lookups() -> Iterator[None]:
    """For the time of the block, a name server that does not answer costs one second. No effect where the C library has no such setting.

    >>> with short_lookups():
    ...     pass
    """
    reload = getattr(ctypes.CDLL(None), "__res_init", None)
    if reload is None or _VARIABLE in os.environ:  # not glibc, or the user has chosen
        yield
        return
    os.environ[_VARIABLE] = "timeout:1 attempts:1"
    reload()
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        reload()
