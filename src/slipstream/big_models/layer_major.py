"""Layer-major execution: many calls of an offloaded model run side by side, so that each block is read once for all of them.

    one by one       call 1: block 1, 2, 3, ...     call 2: block 1, 2, 3, ...     every call reads the whole model
    layer-major      block 1: call 1, 2, ...        block 2: call 1, 2, ...        the model is read once

Each call runs in its own thread and may be any code that calls the model, such as a whole `generate`. One thread runs at a time; at an
offloaded block it waits until the others have reached that block too. Results are bitwise equal to those of separate calls. Each thread
has its own random generator state, seeded in the order of the calls.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from slipstream.big_models.weight_store.store import WeightBlock, WeightStore
from slipstream.devices import rng
from slipstream.distributed.current import current_or_none
from slipstream.distributed.progress_bar import show_progress
from slipstream.errors import ConfigError, StateError
from slipstream.logging import get_logger

__all__ = ["LayerMajorRunner", "layer_major", "find_weight_stores"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def layer_major(
    model: torch.nn.Module,
    function: Callable[[Item], Result],
    inputs: Iterable[Item],
    *,
    lanes: int | None = None,
    progress: bool | None = None,
) -> list[Result]:
    """Return `[function(item) for item in inputs]`, running the calls of `model` block by block for all inputs.

    `lanes` is the number of concurrent calls; None means all. Each holds its own activations and caches, so those take `lanes` times the
    memory. `progress` shows a bar of finished calls; None shows it on the main process if there is a terminal. For a model without
    offloaded blocks this is a plain loop, which is logged.

    >>> model = torch.nn.Linear(2, 2)
    >>> layer_major(model, lambda x: model(x).shape, [torch.ones(1, 2), torch.ones(3, 2)])
    [torch.Size([1, 2]), torch.Size([3, 2])]
    """
    if lanes is not None and (not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1):
        raise ConfigError(f"lanes={lanes!r} is not a number of calls. Write a whole number above zero, or leave it out to run all at once.")
    items = list(inputs)
    stores = find_weight_stores(model)
    if not stores:
        get_logger(__name__).info(f"{type(model).__name__} has no offloaded blocks: layer_major runs the calls one after the other.")
        return [function(item) for item in items]
    if any(store.turns is not None for store in stores):
        raise StateError("layer_major was called while another layer_major runs the same model. Put all inputs into one call.")
    turns = LayerMajorRunner(lambda number: function(items[number]), len(items), min(lanes or len(items), len(items)))
    for store in stores:
        store.turns = turns
    try:
        with show_progress(progress, is_main=_is_main(), finished=lambda: turns.finished, total=len(items), before=0):
            turns.run()
    finally:
        for store in stores:
            store.turns = None
    return turns.results


def find_weight_stores(model: torch.nn.Module) -> list[WeightStore]:
    """Return the stores that hold offloaded weights of a model, each once."""
    found: dict[int, WeightStore] = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for inner in getattr(hook, "hooks", [hook]):
            weights = getattr(inner, "weights_map", None)
            store = getattr(getattr(weights, "dataset", weights), "store", None)
            if isinstance(store, WeightStore):
                found[id(store)] = store
    return list(found.values())


def _is_main() -> bool:
    runtime = current_or_none()
    return runtime is None or runtime.process.is_main


class LayerMajorRunner:
    """Runs `call(0)` to `call(count - 1)`, up to `width` of them concurrently."""

    def __init__(self, call: Callable[[int], Any], count: int, width: int) -> None:
        self.call = call
        self._width = width
        self.left = deque(range(count))
        self.results: list[Any] = [None] * count
        self.finished = 0
        self.lanes: dict[int, _CallThread] = {}
        """By the identity of their threads."""
        self.waiting: list[_CallThread] = []
        self.failure: tuple[int, BaseException] | None = None
        self._at = -1
        self._over = threading.Event()
        self.modes = _ThreadModes()
        self.seeds = torch.randint(2**62, (count,)).tolist()

    def run(self) -> None:
        """Run all calls; re-raise the first error after the others have stopped."""
        if self.left:
            before = rng.capture(_random_kinds())
            self.waiting = [_CallThread(self, number) for number in range(self._width)]
            for lane in self.waiting:
                lane.thread.start()
            self.run_next()
            try:
                self._over.wait()
            except BaseException as error:  # an interrupt: threads stop at their next block
                self.fail(-1, error)
                self._over.wait()
            for lane in list(self.lanes.values()):
                lane.thread.join()
            rng.restore(before)
        if self.failure is not None:
            number, reason = self.failure
            if number >= 0 and hasattr(reason, "add_note"):
                reason.add_note(f"In layer_major, input {number}.")
            raise reason

    def arrive(self, block: WeightBlock) -> None:
        """Pause the calling thread at a block until it is its turn; threads that are not lanes pass."""
        lane = self.lanes.get(threading.get_ident())
        if lane is None or lane.inside(block):
            return
        lane.block = block.number
        lane.pause()

    def fail(self, number: int, error: BaseException) -> None:
        """Record that a call raised: no further call starts, and the others stop at their next block."""
        if self.failure is None:
            self.failure = (number, error)

    def run_next(self) -> None:
        """Wake a thread that waits at the current block, else at the nearest one after it, starting over after the last block."""
        if not self.waiting:
            self._over.set()
            return
        lane = min(self.waiting, key=lambda lane: (lane.block < self._at, lane.block))
        self._at = lane.block
        self.waiting.remove(lane)
        lane.turn.set()


class _CallStopped(BaseException):
    """Ends a thread because the call of another thread failed."""


class _CallThread:
    """A thread that runs calls, one after the other (a lane)."""

    def __init__(self, runner: LayerMajorRunner, number: int) -> None:
        self.runner = runner
        self.block = -1
        self.turn = threading.Event()
        target = partial(contextvars.copy_context().run, self._run)  # lanes see the context variables of the caller
        self.thread = threading.Thread(target=target, name=f"slipstream: lane {number}", daemon=True)
        self._random: dict[str, Any] = {}

    def inside(self, block: WeightBlock) -> bool:
        """Return whether the thread is already inside this block, so that it need not wait."""
        return self.block == block.number and block.active > 0

    def pause(self) -> None:
        """Let the others run until it is this thread's turn again."""
        self._random = rng.capture(_random_kinds())
        self.turn.clear()
        self.runner.waiting.append(self)
        self.runner.run_next()
        self.turn.wait()
        if self.runner.failure is not None:
            raise _CallStopped
        rng.restore(self._random)

    def _run(self) -> None:
        runner = self.runner
        runner.lanes[threading.get_ident()] = self
        self.turn.wait()
        with runner.modes.enter():
            while runner.left and runner.failure is None:
                number = runner.left.popleft()
                torch.manual_seed(runner.seeds[number])
                try:
                    runner.results[number] = runner.call(number)
                    runner.finished += 1
                except _CallStopped:
                    break
                except BaseException as error:  # raised in the thread that waits, by `run`
                    runner.fail(number, error)
        runner.run_next()


def _random_kinds() -> list[str]:
    """Return the kinds of random state of torch: that of the host, and those of devices that were used."""
    return [kind for kind in rng.default_kinds() if kind not in ("python", "numpy")]


class _ThreadModes:
    """The modes that torch keeps per thread, as they are in the thread that made this: the current device and stream are among them."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._threads = torch.get_num_threads()
        present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._stream = None if present is None else torch.accelerator.current_stream()
        kinds = ("cpu",) if present is None else ("cpu", present.type)
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]

    def enter(self) -> ExitStack:
        """Set the same modes in the calling thread."""
        torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)  # and its device
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference) if self._inference else torch.set_grad_enabled(self._grad))
        for kind, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        return stack
