"""Memory of devices: how much is left, giving back what is cached, and telling an out-of-memory error from others.

Torch is imported when a function needs it. Nothing here talks to other processes: whether several ranks should reduce a batch
size together is decided by its caller.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from slipstream.devices.host import host_memory
from slipstream.devices.table import CPU, FAMILIES, Family, family_of
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    import torch

__all__ = ["available_memory", "clear_device_cache", "convert_bytes", "release_memory", "should_reduce_batch_size"]


def clear_device_cache(garbage_collection: bool = False, *, families: tuple[Family, ...] = FAMILIES) -> None:
    """Give cached but unused device memory back, for every family that this process has used.

    >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for family in families:
        if family is not CPU and family.may_be_used():
            family.ask("empty_cache")


def release_memory(*objects: Any) -> list[None]:
    """Drop references and give the memory behind them back: `model, optimizer = release_memory(model, optimizer)`.

    The caller's own names are what keeps the objects alive, so the result has to be assigned to them.

    >>> a, b = [1], [2]
    >>> a, b = release_memory(a, b)
    >>> a is b is None
    True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def available_memory(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on a device, or None where the device does not tell.

    On the host this is what the kernel can give without swapping, and no more than the control groups around this process allow.

    >>> available_memory("cpu") > 0
    True
    """
    family = family_of(device)
    if family is CPU:
        return host_memory().available
    return _free_on(family, device)


def _free_on(family: Family, device: torch.device | str) -> int | None:
    namespace = family.module()
    if hasattr(namespace, "mem_get_info"):
        return int(namespace.mem_get_info(device)[0])
    if hasattr(namespace, "recommended_max_memory"):  # memory shared with the host: there is a budget, not a pool
        return max(0, int(namespace.recommended_max_memory()) - int(namespace.driver_allocated_memory()))
    return None


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out, so that a smaller batch may fit.

    The type decides where it can; the texts are for allocators that raise a plain RuntimeError. An error of this library is none, also
    where it quotes the error of another process: memory did not run out here.

    >>> should_reduce_batch_size(MemoryError()), should_reduce_batch_size(ValueError("out of memory"))
    (True, False)
    """
    import torch

    if isinstance(exception, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or isinstance(exception, SlipstreamError):
        return False
    text = str(exception)
    return any(part in text for family in FAMILIES for part in family.out_of_memory)


def convert_bytes(size: float) -> str:
    """A number of bytes in words.

    >>> convert_bytes(1536), convert_bytes(3 * 1024**3)
    ('1.5 KB', '3.0 GB')
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"
