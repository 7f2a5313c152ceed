"""The sources of options: the environment of this process, and configuration files as plain data.

This is the only module that reads `os.environ`; every other module receives a mapping. Files are YAML or JSON, at most one mebibyte,
without duplicate keys, and never execute anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slipstream.errors import ConfigError

__all__ = [
    "clear_environment", "default_file_path", "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading", "environment",
    "get_int_from_env", "parse_choice_from_env", "parse_flag_from_env", "patch_environment", "read_file", "str_to_bool",
]

_LARGEST_FILE: Final = 1 << 20
_YES: Final = ("y", "yes", "t", "true", "on", "1")
_NO: Final = ("n", "no", "f", "false", "off", "0")


def environment() -> Mapping[str, str]:
    """Return a read-only copy of the variables of this process."""
    return MappingProxyType(dict(os.environ))


# -- variables, for scripts -------------------------------------------------------------------------------------------


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for a word that means yes or no, in any case; with `to_bool`, True or False.

    >>> str_to_bool("Yes"), str_to_bool("off"), str_to_bool("1", to_bool=True)
    (1, 0, True)
    """
    word = value.strip().lower()
    if word not in (*_YES, *_NO):
        raise ConfigError(f"{value!r} means neither yes nor no: write one of {', '.join((*_YES, *_NO))}")
    return word in _YES if to_bool else int(word in _YES)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable says yes; `default` where it is not set.

    >>> with patch_environment(example_flag="true"):
    ...     parse_flag_from_env("EXAMPLE_FLAG"), parse_flag_from_env("EXAMPLE_OTHER", True)
    (True, True)
    """
    try:
        return bool(str_to_bool(os.environ.get(key, str(default))))
    except ConfigError as error:
        raise ConfigError(f"the variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable; `default` where it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first whole number from 0 among some variables; `default` where there is none.

    >>> with patch_environment(example_size=-1, example_number=3):
    ...     get_int_from_env(["EXAMPLE_SIZE", "EXAMPLE_NUMBER"], 1), get_int_from_env(["EXAMPLE_NOTHING"], 1)
    (3, 1)
    """
    for key in env_keys:
        text = os.environ.get(key, "-1")
        try:
            number = int(text)
        except ValueError:
            raise ConfigError(f"the variable {key}={text!r} is not a whole number: set one, or unset it") from None
        if number >= 0:
            return number
    return default


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables, by their names in capitals, for the length of a block; afterwards they are as before.

    >>> with patch_environment(example_rank=1):
    ...     os.environ["EXAMPLE_RANK"]
    '1'
    >>> "EXAMPLE_RANK" in os.environ
    False
    """
    before = {name.upper(): os.environ.get(name.upper()) for name in kwargs}
    os.environ.update({name.upper(): str(value) for name, value in kwargs.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """Take every variable away for the length of a block; afterwards they are as before.

    >>> with clear_environment():
    ...     len(os.environ)
    0
    >>> len(os.environ) > 0
    True
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that make transformers load weights on the main process only, and make FSDP the strategy of this process.

    `ACCELERATE_USE_FSDP` is left as it is where it is set.
    """
    os.environ.setdefault("ACCELERATE_USE_FSDP", "true")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"


def disable_fsdp_ram_efficient_loading() -> None:
    """Set the variable that makes transformers load weights on every process."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


# -- files ------------------------------------------------------------------------------------------------------------


def default_file_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the configuration file of this user, whether or not it exists.

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
    """Return the mapping in a YAML or JSON file, as plain data."""
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
            raise ConfigError(f"The file {shown} is larger than a mebibyte, which no configuration is.\nGive the path of another file.")
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
        """Loads plain data only; a duplicate key is an error, where YAML would keep the last silently."""

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
