"""Copies of tensors for a save that is written behind the training."""

from __future__ import annotations

import torch

from slipstream.checkpoint.arena import Arena
from slipstream.checkpoint.capture import RunFacts, Snapshot, StatePart

_KINDS = {
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
    kept = Arena().keep(_snapshot(_KINDS)).own.tensors
    assert list(kept) == list(_KINDS)
    for name, tensor in _KINDS.items():
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
