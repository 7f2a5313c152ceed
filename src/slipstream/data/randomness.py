"""Random numbers of a reader's own, for data that draws from the states of the process.

A stream may shuffle or augment with Python's, numpy's or torch's global random numbers. Ranks that read the same stream have to see the
same items, and the script's own random state should not depend on what was read. So a reader enters an `OwnRandom` while
it reads: inside, the three states are its own, carried on from one block of items to the next; outside, the script's are as they were.

Entering costs some 50 us, nearly all of it for numbers that most streams do not draw. Where nothing else depends on it, a
reader asks `used` after the first block and goes on without. Devices are not touched.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch
from numpy.random import mtrand

__all__ = ["OwnRandom"]


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
