"""Pipelines over accelerators: stages on the devices of their processes, by the memory of these. On the stand-in device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from stage_models import Crossing, Tower, fixed, same

from slipstream import PartialState
from slipstream.inference.pipeline import prepare_pippy

GIVEN = torch.ones(6, 4, dtype=torch.float64)
WIDE = torch.linspace(0, 1, 128).view(2, 64)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_stages_on_devices(ranks: Any, world: int) -> None:
    """Each process holds its stage on its device, and outputs are those of the CPU, on the device; nothing runs on the host."""

    def run() -> tuple[str, set[str], list[tuple[str, bool]], int]:
        plain, device = fixed(Tower()), PartialState().device
        model = prepare_pippy(copy.deepcopy(plain), example_args=(GIVEN,), gather_output=True)
        found, kernels = [], torch.standin.counters().kernels
        for rows, place in ((6, "cpu"), (5, device)):
            given = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
            output = model(given.to(place))
            found.append((str(output.device), same(output, plain(given))))
        places = {str(tensor.device) for tensor in model.parameters()} - {"meta"}
        return str(device), places, found, torch.standin.counters().kernels - kernels

    for rank, (device, places, found, kernels) in enumerate(ranks(world, device="standin").run(run)):
        assert device == f"standin:{rank}"
        assert places == {device}
        assert found == [(device, True)] * 2
        assert kernels > 0


def test_nested_on_devices(ranks: Any) -> None:
    """Inputs and outputs of all kinds, with buffers, at both ends."""

    def run() -> list[bool]:
        plain = fixed(Crossing())
        model = prepare_pippy(copy.deepcopy(plain), example_kwargs=Crossing.arguments(6), gather_output=True)
        return [same(model(**Crossing.arguments(rows)), plain(**Crossing.arguments(rows))) for rows in (6, 3)]

    assert ranks(2, device="standin").run(run) == [[True, True]] * 2


def test_stages_fit_their_devices(ranks: Any) -> None:
    """A smaller device gets a smaller stage, and no device ever holds more than its stage; where none fits, the sizes are named."""

    def run() -> tuple[int, bool, float, str]:
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)])
        rank, given = PartialState().process_index, WIDE
        layer = plain[0].weight.nbytes
        torch.standin.empty_cache()
        torch.standin.set_capacity((3 if rank == 0 else 20) * layer, rank)
        torch.standin.reset_peak_memory_stats(rank)
        try:
            model = prepare_pippy(copy.deepcopy(plain).eval(), example_args=(given,), gather_output=True)
            held = sum(not parameter.is_meta for parameter in model.parameters())
            equal = torch.allclose(model(given).cpu(), plain(given), atol=1e-6)  # rows are computed in pieces
            most = torch.standin.max_memory_allocated(rank) / layer
            torch.standin.set_capacity(4 * layer, rank)
            try:
                prepare_pippy(copy.deepcopy(plain).eval(), example_args=(given,))
                refused = ""
            except ValueError as error:
                refused = str(error)
        finally:
            torch.standin.set_capacity(4 << 30, rank)
        return held, equal, most, refused

    first, second = ranks(2, device="standin").run(run)
    assert (first[0], second[0]) == (2, 4)
    assert first[1]
    assert second[1]
    assert first[2] < 3
    assert second[2] < 5
    assert "do not fit into 2 stages within what is free on the devices (0: " in first[3]
    assert "give them more, or use more processes" in second[3]


def test_mixed_rows_refused(ranks: Any) -> None:
    """A model that mixes the rows of a batch is refused on a device as it is on the CPU."""

    class Mixing(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))

    def run() -> str:
        try:
            prepare_pippy(Mixing(*[torch.nn.Linear(4, 4) for _ in range(3)]), example_args=(torch.ones(6, 4),))
        except ValueError as error:
            return str(error)
        return ""

    assert all("different numbers for a part of the example" in text for text in ranks(2, device="standin").run(run))
