"""Folders of torch.distributed.checkpoint are read as torch reads them, and nothing in them is obeyed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import dcp_layout
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sharding import Shard, by_columns, equal, fully, net, replicated_too, whole

from slipstream import PartialState
from slipstream.checkpoint.dcp_metadata import is_dcp_folder, read_dcp_metadata
from slipstream.checkpoint.dcp_reader import nest, open_dcp
from slipstream.checkpoint.shard_layout import Box
from slipstream.errors import CheckpointError

Ranks = Any


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_dcp(folder).weights().tensors)


# -- what ranks have written ------------------------------------------------------------------------------------------


def save_each(folder: Path, *shards: Shard) -> Any:
    PartialState(cpu=True)
    for shard in shards:
        model = net(3)
        shard(model)
        for kind in dcp_layout.KINDS:
            state = model.state_dict()
            state.pop("head.weight")  # tied, and stored twice by torch
            dcp_layout.save(dict(state) if kind == "shards" else {"model": state}, folder / f"{shard.__name__}-{kind}", kind=kind)
    return whole(dict(state))


@pytest.mark.parametrize(("count", "shards"), [(2, (fully, by_columns)), (4, (fully, replicated_too))])
def test_shards_of_ranks_joined(tmp_path: Path, ranks: Ranks, count: int, shards: tuple[Shard, ...]) -> None:
    """Pieces are joined whatever the mesh, in every format; ranks without a part of a tensor are no hindrance."""
    expected = ranks(count).run(save_each, tmp_path, *shards)[0]
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == len(dcp_layout.KINDS) * len(shards)
    assert [folder.name for folder in folders if not equal(tensors_of(folder), expected)] == []


def test_only_touched_shards_are_read(tmp_path: Path, ranks: Ranks) -> None:
    """A box is read although a file is gone whose shards it does not touch."""
    ranks(2).run(save_each, tmp_path, fully)
    expected = net(3).state_dict()["mid.weight"]
    lasts = {"torch": "__1_0.distcp", "shards": "shard-00002-model-00001-of-00001.safetensors"}
    for kind, last in ((kind, lasts[kind]) for kind in dcp_layout.KINDS if kind in lasts):
        opened = open_dcp(tmp_path / f"fully-{kind}")
        tensors = opened.weights().tensors
        (tmp_path / f"fully-{kind}" / last).unlink()
        assert torch.equal(tensors.read("mid.weight", Box((0, 1), (2, 3))), expected[:2, 1:4])
        with pytest.raises(CheckpointError, match="is missing"):
            tensors["mid.weight"]


def save_version_1(folder: Path) -> Any:
    """What FSDP1 saves, with its own kind of sharded tensors; and the weights as one process has them."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    PartialState(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.0, weight_decay=0.0)
        wrapped(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
            dcp_layout.save({"model": wrapped.state_dict()}, folder / "pytorch_model_fsdp_0")
            dcp_layout.save({"optimizer": FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)}, folder / "optimizer_0")
    return expected


def test_folders_of_version_1(tmp_path: Path, ranks: Ranks) -> None:
    """Folders that FSDP1 filled are read as well."""
    expected = ranks(2).run(save_version_1, tmp_path)[0]
    assert equal(tensors_of(tmp_path / "pytorch_model_fsdp_0"), expected)
    state = open_dcp(tmp_path / "optimizer_0").state("optimizer")
    assert state["param_groups"][0]["params"] == list(expected)
    assert {name: entries["exp_avg"].shape for name, entries in state["state"].items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


# -- what states look like --------------------------------------------------------------------------------------------


def test_nested_optimizer_state(tmp_path: Path) -> None:
    """The state of an optimizer comes back nested, with settings of groups and placeholders for tensors."""
    model = net(1)
    optimizer = torch.optim.AdamW([{"params": list(model.mid.parameters())}, {"params": [model.embed.weight], "betas": (0.5, 0.6)}])
    model.mid.weight.grad = torch.ones(3, 5)
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    saved = get_optimizer_state_dict(model, optimizer)
    folder = dcp_layout.save({"optimizer": saved}, tmp_path / "optimizer_0")
    opened = open_dcp(folder)
    state = opened.state("optimizer")
    assert state["param_groups"] == saved["param_groups"]
    moments = state["state"]["mid.weight"]["exp_avg"]
    assert moments.is_meta
    assert moments.shape == (3, 5)
    assert torch.equal(opened.tensors["optimizer.state.mid.weight.exp_avg"], saved["state"]["mid.weight"]["exp_avg"])


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"model": {"a": torch.ones(2)}, "optimizer": {"b": torch.ones(2)}}, ["a"]),
        ({"a": torch.ones(2), "optimizer": {"b": torch.ones(2)}}, ["a"]),
        ({"student": {"a.b": torch.ones(2)}}, ["a.b"]),
        ({"model.a": torch.ones(2)}, ["model.a"]),
    ],
)
def test_weights_in_a_state(tmp_path: Path, state: dict[str, Any], names: list[str]) -> None:
    """The weights are what is under `model`, or at the top, or in the only mapping."""
    assert list(tensors_of(dcp_layout.save(state, tmp_path / "saved"))) == names


def test_several_states_without_model(tmp_path: Path) -> None:
    """Two mappings of which none is called model are an error that names them."""
    folder = dcp_layout.save({"a": {"x": torch.ones(1)}, "b": {"x": torch.ones(1)}}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds several states \\('a', 'b'\\)"):
        open_dcp(folder).weights()


def test_extra_state_of_modules(tmp_path: Path) -> None:
    """Entries of a state dict that are no tensors come along, with the tensors inside of them."""
    folder = dcp_layout.save({"model": {"w": torch.ones(1), "_extra_state": {"seen": [torch.ones(2)], "n": 3}}}, tmp_path / "saved")
    weights = open_dcp(folder).weights()
    assert list(weights.tensors) == ["w"]
    assert equal(weights.extra, {"_extra_state": {"seen": [torch.ones(2)], "n": 3}})


_shapes = st.lists(st.integers(0, 4), max_size=3)
_leaves = st.one_of(
    st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]), _shapes),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.none(),
    st.tuples(st.booleans()),
)
_keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=4)
_nested = st.recursive(_leaves, lambda inner: st.dictionaries(_keys, inner, max_size=3) | st.lists(inner, max_size=3), max_leaves=8)
_states = st.dictionaries(_keys, _nested, max_size=4)


def _made(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.dtype):
        return torch.rand(value[1]).mul(9).to(value[0])
    if isinstance(value, dict):
        return {key: _made(item) for key, item in value.items()}
    return [_made(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(_states, st.sampled_from([1, 3]), st.booleans())
def test_any_state_as_torch_unflattens(kinds: dict[str, Any], threads: int, single: bool) -> None:
    """Any state comes back as torch's own reader gives it, from one file or many."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

    state = _made(kinds)
    flat, mapping = flatten_state_dict(state)
    expected = unflatten_state_dict(flat, mapping)
    with tempfile.TemporaryDirectory() as folder:
        dcp_layout.save(state, Path(folder, "saved"), thread_count=threads, single_file_per_rank=single)
        opened = open_dcp(Path(folder, "saved"))
        assert dict(opened.metadata.paths) == mapping
        values = {name: opened.tensors[name] if name in opened.tensors else opened.value(name) for name in flat}
        assert equal(nest(opened.metadata.paths, values, folder), expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data(), st.sampled_from(dcp_layout.KINDS))
def test_any_box(shape: list[int], data: st.DataObject, kind: str) -> None:
    """Any box of a tensor is what slicing gives, whatever its strides were."""
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)))
    tensor = torch.rand(shape).mT.contiguous().mT if len(shape) > 1 and kind == "torch" else torch.rand(shape)
    with tempfile.TemporaryDirectory() as folder:
        dcp_layout.save({"weight": tensor}, Path(folder, "saved"), kind=kind)
        assert torch.equal(open_dcp(Path(folder, "saved")).tensors.read("weight", box), tensor[box.slices()])


# -- what cannot be read ----------------------------------------------------------------------------------------------


def test_changed_byte_is_an_error(tmp_path: Path) -> None:
    """A byte of a tensor that was changed is found by the checksum that torch writes."""
    folder = dcp_layout.save({"w": torch.full((64,), 1.5)}, tmp_path / "saved")
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[data.index(b"\x00\x00\xc0\x3f" * 8) + 1] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged.*checksum"):
        open_dcp(folder).tensors["w"]


def test_cut_off_file_is_an_error(tmp_path: Path) -> None:
    """A file that is too short is an error before anything is read."""
    folder = dcp_layout.save({"w": torch.ones(64)}, tmp_path / "saved")
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=f"__0_0.distcp has {len(data) - 10:,} bytes"):
        open_dcp(folder)


def test_unfinished_save_is_an_error(tmp_path: Path) -> None:
    """A folder without its table of contents says what is missing."""
    folder = dcp_layout.save({"w": torch.ones(64)}, tmp_path / "saved")
    (folder / ".metadata").rename(folder / "__0.metadata")
    assert is_dcp_folder(folder)
    with pytest.raises(CheckpointError, match="each rank wrote a table of contents of its own"):
        read_dcp_metadata(folder)


def test_class_in_a_value(tmp_path: Path) -> None:
    """A value of a class is an error that names it, and the tensors beside it are read."""
    folder = dcp_layout.save({"w": torch.ones(3), "odd": Path("x")}, tmp_path / "saved")
    opened = open_dcp(folder)
    assert torch.equal(opened.tensors["w"], torch.ones(3))
    with pytest.raises(CheckpointError, match="holds more than data.*pathlib"):
        opened.value("odd")


def test_table_is_read_without_torch(tmp_path: Path) -> None:
    """What a folder holds is known without importing torch."""
    folder = dcp_layout.save({"w": torch.ones(3)}, tmp_path / "saved")
    program = (
        "import sys, pathlib; from slipstream.checkpoint.dcp_metadata import read_dcp_metadata;"
        f"print(list(read_dcp_metadata(pathlib.Path({str(folder)!r})).tensors), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['w'] False"
