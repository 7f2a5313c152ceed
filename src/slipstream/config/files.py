"""What a configuration file says: our own format, and the files of `accelerate config` through `relative.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from slipstream.config.checks import Choice
from slipstream.config.names import unknown_name
from slipstream.config.option import Origin, parse
from slipstream.config.resolved import Unused
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = ["VERSION", "Reading", "understand"]

VERSION: Final = 1


class Reading(NamedTuple):
    """What a file said: the options, and the keys that have no effect here."""

    choices: Mapping[str, Choice]
    unused: tuple[Unused, ...]


def understand(data: Mapping[str, Any], path: str) -> Reading:
    """The options in the mapping that was read from `path`."""
    by_key = {key: option for option in OPTIONS.values() for key in option.keys}
    choices: dict[str, Choice] = {}
    for key, raw in data.items():
        if raw is None or key == "version":
            continue
        origin = Origin("file", f"{path}: {key}")
        option = by_key.get(key)
        if option is None:
            raise unknown_name(key, origin)
        if option.name in choices:
            raise ConfigError(f"{key} and {option.name} in {path} are the same option.\nKeep one of them.")
        choices[option.name] = Choice(parse(option, raw, origin), origin)
    return Reading(choices, ())
