"""A rank that runs out of memory leaves what was alive, and its error is told once, as that of any other failure."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json

import pytest
from launching import command, launch, script

pytestmark = pytest.mark.launched

SCRIPT = """
import sys, torch
from pathlib import Path
from slipstream import PartialState
from slipstream.observability.memory import named_tensors
from slipstream.observability.memory import watch_memory
state = PartialState()
model = torch.nn.Linear(500, 400)
watch_memory(lambda: named_tensors([model]), lambda: Path(sys.argv[1]))
state.wait_for_everyone()
if state.process_index == 1:
    torch.empty(2**50)
state.wait_for_everyone()
"""


def test_oom_rank_with_live_tensors(launch, script, tmp_path):
    """The rank that ran out of memory is named, with the tensors that were alive."""
    folder = tmp_path / "kept"
    finished = launch("--cpu", "--num_processes", "2", script(SCRIPT), str(folder))
    assert finished.code == 1, finished.err
    assert [path.name for path in folder.glob("*")] == ["memory-rank1.json"], finished.err
    found = json.loads((folder / "memory-rank1.json").read_text())
    assert found["rank"] == 1
    assert ["weight", 500 * 400 * 4] in [[entry["name"], entry["bytes"]] for entry in found["alive"]]
    assert "[RANK 1] memory ran out: " in finished.err
    assert finished.err.count("Traceback") == 1
    assert finished.err.count("can't allocate memory") == 1
    assert str(folder / "memory-rank1.json") in finished.err
