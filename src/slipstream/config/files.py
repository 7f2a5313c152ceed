"""What a configuration file says.

Our own files hold `version: 1` and options by name, flat, each key one line:

    version: 1
    num_processes: 4
    mixed_precision: bf16

A file with keys that only `accelerate config` writes is read through `relative.py`. A version that is newer than ours is
refused; so is every key that is not an option. `null` means that an option is not set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from slipstream.config import relative
from slipstream.config.checks import Choice
from slipstream.config.names import unknown_name
from slipstream.config.option import Option, Origin, parse
from slipstream.config.resolved import Unused
from slipstream.config.schema import OPTIONS, SECTIONS
from slipstream.errors import ConfigError

__all__ = ["VERSION", "Reading", "understand"]

VERSION: Final = 1


class Reading(NamedTuple):
    """What a file said: the options, the keys that have no effect here, and whether we wrote it as we would today."""

    choices: Mapping[str, Choice]
    unused: tuple[Unused, ...] = ()
    foreign: bool = False
    """The file is one of `accelerate config`."""


def understand(data: Mapping[str, Any], path: str) -> Reading:
    """The options in the mapping that was read from `path`."""
    if relative.recognise(data):
        entries, unused = relative.translate(data, path)
        return Reading(_choices(entries, path, also=relative.KEYS), tuple(unused), foreign=True)
    _check_version(data, path)
    _check_flat(data, path)
    entries = [(key, raw, key) for key, raw in data.items() if key != "version"]
    return Reading(_choices(entries, path))


def _choices(entries: Iterable[tuple[str, Any, str]], path: str, also: Iterable[str] = ()) -> dict[str, Choice]:
    """From (key, what it was given, how the key is shown) to choices."""
    by_key: dict[str, Option] = {key: option for option in OPTIONS.values() for key in option.keys}
    choices: dict[str, Choice] = {}
    for key, raw, shown in entries:
        if raw is None:
            continue
        origin = Origin("file", f"{path}: {shown}")
        option = by_key.get(key)
        if option is None:
            raise unknown_name(key, origin, also=also)
        if option.name in choices:
            earlier = choices[option.name].origin.where.rpartition(": ")[2]
            raise ConfigError(f"The keys {earlier} and {shown} (in {path}) mean the same option.\nKeep one of them.")
        choices[option.name] = Choice(parse(option, raw, origin), origin)
    return choices


def _check_version(data: Mapping[str, Any], path: str) -> None:
    version = data.get("version", VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(f"version={version!r} (from {path}: version) is not a version of our files.\nWrite version: {VERSION}")
    if version > VERSION:
        raise ConfigError(
            f"The file {path} has version {version}; this Slipstream understands versions up to {VERSION}.\n"
            "Install a newer Slipstream, or write the file again with this one: slipstream config"
        )


def _check_flat(data: Mapping[str, Any], path: str) -> None:
    for key, value in data.items():
        if isinstance(value, dict) and key in SECTIONS:
            raise ConfigError(
                f"The key {key} (in {path}) is a group of options, but files are flat.\n"
                f"Write its options at the left margin, without {key}."
            )
