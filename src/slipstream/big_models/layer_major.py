"""Layer-major execution: many calls of an offloaded model run side by side, so that each block is read once for all of them.

    one by one       call 1: block 1, 2, 3, ...     call 2: block 1, 2, 3, ...     every call reads the whole model
    layer-major      block 1: call 1, 2, ...        block 2: call 1, 2, ...        the model is read once

Each call runs in its own thread and may be any code that calls the model, such as a whole `generate`. One thread runs at a time; at an
offloaded block it waits until the others have come there too. Every call computes what it computes alone, bit for bit. Each thread has
its own random generator state, seeded in the order of the calls.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from slipstream.big_models.weight_store.store import WeightBlock, WeightStore
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
    """`[function(one) for one in inputs]`, with the calls of `model` inside of it side by side; the results in the order of the inputs.

    `lanes` is how many run at a time; None is all of them. Each holds its own activations and caches, so memory for those is needed
    `lanes` times. `progress`: a bar of calls that have ended; None is one on the main process where there is a terminal. For a model
    without offloaded blocks it is a plain loop, and that is said.

    >>> model = torch.nn.Linear(2, 2)
    >>> layer_major(model, lambda x: model(x).shape, [torch.ones(1, 2), torch.ones(3, 2)])
    [torch.Size([1, 2]), torch.Size([3, 2])]
    """
    if lanes is not None and (not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1):
        raise ConfigError(f"lanes={lanes!r} is no number of calls. Write a whole number above zero, or leave it out to run all at a time.")
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
    """The stores that hold offloaded weights of a model, each once."""
    found: dict[int, WeightStore] = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for entry in getattr(hook, "hooks", [hook]):
            weights = getattr(entry, "weights_map", None)
            store = getattr(getattr(weights, "dataset", weights), "store", None)
            if isinstance(store, WeightStore):
                found[id(store)] = store
    return list(found.values())


def _is_main() -> bool:
    runtime = current_or_none()
    return runtime is None or runtime.process.is_main


class LayerMajorRunner:
    """Runs `call(0)` to `call(count - 1)`, up to `width` of them side by side; see above."""

    def __init__(self, call: Callable[[int], Any], count: int, width: int) -> None:
        self._call = call
        self._width = width
        self._left = deque(range(count))
        self.results: list[Any] = [None] * count
        self.finished = 0
        self._lanes: dict[int, _CallThread] = {}
        """By the identity of their threads."""
        self._waiting: list[_CallThread] = []
        self._failed: tuple[int, BaseException] | None = None
        self._at = -1
        self._over = threading.Event()
        self._modes = _ThreadModes()
        self._seeds = torch.randint(2**62, (count,)).tolist()

    def run(self) -> None:
        """Returns when all have ended; raises what the first one to fail raised, after the others have come to a stop."""
        if self._left:
            before = torch.get_rng_state()
            self._waiting = [_CallThread(self, number) for number in range(self._width)]
            for lane in self._waiting:
                lane.thread.start()
            self._pass_on()
            try:
                self._over.wait()
            except BaseException as error:  # an interrupt: lanes stop at their next block
                self.failed(-1, error)
                self._over.wait()
            for lane in list(self._lanes.values()):
                lane.thread.join()
            torch.set_rng_state(before)
        if self._failed is not None:
            number, reason = self._failed
            if number >= 0 and hasattr(reason, "add_note"):
                reason.add_note(f"In layer_major, input {number}.")
            raise reason

    def arrive(self, block: WeightBlock) -> None:
        """Called by a lane (or another thread, which it does not concern) that comes to a block."""
        lane = self._lanes.get(threading.get_ident())
        if lane is None or lane.inside(block):
            return
        lane.block = block.number
        lane.pause()

    def next_input(self) -> int | None:
        """The number of the next call, for a lane that has ended one."""
        return self._left.popleft() if self._left and self._failed is None else None

    def enrol(self, lane: _CallThread) -> None:
        """A lane's thread says who it is."""
        self._lanes[threading.get_ident()] = lane

    def failed(self, number: int, error: BaseException) -> None:
        """A call raised: no further one begins."""
        if self._failed is None:
            self._failed = (number, error)

    def stopped(self) -> bool:
        """Whether lanes have to end where they are."""
        return self._failed is not None

    def wait_for_turn(self, lane: _CallThread) -> None:
        """A lane stands still until it is its turn."""
        self._waiting.append(lane)
        self._pass_on()

    def ended(self) -> None:
        """A lane has nothing left to do."""
        self._pass_on()

    def _pass_on(self) -> None:
        """The next to run: one that waits where the last one was, else at the nearest block after it, from the top again at the end."""
        if not self._waiting:
            self._over.set()
            return
        lane = min(self._waiting, key=lambda entry: (entry.block < self._at, entry.block))
        self._at = lane.block
        self._waiting.remove(lane)
        lane.turn.set()


class _CallStopped(BaseException):
    """Ends a lane because another one failed."""


class _CallThread:
    """One thread and what it is about to do."""

    def __init__(self, lanes: LayerMajorRunner, number: int) -> None:
        self.lanes = lanes
        self.block = -1
        self.turn = threading.Event()
        target = partial(contextvars.copy_context().run, self._run)  # context variables of the caller hold in lanes
        self.thread = threading.Thread(target=target, name=f"slipstream: lane {number}", daemon=True)
        self._random: torch.Tensor | None = None

    def inside(self, block: WeightBlock) -> bool:
        """Whether the lane may go into a block without waiting: it has just been let in there, and it is inside of it still."""
        return self.block == block.number and block.active > 0

    def pause(self) -> None:
        """Let the others run until it is this lane's turn again."""
        self._random = torch.get_rng_state()
        self.turn.clear()
        self.lanes.wait_for_turn(self)
        self.turn.wait()
        if self.lanes.stopped():
            raise _CallStopped
        torch.set_rng_state(self._random)

    def _run(self) -> None:
        lanes = self.lanes
        lanes.enrol(self)
        self.turn.wait()
        with lanes._modes.again():
            while (number := lanes.next_input()) is not None:
                torch.manual_seed(lanes._seeds[number])
                try:
                    lanes.results[number] = lanes._call(number)
                    lanes.finished += 1
                except _CallStopped:
                    break
                except BaseException as error:  # raised in the thread that waits, by `run`
                    lanes.failed(number, error)
        lanes.ended()


class _ThreadModes:
    """What torch keeps per thread, as it is in the thread that made this."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._threads = torch.get_num_threads()
        kinds = ("cpu", *_accelerators())
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]

    def again(self) -> ExitStack:
        """The same in the thread that calls."""
        torch.set_num_threads(self._threads)
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference) if self._inference else torch.set_grad_enabled(self._grad))
        for kind, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        return stack


def _accelerators() -> Sequence[str]:
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return () if present is None else (present.type,)
