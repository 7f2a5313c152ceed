"""`GradientState`: where a loop is in its loaders and in its accumulation window, shared by everything in the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from slipstream.config.handlers import GradientAccumulationPlugin
from slipstream.distributed.gradient_state import GradientState as _GradientState, LoaderPass

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

    @property
    def num_steps(self) -> int:
        """The number of batches of one update; 1 after a reset, for the Accelerators that were made before and end later."""
        return super().num_steps if self.initialized else 1

    @classmethod
    def _reset_state(cls) -> None:
        """Forget everything that is shared."""
        cls._shared_state.clear()

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether the present batch ends an update. transformers' Trainer counts its batches itself and calls this."""
        self.sync_gradients = sync_gradients
        if self.set_closing is not None:
            self.set_closing(sync_gradients)

    def _add_dataloader(self, dataloader: Any) -> None:
        """Begin a pass over a loader that a script wrote with `DataLoaderStateMixin`."""
        self.enter(LoaderPass(), dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        """End the innermost pass over a loader."""
        for loader_pass in reversed(self._stack):
            if loader_pass.loader() is dataloader:
                self.leave(loader_pass, exhausted=False)
                return

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being read, outermost first, after a None for no loader, as in Accelerate."""
        return [None, *super().dataloader_references]

    @dataloader_references.setter
    def dataloader_references(self, references: list[Any]) -> None:
        wanted = [loader for loader in references if loader is not None]
        for loader in super().dataloader_references:
            self._remove_dataloader(loader)
        for loader in wanted:
            self._add_dataloader(loader)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: gradients are reduced by the strategy, and not by torch-xla."""
        return bool(self.__dict__.get("_is_xla_gradients_synced", False))

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self.__dict__["_is_xla_gradients_synced"] = value
