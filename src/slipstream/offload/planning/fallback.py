"""A search that users of device maps know by name: some later block that fits, when the next one does not.

Plans do not use it; they fill gaps by `packing.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.files.sizes import parse_size
from slipstream.offload.planning.sizes import class_names, get_module_size_with_ties, parts_of

__all__ = ["fallback_allocate"]

_Modules = list[tuple[str, Any]]


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Collection[str] | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, _Modules]:
    """The first module that fits below a limit, larger ones before their parts; and the list of modules without it.

    Modules that had to be divided to find it are in that list as their parts. A module that shares weights with others counts with them.
    Where nothing fits: (None, None, the modules as they were).

    >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2))
    >>> name, _, rest = fallback_allocate([*model.named_children()], {"0": 440, "1": 24}, 100)
    >>> name, [other for other, _ in rest]
    ('1', ['0'])
    """
    limit = parse_size(size_limit, "size_limit") if isinstance(size_limit, str) else int(size_limit)
    if not modules:
        raise ConfigError("fallback_allocate got no modules. Give it those that have no place yet.")
    whole, ties = class_names(no_split_module_classes), [list(group) for group in tied_parameters or ()]
    waiting = deque((name, module, (list(modules), position)) for position, (name, module) in enumerate(modules))
    while waiting:
        name, module, (siblings, position) = waiting.popleft()
        rest = siblings[:position] + siblings[position + 1 :]
        if _size(name, module_sizes, ties, rest) <= limit:
            return name, module, rest
        if isinstance(module, nn.Module) and module._modules and type(module).__name__ not in whole:
            parts: _Modules = parts_of(name, module)
            inside = siblings[:position] + parts + siblings[position + 1 :]
            waiting += [(part, inner, (inside, position + number)) for number, (part, inner) in enumerate(parts)]
    return None, None, list(modules)


def _size(name: str, sizes: Mapping[str, int], ties: list[list[str]], rest: _Modules) -> int:
    others = []
    for group in ties:
        inside = [tied for tied in group if f"{tied}.".startswith(f"{name}.")]
        if inside:
            others += [tied for tied in group if tied not in inside]
    held = [tied for tied in others if any(f"{tied}.".startswith(f"{other}.") for other, _ in rest)]
    return get_module_size_with_ties(held, sizes.get(name, 0), sizes, rest)[0]
