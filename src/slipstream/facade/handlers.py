"""What was handed to `Accelerator(kwargs_handlers=[...])`, sorted by kind: at most one of each, and none that nobody would read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config.handlers import InitProcessGroupKwargs
from slipstream.errors import ConfigError
from slipstream.precision.options import AORecipeKwargs, AutocastKwargs, GradScalerKwargs
from slipstream.step.guards.options import GuardKwargs
from slipstream.step.ledger.options import LedgerKwargs
from slipstream.step.profiling.options import ProfileKwargs
from slipstream.strategies.options import DistributedDataParallelKwargs

__all__ = ["HANDLERS", "Handlers", "sort_handlers"]


@dataclass
class Handlers:
    """One handler of each kind, or None."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: AORecipeKwargs | None = None
    ledger: LedgerKwargs | None = None
    guards: GuardKwargs | None = None

    def guarding(self, on_nan: str | None) -> Handlers:
        """Itself, with what `Accelerator(on_nan=...)` says of guards; an error where a handler says it too.

        >>> Handlers().guarding("raise").guards.on_nan
        'raise'
        """
        if on_nan is None:
            return self
        if self.guards is not None:
            raise ConfigError(f"Accelerator(on_nan={on_nan!r}) and a GuardKwargs: write GuardKwargs(on_nan={on_nan!r}, ...) alone")
        return replace(self, guards=GuardKwargs(on_nan=on_nan))

    def fitting(self, mixed_precision: str) -> Handlers:
        """Itself; an error for a handler that has no effect in this precision."""
        if self.scaler is not None and mixed_precision != "fp16":
            raise ConfigError(f"GradScalerKwargs was given with mixed_precision={mixed_precision!r}: only fp16 scales losses; leave it out")
        if self.autocast is not None and mixed_precision == "no":
            raise ConfigError("AutocastKwargs was given with mixed_precision='no', where there is no autocast: leave it out")
        if self.fp8 is not None and mixed_precision != "fp8":
            raise ConfigError(f"AORecipeKwargs was given with mixed_precision={mixed_precision!r}: it is for fp8; leave it out")
        return self


_KINDS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallelKwargs, "ddp"),
    (GradScalerKwargs, "scaler"),
    (InitProcessGroupKwargs, "init"),
    (AutocastKwargs, "autocast"),
    (ProfileKwargs, "profile"),
    (AORecipeKwargs, "fp8"),
    (LedgerKwargs, "ledger"),
    (GuardKwargs, "guards"),
)
HANDLERS: tuple[type, ...] = tuple(kind for kind, _ in _KINDS)
"""The classes that `kwargs_handlers` may have objects of."""


def sort_handlers(handlers: Sequence[Any] | None) -> Handlers:
    """The handlers by kind; an error for a second one of a kind, or for something else.

    >>> sort_handlers([AutocastKwargs(enabled=False)]).autocast.enabled
    False
    """
    found = Handlers()
    for handler in handlers or ():
        name = next((name for kind, name in _KINDS if isinstance(handler, kind)), None)
        if name is None:
            known = ", ".join(kind.__name__ for kind, _ in _KINDS)
            raise ConfigError(f"kwargs_handlers has a {type(handler).__name__}, which is not a handler: write one of {known}")
        if getattr(found, name) is not None:
            raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}: pass one, with all that you want to set")
        setattr(found, name, handler)
    return found
