"""Operations on nested tensors and collectives. They are Slipstream's; what stands here exists for scripts that build their own on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from accelerate._forwarding import forward_names
from slipstream.errors import DistributedOperationException

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils.constants": "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "accelerate.utils.dataclasses": "DistributedType TensorInformation",
        "accelerate.utils.imports": "is_npu_available is_torch_distributed_available is_torch_xla_available",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """CannotPadNestedTensorWarning ConvertOutputsToFp32 broadcast broadcast_object_list
            concatenate convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size
            find_device gather gather_object gather_tensor_shape get_data_structure get_shape honor_type
            ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information
            is_torch_tensor listify pad_across_processes pad_input_tensors recursively_apply reduce
            send_to_device slice_tensors""",
    },
)
__all__ = sorted(
    ["DistributedOperationException", "GatheredParameters", "TENSOR_INT_TO_DTYPE", "TENSOR_TYPE_TO_INT", "chained_operation"]
    + ["is_torch_xpu_tensor", "verify_operation", *_forwarded]
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


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a collective that a script wrote: in debug mode, the shapes of all processes are compared first.

    Collectives of this package need none: Slipstream compares operation, shapes and types in every call.
    """

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        from accelerate.state import PartialState
        from slipstream.utils import gather_object, get_shape

        state = PartialState()
        if not state.debug or state.num_processes == 1:
            return function(*args, **kwargs)
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        name = f"{function.__module__}.{function.__name__}"
        shapes = gather_object([get_shape(tensor)])
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


@contextmanager
def GatheredParameters(  # noqa: N802  # the name that scripts import
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """A block in which parameters that DeepSpeed's ZeRO-3 shards are whole; there are none here, so it does nothing."""
    yield
