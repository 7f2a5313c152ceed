"""Where in the user's program a call was made: the file and line that error messages show.

The site is the innermost frame that is neither ours nor of the standard library's `contextlib`, found by walking up the
stack. It is taken on every collective, so it is one short loop over code objects and a cached look-up.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import lru_cache
from types import CodeType, FrameType

__all__ = ["call_site", "calling_code", "user_frames"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PROGRAMS = os.path.join(_PACKAGE, "testing") + os.sep
"""Programs that ship inside the package (the self check, the rank pool) count as a user's."""


@lru_cache(maxsize=4096)
def _is_ours(filename: str) -> bool:
    inside = filename.startswith(_PACKAGE) and not filename.startswith(_PROGRAMS)
    return inside or filename == contextlib.__file__


@lru_cache(maxsize=4096)
def _spell(filename: str, line: int, function: str) -> str:
    where = f"{os.path.basename(filename)}:{line}"
    return where if function == "<module>" else f"{where} in {function}"


def call_site() -> str:
    """The user's `file.py:line in function` that led here.

    >>> call_site().split(":")[0] != "sites.py"
    True
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown place"
    return _spell(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def calling_code() -> CodeType | None:
    """The function of the user's that led here, as its code object.

    >>> calling_code().co_name
    '<module>'
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def user_frames(frame: FrameType | None, limit: int = 8) -> list[str]:
    """The innermost `limit` frames of a stack, innermost last, one line each, ours left out.

    >>> user_frames(sys._getframe())[-1].startswith("File ")
    True
    """
    lines: list[str] = []
    while frame is not None and len(lines) < limit:
        code = frame.f_code
        if not _is_ours(code.co_filename):
            lines.append(f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        frame = frame.f_back
    return lines[::-1]
