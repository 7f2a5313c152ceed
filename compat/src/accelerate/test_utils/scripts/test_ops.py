"""Checks the collective operations of `accelerate.utils` on all processes."""

from __future__ import annotations

import torch

from accelerate import PartialState
from accelerate.test_utils.scripts._checks import expect, run_checks
from accelerate.utils import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce
from accelerate.utils.operations import DistributedOperationException


def _mine(state: PartialState) -> torch.Tensor:
    """Return numbers that no other process has."""
    size = state.num_processes
    return (torch.arange(size) + 1.0 + size * state.process_index).to(state.device)


def check_gather() -> None:
    """gather, also of nested structures"""
    state = PartialState()
    everything = list(range(1, state.num_processes**2 + 1))
    expect(gather(_mine(state)).tolist(), everything, "gather")
    nested = gather({"a": [_mine(state)], "b": (_mine(state), 3)}) if state.num_processes > 1 else {"a": [_mine(state)]}
    expect(nested["a"][0].tolist(), everything, "gather of a dictionary")


def check_gather_object() -> None:
    """gather_object"""
    state = PartialState()
    expect(gather_object([state.process_index]), list(range(state.num_processes)), "gather_object")


def check_broadcast() -> None:
    """broadcast of tensors and objects"""
    state = PartialState()
    expect(broadcast(_mine(state)).tolist(), list(range(1, state.num_processes + 1)), "broadcast")
    words = ["from the main process", 1] if state.is_main_process else ["from another", 2]
    expect(broadcast_object_list(words), ["from the main process", 1], "broadcast_object_list")


def check_padding() -> None:
    """pad_across_processes, at the end and at the start"""
    state = PartialState()
    length = 1 + state.process_index
    tensor = torch.ones(length, device=state.device)
    padded = pad_across_processes(tensor)
    expect(padded.tolist(), [1.0] * length + [0.0] * (state.num_processes - length), "padding at the end")
    first = pad_across_processes(tensor, pad_index=-1, pad_first=True)
    expect(first.tolist(), [-1.0] * (state.num_processes - length) + [1.0] * length, "padding at the start")


def check_reduce() -> None:
    """reduce, by sum and by mean"""
    state = PartialState()
    tensor = torch.full((2,), 1.0 + state.process_index, device=state.device)
    total = sum(range(1, state.num_processes + 1))
    expect(reduce(tensor, "sum").tolist(), [float(total)] * 2, "reduce sum")
    expect(reduce(tensor, "mean").tolist(), [total / state.num_processes] * 2, "reduce mean")
    expect(reduce(tensor, "sum", scale=0.5).tolist(), [total / 2] * 2, "reduce with a scale")


def check_mismatch() -> None:
    """Shapes that differ are an error that names them, not a hang"""
    state = PartialState()
    if state.num_processes == 1:
        return
    tensor = torch.ones(2 if state.is_main_process else 3, device=state.device)
    try:
        with _debugging(state):
            reduce(tensor, "sum")
    except DistributedOperationException as error:
        expect("2" in str(error) and "3" in str(error), True, "the message")
    else:
        raise AssertionError("shapes that differ were not noticed")


class _debugging:
    """Debug mode for the length of a block."""

    def __init__(self, state: PartialState) -> None:
        self.state = state

    def __enter__(self) -> None:
        self.before, self.state.debug = self.state.debug, True

    def __exit__(self, *_: object) -> None:
        self.state.debug = self.before


CHECKS = (check_gather, check_gather_object, check_broadcast, check_padding, check_reduce, check_mismatch)


def main() -> None:
    """Run every check."""
    run_checks(CHECKS)
    PartialState().destroy_process_group()


def _mp_fn(index: int) -> None:
    """Run `main` in a process that a launcher of torch_xla started."""
    main()


if __name__ == "__main__":
    main()
