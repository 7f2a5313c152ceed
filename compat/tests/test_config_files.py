"""Configuration files: every version that Accelerate wrote is read, and `accelerate config` writes what Accelerate writes."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import yaml
from accelerate.commands.config import get_config_parser, load_config_from_file
from accelerate.commands.config.config import config_command
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import _prepare, _validate_launch_command, launch_command_parser
from accelerate.commands.to_fsdp2 import to_fsdp2_command, to_fsdp2_command_parser

from slipstream.errors import ConfigError

V0_11 = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_CPU
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
fp16: true
num_machines: 1
num_processes: 2
use_cpu: true
"""
V0_16 = "{distributed_type: NO, mixed_precision: no, dynamo_backend: INDUCTOR, use_xpu: false, ipex_config: {ipex: false}}"
LATEST = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
MPI = """
distributed_type: MULTI_CPU
use_cpu: true
num_machines: 2
num_processes: 8
mpirun_config: {mpirun_hostfile: /hosts, mpirun_ccl: '1'}
"""
SAGEMAKER = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: NO
mixed_precision: fp16
ec2_instance_type: big
iam_role_name: me
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str, name: str = "config.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def completed(path: str, *words: str) -> argparse.Namespace:
    return _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, *words, "train.py"]))[0]


def test_file_of_0_11(written):
    """The first files have `fp16` and none of the later keys."""
    config = load_config_from_file(written(V0_11))
    assert isinstance(config, ClusterConfig)
    assert (config.mixed_precision, config.num_processes, config.same_network, config.debug) == ("fp16", 2, False, False)
    args = completed(written(V0_11))
    assert (args.use_cpu, args.num_processes, args.mixed_precision) == (True, 2, "fp16")


def test_keys_of_earlier_versions(written):
    """A key that moved is found in its new place; keys that nothing reads any more are named with the reason."""
    with pytest.warns(UserWarning, match="use_xpu has no effect"), pytest.warns(UserWarning, match="ipex_config has no effect"):
        config = load_config_from_file(written(V0_16))
    assert config.dynamo_config == {"dynamo_backend": "INDUCTOR"}
    assert (config.mixed_precision, str(config.distributed_type)) == ("no", "NO")


def test_file_of_today(written):
    """Blocks fill the options, and what was typed comes first."""
    args = completed(written(LATEST), "--num_processes", "2", "--fsdp_sharding_strategy", "FULL_SHARD")
    assert (args.use_fsdp, args.num_processes, args.mixed_precision, args.debug) == (True, 2, "bf16", True)
    assert (args.fsdp_sharding_strategy, args.fsdp_transformer_layer_cls_to_wrap) == ("FULL_SHARD", "Block")


def test_json_file(written):
    """A file that ends in .json is JSON."""
    path = written(json.dumps(yaml.safe_load(LATEST)), "config.json")
    assert load_config_from_file(path).to_dict() == load_config_from_file(written(LATEST)).to_dict()


def test_mpirun_file(written):
    """A file for mpirun names the hosts; a key of the block that no option has is named."""
    args = completed(written(MPI))
    assert (args.mpirun_hostfile, args.num_processes, args.num_machines) == ("/hosts", 8, 2)


def test_unknown_block_key_is_named(written, capsys):
    """Accelerate drops a misspelt key of a block; here it is named."""
    completed(written(MPI))
    assert "mpirun_config.mpirun_ccl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {zero_stage: 3}}", "DeepSpeed does not run"),
        ("{distributed_type: XLA, num_processes: 8}", "TPUs are not supported"),
        ("{distributed_type: TPU, num_processes: 8}", "TPUs are not supported"),
        (SAGEMAKER, "starts no SageMaker jobs"),
        ("{distributed_type: MULTI_CPU}", "num_processes: -1"),
        ("{distributed_type: MULTI_CP, num_processes: 2}", "did you mean MULTI_CPU|Did you mean MULTI_CPU"),
        ("{distributed_type: NO, mixed_presicion: bf16}", "did you mean mixed_precision"),
        ("{mixed_precision: bf16}", "has no distributed_type"),
        ("[1, 2]", "holds no keys"),
        ("a: [", "is no YAML"),
    ],
)
def test_refused_files(written, text, reason):
    """A file that cannot run here says why when it is launched; a wrong one when it is read."""
    with pytest.raises(ConfigError, match=reason):
        _prepare(launch_command_parser().parse_args(["--config_file", written(text), __file__]))


@pytest.mark.parametrize("text", ["{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}", SAGEMAKER])
def test_files_of_other_engines_can_be_rewritten(written, text):
    """A file for an engine that does not run here can be read, and is written again with the same content."""
    path = written(text)
    before = load_config_from_file(path)
    args = get_config_parser().parse_args(["update", "--config_file", path])
    args.func(args)
    assert load_config_from_file(path).to_dict() == before.to_dict()
    assert isinstance(before, SageMakerConfig if text == SAGEMAKER else ClusterConfig)


def test_idle_blocks_are_named(written, capsys):
    """Blocks of a file that have no effect are named when it is launched."""
    text = "{distributed_type: NO, deepspeed_config: {zero_stage: 2}, fp8_config: {backend: AO}, tpu_name: pod, main_training_function: go}"
    _prepare(launch_command_parser().parse_args(["--config_file", written(text), __file__]))
    said = capsys.readouterr().err
    for key in ("deepspeed_config", "fp8_config", "tpu_name", "main_training_function"):
        assert f"{key} in the configuration file has no effect" in said or f"{key} has no effect" in said


BASE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False, "machine_rank": 0,
    "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
}  # fmt: skip
"""What Accelerate 1.15 writes in any case."""
ANSWERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "one process": (
        ["", "0", "no", "all", "no", "no"],
        {"distributed_type": "NO", "gpu_ids": "all", "num_processes": 1, "use_cpu": False},
    ),
    "two processes on the CPU": (
        ["", "1", "1", "no", "2", "no", "bf16", "yes"],
        {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True, "mixed_precision": "bf16", "debug": True},
    ),
    "sharded": (
        ["", "2", "1", "yes", "2", "yes", "no", "0", "", "0", "no", "no", "no", "no", "no", "no", "no"],
        {
            "distributed_type": "FSDP",
            "num_processes": 2,
            "use_cpu": False,
            "fsdp_config": {
                "fsdp_activation_checkpointing": False,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_cpu_ram_efficient_loading": False,
                "fsdp_offload_params": False,
                "fsdp_reshard_after_forward": True,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_version": 2,
            },
        },
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_questionnaire_writes_the_files_of_accelerate(case, tmp_path, monkeypatch):
    """For the same choices `accelerate config` writes the keys and values that Accelerate 1.15 writes."""
    answers, expected = ANSWERS[case]
    left = iter(answers)
    monkeypatch.setattr("builtins.input", lambda _: next(left))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config_command(argparse.Namespace(config_file=str(tmp_path / "config.yaml")))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {**BASE, **expected}


def test_questionnaire_repeats_a_question(tmp_path, monkeypatch, capsys):
    """A wrong answer is asked again, with what would be right."""
    left = iter(["", "7", "0", "maybe", "no", "all", "no", "fp16"])
    monkeypatch.setattr("builtins.input", lambda _: next(left))
    config_command(argparse.Namespace(config_file=str(tmp_path / "config.json")))
    assert json.loads((tmp_path / "config.json").read_text())["mixed_precision"] == "fp16"
    assert "Give a number from 0 to 2." in (said := capsys.readouterr().out)
    assert "Answer yes or no." in said


def test_default_file(tmp_path):
    """`write_basic_config` writes once, and leaves an existing file alone."""
    path = tmp_path / "default.json"
    assert write_basic_config("bf16", str(path)) == path
    assert load_config_from_file(path).mixed_precision == "bf16"
    assert write_basic_config("no", str(path)) is False
    with pytest.raises(ConfigError, match="does not exist"):
        write_basic_config("fp12", str(tmp_path / "other.json"))


def test_to_fsdp2(written, tmp_path):
    """`accelerate to-fsdp2` renames what version 2 calls otherwise, and drops what it does not have."""
    args = to_fsdp2_command_parser().parse_args(["--config_file", written(LATEST), "--output_file", str(tmp_path / "new.yaml")])
    to_fsdp2_command(args)
    block = yaml.safe_load((tmp_path / "new.yaml").read_text())["fsdp_config"]
    assert block["fsdp_version"] == 2
    assert block["fsdp_reshard_after_forward"] is False
    assert not set(block) & {"fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states"}
    with pytest.raises(FileExistsError):
        to_fsdp2_command(args)
