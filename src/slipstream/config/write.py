"""Configuration files that we write: whole or not at all, readable by their owner only.

A file is written beside its place, flushed to the disk and then renamed into it, so that a reader sees the old one or the new
one. An existing file is never replaced unless the caller says so. The format is the one that `files.py` describes.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from slipstream.config.files import VERSION
from slipstream.config.option import Origin, Value, parse
from slipstream.config.schema import OPTIONS
from slipstream.config.sources import default_file_path, environment
from slipstream.errors import ConfigError

__all__ = ["back_up", "file_text", "write_basic_config", "write_file"]

_HEADER: Final = "# Options of Slipstream. `slipstream launch --help` explains them; flags and SLIPSTREAM_ variables overrule this file.\n"


def file_text(values: Mapping[str, Value], *, as_json: bool = False) -> str:
    """The text of a file that sets these options; None leaves one out.

    >>> print(file_text({"mixed_precision": "no", "num_processes": 2}).split("\\n", 1)[1], end="")
    version: 1
    num_processes: 2
    mixed_precision: 'no'
    """
    kept = {name: values[name] for name, option in OPTIONS.items() if option.in_file and values.get(name) is not None}
    content = {"version": VERSION, **kept}
    if as_json:
        return json.dumps(content, indent=2) + "\n"
    import yaml  # only here: most commands write no file

    dumped: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    return _HEADER + dumped


def write_file(path: str | os.PathLike[str], values: Mapping[str, Value], *, overwrite: bool = False) -> Path:
    """Write a file that sets these options, and say where it is."""
    place = Path(os.path.expanduser(path))
    if place.exists() and not overwrite:
        raise ConfigError(f"The file {place} exists already.\nGive another --config_file, or --overwrite to replace it.")
    _write_whole(place, file_text(values, as_json=place.suffix == ".json").encode())
    return place


def back_up(path: str | os.PathLike[str]) -> Path:
    """Copy a file beside itself under a name that is free, and say where the copy is."""
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
