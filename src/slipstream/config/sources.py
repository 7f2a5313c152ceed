"""Where options are read from: the environment of this process, and files.

This is the only module that looks at `os.environ`; everything else is handed a mapping. A file is read once, as plain data
(no object of a foreign class is ever made from it), and every way in which it can be unreadable is a ConfigError.
It never writes: `write.py` does. PyYAML is imported when a file is read, not before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slipstream.errors import ConfigError

__all__ = ["default_file_path", "environment", "read_file"]

_LARGEST_FILE: Final = 1 << 20


def environment() -> Mapping[str, str]:
    """The variables of this process as they are now; a copy that cannot be written to."""
    return MappingProxyType(dict(os.environ))


def default_file_path(environ: Mapping[str, str]) -> Path:
    """Where the configuration file of this user is, whether or not it exists.

    >>> default_file_path({"SLIPSTREAM_HOME": "/opt/site"}).as_posix()
    '/opt/site/config.yaml'
    """
    home = environ.get("SLIPSTREAM_HOME")
    if home:
        return Path(home) / "config.yaml"
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore a relative one
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "slipstream" / "config.yaml"


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, as plain data."""
    shown = os.fspath(path)
    text = _read_text(shown)
    data = _parse_json(text, shown) if shown.endswith(".json") else _parse_yaml(text, shown)
    if data is None:
        return {}
    if not isinstance(data, dict):
        noun = "a list" if isinstance(data, list) else "a single value"
        raise ConfigError(f"The file {shown} holds {noun}, not keys with values.\nWrite lines such as: num_processes: 2")
    strange = next((key for key in data if not isinstance(key, str)), None)
    if strange is not None:
        raise ConfigError(f"The file {shown} has the key {strange!r}, which is not text.\nWrite lines such as: num_processes: 2")
    return data


def _read_text(shown: str) -> str:
    place = os.path.expanduser(shown)
    try:
        if os.path.isfile(place) and os.path.getsize(place) > _LARGEST_FILE:
            raise ConfigError(f"The file {shown} is larger than a mebibyte, so it is hardly one.\nGive the path of another file.")
        with open(place, "rb") as file:
            return file.read(_LARGEST_FILE).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"The file {shown} is not text in UTF-8 (byte {error.start}).\nSave it as UTF-8.") from None
    except FileNotFoundError:
        raise ConfigError(f"The file {shown} does not exist.\nMake one with: slipstream config --config_file {shown}") from None
    except OSError as error:
        raise ConfigError(f"The file {shown} cannot be read: {error.strerror}.\nGive the path of a readable file.") from None


def _parse_json(text: str, shown: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(f"The file {shown} has the key {twice} twice.\nKeep one of them.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"The file {shown} is not JSON: {error.msg} in line {error.lineno}.") from None
    except RecursionError:
        raise ConfigError(f"The file {shown} is nested too deeply.") from None


def _parse_yaml(text: str, shown: str) -> Any:
    import yaml  # only here: most commands read no file

    class Loader(yaml.SafeLoader):
        """Plain data only; the same key twice in one mapping is an error, where YAML would keep the last silently."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in seen:
                        raise ConfigError(
                            f"The file {shown} has the key {key.value} twice, again in line {key.start_mark.line + 1}.\nKeep one of them."
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it cannot be understood"
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"The file {shown} is not YAML: {problem}{line}.") from None
    except RecursionError:
        raise ConfigError(f"The file {shown} is nested too deeply.") from None
