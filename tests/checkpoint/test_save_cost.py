"""What a save and a load cost, in things that can be counted: files, syncs, bytes, copies. Times are in `benchmarks/checkpoints.py`."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Accelerator
from slipstream.checkpoint.restore import _with_ranges
from slipstream.files import disk as disk_module
from slipstream.files.disk import Disk

SMALL = 64
FILES = ["MANIFEST.json", "model.safetensors", "optimizer.safetensors", "rank_0.safetensors", "training.json"]


class CountedDisk(Disk):
    """Counts the system calls of a save, and how many syncs follow each other instead of running side by side."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes = 0
        self.most_at_once = 0
        self._syncing = 0
        self._lock = threading.Lock()

    def _count(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1

    def _open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        self._count("open")
        return super()._open(path, flags, mode)

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = super()._pwrite(fd, data, offset)
        self._count("write")
        self.bytes += count
        return count

    def _start_writeback(self, fd: int) -> None:
        self._count("start")
        super()._start_writeback(fd)

    def _fsync(self, fd: int) -> None:
        self._count("sync")
        with self._lock:
            self._syncing += 1
            self.most_at_once = max(self.most_at_once, self._syncing)
        time.sleep(0.05)
        with self._lock:
            self._syncing -= 1

    def _close(self, fd: int) -> None:
        self._count("close")
        super()._close(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._count("rename")
        super().rename(old, new)


def trained() -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(SMALL, SMALL)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, SMALL)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def test_small_save(tmp_path: Path) -> None:
    """Five files and seven syncs: of files and their folder side by side, of the name last; no byte is written twice.

    The disk begins with each file when it is written, and not when it is synced.
    """
    accelerator, *_ = trained()
    accelerator._saver.disk = disk = CountedDisk()
    accelerator.save_state(tmp_path / "first")
    accelerator.end_training()
    assert sorted(os.listdir(tmp_path / "first")) == FILES
    assert os.listdir(tmp_path) == ["first"]
    size = sum(path.stat().st_size for path in (tmp_path / "first").iterdir())
    lock = disk.bytes - size  # the lock file has process id and host
    assert 0 < lock < 300
    assert disk.calls == {"open": 8, "write": disk.calls["write"], "start": 5, "sync": 7, "close": 8, "rename": 1}
    assert disk.calls["write"] < 30
    assert disk.most_at_once >= 3


def test_many_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are open until they are synced, but never more than a few dozen."""
    monkeypatch.setattr(disk_module, "_MOST_UNSYNCED", 5)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.ModuleList(torch.nn.Linear(SMALL, SMALL, bias=False) for _ in range(23)))
    accelerator._saver.disk = disk = CountedDisk()
    most = 0
    original = Disk.write_unsynced

    def write_unsynced(self: Disk, *arguments: Any) -> Any:
        nonlocal most
        most = max(most, disk.calls["open"] - disk.calls["close"])
        return original(self, *arguments)

    monkeypatch.setattr(Disk, "write_unsynced", write_unsynced)
    accelerator.save_state(tmp_path / "first", max_shard_size=SMALL * SMALL * 4)
    files = os.listdir(tmp_path / "first")
    assert len([name for name in files if name.startswith("model-")]) == 23
    assert disk.calls["sync"] == len(files) + 2
    assert most <= 5 + 1  # and the lock
    accelerator.end_training()


def test_folder_of_many_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save reads the names beside its checkpoint twice: before it begins, for leftovers, and at its end, for files of other ranks."""
    read: list[Path] = []
    for name in ("scandir", "listdir"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path=".", original=original: (read.append(Path(path)), original(path))[1])
    accelerator, *_ = trained()
    accelerator.save_state(tmp_path / "first")
    assert read.count(tmp_path) == 2
    accelerator.end_training()


def test_large_file_synced_with_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that goes past the page cache is synced once, at the end, with all others."""
    monkeypatch.setattr(disk_module, "SMALLEST", 10_000)
    accelerator, *_ = trained()
    accelerator._saver.disk = disk = CountedDisk()
    accelerator.save_state(tmp_path / "first")
    assert (tmp_path / "first" / "optimizer.safetensors").stat().st_size > 10_000
    assert disk.calls["sync"] == 7
    assert disk.most_at_once >= 3
    accelerator.end_training()


def test_failed_save_leaves_no_file_open(tmp_path: Path) -> None:
    """Small files that were written but not synced are closed when a save fails."""

    class Full(CountedDisk):
        def write_unsynced(self, path: Path, chunks: Any, size: int) -> Any:
            if path.name == "training.json":
                raise OSError(28, "No space left on device", str(path))
            return super().write_unsynced(path, chunks, size)

    accelerator, *_ = trained()
    accelerator._saver.disk = disk = Full()
    with pytest.raises(Exception, match="No space left"):
        accelerator.save_state(tmp_path / "first")
    assert disk.calls["open"] == disk.calls["close"] == 3  # the lock, the weights and the optimizer
    assert os.listdir(tmp_path) == []
    accelerator.end_training()


def test_load_copies_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load allocates each tensor of the checkpoint once. What was read becomes the state of the optimizer; weights are copied, once."""
    accelerator, model, optimizer = trained()
    accelerator.save_state(tmp_path / "first")
    accelerator.end_training()
    accelerator, model, optimizer = trained()
    made: list[torch.Tensor] = []
    empty = torch.empty

    def recorded(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(empty(*arguments, **options))
        return made[-1]

    copies: list[torch.Tensor] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, *rest, **options: copies.append(into) or copy(into, *rest, **options))
    accelerator.load_state(tmp_path / "first")
    matrices = [tensor for tensor in made if tuple(tensor.shape) == (SMALL, SMALL)]
    addresses = {tensor.data_ptr() for tensor in matrices}
    assert len(matrices) == 3  # weight, exp_avg, exp_avg_sq
    state = optimizer.optimizer.state[model.weight]
    assert {state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()} < addresses
    assert [tuple(tensor.shape) for tensor in copies if tensor.numel() >= SMALL] == [(SMALL, SMALL), (SMALL,)]
    assert model.weight.data_ptr() not in addresses
    accelerator.end_training()


def test_no_garbage_is_collected(tmp_path: Path) -> None:
    """Saves and loads make objects that stay: no collection walks through them. Afterwards collections are on, or off, as before."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.ParameterList(torch.ones(1) for _ in range(3000)))
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    gc.callbacks.append(note)
    try:
        accelerator.save_state(tmp_path / "first")
        accelerator.load_state(tmp_path / "first")
        assert len(collected) < 20  # before and after; there would be hundreds
        assert gc.isenabled()
        gc.disable()
        accelerator.save_state(tmp_path / "first")
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    accelerator.end_training()


def test_parameters_found_without_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for every parameter in its group; where the numbers of a group are consecutive it finds them at once."""
    accelerator, _, optimizer = trained()
    accelerator.save_state(tmp_path / "first")
    numbers: list[Any] = []
    load = torch.optim.Optimizer.load_state_dict

    def noting(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        numbers.append(state["param_groups"][0]["params"])
        load(self, state)

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", noting)
    accelerator.load_state(tmp_path / "first")
    assert numbers == [range(2)]
    assert [type(parameter) for parameter in optimizer.param_groups[0]["params"]] == [torch.nn.Parameter] * 2
    accelerator.end_training()


class ListedNumbers(torch.optim.SGD):
    """An optimizer that relies on what torch saves: a list."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert all(type(group["params"]) is list for group in state_dict["param_groups"])
        super().load_state_dict(state_dict)


def test_others_see_lists(tmp_path: Path) -> None:
    """An optimizer with its own `load_state_dict`, and a hook before it, get lists of numbers, as torch saves them."""
    accelerator = Accelerator(cpu=True)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    hooked = torch.optim.SGD(first.parameters())
    accelerator.prepare(first, second, hooked, ListedNumbers(second.parameters()))
    seen: list[Any] = []
    hooked.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["param_groups"][0]["params"]))
    accelerator.save_state(tmp_path / "first")
    accelerator.load_state(tmp_path / "first")
    assert seen == [[0, 1]]
    accelerator.end_training()


@pytest.mark.parametrize("numbers", [[], [0, 2], [1, 0], ["weight", "bias"], [True, 2]])
def test_other_numbers_of_parameters(numbers: list[Any]) -> None:
    """Numbers that are not consecutive, and names, stay as they are."""
    stored = {"state": {}, "param_groups": [{"params": numbers, "lr": 1.0}, {"params": [3, 4, 5]}]}
    found = _with_ranges(stored, torch.optim.SGD([torch.ones(1)]))
    assert found == {"state": {}, "param_groups": [{"params": numbers, "lr": 1.0}, {"params": range(3, 6)}]}
    assert found["param_groups"][0]["params"] is numbers
