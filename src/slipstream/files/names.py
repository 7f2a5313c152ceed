"""Names of files inside a folder: plain relative paths with '/', the same on every system, that cannot lead outside.

`check_name` is the only gate: whoever takes a name from a file (a manifest, an index) or from a user passes it through here first.
It looks at the text alone and never at the disk; that no link leads outside is the business of `inside.py`.
"""

from __future__ import annotations

import re
from typing import Any, Final

from slipstream.errors import CheckpointError

__all__ = ["DEEPEST", "LONGEST_PART", "check_name"]

DEEPEST: Final = 8
"""Most parts that a name may have."""
LONGEST_PART: Final = 200
"""Most bytes of one part: below the 255 of every file system, so that a temporary name beside it fits too."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DRIVE: Final = re.compile(r"[A-Za-z]:")


def check_name(name: Any, where: str) -> str:
    """The name, if it is a plain relative path; a `CheckpointError` that says where it came from if not.

    >>> check_name("unet/model.safetensors", "MANIFEST.json")
    'unet/model.safetensors'
    >>> check_name("../../etc/passwd", "MANIFEST.json")
    Traceback (most recent call last):
        ...
    slipstream.errors.CheckpointError: MANIFEST.json names the file '../../etc/passwd', which has a part '..'.
    Names are plain relative paths such as 'unet/model.safetensors'; this one is not opened.
    """
    why = _objection(name)
    if why is None:
        return str(name)
    shown = repr(name) if len(repr(name)) <= 120 else repr(name)[:117] + "..."
    raise CheckpointError(
        f"{where} names the file {shown}, which {why}.\n"
        "Names are plain relative paths such as 'unet/model.safetensors'; this one is not opened."
    )


def _objection(name: Any) -> str | None:
    if not isinstance(name, str):
        return f"is no text but {type(name).__name__}"
    if not name:
        return "is empty"
    if _CONTROL.search(name):
        return "has a control character in it"
    if "\\" in name:
        return "has a backslash in it"
    if name.startswith("/") or _DRIVE.match(name):
        return "is an absolute path"
    parts = name.split("/")
    if len(parts) > DEEPEST:
        return f"has {len(parts)} parts, more than {DEEPEST}"
    return next(filter(None, map(_objection_to_part, parts)), None)


def _objection_to_part(part: str) -> str | None:
    if part in ("", ".", ".."):
        return f"has a part {part!r}" if part else "has an empty part"
    try:
        size = len(part.encode())
    except UnicodeEncodeError:
        return "is no valid Unicode"
    return f"has a part of {size} bytes, more than {LONGEST_PART}" if size > LONGEST_PART else None
