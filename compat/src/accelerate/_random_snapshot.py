"""Random states around a pass over a loader: what the order was drawn from, so that a resumed run draws the same one.

Accelerate draws orders from the random states of the process and of generators. A loader takes a snapshot where a pass begins. To go on in
the middle of that pass, the snapshot is put back, the order is drawn again and skipped as far as needed, and then the states are again
what they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from slipstream.data.random_state import check_generator_state, generator_state, set_generator_state
from slipstream.errors import ConfigError

__all__ = ["Snapshot", "check_snapshot", "decode_snapshot", "encode_snapshot", "kept_random_states", "put_back", "take_snapshot"]

Snapshot = tuple[Any, Any, torch.Tensor, "list[torch.Tensor | None]"]
"""The states of Python, numpy and torch, and of the generators of a loader: None for one that it does not have."""


def take_snapshot(generators: Sequence[torch.Generator | None] = ()) -> Snapshot:
    """Return the random states as they are."""
    own = [None if generator is None else generator.get_state() for generator in generators]
    return random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state(), own


def put_back(snapshot: Snapshot, generators: Sequence[torch.Generator | None] = ()) -> None:
    """Set the random states to those of a snapshot."""
    python, theirs, state, own = snapshot
    random.setstate(python)
    numpy.random.set_state(theirs)
    torch.set_rng_state(state)
    for generator, saved in zip(generators, own, strict=False):
        if generator is not None and saved is not None:
            generator.set_state(saved)


def same_states(first: Snapshot, second: Snapshot) -> bool:
    """Return whether nothing was drawn from the states of the process between two snapshots."""
    return (
        torch.equal(first[2], second[2])
        and first[1]["state"]["pos"] == second[1]["state"]["pos"]
        and first[0] == second[0]
        and bool((first[1]["state"]["key"] == second[1]["state"]["key"]).all())
    )


@contextmanager
def kept_random_states() -> Iterator[None]:
    """A block that leaves the random states of the process as they were."""
    present = take_snapshot()
    try:
        yield
    finally:
        put_back(present)


def encode_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as plain data.

    >>> snapshot = take_snapshot([torch.Generator().manual_seed(3)])
    >>> again = decode_snapshot(encode_snapshot(snapshot))
    >>> same_states(again, snapshot), torch.equal(again[3][0], snapshot[3][0])
    (True, True)
    """
    (version, words, gauss), theirs, state, own = snapshot
    box = numpy.random.RandomState()
    box.set_state(theirs)
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": generator_state(box)["state"],
        "torch": state,
        "generators": list(own),
    }


def decode_snapshot(plain: Mapping[str, Any]) -> Snapshot:
    """Return what `encode_snapshot` was given."""
    python, theirs = plain["python"], plain["numpy"]
    box = numpy.random.RandomState()
    set_generator_state(box, {"kind": "numpy", "state": theirs})
    words = python["version"], tuple(python["words"]), python["gauss"]
    return words, box.get_state(legacy=False), plain["torch"], list(plain["generators"])


def check_snapshot(plain: Any) -> None:
    """Raise a `ConfigError` unless this is plain data of a snapshot."""
    try:
        snapshot = decode_snapshot(plain)
        random.Random().setstate(snapshot[0])
        for state in (snapshot[2], *(state for state in snapshot[3] if state is not None)):
            check_generator_state(torch.Generator(), {"kind": "torch", "state": state})
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"the random states in the saved position of a loader cannot be read ({error!r})") from None
