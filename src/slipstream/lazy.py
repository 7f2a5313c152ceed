"""Names that are found in their own rooms when they are first used, so that importing a namespace imports nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(namespace: str, homes: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a module whose names live elsewhere (PEP 562); `homes` is module -> names.

    >>> find, names = lazily("example", {"math": ("pi", "tau")})
    >>> names(), find("pi")
    (['pi', 'tau'], 3.141592653589793)
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {namespace!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home_of[name]), name)

    return find, lambda: sorted(home_of)
