"""Modules whose names are imported when they are first used.

Most names of Accelerate are names of Slipstream under another path. A module lists them with `forward_names`, so that importing it costs
nothing before a name is used, and so that each module still has attributes of its own: clients replace them
(`accelerate.big_modeling.check_device_map = ...`), and tests patch them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["forward_names"]


def forward_names(
    namespace: str, homes: Mapping[str, str], unlisted: Mapping[str, str] | None = None, submodules: str = ""
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a module that forwards names (PEP 562).

    `homes` maps a module to the names that are found there, separated by spaces. A name that was found once becomes an attribute of the
    module. `unlisted` names can be imported too: Accelerate has them elsewhere or not at all, and Slipstream has them here, so that a
    script written for Slipstream runs with `accelerate` in its imports. `submodules` are modules below this one that are imported with
    the original, so that scripts write `accelerate.utils.set_seed` after `import accelerate` alone.

    >>> exported, find, _ = forward_names("accelerate._forwarding", {"slipstream.utils": "set_seed"})
    >>> exported, find("set_seed").__module__
    (['set_seed'], 'slipstream.distributed.functional')
    """
    home_of = {name: home for home, listed in homes.items() for name in listed.split()}
    exported = sorted(home_of)
    home_of |= {name: home for home, names in (unlisted or {}).items() for name in names.split()}

    below = frozenset(submodules.split())

    def find(name: str) -> Any:
        home = home_of.get(name)
        if home is None and name in below:
            return importlib.import_module(f"{namespace}.{name}")
        if home is None:
            raise AttributeError(f"module {namespace!r} has no attribute {name!r}", name=name, obj=sys.modules.get(namespace))
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[namespace], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[namespace]), *exported, *below})

    return exported, find, listed
