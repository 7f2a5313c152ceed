"""What is alive is told with its names, and an error about memory that ends a process is answered with it, and told as it was."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.distributed.current import current
from slipstream.errors import ConfigError
from slipstream.observability.memory import (
    AliveTensors,
    FailureHook,
    MemorySnapshot,
    MemoryWatch,
    NamedTensor,
    memory_snapshot,
    named_tensors,
    report_if_out_of_memory,
    watch_memory,
)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MemoryWatch]]:
    """`watch_memory` in a process where nobody watches yet; ended after the test."""
    made: list[MemoryWatch] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(current(), "memory_watches", [])

    def watch(*arguments: Any) -> MemoryWatch:
        made.append(watch_memory(*arguments))
        return made[-1]

    yield watch
    for entry in made:
        entry.close()


def test_storages_counted_once() -> None:
    """Memory counts once whoever looks at it and alike tensors are counted together."""
    gc.collect()  # what others have left does not go in between
    before = memory_snapshot(10_000)
    base = torch.zeros(1234, 7)
    views = [base[1:], base.T, base.view(-1)]
    alike = [torch.zeros(4321) for _ in range(3)]
    after = memory_snapshot(10_000)
    new = {(entry.shape, entry.dtype): (entry.count, entry.bytes) for entry in after.alive if entry.shape in {(1234, 7), (4321,)}}
    assert new == {((1234, 7), "float32"): (1, base.nbytes), ((4321,), "float32"): (3, 3 * alike[0].nbytes)}
    assert after.total - before.total == base.nbytes + 3 * alike[0].nbytes
    assert after.tensors - before.tensors == 4
    assert len(views) == 3


def test_tensors_without_storage() -> None:
    """Tensors without memory of their own are no trouble."""
    odd = [
        torch.empty(2**40, device="meta"),
        torch.eye(3).to_sparse(),
        torch.empty(0),
    ]
    shapes = {entry.shape for entry in memory_snapshot(10_000).alive}
    assert not shapes & {(2**40,), (0,)}
    assert len(odd) == 3


def test_named_tensors() -> None:
    """Parameters gradients and states have names."""
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(50))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 50)).sum().backward()
    optimizer.step()
    snapshot = memory_snapshot(10_000, names=named_tensors([model], [optimizer]))
    assert {(entry.kind, entry.name, entry.bytes) for entry in snapshot.alive if entry.name and entry.shape == (50, 50)} == {
        ("parameter", "0.weight", 10_000),
        ("gradient", "0.weight", 10_000),
        ("optimizer state", "exp_avg of 0.weight", 10_000),
        ("optimizer state", "exp_avg_sq of 0.weight", 10_000),
    }
    assert snapshot.by_kind["gradient"] == sum(parameter.nbytes for parameter in model.parameters())
    assert "1.running_mean" in {entry.name for entry in snapshot.alive if entry.kind == "buffer"}


def test_long_list_cut(tmp_path: Path) -> None:
    """A long list is cut and what is left out is counted."""
    held = [torch.zeros(900 + number) for number in range(20)]
    snapshot = memory_snapshot(5)
    assert len(snapshot.alive) == 5
    assert snapshot.more + sum(entry.count for entry in snapshot.alive) == snapshot.tensors >= len(held)
    assert json.loads(snapshot.write(tmp_path / "deep" / "memory.json").read_text())["total"] == snapshot.total
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["memory.json"]
    with pytest.raises(ConfigError, match="from 1"):
        memory_snapshot(0)


def test_nothing_kept_alive(watched: Callable[..., MemoryWatch]) -> None:
    """A snapshot keeps nothing alive and a watch neither."""
    class Owner:
        def __init__(self) -> None:
            self.weight = torch.zeros(3210)

        def names(self) -> list[NamedTensor]:
            return [("parameter", "weight of the owner", self.weight)]

    owner = Owner()
    watched(owner.names)
    kept = memory_snapshot(10_000)
    assert "weight of the owner" in {entry.name for entry in kept.alive}
    del owner
    gc.collect()
    assert (3210,) not in {entry.shape for entry in memory_snapshot(10_000).alive}


def test_hook_installed_once(watched: Callable[..., MemoryWatch]) -> None:
    """The hook is there once and goes with the last watch."""
    before = sys.excepthook
    watches = [watched(lambda: ()) for _ in range(2)]
    assert isinstance(sys.excepthook, FailureHook)
    assert sys.excepthook.previous is before
    for watch in watches:
        watch.close()
    assert sys.excepthook is before


def out_of_memory() -> Exception:
    try:
        torch.empty(2**50)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has a lot of memory")


def test_previous_hook_called(watched: Callable[..., MemoryWatch], tmp_path: Path) -> None:
    """The hook before ours gets every error as it was."""
    told: list[tuple[Path, MemorySnapshot]] = []
    watched(lambda: (), lambda: tmp_path, lambda path, snapshot: told.append((path, snapshot)))
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = MemoryError()
    for error in (KeyError("x"), out_of_memory(), MemoryError(), wrapped):
        shown: list[Any] = []
        hook = FailureHook(FailureHook(lambda *given, shown=shown: shown.append(given)))  # two of ours look once
        hook(type(error), error, error.__traceback__)
        assert shown == [(type(error), error, error.__traceback__)]
    assert [path.name for path, _ in told] == ["memory-rank0.json"] * 3


def test_failing_snapshot(watched: Callable[..., MemoryWatch], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A snapshot that fails hides nothing."""
    def broken() -> list[NamedTensor]:
        raise RuntimeError("the names are gone")

    (tmp_path / "file").write_text("")
    watch = watched(broken)
    report_if_out_of_memory(MemoryError())
    assert "could not be listed (RuntimeError: the names are gone)" in caplog.text
    watch.close()
    watched(lambda: (), lambda: tmp_path / "file" / "inside")
    report_if_out_of_memory(MemoryError())
    assert "could not be written" in caplog.text
    assert "memory ran out: " in caplog.text


def made(*alive: AliveTensors) -> MemorySnapshot:
    total, count = sum(entry.bytes for entry in alive), sum(entry.count for entry in alive)
    by_kind: dict[str, int] = {}
    for entry in alive:
        by_kind[entry.kind] = by_kind.get(entry.kind, 0) + entry.bytes
    return MemorySnapshot(0, "host", 0.0, count, total, {"cpu": total}, by_kind, alive, 0, process=2048, available=4096)


def test_snapshot_texts() -> None:
    """Texts. A snapshot reads as a sentence: without tensors, with one, and with several."""
    left = "; the process takes 2.0 KB of main memory, 4.0 KB are left"
    assert made().line() == "no tensors were alive"
    assert str(made()) == f"no tensors were alive{left}"
    weight = AliveTensors("weight", "parameter", (2,), "float32", "cpu", 1, 8)
    assert made(weight).line() == "8 bytes in 1 tensor were alive (parameters 8 bytes), the largest 8 bytes: weight, float32 [2] on cpu"
    assert str(made(weight)).splitlines() == [
        f"8 bytes in 1 tensor were alive (parameters 8 bytes){left}",
        "  bytes  count  tensor           what",
        "8 bytes      1  float32 [2] cpu  parameter weight",
    ]
    alike = AliveTensors(None, "other tensors", (4,), "int64", "cpu", 2, 64)
    assert made(alike, weight).line() == (
        "72 bytes in 3 tensors were alive (other tensors 64 bytes, parameters 8 bytes), the largest 64 bytes: 2 x int64 [4] on cpu"
    )


def test_whole_message() -> None:
    """A process that runs out of memory before it has a tensor says so in whole sentences, without an empty table."""
    script = "import torch; from slipstream import Accelerator; Accelerator(cpu=True); torch.empty(2**50)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    first, second, *_, last = done.stderr.splitlines()
    assert re.fullmatch(r"memory ran out: no tensors were alive; the process takes \S+ \wB of main memory, \S+ \wB are left", first)
    assert second == "Traceback (most recent call last):"
    if sys.version_info >= (3, 11):
        assert last == "When memory ran out, no tensors were alive"


SCRIPT = """
import sys, torch
from pathlib import Path
from slipstream.observability.memory import named_tensors
from slipstream.observability.memory import watch_memory
model = torch.nn.Linear(500, 400)
watch_memory(lambda: named_tensors([model]), lambda: Path(sys.argv[1]))
def step():
    activations = torch.ones(300, 1000)
    return activations, torch.empty(2**50)
step()
"""


def test_out_of_memory_process(tmp_path: Path) -> None:
    """A process that ends for want of memory leaves what was alive."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "Traceback (most recent call last):" in done.stderr
    assert "can't allocate memory" in done.stderr
    found = json.loads((tmp_path / "memory-rank0.json").read_text())
    names = {entry["name"] or tuple(entry["shape"]): entry["bytes"] for entry in found["alive"]}
    assert names["weight"] == 500 * 400 * 4
    assert names[(300, 1000)] == 300 * 1000 * 4  # of the frame that failed
    assert "parameter weight" in done.stderr
    if sys.version_info >= (3, 11):
        assert done.stderr.rstrip().endswith(f"all of it is in {tmp_path / 'memory-rank0.json'}")
