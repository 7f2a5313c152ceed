"""The collectives as plain functions on the runtime of this process, as `slipstream.utils` offers them.

They use the limits that the environment and the launcher gave; state objects with settings of their own have methods of the same names.
`synchronize_rng_states` copies random states of rank 0 to all processes in one guarded call; prepared loaders do not need it, because
their order comes from a seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from slipstream.devices import rng
from slipstream.devices.table import CPU, FAMILIES, Family, RNGType
from slipstream.distributed import collectives
from slipstream.distributed.barriers import barrier
from slipstream.distributed.current import current
from slipstream.distributed.guard import announce_failure
from slipstream.distributed.state import PartialState
from slipstream.errors import ConfigError

__all__ = [
    "broadcast", "broadcast_object_list", "copy_tensor_to_devices", "gather", "gather_object", "gather_tensor_shape",
    "map_across_processes", "pad_across_processes", "reduce", "set_seed", "synchronize_rng_state", "synchronize_rng_states",
    "wait_for_everyone",
]


def _call(collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    runtime = current()
    return collective(runtime.channel(), runtime.limits, *arguments, **options)


def gather(tensor: Any) -> Any:
    """Return the data of all processes, joined in rank order; see `distributed/collectives.py`.

    A list is joined entry by entry; one that has tensors among its entries, or holds nothing but tensors, is structure, as dicts and
    tuples are, and its tensors are joined along the first dimension. `gather_object` joins lists of anything.

    >>> gather({"ids": torch.tensor([1, 2]), "names": ["a", "b"]})
    {'ids': tensor([1, 2]), 'names': ['a', 'b']}
    """
    return _call(collectives.gather, tensor)


def gather_object(object: Any) -> list[Any]:
    """Return the objects of all processes as one list, lists and tuples concatenated.

    >>> gather_object(["a", "b"]), gather_object("a")
    (['a', 'b'], ['a'])
    """
    values: list[Any] = _call(collectives.gather_objects, object, flat=isinstance(object, (list, tuple)))
    return values


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine tensors, arrays or numbers over the processes: sum, mean, max or min.

    >>> reduce(torch.ones(2), "sum")
    tensor([1., 1.])
    """
    return _call(collectives.reduce, tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the data of one process on all of them; all pass the same structure, types and shapes."""
    return _call(collectives.broadcast, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Write the list of one process into the list that was passed, on all of them."""
    object_list[:] = _call(collectives.broadcast_objects, object_list, from_process)
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad tensors along `dim` to the largest size over the processes."""
    return _call(collectives.pad, tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor that one process has, on the device of every process; the others pass None."""
    received: torch.Tensor = _call(collectives.broadcast_from_owner, tensor)
    return received.to(PartialState().device)


def gather_tensor_shape(tensor: torch.Tensor | None) -> torch.Size:
    """Return the shape of a tensor that one process has; the others pass None."""
    own = None if tensor is None else list(tensor.shape)
    known = [shape for shape in _call(collectives.gather_objects, own, operation="gather_tensor_shape") if shape is not None]
    if len(known) != 1:
        raise ValueError(f"gather_tensor_shape needs one process to pass a tensor and the others None, but {len(known)} passed one")
    return torch.Size(known[0])


def wait_for_everyone() -> None:
    """Return when every process has called it."""
    _call(barrier)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy, torch and the devices; with `device_specific`, another seed for each process (`seed + rank`).

    In debug mode it checks, once the process group is open, that all processes were given the same seed.
    """
    runtime = current()
    rng.set_seed(seed, device_specific=device_specific, deterministic=deterministic, rank=runtime.process.rank)
    if runtime.debug and runtime.is_open:
        _call(collectives.check_agreement, "the seeds", {"seed": seed})


def map_across_processes(
    function: Callable[[Any], Any],
    inputs: Any,
    batch_size: int | None = None,
    order: bool = True,
    key: Callable[[Any], float] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Any]:
    """Return the results of a function for all inputs, on every process; see `PartialState.map_across_processes`.

    >>> map_across_processes(str.upper, ["one", "two"])
    ['ONE', 'TWO']
    """
    return PartialState().map_across_processes(function, inputs, batch_size, order, key, checkpoint, progress)


_HOST_KINDS = ("python", "numpy", "torch")


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Copy a random state of rank 0 to all processes: "torch" (also for None), "python", "numpy", "generator", or that of a device.

    >>> synchronize_rng_state("torch")
    >>> synchronize_rng_state("generator", torch.Generator())
    """
    synchronize_rng_states([RNGType.TORCH if rng_type is None else rng_type], generator)


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None, *, families: tuple[Family, ...] = FAMILIES
) -> None:
    """Copy several random states of rank 0 to all processes, in one call; "generator" is the generator that is passed.

    >>> synchronize_rng_states(["torch", "python", "numpy"])
    """
    given = [rng_types] if isinstance(rng_types, str) else list(rng_types)
    kinds = list(dict.fromkeys(str(getattr(kind, "value", kind)) for kind in given))
    operation = f"synchronize_rng_states({', '.join(kinds)})"
    runtime = current()
    try:
        _check_rng_kinds(kinds, generator, families)
    except ConfigError as error:
        if runtime.process.world_size == 1:
            raise
        raise announce_failure(runtime.channel(), runtime.limits, operation, error) from None
    if runtime.process.world_size == 1 or not kinds:
        return
    captured: dict[str, Any] = {}
    if runtime.process.is_main:
        captured = rng.capture([kind for kind in kinds if kind != RNGType.GENERATOR], families=families)
        if generator is not None and RNGType.GENERATOR in kinds:
            captured[RNGType.GENERATOR] = generator.get_state()
    states = _call(collectives.broadcast_objects, [captured.get(kind) for kind in kinds], operation=operation)
    if not runtime.process.is_main:
        _restore_rng_states(kinds, states, generator, families)


def _check_rng_kinds(kinds: Sequence[str], generator: torch.Generator | None, families: tuple[Family, ...]) -> None:
    devices = {family.type: family for family in families if family is not CPU}
    for kind in kinds:
        if kind == RNGType.GENERATOR:
            if generator is None:
                raise ConfigError('random state "generator" was asked for without one: pass generator=..., or write "torch"')
        elif kind in devices:
            if devices[kind].count() == 0:
                here = ", ".join((*_HOST_KINDS, *(name for name, family in devices.items() if family.count())))
                raise ConfigError(f"random state {kind!r} was asked for, but there is no such device here: write {here} or generator")
        elif kind not in _HOST_KINDS:
            raise ConfigError(f"random state {kind!r} is not one of {', '.join((*_HOST_KINDS, *devices))} and generator")


def _restore_rng_states(
    kinds: Sequence[str], states: Sequence[Any], generator: torch.Generator | None, families: tuple[Family, ...]
) -> None:
    for kind, state in zip(kinds, states, strict=True):
        if kind == RNGType.GENERATOR and generator is not None:
            generator.set_state(state)
        elif rng.restore({kind: state}, families=families):
            raise ConfigError(
                f"random state {kind!r} of rank 0 cannot be restored here: torch.{kind} has no function that sets it"
            )
