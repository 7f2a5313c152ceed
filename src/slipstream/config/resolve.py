"""Resolve all sources to one configuration: constructor > flags > environment > file > default, with the origin of every value.

`resolve` is for commands: it is given the flags and may read the user's default file. `for_worker` is for scripts: it takes what the
launcher sent, lets variables that are set now override the launcher's file, and lets arguments of the call override everything. Each
source becomes a layer (name to value and origin) and the strongest layer wins. None and an empty variable mean "not given".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slipstream.config import resolved_config
from slipstream.config.names import is_internal, unknown_name
from slipstream.config.option import Kind, Origin, parse
from slipstream.config.resolved_config import Choice, Config, build_config, parse_choices
from slipstream.config.schema import OPTIONS
from slipstream.config.sources import default_file_path, environment, read_file

if TYPE_CHECKING:
    from slipstream.config.files import ConfigFile

__all__ = ["for_worker", "resolve"]

_Layer = Mapping[str, Choice]


def resolve(
    *,
    constructor: Mapping[str, object] | None = None,
    flags: Mapping[str, object] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    default_file: bool = False,
    caller: str = "Accelerator",
) -> Config:
    """Return the configuration that these sources give together.

    `flags` holds what was typed, by option name (as text or as values); `config_file` is the same as a flag of that name.
    Without either the file is the one of SLIPSTREAM_CONFIG_FILE, else, with `default_file`, that of the user if there is one.
    `caller` names the call whose arguments `constructor` holds, for messages.

    >>> config = resolve(flags={"num_processes": 4}, environ={"SLIPSTREAM_NUM_PROCESSES": "2", "SLIPSTREAM_DEBUG": "yes"})
    >>> config.launch.num_processes, config.safety.debug
    (4, True)
    """
    environ = environment() if environ is None else environ
    typed = {**(flags or {}), **({"config_file": os.fspath(config_file)} if config_file is not None else {})}
    flag_layer = parse_choices(typed, "flag", "--{}")
    environment_layer = _environment_layer(environ)
    file = _file(flag_layer, environment_layer, default_file_path(environ) if default_file else None)
    constructor_layer = _constructor_layer(constructor, caller)
    layers = (constructor_layer, flag_layer, environment_layer)
    return build_config(_strongest(*layers)) if file is None else build_config(_strongest(*layers, file.choices), file.unused)


def for_worker(
    constructor: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, *, caller: str = "Accelerator"
) -> Config:
    """Return the configuration inside a script: what the launcher sent, if there was one, and what is set here.

    Never reads the user's default file: that is for commands, and a script started by hand should not depend on it.

    >>> for_worker({"cpu": True}, environ={}).device.cpu
    True
    """
    environ = environment() if environ is None else environ
    text = environ.get(resolved_config.VARIABLE)
    if not text:
        return resolve(constructor=constructor, environ=environ, caller=caller)
    sent = resolved_config.load(text).given()
    return build_config(
        _strongest(
            _constructor_layer(constructor, caller),
            _of_kind(sent, "constructor"),
            _of_kind(sent, "flag"),
            _environment_layer(environ),
            _of_kind(sent, "environment"),
            _of_kind(sent, "file"),
        )
    )


def _constructor_layer(arguments: Mapping[str, object] | None, caller: str) -> _Layer:
    return parse_choices(arguments or {}, "constructor", f"{caller}({{}}=...)")


def _strongest(*layers: _Layer) -> dict[str, Choice]:
    """Merge layers, the first being the strongest."""
    merged: dict[str, Choice] = {}
    for layer in reversed(layers):
        merged.update(layer)
    return merged


def _of_kind(layer: _Layer, kind: Kind) -> _Layer:
    return {name: choice for name, choice in layer.items() if choice.origin.kind == kind}


def _environment_layer(environ: Mapping[str, str]) -> dict[str, Choice]:
    by_variable = {option.variable: option for option in OPTIONS.values() if option.variable}
    layer: dict[str, Choice] = {}
    for option in OPTIONS.values():
        for variable in option.variable_aliases:
            if environ.get(variable):
                origin = Origin("environment", variable)
                layer[option.name] = Choice(parse(option, environ[variable], origin), origin)
    for variable, raw in environ.items():
        if not variable.startswith("SLIPSTREAM_") or is_internal(variable):
            continue
        origin = Origin("environment", variable)
        named = by_variable.get(variable)
        if named is None:
            raise unknown_name(variable, origin)
        if raw != "":
            layer[named.name] = Choice(parse(named, raw, origin), origin)
    return layer


def _file(flags: _Layer, variables: _Layer, default: os.PathLike[str] | None) -> ConfigFile | None:
    chosen = flags.get("config_file") or variables.get("config_file")
    path = str(chosen.value) if chosen else os.fspath(default) if default is not None and os.path.exists(default) else None
    if path is None:
        return None
    from slipstream.config.files import parse_config_file

    return parse_config_file(read_file(path), path)
