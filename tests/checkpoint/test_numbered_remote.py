"""Numbered checkpoints behind a URL: the newest that is whole is loaded, and secrets of the URL stay out of what is said."""

from __future__ import annotations

import logging
from typing import Any

import fsspec
import pytest
import torch

from slipstream import Accelerator, CheckpointError
from slipstream.utils import ProjectConfiguration


def begin(url: str) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True))
    return accelerator, accelerator.prepare(torch.nn.Linear(1, 1))


def damage(url: str) -> None:
    store = fsspec.filesystem("memory")
    for path in store.find(url):
        if path.endswith("model.safetensors"):
            store.pipe_file(path, store.cat_file(path)[:-1])


def test_newest_whole_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """The newest that is whole is loaded."""
    accelerator, model = begin("memory://numbered")
    torch.nn.init.constant_(model.weight, 1.0)
    saved = [accelerator.save_state() for _ in range(3)]
    damage(saved[2])
    accelerator, model = begin("memory://numbered")
    with caplog.at_level(logging.WARNING):
        assert accelerator.load_state() == saved[1]
    assert model.weight.item() == 1.0
    assert "checkpoint_2 was passed over for checkpoint_1" in caplog.text
    assert accelerator.save_state().endswith("checkpoint_3")


def test_none_whole_error_names_each() -> None:
    """None that is whole is an error that names each."""
    accelerator, _ = begin("memory://broken")
    for _ in range(2):
        damage(accelerator.save_state())
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints (?s:.*)checkpoint_1: (?s:.*)checkpoint_0: "):
        accelerator.load_state()
    with pytest.raises(CheckpointError, match="there is no checkpoint in memory://empty/checkpoints yet"):
        begin("memory://empty")[0].load_state()
