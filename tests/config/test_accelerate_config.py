"""The files of `accelerate config`: what they ask for is done, refused, or listed as not used; never dropped silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.config import Config, ConfigError, resolve

ONE_DEVICE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
SEVERAL = {**ONE_DEVICE, "distributed_type": "MULTI_GPU", "num_processes": 4}


def reading(tmp_path: Path, data: dict[str, Any], **more: Any) -> Config:
    path = tmp_path / "default_config.yaml"
    path.write_text(yaml.safe_dump(data))
    return resolve(config_file=path, environ={}, **more)


def complaint(tmp_path: Path, data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        reading(tmp_path, data)
    assert "default_config.yaml" in str(caught.value)
    assert 1 <= len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_usual_file(tmp_path: Path) -> None:
    """A usual file is used and the rest is listed."""
    config = reading(tmp_path, SEVERAL)
    assert (config.launch.num_processes, config.launch.gpu_ids) == (4, "all")
    assert (config.compute.mixed_precision, config.device.cpu) == ("bf16", False)
    assert str(config.origin("cpu")) == f"from {tmp_path / 'default_config.yaml'}: use_cpu"
    assert {key for key, _ in config.unused} == {
        "distributed_type",
        "downcast_bf16",
        "enable_cpu_affinity",
        "main_training_function",
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
    }
    assert all(why for _, why in config.unused)


def test_every_key_used_or_listed(tmp_path: Path) -> None:
    """Every key is an option or listed."""
    config = reading(tmp_path, ONE_DEVICE)
    used = {choice.origin.where.rpartition(": ")[2] for choice in config.given().values()}
    checked = {"compute_environment", "distributed_type"}
    assert used - {"--config_file"} | {key for key, _ in config.unused} | checked == set(ONE_DEVICE)


def test_multi_cpu(tmp_path: Path) -> None:
    """Many processes on the CPU."""
    config = reading(tmp_path, {**ONE_DEVICE, "distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2})
    assert (config.device.cpu, config.launch.num_processes) == (True, 2)


def test_multi_cpu_without_use_cpu(tmp_path: Path) -> None:
    """The word for many processes on the CPU is enough."""
    config = reading(tmp_path, {"distributed_type": "MULTI_CPU", "num_processes": 2})
    assert config.device.cpu is True
    assert config.origin("cpu").where.endswith(": distributed_type")


def test_bare_no_is_word(tmp_path: Path) -> None:
    """A bare no that YAML reads as false is the word."""
    path = tmp_path / "c.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nmixed_precision: no\ndowncast_bf16: no\n")
    assert resolve(config_file=path, environ={}).compute.mixed_precision == "no"


def test_dynamo_block(tmp_path: Path) -> None:
    """The nested block of the compiler is used."""
    block = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": True, "dynamo_use_fullgraph": False}
    config = reading(tmp_path, {**SEVERAL, "dynamo_config": block})
    compute = config.compute
    assert (compute.dynamo_backend, compute.dynamo_mode, compute.dynamo_use_dynamic) == ("inductor", "max-autotune", True)
    assert config.origin("dynamo_mode").where.endswith(": dynamo_config.dynamo_mode")


@pytest.mark.parametrize("block", [None, {}])
def test_empty_dynamo_block(block: object, tmp_path: Path) -> None:
    """An empty block of the compiler says nothing."""
    assert reading(tmp_path, {**SEVERAL, "dynamo_config": block}).compute.dynamo_backend == "no"


def test_flags_override_file(tmp_path: Path) -> None:
    """Flags override the file without contradicting it."""
    assert reading(tmp_path, SEVERAL, flags={"cpu": True, "num_processes": "1"}).device.cpu is True
    assert reading(tmp_path, ONE_DEVICE, flags={"num_processes": "2"}).launch.num_processes == 2


def test_minus_one_processes(tmp_path: Path) -> None:
    """Minus one leaves the number of processes open."""
    config = reading(tmp_path, {**SEVERAL, "num_processes": -1})
    assert config.launch.num_processes is None
    assert "num_processes" in {key for key, _ in config.unused}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"fsdp_config": {}}, "fsdp_config"),
        ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config"),
        ({"deepspeed_config": {"zero_stage": 3}}, "deepspeed_config"),
        ({"megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "megatron_lm_config"),
        ({"fp8_config": {"backend": "TE"}}, "fp8_config"),
        ({"mpirun_config": {"mpirun_hostfile": None}}, "mpirun_config"),
        ({"parallelism_config": {}}, "parallelism_config"),
        ({"tpu_name": None}, "tpu_name"),
        ({"commands": None}, "commands"),
    ],
)
def test_unused_block_with_reason(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    """A block that asks for nothing is listed with the reason."""
    assert dict(reading(tmp_path, {**SEVERAL, **changes}).unused)[key]


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, "DeepSpeed"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM"),
        ({"mpirun_config": {"mpirun_hostfile": "/hosts"}}, "mpirun"),
        ({"enable_cpu_affinity": True}, "CPU cores"),
        ({"downcast_bf16": True}, "TPU"),
        ({"tpu_use_cluster": True}, "TPU"),
        ({"tpu_env": ["A=1"]}, "TPU"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "SageMaker"),
        ({"ec2_instance_type": "ml.p3"}, "SageMaker"),
    ],
)
def test_missing_feature_is_error(changes: dict[str, Any], feature: str, tmp_path: Path) -> None:
    """A key that asks for a feature that is not there is an error."""
    text = complaint(tmp_path, {**SEVERAL, **changes})
    assert "not available in this version" in text
    assert feature in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"distributed_type": "NO", "num_processes": 4}, ["distributed_type: NO", "num_processes: 4"]),
        ({"distributed_type": "NO", "num_processes": 1, "num_machines": 2}, ["distributed_type: NO", "num_machines: 2"]),
        ({"distributed_type": "MULTI_CPU", "use_cpu": False}, ["distributed_type: MULTI_CPU", "use_cpu: false"]),
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, ["distributed_type: MULTI_GPU", "use_cpu: true"]),
    ],
)
def test_contradiction_names_both_keys(changes: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    """A file that contradicts itself is an error that names both keys."""
    text = complaint(tmp_path, {**SEVERAL, **changes})
    assert all(entry in text for entry in named)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_proceses": 2}, "Did you mean num_processes?"),
        ({"dynamo_confg": {}}, "Did you mean dynamo_config?"),
        ({"dynamo_config": {"dynamo_bakend": "INDUCTOR"}}, "Did you mean dynamo_backend?"),
        ({"dynamo_config": "inductor"}, "The key dynamo_config"),
        ({"dynamo_config": {"dynamo_backend": "ONNXRT"}}, "is not one of the choices"),
        ({"dynamo_backend": "eager", "dynamo_config": {"dynamo_backend": "eager"}}, "mean the same option"),
        ({"distributed_type": "PARALLEL"}, "distributed_type=PARALLEL"),
        ({"compute_environment": "LOCAL"}, "Write LOCAL_MACHINE"),
        ({"num_processes": "four"}, "num_processes=four"),
        ({"machine_rank": 1}, "machine_rank=1"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_param": True}}, "Did you mean fsdp_offload_params?"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 3}}, "fsdp_version=3"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "shards nothing"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}}, "flat parameters of FSDP version 1"),
        ({"distributed_type": "FSDP", "fsdp_config": "FULL_SHARD"}, "The key fsdp_config"),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "asks for tensor parallelism, which is not available yet"),
        ({"parallelism_config": {"parallelism_config_dp_size": 2}}, "Did you mean parallelism_config_"),
        ({"parallelism_config": {"parallelism_config_dp_shard_size": 3}}, "3 does not divide 4"),
        ({"parallelism_config": {"parallelism_config_dp_shard_size": 2}}, "that is a mesh of 2 processes"),
    ],
)
def test_mistakes_are_errors(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    """A mistake in such a file is an error."""
    assert why in complaint(tmp_path, {**SEVERAL, **changes})


def test_same_file_as_json(tmp_path: Path) -> None:
    """The same file as JSON."""
    import json

    path = tmp_path / "default_config.json"
    path.write_text(json.dumps(SEVERAL))
    assert resolve(config_file=path, environ={}).launch.num_processes == 4


VERSION_1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaEmbedding",
    "fsdp_use_orig_params": True,
}
VERSION_2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 1000,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": True,
    "fsdp_activation_checkpointing_offload": False,
    "fsdp_ignored_modules": r".*\.router",
}


@pytest.mark.parametrize("block", [VERSION_1, VERSION_2, {}, None])
def test_fsdp_block(block: dict[str, Any] | None, tmp_path: Path) -> None:
    """A file of FSDP turns sharding on, and every key of its block is the option of that name."""
    config = reading(tmp_path, {**SEVERAL, "distributed_type": "FSDP", "fsdp_config": block})
    assert (config.sharding.use_fsdp, config.launch.num_processes) == (True, 4)
    assert config.origin("use_fsdp").where.endswith(": distributed_type")
    for key, value in (block or {}).items():
        assert str(config.value(key)).lower() == str(value).lower()
        assert config.origin(key).where.endswith(f": fsdp_config.{key}")
    assert "fsdp_config" not in dict(config.unused)


def test_fsdp_block_overridden(tmp_path: Path) -> None:
    """Flags override the block, and can turn sharding off."""
    data = {**SEVERAL, "distributed_type": "FSDP", "fsdp_config": {**VERSION_2, "fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}}
    config = reading(tmp_path, data, flags={"use_fsdp": False, "fsdp_min_num_params": "7"})
    assert (config.sharding.use_fsdp, config.sharding.fsdp_min_num_params) == (False, 7)
    assert config.sharding.fsdp_transformer_layer_cls_to_wrap == "A,B"


def test_mesh_block(tmp_path: Path) -> None:
    """The sizes of the mesh are options; details of axes of the size 1 have no effect, and that is said."""
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 1, "cp_comm_strategy": "allgather", "sp_backend": "deepspeed"}
    block = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    config = reading(tmp_path, {**SEVERAL, "distributed_type": "FSDP", "parallelism_config": block})
    assert (config.parallelism.parallelism_config_dp_replicate_size, config.parallelism.parallelism_config_dp_shard_size) == (2, 2)
    details = {"parallelism_config.parallelism_config_cp_comm_strategy", "parallelism_config.parallelism_config_sp_backend"}
    assert {key for key, _ in config.unused} >= details


def test_fp8_block(tmp_path: Path) -> None:
    """The block of fp8 is read where it means torchao; keys of other engines have no effect beside it, and that is said."""
    block = {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": True, "margin": 0}
    config = reading(tmp_path, {**SEVERAL, "mixed_precision": "fp8", "fp8_config": block})
    assert (config.compute.fp8_backend, config.compute.fp8_pad_inner_dim) == ("ao", True)
    assert {key for key, _ in config.unused} >= {"fp8_config.enable_fsdp_float8_all_gather", "fp8_config.margin"}
    for engine, name in (("TE", "TransformerEngine"), ("MSAMP", "MS-AMP")):
        refused = complaint(tmp_path, {**SEVERAL, "mixed_precision": "fp8", "fp8_config": {"backend": engine}})
        assert name in refused
        assert "torchao" in refused
    assert "bakend" in complaint(tmp_path, {**SEVERAL, "mixed_precision": "fp8", "fp8_config": {"bakend": "AO"}})
