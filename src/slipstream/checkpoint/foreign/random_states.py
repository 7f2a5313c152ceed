"""The random states in a checkpoint of Accelerate, as `slipstream.devices.rng` keeps them.

Each is checked before it is handed on, because a generator is set only after all else was restored: a state that it would refuse
has to be found before. States of devices that are not known here are left out, and said.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from slipstream.devices.table import CPU, FAMILIES
from slipstream.errors import CheckpointError

__all__ = ["RandomStates", "read_random_states"]

_WORDS = 624
_LARGEST_STATE = 2**20
_OF_DEVICES = re.compile(r"torch_([a-z]+)_manual_seed", re.ASCII)


@dataclass(frozen=True)
class RandomStates:
    """Of one process."""

    states: dict[str, Any]
    step: int


def read_random_states(value: Any, where: str, said: list[str]) -> RandomStates:
    """The states in what a random_states file holds; `said` is told what was left out.

    >>> read_random_states({"step": 3, "random_state": None}, "random_states_0.pkl", [])
    Traceback (most recent call last):
    slipstream.errors.CheckpointError: random_states_0.pkl: its random_state is not what Python's generator has
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} cannot be used: it is not a mapping")
    states: dict[str, Any] = {}
    for name, state in value.items():
        kind = _OF_DEVICES.fullmatch(name) if isinstance(name, str) else None
        if name == "random_state":
            states["python"] = _of_python(state, where)
        elif name == "numpy_random_seed":
            states["numpy"] = _of_numpy(state, where)
        elif name == "torch_manual_seed":
            states["torch"] = _of_host(state, where)
        elif kind and any(family.type == kind[1] and family is not CPU for family in FAMILIES):
            states[kind[1]] = [_of_torch(one, where) for one in (state if isinstance(state, (list, tuple)) else [state])]
        elif name != "step":
            said.append(f"{where} has a random state {name!r:.80}, for which there is no place here; it was left out")
    step = value.get("step", 0)
    if type(step) is not int or not 0 <= step < 2**60:
        raise CheckpointError(f"{where}: its step {step!r:.80} is no count")
    return RandomStates(states, step)


def _of_python(state: Any, where: str) -> dict[str, Any]:
    match state:
        case (3, tuple() as words, None | float() as gauss) if all(type(word) is int and 0 <= word < 2**32 for word in words):
            _try(random.Random().setstate, state, f"{where}: its random_state")
            return {"version": 3, "words": list(words), "gauss": gauss}
    raise CheckpointError(f"{where}: its random_state is not what Python's generator has")


def _of_numpy(state: Any, where: str) -> dict[str, Any]:
    match state:
        case ("MT19937", numpy.ndarray() as key, int() as position, 0 | 1 as has_gauss, float() as gauss) if key.dtype == numpy.uint32:
            if key.shape != (_WORDS,) or not 0 <= position <= _WORDS:  # numpy does not look, and would read behind the end
                raise CheckpointError(f"{where}: its numpy_random_seed has {key.size} words, and stands at {position}; {_WORDS} are right")
            words = {"key": key.tolist(), "pos": position}
            plain = {"bit_generator": "MT19937", "state": words, "has_gauss": has_gauss, "gauss": gauss}
            _try(numpy.random.RandomState().set_state, plain, f"{where}: its numpy_random_seed")
            return plain
    raise CheckpointError(f"{where}: its numpy_random_seed is not what numpy's generator has")


def _of_torch(state: Any, where: str) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.dim() != 1 or not 0 < state.numel() <= _LARGEST_STATE:
        raise CheckpointError(f"{where}: one of its random states of torch is not a row of bytes")
    return state.clone()


def _of_host(state: Any, where: str) -> torch.Tensor:
    tensor = _of_torch(state, where)
    _try(torch.Generator().set_state, tensor, f"{where}: its torch_manual_seed")
    return tensor


def _try(set_state: Callable[[Any], Any], state: Any, what: str) -> None:
    """Sets a generator that nobody uses."""
    try:
        set_state(state)
    except (TypeError, ValueError, RuntimeError, OverflowError, IndexError) as problem:
        raise CheckpointError(f"{what} is refused by the generator: {problem!s:.200}") from None
