"""Stand-ins for the torch namespaces of devices that are not here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slipstream.devices.table import Family, family_of


@dataclass
class FakeNamespace:
    """What a device module of torch answers; every call that changes something is noted in `calls`."""

    count: int = 2
    available: bool = True
    initialised: bool = False
    bf16: bool = True
    free: int = 10
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    current: int = 0
    states: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)])

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def is_initialized(self) -> bool:
        return self.initialised

    def is_bf16_supported(self) -> bool:
        return self.bf16

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("manual_seed_all", seed))

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.free, 100

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()


class FakeMetal:
    """The namespace of a family without `is_initialized`, `set_device` and memory pool."""

    def __init__(self) -> None:
        self.state = torch.zeros(4, dtype=torch.uint8)
        self.emptied = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def empty_cache(self) -> None:
        self.emptied += 1

    def recommended_max_memory(self) -> int:
        return 100

    def driver_allocated_memory(self) -> int:
        return 70

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


def fake(kind: str, namespace: Any) -> Family:
    """The row of a family with a fake behind it; plugins count as imported."""
    plugin = "torch" if family_of(kind).plugin is not None else None
    return replace(family_of(kind), module=lambda: namespace, plugin=plugin)
