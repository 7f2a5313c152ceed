"""In which order items are handed out, and how many at a time: pure, the same on every process.

* Without costs the items come in the order of the input. With costs (`key=len`) the most expensive come first, because a long item
  that is begun last is what everybody waits for; and neighbours in that order cost nearly the same, so a batch of them needs little
  padding. Equal costs keep the order of the input.
* A **unit** is what is handed out at once to the user's code: one item, or a batch. Units are cut from the order, all of the same size
  but one: the last, or with costs the one whose shortness saves the most padding (`thriftiest_cut`).
* A **claim** is how many units a process takes in one request. `Pace` makes it worth about ten milliseconds of work, fifty times what
  a request takes, or one percent of the time that has passed, whatever is most; so requests cost little where items are tiny, and
  claims are single units where they are not. It is never more than its share of half of what is left, so that claims shrink to single
  units towards the end.

What this never does: read an item, look at a clock, or talk to another process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["Pace", "Units", "checked_cost", "most_expensive_first", "thriftiest_cut"]


def checked_cost(value: Any, position: int) -> float:
    """The number that `key` gave for an item; an error that names the item where it is none.

    >>> checked_cost(3, 0)
    3.0
    """
    try:
        cost = float(value)
    except (TypeError, ValueError):
        cost = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(cost):
        raise ConfigError(
            f"key gave {value!r} for item {position}, which is no finite number: a key says what an item costs, for example "
            "key=len, or key=lambda row: len(row['text'])"
        )
    return cost


def most_expensive_first(costs: Sequence[float]) -> list[int]:
    """The positions by falling cost; equal ones as they come.

    >>> most_expensive_first([1.0, 5.0, 5.0, 2.0])
    [1, 2, 3, 0]
    """
    return sorted(range(len(costs)), key=lambda position: -costs[position])


def thriftiest_cut(costs: Sequence[float], size: int) -> int:
    """Which unit should be the short one, where these costs (falling) are cut into units of `size` that are padded to their first.

    >>> thriftiest_cut([9.0, 5.0, 5.0], 2), thriftiest_cut([2.0, 2.0, 1.0, 1.0], 3)
    (0, 1)
    """
    count, missing = -(-len(costs) // size), -len(costs) % size
    if not missing:
        return 0
    behind = sum(size * costs[number * size - missing] for number in range(1, count))
    best, least, before = 0, math.inf, 0.0
    for number in range(count):
        padded = before + (size - missing) * costs[number * size] + behind
        if padded < least:
            best, least = number, padded
        before += size * costs[number * size]
        behind -= size * costs[(number + 1) * size - missing] if number + 1 < count else 0
    return best


class Units(Sequence[Sequence[int]]):
    """The positions of the input in the order of handing out, cut into units of so many.

    >>> units = Units([4, 2, 0, 1, 3], 2)
    >>> list(units), units.items
    ([[4, 2], [0, 1], [3]], 5)
    >>> Units(range(4), 3, without={1}).order
    [0, 2, 3]
    >>> list(Units([4, 2, 0, 1, 3], 2, costs=[7.0, 7.0, 8.0, 6.0, 20.0]))
    [[4], [2, 0], [1, 3]]
    """

    def __init__(
        self, order: Sequence[int], size: int = 1, without: Collection[int] = (), *, costs: Sequence[float] | None = None
    ) -> None:
        self.order: Sequence[int] = [position for position in order if position not in without] if without else order
        self.size = size
        self._missing = -len(self.order) % size
        self._short = len(self) - 1 if costs is None else thriftiest_cut([costs[position] for position in self.order], size)

    @property
    def items(self) -> int:
        """How many items all units have together."""
        return len(self.order)

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, number: Any) -> Any:
        start = number * self.size - (self._missing if number > self._short else 0)
        found = self.order[start : start + self.size - (self._missing if number == self._short else 0)]
        if not found:
            raise IndexError(number)
        return found


class Pace:
    """How many units a process takes at a time.

    >>> pace = Pace(world_size=2)
    >>> pace.wanted(left=1000, elapsed=0.0)
    1
    >>> pace.took(units=1, seconds=0.001)
    >>> [pace.wanted(left, elapsed=0.1) for left in (1000, 16, 3)]
    [10, 4, 1]
    """

    LEAST = 0.01
    """Seconds of work that a request should bring: some hundred times what it costs itself."""
    MOST = 1.0
    TIMES = 50
    """How much more work than the request itself takes."""
    SHARE = 1 / 100
    """Of the time that has passed, what a claim may be worth in long runs; so much may be lost at the end."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._seconds = math.inf
        """What a unit took of late."""
        self._request = 0.0
        """And what a request took."""

    def took(self, units: int, seconds: float) -> None:
        """So many units took so long."""
        now = seconds / max(1, units)
        self._seconds = now if math.isinf(self._seconds) else (self._seconds + now) / 2

    def waited(self, seconds: float) -> None:
        """A request took so long."""
        self._request = (3 * self._request + seconds) / 4

    def wanted(self, left: int, elapsed: float) -> int:
        """How many units to ask for, when so many are left for all processes and the work has gone on for so many seconds."""
        worth = min(self.MOST, max(self.LEAST, elapsed * self.SHARE, self.TIMES * self._request))
        fair = left // (2 * self._world_size)
        return max(1, min(fair, int(worth / max(self._seconds, 1e-9))))
