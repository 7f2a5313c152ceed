"""What is logged, sorted by what a tracker can do with it: numbers, texts, and the rest.

Nested dicts become names that are joined by slashes, tensors and arrays of one element become numbers. What a tracker has no place for
is refused by `refuse`, after the rest was kept: with its name, the tracker, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from slipstream.track.plain import flat, number

__all__ = ["NotANumber", "NotKept", "Sorted", "kind_of", "refuse", "sort_values"]

_SHOWN = 5
"""Names that one message has room for."""


class NotKept(TypeError):
    """Pictures or tables that could not be kept, and why, by their names; the others of the call were kept."""

    def __init__(self, what: str, wrong: Mapping[str, str]) -> None:
        self.what, self.wrong = what, dict(wrong)
        super().__init__(self.text(self.wrong))

    def text(self, names: Iterable[str]) -> str:
        """The message about some of them.

        >>> NotKept("picture", {"a": "it is a text", "b": "it is None"}).text(["a", "b"])
        'the pictures a and b are left out: it is a text; it is None'
        """
        some = list(names)
        reasons = "; ".join(dict.fromkeys(self.wrong[name] for name in some[:_SHOWN]))
        return f"the {self.what}{'s' if len(some) > 1 else ''} {_listed(some)} {'are' if len(some) > 1 else 'is'} left out: {reasons}"


class NotANumber(NotKept):
    """Values that a tracker cannot draw, and what they are, by their names; the other values of the call were kept."""

    def __init__(self, tracker: str, wrong: Mapping[str, str], keeps: str) -> None:
        self.tracker, self.keeps = tracker, keeps
        super().__init__("value", wrong)

    def text(self, names: Iterable[str]) -> str:
        """The message about some of them."""
        some = list(names)
        named = _listed([f"{name} is {self.wrong[name]}" for name in some])
        of_it = "each" if len(some) > 1 else "it"
        return (
            f"{named}, and the tracker {self.tracker} keeps {self.keeps}: log a number of {of_it} (its mean, say), pictures with "
            f"log_images, rows with log_table, or what else {self.tracker} can do through get_tracker({self.tracker!r}, unwrap=True)"
        )


def _listed(names: list[str]) -> str:
    """Names as one says them.

    >>> _listed(["a"]), _listed(["a", "b", "c"]), _listed(list("abcdefgh"))
    ('a', 'a, b and c', 'a, b, c, d, e and 3 more')
    """
    shown = names if len(names) <= _SHOWN else [*names[:_SHOWN], f"{len(names) - _SHOWN} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


@dataclass(frozen=True)
class Sorted:
    """The values of one call by kind."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def sort_values(values: Mapping[str, Any]) -> Sorted:
    """The values of one call, sorted.

    >>> sort_values({"loss": 0.5, "eval": {"accuracy": 1, "note": "good"}, "weights": [1, 2]})
    Sorted(numbers={'loss': 0.5, 'eval/accuracy': 1}, texts={'eval/note': 'good'}, others={'weights': [1, 2]})
    """
    found = Sorted()
    for name, given in flat(values).items():
        value = _number(given)
        if isinstance(value, bool):
            found.numbers[name] = int(value)
        elif isinstance(value, int | float):
            found.numbers[name] = value
        elif isinstance(value, Real):
            found.numbers[name] = float(value)
        elif isinstance(value, str):
            found.texts[name] = value
        else:
            found.others[name] = given
    return found


def _number(value: Any) -> Any:
    try:
        return number(value)
    except (RuntimeError, TypeError, ValueError):  # one element without data, as on the meta device
        return value


def refuse(tracker: str, others: Mapping[str, Any], keeps: str = "numbers and texts") -> None:
    """An error for values that a tracker has no place for; nothing where there are none.

    >>> refuse("local", {})
    >>> refuse("local", {"weights": [1, 2]})
    Traceback (most recent call last):
        ...
    slipstream.track.values.NotANumber: weights is a list, and the tracker local keeps numbers and texts: log a number of it (its mean, ...
    """
    if others:
        raise NotANumber(tracker, {name: kind_of(value) for name, value in others.items()}, keeps)


def kind_of(value: Any) -> str:
    """What a value is, in a word or two.

    >>> import torch
    >>> kind_of(torch.zeros(3)), kind_of(None), kind_of([1]), kind_of(1)
    ('a Tensor of (3,)', 'None', 'a list', 'an int')
    """
    if value is None:
        return "None"
    name, shape = type(value).__name__, getattr(value, "shape", None)
    article = "an" if name[0].lower() in "aeio" else "a"
    return f"{article} {name} of {tuple(shape)}" if isinstance(shape, tuple) else f"{article} {name}"
