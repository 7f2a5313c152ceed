"""The options of both strategies, checked once: names, values, and what contradicts what.

Options of torch's DistributedDataParallel are given by their names, as Lightning's own DDP strategy takes them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.errors import ConfigError
from slipstream.parallel.parallelism_config import ParallelismConfig
from slipstream.strategies.ddp_options import DistributedDataParallelKwargs
from slipstream.strategies.fsdp_options import FullyShardedDataParallelPlugin

__all__ = ["PRECISIONS", "StrategyOptions", "check_precision", "read_options"]

PRECISIONS: Mapping[str, str] = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "no"}
"""Names of Lightning for mixed precision, with ours."""

_SAFETY = ("timeout", "barrier_timeout", "hang_warning", "debug")
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "parallel": (None, "ddp", "fsdp"),
    "mixed_precision": (None, "no", "bf16", "fp16", "fp8"),
    "shard_data": (True, False),
    "last_batch": ("exact", "pad"),
    "checkpoint_format": ("auto", "lightning", "slipstream"),
}


@dataclass(frozen=True)
class StrategyOptions:
    """What a strategy was given."""

    parallel: str | None = None
    """"ddp", "fsdp", or None for what the configuration of `slipstream launch` says, which is "ddp" without one."""
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    mixed_precision: str | None = None
    shard_data: bool = True
    last_batch: Literal["exact", "pad"] = "exact"
    checkpoint_format: Literal["auto", "lightning", "slipstream"] = "auto"
    ddp: DistributedDataParallelKwargs | None = None
    safety: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sharding(self) -> FullyShardedDataParallelPlugin | None:
        """The options of sharding, where models are sharded whatever the configuration says."""
        return FullyShardedDataParallelPlugin() if self.parallel == "fsdp" and self.fsdp_plugin is None else self.fsdp_plugin


def read_options(strategy: str, given: Mapping[str, Any], own: tuple[str, ...]) -> StrategyOptions:
    """Return the options of a strategy. Raise for unknown names, wrong values, and options that exclude each other.

    `own` are names of arguments that the strategy takes besides, for the hint about a name that is not known.

    >>> read_options("SlipstreamStrategy", {"find_unused_parameters": True, "timeout": 60.0}, ()).ddp.find_unused_parameters
    True
    """
    ddp_names = tuple(entry.name for entry in dataclasses.fields(DistributedDataParallelKwargs))
    known = (*_CHOICES, "fsdp_plugin", "parallelism_config", *_SAFETY, *ddp_names, *own)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{strategy}({name}=...): there is no such option; {hint}")
    for name, choices in _CHOICES.items():
        value = given.get(name, choices[0])
        if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
            raise ConfigError(f"{strategy}({name}={value!r}): write one of {', '.join(map(repr, choices))}")
    for name, kind in (("fsdp_plugin", FullyShardedDataParallelPlugin), ("parallelism_config", ParallelismConfig)):
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise ConfigError(f"{strategy}({name}={given[name]!r}): write {name}={kind.__name__}(...)")
    ddp = {name: given[name] for name in ddp_names if name in given}
    shards = given.get("parallel") == "fsdp" or given.get("fsdp_plugin") is not None
    if shards and given.get("parallel") == "ddp":
        raise ConfigError(f"{strategy}(parallel='ddp', fsdp_plugin=...): replicas are not sharded; leave one of them out")
    if shards and ddp:
        raise ConfigError(
            f"{strategy}({', '.join(f'{name}={value!r}' for name, value in ddp.items())}) is about replicas (DDP), and models are sharded "
            "(parallel='fsdp'): leave one of them out"
        )
    return StrategyOptions(
        **{name: given[name] for name in (*_CHOICES, "fsdp_plugin", "parallelism_config") if name in given},
        ddp=DistributedDataParallelKwargs(**ddp) if ddp else None,
        safety={name: given[name] for name in _SAFETY if given.get(name) is not None},
    )


def check_precision(strategy: str, asked: str | None, host: str, lightning: str) -> None:
    """Raise if a strategy is asked for one precision and Lightning for another. `host` is the class that was given Lightning's.

    >>> check_precision("SlipstreamStrategy", "bf16", "Trainer", "32-true")
    """
    if asked is None or lightning == "32-true" or PRECISIONS.get(lightning) == asked:  # 32-true is what Lightning has without a word
        return
    raise ConfigError(
        f"{strategy}(mixed_precision={asked!r}) contradicts {host}(precision={lightning!r}): leave one of them out"
    )
