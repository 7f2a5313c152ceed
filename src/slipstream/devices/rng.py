"""Random states as plain data: capture, restore, seed and compare them.

A state consists of numbers, lists, dicts and byte tensors, so it is stored as safetensors and JSON without pickle. That of a device
family is `{"current": number, "states": [one per device]}`: the state of the device that a process computes on is restored to the device
that it computes on then. Nothing here talks to other processes: the rank is an argument.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from slipstream.devices.table import CPU, FAMILIES, Family
from slipstream.errors import ConfigError

__all__ = ["capture", "default_kinds", "fingerprint", "restore", "set_seed"]

_LARGEST_SEED = 2**64 - 1
_NUMPY_WORDS = 624
_HOST_KINDS = ("python", "numpy", "torch")


def default_kinds(families: tuple[Family, ...] = FAMILIES) -> tuple[str, ...]:
    """Return the kinds of random state of this process: Python's, numpy's, torch's, and those of devices it has used."""
    used = (family.type for family in families if family is not CPU and family.may_be_used())
    return (*_HOST_KINDS, *used)


def capture(kinds: Iterable[str] | None = None, *, families: tuple[Family, ...] = FAMILIES) -> dict[str, Any]:
    """Return the random states of these kinds ("python", "numpy", "torch", a device type), as plain data.

    >>> state = capture(["python"])
    >>> first = random.random()
    >>> restore(state)
    ()
    >>> random.random() == first
    True
    """
    return {kind: _capture(kind, families) for kind in (default_kinds(families) if kinds is None else kinds)}


def _capture(kind: str, families: tuple[Family, ...]) -> Any:
    if kind == "python":
        version, words, gauss = random.getstate()
        return {"version": version, "words": list(words), "gauss": gauss}
    if kind == "numpy":
        import numpy

        return _plain(numpy.random.get_state(legacy=False))
    if kind == "torch":
        import torch

        return torch.get_rng_state()
    return _device_states(_device_family(kind, families))


def restore(state: Mapping[str, Any], *, families: tuple[Family, ...] = FAMILIES) -> tuple[str, ...]:
    """Restore captured states; return the kinds that this process cannot restore (a device that is not here)."""
    return tuple(kind for kind, value in state.items() if not _restore(kind, value, families))


def _restore(kind: str, value: Any, families: tuple[Family, ...]) -> bool:
    if kind == "python":
        random.setstate((value["version"], tuple(value["words"]), value["gauss"]))
        return True
    if kind == "numpy":
        import numpy

        _check_numpy(value)
        numpy.random.set_state(value)
        return True
    if kind == "torch":
        import torch

        torch.set_rng_state(value)
        return True
    return _restore_devices(_device_family(kind, families), value)


def _check_numpy(state: Any) -> None:
    """Raise for a state with a position outside its words: numpy accepts it, and reads beyond them at the next draw."""
    inner = state.get("state") if isinstance(state, Mapping) else None
    key, position = (inner.get("key"), inner.get("pos")) if isinstance(inner, Mapping) else (None, None)
    is_position = isinstance(position, int) and 0 <= position <= _NUMPY_WORDS
    if not is_position or not isinstance(key, Sized) or len(key) != _NUMPY_WORDS:
        raise ConfigError("this is not a random state of numpy: it needs 624 words and a position among them; pass what capture() gave")


def set_seed(
    seed: int,
    device_specific: bool = False,
    deterministic: bool = False,
    rank: int = 0,
    *,
    families: tuple[Family, ...] = FAMILIES,
) -> int:
    """Seed Python, numpy, torch and every device; return the seed that was used.

    `device_specific` adds the rank, so that processes draw different numbers. `deterministic` makes torch refuse operations
    without a deterministic form; torch names the variable that some device libraries need before they start.

    >>> set_seed(42), set_seed(42, device_specific=True, rank=3)
    (42, 45)
    """
    offset = rank if device_specific else 0
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed + offset <= _LARGEST_SEED:
        raise ConfigError(f"seed {seed!r} (with {offset} added) cannot be used: seeds are whole numbers from 0 to 2**64 - 1; write e.g. 42")
    used = seed + offset
    import numpy
    import torch

    random.seed(used)
    # numpy takes 32 bits as a number and more as a list of them.
    numpy.random.seed(used if used < 2**32 else [used % 2**32, used >> 32])
    torch.manual_seed(used)
    for family in families:
        if family is not CPU and family.plugin is not None and family.is_loaded():  # torch seeds the families it knows itself
            family.ask("manual_seed_all", used)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return used


def fingerprint(kinds: Iterable[str] | None = None, *, families: tuple[Family, ...] = FAMILIES) -> bytes:
    """Return sixteen bytes that are equal exactly if the random states are, to compare processes cheaply.

    >>> fingerprint(["torch"]) == fingerprint(["torch"])
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for kind, value in capture(kinds, families=families).items():
        digest.update(kind.encode() + b"\0")
        for part in _fingerprint_parts(value):
            data = part if isinstance(part, bytes) else part.cpu().numpy().tobytes()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _fingerprint_parts(value: Any) -> list[Any]:
    """Return what has to be equal; of devices the state of the current one alone, because each process computes on another."""
    if not isinstance(value, dict):
        return [value]
    if "states" not in value:
        return [json.dumps(value, sort_keys=True).encode()]
    states, own = value["states"], value["current"]
    return list(states[own : own + 1])


def _device_family(kind: str, families: tuple[Family, ...]) -> Family:
    family = next((row for row in families if row.type == kind and row is not CPU), None)
    if family is None:
        known = ", ".join((*_HOST_KINDS, *(row.type for row in families if row is not CPU)))
        raise ConfigError(f"random state {kind!r} is not one of {known}")
    return family


def _device_states(family: Family) -> dict[str, Any]:
    """Return one state per device that this process sees, and the number of the one that it computes on."""
    if family.has("get_rng_state_all"):
        states = list(family.ask("get_rng_state_all"))
    else:
        numbers = range(family.count() if family.indexed else 1) if family.has("get_rng_state") else ()
        states = [family.ask("get_rng_state", device=number) for number in numbers]
    return {"current": _current_device(family), "states": states}


def _current_device(family: Family) -> int:
    return int(family.ask("current_device", default=0)) if family.indexed else 0


def _restore_devices(family: Family, value: Any) -> bool:
    """Restore states of devices. The state of the device that was computed on goes to the current one, whichever number it has here.

    A list has the states by the numbers of their devices, without telling which one was computed on.
    """
    count = family.count()
    if count == 0 or not family.has("set_rng_state"):
        return False
    if isinstance(value, list):
        if len(value) > count:
            return False
        places = dict(enumerate(value))
    else:
        states, own = _check_device_states(value)
        places = dict(enumerate(states[:count]))
        if states:
            places[_current_device(family)] = states[own]
    for index, state in places.items():
        family.ask("set_rng_state", state, device=index)
    return True


def _check_device_states(value: Any) -> tuple[list[Any], int]:
    states, own = (value.get("states"), value.get("current")) if isinstance(value, Mapping) else (None, None)
    if not isinstance(states, list) or type(own) is not int or (states and not 0 <= own < len(states)):
        raise ConfigError(
            "this is not a random state of devices: it needs a list of states and the number of the current one; pass what capture() gave"
        )
    return states, own


def _plain(value: Any) -> Any:
    """Return numpy's arrays and numbers as lists and numbers of Python."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
