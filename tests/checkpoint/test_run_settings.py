"""What `load_state` says about a run that means something else, and that it says nothing about one that does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from slipstream import Accelerator, CheckpointError


class Pairs(Sampler[list[int]]):
    """A batch sampler that does not say how large its batches are."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([2 * number, 2 * number + 1] for number in range(4))


def begin(lr: float = 0.1, **options: bool) -> tuple[Accelerator, torch.optim.Optimizer, "DataLoader[torch.Tensor]"]:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, **options)
    data = DataLoader(torch.ones(8, 1), batch_sampler=Pairs())
    _, optimizer, data = accelerator.prepare(model, optimizer, data)
    return accelerator, optimizer, data


def test_learning_rate_checkpoint_overrides_said(tmp_path: Path) -> None:
    """A learning rate that the checkpoint overrides is said."""
    accelerator, optimizer, _ = begin()
    optimizer.param_groups[0]["lr"] = 0.05  # by the training itself: no other meaning
    where = accelerator.save_state(tmp_path / "first")
    begin()[0].load_state(where, strict=True)
    begin(foreach=False)[0].load_state(where, strict=True)
    with pytest.raises(CheckpointError, match=r"optimizer 0 \(Adam\) continues with the settings of the checkpoint: lr 0.01 in the script"):
        begin(lr=0.01)[0].load_state(where, strict=True)


def test_unknown_batch_size(tmp_path: Path) -> None:
    """Batches of unknown size are no other meaning."""
    accelerator, _, data = begin()
    batches = iter(data)
    next(batches)
    where = accelerator.save_state(tmp_path / "first")
    begin()[0].load_state(where, strict=True)
