"""The choice of what computes in float8, by the launcher, a variable or a file."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from slipstream import Accelerator
from slipstream.config import resolve
from slipstream.errors import ConfigError

pytest.importorskip("torchao.float8")


@pytest.mark.parametrize("word", ["ao", "AO", "Ao"])
def test_ao(monkeypatch: Any, word: str) -> None:
    """ao is torchao, however it is written, as a flag and as a variable, and the layers are converted by it."""
    assert resolve(flags={"fp8_backend": word}, environ={}).compute.fp8_backend == "ao"
    monkeypatch.setenv("SLIPSTREAM_FP8_BACKEND", word)
    monkeypatch.setenv("SLIPSTREAM_FP8_PAD_INNER_DIM", "yes")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.warns(UserWarning, match="emulated"):
        model = accelerator.prepare(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))
    assert type(model[1]).__name__ == "Float8Linear"
    assert model[1].config.pad_inner_dim


@pytest.mark.parametrize(("word", "engine"), [("te", "TransformerEngine"), ("MSAMP", "MS-AMP")])
def test_other_engines(word: str, engine: str) -> None:
    """Another engine is an error that names it and what runs instead."""
    with pytest.raises(ConfigError, match=rf"fp8_backend={word} \(from --fp8_backend\) is {engine}.*torchao"):
        resolve(flags={"fp8_backend": word}, environ={})


def test_without_fp8(monkeypatch: Any, caplog: Any) -> None:
    """A backend of fp8 where the precision is another has no effect, and that is said."""
    monkeypatch.setenv("SLIPSTREAM_FP8_BACKEND", "ao")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=True, mixed_precision="fp8")
    assert "no effect" not in caplog.text
    Accelerator(cpu=True, mixed_precision="bf16")
    assert "fp8_backend=ao (from SLIPSTREAM_FP8_BACKEND) has no effect with mixed_precision=bf16" in caplog.text
