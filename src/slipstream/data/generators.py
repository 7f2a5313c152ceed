"""States of random generators as plain data: of Python's, numpy's and torch's kinds, wherever an object of the user keeps one.

A state is made of numbers, lists, dicts and byte tensors, so it can be stored without pickle. Putting one back changes the generator in
place, as others may hold it too. Nothing here draws a number.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from slipstream.errors import ConfigError

__all__ = ["check_generator_state", "generator_state", "is_generator", "set_generator_state"]

_KINDS: dict[str, tuple[type, ...]] = {
    "python": (random.Random,),
    "torch": (torch.Generator,),
    "numpy": (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator),
}


def is_generator(value: Any) -> bool:
    """Whether this is a random generator whose state can be kept; one of the system (`random.SystemRandom`) has none.

    >>> is_generator(random.Random(1)), is_generator(random.SystemRandom()), is_generator(3)
    (True, False, False)
    """
    return _kind(value) is not None


def _kind(value: Any) -> str | None:
    if isinstance(value, random.SystemRandom):
        return None
    return next((kind for kind, types in _KINDS.items() if isinstance(value, types)), None)


def generator_state(generator: Any) -> dict[str, Any]:
    """The state of a generator, and of which kind it is.

    >>> generator = numpy.random.default_rng(3)
    >>> state = generator_state(generator)
    >>> first = generator.random()
    >>> set_generator_state(generator, state)
    >>> generator.random() == first
    True
    """
    kind = _kind(generator)
    if kind == "python":
        version, words, gauss = generator.getstate()
        return {"kind": kind, "version": version, "words": list(words), "gauss": gauss}
    if kind == "torch":
        return {"kind": kind, "state": generator.get_state()}
    if isinstance(generator, numpy.random.RandomState):
        return {"kind": "numpy", "state": _plain(generator.get_state(legacy=False))}
    bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
    return {"kind": "numpy", "state": _plain(bits.state)}


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Puts a state back; one of another kind, or that the generator does not take, is a `ConfigError`."""
    kind = _kind(generator)
    if not isinstance(state, Mapping) or kind is None or state.get("kind") != kind:
        found = state.get("kind") if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(f"the state of a random generator is of kind {found!r}, and the {type(generator).__name__} here is of {kind!r}")
    try:
        if kind == "python":
            generator.setstate((state["version"], tuple(state["words"]), state["gauss"]))
        elif kind == "torch" or isinstance(generator, numpy.random.RandomState):
            generator.set_state(state["state"])
        else:
            bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
            bits.state = state["state"]
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, IndexError) as error:
        raise ConfigError(f"the state of a {type(generator).__name__} cannot be put back ({error}): it was saved of another one") from None


def check_generator_state(generator: Any, state: Any) -> None:
    """Raises unless the generator takes this state; it stays as it is."""
    kind = _kind(generator)
    alike: Any = generator
    if kind == "python":
        alike = random.Random()
    elif kind == "torch":
        alike = torch.Generator(generator.device)
    elif isinstance(generator, numpy.random.RandomState):
        alike = numpy.random.RandomState()
    elif kind == "numpy":
        bits = generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
        alike = type(bits)()
    set_generator_state(alike, state)


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers as lists and numbers of Python."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
