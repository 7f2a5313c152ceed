"""JSON with one meaning: `parse` refuses what two readers could understand differently, `dump` and `dump_lines` write nothing else.

Refused are equal keys in one object, NaN and Infinity (and numbers that overflow to them), halves of surrogate pairs, numbers of
thousands of digits, text that is not UTF-8, and nesting or size beyond a limit. Every refusal is a `CheckpointError` that names the file.
The result consists of dict, list, str, int, float, bool and None.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from slipstream.errors import CheckpointError

__all__ = ["DEEPEST", "LARGEST", "LARGEST_MEMORY", "dump", "dump_lines", "parse", "explain_too_large"]

LARGEST: Final = 64 << 20
"""Most bytes of a text."""
DEEPEST: Final = 100
"""Most levels of lists and objects inside of each other."""
LARGEST_MEMORY: Final = 56 << 20
"""Memory for the values of a text that is not counted: see `explain_too_large`."""

_COSTS: Final = (("{", 160), ("[", 160), (":", 240), (",", 64))
"""Bytes of memory that come with a character, at most, in all the forms that the values go through."""
_USUAL: Final = 11
"""Bytes of memory for each byte of an ordinary text; one that was made to exhaust the memory takes fifty and more."""
_HIGHEST_COST: Final = 8 + max(cost for _, cost in _COSTS)
"""Most bytes of memory that one character can cost: a text that is short enough needs no counting."""
_LONG: Final = 1 << 20
_LONGEST_NUMBER: Final = 4300
_CONTAINERS: Final = frozenset({dict, list})
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def parse(
    data: bytes | bytearray | memoryview | str, where: str, *, largest: int = LARGEST, deepest: int = DEEPEST, beside: int = 0
) -> Any:
    """Return the value of this text; `where` names the text in errors.

    `beside`: bytes in the file that it is the header of, whose tensors take memory too. See `explain_too_large`.

    >>> parse(b'{"step": 3}', "MANIFEST.json")
    {'step': 3}
    >>> parse(b'{"step": 3, "step": 4}', "MANIFEST.json")
    Traceback (most recent call last):
        ...
    slipstream.errors.CheckpointError: MANIFEST.json is not JSON that can be trusted: the key 'step' occurs twice in one object.
    """
    if len(data) > largest:
        raise _refusal(where, f"it has {len(data):,} bytes, more than {largest:,}")
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")
        if why := explain_too_large(text, beside=beside):
            raise _refusal(where, why)
        if text.startswith("\ufeff"):
            raise _refusal(where, "it begins with a byte order mark (BOM)")
        value = _decoder().decode(text)
    except RecursionError:
        raise _refusal(where, f"it is nested deeper than {deepest} levels") from None
    except UnicodeDecodeError as error:
        raise _refusal(where, f"byte {error.start:,} is not UTF-8") from None
    except ValueError as error:  # of the parser itself and of the functions below
        raise _refusal(where, str(error)) from None
    if text.count("[") + text.count("{") > deepest:
        _check_depth(value, where, deepest)
    if _SURROGATE.search(text):
        _check_texts(value, where)
    return value


def explain_too_large(text: str, *, beside: int = 0) -> str | None:
    """Return why a text is more than `parse` accepts; None if it is not. Writers call this before they write a text.

    A few bytes of JSON become tens of bytes of Python, so a limit of the size is not enough. The memory of the values is estimated by
    counting characters; beyond the first `LARGEST_MEMORY` bytes it has to be proportional to the text and to the file around it.

    >>> explain_too_large('{"step": 3}')
    >>> explain_too_large("[" + "{}," * 1_000_000 + "{}]")
    'its values would take up to 227,000,324 bytes of memory, more than 91,720,300'
    """
    if len(text) * _HIGHEST_COST <= LARGEST_MEMORY:
        return None
    if len(text) > LARGEST + beside:
        return f"it has {len(text):,} bytes, more than {LARGEST + beside:,}"
    characters = (1 if text.isascii() else 8) * len(text)  # a text with one character beyond Latin takes four bytes for each
    values, usual = sum(cost * text.count(mark) for mark, cost in _COSTS), _USUAL * len(text)
    if characters + max(0, values - usual) <= LARGEST_MEMORY + beside:
        return None
    return (
        f"its values would take up to {characters + values:,} bytes of memory, more than {LARGEST_MEMORY + beside + min(values, usual):,}"
    )


def dump(value: Any) -> bytes:
    """Return the text of a value, in UTF-8, keys in their order; values that JSON does not support raise a `CheckpointError`.

    >>> dump({"name": "zwölf", "value": 12})
    b'{"name":"zw\\xc3\\xb6lf","value":12}'
    """
    return _encoded(lambda encoder: encoder.encode(value), spaces=False)


def dump_lines(value: Mapping[str, Any]) -> bytes:
    """Return the text of a mapping for people: a line for each entry, and for each entry of a mapping in it.

    >>> print(dump_lines({"step": 3, "files": {"notes.txt": {"size": 5}, "weights": {"size": 9}}}).decode())
    {
     "step": 3,
     "files": {
      "notes.txt": {"size": 5},
      "weights": {"size": 9}
     }
    }
    """

    def lines(encoder: json.JSONEncoder, entries: Mapping[Any, Any], deeper: int) -> str:
        """Return the entries, each encoded by itself: with indentation, Python would encode all of them ten times slower."""
        texts = (
            f"{encoder.encode(key)}: {lines(encoder, entry, deeper - 1)}"
            if deeper and entry and isinstance(entry, dict)
            else encoder.encode({key: entry})[1:-1]
            for key, entry in entries.items()
        )
        margin = "\n" + " " * (2 - deeper)
        return f"{{{margin}{f',{margin}'.join(texts)}{margin[:-1]}}}"

    return _encoded(lambda encoder: lines(encoder, value, 1), spaces=True)


def _encoded(encode: Callable[[json.JSONEncoder], str], *, spaces: bool) -> bytes:
    try:
        data = encode(_encoder(False, spaces)).encode("utf-8")
        if len(data) > _LONG and not data.isascii():  # escaped: while it is read, every character takes one byte and not four
            data = encode(_encoder(True, spaces)).encode("ascii")
        return data
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"This value cannot be written as JSON: {error}.") from None


@cache
def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_decimal)


@cache
def _encoder(escaped: bool, spaces: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=escaped, allow_nan=False, separators=(", ", ": ") if spaces else (",", ":"))


def _refusal(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} is not JSON that can be trusted: {why}.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return found


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _integer(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} digits, more than {_LONGEST_NUMBER:,}")
    return int(text)


def _decimal(text: str) -> float:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} digits, more than {_LONGEST_NUMBER:,}")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _check_depth(value: Any, where: str, deepest: int) -> None:
    """Raise if values are nested too deep; without recursion, as the tree may be deep."""
    level, depth = [value] if isinstance(value, (dict, list)) else [], 0
    while level:
        depth += 1
        if depth > deepest:
            raise _refusal(where, f"it is nested deeper than {deepest} levels")
        level = [inner for entry in level for inner in (entry.values() if type(entry) is dict else entry) if type(inner) in _CONTAINERS]


def _check_texts(value: Any, where: str) -> None:
    """Raise for texts that cannot be encoded as UTF-8."""
    level = [value]
    while level:
        level = [inner for entry in level for inner in _iterate_texts(entry, where)]


def _iterate_texts(value: Any, where: str) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _refusal(where, f"the text {value[:40]!r} has half of a surrogate pair in it") from None
