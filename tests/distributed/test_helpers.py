"""Small helpers, beyond what their examples show."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream.distributed import helpers


def test_merge_dicts_replaces_leaves() -> None:
    """Merging replaces what is no dict on both sides."""
    destination = {"a": {"x": 1}, "b": 2, "c": {"y": 1}}
    assert helpers.merge_dicts({"a": 5, "b": {"z": 1}, "c": {}}, destination) is destination
    assert destination == {"a": 5, "b": {"z": 1}, "c": {"y": 1}}


def test_children_come_before_their_parents() -> None:
    model = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    order = helpers.get_module_children_bottom_up(model)
    assert order[-1] is model
    assert set(map(id, order)) == set(map(id, model.modules()))
    for parent in order:
        assert all(order.index(child) < order.index(parent) for child in parent.children())


@pytest.mark.parametrize(("release", "warns"), [("5.4.0-150", True), ("4.19", True), ("5.5", False), ("6.8.0", False), ("odd", False)])
def test_an_old_kernel_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str, warns: bool) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.release", lambda: release)
    with caplog.at_level(logging.WARNING):
        helpers.check_os_kernel()
    assert bool(caplog.records) == warns
