"""Configuration files: read as options, and written.

Our files hold `version: 1` and options by name, one flat key per line:

    version: 1
    num_processes: 4
    mixed_precision: bf16

A file with keys that only `accelerate config` writes is read through `accelerate_config.py`. A newer version and unknown keys are errors;
`null` means that an option is not set. A file is written beside its place, fsynced and renamed, readable by its owner only, and an
existing file is replaced only if the caller says so.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from slipstream.config import accelerate_config
from slipstream.config.names import unknown_name
from slipstream.config.option import Option, Origin, Value, parse
from slipstream.config.resolved_config import Choice, UnusedKey
from slipstream.config.schema import OPTIONS, SECTIONS
from slipstream.config.sources import default_file_path, environment
from slipstream.errors import ConfigError

__all__ = ["ConfigFile", "VERSION", "back_up", "file_text", "parse_config_file", "write_basic_config", "write_data", "write_file"]


VERSION: Final = 1


class ConfigFile(NamedTuple):
    """The content of a file: the options, and the keys that have no effect here."""

    choices: Mapping[str, Choice]
    unused: tuple[UnusedKey, ...] = ()
    foreign: bool = False
    """The file is one of `accelerate config`."""


def parse_config_file(data: Mapping[str, Any], path: str) -> ConfigFile:
    """Return the options in the mapping that was read from `path`."""
    if accelerate_config.recognise(data):
        entries, unused = accelerate_config.translate(data, path)
        return ConfigFile(_choices(entries, path, also=accelerate_config.KEYS), tuple(unused), foreign=True)
    _check_version(data, path)
    _check_flat(data, path)
    entries = [(key, raw, key) for key, raw in data.items() if key != "version"]
    return ConfigFile(_choices(entries, path))


def _choices(entries: Iterable[tuple[str, Any, str]], path: str, also: Iterable[str] = ()) -> dict[str, Choice]:
    """Return the choices of (key, value, key as shown in messages) entries."""
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


_HEADER: Final = "# Options of Slipstream. `slipstream launch --help` explains them; flags and SLIPSTREAM_ variables override this file.\n"


def file_text(values: Mapping[str, Value], *, as_json: bool = False) -> str:
    """Return the text of a file that sets these options; None leaves an option out.

    >>> print(file_text({"mixed_precision": "no", "num_processes": 2}).split("\\n", 1)[1], end="")
    version: 1
    num_processes: 2
    mixed_precision: 'no'
    """
    kept = {name: values[name] for name, option in OPTIONS.items() if option.in_file and values.get(name) is not None}
    return ("" if as_json else _HEADER) + _data_text({"version": VERSION, **kept}, as_json=as_json)


def _data_text(data: Mapping[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(data, indent=2) + "\n"
    import yaml  # only here: most commands write no file

    dumped: str = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=1000)
    return dumped


def write_file(path: str | os.PathLike[str], values: Mapping[str, Value], *, overwrite: bool = False) -> Path:
    """Write a file that sets these options; return its path."""
    place = Path(os.path.expanduser(path))
    if place.exists() and not overwrite:
        raise ConfigError(f"The file {place} exists already.\nGive another --config_file, or --overwrite to replace it.")
    _write_whole(place, file_text(values, as_json=place.suffix == ".json").encode())
    return place


def write_data(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write a file with these keys as they are, of whatever format; replace what is there."""
    place = Path(os.path.expanduser(path))
    _write_whole(place, _data_text(data, as_json=place.suffix == ".json").encode())


def back_up(path: str | os.PathLike[str]) -> Path:
    """Copy a file to a free name beside it; return the path of the copy."""
    place = Path(os.path.expanduser(path))
    number = 1
    while (copy := place.with_name(f"{place.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    try:
        content = place.read_bytes()
    except OSError as error:
        raise ConfigError(f"The file {place} cannot be read: {error.strerror}.") from None
    _write_whole(copy, content)
    return copy


def _write_whole(place: Path, content: bytes) -> None:
    target = os.path.realpath(place)  # a link to the file stays a link
    if os.path.isdir(target):
        raise ConfigError(f"{place} is a folder, not a file.\nGive the path of a file, such as {place / 'config.yaml'}.")
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".slipstream-")  # made with mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"The file {place} cannot be written: {error.strerror}.\nGive the path of a file that you may write.") from None


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | Literal[False]:
    """Write a minimal configuration file, by default the one that `slipstream launch` reads by itself.

    The number of processes is left out on purpose: the launcher then starts one per accelerator of the machine it runs on.
    An existing file is kept: the result is then False, with a warning.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> write_basic_config("bf16", folder.name + "/config.yaml").name
    'config.yaml'
    >>> folder.cleanup()
    """
    origin = Origin("constructor", "write_basic_config(mixed_precision=...)")
    precision = parse(OPTIONS["mixed_precision"], mixed_precision, origin)
    place = Path(os.path.expanduser(save_location)) if save_location is not None else default_file_path(environment())
    if place.exists():
        warnings.warn(f"{place} exists already and was kept; delete it to write a new one.", stacklevel=2)
        return False
    return write_file(place, {"mixed_precision": precision})
