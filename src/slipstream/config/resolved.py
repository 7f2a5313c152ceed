"""The resolved configuration: typed sections, and the origin of every value.

A `Config` is made by `resolve`, `for_worker` or `transport.load` and never changes; `replace` gives another one. Making one
checks every option against the others, so a `Config` that exists holds no contradiction that can be known without the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slipstream.config.checks import Choice, contradiction, missing_main_process, said
from slipstream.config.names import unknown_name
from slipstream.config.option import Origin, Value, parse
from slipstream.config.schema import OPTIONS, SECTIONS, Command, Compute, Device, Launch, Safety
from slipstream.errors import ConfigError

__all__ = ["Config", "Unused", "build", "parse_constructor"]


class Unused(NamedTuple):
    """A key of a file of another tool that has no effect here, and why.

    >>> print(Unused("tpu_env", "asks for nothing"))
    tpu_env: asks for nothing
    """

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a run, in sections, with the origin of each value.

    >>> from slipstream.config import resolve
    >>> config = resolve(flags={"num_processes": "2"}, environ={"SLIPSTREAM_TIMEOUT": "60"})
    >>> config.launch.num_processes, config.safety.timeout, config.compute.mixed_precision
    (2, 60.0, 'no')
    >>> print(config.origin("timeout"))
    from SLIPSTREAM_TIMEOUT
    """

    launch: Launch
    device: Device
    compute: Compute
    safety: Safety
    command: Command
    origins: Mapping[str, Origin] = field(repr=False)
    unused: tuple[Unused, ...] = ()
    """Keys of a foreign configuration file that have no effect here, with the reason."""

    def value(self, name: str) -> Value:
        """The value of an option by name, whatever its section."""
        if name not in OPTIONS:
            raise ConfigError(f"There is no option {name!r}.")
        found: Value = getattr(getattr(self, OPTIONS[name].section), name)
        return found

    def origin(self, name: str) -> Origin:
        """Where the value of an option came from."""
        if name not in OPTIONS:
            raise ConfigError(f"There is no option {name!r}.")
        return self.origins[name]

    def said(self, name: str) -> str:
        """An option with its value and origin, for messages: "num_processes=2 (from --num_processes)"."""
        return said(self.choices(), name)

    def choices(self) -> dict[str, Choice]:
        """Every option by name with its value and origin."""
        return {name: Choice(self.value(name), self.origins[name]) for name in OPTIONS}

    def given(self) -> dict[str, Choice]:
        """The options that somebody set, without those that kept their default."""
        return {name: choice for name, choice in self.choices().items() if choice.origin.kind != "default"}

    def replace(self, *, caller: str = "Accelerator", **values: object) -> Config:
        """Another configuration in which `caller(name=value, ...)` has the last word; None changes nothing.

        >>> from slipstream.config import resolve
        >>> config = resolve(environ={}).replace(mixed_precision="bf16")
        >>> config.compute.mixed_precision, str(config.origin("mixed_precision"))
        ('bf16', 'from Accelerator(mixed_precision=...)')
        """
        choices = self.choices()
        choices.update(parse_constructor(values, caller))
        return build(choices, self.unused)

    def require_main_process(self) -> None:
        """Raise when several machines take part and nothing says where they meet; for a launcher that found no cluster."""
        complaint = missing_main_process(self.choices())
        if complaint:
            raise ConfigError(complaint)


def parse_constructor(values: Mapping[str, object], caller: str) -> dict[str, Choice]:
    """The arguments of a call as choices; an argument that is None was not given."""
    found: dict[str, Choice] = {}
    for name, raw in values.items():
        if raw is None:
            continue
        origin = Origin("constructor", f"{caller}({name}=...)")
        if name not in OPTIONS:
            raise unknown_name(name, origin)
        found[name] = Choice(parse(OPTIONS[name], raw, origin), origin)
    return found


def build(choices: Mapping[str, Choice], unused: tuple[Unused, ...] = ()) -> Config:
    """A configuration from the choices that were made; options without one get their default."""
    complete = {name: choices.get(name) or Choice(option.default, Origin("default")) for name, option in OPTIONS.items()}
    complaint = contradiction(complete)
    if complaint:
        raise ConfigError(complaint)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, option in OPTIONS.items():
        values[option.section][name] = complete[name].value
    sections: dict[str, Any] = {section: declared(**values[section]) for section, declared in SECTIONS.items()}
    origins = {name: choice.origin for name, choice in complete.items()}
    return Config(**sections, origins=origins, unused=unused)
