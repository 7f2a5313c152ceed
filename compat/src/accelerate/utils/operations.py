"""Operations on nested tensors and collectives.

They are Slipstream's. What stands here has a habit of Accelerate that scripts and tests rely on: with one process a collective returns
the very object that it was given; with several, debug mode (ACCELERATE_DEBUG_MODE) wants the same shapes on all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from accelerate._forwarding import forward_names
from slipstream.distributed import collectives, pytree
from slipstream.distributed.current import current
from slipstream.errors import DistributedOperationException

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils.constants": "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "accelerate.utils.dataclasses": "DistributedType TensorInformation",
        "accelerate.utils.imports": "is_npu_available is_torch_distributed_available is_torch_xla_available",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """CannotPadNestedTensorWarning ConvertOutputsToFp32
            convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_device gather_tensor_shape get_data_structure
            get_shape honor_type ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information
            is_torch_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors""",
    },
)
__all__ = sorted(
    ["DistributedOperationException", "GatheredParameters", "TENSOR_INT_TO_DTYPE", "TENSOR_TYPE_TO_INT", "broadcast", "chained_operation"]
    + ["broadcast_object_list"]
    + ["concatenate", "find_batch_size", "gather", "gather_object", "is_torch_xpu_tensor", "pad_across_processes", "reduce"]
    + ["verify_operation", *_forwarded]
)

TENSOR_TYPE_TO_INT = {
    dtype: number
    for number, dtype in enumerate(
        (
            torch.float, torch.double, torch.half, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.bool,
        ),  # fmt: skip
        start=1,
    )
}
"""Numbers for the types of tensors, for scripts that send them."""
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether this is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


# -- checks of debug mode -----------------------------------------------------------------------------------------------


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a collective: in debug mode, the shapes of all processes are compared first.

    Slipstream compares operation, structure and types in every call of its own; here it is the number of rows too.
    """

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        from accelerate.state import PartialState

        state = PartialState()
        if not state.debug or state.num_processes == 1:
            return function(*args, **kwargs)
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        name = f"{function.__module__}.{function.__name__}"
        shapes = _call(collectives.gather_objects, pytree.get_shape(tensor))
        if any(shape != shapes[0] for shape in shapes):
            listed = "\n".join(f"  - Process {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise DistributedOperationException(f"{name} was called with different shapes on the processes:\n{listed}")
        return function(*args, **kwargs)

    return checked


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for an operation that calls a verified one: an error names this operation, and has the other as its cause."""

    @wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"{name} failed in the collective below it, see the error above: {error}") from error

    return chained


# -- collectives --------------------------------------------------------------------------------------------------------


def _is_alone() -> bool:
    return current().process.world_size == 1


def _call(collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a collective with the limits of the shared state: those of `InitProcessGroupKwargs(timeout=...)`, if a script gave some."""
    from accelerate.state import PartialState

    state = PartialState()
    return collective(state._channel(), state._limits, *arguments, **options)


@verify_operation
def gather(tensor: Any) -> Any:
    """Return the data of all processes, tensors joined along the first dimension; with one process, the data itself.

    >>> gather({"ids": torch.tensor([1, 2])})
    {'ids': tensor([1, 2])}
    """
    return tensor if _is_alone() else _call(collectives.gather, tensor)


def gather_object(object: Any) -> Any:
    """Return the objects of all processes as one list, lists and tuples concatenated; with one process, the object itself.

    >>> gather_object(["a", "b"])
    ['a', 'b']
    """
    return object if _is_alone() else _call(collectives.gather_objects, object, flat=isinstance(object, (list, tuple)))


@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the data of one process on all of them; all pass the same structure, types and shapes."""
    return tensor if _is_alone() else _call(collectives.broadcast, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Write the list of one process into the list that was passed, on all of them, and return it."""
    object_list[:] = _call(collectives.broadcast_objects, object_list, from_process)
    return object_list


@verify_operation
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine tensors, arrays or numbers over the processes (sum, mean, max or min), and multiply by `scale`.

    >>> reduce(torch.ones(2), "sum", scale=2.0)
    tensor([2., 2.])
    """
    return _call(collectives.reduce, tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad tensors along `dim` to the largest size over the processes; nested tensors of torch stay, with a warning.

    >>> pad_across_processes(torch.ones(2, 3), dim=1).shape
    torch.Size([2, 3])
    """
    for leaf in pytree.flatten(tensor):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            warnings.warn(
                "pad_across_processes leaves nested tensors as they are: they have no size along a dimension",
                pytree.CannotPadNestedTensorWarning,
                stacklevel=2,
            )
            return tensor
        if not hasattr(leaf, "shape"):
            raise TypeError(f"pad_across_processes takes nested tensors, but there is a {type(leaf).__name__} in the data")
    return tensor if _is_alone() else _call(collectives.pad, tensor, dim, pad_index, pad_first)


# -- nested data --------------------------------------------------------------------------------------------------------


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first tensor in the data; raise ValueError for empty containers.

    >>> find_batch_size([torch.ones(4, 2)])
    4
    """
    if isinstance(data, (list, tuple, Mapping)) and not len(data):
        raise ValueError(f"this {type(data).__name__} is empty, so its batch size cannot be told")
    return pytree.find_batch_size(data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Join data of the same structure, tensor by tensor along `dim`; a single item is returned as it is, whatever it is.

    >>> concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(1)}])
    {'x': tensor([1., 0.])}
    """
    return data[0] if len(data) == 1 else pytree.concatenate(data, dim)


@contextmanager
def GatheredParameters(  # noqa: N802  # the name that scripts import
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """A block in which parameters that DeepSpeed's ZeRO-3 shards are whole; there are none here, so it does nothing."""
    yield
