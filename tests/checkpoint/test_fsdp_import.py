"""Checkpoints that Accelerate saved under FSDP, in folders of torch.distributed.checkpoint, are loaded, merged and looked into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate_layout
import dcp_layout
import pytest
import torch
from sharding import Net, Shard, by_columns, equal, filled, fully, net, not_at_all, prepared, state

from slipstream import Accelerator
from slipstream.big_models.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
from slipstream.checkpoint.accelerate_import import is_accelerate_checkpoint, read_accelerate_checkpoint
from slipstream.checkpoint.model_io import merge_weights
from slipstream.errors import CheckpointError
from slipstream.utils import FullyShardedDataParallelPlugin

Ranks = Any


def expected() -> Any:
    """What one process holds after the update."""
    run = prepared(not_at_all)
    filled(*run)
    return state(*run)


def save(folder: Path, shard: Shard, *, full: bool = False) -> None:
    """What Accelerate's save_state writes under FSDP, sharded or full."""
    run = prepared(shard)
    filled(*run)
    accelerator, model, optimizer = run[0], run[0].unwrap_model(run[1]), run[2].optimizer
    if full:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
        if accelerator.is_main_process:
            folder.mkdir()
            torch.save(weights, folder / "pytorch_model_fsdp.bin")
            torch.save(moments, folder / "optimizer.bin")
    else:
        dcp_layout.save_fsdp(folder, model, optimizer)
    if accelerator.is_main_process:
        accelerate_layout.write(folder, world=accelerator.num_processes, step=1)
    accelerator.wait_for_everyone()


def load(folder: Path, *shards: Shard) -> None:
    for shard in shards:
        run = prepared(shard, seed=5)
        run[0].load_state(folder)
        assert run[0].unwrap_model(run[1]).head.weight is run[0].unwrap_model(run[1]).embed.weight
        assert equal(state(*run), expected()), shard.__name__
        assert run[2].updates == 1
        filled(*run, seed=2)  # what was loaded can be trained on


@pytest.mark.parametrize("full", [False, True])
def test_load_state_of_two_ranks(tmp_path: Path, ranks: Ranks, full: bool) -> None:
    """What two ranks of FSDP saved is loaded by one process, and by two and four that shard in any way."""
    folder = tmp_path / "saved"
    ranks(2).run(save, folder, fully, full=full)
    assert is_accelerate_checkpoint(folder)
    load(folder, not_at_all)
    ranks(2).run(load, folder, fully, by_columns, not_at_all)
    ranks(4).run(load, folder, fully)


def load_with_plugin(folder: Path) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
    model = net(5)
    own = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.3)
    model, optimizer = accelerator.prepare(model, own)
    accelerator.load_state(folder)
    assert equal(state(accelerator, model, optimizer), expected())


@pytest.mark.parametrize("full", [False, True])
def test_load_state_under_the_plugin(tmp_path: Path, ranks: Ranks, full: bool) -> None:
    """Under `fsdp_plugin`, two and four ranks load what two ranks of Accelerate saved."""
    ranks(2).run(save, tmp_path / "saved", fully, full=full)
    ranks(2).run(load_with_plugin, tmp_path / "saved")
    ranks(4).run(load_with_plugin, tmp_path / "saved")


def test_optimizer_in_another_order(tmp_path: Path, ranks: Ranks) -> None:
    """States of an optimizer are mapped by the names of the parameters, not by their order, and groups keep their settings."""
    ranks(2).run(save, tmp_path / "saved", fully)
    accelerator = Accelerator()
    model = net(5)
    own = torch.optim.AdamW([{"params": [model.mid.bias, model.embed.weight]}, {"params": [*model.norm.parameters(), model.mid.weight]}])
    model, optimizer = accelerator.prepare(model, own)
    accelerator.load_state(tmp_path / "saved")
    weights, moments = expected()
    names = ["mid.bias", "embed.weight", "norm.weight", "norm.bias", "mid.weight"]
    trained = [name for name, parameter in net(0).named_parameters() if parameter.requires_grad]
    held = optimizer.state_dict()
    assert equal({name: held["state"][number] for number, name in enumerate(names)}, {name: moments[trained.index(name)] for name in names})
    assert [group["lr"] for group in held["param_groups"]] == [0.01, 0.01]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (lambda model: [model.embed.weight], "has states of 'norm.weight'"),
        (lambda model: list(model.parameters()), "has no state of the parameter frozen.weight"),
    ],
)
def test_optimizer_of_other_parameters(tmp_path: Path, ranks: Ranks, chosen: Any, said: str) -> None:
    """An optimizer of other parameters is an error that names them."""
    ranks(2).run(save, tmp_path / "saved", fully)
    accelerator = Accelerator()
    model = net(5)
    accelerator.prepare(model, torch.optim.AdamW(chosen(model)))
    with pytest.raises(CheckpointError, match=said):
        accelerator.load_state(tmp_path / "saved")


def test_damaged_shard_changes_nothing(tmp_path: Path, ranks: Ranks) -> None:
    """A damaged shard is an error, and the run is as it was."""
    ranks(2).run(save, tmp_path / "saved", fully)
    path = tmp_path / "saved" / "optimizer_0" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 255
    path.write_bytes(data)
    run = prepared(not_at_all, seed=5)
    before = state(*run)
    with pytest.raises(CheckpointError, match="__1_0.distcp"):
        run[0].load_state(tmp_path / "saved")
    assert equal(state(*run), before)


def test_load_state_of_a_dcp_folder(tmp_path: Path) -> None:
    """A folder of torch.distributed.checkpoint with a model and an optimizer is loaded too."""
    run = prepared(not_at_all)
    filled(*run)
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(run[0].unwrap_model(run[1]), run[2].optimizer)
    dcp_layout.save({"model": model, "optimizer": optimizer, "epoch": 3}, tmp_path / "saved")
    load(tmp_path / "saved", not_at_all)


def test_files_of_each_rank_refused(tmp_path: Path) -> None:
    """One file per rank (use_dcp=False) is refused with what to do."""
    accelerate_layout.write(tmp_path)
    (tmp_path / "pytorch_model_fsdp_0_rank1.bin").write_bytes(b"x")
    assert is_accelerate_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="with a file for each rank .*use_dcp=True"):
        read_accelerate_checkpoint(tmp_path)


# -- weights alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["saved", "saved/pytorch_model_fsdp_0"])
def test_weights_of_a_sharded_folder(tmp_path: Path, ranks: Ranks, place: str) -> None:
    """Weights are loaded, dispatched and merged, from the checkpoint or the folder in it."""
    ranks(2).run(save, tmp_path / "saved", fully)
    weights, _ = expected()
    loaded, dispatched, merged = Net(), Net(), Net()
    load_checkpoint_in_model(loaded, tmp_path / place, strict=True)
    load_checkpoint_and_dispatch(dispatched, tmp_path / place, device_map={"": "cpu"}, strict=True)
    path = merge_weights(tmp_path / place, tmp_path / "whole")
    load_checkpoint_in_model(merged, path, strict=True)
    for model in (loaded, dispatched, merged):
        assert equal(dict(model.state_dict()), weights)


@pytest.mark.parametrize("kind", dcp_layout.KINDS)
def test_merge_removes_what_it_merged(tmp_path: Path, kind: str) -> None:
    """Merging with removal leaves the merged file, and nothing of the folder."""
    state = {name: tensor.clone() for name, tensor in net(1).state_dict().items()}
    folder = dcp_layout.save(state, tmp_path / "saved", kind=kind)
    (folder / "notes.txt").write_text("mine")
    path = merge_weights(folder, tmp_path / "whole", remove=True)
    assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]
    model = Net()
    load_checkpoint_in_model(model, path, strict=True)
    assert equal(dict(model.state_dict()), state)


def test_merge_keeps_what_is_no_tensor(tmp_path: Path) -> None:
    """Entries of the state dict that are no tensors are merged too."""
    dcp_layout.save({"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2), "_extra_state": {"n": 3}}}, tmp_path / "saved")

    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {}

        def set_extra_state(self, given: Any) -> None:
            self.seen = given

    model = Counting(2, 2)
    load_checkpoint_in_model(model, merge_weights(tmp_path / "saved", tmp_path / "whole"), strict=True)
    assert model.seen == {"n": 3}


def test_optimizer_folder_has_no_weights(tmp_path: Path) -> None:
    """Merging the folder of an optimizer is an error that says what is in it."""
    dcp_layout.save({"optimizer": {"state": {"w": {"exp_avg": torch.ones(2)}}}}, tmp_path / "optimizer_0")
    with pytest.raises(CheckpointError, match="holds no weights of a model, but other tensors such as 'optimizer.state.w.exp_avg'"):
        merge_weights(tmp_path / "optimizer_0", tmp_path / "whole")
