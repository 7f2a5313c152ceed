"""What offloading costs, in counts that do not depend on the machine: calls, system calls about pages, copies; and how counts grow."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_models import Block
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slipstream
from slipstream import infer_auto_device_map, load_checkpoint_and_dispatch
from slipstream.big_models.layer_major import find_weight_stores
from slipstream.big_models.weight_store.weights import OffloadedWeightsLoader, PrefixedDataset
from slipstream.checkpoint.model_io import save_model
from slipstream.files import mapped_file
from slipstream.files.mapped_file import MappedFile

PACKAGE = str(Path(slipstream.__file__).parent)
CALLS_OF_A_BLOCK = 15
"""Functions of ours that a forward enters for a block whose weights are in memory; what a block computes is not among them."""


class Tower(nn.Module):
    """Blocks between two layers."""

    def __init__(self, blocks: int, side: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(side, side)
        self.blocks = nn.ModuleList(Block(side) for _ in range(blocks))
        self.tail = nn.Linear(side, side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def on_disk(folder: Path, blocks: int, limit: int | None = None, side: int = 64) -> tuple[nn.Module, nn.Module]:
    """Return a plain tower, and the same with its blocks on the disk."""
    torch.manual_seed(0)
    plain = Tower(blocks, side).eval()
    save_model(plain, folder)
    with torch.device("meta"):
        model = Tower(blocks, side).eval()
    for block, other in zip(model.blocks, plain.blocks, strict=True):
        block.scale = other.scale.clone()
    return plain, load_checkpoint_and_dispatch(model, folder, {"head": "cpu", "blocks": "disk", "tail": "cpu"}, limit=limit)


@contextmanager
def counted_calls(everything: bool = False) -> Iterator[Counter[str]]:
    """Count the functions of ours that are entered, by the path of their module; with `everything` all calls, under one name."""
    found: Counter[str] = Counter()

    def trace(frame: Any, event: str, _: Any) -> None:
        if everything:
            found["calls"] += event in ("call", "c_call")
        elif event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code.co_filename.removeprefix(PACKAGE).lstrip("/")] += 1

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        yield found
    finally:
        sys.setprofile(before)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is asked of the kernel about pages of weight files."""
    found: Counter[str] = Counter()

    def counted(name: str, ask: Callable[..., None]) -> Callable[..., None]:
        def call(file: MappedFile, *span: tuple[int, int]) -> None:
            found[name] += 1
            ask(file, *span)

        return call

    for name in ("request", "wait", "give_back", "check"):
        monkeypatch.setattr(MappedFile, name, counted(name, getattr(MappedFile, name)))
    return found


class Operations(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_forward_in_memory(tmp_path: Path, pages: Counter[str]) -> None:
    """A forward whose pages are in memory enters four modules, asks the kernel once whether the file changed, and copies nothing."""
    plain, model = on_disk(tmp_path, blocks=6)
    x = torch.randn(2, 64)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    pages.clear()
    with counted_calls() as calls:
        model(x)
    modules = {"big_models/hooks/forward_hooks.py", "big_models/hooks/weight_swap.py", "big_models/weight_store/store.py"}
    assert set(calls) == {*modules, "files/mapped_file.py"}
    assert pages == {"check": 1}
    _, longer = on_disk(tmp_path / "longer", blocks=12)
    for _ in range(3):
        longer(x)
    with counted_calls() as more:
        longer(x)
    each = (more.total() - calls.total()) / 6
    assert each <= CALLS_OF_A_BLOCK, f"{each} functions of ours for each block: {more}"
    with Operations() as ours:
        model(x)
    with Operations() as theirs:
        plain(x)
    assert ours.found == theirs.found


@torch.inference_mode()
def test_forward_within_limit(tmp_path: Path, pages: Counter[str]) -> None:
    """Under a limit each block that does not stay is requested, waited for and released once in a forward; others are left alone."""
    plain, model = on_disk(tmp_path, blocks=8, side=256)
    (store,) = find_weight_stores(model)
    size = max(block.size for block in store.blocks)
    plain, model = on_disk(tmp_path / "limited", blocks=8, limit=5 * size, side=256)
    (store,) = find_weight_stores(model)
    x = torch.randn(2, 256)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    pages.clear()
    model(x)
    passing = 8 - len(store.kept)
    assert 0 < passing < 8
    assert pages == {"check": 1, "request": passing, "wait": passing, "give_back": passing}


def test_prefetch_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is requested with one system call for each megabyte, and waited for with one."""
    _, model = on_disk(tmp_path, blocks=2, side=512)
    (store,) = find_weight_stores(model)
    block, asked = store.blocks[0], []
    monkeypatch.setattr("os.posix_fadvise", lambda *given: asked.append(given))
    block.request()
    assert len(block.parts) == 1
    assert len(asked) == math.ceil(block.size / (1 << 20)) > 1


def planning_calls(blocks: int) -> int:
    with torch.device("meta"):
        model = Tower(blocks)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    room = {0: size * 3 // 10, 1: size * 3 // 10, "cpu": size * 2 // 10}
    with counted_calls(everything=True) as calls:
        infer_auto_device_map(model, room, no_split_module_classes=["Block"])
    return calls.total()


def test_planning_grows_linearly() -> None:
    """Twice the modules take twice the calls to plan."""
    few, many = planning_calls(500), planning_calls(1000)
    assert many < 2.1 * few


def loading_calls(folder: Path, blocks: int) -> int:
    save_model(Tower(blocks, 8), folder)
    with torch.device("meta"):
        model = Tower(blocks, 8)
    for block in model.blocks:
        block.scale = torch.ones(8)
    with counted_calls(everything=True) as calls:
        load_checkpoint_and_dispatch(model, folder, {"head": "cpu", "blocks": "disk", "tail": "cpu"})
    return calls.total()


def test_loading_grows_linearly(tmp_path: Path) -> None:
    """Twice the tensors take twice the calls to load and dispatch, and each a bounded number."""
    few, many = loading_calls(tmp_path / "few", 100), loading_calls(tmp_path / "many", 200)
    assert many < 2.1 * few
    assert (many - few) / (100 * 4) < 390


def test_file_is_mapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading and dispatching map a file once, and read its header once."""
    headers, maps = [], []
    read, make = mapped_file.read_layout, MappedFile.__init__
    monkeypatch.setattr(mapped_file, "read_layout", lambda *given: headers.append(given) or read(*given))
    monkeypatch.setattr(MappedFile, "__init__", lambda *given: maps.append(given) or make(*given))
    plain, model = on_disk(tmp_path, blocks=3)
    assert (len(maps), len(headers)) == (1, 1)
    x = torch.randn(2, 64)
    assert torch.equal(model(x), plain(x))


def test_asking_for_a_name_reads_nothing(tmp_path: Path) -> None:
    """Whether the weights of a module have a name is known from the index alone."""
    weights = OffloadedWeightsLoader(index={"block.weight": {"safetensors_file": str(tmp_path / "missing.safetensors")}})
    block = PrefixedDataset(weights, "block.")
    assert "weight" in block
    assert "bias" not in block
