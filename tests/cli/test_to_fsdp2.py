"""`slipstream to-fsdp2` and `slipstream launch --use_fsdp`: files are converted, options reach the workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from slipstream.cli.main import cli, main
from slipstream.config import for_worker, resolve

OLD = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_use_orig_params: true
  fsdp_offload_params: false
num_processes: 2
"""


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["to-fsdp2", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["to-fsdp2", *arguments]) == 2
    return capsys.readouterr().err


def test_new_file(tmp_path: Path) -> None:
    """The converted file is written to another place; the old one stays; the changes are printed."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.json"
    old.write_text(OLD)
    told = run("--config_file", str(old), "--output_file", str(new))
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP became fsdp_reshard_after_forward: false" in told
    assert "dropped fsdp_use_orig_params" in told
    assert f"Wrote {new}." in told
    assert old.read_text() == OLD
    expected = {"fsdp_reshard_after_forward": False, "fsdp_offload_params": False, "fsdp_version": 2}
    assert json.loads(new.read_text())["fsdp_config"] == expected
    assert resolve(config_file=new, environ={}).sharding.fsdp_reshard_after_forward == "false"


def test_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file is replaced only if that is asked for, and the old one is kept; a second time changes nothing."""
    path = tmp_path / "c.yaml"
    path.write_text(OLD)
    assert "Give --output_file for another place, or --overwrite" in refused(capsys, "--config_file", str(path))
    assert path.read_text() == OLD
    told = run("--config_file", str(path), "--overwrite")
    assert f"Kept the old file as {path}.bak." in told
    assert (tmp_path / "c.yaml.bak").read_text() == OLD
    assert yaml.safe_load(path.read_text())["fsdp_config"]["fsdp_version"] == 2
    assert run("--config_file", str(path), "--overwrite") == f"{path} is written for version 2 already.\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c.yaml", "c.yaml.bak"]


def test_our_file(tmp_path: Path) -> None:
    """A file of ours stays a file of ours."""
    path = tmp_path / "c.yaml"
    path.write_text("version: 1\nuse_fsdp: true\nfsdp_version: 1\nfsdp_sharding_strategy: FULL_SHARD\n")
    run("--config_file", str(path), "--output_file", str(tmp_path / "new.yaml"))
    assert yaml.safe_load((tmp_path / "new.yaml").read_text()) == {
        "version": 1, "use_fsdp": True, "fsdp_reshard_after_forward": True, "fsdp_version": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", "has no options of FSDP"),
        (OLD.replace("SHARD_GRAD_OP", "NO_SHARD"), "shards nothing"),
        (OLD.replace("fsdp_offload_params", "fsdp_ofload_params"), "Did you mean fsdp_offload_params?"),
        (OLD.replace("num_processes: 2", "num_processes: two"), "is not a whole number"),
        ("- a list\n", "holds a list"),
    ],
)
def test_refused(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be converted is an error of a few lines, and nothing is written."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    told = refused(capsys, "--config_file", str(path), "--output_file", str(tmp_path / "new.yaml"))
    assert why in told
    assert len(told.splitlines()) <= 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.yaml"]


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file, or with one that is not there, the error says what to write."""
    assert "Write: slipstream to-fsdp2 --config_file FILE" in refused(capsys)
    assert "does not exist" in refused(capsys, "--config_file", str(tmp_path / "none.yaml"))
    done = CliRunner().invoke(cli, ["to-fsdp2", "--help"])
    assert "--output_file" in done.output


def test_launch_passes_options(tmp_path: Path) -> None:
    """The flags of Accelerate, with its spelling of values, reach the script."""
    script = tmp_path / "script.py"
    script.write_text("")
    flags = """--use_fsdp --fsdp_version 1 --fsdp_sharding_strategy 1 --fsdp_offload_params true --fsdp-state-dict-type FULL_STATE_DICT
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block --fsdp_use_orig_params true
        --fsdp_cpu_ram_efficient_loading true --fsdp_sync_module_states True --fsdp_forward_prefetch false
        --fsdp_activation_checkpointing False --parallelism_config_dp_replicate_size 2 --cpu --num_processes 4 --show"""
    done = CliRunner().invoke(cli, ["launch", *flags.split(), str(script)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    variables = dict(line.strip().split("=", 1) for line in done.output.splitlines() if line.startswith("  ") and "=" in line)
    sharding = for_worker(environ={"SLIPSTREAM_CONFIG": variables["SLIPSTREAM_CONFIG"]}).sharding
    assert (sharding.use_fsdp, sharding.fsdp_version, sharding.fsdp_sharding_strategy) == (True, 1, "FULL_SHARD")
    assert (sharding.fsdp_offload_params, sharding.fsdp_forward_prefetch, sharding.fsdp_state_dict_type) == (True, False, "FULL_STATE_DICT")
    assert variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] == variables["ACCELERATE_USE_FSDP"] == "true"
