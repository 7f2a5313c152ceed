"""Autocast and scalers as plain functions."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from slipstream import ConfigError
from slipstream.utils import DistributedType, get_grad_scaler, get_mixed_precision_context_manager, is_peft_model


def test_autocast_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast is that of the run."""
    weight = torch.ones(2, 2)
    with get_mixed_precision_context_manager(native_amp=True):
        assert (weight @ weight).dtype is torch.float32
    monkeypatch.setenv("SLIPSTREAM_MIXED_PRECISION", "bf16")
    with get_mixed_precision_context_manager(native_amp=True):
        assert (weight @ weight).dtype is torch.bfloat16
    with get_mixed_precision_context_manager():
        assert (weight @ weight).dtype is torch.float32


def test_grad_scaler() -> None:
    """One scaler serves one process, replicas and shards; other engines have their own."""
    for kind in (None, "NO", "MULTI_CPU", DistributedType.FSDP):
        assert get_grad_scaler(kind, init_scale=4.0).get_scale() == 4.0
    with pytest.raises(ConfigError, match="MEGATRON_LM"):
        get_grad_scaler("MEGATRON_LM")


def test_peft_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of peft are known if peft is there."""

    class PeftModel(torch.nn.Linear):
        pass

    assert not is_peft_model(PeftModel(1, 1))
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(PeftModel=PeftModel))  # type: ignore[arg-type]
    assert is_peft_model(torch.nn.DataParallel(PeftModel(1, 1)))
    assert not is_peft_model(torch.nn.Linear(1, 1))
