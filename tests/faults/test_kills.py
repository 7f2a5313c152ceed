"""kill -9 while saving: what was committed is there, whole, and a run goes on from it. See `kills.py`; `make soak` does it 1,000 times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills
import pytest


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_kill_loses_checkpoint(ranks: Any, tmp_path: Path, rounds: Callable[..., int]) -> None:
    """No kill loses a checkpoint."""
    count = rounds(ci=40, soak=1000)
    chains = kills.campaign(ranks, tmp_path, count, seed=0, progress=lambda done: None)
    print(kills.table(chains))
    assert sum(chain.tally.kills for chain in chains) == count
    assert [trouble for chain in chains for trouble in chain.tally.troubles] == []
    assert all(chain.tally.saves + chain.tally.torn for chain in chains), "a case never came to save anything"
