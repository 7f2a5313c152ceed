"""`accelerate to-fsdp2`: rewrite a configuration file of FSDP version 1 for version 2."""

from __future__ import annotations

import argparse
import enum
import logging
from pathlib import Path
from typing import Any

from accelerate.commands.utils import CustomArgumentParser
from slipstream.config.fsdp2 import WITHOUT_EFFECT, convert_file
from slipstream.config.schema import RESHARD_OF

__all__ = [
    "ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING", "ConversionStatus", "convert_config_to_fsdp2", "load_config", "to_fsdp2_command",
    "to_fsdp2_command_parser",
]

logger = logging.getLogger(__name__)

description = "Rewrite a configuration file of FSDP version 1 for version 2."


class ConversionStatus(enum.Enum):
    """What becomes of an option that version 2 does not have."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_KEPT = (
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_cpu_ram_efficient_loading", "fsdp_offload_params"),
    *("fsdp_state_dict_type", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_activation_checkpointing"),
    "fsdp_activation_checkpointing_offload",
)
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{name: name for name in _KEPT},
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    **{f"fsdp_{name}": ConversionStatus.REMOVED for name in WITHOUT_EFFECT},
}
"""Which option of version 2 an option of version 1 becomes."""
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, Any]] = {
    "fsdp_sharding_strategy": dict(RESHARD_OF),
    "fsdp_reshard_after_forward": dict(RESHARD_OF),
}
"""What becomes of the values. NO_SHARD has none: it shards nothing, and a file with it is refused."""


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file written for version 2; a file without FSDP is returned as it is.

    >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True}})
    {'fsdp_config': {'fsdp_reshard_after_forward': True, 'fsdp_version': 2}}
    """
    block = config.get("fsdp_config") or {}
    if not block:
        logger.info("There is no fsdp_config, so there is nothing to convert.")
        return config
    if block.get("fsdp_version", 1) == 2:
        # the words are part of the interface: programs look for them in the log
        logger.warning("Config already specifies FSDP2, skipping conversion...")
        return config
    content = {**config, "fsdp_config": {key: value for key, value in block.items() if key != "fsdp_sync_module_states"}}
    converted, notes = convert_file(content, "the configuration") if content["fsdp_config"] else (content, [])
    converted["fsdp_config"]["fsdp_version"] = 2
    if "fsdp_sync_module_states" in block:
        notes.append("dropped fsdp_sync_module_states: the weights of the main process always count in version 2")
    for note in notes:
        logger.warning(f"to-fsdp2: {note}")
    return converted


def load_config(config_file: str) -> dict[str, Any]:
    """Return the content of a YAML file."""
    import yaml

    return yaml.safe_load(Path(config_file).read_text(encoding="utf-8")) or {}


def _validate_to_fsdp2_args(args: argparse.Namespace) -> None:
    """Raise unless the file exists and it is said where the result goes."""
    if not Path(args.config_file).exists():
        raise FileNotFoundError(f"The configuration file {args.config_file} does not exist.")
    if not args.overwrite and args.output_file is None:
        raise ValueError("It is not said where the result goes: give --output_file, or --overwrite to change the file itself.")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"{args.output_file} exists: give another --output_file, or --overwrite.")


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert the file."""
    import yaml

    _validate_to_fsdp2_args(args)
    config = load_config(args.config_file)
    converted = convert_config_to_fsdp2(config)
    if converted is config:
        return
    target = Path(args.output_file if args.output_file is not None else args.config_file)
    target.write_text(yaml.safe_dump(converted), encoding="utf-8")


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate to-fsdp2`."""
    if subparsers is not None:
        parser = subparsers.add_parser("to-fsdp2", description=description)
    else:
        parser = CustomArgumentParser(description=description)
    parser.add_argument("--config_file", type=str, required=True, help="The file to convert.")
    parser.add_argument("--overwrite", action="store_true", default=False, help="Change the file itself, or an existing output file.")
    parser.add_argument("--output_file", type=str, default=None, help="Where the result goes (default: the file itself).")
    if subparsers is not None:
        parser.set_defaults(func=to_fsdp2_command)
    return parser
