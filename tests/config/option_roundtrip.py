"""Pass a value of an option through every source and return what arrived.

`pass_through_sources` gives a value as a flag, in a file, in a variable and through the launcher's variable. It writes one file into the
folder that it receives, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from slipstream.config import resolved_config
from slipstream.config.files import write_file
from slipstream.config.option import Option, Origin, Value, option_text, parse
from slipstream.config.resolve import for_worker, resolve
from slipstream.config.resolved_config import Choice
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = ["REQUIRED_WITH", "ROUNDTRIP_OPTIONS", "pass_through_sources", "samples"]

REQUIRED_WITH: Final[Mapping[str, Mapping[str, Value]]] = {"machine_rank": {"num_machines": 100}}
"""Options that must be set together with an option so that nothing contradicts it."""

ROUNDTRIP_OPTIONS: Final = tuple(option for option in OPTIONS.values() if option.name != "config_file")
"""The options that `pass_through_sources` takes: all but the one whose value must be an existing file."""


def samples(option: Option) -> list[Value]:
    """Return values of an option that are not its default: every choice, or an example and another one."""
    if option.is_switch:
        return [True, False] if option.default is None else [not option.default]
    example = option.shown_example
    values: list[Value] = []
    for candidate in option.choices or (example, example + "2", "7"):
        with contextlib.suppress(ConfigError):
            values.append(parse(option, candidate, Origin("default")))
    return [value for value in values if value != option.default]


def pass_through_sources(option: Option, value: Value, folder: Path) -> dict[str, Choice]:
    """Return what arrives when `value` is given in each source of the option, by kind of source."""
    given: dict[str, Value] = {**REQUIRED_WITH.get(option.name, {}), option.name: value}
    configs = {
        "constructor": resolve(constructor=given, environ={}),
        "flag": resolve(flags={name: option_text(value) for name, value in given.items()}, environ={}),
    }
    if option.variable:
        configs["environment"] = resolve(environ={f"SLIPSTREAM_{name.upper()}": option_text(value) for name, value in given.items()})
    if option.in_file:
        path = write_file(folder / f"{option.name}.yaml", given, overwrite=True)
        configs["file"] = resolve(config_file=path, environ={})
        sent = resolved_config.dump(configs["flag"])
        configs["transport"] = resolved_config.load(sent)
        configs["worker"] = for_worker(environ={resolved_config.VARIABLE: sent})
    return {place: Choice(config.value(option.name), config.origin(option.name)) for place, config in configs.items()}
