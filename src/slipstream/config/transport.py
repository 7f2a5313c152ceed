"""The resolved configuration on its way from the launcher to the workers: one variable with JSON in it.

Only what somebody set travels, with its origin, so that a worker knows as much as the launcher did and can apply the order of
precedence again. What belongs to one command line stays behind. The format has a version; a newer one is refused, not guessed.
"""

from __future__ import annotations

import json
from typing import Any, Final, get_args

from slipstream.config.checks import Choice
from slipstream.config.option import Kind, Origin, parse
from slipstream.config.resolved import Config, build
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = ["VARIABLE", "VERSION", "dump", "load"]

VARIABLE: Final = "SLIPSTREAM_CONFIG"
VERSION: Final = 1


def dump(config: Config) -> str:
    """The text for the variable.

    >>> from slipstream.config import resolve
    >>> dump(resolve(flags={"cpu": True}, environ={}))
    '{"version":1,"options":{"cpu":[true,"flag","--cpu"]}}'
    """
    options = {
        name: [choice.value, choice.origin.kind, choice.origin.where] for name, choice in config.given().items() if OPTIONS[name].in_file
    }
    return json.dumps({"version": VERSION, "options": options}, separators=(",", ":"))


def load(text: str) -> Config:
    """The configuration in a text that `dump` made."""
    try:
        data: Any = json.loads(text)
        version = data["version"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(version)
        if version <= VERSION:
            return build({name: _choice(name, *entry) for name, entry in data["options"].items()})
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"The variable {VARIABLE} does not hold what `slipstream launch` writes there.\n"
            "It is not meant to be set by hand: unset it, and use flags, a file or the other SLIPSTREAM_ variables."
        ) from None
    raise ConfigError(
        f"The variable {VARIABLE} has version {version}; this Slipstream understands versions up to {VERSION}.\n"
        "The launcher and the script use different versions: install the same one for both."
    )


def _choice(name: str, value: object, kind: Kind, where: str) -> Choice:
    if name not in OPTIONS or kind not in get_args(Kind) or not isinstance(where, str):
        raise KeyError(name)
    origin = Origin(kind, where)
    return Choice(parse(OPTIONS[name], value, origin) if value is not None else None, origin)
