"""Where the local part of a backward pass ends, and communication with nothing left to compute begins.

DistributedDataParallel reduces buckets while the pass computes, and waits for them in a callback of the autograd engine, which runs when
every gradient of this rank is there. Callbacks run in the order in which they were queued, and its own is queued with the last gradient:
so one that is queued with any gradient comes before it, at just the moment that is asked for. It is queued from a hook on one parameter,
the last one that the model registered, whose gradient mostly comes first. That costs two microseconds for a pass. Other ways
cost more or know less: a communication hook takes tens of microseconds for each bucket and the place of the user's own; torch's own
statistics sample every hundredth pass and are read as text; a hook on the loss takes ten microseconds, as it is put on each time. The
last is what is done where a pass has left that parameter out.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from slipstream.comm.meter import LOCAL_END, Meter

__all__ = ["LocalEnd", "Waiting"]

_queue = torch.autograd.Variable._execution_engine.queue_callback


class LocalEnd:
    """Marks the ends of the local parts of backward passes on a meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._was_missed = False
        self._is_awaited = False

    def watch(self, replicated: torch.nn.Module) -> None:
        """Has the passes of a model marked, as long as it is wrapped like this."""
        last = [parameter for parameter in replicated.parameters() if parameter.requires_grad][-1]
        handle = last.register_post_accumulate_grad_hook(self._begun)  # type: ignore[no-untyped-call]
        weakref.finalize(replicated, handle.remove).atexit = False

    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """A pass that reduces gradients."""
        if self._was_missed and loss.requires_grad:
            loss.register_hook(self._begun)  # type: ignore[no-untyped-call]
        self._is_awaited = True
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            self._was_missed |= self._is_awaited
        finally:
            self._is_awaited = False

    def _begun(self, tensor: torch.Tensor) -> None:
        _queue(self._ended)

    def _ended(self) -> None:
        if self._is_awaited:  # and not in a backward that somebody else runs, nor for a second time
            self._is_awaited = False
            meter = self._meter
            meter.add(LOCAL_END)
            meter.add(meter.clock())


class Waiting:
    """A watched section (see `comm/engine.py`) whose time is communication."""

    def __init__(self, watch: AbstractContextManager[Any], meter: Meter) -> None:
        self._watch = watch
        self._meter = meter
        self._begun = False

    def __enter__(self) -> None:
        self._watch.__enter__()
        self._begun = self._meter.wait()

    def __exit__(self, *details: Any) -> None:
        self._meter.end_wait(self._begun)
        self._watch.__exit__(*details)
