"""Pass a value of an option through every source and return what arrived, for tests of the declarations.

`travel` gives a value as a flag, in a file, in a variable and through the launcher's variable. It writes one file into the folder that it
is given, and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from slipstream.config import resolved_config
from slipstream.config.files import write_file
from slipstream.config.option import Option, Origin, Value, parse
from slipstream.config.resolve import for_worker, resolve
from slipstream.config.resolved_config import Choice
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = ["REQUIRED_WITH", "ROUNDTRIP_OPTIONS", "samples", "pass_through_sources", "as_text"]

REQUIRED_WITH: Final[Mapping[str, Mapping[str, Value]]] = {"machine_rank": {"num_machines": 100}}
"""What must be said along with an option so that it contradicts nothing."""

ROUNDTRIP_OPTIONS: Final = tuple(option for option in OPTIONS.values() if option.name != "config_file")
"""The options that `pass_through_sources` takes: all but the one whose value must be a file that exists."""


def samples(option: Option) -> list[Value]:
    """Values of an option that are not its default: every choice, or an example and where possible another one."""
    if option.is_switch:
        return [not option.default]
    example = option.shown_example
    values: list[Value] = []
    for candidate in option.choices or (example, example + "2", "7"):
        with contextlib.suppress(ConfigError):
            values.append(parse(option, candidate, Origin("default")))
    return [value for value in values if value != option.default]


def as_text(value: Value) -> str:
    """A value as a person writes it in a flag or a variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def pass_through_sources(option: Option, value: Value, folder: Path) -> dict[str, Choice]:
    """What arrives when `value` is given in each place that the option can be given in, by kind of place.

    >>> import tempfile
    >>> from slipstream.config import OPTIONS
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arrived = pass_through_sources(OPTIONS["timeout"], 60.0, Path(folder))
    >>> {place: choice.value for place, choice in arrived.items()}
    {'constructor': 60.0, 'flag': 60.0, 'environment': 60.0, 'file': 60.0, 'transport': 60.0, 'worker': 60.0}
    """
    given: dict[str, Value] = {**REQUIRED_WITH.get(option.name, {}), option.name: value}
    configs = {
        "constructor": resolve(constructor=given, environ={}),
        "flag": resolve(flags={name: as_text(entry) for name, entry in given.items()}, environ={}),
    }
    if option.variable:
        configs["environment"] = resolve(environ={f"SLIPSTREAM_{name.upper()}": as_text(entry) for name, entry in given.items()})
    if option.in_file:
        path = write_file(folder / f"{option.name}.yaml", given, overwrite=True)
        configs["file"] = resolve(config_file=path, environ={})
        sent = resolved_config.dump(configs["flag"])
        configs["transport"] = resolved_config.load(sent)
        configs["worker"] = for_worker(environ={resolved_config.VARIABLE: sent})
    return {place: Choice(config.value(option.name), config.origin(option.name)) for place, config in configs.items()}
