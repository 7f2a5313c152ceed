"""What the allocators of devices say of themselves: how much they hold, and how much of it is in use.

Every family answers in the manner of torch's own device modules, and some with fewer functions; what one does not tell is left out. Nothing
here allocates, starts a device, or names a family.
"""

from __future__ import annotations

from typing import Any, Final

from slipstream.devices.table import CPU, FAMILIES, Family

__all__ = ["allocator_statistics"]

_QUESTIONS: Final = (
    ("allocated", ("memory_allocated", "current_allocated_memory")),
    ("most_allocated", ("max_memory_allocated",)),
    ("reserved", ("memory_reserved", "driver_allocated_memory")),
    ("most_reserved", ("max_memory_reserved",)),
)
_COUNTS: Final = (("retries", "num_alloc_retries"), ("failures", "num_ooms"))


def allocator_statistics(*, families: tuple[Family, ...] = FAMILIES) -> dict[str, dict[str, int]]:
    """By device, for those that this process has used: bytes `allocated` and `reserved`, the most there were, and failed attempts.

    >>> isinstance(allocator_statistics(), dict)
    True
    """
    used = [family for family in families if family is not CPU and family.may_be_used()]
    found = {name: _told(family, arguments) for family in used for name, arguments in _devices(family)}
    return {name: told for name, told in found.items() if any(told.values())}


def _devices(family: Family) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{family.type}:{number}", (number,)) for number in range(family.count())] if family.indexed else [(family.type, ())]


def _told(family: Family, arguments: tuple[int, ...]) -> dict[str, int]:
    namespace = family.module()
    told: dict[str, int] = {}
    for name, functions in _QUESTIONS:
        known = next((function for function in functions if hasattr(namespace, function)), None)
        if known is not None:
            told[name] = int(family.ask(known, *arguments))
    counts: Any = family.ask("memory_stats", *arguments, default={})
    return told | {name: int(counts[key]) for name, key in _COUNTS if key in counts}
