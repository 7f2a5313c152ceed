"""Parse sizes such as "10GB", "200MiB" or 5000000 into bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from slipstream.errors import ConfigError

__all__ = ["convert_file_size_to_int", "parse_size"]

_SIZE: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", re.ASCII)
_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {"": 1, "B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}}
    | {f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)}
)
_LARGEST: Final = 2**62


def parse_size(given: Any, name: str = "max_shard_size") -> int:
    """Return a size in bytes from a whole number or a text; KB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024s.

    >>> parse_size("10GB"), parse_size("1.5 MiB"), parse_size(300)
    (10000000000, 1572864, 300)
    >>> parse_size("10 boxes")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: max_shard_size='10 boxes' is not a size. Write a number of bytes, or a text such as "10GB" or "200MiB".
    """
    if isinstance(given, int) and not isinstance(given, bool):
        size = given
    else:
        found = _SIZE.fullmatch(given) if isinstance(given, str) else None
        unit = None if found is None else _UNITS.get(found[2].upper())
        if found is None or unit is None:
            raise ConfigError(f'{name}={given!r} is not a size. Write a number of bytes, or a text such as "10GB" or "200MiB".')
        if found[2].endswith("b") and len(found[2]) > 1:
            raise ConfigError(f'{name}={given!r} could mean bits. Write a capital B for bytes: "{given.strip()[:-1]}B".')
        whole, _, fraction = found[1].partition(".")
        size = int(whole + fraction) * unit // 10 ** len(fraction)
    if not 0 < size <= _LARGEST:
        raise ConfigError(f'{name}={given!r} is {size} bytes. Write a size above zero, such as "10GB".')
    return size


def convert_file_size_to_int(size: int | str) -> int:
    """Return the bytes in a size such as "5GB" or "5GiB".

    >>> convert_file_size_to_int("5GiB")
    5368709120
    """
    return parse_size(size, "size")
