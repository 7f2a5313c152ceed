"""Random numbers of a reader's own, for data that draws from the states of the process.

A stream may shuffle or augment with Python's, numpy's or torch's global random numbers. Ranks that read the same stream have to see the
same items, and the script's own random state should not depend on what was read. So a reader enters an `OwnRandom` while
it reads: inside, the three states are its own, carried on from one block of items to the next; outside, the script's are as they were.

Entering costs some 50 us, nearly all of it for numbers that most streams do not draw. Where nothing else depends on it, a
reader asks `used` after the first block and goes on without. Devices are not touched.

Between blocks the states can be taken (`capture`, quick), spelled as plain data (`spelled`) and put back (`resume`), so that a reader
that goes on later draws what it would have drawn.
"""

from __future__ import annotations

import copy
import random
from hashlib import blake2b
from typing import Any

import numpy
import torch
from numpy.random import mtrand

from slipstream.errors import ConfigError

__all__ = ["Captured", "OwnRandom", "digest_of", "reseed", "spelled", "unspelled"]

Captured = tuple[Any, "tuple[int, bytes]", bytes]
"""The states of Python, numpy and torch between two blocks."""


class OwnRandom:
    """While it is entered, the random states of the process are those of this object.

    Without a seed the first block begins with the states that it finds (those of a loader's worker, which torch has seeded).

    >>> own, before = OwnRandom(7), random.getstate()
    >>> with own:
    ...     first = random.random()
    >>> random.getstate() == before, own.used
    (True, True)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.used = False
        """Whether any random number was drawn inside so far."""
        self._python: Any = None
        self._numpy: Any = None
        self._torch: Any = None
        if seed is not None:
            self._python = random.Random(seed).getstate()
            self._numpy = numpy.random.MT19937(seed)
            self._torch = torch.Generator().manual_seed(seed).get_state()
        self._theirs: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def capture(self) -> Captured:
        """The states as they are between two blocks; what is taken does not change any more."""
        return self._python, _mark(self._numpy), self._torch.numpy().tobytes()

    def resume(self, captured: Captured) -> None:
        """The next block draws from these states."""
        self._python, (position, key), state = captured
        self._torch = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self._numpy = numpy.random.MT19937()
        self._numpy.state = {"bit_generator": "MT19937", "state": {"key": numpy.frombuffer(key, numpy.uint32), "pos": position}}
        self.used = True

    def __enter__(self) -> None:
        generator = mtrand.get_bit_generator()
        # Exchanging numpy's generator as a whole is quick, but forgets a number that randn keeps for its next call.
        held = numpy.random.get_state(legacy=False)
        self._theirs = random.getstate(), generator, held if held["has_gauss"] else None, torch.get_rng_state()
        if self._python is None:
            self._python, self._numpy, self._torch = self._theirs[0], copy.deepcopy(generator), self._theirs[3]
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        torch.set_rng_state(self._torch)
        self._drawn = None if self.used else _mark(self._numpy)

    def __exit__(self, *details: object) -> None:
        python, generator, held, tensor = self._theirs
        now, state = random.getstate(), torch.get_rng_state()
        if not self.used:
            self.used = now != self._python or not torch.equal(state, self._torch) or _mark(self._numpy) != self._drawn
        self._python, self._torch = now, state
        random.setstate(python)
        mtrand.set_bit_generator(generator)
        if held is not None:
            numpy.random.set_state(held)
        torch.set_rng_state(tensor)


def _mark(generator: Any) -> tuple[int, bytes]:
    """Equal as long as nothing was drawn."""
    state = generator.state["state"]
    return int(state["pos"]), state["key"].tobytes()


def spelled(captured: Captured) -> dict[str, Any]:
    """Captured states as plain data.

    >>> own = OwnRandom(7)
    >>> unspelled(spelled(own.capture()))[1] == own.capture()[1]
    True
    """
    (version, words, gauss), (position, key), state = captured
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {"pos": position, "key": numpy.frombuffer(key, numpy.uint32).tolist()},
        "torch": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }


def unspelled(plain: Any) -> Captured:
    """What `spelled` was given; plain data that cannot be that is a `ConfigError`."""
    try:
        python, theirs, state = plain["python"], plain["numpy"], plain["torch"]
        captured = (
            (python["version"], tuple(python["words"]), python["gauss"]),
            (int(theirs["pos"]), _bytes(theirs["key"])),
            state.numpy().tobytes(),
        )
        OwnRandom(0).resume(captured)
        random.Random().setstate(captured[0])
        torch.Generator().set_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, IndexError, AttributeError) as error:
        raise ConfigError(f"the random state of a stream that was saved cannot be read ({error!r})") from None
    return captured


def _bytes(key: Any) -> bytes:
    words = numpy.asarray(key, numpy.uint32)
    if words.shape != (624,):
        raise ValueError(f"numpy's state has {words.shape} words")
    return words.tobytes()


def digest_of(captured: Captured) -> str:
    """A short text that is equal for equal states."""
    python, (position, key), state = captured
    return blake2b(repr((python, position)).encode() + key + state, digest_size=16).hexdigest()


def reseed(seed: int) -> None:
    """Seeds the random states of this process, for what a worker draws for one batch: quick, and devices are not touched."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
