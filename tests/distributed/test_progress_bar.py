"""Bars are seen on a terminal, by the main process alone, once the work takes long, and leave nothing behind."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import tqdm.notebook
import tqdm.std
from launching_on_terminal import on_terminal, screen

from slipstream import Accelerator
from slipstream.big_models import quantize
from slipstream.big_models.quantization_config import TorchaoQuantizationConfig
from slipstream.checkpoint import locate, model_io, remote, writer
from slipstream.checkpoint.model_io import merge_weights, save_model
from slipstream.distributed import progress_bar
from slipstream.distributed.cluster import Process
from slipstream.distributed.progress_bar import ProgressBar, bar, is_interactive, tqdm_class, waiting

MAKER = """
import os, sys
from slipstream.distributed.progress_bar import bar, waiting
with bar(4096, "seen", "B", after=0.0) as shown:
    shown.update(1024)
    shown.update(9999)
with bar(2, "brief", after=1e9) as shown:
    shown.update(2)
with bar(None, "unknown", "B", after=0.0) as shown:
    shown.to(512, 1024)
try:
    with bar(2, "broken", after=0.0) as shown:
        shown.update()
        raise KeyError("x")
except KeyError:
    print("caught", file=sys.stderr)
with waiting("building", after=0.0):
    pass
os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "2", "1"
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
with bar(2, "other rank", after=0.0), waiting("other rank", after=0.0):
    pass
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("size", [(24, 100), (0, 0)], ids=["an ordinary terminal", "one that does not know its size"])
def test_bars_removed_from_terminal(size: tuple[int, int]) -> None:
    """A terminal sees bars and nothing of them stays."""
    written = on_terminal([sys.executable, "-c", MAKER], size=size)
    for seen in ("seen", "unknown", "broken", "building ..."):
        assert seen in written
    for unseen in ("brief", "other rank", "Traceback"):
        assert unseen not in written
    assert [line for line in screen(written) if line] == ["caught"]


def test_no_bars_without_terminal() -> None:
    """Without a terminal nothing is written."""
    done = subprocess.run([sys.executable, "-c", MAKER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "caught\n")


def test_bars_come_after_about_a_second() -> None:
    assert {inspect.signature(entry).parameters["after"].default for entry in (bar, waiting)} == {1.0}


def test_bars_in_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is a place to show bars."""

    class Shell:
        config: ClassVar[dict[str, Any]] = {"IPKernelApp": {}}

    assert not is_interactive()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: Shell))
    assert is_interactive()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without its widgets
    assert tqdm_class() is tqdm.std.tqdm
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert tqdm_class() is tqdm.notebook.tqdm
    monkeypatch.setattr(progress_bar, "this_process", lambda: Process(world_size=2, local_world_size=2))  # started from the notebook
    assert tqdm_class() is tqdm.std.tqdm


# -- what we do that takes long ---------------------------------------------------------------------------------------


class Counting(ProgressBar):
    """A bar that keeps what it was told."""

    def __init__(self, total: int | None, desc: str, unit: str = "it", **options: Any) -> None:
        self.total, self.desc, self.unit, self.options, self.done = total, desc, unit, options, 0

    def update(self, count: int = 1) -> None:
        self.done += count

    def to(self, done: int, total: int | None = None) -> None:
        self.done, self.total = done, total


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Counting]:
    made: list[Counting] = []

    def make(*given: Any, **options: Any) -> Counting:
        made.append(Counting(*given, **options))
        return made[-1]

    for module in (model_io, locate, model_io, quantize, remote, writer):
        monkeypatch.setattr(module, "bar", make)
    return made


def told(bars: list[Counting]) -> list[str]:
    """What was shown, in order; each counted to its end, but for headers, which a bar leaves out."""
    for shown in bars:
        assert shown.total is not None
        assert shown.total <= shown.done <= 1.02 * shown.total, (shown.desc, shown.done, shown.total)
    return [shown.desc for shown in bars]


def test_saving_and_loading_count_every_byte(bars: list[Counting], tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(600, 600))
    for options in ({}, {"async_save": True}, {"dedup": True}):
        accelerator.save_state(tmp_path / "state", **options)
    accelerator.load_state(tmp_path / "state")
    assert told(bars) == ["saving", "saving", "saving", "loading"]
    assert bars[-1].done > 600 * 600 * 4
    bars.clear()
    accelerator.save_state("memory://progress-bars/state")
    accelerator.load_state("memory://progress-bars/state")
    assert told(bars) == ["saving", "fetching", "loading"]
    bars.clear()
    accelerator.save_model(model, tmp_path / "plain", max_shard_size=800_000)
    accelerator.save_model(model, tmp_path / "pickled", safe_serialization=False)
    merge_weights(tmp_path / "plain", tmp_path / "whole")
    assert told(bars) == ["saving", "saving", "merging"]
    assert all(bar.unit == "B" for bar in bars)


def test_quantising_counts_layers(bars: list[Counting]) -> None:
    pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)), torch.nn.Linear(64, 2))
    quantize.load_and_quantize_model(model, TorchaoQuantizationConfig(weight_bits=8))
    assert told(bars) == ["quantising"]
    assert bars[0].total == 3


def test_merge_progress_callback_replaces_bar(bars: list[Counting], tmp_path: Path) -> None:
    """Who asks for the count of a merge gets it in place of the bar."""
    save_model(torch.nn.Linear(60, 60), tmp_path / "plain")
    seen: list[int] = []
    merge_weights(tmp_path / "plain", tmp_path / "whole", progress=lambda done, total: seen.append(done))
    assert seen[-1] == os.path.getsize(tmp_path / "whole" / "model.safetensors")
    assert bars[-1].options == {"wanted": False}
