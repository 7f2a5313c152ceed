"""Random states of rank 0 reach all processes, in one call; what is not here is an error on all of them."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from slipstream import PartialState
from slipstream.devices.table import RNGType
from slipstream.distributed.functional import synchronize_rng_state, synchronize_rng_states
from slipstream.errors import ConfigError, MismatchError


def draw(generator: torch.Generator) -> dict[str, float]:
    return {
        "python": random.random(),
        "numpy": float(numpy.random.rand()),
        "torch": torch.rand(()).item(),
        "generator": torch.rand((), generator=generator).item(),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_named_states_synchronized(ranks: Any, world: int) -> None:
    """The states that are named are those of rank 0 and the others stay."""

    def run() -> Any:
        state = PartialState()
        found = {}
        for kinds in (["torch"], ["python", "numpy"], [RNGType.GENERATOR], ["torch", "generator", RNGType.PYTHON, "numpy", "torch"]):
            seed = 10 + state.process_index
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(seed)
            before = state._channel().sequence  # type: ignore[attr-defined]
            synchronize_rng_states(kinds, generator)
            calls = state._channel().sequence - before  # type: ignore[attr-defined]
            found[tuple(str(kind) for kind in kinds)] = (draw(generator), calls)
        return found

    by_rank = ranks(world).run(run)
    for kinds, (drawn, calls) in by_rank[0].items():
        assert calls == 1
        for other in by_rank[1:]:
            assert {name for name, value in drawn.items() if other[kinds][0][name] == value} == set(kinds)


def test_single_state_defaults_to_torch(ranks: Any) -> None:
    """One state and torch as the usual one."""

    def run() -> tuple[float, float]:
        state = PartialState()
        torch.manual_seed(state.process_index)
        synchronize_rng_state()
        first = torch.rand(()).item()
        generator = torch.Generator().manual_seed(state.process_index)
        synchronize_rng_state(RNGType.GENERATOR, generator)
        return first, torch.rand((), generator=generator).item()

    first, second = ranks(2).run(run)
    assert first == second


@pytest.mark.parametrize(
    ("kinds", "complaint"),
    [
        (["dice"], "'dice' is not one of python, numpy, torch, "),
        (["generator"], "asked for without one"),
        ([RNGType.XPU], "no such device"),
    ],
)
def test_unknown_state_refused(kinds: Any, complaint: str) -> None:
    """What is not here is refused with one process too."""
    with pytest.raises(ConfigError, match=complaint):
        synchronize_rng_states(kinds)


def test_one_process_keeps_its_states() -> None:
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    synchronize_rng_states(["torch", "python", "numpy"])
    assert torch.equal(torch.get_rng_state(), expected)


def test_rng_mismatch_reaches_all(ranks: Any) -> None:
    """A refusal of one rank and different kinds reach all."""

    def run() -> list[str]:
        state = PartialState()
        generator = torch.Generator() if state.is_main_process else None
        kinds = []
        with pytest.raises((ConfigError, MismatchError)) as caught:
            synchronize_rng_state("generator", generator)
        kinds.append(type(caught.value).__name__)
        with pytest.raises(MismatchError, match=r"synchronize_rng_states\(python\)"):
            synchronize_rng_state("torch" if state.is_main_process else "python")
        return [*kinds, *state.gather(["works"])]

    assert ranks(2).run(run) == [["MismatchError", "works", "works"]] * 2
