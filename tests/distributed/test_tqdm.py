"""A progress bar is shown once, and opens nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.distributed.current import current_or_none
from slipstream.distributed.progress_bar import tqdm
from slipstream.errors import ConfigError


def test_the_first_process_shows_the_bar_before_and_after_a_state_exists(ranks: Any) -> None:
    def run() -> Any:
        from slipstream import PartialState

        before = tqdm(range(2), desc="early")
        opened = current_or_none() is not None or torch.distributed.is_initialized()
        quiet = [before.disable]
        items = list(before)
        PartialState()
        for options in ({}, {"main_process_only": False}, {"disable": True}):
            with tqdm(range(1), **options) as bar:
                quiet.append(bar.disable)
        return items, opened, quiet

    main, other = ranks(2).outcomes(run)
    assert main.value == ([0, 1], False, [False, False, False, True])
    assert other.value == ([0, 1], False, [True, True, False, True])
    assert "early" in main.output
    assert "early" not in other.output


def test_a_truth_value_in_the_first_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="main_process_only=True"):
        tqdm(True, range(3))
