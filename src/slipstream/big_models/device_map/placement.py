"""Placement of layers on devices as a packing problem, with numbers alone: items and rooms in order, and one main room.

`pack` returns the packing with the most bytes in the first room, then in the second, and so on. The main room is the one in which
offloaded items run. In order, the answer is exact: for each room that could be the main one, the longest run of items that fits is
optimal. With `fallback=True` later items may fill gaps; several heuristics are tried, and the result is never worse than the one in
order.

The main room reserves space for the largest offloaded layer and holds the buffers that stay behind. Nothing here imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

__all__ = ["PackingItem", "NoPacking", "Packing", "Room", "loads", "pack"]

@dataclass(frozen=True)
class PackingItem:
    """A group of layers, which goes to one room as a whole."""

    size: int
    """Bytes in a room that computes."""
    stays: int = 0
    """Bytes of it that stay in the main room when it is offloaded."""
    layer: int = 0
    """Bytes of the largest part of it that has to be brought in at once when it is offloaded."""

    @property
    def moved(self) -> int:
        """Bytes where it is offloaded to."""
        return self.size - self.stays


@dataclass(frozen=True)
class Room:
    """A device with room for items."""

    kind: str
    """"computes", "memory" or "disk"."""
    capacity: int | None
    """Bytes; None for no limit."""

    @property
    def cap(self) -> int:
        """The capacity as a number."""
        return 2**80 if self.capacity is None else self.capacity


@dataclass(frozen=True)
class Packing:
    """Where the items go."""

    places: tuple[int, ...]
    """The room of each item."""
    main: int
    """The room in which offloaded items run."""
    reserve: int = 0
    """Bytes kept free in the main room for the largest offloaded layer."""
    stays: int = 0
    """Bytes of offloaded items that stay in the main room."""


class NoPacking(Exception):
    """Raised where nothing fits. `main` is the room that came nearest to running what is offloaded; None: the disk is full."""

    def __init__(self, main: int | None, missing: int) -> None:
        super().__init__(f"{missing} bytes are missing")
        self.main = main
        self.missing = missing


def pack(items: Sequence[PackingItem], rooms: Sequence[Room], fallback: bool = False) -> Packing:
    """Return the best packing; raise NoPacking if there is none.

    >>> rooms = [Room("computes", 10), Room("memory", 100), Room("disk", None)]
    >>> pack([PackingItem(4, layer=4), PackingItem(5, layer=5)], rooms).places
    (0, 0)
    >>> pack([PackingItem(4, layer=4), PackingItem(5, layer=5), PackingItem(5, layer=5)], rooms)
    Packing(places=(0, 1, 1), main=0, reserve=5, stays=0)
    """
    found: list[Packing] = []
    trouble: NoPacking | None = None
    try:
        found.append(_InOrder(items, rooms).best())
    except NoPacking as error:
        trouble = error
    if fallback and (trouble or any(found[0].places)):  # in the first room alone, nothing can be better
        found += _pack_out_of_order(items, rooms)
    if trouble and not found:
        raise trouble
    return max(found, key=lambda packing: loads(packing, items, rooms))  # the first of equals: the one in order


def loads(packing: Packing, items: Sequence[PackingItem], rooms: Sequence[Room]) -> list[int]:
    """Return the bytes of the items in each room, to be as large as possible, the first room first."""
    bytes_in = [0] * len(rooms)
    for item, place in zip(items, packing.places, strict=True):
        bytes_in[place] += item.moved if _offloaded(place, packing.main, rooms) else item.size
    return bytes_in


def _offloaded(place: int, main: int, rooms: Sequence[Room]) -> bool:
    return rooms[place].kind == "disk" or (rooms[place].kind == "memory" and place != main)


# --- in order ----------------------------------------------------------------------------------------------------------------


class _InOrder:
    """Packs items in order; runs of items are found by bisection in running sums."""

    def __init__(self, items: Sequence[PackingItem], rooms: Sequence[Room]) -> None:
        self.count = len(items)
        self.rooms = rooms
        self.size = [0, *accumulate(item.size for item in items)]
        self.moved = [0, *accumulate(item.moved for item in items)]
        self.layer = [*reversed([0, *accumulate((item.layer for item in reversed(items)), max)])]
        """The largest layer from each item on."""
        self.computing = [number for number, room in enumerate(rooms) if room.kind == "computes"]
        self.after = [number for number, room in enumerate(rooms) if room.kind != "computes"]

    def best(self) -> Packing:
        ends = self._fill(0, self.computing, self.size)
        if ends[-1] == self.count:
            return self._packing(self.computing, ends, self.computing[0] if self.computing else 0)
        candidates = self.computing + [number for number in self.after if self.rooms[number].kind == "memory"]
        if not candidates:
            raise ValueError("there is no room in which anything could run")
        trouble = None
        holding = ((main, end) for main in candidates if (end := self._longest_with_room(main)))
        passing = ((main, 0) for main in candidates if self._kept_free(0) <= self.rooms[main].cap)
        for main, end in chain(holding, passing):
            try:
                return self._with_main(main, end)
            except NoPacking as error:
                trouble = trouble or error
        nearest = max(candidates, key=lambda number: self.rooms[number].cap)
        raise trouble or NoPacking(nearest, self._kept_free(0) - self.rooms[nearest].cap)

    def _longest_with_room(self, main: int) -> int:
        """Return how many items the room can hold as the main one, with what that needs; rooms before it hold none."""
        cap = self.rooms[main].cap
        end = self._run(0, cap, self.size)
        while end:
            # A shorter run leaves no less to be offloaded, so every run that fits is at most as long as this bound.
            bound = self._run(0, cap - self._kept_free(self._computed(main, end)), self.size)
            if bound >= end:
                return end
            end = bound
        return 0

    def _computed(self, main: int, end: int) -> int:
        """Return how many items are not offloaded if the main room holds `end` of them."""
        return self._fill(end, [number for number in self.computing if number > main], self.size)[-1]

    def _kept_free(self, start: int) -> int:
        """Return the bytes that the main room keeps free for the items from `start` on."""
        return self.layer[start] + self._staying(start)

    def _staying(self, start: int) -> int:
        return (self.size[-1] - self.size[start]) - (self.moved[-1] - self.moved[start])

    def _with_main(self, main: int, end: int) -> Packing:
        computing = [number for number in self.computing if number > main and end]
        ends = [end, *self._fill(end, computing, self.size)[1:]]
        after = [number for number in self.after if number != main]
        offloaded = ends[-1]
        ends += self._fill(offloaded, after, self.moved)[1:]
        if ends[-1] < self.count:
            raise NoPacking(None, self.moved[-1] - self.moved[ends[-1]])
        return self._packing([main, *computing, *after], [0, *ends], main, self.layer[offloaded], self._staying(offloaded))

    def _fill(self, start: int, numbers: Iterable[int], sums: list[int]) -> list[int]:
        """Return where the run of each room ends when they are filled one after the other; begins with the start itself."""
        ends = [start]
        for number in numbers:
            ends.append(self._run(ends[-1], self.rooms[number].cap, sums))
        return ends

    def _run(self, start: int, cap: int, sums: list[int]) -> int:
        return max(start, bisect_right(sums, sums[start] + cap) - 1)

    def _packing(self, numbers: Sequence[int], ends: Sequence[int], main: int, reserve: int = 0, stays: int = 0) -> Packing:
        places: list[int] = []
        for number, start, end in zip(numbers, ends, ends[1:], strict=False):
            places += [number] * (end - start)
        return Packing(tuple(places), main, reserve, stays)


# --- with later items --------------------------------------------------------------------------------------------------------


def _pack_out_of_order(items: Sequence[PackingItem], rooms: Sequence[Room]) -> list[Packing]:
    """Return a packing in which later items fill gaps, if one is found (a list of at most one).

    The bytes to keep free depend on what is offloaded: they begin with none and grow to what the last attempt would have needed.
    """
    largest = max((item.layer for item in items), default=0) + sum(item.stays for item in items)
    free = 0
    while True:
        packing, needed = _attempt(items, rooms, free)
        if packing is not None:
            return [packing]
        if free >= largest:
            return []
        free = min(largest, max(needed, free + max(1, largest // 64)))


def _attempt(items: Sequence[PackingItem], rooms: Sequence[Room], free: int) -> tuple[Packing | None, int]:
    """Return a packing that keeps `free` bytes in the main room (None if that is too little, or the disk too small), and its need."""
    places = [-1] * len(items)
    left = list(range(len(items)))
    main = None
    for number, room in enumerate(rooms):
        offloaded = room.kind == "disk" or (room.kind == "memory" and main is not None)
        weights = [items[index].moved if offloaded else items[index].size for index in left]
        keeps = main is None and not offloaded
        whole = keeps and sum(weights) <= room.cap
        chosen = set(range(len(left))) if whole else _choose(weights, room.cap - (free if keeps else 0))
        if chosen and keeps:
            main = number
        for position in chosen:
            places[left[position]] = number
        left = [entry for position, entry in enumerate(left) if position not in chosen]
    if main is None or left:
        return None, free + 1
    away = [item for item, place in zip(items, places, strict=True) if _offloaded(place, main, rooms)]
    reserve, stays = max((item.layer for item in away), default=0), sum(item.stays for item in away)
    held = sum(item.size for item, place in zip(items, places, strict=True) if place == main)
    if held + reserve + stays > rooms[main].cap:
        return None, reserve + stays
    return Packing(tuple(places), main, reserve, stays), free


def _choose(weights: Sequence[int], cap: int) -> set[int]:
    """Return the positions of items that fit together: the most bytes that one of three orders finds."""
    if cap < 0:
        return set()
    start, length = _best_window(weights, cap)
    window = range(start, start + length)
    orders = [
        range(len(weights)),
        [*window, *(index for index in range(len(weights)) if index not in window)],
        sorted(range(len(weights)), key=lambda index: -weights[index]),
    ]
    return max((_first_fit(weights, order, cap) for order in orders), key=lambda chosen: sum(weights[index] for index in chosen))


def _first_fit(weights: Sequence[int], order: Iterable[int], cap: int) -> set[int]:
    chosen = set()
    for index in order:
        if weights[index] <= cap:
            cap -= weights[index]
            chosen.add(index)
    return chosen


def _best_window(weights: Sequence[int], cap: int) -> tuple[int, int]:
    """Return (start, length) of the neighbours that fit together and have the most bytes."""
    best, start, held = (0, 0, 0), 0, 0
    for end, weight in enumerate(weights):
        held += weight
        while held > cap:
            held -= weights[start]
            start += 1
        best = max(best, (held, -start, end + 1 - start))
    return -best[1], best[2]
