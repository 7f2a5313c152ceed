"""Copies of tensors for a save that is written behind the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.checkpoint.arena import Arena
from slipstream.checkpoint.capture import RunFacts, Snapshot, StatePart


def _kinds() -> dict[str, torch.Tensor]:
    return {
        "large": torch.rand((3 << 20) + 1),
        "matrix": torch.rand(20, 15, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.rand(77).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "eighths": torch.rand(33).to(torch.float8_e5m2),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "every second": torch.arange(10)[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "trained": torch.nn.Parameter(torch.rand(5)),
    }


def _snapshot(tensors: dict[str, torch.Tensor]) -> Snapshot:
    return Snapshot(RunFacts("1-0", 1, 1, "single"), own=StatePart("rank_0", {"rank": 0}, tensors))


def test_copies_equal_whatever_lies_behind_tensor() -> None:
    """Copies are equal whatever lies behind the tensor."""
    kinds = _kinds()
    kept = Arena().keep(_snapshot(kinds)).own.tensors
    assert list(kept) == list(kinds)
    for name, tensor in kinds.items():
        copy = kept[name]
        assert (copy.dtype, copy.shape, copy.is_contiguous(), copy.requires_grad) == (tensor.dtype, tensor.shape, True, False), name
        assert copy.tolist() == tensor.tolist(), name


def test_what_changes_afterwards_changes_no_copy() -> None:
    given = {"large": torch.ones(3 << 20), "small": torch.ones(3)}
    kept = Arena().keep(_snapshot(given)).own.tensors
    for name, tensor in given.items():
        tensor.zero_()
        assert torch.equal(kept[name], torch.ones_like(tensor))


def test_memory_reused_and_grown() -> None:
    """Memory is used again and grows when more is needed."""
    arena = Arena()
    first = arena.keep(_snapshot({"weight": torch.ones(1000)})).own.tensors["weight"]
    second = arena.keep(_snapshot({"weight": torch.full((1000,), 2.0)})).own.tensors["weight"]
    assert second.data_ptr() == first.data_ptr()
    more = arena.keep(_snapshot({"weight": torch.full((1 << 22,), 3.0), "bias": torch.ones(3)})).own.tensors
    assert torch.equal(more["weight"], torch.full((1 << 22,), 3.0))
    assert torch.equal(more["bias"], torch.ones(3))


def test_copies_of_devices_arrive_late_and_whole(ranks: Any) -> None:
    """Tensors of two devices are copied without a wait, whatever lies behind them, and changes after the call come too late."""

    def run() -> tuple[int, int]:
        standin, host = torch.standin, _kinds()
        given = {name: tensor.detach().to(f"standin:{number % 2}") for number, (name, tensor) in enumerate(host.items())}
        moved = {"turned": given["turned"].t().contiguous().t(), "conjugated": given["conjugated"].resolve_conj().conj().conj().conj()}
        given |= {**moved, "every second": torch.arange(10, device="standin:1")[::2], "host": torch.ones(3)}
        expected = {name: tensor.cpu().tolist() for name, tensor in given.items()}
        assert [given[name].is_contiguous() for name in ("every second", "turned")] == [False, False]
        assert given["conjugated"].is_conj()
        arena = Arena()
        arena.keep(_snapshot(given)).ready()
        for number in range(2):
            standin.synchronize(number)
        standin.set_delay(copies=0.02)
        standin.reset_counters()
        kept = arena.keep(_snapshot(given))
        waits, copies = standin.counters().synchronizations, standin.counters().copies_to_host
        for name in ("large", "matrix", "scalar", "turned", "every second", "trained", "host"):
            given[name].zero_()
        kept.ready()
        standin.set_delay(copies=0.0)
        assert {name: tensor.tolist() for name, tensor in kept.own.tensors.items()} == expected
        assert {tensor.device.type for tensor in kept.own.tensors.values()} == {"cpu"}
        return waits, copies

    ((waits, copies),) = ranks(1, device="standin").run(run)
    assert (waits, copies) == (0, len(_kinds()) - 1)  # an empty tensor needs no copy


def test_memory_that_cannot_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """Without memory that a device can copy into late, ordinary memory is used, and said; later calls do not try again."""
    if torch.accelerator.is_available():
        pytest.skip("with an accelerator, memory can be pinned")
    arena = Arena()
    (block,) = arena._allocate([100], pinned=True)
    assert (block.numel(), block.is_pinned(), arena._can_pin) == (100, False, False)
    assert "waits for copies from the device: 100 bytes of host memory cannot be pinned" in caplog.text
