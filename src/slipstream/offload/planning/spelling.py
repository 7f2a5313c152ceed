"""Names that a user gives and a model has not: they change nothing, and that is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["tell_unknown_classes", "tell_unknown_tensors"]

_SHOWN: Final = 5


def tell_unknown_classes(model: nn.Module, given: Iterable[str] | None, argument: str) -> None:
    """Warns of names of classes that no module of a model is of, with those that may have been meant."""
    if not given:
        return
    if isinstance(given, str) and argument != "no_split_module_classes":
        raise ConfigError(f"{argument}={given!r} is one text; write a list of names of classes: [{given!r}].")
    known = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    _tell([given] if isinstance(given, str) else given, known, f"{argument} names the class", type(model).__name__)


def tell_unknown_tensors(model: nn.Module, given: Mapping[str, Any] | None, argument: str) -> None:
    """Warns of names that no parameter and no buffer of a model has."""
    if given:
        known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        known += [name for name, _ in model.named_buffers(remove_duplicate=False)]
        _tell(given, known, f"{argument} names the tensor", type(model).__name__)


def _tell(given: Iterable[str], known: Iterable[str], what: str, kind: str) -> None:
    names = {*known}
    unknown = [str(name) for name in given if name not in names]
    if not unknown:
        return
    near = {name: difflib.get_close_matches(name, sorted(names)[:5000], n=1) for name in unknown[:_SHOWN]}
    shown = ", ".join(f"{name} (did you mean {found[0]}?)" if found else name for name, found in near.items())
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    get_logger(__name__).warning(f"{what} {shown}{more}, which this {kind} has not: it changes nothing.")
