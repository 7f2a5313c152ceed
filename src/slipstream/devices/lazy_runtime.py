"""A device namespace over a runtime that has no module of its own in torch.

The device table puts it in the row of such a family; callers ask it as they ask `torch.<family>`. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LazyRuntime"]


class LazyRuntime:
    """A device namespace (`is_available`, `device_count`, ...) over the runtime and model modules of torch_xla."""

    def __init__(self, started: Callable[[], bool], runtime: Any, model: Any) -> None:
        self._started = started
        self._runtime = runtime
        self._model = model

    def hardware(self) -> str | None:
        """Return what the runtime uses: "TPU", "CUDA", "CPU" and so on."""
        name = self._runtime.device_type()
        return None if name is None else str(name)

    def is_available(self) -> bool:
        return self.hardware() not in (None, "CPU")

    def device_count(self) -> int:
        return int(self._runtime.addressable_device_count())

    def is_initialized(self) -> bool:
        return bool(self._started())

    def manual_seed_all(self, seed: int) -> None:
        self._model.set_rng_state(seed)

    def get_rng_state(self) -> Any:
        import torch

        return torch.tensor(self._model.get_rng_state())

    def set_rng_state(self, state: Any) -> None:
        self._model.set_rng_state(int(state))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        info = self._model.get_memory_info(device)
        return int(info["bytes_limit"]) - int(info["bytes_used"]), int(info["bytes_limit"])
