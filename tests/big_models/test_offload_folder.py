"""Folders of `.dat` files and their index."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.big_models.weight_store.offload_folder import (
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from slipstream.errors import CheckpointError, ConfigError

TENSORS = {
    "float": torch.randn(3, 4),
    "half.weight": torch.randn(5).half(),
    "brain": torch.randn(2, 3).bfloat16(),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "whole": torch.arange(7),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "brain_scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6).reshape(2, 3).t(),
    "wave": torch.randn(2, dtype=torch.complex128),
}


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    """Every type and shape is returned."""
    offload_state_dict(tmp_path, TENSORS)
    index = json.loads((tmp_path / "index.json").read_text())
    assert list(index) == list(TENSORS)
    assert index["brain"] == {"dtype": "bfloat16", "shape": [2, 3]}
    assert index["scalar"] == {"dtype": "float32", "shape": []}
    for name, tensor in TENSORS.items():
        found = load_offloaded_weight(tmp_path / f"{name}.dat", index[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_files_are_what_numpy_maps(tmp_path: Path) -> None:
    """Files are what numpy maps."""
    index = offload_weight(torch.arange(6.0).reshape(2, 3), "weight", tmp_path, {})
    assert index is not None
    info = index["weight"]
    assert np.memmap(tmp_path / "weight.dat", dtype=info["dtype"], shape=tuple(info["shape"]), mode="r").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert offload_weight(torch.ones(1), "other", tmp_path) is None
    np.memmap(tmp_path / "theirs.dat", dtype="int16", mode="w+", shape=(1,))[:] = 0x3F80
    assert load_offloaded_weight(tmp_path / "theirs.dat", {"dtype": "bfloat16", "shape": []}).item() == 1.0


def test_writes_do_not_reach_file(tmp_path: Path) -> None:
    """Nothing that is written to a weight gets into its file."""
    index = offload_weight(torch.zeros(4), "weight", tmp_path, {})
    assert index is not None
    load_offloaded_weight(tmp_path / "weight.dat", index["weight"]).fill_(1)
    mapped = load_offloaded_weight(tmp_path / "weight.dat", index["weight"])
    assert mapped.tolist() == [0, 0, 0, 0]
    offload_weight(torch.ones(2), "weight", tmp_path, index)  # the old file stays as long as it is mapped
    assert mapped.tolist() == [0, 0, 0, 0]
    assert load_offloaded_weight(tmp_path / "weight.dat", index["weight"]).tolist() == [1, 1]


def test_index_merged_concurrently(tmp_path: Path) -> None:
    """An index is merged by many at once."""
    save_offload_index({}, tmp_path)
    assert not os.listdir(tmp_path)
    entries = [{f"name{number}": {"dtype": "float32", "shape": [number]}} for number in range(6)]
    threads = [threading.Thread(target=save_offload_index, args=(entry, tmp_path)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    save_offload_index({"name0": {"dtype": "float16", "shape": []}}, tmp_path)
    found = json.loads((tmp_path / "index.json").read_text())
    assert found == {**{name: value for entry in entries for name, value in entry.items()}, "name0": {"dtype": "float16", "shape": []}}
    assert os.listdir(tmp_path) == ["index.json"]


def test_weights_back_into_model(tmp_path: Path) -> None:
    """Weights come back into a model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_state_dict(tmp_path, {**expected, "0.SCB": torch.ones(2)})
    model.to("meta")
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    load_offloaded_weights(model, None, tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model[0].weight.SCB.tolist() == [1, 1]
    offload_state_dict(tmp_path, {"0.weight": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"0.weight of Sequential has shape \[2, 2\]"):
        load_offloaded_weights(model, {"0.weight": {"dtype": "float32", "shape": [3]}}, tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/secret", "a/b", "", "a\\b", "a\nb", 3])
def test_traversal_names_refused(tmp_path: Path, name: Any) -> None:
    """Names that lead elsewhere are refused."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.dat").write_bytes(b"\0" * 4)
    info = {"dtype": "float32", "shape": [1]}
    model = nn.Linear(1, 1)
    with pytest.raises(CheckpointError):
        offload_weight(torch.ones(1), name, inside, {})
    with pytest.raises(CheckpointError):
        load_offloaded_weights(model, {name: info}, inside)
    with pytest.raises(CheckpointError):
        save_offload_index({name: info}, inside)
    assert not os.listdir(inside)


def test_links_and_pipes_refused(tmp_path: Path) -> None:
    """Links and pipes are not opened."""
    (tmp_path / "secret").write_bytes(b"\0" * 4)
    (tmp_path / "link.dat").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe.dat")
    info = {"dtype": "float32", "shape": [1]}
    for name in ("link", "pipe", "missing"):
        with pytest.raises(CheckpointError, match=f"{name}.dat"):
            load_offloaded_weight(tmp_path / f"{name}.dat", info)
    offload_weight(torch.ones(1), "link", tmp_path)
    assert (tmp_path / "secret").read_bytes() == b"\0" * 4
    assert load_offloaded_weight(tmp_path / "link.dat", info).item() == 1
    (tmp_path / "index.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="index.json"):
        save_offload_index({"a": info}, tmp_path)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"dtype": "float32", "shape": [2]}, "has 4 bytes, but a tensor of float32 with shape .2."),
        ({"dtype": "object", "shape": [1]}, "which is not a tensor"),
        ({"dtype": "float32", "shape": [-1]}, "which is not a tensor"),
        ({"dtype": "float32", "shape": "1"}, "which is not a tensor"),
        ({"shape": [1]}, "which is not a tensor"),
    ],
)
def test_index_mismatch_refused(tmp_path: Path, info: dict[str, Any], message: str) -> None:
    """An index that does not fit its file is refused."""
    offload_weight(torch.ones(1), "weight", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_offloaded_weight(tmp_path / "weight.dat", info)


def test_unwritable_folder_explained(tmp_path: Path) -> None:
    """A folder that cannot be written is explained."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Weights cannot be offloaded to .*file.*: .*exists"):
        offload_weight(torch.ones(1), "weight", tmp_path / "file")
    (tmp_path / "index.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="is not an index of offloaded weights"):
        save_offload_index({"a": {"dtype": "float32", "shape": []}}, tmp_path)
    with pytest.raises(CheckpointError, match="weight.* meta device"):
        offload_weight(torch.ones(1, device="meta"), "weight", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["file", "index.json"]


def test_extract_submodules() -> None:
    """Parts of a state dict are found by whole names."""
    state = {"a.b.weight": torch.ones(1), "a.bc": torch.ones(1), "d": torch.ones(1), "e.f": torch.ones(1)}
    assert list(extract_submodules_state_dict(state, ["a.b", "d", "e.f"])) == ["a.b.weight", "d", "e.f"]
