"""`GradientState`: what the loop is doing now, as far as updates care: which loader is being read, and whether this batch ends an update.

Each Accelerator has one of its own. A prepared loader enters itself when an iteration begins and leaves when it ends, however it
ends; loaders nest. The stepping rooms read it and set `sync_gradients`; neither needs to know the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.comm.meter import Meter
from slipstream.config.handlers import GradientAccumulationPlugin

__all__ = ["ActiveLoader", "GradientState", "Shares"]


@dataclass(frozen=True)
class Shares:
    """How one global batch was dealt out to the ranks, where that is not the same full batch for each.

    >>> Shares(given=(2, 1), real=(2, 0), weighed=True, full=4).total
    2
    """

    given: tuple[int, ...]
    """Samples that each rank was handed."""
    real: tuple[int, ...]
    """How many of them count: the others repeat samples, or give a rank something to do that had none left."""
    weighed: bool
    """Whether losses are weighed by `real`, so that the gradient is that of the samples; repeated ones count in full otherwise."""
    full: int
    """Samples in a full global batch."""

    @property
    def total(self) -> int:
        """Samples of this global batch that count."""
        return sum(self.real)


class ActiveLoader(Protocol):
    """What a loader tells of the batch that it handed out last."""

    handed: int
    """How many batches it has handed out in this iteration."""
    end_of_dataloader: bool
    """Whether it was the last one of this iteration, on every rank."""
    remainder: int
    """Samples in the last global batch if it is not full, else 0; -1 as long as that is not known."""

    @property
    def batches_left(self) -> int | None:
        """How many batches follow; None where that is not known yet."""

    @property
    def shares(self) -> Shares | None:
        """How the batch was dealt out; None if every rank has a full share and every sample counts."""

    @property
    def steps_per_update(self) -> int | None:
        """Batches per update that this loader asks for (`effective_batch_size`); None for the usual number."""


class GradientState:
    """The loaders that are being read, and whether the present batch ends an update.

    >>> state = GradientState(GradientAccumulationPlugin(num_steps=4))
    >>> state.num_steps, state.sync_gradients, state.in_dataloader
    (4, True, False)
    """

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.sync_gradients = True
        """Whether gradients of the present batch are reduced and the optimizers step."""
        self.active: ActiveLoader | None = None
        """The innermost loader that is being read."""
        self.nested = False
        """Whether one loader is being read while another is."""
        self.meter: Meter | None = None
        """Where loops on this state mark what they are doing; see `step/ledger/`."""
        self.told: set[str] = set()
        """What was warned of, each thing once."""
        self.listed: set[tuple[str, tuple[str, ...]]] = set()
        """Which lists hold one entry per sample: the line that gathers them, and their place in what it gathers."""
        self._finished: weakref.ref[Any] | None = None
        self._finished_in: tuple[weakref.ref[Any], int] | None = None
        """The loader around the finished one, and what it had handed out then."""
        self._stack: list[weakref.ref[Any]] = []
        self._begun_at: list[int] = []
        """For each loader of the stack: what the one around it had handed out when it began."""

    def __repr__(self) -> str:
        return f"GradientState(sync={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"

    # -- settings -------------------------------------------------------------------------------------------------

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings that were changed."""
        return self.plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Batches per update."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin.adjust_scheduler`."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """See `GradientAccumulationPlugin.sync_with_dataloader`."""
        return self.plugin.sync_with_dataloader

    @property
    def initialized(self) -> bool:
        """True: the object exists."""
        return True

    # -- loaders --------------------------------------------------------------------------------------------------

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being read, or None."""
        return self.active

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that are being read, outermost first."""
        return [loader for loader in (reference() for reference in self._stack) if loader is not None]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is the last one of its loader."""
        return self.active is not None and self.active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the last global batch of the active loader if it is not full; -1 for not known."""
        return -1 if self.active is None else self.active.remainder

    @property
    def finished(self) -> Any:
        """The loader that was read to its end last, for results that are gathered after the loop; None where there is none.

        It counts until another loader begins, or the loader around it hands out another batch.
        """
        if self._finished is None:
            return None
        outer, handed = (None, 0) if self._finished_in is None else (self._finished_in[0](), self._finished_in[1])
        return self._finished() if outer is None or outer.handed == handed else None

    def pacing(self) -> ActiveLoader | None:
        """The loader whose end closes a window: the innermost one that is read inside of one batch of the loaders around it.

        A loader that is read beside another (a second source of data, begun anew as often as it ends) does not set the pace.
        """
        if not self.nested:
            return self.active
        loaders = [reference() for reference in self._stack]
        for place in range(len(loaders) - 1, 0, -1):
            outer = loaders[place - 1]
            if loaders[place] is not None and outer is not None and outer.handed == self._begun_at[place]:
                return loaders[place]
        return loaders[0] if loaders[0] is not None else self.active

    def is_inside(self, is_meant: Callable[[Any], bool]) -> bool:
        """Whether a loader is read inside of one batch of another, as in an evaluation: a run that goes on later will begin it anew.

        One that is read beside another is not, nor one that has handed out a single batch, where the two cannot be told apart.
        """
        loaders = [reference() for reference in self._stack]
        place = next((place for place, one in enumerate(loaders) if one is not None and is_meant(one)), 0)
        inner, outer = (loaders[place], loaders[place - 1]) if place else (None, None)
        return inner is not None and outer is not None and inner.handed > 1 and outer.handed == self._begun_at[place]

    def enter(self, loader: Any) -> None:
        """A loader begins an iteration."""
        self._begun_at.append(0 if self.active is None else self.active.handed)
        self._stack.append(weakref.ref(loader))
        self.active, self.nested = loader, len(self._stack) > 1
        self._finished = None

    def leave(self, loader: Any, *, exhausted: bool) -> None:
        """A loader's iteration ends: at its end, by `break` or by an exception."""
        for place in reversed(range(len(self._stack))):  # a loader may be read inside of itself: the inner one leaves
            if self._stack[place]() is loader:
                del self._stack[place], self._begun_at[place]
                break
        remaining = self.dataloader_references
        self.active, self.nested = remaining[-1] if remaining else None, len(remaining) > 1
        if exhausted:
            self._finished = weakref.ref(loader)
            self._finished_in = None if self.active is None else (weakref.ref(self.active), self.active.handed)
        elif self.finished is loader:
            self._finished = None

    def forget(self) -> None:
        """Drops every loader: nothing here keeps one alive afterwards."""
        self._stack, self._begun_at, self.active, self._finished, self._finished_in = [], [], None, None, None
        self.sync_gradients, self.nested = True, False
