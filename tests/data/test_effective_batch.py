"""`effective_batch_size`: the batch of the textbook, on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from slipstream.data.batching import derive
from slipstream.errors import ConfigError


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_the_largest_size_that_fits_and_comes_out_even_is_taken(effective: int, most: int, world: int) -> None:
    if effective % world:
        with pytest.raises(ConfigError, match=f"effective_batch_size={effective} cannot be shared evenly"):
            derive(effective, most, world)
        return
    each, steps = derive(effective, most, world)
    assert each * steps * world == effective
    assert 1 <= each <= most
    assert not any(effective % (larger * world) == 0 for larger in range(each + 1, most + 1))


def test_errors_name_what_would_work() -> None:
    with pytest.raises(ConfigError, match="effective_batch_size=9 or 12"):
        derive(10, 4, 3)
    with pytest.raises(ConfigError, match="effective_batch_size=3,"):
        derive(2, 4, 3)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        prepared(DataLoader(range(4), batch_size=None), effective_batch_size=4)
    with pytest.raises(ConfigError, match="batch sampler of its own"):
        prepared(DataLoader(range(4), batch_sampler=[[0], [1]]), effective_batch_size=4)
    for wrong in (0, True, 2.5):
        with pytest.raises(ConfigError, match="whole number of samples"):
            derive(wrong, 4, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [False, True])
def test_updates_are_of_the_same_samples_on_any_number_of_processes(split: bool) -> None:
    def updates(world: int, size: int) -> list[list[Any]]:
        loaders = ranks_of(
            lambda: DataLoader(range(50), batch_size=size, shuffle=True, collate_fn=keep),
            world,
            effective_batch_size=12,
            split_batches=split,
        )
        steps = loaders[0].steps_per_update
        assert steps is not None
        assert loaders[0].total_batch_size * steps == 12
        batches = [real_samples(*one) for one in rounds(loaders)]
        return [sorted(sum(batches[start : start + steps], [])) for start in range(0, len(batches), steps)]

    expected = updates(1, 12)
    for world in (1, 2, 3, 4):
        for size in (4, 5, 12, 100):
            assert updates(world, size) == expected


def test_a_batch_sampler_of_torch_given_by_hand_has_a_size() -> None:
    loader = prepared(DataLoader(range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, False)), effective_batch_size=4)
    assert (loader.batch_size, loader.steps_per_update) == (2, 2)
    assert prepared(DataLoader(range(8))).steps_per_update is None
