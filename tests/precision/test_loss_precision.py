"""The loss of the usual loop is a float32 number under mixed precision, on one process and on several; one that is not is warned about."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.training.loss_checks import warn_if_low_precision

Ranks = Any


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(0, 1000, (64,), generator=generator))


def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1000))


def losses(precision: str, **options: Any) -> list[float]:
    """What the usual loop sees: the loss of every batch before anything is trained."""
    accelerator = Accelerator(mixed_precision=precision, **options)
    model, loader = accelerator.prepare(net(), DataLoader(data(), batch_size=8))
    found = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        found += accelerator.gather(loss.detach().reshape(1)).tolist()
        assert loss.dtype is torch.float32
    return found


def plain(dtype: torch.dtype) -> list[float]:
    """The same by torch alone."""
    model, found = net(), []
    for x, y in DataLoader(data(), batch_size=8):
        with torch.autocast("cpu", dtype=dtype):
            scores = model(x)
        found.append(F.cross_entropy(scores.float(), y).item())
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_digits(ranks: Ranks, precision: str, dtype: torch.dtype, world: int) -> None:
    """The loss has the digits of autocast and `.float()` in plain torch."""
    expected = plain(dtype)
    assert ranks(world).run(lambda: losses(precision))[0] == expected
    assert len(set(expected)) == len(expected)
    assert any(value != torch.tensor(value).to(dtype).item() for value in expected)


def test_early_stopping() -> None:
    """Losses that differ by less than a step of bfloat16 are told apart."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    scores = model(torch.ones(2, 4))
    best = F.mse_loss(scores, torch.full((2, 4), 2.6)).item()
    better = F.mse_loss(scores, torch.full((2, 4), 2.6 - 1e-4)).item()
    assert better < best
    assert torch.tensor(best).bfloat16() == torch.tensor(better).bfloat16()


def test_outputs_as_computed() -> None:
    """`outputs_to_fp32=False` leaves outputs in half precision, and a model in bfloat16 without mixed precision keeps its own."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", outputs_to_fp32=False)
    assert accelerator.prepare(net())(torch.ones(1, 16)).dtype is torch.bfloat16
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(net().bfloat16())(torch.ones(1, 16).bfloat16()).dtype is torch.bfloat16


def test_unwrapped() -> None:
    """`unwrap_model` keeps the conversion, and takes it off with `keep_fp32_wrapper=False`; a copy has it, too."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(net())
    kept = accelerator.unwrap_model(model)
    assert kept(torch.ones(1, 16)).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept(torch.ones(1, 16)).dtype is torch.float32
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False)(torch.ones(1, 16)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loss_warned_once(dtype: torch.dtype) -> None:
    """A low loss is reported once.

    A loss in half precision is warned about once, with what to write.
    """
    warned: set[str] = set()
    with pytest.warns(UserWarning, match=rf"the loss at .* is {str(dtype)[6:]}.*outputs\.float\(\)"):
        warn_if_low_precision(warned, torch.ones((), dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_low_precision(warned, torch.ones((), dtype=dtype))
        warn_if_low_precision(set(), torch.ones(()))
        warn_if_low_precision(set(), torch.ones((), dtype=torch.float64))
