"""`torch.standin`: what torch's own device modules (`torch.cuda`, `torch.xpu`) offer, for the stand-in device, and what tests ask of it.

Import it through `slipstream.testing.standin.enable()`, which makes the device known to torch first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.testing.standin.extension import load_extension

__all__ = [
    "Counters", "DeviceProperties", "Event", "LogEntry", "Stream",
    "counters", "current_device", "current_stream", "default_generators", "default_stream",
    "device", "device_count", "device_of", "empty_cache", "get_amp_supported_dtype", "get_device_capability", "get_device_name",
    "get_device_properties", "get_rng_state", "get_rng_state_all", "init", "initial_seed", "is_available", "is_bf16_supported",
    "is_initialized", "log", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "memory_stats", "reset", "reset_counters", "reset_peak_memory_stats", "seed",
    "seed_all", "set_capacity",
    "set_delay", "set_device", "set_rng_state", "set_rng_state_all", "set_stream", "start_log", "stop_log", "stream", "synchronize",
]

_extension = load_extension()
# torch internals: the number of the device type, for streams by their number (torch 2.13; tests/testing/test_standin.py notices).
_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
_FIRST_DELAYS = _extension.delays()
_CAPACITY = int(_extension.memory_stats(0)["capacity"]) if _extension.device_count() else 0


def _index(which: Any) -> int:
    """Return the number of a device given as a number, a text, a torch.device or nothing (the current one)."""
    if which is None:
        return current_device()
    if isinstance(which, int):
        index = which
    else:
        place = torch.device(which)
        if place.type != "standin":
            raise ValueError(f"{which!r} is not a stand-in device; write 'standin:0', a number, or nothing for the current one")
        index = current_device() if place.index is None else place.index
    _extension.check_device(index)
    return index


# --- devices -----------------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices that this process sees."""
    return int(_extension.device_count())


def current_device() -> int:
    """Return the number of this thread's current device."""
    return int(_extension.current_device())


def set_device(device: Any) -> None:
    """Make a device this thread's current one."""
    _extension.exchange_device(_index(device))


def init() -> None:
    """Start the device; using it does the same."""
    _extension.init()


def is_initialized() -> bool:
    """Return whether this process has used a device."""
    return bool(_extension.is_initialized())


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch's activation checkpointing asks for it, and keeps random states only where it is true
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_in_bad_fork() -> bool:
    return bool(_extension.is_in_bad_fork())


def _lazy_init() -> None:
    init()


def get_device_name(device: Any = None) -> str:
    """Return the name of a device."""
    return f"stand-in accelerator {_index(device)}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return a version, as torch.cuda does."""
    _index(device)
    return (1, 0)


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is."""

    name: str
    total_memory: int


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Return the name and the memory of a device."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1])


class device:  # noqa: N801 (the name that torch's device modules have)
    """Makes a device the current one within a block."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)
        self.previous = -1

    def __enter__(self) -> None:
        self.previous = int(_extension.exchange_device(self.index))

    def __exit__(self, *_: object) -> None:
        _extension.exchange_device(self.previous)


class device_of(device):  # noqa: N801
    """Makes the device of a tensor the current one within a block; does nothing for tensors elsewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == "standin" else None)


def _exchange_device(index: int) -> int:
    return int(_extension.exchange_device(index)) if index >= 0 else -1


def _maybe_exchange_device(index: int) -> int:
    return _exchange_device(index)


# --- streams and events ------------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """A queue of work on a device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device("standin", _index(device)), priority=priority)

    @property
    def standin_stream(self) -> int:
        """The number of the stream."""
        return int(self.stream_id)


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "standin"


class Event(torch.Event, metaclass=_EventType):
    """A point in the work of a stream. What is made is a `torch.Event`: that measures no time to objects of a class derived from it."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        return torch.Event(device="standin", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: Any = None) -> torch.Stream:
    """Return this thread's current stream of a device."""
    return torch.accelerator.current_stream(torch.device("standin", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream that work goes to unless another was chosen."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream this thread's current one."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work within the block goes to a stream; None changes nothing."""
    if stream is None:
        yield
        return
    index = stream.device.index
    with device(index):
        before = current_stream(index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def synchronize(device: Any = None) -> None:
    """Wait until every stream of a device is idle."""
    _extension.synchronize(_index(device))


# --- memory ------------------------------------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the figures of the allocator, by the names that torch.cuda uses."""
    figures = _extension.memory_stats(_index(device))
    return {
        "allocated_bytes.all.current": figures["allocated"],
        "allocated_bytes.all.peak": figures["peak_allocated"],
        "reserved_bytes.all.current": figures["reserved"],
        "reserved_bytes.all.peak": figures["peak_reserved"],
        "num_alloc_retries": figures["retries"],
        "num_ooms": figures["failures"],
    }


def memory_allocated(device: Any = None) -> int:
    """Return the bytes that tensors have."""
    return int(_extension.memory_stats(_index(device))["allocated"])


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that tensors had."""
    return int(_extension.memory_stats(_index(device))["peak_allocated"])


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that tensors have or had, and that were not given back."""
    return int(_extension.memory_stats(_index(device))["reserved"])


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes that were reserved."""
    return int(_extension.memory_stats(_index(device))["peak_reserved"])


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free bytes and the capacity of a device."""
    figures = _extension.memory_stats(_index(device))
    return max(0, figures["capacity"] - figures["reserved"]), int(figures["capacity"])


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peaks begin at what is in use now."""
    _extension.reset_peak_memory(_index(device))


def empty_cache() -> None:
    """Give memory that no tensor uses back."""
    _extension.empty_cache()


def set_capacity(capacity: int, device: Any = None) -> None:
    """Set the bytes that a device has; what is in use stays."""
    _extension.set_capacity(_index(device), capacity)


# --- random numbers ------------------------------------------------------------------------------------------------------------

default_generators = tuple(_extension.default_generator(index) for index in range(device_count()))


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> None:
    """Seed the current device by chance."""
    default_generators[current_device()].seed()


def seed_all() -> None:
    """Seed every device with one number found by chance."""
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    """Return the seed of the current device."""
    return int(default_generators[current_device()].initial_seed())


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the random state of a device."""
    state: torch.Tensor = default_generators[_index(device)].get_state()
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the random state of every device."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the random state of a device."""
    default_generators[_index(device)].set_state(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the random state of every device."""
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# --- precision -----------------------------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast takes."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the device computes in bfloat16."""
    return True


# --- for tests -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """What has happened since `reset_counters`."""

    copies_to_device: int
    copies_to_host: int
    bytes_to_device: int
    bytes_to_host: int
    synchronizations: int
    """How often the host waited: synchronize, blocking copies, `.item()`, results whose shape depends on values."""
    kernels: int
    collectives: int


def counters() -> Counters:
    """Return the counters."""
    return Counters(**_extension.counters())


def reset_counters() -> None:
    """Set the counters to zero."""
    _extension.reset_counters()


@dataclass(frozen=True)
class LogEntry:
    """One piece of work: when it ran, in seconds of one clock, and on which stream."""

    kind: str
    """kernel, to_device, to_host or collective"""
    name: str
    device: int
    stream: int
    bytes: int
    begin: float
    end: float


def start_log() -> None:
    """Record from now on what runs."""
    _extension.take_log()
    _extension.set_logging(True)


def stop_log() -> None:
    """Record no longer."""
    _extension.set_logging(False)


def log() -> list[LogEntry]:
    """Return what ran since the last call, in the order in which it ended."""
    return [LogEntry(*entry) for entry in _extension.take_log()]


def reset() -> None:
    """Take back what tests set: delays, capacities, counters, the log, peaks."""
    _extension.set_delay(*_FIRST_DELAYS)
    _extension.set_logging(False)
    _extension.take_log()
    reset_counters()
    if is_initialized():
        for index in range(device_count()):
            _extension.set_capacity(index, _CAPACITY)
            _extension.reset_peak_memory(index)


def set_delay(copies: float | None = None, kernels: float | None = None) -> None:
    """Make asynchronous copies and collectives, or kernels, wait so many seconds before they run; None keeps the present value."""
    for name, seconds in (("copies", copies), ("kernels", kernels)):
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise ValueError(f"{name}={seconds!r} is no delay; write seconds from 0")
    now_copies, now_kernels = _extension.delays()
    _extension.set_delay(now_copies if copies is None else copies, now_kernels if kernels is None else kernels)
