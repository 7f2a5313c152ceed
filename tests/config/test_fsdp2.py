"""Files of FSDP version 1 become files of version 2: the same sharding, every change said, nothing else touched."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from slipstream.config import ConfigError, resolve
from slipstream.config.files import parse_config_file
from slipstream.config.fsdp2 import convert_file
from slipstream.config.resolved_config import build_config
from slipstream.strategies.fsdp_options import resolve_sharding
from slipstream.utils import convert_config_to_fsdp2

BLOCK: dict[str, Any] = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_use_orig_params": True,
}
ACCELERATE: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": BLOCK, "num_processes": 4}
OURS: dict[str, Any] = {"version": 1, "num_processes": 4, "use_fsdp": True, **BLOCK}


def block_of(data: dict[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = data.get("fsdp_config", data)
    return block


@pytest.mark.parametrize("data", [ACCELERATE, OURS], ids=["accelerate", "ours"])
@pytest.mark.parametrize(
    ("key", "strategy", "reshard"),
    [
        ("fsdp_sharding_strategy", "FULL_SHARD", True),
        ("fsdp_sharding_strategy", 1, True),
        ("fsdp_sharding_strategy", "2", False),
        ("fsdp_sharding_strategy", "HYBRID_SHARD", True),
        ("fsdp_reshard_after_forward", "FULL_SHARD", True),
        ("fsdp_reshard_after_forward", "SHARD_GRAD_OP", False),
    ],
)
def test_strategies(data: dict[str, Any], key: str, strategy: Any, reshard: bool) -> None:
    """A strategy becomes reshard_after_forward; what has no effect is gone; the rest is as it was."""
    old = copy.deepcopy(data)
    block = block_of(old)
    del block["fsdp_sharding_strategy"]
    block[key] = strategy
    before = copy.deepcopy(old)
    new = convert_config_to_fsdp2(old)
    assert old == before
    gone = {"fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params", key}
    expected = {name: value for name, value in block.items() if name not in gone}
    assert block_of(new) == {**expected, "fsdp_reshard_after_forward": reshard, "fsdp_version": 2}
    assert {name: value for name, value in new.items() if name != "fsdp_config" and not name.startswith("fsdp")} == {
        name: value for name, value in old.items() if name != "fsdp_config" and not name.startswith("fsdp")
    }


@pytest.mark.parametrize("data", [ACCELERATE, OURS], ids=["accelerate", "ours"])
def test_hybrid_machines(data: dict[str, Any]) -> None:
    """A hybrid strategy on several machines adds a replica for each, and keeps a mesh that is there."""
    old = copy.deepcopy(data) | {"num_machines": 2}
    block_of(old)["fsdp_sharding_strategy"] = "HYBRID_SHARD"
    new, notes = convert_file(old, "c.yaml")
    assert (new.get("parallelism_config") or new)["parallelism_config_dp_replicate_size"] == 2
    assert notes[-1] == "added parallelism_config_dp_replicate_size: 2, one replica for each machine"
    _, notes = convert_file({name: value for name, value in old.items() if name != "num_machines"}, "c.yaml")
    assert notes[-1].startswith("on one machine the shards are over all processes")
    mesh = {"parallelism_config_dp_replicate_size": 1}
    kept = convert_file(old | ({"parallelism_config": mesh} if "fsdp_config" in old else mesh), "c.yaml")[0]
    assert (kept.get("parallelism_config") or kept)["parallelism_config_dp_replicate_size"] == 1


def test_every_change_said() -> None:
    """The notes name every key that changed."""
    _, notes = convert_file(ACCELERATE | {"fsdp_config": BLOCK | {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}}, "c.yaml")
    assert notes == [
        "dropped fsdp_backward_prefetch: version 2 prefetches in the backward pass by itself",
        "dropped fsdp_forward_prefetch: version 2 prefetches in the forward pass by itself",
        "fsdp_sharding_strategy: FULL_SHARD became fsdp_reshard_after_forward: true",
        "fsdp_state_dict_type: LOCAL_STATE_DICT became SHARDED_STATE_DICT: version 2 has no flat parameters",
        "dropped fsdp_use_orig_params: parameters are always the original ones",
        "fsdp_version: 1 became 2",
    ]


@pytest.mark.parametrize("data", [ACCELERATE, OURS], ids=["accelerate", "ours"])
def test_converted_once(data: dict[str, Any]) -> None:
    """What was converted is left as it is the next time, and the options are taken without a word."""
    new = convert_config_to_fsdp2(data)
    assert convert_file(new, "c.yaml") == (new, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_sharding(None, build_config(parse_config_file(new, "c.yaml").choices).sharding, "no") is not None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "shards nothing"),
        ({"fsdp_sharding_strategy": "SOME_SHARD"}, "is not one of the choices"),
        ({"fsdp_reshard_after_forward": False}, "FULL_SHARD contradicts fsdp_reshard_after_forward: false .both from c.yaml"),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "contradicts"),
    ],
)
def test_refused(changes: dict[str, Any], why: str) -> None:
    """What version 2 does not have is refused with the file and the key."""
    with pytest.raises(ConfigError, match=why) as caught:
        convert_file(ACCELERATE | {"fsdp_config": BLOCK | changes}, "c.yaml")
    assert "c.yaml" in str(caught.value)


@pytest.mark.parametrize("data", [{}, {"num_processes": 2}, {"distributed_type": "FSDP", "fsdp_config": {}}, {"fsdp_config": "x"}])
def test_nothing_to_convert(data: dict[str, Any]) -> None:
    """A file without options of sharding is refused."""
    with pytest.raises(ConfigError, match="c.yaml has no options of FSDP"):
        convert_file(data, "c.yaml")


VALUES = {
    "fsdp_sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "1", 2],
    "fsdp_offload_params": [True, False],
    "fsdp_auto_wrap_policy": ["SIZE_BASED_WRAP", "NO_WRAP"],
    "fsdp_min_num_params": [10, 1000],
    "fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    "fsdp_sync_module_states": [True],
    "fsdp_cpu_ram_efficient_loading": [True, False],
    "fsdp_activation_checkpointing": [True, False],
    "fsdp_backward_prefetch": ["BACKWARD_POST", "NO_PREFETCH"],
    "fsdp_use_orig_params": [True, False],
    "fsdp_version": [1, 2],
}


@given(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in VALUES.items()}).filter(bool))
def test_same_sharding(block: dict[str, Any]) -> None:
    """A converted file shards exactly as the old one does."""
    found = []
    before = {"distributed_type": "FSDP", "fsdp_config": block}
    for data in (before, convert_config_to_fsdp2(before)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(resolve_sharding(None, build_config(parse_config_file(data, "c.yaml").choices).sharding, "bf16"))
    old, new = found
    assert old is not None
    assert new is not None
    assert {**vars(old), "hybrid": False} == {**vars(new), "hybrid": False}


def test_converted_file_launches(tmp_path: Path) -> None:
    """A converted file can be resolved as any other."""
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(convert_config_to_fsdp2(ACCELERATE)))
    config = resolve(config_file=path, environ={})
    assert (config.sharding.use_fsdp, config.sharding.fsdp_reshard_after_forward, config.sharding.fsdp_version) == (True, "true", 2)
