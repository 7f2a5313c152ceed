"""Copies of offloaded blocks to an accelerator: when they run, how many there are, and what they need. On the stand-in device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from offloaded_models import SIDE, stack

from slipstream import cpu_offload


@pytest.fixture
def device(ranks: Any) -> Any:
    """One process with the devices."""
    return ranks(1, device="standin")


def test_next_block_copied_while_one_runs(device: Any) -> None:
    """The copy of a block begins before the kernels of the block before it end, and ends before its own begin."""

    def run() -> tuple[list[bool], list[bool], set[int], bool]:
        plain = stack()
        x = torch.ones(2, SIDE)
        wanted = plain(x).detach()
        model = cpu_offload(copy.deepcopy(plain), execution_device=0)
        here = x.to("standin:0")
        with torch.no_grad():
            model(here)  # from now on the order of the blocks is known
            torch.standin.synchronize()
            torch.standin.set_delay(copies=0.02, kernels=0.01)
            torch.standin.start_log()
            found = model(here)
            torch.standin.stop_log()
            torch.standin.set_delay(copies=0, kernels=0)
        log = torch.standin.log()
        copies = [entry for entry in log if entry.kind == "to_device"]
        kernels = [entry for entry in log if entry.kind == "kernel" and entry.name == "aten::mm"]
        assert len(kernels) == len(plain)
        # The first block came at the end of the pass before: what is copied here are the second one, ..., and the first one again.
        overlaps = [after.begin < kernel.end for kernel, after in zip(kernels, copies, strict=False)]
        in_time = [before.end <= kernel.begin for kernel, before in zip(kernels[1:], copies, strict=False)]
        streams = {entry.stream for entry in copies} & {entry.stream for entry in kernels}
        return overlaps, in_time, streams, torch.equal(found.cpu(), wanted)

    overlaps, in_time, streams, equal = device.run(run)[0]
    assert len(overlaps) >= 4
    assert all(overlaps), overlaps
    assert len(in_time) == 4
    assert equal
    assert not streams
