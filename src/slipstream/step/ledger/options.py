"""`LedgerKwargs`: what the ledger counts, and how often ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError

__all__ = ["LedgerKwargs"]


@dataclass
class LedgerKwargs(KwargsHandler):
    """The options of the ledger, for `Accelerator(kwargs_handlers=[...])`.

    >>> LedgerKwargs(flops_per_sample=6e9, peak_flops=312e12).to_kwargs()
    {'flops_per_sample': 6000000000.0, 'peak_flops': 312000000000000.0}
    """

    enabled: bool = True
    """Whether there is a ledger at all. Without one a step makes no marks."""
    interval: float = 1.0
    """Seconds after which steps are added up and told to rank 0. Beyond 16 processes it grows with their number."""
    flops_per_sample: float | None = None
    """Floating-point operations of forward and backward for one sample, where they are known."""
    count_flops: bool = False
    """Count them in the second step, with torch's counter; that step is slower."""
    peak_flops: float | None = None
    """What the device of one process can do in a second; None measures it once with a product of matrices, where FLOPs are known."""
    tokens: str | Callable[[Any], int] | None = None
    """The name under which a batch holds its tokens, or a function of a batch that counts them; None looks for "input_ids"."""
    summary: bool = True
    """Whether `end_training` prints the summary, where training took a second at least."""

    def __post_init__(self) -> None:
        if isinstance(self.interval, bool) or not isinstance(self.interval, int | float) or not 0 < self.interval < float("inf"):
            raise ConfigError(f"LedgerKwargs(interval={self.interval!r}): write the seconds between two looks, more than 0; 1.0 is usual")
        for name in ("flops_per_sample", "peak_flops"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < float("inf")):
                raise ConfigError(f"LedgerKwargs({name}={value!r}): write how many floating-point operations, more than 0, or leave it out")
        if self.flops_per_sample is not None and self.count_flops:
            raise ConfigError("LedgerKwargs(flops_per_sample=..., count_flops=True): they are given, and to be counted; pass one of them")
        if self.tokens is not None and not isinstance(self.tokens, str) and not callable(self.tokens):
            raise ConfigError(
                f"LedgerKwargs(tokens={self.tokens!r}): write the name of an entry of a batch ('input_ids'), or a function that counts the "
                "tokens of a batch"
            )
        if not self.enabled:
            given = [name for name in self.to_kwargs() if name not in ("enabled", "summary")]
            if given:
                raise ConfigError(f"LedgerKwargs(enabled=False, {given[0]}=...): a ledger that is off counts nothing; pass one of them")
