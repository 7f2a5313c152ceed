"""Random states of rank 0 on all processes: for code that draws the same numbers everywhere.

Loaders that were prepared need none of this: their order comes from a seed (`data/plan.py`). What is here is for random numbers of the
program's own: weights that are drawn on every process, a mask that all of them should share. All the states of one call travel
together, in one guarded call; the processes other than rank 0 forget their own. With one process nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from slipstream.comm import ops
from slipstream.comm.guarded import refuse
from slipstream.devices import rng
from slipstream.devices.table import CPU, FAMILIES, Family, RNGType
from slipstream.errors import ConfigError
from slipstream.runtime.current import current

__all__ = ["synchronize_rng_state", "synchronize_rng_states"]

_HOST = ("python", "numpy", "torch")


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """One random state of rank 0 on all processes: "torch" (also for None), "python", "numpy", "generator", or that of a device.

    >>> synchronize_rng_state("torch")
    >>> synchronize_rng_state("generator", torch.Generator())
    """
    synchronize_rng_states([RNGType.TORCH if rng_type is None else rng_type], generator)


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None, *, families: tuple[Family, ...] = FAMILIES
) -> None:
    """Several random states of rank 0 on all processes, in one call; "generator" is the one that is passed.

    >>> synchronize_rng_states(["torch", "python", "numpy"])
    """
    given = [rng_types] if isinstance(rng_types, str) else list(rng_types)
    kinds = list(dict.fromkeys(str(getattr(kind, "value", kind)) for kind in given))
    operation = f"synchronize_rng_states({', '.join(kinds)})"
    runtime = current()
    try:
        _check(kinds, generator, families)
    except ConfigError as error:
        if runtime.process.world_size == 1:
            raise
        raise refuse(runtime.channel(), runtime.limits, operation, error) from None
    if runtime.process.world_size == 1 or not kinds:
        return
    own = _capture(kinds, generator, families) if runtime.process.is_main else [None] * len(kinds)
    states = ops.broadcast_objects(runtime.channel(), runtime.limits, own, operation=operation)
    if not runtime.process.is_main:
        _restore(kinds, states, generator, families)


def _check(kinds: Sequence[str], generator: torch.Generator | None, families: tuple[Family, ...]) -> None:
    devices = {family.type: family for family in families if family is not CPU}
    for kind in kinds:
        if kind == RNGType.GENERATOR:
            if generator is None:
                raise ConfigError('random state "generator" was asked for without one: pass generator=..., or write "torch"')
        elif kind in devices:
            if devices[kind].count() == 0:
                here = ", ".join((*_HOST, *(name for name, family in devices.items() if family.count())))
                raise ConfigError(f"random state {kind!r} was asked for, but there is no such device here: write {here} or generator")
        elif kind not in _HOST:
            raise ConfigError(f"random state {kind!r} is not one of {', '.join((*_HOST, *devices))} and generator")


def _capture(kinds: Sequence[str], generator: torch.Generator | None, families: tuple[Family, ...]) -> list[Any]:
    return [
        generator.get_state() if kind == RNGType.GENERATOR and generator is not None else rng.capture([kind], families=families)[kind]
        for kind in kinds
    ]


def _restore(kinds: Sequence[str], states: Sequence[Any], generator: torch.Generator | None, families: tuple[Family, ...]) -> None:
    for kind, state in zip(kinds, states, strict=True):
        if kind == RNGType.GENERATOR and generator is not None:
            generator.set_state(state)
        elif rng.restore({kind: state}, families=families):
            raise ConfigError(
                f"random state {kind!r} of rank 0 is of {len(state)} devices, and this process sees fewer: give every process as many"
            )
