"""The names of sharded training that users of Accelerate write: flags, variables and keys, with its spelling of values."""

from __future__ import annotations

from pathlib import Path

import pytest
from option_roundtrip import samples

from slipstream.config import OPTIONS, ConfigError, Option, Origin, for_worker, resolve, resolved_config
from slipstream.config.files import write_file
from slipstream.config.option import option_text

FLAGS = """
    use_fsdp fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_auto_wrap_policy
    fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params
    fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload
    use_parallelism_config parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size
    parallelism_config_cp_size parallelism_config_sp_size
"""
VARIABLES = """
    ACCELERATE_USE_FSDP FSDP_VERSION FSDP_SHARDING_STRATEGY FSDP_RESHARD_AFTER_FORWARD FSDP_OFFLOAD_PARAMS FSDP_MIN_NUM_PARAMS
    FSDP_AUTO_WRAP_POLICY FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_BACKWARD_PREFETCH FSDP_FORWARD_PREFETCH FSDP_STATE_DICT_TYPE
    FSDP_USE_ORIG_PARAMS FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_SYNC_MODULE_STATES FSDP_ACTIVATION_CHECKPOINTING
    FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD FSDP_IGNORED_MODULES ACCELERATE_USE_PARALLELISM_CONFIG PARALLELISM_CONFIG_DP_REPLICATE_SIZE
    PARALLELISM_CONFIG_DP_SHARD_SIZE PARALLELISM_CONFIG_TP_SIZE PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_SP_SIZE
"""
KEYS = f"{FLAGS} fsdp_ignored_modules"
ALIASED = [(option, alias) for option in OPTIONS.values() for alias in option.variable_aliases]


def test_names_complete() -> None:
    """Every flag, variable and key of Accelerate for sharded training is an option."""
    assert set(FLAGS.split()) <= set(OPTIONS)
    assert {alias for _, alias in ALIASED} == set(VARIABLES.split())
    assert {name for name, option in OPTIONS.items() if option.section in ("sharding", "parallelism")} == set(KEYS.split())


@pytest.mark.parametrize(("option", "alias"), ALIASED, ids=lambda value: getattr(value, "name", value))
def test_alias_order(option: Option, alias: str, tmp_path: Path) -> None:
    """Flag over our variable over Accelerate's over the file; the origin names the variable that counts."""
    first, *rest = samples(option)
    second = rest[0] if rest else option.default if option.default is not None else first
    path = write_file(tmp_path / "c.yaml", {option.name: second})
    config = resolve(environ={alias: option_text(first)}, config_file=path)
    assert (config.value(option.name), config.origin(option.name)) == (first, Origin("environment", alias))
    config = resolve(environ={alias: option_text(second), str(option.variable): option_text(first)})
    assert (config.value(option.name), config.origin(option.name)) == (first, Origin("environment", str(option.variable)))
    config = resolve(environ={alias: option_text(second)}, flags={option.name: option_text(first)})
    assert (config.value(option.name), config.origin(option.name).kind) == (first, "flag")
    assert resolve(environ={alias: ""}).given() == {}
    sent = resolved_config.dump(resolve(environ={}, config_file=path))
    config = for_worker(environ={resolved_config.VARIABLE: sent, alias: option_text(first)})
    assert (config.value(option.name), config.origin(option.name).kind) == (first, "environment")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("fsdp_offload_params", "true", True),
        ("fsdp_offload_params", "False", False),
        ("fsdp_sharding_strategy", "1", "FULL_SHARD"),
        ("fsdp_sharding_strategy", "4", "HYBRID_SHARD"),
        ("fsdp_sharding_strategy", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"),
        ("fsdp_sharding_strategy", "shard_grad_op", "SHARD_GRAD_OP"),
        ("fsdp_reshard_after_forward", "True", "true"),
        ("fsdp_reshard_after_forward", "FULL_SHARD", "FULL_SHARD"),
        ("fsdp_reshard_after_forward", "4", "4"),
        ("fsdp_reshard_after_forward", True, "true"),
        ("fsdp_reshard_after_forward", 0, "false"),
        ("fsdp_auto_wrap_policy", "transformer_based_wrap", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_backward_prefetch", "backward_pre", "BACKWARD_PRE"),
        ("fsdp_version", 2, 2),
    ],
)
def test_spellings(name: str, text: object, value: object) -> None:
    """Values are read as Accelerate spells them."""
    assert resolve(flags={name: text}, environ={}).value(name) == value


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"fsdp_offload_params": "maybe"}, "=maybe .* neither yes nor no.\nWrite true or false, .*--fsdp_offload_params true"),
        ({"fsdp_sharding_strategy": "3"}, "fsdp_sharding_strategy=3 .* shards nothing: without use_fsdp every process keeps a whole model"),
        ({"fsdp_sharding_strategy": "7"}, "is not one of the choices"),
        ({"fsdp_reshard_after_forward": "often"}, "is neither true nor false, nor a number of processes"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "needs the flat parameters of FSDP version 1"),
        ({"fsdp_version": "3"}, "is more than 2"),
        ({"fsdp_ignored_modules": "["}, "is not a regular expression"),
        ({"parallelism_config_tp_size": "2"}, "asks for tensor parallelism, which is not available yet.*\nWrite 1, "),
        ({"fsdp_sharding_strategy": "1", "fsdp_reshard_after_forward": "false"}, "FULL_SHARD means fsdp_reshard_after_forward true"),
        ({"num_processes": 6, "parallelism_config_dp_replicate_size": 4}, "4 does not divide 6"),
        ({"num_processes": 6, "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}, "2 x 2 = 4"),
        ({"num_processes": 8, "parallelism_config_dp_shard_size": 2}, "a mesh of 2 processes"),
    ],
)
def test_refused(flags: dict[str, object], why: str) -> None:
    """What cannot work is refused by the launcher, with the numbers and what to write."""
    with pytest.raises(ConfigError, match=why):
        resolve(flags=flags, environ={})


def test_strategy_and_reshard(tmp_path: Path) -> None:
    """The strategy of version 1 and reshard_after_forward mean the same thing: the stronger source counts, alone."""
    path = write_file(tmp_path / "c.yaml", {"fsdp_sharding_strategy": "FULL_SHARD"})
    config = resolve(config_file=path, environ={}, flags={"fsdp_reshard_after_forward": "false"})
    assert (config.sharding.fsdp_sharding_strategy, config.sharding.fsdp_reshard_after_forward) == (None, "false")
    config = resolve(environ={"FSDP_RESHARD_AFTER_FORWARD": "false"}, flags={"fsdp_sharding_strategy": "1"})
    assert (config.sharding.fsdp_sharding_strategy, config.sharding.fsdp_reshard_after_forward) == ("FULL_SHARD", "true")
    both = {"fsdp_sharding_strategy": "2", "fsdp_reshard_after_forward": "false"}
    assert resolve(flags=both, environ={}).sharding.fsdp_sharding_strategy == "SHARD_GRAD_OP"


def test_sizes_turned_off() -> None:
    """Sizes that do not count are not compared with the number of processes."""
    flags = {"num_processes": 3, "parallelism_config_dp_replicate_size": 2, "use_parallelism_config": False}
    assert resolve(flags=flags, environ={}).parallelism.use_parallelism_config is False
