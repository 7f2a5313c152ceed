"""The collectives as plain functions, on the runtime of this process: what `slipstream.utils` offers.

They use the limits that the environment and the launcher gave; a state object with settings of its own has methods of the same names.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.comm import gather as gathering, ops
from slipstream.comm.agree import check_agreement
from slipstream.devices import rng
from slipstream.runtime import turns
from slipstream.runtime.current import current

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "pad_across_processes",
    "reduce",
    "set_seed",
    "wait_for_everyone",
]


def gather(tensor: Any) -> Any:
    """The data of all processes, joined in the order of the ranks; see `comm/gather.py`.

    A list is joined entry by entry; one that has tensors among its entries, or holds nothing but tensors, is structure, as dicts and
    tuples are, and its tensors are joined along the first dimension. `gather_object` joins lists of anything.

    >>> gather({"ids": torch.tensor([1, 2]), "names": ["a", "b"]})
    {'ids': tensor([1, 2]), 'names': ['a', 'b']}
    """
    runtime = current()
    return gathering.gather(runtime.channel(), runtime.limits, tensor)


def gather_object(object: Any) -> list[Any]:
    """The objects of all processes as one list, lists and tuples concatenated.

    >>> gather_object(["a", "b"]), gather_object("a")
    (['a', 'b'], ['a'])
    """
    runtime = current()
    values = gathering.gather_objects(runtime.channel(), runtime.limits, object, flat=isinstance(object, (list, tuple)))
    assert values is not None
    return values


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Tensors, arrays or numbers combined over the processes: sum, mean, max or min.

    >>> reduce(torch.ones(2), "sum")
    tensor([1., 1.])
    """
    runtime = current()
    return ops.reduce(runtime.channel(), runtime.limits, tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The data of one process on all of them; all pass the same structure, types and shapes."""
    runtime = current()
    return ops.broadcast(runtime.channel(), runtime.limits, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The list of one process on all of them, written into the list that was passed."""
    runtime = current()
    object_list[:] = ops.broadcast_objects(runtime.channel(), runtime.limits, object_list, from_process)
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors padded along `dim` to the largest size over the processes."""
    runtime = current()
    return ops.pad(runtime.channel(), runtime.limits, tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor that one process has, on all of them; the others pass None."""
    runtime = current()
    return ops.share(runtime.channel(), runtime.limits, tensor)


def gather_tensor_shape(tensor: torch.Tensor | None) -> torch.Size:
    """The shape of a tensor that one process has; the others pass None."""
    runtime = current()
    shapes = gathering.gather_objects(
        runtime.channel(), runtime.limits, None if tensor is None else list(tensor.shape), operation="gather_tensor_shape"
    )
    known = [shape for shape in shapes or [] if shape is not None]
    if len(known) != 1:
        raise ValueError(f"gather_tensor_shape needs one process to pass a tensor and the others None, but {len(known)} passed one")
    return torch.Size(known[0])


def wait_for_everyone() -> None:
    """Returns when every process has called it."""
    runtime = current()
    turns.wait_for_everyone(runtime.channel(), runtime.limits)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python, numpy, torch and the devices; with `device_specific`, another seed for each process (`seed + rank`).

    In debug mode it checks, once the process group is open, that all processes were given the same seed.
    """
    runtime = current()
    rng.set_seed(seed, device_specific=device_specific, deterministic=deterministic, rank=runtime.process.rank)
    if runtime.debug and runtime.is_open:
        check_agreement(runtime.channel(), runtime.limits, "the seeds", {"seed": seed})
