"""A lazy-tensor runtime in the manner of torch's own device modules, so that the device table can ask it the same questions.

The modules of the runtime are passed in; nothing here imports or names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LazyRuntime"]


class LazyRuntime:
    """`is_available`, `device_count` and so on, answered by the runtime and model modules of a lazy-tensor package."""

    def __init__(self, started: Callable[[], bool], runtime: Any, model: Any) -> None:
        self._started = started
        self._runtime = runtime
        self._model = model

    def hardware(self) -> str | None:
        """What the runtime drives: "TPU", "CUDA", "CPU" and so on."""
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
