"""Convert options of FSDP version 1 to version 2, in configuration files of either format.

`RESHARD_OF` of the schema and `WITHOUT_EFFECT` say what becomes of the options of version 1; the plugin in the script uses them too. A
conversion returns a new mapping and what it did; a file that shards nothing, or asks for what version 2 does not have, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slipstream.config.option import Origin, option_text, parse
from slipstream.config.schema import OPTIONS, RESHARD_OF
from slipstream.errors import ConfigError

__all__ = ["WITHOUT_EFFECT", "convert_config_to_fsdp2", "convert_file"]

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "backward_prefetch": "version 2 prefetches in the backward pass by itself",
    "forward_prefetch": "version 2 prefetches in the forward pass by itself",
    "use_orig_params": "parameters are always the original ones",
}
"""Options of version 1 without a meaning in version 2, and why."""

_REPLICAS: Final = "parallelism_config_dp_replicate_size"


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a configuration file of version 1, written for version 2; `config` stays as it is.

    >>> old = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_use_orig_params": True}}
    >>> convert_config_to_fsdp2(old)["fsdp_config"]
    {'fsdp_reshard_after_forward': False, 'fsdp_version': 2}
    """
    return convert_file(config, "the configuration")[0]


def convert_file(data: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a file, converted, and what was changed; nothing was if the file is one of version 2 already."""
    nested = isinstance(data.get("fsdp_config"), dict)
    block: Mapping[str, Any] = data["fsdp_config"] if nested else data
    if not any(key.startswith("fsdp_") for key in block if key != "fsdp_config"):
        raise ConfigError(
            f"{path} has no options of FSDP, so there is nothing to convert.\n"
            "Give a file with fsdp_config: (of `accelerate config`), or with fsdp_ options (of `slipstream config`)."
        )
    converted, notes, hybrid = _convert_block(block, path)
    result: dict[str, Any] = {**data, "fsdp_config": converted} if nested else converted
    machines = data.get("num_machines", 1)
    if hybrid and isinstance(machines, int) and machines > 1:
        mesh = dict(data.get("parallelism_config") or {}) if nested else result
        if _REPLICAS not in mesh:
            mesh[_REPLICAS] = machines
            notes.append(f"added {_REPLICAS}: {machines}, one replica for each machine")
        if nested:
            result["parallelism_config"] = mesh
    elif hybrid:
        notes.append(f"on one machine the shards are over all processes; for several, add {_REPLICAS} with their number")
    return result, notes


def _convert_block(block: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str], bool]:
    """Return the keys of version 2, what was changed, and whether replicas across machines were asked for."""
    kept: dict[str, Any] = {}
    notes: list[str] = []
    strategies = {key: _strategy(key, block, path) for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")}
    for key, value in block.items():
        name = key.removeprefix("fsdp_").removesuffix("_policy") if key == "fsdp_backward_prefetch_policy" else key.removeprefix("fsdp_")
        if key.startswith("fsdp_") and name in WITHOUT_EFFECT:
            notes.append(f"dropped {key}: {WITHOUT_EFFECT[name]}")
        elif strategies.get(key) is not None:
            notes.append(f"{key}: {value} became fsdp_reshard_after_forward: {option_text(RESHARD_OF[str(strategies[key])])}")
        elif key == "fsdp_state_dict_type" and str(value).upper() == "LOCAL_STATE_DICT":
            kept[key] = "SHARDED_STATE_DICT"
            notes.append(f"{key}: LOCAL_STATE_DICT became SHARDED_STATE_DICT: version 2 has no flat parameters")
        else:
            kept[key] = value
    found = [strategy for strategy in strategies.values() if strategy is not None]
    if found:
        reshard = RESHARD_OF[found[0]]
        if len(set(found)) > 1 or kept.get("fsdp_reshard_after_forward", reshard) != reshard:
            raise ConfigError(
                f"fsdp_sharding_strategy: {block['fsdp_sharding_strategy']} contradicts fsdp_reshard_after_forward: "
                f"{option_text(block['fsdp_reshard_after_forward'])} (both from {path}).\nKeep one of them."
            )
        kept["fsdp_reshard_after_forward"] = reshard
    if block.get("fsdp_version") != 2:
        kept["fsdp_version"] = 2
        notes.append(f"fsdp_version: {block.get('fsdp_version', 1)} became 2")
    return kept, notes, any(strategy.startswith("HYBRID") for strategy in found)


def _strategy(key: str, block: Mapping[str, Any], path: str) -> str | None:
    """Return the strategy of version 1 that a key names, or None."""
    if block.get(key) is None:
        return None
    value = parse(OPTIONS[key], block[key], Origin("file", f"{path}: {key}"))
    return str(value) if value in RESHARD_OF else None
