"""A checkpoint of ours, whole or sharded, is exported as a folder that torch.distributed.checkpoint reads."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sharding import Net, Shard, by_columns, equal, filled, fully, net, not_at_all, prepared, replicated_too, state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from slipstream import Accelerator
from slipstream.checkpoint.dcp_metadata import read_dcp_metadata
from slipstream.checkpoint.dcp_writer import export_dcp
from slipstream.checkpoint.manifest import MANIFEST, parse_manifest
from slipstream.cli.checkpoint import command
from slipstream.cli.main import main
from slipstream.errors import CheckpointError, ConfigError
from slipstream.utils import FullyShardedDataParallelPlugin

Ranks = Any


def expected() -> Any:
    run = prepared(not_at_all)
    filled(*run)
    return state(*run)


def save(folder: Path, shard: Shard) -> None:
    run = prepared(shard)
    filled(*run)
    run[0].save_state(folder)


def load_with_torch(folder: Path, shard: Shard) -> None:
    """What torch itself loads is the state of the run."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    run = prepared(shard, seed=5)
    filled(*run, seed=9)
    model, optimizer = run[0].unwrap_model(run[1]), run[2].optimizer
    there = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(there, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    set_model_state_dict(model, there["model"])
    set_optimizer_state_dict(model, optimizer, there["optimizer"])
    assert equal(state(*run), expected())


def load_with_us(folder: Path, shard: Shard) -> None:
    run = prepared(shard, seed=5)
    run[0].load_state(folder)
    assert equal(state(*run), expected())


def test_whole_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    """What one process saved is loaded by torch on one and on two ranks, and by us."""
    save(tmp_path / "saved", not_at_all)
    assert export_dcp(tmp_path / "saved", tmp_path / "exported") == tmp_path / "exported"
    load_with_torch(tmp_path / "exported", not_at_all)
    ranks(2).run(load_with_torch, tmp_path / "exported", fully)
    load_with_us(tmp_path / "exported", not_at_all)


@pytest.mark.parametrize(("count", "shard"), [(2, fully), (2, by_columns), (4, replicated_too)])
def test_sharded_checkpoint(tmp_path: Path, ranks: Ranks, count: int, shard: Shard) -> None:
    """Shards are exported as they are, and loaded by torch on one and on two ranks."""
    ranks(count).run(save, tmp_path / "saved", shard)
    export_dcp(tmp_path / "saved", tmp_path / "exported")
    chunks = read_dcp_metadata(tmp_path / "exported").tensors["model.mid.weight"].chunks
    assert len(chunks) == 2
    load_with_torch(tmp_path / "exported", not_at_all)
    ranks(2).run(load_with_torch, tmp_path / "exported", fully)
    ranks(2).run(load_with_us, tmp_path / "exported", by_columns)


def test_saved_under_the_plugin(tmp_path: Path, ranks: Ranks) -> None:
    """What two ranks saved under `fsdp_plugin` is exported, with the names of the model's parameters."""

    def save_with_plugin(folder: Path) -> None:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
        model = net(0)
        own = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
        model, optimizer = accelerator.prepare(model, own)
        filled(accelerator, model, optimizer)
        accelerator.save_state(folder)

    ranks(2).run(save_with_plugin, tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "exported")
    load_with_torch(tmp_path / "exported", not_at_all)
    ranks(2).run(load_with_torch, tmp_path / "exported", fully)


def test_torch_makes_one_file_of_it(tmp_path: Path) -> None:
    """`dcp_to_torch_save` reads it: weights under all their names, states of the optimizer by names."""
    save(tmp_path / "saved", not_at_all)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp_to_torch_save(export_dcp(tmp_path / "saved", tmp_path / "exported"), tmp_path / "one.pt")
    made = torch.load(tmp_path / "one.pt", weights_only=False)
    weights, moments = expected()
    assert equal(made["model"], weights)
    names = [name for name, parameter in net(0).named_parameters() if parameter.requires_grad]
    assert equal(made["optimizer"]["state"], {name: moments[number] for number, name in enumerate(names)})
    assert made["optimizer"]["param_groups"][0]["params"] == names


def test_without_names_by_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint without names of parameters is exported by numbers, and that is said."""
    save(tmp_path / "saved", not_at_all)
    _forget_names(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "exported")
    assert "goes by their numbers" in caplog.text
    assert "optimizer.state.0.exp_avg" in read_dcp_metadata(tmp_path / "exported").tensors


def _forget_names(folder: Path) -> None:
    """Make a checkpoint one of an earlier version."""
    from dataclasses import replace

    from slipstream.files.checksum import digest
    from slipstream.files.disk import FileEntry

    manifest = parse_manifest((folder / MANIFEST).read_bytes(), MANIFEST)
    training = json.loads((folder / "training.json").read_text())
    for entry in training["optimizers"]:
        del entry["parameters"]
    data = json.dumps(training).encode()
    (folder / "training.json").write_bytes(data)
    files = {**manifest.files, "training.json": FileEntry(len(data), digest(data))}
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).dump())


def test_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    """A checkpoint that is not whole is not exported, and nothing is left behind."""
    save(tmp_path / "saved", not_at_all)
    path = tmp_path / "saved" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"was not exported.*model\.safetensors"):
        export_dcp(tmp_path / "saved", tmp_path / "exported")
    assert sorted(os.listdir(tmp_path)) == ["saved"]


def test_full_folder_is_refused(tmp_path: Path) -> None:
    """A folder with something in it is left as it is."""
    save(tmp_path / "saved", not_at_all)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_dcp(tmp_path / "saved", tmp_path / "exported")


def test_command(tmp_path: Path) -> None:
    """The command writes the folder, says in its help that it holds a pickle, and two exports are equal."""
    save(tmp_path / "saved", not_at_all)
    runner = CliRunner()
    assert "is a pickle" in runner.invoke(command, ["export-dcp", "--help"]).output
    for name in ("first", "second"):
        done = runner.invoke(command, ["export-dcp", str(tmp_path / "saved"), str(tmp_path / name)])
        assert (done.exit_code, done.output.strip()) == (0, str(tmp_path / name))
    assert runner.invoke(command, ["diff", str(tmp_path / "first"), str(tmp_path / "second")]).exit_code == 0
    assert main(["checkpoint", "export-dcp", str(tmp_path / "nowhere"), str(tmp_path / "third")]) == 2


def test_several_models_and_extra_state(tmp_path: Path) -> None:
    """Several models and optimizers have numbers, and entries of a state dict that are no tensors come along."""

    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": [torch.ones(2), 3]}

        def set_extra_state(self, given: Any) -> None:
            self.given = given

    accelerator = Accelerator(cpu=True)
    models = Counting(2, 2), Net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    accelerator.prepare(*models, *optimizers)
    accelerator.save_state(tmp_path / "saved")
    metadata = read_dcp_metadata(export_dcp(tmp_path / "saved", tmp_path / "exported"))
    tops = {path[0] for path in metadata.paths.values()}
    assert tops == {"model", "model_1", "optimizer", "optimizer_1"}
    assert "model._extra_state.seen.0" in metadata.tensors
