"""The worker of `mistakes.py` on every rank: each mistake once, made by the last rank, and a correct call after it.

It writes the outcome of each mistake on every rank as JSON: the exception, its message, and the time since the start. The start
is a barrier, so it is the same moment on all ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream import PartialState

Mistake = Callable[[PartialState, bool], None]
"""Called with the state and whether this is the rank that is wrong."""


def shape(state: PartialState, wrong: bool) -> None:
    state.gather(torch.ones(4, 5 if wrong else 3))


def shape_of_equal_size(state: PartialState, wrong: bool) -> None:
    state.reduce(torch.ones(3, 2) if wrong else torch.ones(2, 3))


def dtype(state: PartialState, wrong: bool) -> None:
    state.gather(torch.ones(4, dtype=torch.int32 if wrong else torch.float32))


def operation(state: PartialState, wrong: bool) -> None:
    state.reduce(torch.ones(4)) if wrong else state.gather(torch.ones(4))


def order(state: PartialState, wrong: bool) -> None:
    calls = [lambda: state.gather({"loss": torch.ones(1)}), lambda: state.gather({"accuracy": torch.ones(1)})]
    for call in reversed(calls) if wrong else calls:
        call()


def root(state: PartialState, wrong: bool) -> None:
    state.broadcast(torch.ones(4), from_process=1 if wrong else 0)


def missing_call(state: PartialState, wrong: bool) -> None:
    if not wrong:
        state.gather(torch.ones(4))
    state.wait_for_everyone()


def extra_call(state: PartialState, wrong: bool) -> None:
    if wrong:
        state.gather_object(["more"])
    state.reduce(torch.ones(4))


def reduce_operation(state: PartialState, wrong: bool) -> None:
    state.reduce(torch.ones(4), "max" if wrong else "sum")


def device(state: PartialState, wrong: bool) -> None:
    state.gather(torch.ones(4, device="meta" if wrong else "cpu"))


def structure(state: PartialState, wrong: bool) -> None:
    state.gather({"loss": torch.ones(1), **({} if wrong else {"accuracy": torch.ones(1)})})


def object_size(state: PartialState, wrong: bool) -> None:
    state.broadcast_object_list([None] * (2 if wrong else 3))


MISTAKES: dict[str, Mistake] = {
    "shape": shape,
    "shape of equal size": shape_of_equal_size,
    "dtype": dtype,
    "operation": operation,
    "order": order,
    "root": root,
    "missing call": missing_call,
    "extra call": extra_call,
    "reduce operation": reduce_operation,
    "device": device,
    "structure": structure,
    "object size": object_size,
}


def make(mistake: Mistake, state: PartialState) -> dict[str, Any]:
    """Return the outcome of one mistake on this rank, and whether the group works after it."""
    state.wait_for_everyone()
    start = time.perf_counter()
    try:
        mistake(state, state.is_last_process)
        seen = {"type": "", "message": "nothing was raised"}
    except Exception as error:
        seen = {"type": type(error).__name__, "message": str(error)}
    seconds = time.perf_counter() - start
    everyone = state.gather(torch.tensor([state.process_index])).tolist()
    return {**seen, "seconds": seconds, "works": everyone == list(range(state.num_processes))}


def main(output: Path) -> None:
    state = PartialState(timeout=20)
    seen = {name: make(mistake, state) for name, mistake in MISTAKES.items()}
    found = state.gather_object([seen])
    if state.is_main_process:
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
