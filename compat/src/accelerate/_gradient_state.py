"""`GradientState`: where a loop is in its loaders and in its accumulation window, shared by everything in the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from slipstream.config.handlers import GradientAccumulationPlugin
from slipstream.distributed.gradient_state import GradientState as _GradientState

__all__ = ["GradientState"]


class GradientState(_GradientState):
    """The state of Slipstream, with one dictionary for all objects: `GradientState()` anywhere is the state of the running loop."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            super().__init__(gradient_accumulation_plugin)
            self.set_closing: Callable[[bool], None] | None = None
            """Tells the models and optimizers of the Accelerator whether the present batch ends an update; set by the Accelerator."""
        elif gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    @property
    def initialized(self) -> bool:
        """Whether the shared dictionary is filled."""
        return "plugin" in self.__dict__

    @classmethod
    def _reset_state(cls) -> None:
        """Forget everything that is shared."""
        cls._shared_state.clear()

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether the present batch ends an update. transformers' Trainer counts its batches itself and calls this."""
        self.sync_gradients = sync_gradients
        if self.set_closing is not None:
            self.set_closing(sync_gradients)
