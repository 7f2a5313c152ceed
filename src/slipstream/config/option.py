"""What an option is: one declaration from which flags, file keys, variables, questions, documentation and checks derive.

An `Option` has a name, a type, limits and a help text; `parse` turns text or a value from any source into a checked value and raises
`ConfigError` with the origin otherwise. An `Origin` says where a value came from and is kept with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Final, Literal

from slipstream.errors import ConfigError

__all__ = [
    "Kind", "Option", "Origin", "Value", "declare", "flag_names", "from_field", "negative_flag_names", "option_text", "parse", "shown",
    "spelled",
]

Value = bool | int | float | str | None
Kind = Literal["constructor", "flag", "environment", "file", "default"]

_PREFIX: Final = "SLIPSTREAM_"
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True)
class Origin:
    """Where a value came from; reads well after the value.

    >>> print("num_processes=4", Origin("flag", "--num_processes"))
    num_processes=4 from --num_processes
    >>> print("timeout=1800", Origin("default"))
    timeout=1800 by default
    """

    kind: Kind
    where: str = ""
    """The flag, the variable, "path: key" of a file, or the call with its argument; empty for a default."""

    def __str__(self) -> str:
        return f"from {self.where}" if self.where else "by default"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option; made by `declare` in a section of `schema.py`.

    >>> from slipstream.config import OPTIONS
    >>> OPTIONS["timeout"].variable, OPTIONS["timeout"].default, OPTIONS["cpu"].keys
    ('SLIPSTREAM_TIMEOUT', 1800.0, ('cpu', 'use_cpu'))
    """

    name: str
    section: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    """Like `minimum`, but the bound itself is not allowed."""
    maximum: float | None = None
    check: Callable[[str], str | None] | None = None
    """For text and whole numbers: returns what is wrong with it ("is not ..."), or None; with `choices`, called for words that are
    none of them."""
    usual: Callable[[str], str] | None = None
    """For text: returns its usual spelling, before it is checked; "2" may stand for a word."""
    valued: bool = False
    """A yes-or-no option whose flag takes its value, `--fsdp_offload_params true`, instead of a pair of flags."""
    example: str = ""
    """A value to show in messages; derived from the type if empty."""
    short: str | None = None
    flag_aliases: tuple[str, ...] = ()
    """Further flags that mean this option, such as "dry_run"."""
    file_aliases: tuple[str, ...] = ()
    """Further keys that mean this option in a file (the spelling of related tools)."""
    variable_aliases: tuple[str, ...] = ()
    """Further variables that mean this option; `variable` is stronger than they are."""
    question: str | None = None
    """What the interview asks; None: not asked."""
    asked_when: Callable[[Mapping[str, Value]], bool] | None = None
    """Returns from the answers so far whether the question is relevant; None: always."""
    unset: str = "none"
    """The answer that leaves the option unset in the interview; for options without a default."""
    in_file: bool = True
    """False for an option of one command line only: no file key, and no variable unless `in_environment`."""
    in_environment: bool = True

    @property
    def variable(self) -> str | None:
        """The name of the environment variable, or None."""
        return _PREFIX + self.name.upper() if self.in_environment else None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that name this option in a file; the first is the one we write."""
        return (self.name, *self.file_aliases) if self.in_file else ()

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def has_negative(self) -> bool:
        """Whether there is a flag that says no: a switch that can be in a file needs one to override the file."""
        return self.is_switch and self.in_file and not self.valued

    @property
    def shown_example(self) -> str:
        if self.example:
            return self.example
        if self.is_switch:
            return "true"
        if self.choices:
            return self.choices[-1] if self.default != self.choices[-1] else self.choices[0]
        lowest = self.minimum if self.minimum is not None else 1
        return {int: f"{max(int(lowest), 1)}", float: "60"}.get(self.type, "text")

    @property
    def wanted(self) -> str:
        """The allowed values, as the end of a sentence: "a whole number of at least 1"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.type]
        if self.minimum is not None and self.minimum == self.maximum:
            return f"{self.minimum:g}"
        if self.minimum is not None and self.maximum is not None:
            return f"{noun} from {self.minimum:g} to {self.maximum:g}"
        if self.minimum is not None:
            return f"{noun} of at least {self.minimum:g}"
        if self.above is not None:
            return f"{noun} above {self.above:g}"
        return noun


def declare(default: Value, **details: Any) -> Any:
    """Return a field of a section that is an option; `details` are the further fields of `Option`.

    Typed as Any, like `dataclasses.field`, so that the annotation of the field says the type.
    """
    return field(default=default, metadata={"option": details})


def from_field(name: str, section: str, hint: Any, default: object, details: Mapping[str, Any]) -> Option:
    """Return the option of a declared field; `hint` is its annotation, `T` or `T | None`."""
    members = [member for member in getattr(hint, "__args__", (hint,)) if member is not type(None)]
    if len(members) != 1 or members[0] not in (bool, int, float, str) or default is MISSING:
        raise TypeError(f"option {name}: declare it as bool, int, float or str (or that and None), with a default")
    return Option(name=name, section=section, type=members[0], default=default, **details)  # type: ignore[arg-type]


def flag_names(option: Option) -> list[str]:
    """Return the flags that set an option, in both spellings; for a switch those that say yes.

    >>> from slipstream.config import OPTIONS
    >>> flag_names(OPTIONS["num_processes"])
    ['--num_processes', '--num-processes']
    >>> flag_names(OPTIONS["tee"])
    ['--tee', '-t']
    """
    names = (option.name, *option.flag_aliases)
    return [flag for name in names for flag in _both_spellings("--" + name)] + ([option.short] if option.short else [])


def negative_flag_names(option: Option) -> list[str]:
    """Return the flags that say no, for a switch that can also be set elsewhere; otherwise none.

    >>> from slipstream.config import OPTIONS
    >>> negative_flag_names(OPTIONS["cpu"]), negative_flag_names(OPTIONS["quiet"])
    (['--no_cpu', '--no-cpu'], [])
    """
    return _both_spellings("--no_" + option.name) if option.has_negative else []


def _both_spellings(flag: str) -> list[str]:
    return list(dict.fromkeys([flag, flag.replace("_", "-")]))


def spelled(option: Option, value: object, kind: Kind) -> str:
    """Return how to write a value of an option in one kind of source, for the suggestion of an error."""
    text = option_text(value)
    if kind == "environment" and option.variable:
        return f"{option.variable}={text}"
    if kind == "file" and option.in_file:
        return f"{option.name}: {text}"
    if kind == "constructor":
        return f"{option.name}={text!r}" if option.type is str else f"{option.name}={text.capitalize()}"
    if option.is_switch and not option.valued:
        yes = text in _TRUE
        return (flag_names(option) if yes or not option.has_negative else negative_flag_names(option))[0]
    return f"--{option.name} {text}"


def option_text(value: object) -> str:
    """Return a value as a person writes it in a flag, a file or a variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(text: str) -> str:
    """Return a text in a form that fits on one line of a message.

    >>> shown("2"), shown("two\\nlines")
    ('2', "'two\\\\nlines'")
    """
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= 80 else line[:77] + "..."


def parse(option: Option, raw: object, origin: Origin) -> Value:
    """Return the value of `raw`; raise a ConfigError that says what was given, where, why it is wrong, and what to write.

    >>> from slipstream.config import OPTIONS
    >>> parse(OPTIONS["num_processes"], "4", Origin("flag", "--num_processes"))
    4
    """
    try:
        return _within(option, _READERS[option.type](option, raw))
    except _InvalidValue as invalid:
        given = shown(option_text(raw) if isinstance(raw, (str, int, float)) else repr(raw))
        suggestion = spelled(option, option.shown_example, origin.kind)
        hint = f"Write {option.wanted}, for example: {suggestion}"
        raise ConfigError(f"{option.name}={given} ({origin}) {invalid}.\n{hint}") from None


class _InvalidValue(Exception):
    """Why a text is not a value of an option, as the end of a sentence that starts with the value."""


def _read_bool(option: Option, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if isinstance(raw, (str, int)) and word in _TRUE | _FALSE:
        return word in _TRUE
    raise _InvalidValue("is neither yes nor no")


def _read_int(option: Option, raw: object) -> int:
    if isinstance(raw, str):
        text = raw.strip()
        if text.lstrip("+-").isascii() and text.lstrip("+-").isdigit() and len(text) < 20:
            return int(text)
        raise _InvalidValue("is not a whole number")
    if isinstance(raw, bool):
        raise _InvalidValue("is not a whole number")
    try:
        return operator.index(raw)  # type: ignore[arg-type]
    except TypeError:
        raise _InvalidValue("is not a whole number") from None


def _read_float(option: Option, raw: object) -> float:
    if isinstance(raw, bool) or not (isinstance(raw, str) or hasattr(raw, "__float__")):
        raise _InvalidValue("is not a number")
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        raise _InvalidValue("is not a number") from None
    if not math.isfinite(number):
        raise _InvalidValue("is not a finite number")
    return number


def _read_str(option: Option, raw: object) -> str:
    if option.usual is not None and isinstance(raw, (bool, int, str)):
        raw = option.usual(option_text(raw).strip())
    if isinstance(raw, bool) and option.choices:
        raw = "yes" if raw else "no"  # YAML reads a bare `no` as false; for a choice named "no" it was meant as the word
    if isinstance(raw, bool) or not isinstance(raw, (str, int)):
        raise _InvalidValue("is not text")
    text = str(raw)
    if "\0" in text or "\n" in text:
        raise _InvalidValue("holds a line break or a NUL character")
    if not option.choices:
        return text
    for choice in option.choices:
        if choice.lower() == text.strip().lower():
            return choice
    raise _InvalidValue((option.check(text) if option.check else None) or "is not one of the choices")


def _within(option: Option, value: bool | int | float | str) -> Value:
    complaint = option.check(str(value)) if option.check else None
    if complaint:
        raise _InvalidValue(complaint)
    if isinstance(value, str):
        return value
    if option.minimum is not None and value < option.minimum:
        raise _InvalidValue(f"is less than {option.minimum:g}")
    if option.above is not None and value <= option.above:
        raise _InvalidValue(f"is not above {option.above:g}")
    if option.maximum is not None and value > option.maximum:
        raise _InvalidValue(f"is more than {option.maximum:g}")
    return value


_READERS: Final[Mapping[type, Callable[[Option, object], bool | int | float | str]]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
}
