"""A progress bar is shown once, and opens nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.distributed.current import current_or_none
from slipstream.distributed.progress_bar import tqdm
from slipstream.errors import ConfigError


def test_tqdm_on_first_process_only(ranks: Any) -> None:
    """The first process shows the bar before and after a state exists."""

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


def test_tqdm_bool_argument_refused() -> None:
    """A truth value in the first place is refused."""
    with pytest.raises(ConfigError, match="main_process_only=True"):
        tqdm(True, range(3))
