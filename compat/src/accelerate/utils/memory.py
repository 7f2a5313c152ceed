"""Names of `accelerate.utils.memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate._forwarding import forward_names

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.imports": """is_cuda_available is_hpu_available is_mlu_available is_mps_available is_musa_available
            is_neuron_available is_npu_available is_sdaa_available is_xpu_available""",
        "slipstream.utils": "clear_device_cache release_memory should_reduce_batch_size",
    },
)
__all__ = ["find_executable_batch_size", *_forwarded]


def _shrink(size: int) -> int:
    """Return the next size to try: nine tenths, which is what scripts written for Accelerate expect."""
    return int(size * 0.9)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    **slipstream: Any,
) -> Callable[..., Any]:
    """Decorate a function so that it is called with smaller batch sizes until it does not run out of memory, the same on every process.

    A size that did not fit is followed by nine tenths of it, or by what `reduce_batch_size_fn` returns. `effective_batch_size` is that of
    Slipstream.

    >>> @find_executable_batch_size(starting_batch_size=10)
    ... def train(batch_size):
    ...     if batch_size > 8:
    ...         raise MemoryError
    ...     return batch_size
    >>> train()
    8
    """
    from slipstream.training.batch_size import find_executable_batch_size as find

    if starting_batch_size == 0 and function is not None:  # Accelerate decorates, and raises where the function is called
        return _without_sizes
    if function is None:
        return lambda decorated: find_executable_batch_size(decorated, starting_batch_size, reduce_batch_size_fn, **slipstream)
    return find(function, starting_batch_size, reduce_batch_size_fn or _shrink, **slipstream)


def _without_sizes(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("find_executable_batch_size(starting_batch_size=0): there is no batch size to try; write one from 1")
