"""Two launched ranks on one terminal show one bar."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import RANKS, script

pytestmark = pytest.mark.launched

SCRIPT = """
import functools, sys, torch
from slipstream import Accelerator
from slipstream.checkpoint import locate, writer
from slipstream.utils import tqdm
for module in (locate, writer):
    module.bar = functools.partial(module.bar, after=0.0)
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(300, 300))
for _ in tqdm(range(3), desc="steps"):
    accelerator.wait_for_everyone()
accelerator.save_state(sys.argv[1])
accelerator.wait_for_everyone()
accelerator.load_state(sys.argv[1])
accelerator.wait_for_everyone()
"""


def test_one_bar_for_all_ranks(script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "distributed"))
    from launching_on_terminal import on_terminal, screen

    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    environment.update(OMP_NUM_THREADS="1", SLIPSTREAM_HOME=str(tmp_path / "home"))
    words = [sys.executable, "-m", "slipstream", "launch", "--cpu", "--num_processes", "2", script(SCRIPT), str(tmp_path / "saved")]
    written = on_terminal(words, environment, tmp_path)
    for desc in ("steps", "saving", "loading"):
        assert written.count(f"{desc}:   0%") == 1, written
    left = [line for line in screen(written) if line]
    assert len(left) == 1, left
    assert left[0].startswith("steps: 100%")  # a bar of the user's stays, as tqdm lets it
