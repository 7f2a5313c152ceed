"""`save_fsdp_model`, `load_fsdp_model`, `save_fsdp_optimizer`, `load_fsdp_optimizer`, `merge_fsdp_weights`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dcp_layout
import pytest
import torch
from sharding import Net, Shard, by_columns, equal, filled, fully, net, not_at_all, prepared, replicated_too, state

from slipstream import Accelerator, PartialState
from slipstream.big_models.load import load_checkpoint_in_model
from slipstream.errors import CheckpointError, ConfigError
from slipstream.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

Ranks = Any
SHARDED, FULL = SimpleNamespace(state_dict_type="SHARDED_STATE_DICT"), SimpleNamespace(state_dict_type="FULL_STATE_DICT")


class Gathering:
    """Weights of a stand-in strategy, whole: what `get_state_dict` does under FSDP."""

    def full_state(self, model: torch.nn.Module) -> dict[str, Any]:
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}


def expected() -> Any:
    run = prepared(not_at_all)
    filled(*run)
    return state(*run)


def save(folder: Path, shard: Shard, plugin: Any) -> None:
    accelerator, model, optimizer = run = prepared(shard)
    filled(*run)
    if shard is not not_at_all:
        accelerator._components.strategy.full_state = Gathering().full_state
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def load(folder: Path, *shards: Shard) -> None:
    for shard in shards:
        accelerator, model, optimizer = run = prepared(shard, seed=5)
        report = load_fsdp_model(SHARDED, accelerator, model, folder)
        load_fsdp_optimizer(SHARDED, accelerator, optimizer, model, folder)
        assert not report.missing
        assert not report.unexpected
        assert accelerator.unwrap_model(model).head.weight is accelerator.unwrap_model(model).embed.weight
        assert equal(state(*run), expected()), shard.__name__
        filled(*run, seed=2)


@pytest.mark.parametrize(("count", "shard"), [(2, fully), (2, by_columns), (4, replicated_too)])
def test_sharded_files(tmp_path: Path, ranks: Ranks, count: int, shard: Shard) -> None:
    """Every rank writes its shards; one process, two and four load them, sharded in any way."""
    ranks(count).run(save, tmp_path, shard, SHARDED)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    shards = [f"{folder}/shard-0000{rank}-{base}-00001-of-00001.safetensors" for folder, base in FOLDERS for rank in (1, 2)]
    assert names == sorted([*shards, "optimizer_0/optimizer.safetensors"])
    load(tmp_path, not_at_all)
    ranks(2).run(load, tmp_path, fully, not_at_all)
    ranks(4).run(load, tmp_path, fully)


FOLDERS = (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer"))


def test_full_files(tmp_path: Path, ranks: Ranks) -> None:
    """The main process writes whole files, without pickle."""
    ranks(2).run(save, tmp_path, fully, FULL)
    assert sorted(os.listdir(tmp_path)) == ["optimizer.safetensors", "pytorch_model_fsdp.safetensors"]
    load(tmp_path, not_at_all)
    ranks(2).run(load, tmp_path, fully)


def test_load_state_of_the_parts(tmp_path: Path, ranks: Ranks) -> None:
    """`load_state` of a folder with both parts loads them; what else a checkpoint has is not in it."""
    ranks(2).run(save, tmp_path, fully, SHARDED)
    run = prepared(not_at_all, seed=5)
    run[0].load_state(tmp_path)
    assert equal(state(*run), expected())


def test_files_of_accelerate(tmp_path: Path, ranks: Ranks) -> None:
    """Folders that Accelerate wrote by torch.distributed.checkpoint are loaded by the same functions."""

    def write(folder: Path) -> None:
        run = prepared(fully)
        filled(*run)
        dcp_layout.save_fsdp(folder, run[0].unwrap_model(run[1]), run[2].optimizer)

    ranks(2).run(write, tmp_path)
    load(tmp_path, not_at_all)
    ranks(2).run(load, tmp_path, fully)


def test_weights_elsewhere(tmp_path: Path, ranks: Ranks) -> None:
    """What was written is read by load_checkpoint_in_model, by torch's own reader, and merged."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load as torch_load

    ranks(2).run(save, tmp_path / "saved", fully, SHARDED)
    weights, _ = expected()
    model = Net()
    load_checkpoint_in_model(model, tmp_path / "saved", strict=True)
    assert equal(dict(model.state_dict()), weights)
    there = {name: torch.empty_like(tensor) for name, tensor in weights.items() if name != "head.weight"}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        torch_load(there, storage_reader=HuggingFaceStorageReader(str(tmp_path / "saved" / "pytorch_model_fsdp_0")))
    assert equal(there, {name: weights[name] for name in there})
    merge_fsdp_weights(tmp_path / "saved" / "pytorch_model_fsdp_0", tmp_path / "whole", remove_checkpoint_dir=True)
    assert sorted(os.listdir(tmp_path / "saved")) == ["optimizer_0"]
    merged = Net()
    load_checkpoint_in_model(merged, tmp_path / "whole", strict=True)
    assert equal(dict(merged.state_dict()), weights)


def test_fewer_ranks_leave_no_old_files(tmp_path: Path, ranks: Ranks) -> None:
    """A save by fewer ranks replaces all files of one by more."""
    ranks(4).run(save, tmp_path, fully, SHARDED)
    ranks(2).run(save, tmp_path, fully, SHARDED)
    load(tmp_path, not_at_all)


def test_files_of_two_saves(tmp_path: Path, ranks: Ranks) -> None:
    """Files of two saves side by side are an error on every rank, and nothing is loaded."""
    for name in ("first", "second"):
        ranks(2).run(save, tmp_path / name, fully, SHARDED)
    name = "pytorch_model_fsdp_0/shard-00002-model-00001-of-00001.safetensors"
    os.replace(tmp_path / "second" / name, tmp_path / "first" / name)

    def refused(folder: Path) -> bool:
        accelerator, model, _ = run = prepared(fully, seed=5)
        before = state(*run)
        with pytest.raises(CheckpointError, match="not of one save"):
            load_fsdp_model(SHARDED, accelerator, model, folder)
        return equal(state(*run), before)

    assert ranks(2).run(refused, tmp_path / "first") == [True, True]


def test_error_on_one_rank_is_raised_on_all(tmp_path: Path, ranks: Ranks) -> None:
    """A rank that cannot write makes the save fail everywhere."""

    def failing(folder: Path) -> str:
        accelerator, model, _ = prepared(fully)
        if accelerator.process_index == 1:
            accelerator.unwrap_model(model).register_buffer("odd", torch.ones(2).to_sparse())
        with pytest.raises(Exception, match="sparse") as raised:
            save_fsdp_model(SHARDED, accelerator, model, folder)
        return type(raised.value).__name__

    outcomes = ranks(2).run(failing, tmp_path)
    assert len(outcomes) == 2


def test_merge_on_ranks(tmp_path: Path, ranks: Ranks) -> None:
    """The main process merges, the others wait; an error is raised on all."""
    dcp_layout.save({"model": {name: tensor.clone() for name, tensor in net(1).state_dict().items()}}, tmp_path / "saved")

    def merge(folder: Path) -> bool:
        state = PartialState()
        merge_fsdp_weights(folder / "saved", folder / "whole", safe_serialization=False)
        with pytest.raises(Exception, match="There is nothing at"):
            merge_fsdp_weights(folder / "nowhere", folder / "whole")
        return state.num_processes == 2 and (folder / "whole" / "pytorch_model.bin").exists()

    assert ranks(2).run(merge, tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run, folder: load_fsdp_model(SHARDED, *run[:2], folder), "There is neither"),
        (lambda run, folder: load_fsdp_optimizer(SHARDED, run[0], run[2], run[1], folder), "There is neither"),
        (lambda run, folder: save_fsdp_model(SHARDED, *run[:2], folder, adapter_only=True), "is no PEFT model"),
        (lambda run, folder: save_fsdp_model(SimpleNamespace(state_dict_type="LOCAL_STATE_DICT"), *run[:2], folder), "LOCAL_STATE_DICT"),
    ],
)
def test_wrong_arguments(tmp_path: Path, call: Any, said: str) -> None:
    """What cannot be done is an error that says why."""
    with pytest.raises((CheckpointError, ConfigError), match=said):
        call(prepared(not_at_all), tmp_path)


def test_with_the_plugin(tmp_path: Path, ranks: Ranks) -> None:
    """Under `Accelerator(fsdp_plugin=...)`, sharded and full, on two ranks; one process loads what they wrote."""

    def train(accelerator: Accelerator, seed: int) -> Any:
        model = net(seed)
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
        return accelerator.prepare(model, optimizer)

    def save_both(folder: Path) -> Any:
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            plugin = FullyShardedDataParallelPlugin(state_dict_type=kind, auto_wrap_policy="no_wrap")
            accelerator = Accelerator(fsdp_plugin=plugin)
            model, optimizer = train(accelerator, 0)
            filled(accelerator, model, optimizer)
            save_fsdp_model(plugin, accelerator, model, folder / kind)
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder / kind)
            model, optimizer = train(other := Accelerator(fsdp_plugin=plugin), 5)
            load_fsdp_model(plugin, other, model, folder / kind)
            load_fsdp_optimizer(plugin, other, optimizer, model, folder / kind)
            assert equal(state(other, model, optimizer), expected()), kind

    ranks(2).run(save_both, tmp_path)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        load(tmp_path / kind, not_at_all)


def test_group_without_parameters_keeps_its_settings(tmp_path):
    """An empty group (Trainer makes one for a LoRA model) comes back with the settings it had."""

    def make(rate: float) -> Any:
        model = Net()
        groups = [{"params": list(model.parameters()), "lr": 0.1}, {"params": [], "lr": rate}]
        accelerator = Accelerator()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups))

    accelerator, model, optimizer = make(0.2)
    save_fsdp_optimizer(SHARDED, accelerator, optimizer, model, tmp_path)
    accelerator, model, optimizer = make(0.3)
    load_fsdp_optimizer(SHARDED, accelerator, optimizer, model, tmp_path)
    empty = optimizer.param_groups[1]
    assert (empty["lr"], empty["betas"], empty["params"]) == (0.2, (0.9, 0.999), [])
