"""What is in a file of `torch.save`, without running any of it.

It is read as data by `foreign/` where it holds the usual kinds, whatever it says; files of before torch 1.6, and those that name classes
which torch itself counts as harmless, go through `torch.load(weights_only=True)`. What is more than data is refused.
"""

from __future__ import annotations

import io
import re
from pickle import UnpicklingError  # noqa: TID251 - the error of torch's restricted reader; nothing is unpickled here
from typing import Any, Final

import torch

from slipstream.checkpoint.foreign.archive import OldFormat, read_archive
from slipstream.checkpoint.foreign.opcodes import NotPlain
from slipstream.checkpoint.foreign.values import read_values
from slipstream.errors import CheckpointError

__all__ = ["is_torch_file", "read_torch_file"]

_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
_GLOBAL: Final = re.compile(r"GLOBAL (\S{1,200})")
_OLD: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickle of a number with which files of torch.save began before torch 1.6."""


def is_torch_file(buffer: Any) -> bool:
    """Whether bytes begin as a file of `torch.save` does.

    >>> is_torch_file(b"PK\\x03\\x04..."), is_torch_file(b'{"step": 3}')
    (True, False)
    """
    return bytes(buffer[:4]) == _ZIP or (bytes(buffer[:1]) == _PICKLE and bytes(buffer[8:9]) != b"{")


def read_torch_file(buffer: Any, where: str, remedy: str, *, views: bool = False, map_location: Any = None, **options: Any) -> Any:
    """The value in these bytes; with `views`, tensors may share their memory. `remedy` ends the message if there is more than data in it.

    With options of `torch.load`, that reads it.
    """
    if map_location is None and not options:
        try:
            values = read_values(memoryview(buffer), where)
        except (OldFormat, NotPlain):
            if bytes(buffer[: len(_OLD)]) != _OLD and bytes(buffer[:4]) != _ZIP:
                raise
        else:
            if not values.unknown:
                return values.value if views else values.owned()
    if bytes(buffer[:4]) == _ZIP:
        read_archive(memoryview(buffer), where)  # torch would unpack what is compressed, to any size
    try:
        return torch.load(io.BytesIO(buffer), map_location=map_location or "cpu", weights_only=True, **options)
    except UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        why = next((line.strip()[:200] for line in str(error).splitlines() if "nsupported" in line), "its pickle cannot be read")
        raise CheckpointError(f"{where} holds more than data, which is not run: {named[1] if named else why}. {remedy}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:  # what torch makes of bytes it cannot read
        raise CheckpointError(f"{where} is no file that torch.save wrote, or is damaged: {str(error)[:300]}") from error
