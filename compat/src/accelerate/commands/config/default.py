"""`accelerate config default`, and `write_basic_config`: the configuration that fits this machine, without questions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate._enumerations import ComputeEnvironment
from accelerate.commands.config.config_args import ClusterConfig, default_json_config_file
from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.utils.environment import get_current_device_type
from slipstream.devices.count import count_without_torch
from slipstream.errors import ConfigError

__all__ = ["default_command_parser", "default_config_command", "write_basic_config"]

description = "Write a configuration file that fits this machine, without questions."

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def write_basic_config(mixed_precision: str = "no", save_location: str = default_json_config_file) -> Path | bool:
    """Write a configuration that uses what this machine has, and return its path; False where the file exists already."""
    path = Path(save_location)
    if path.exists():
        print(f"{save_location} exists, and is left as it is. Give another save_location, or change it with `accelerate config`.")
        return False
    if mixed_precision.lower() not in _PRECISIONS:
        raise ConfigError(f"mixed_precision={mixed_precision!r} does not exist: write one of {', '.join(_PRECISIONS)}")
    _, count = count_without_torch(dict(os.environ))
    kind = get_current_device_type()[1] if count > 1 else "NO"
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=kind,  # type: ignore[arg-type]
        mixed_precision=mixed_precision.lower(),
        use_cpu=count == 0,
        debug=False,
        num_processes=max(1, count),
    )
    if path.suffix == ".json":
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    return path


def default_command_parser(parser: Any, parents: Any) -> Any:
    """Add the subcommand `default` to those of `accelerate config`."""
    parser = parser.add_parser("default", parents=parents, help=description, formatter_class=SubcommandHelpFormatter)
    parser.add_argument(
        "--config_file", default=default_json_config_file, dest="save_location", help="Where it is written (default: %(default)s)."
    )
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help="The number format of training.")
    parser.set_defaults(func=default_config_command)
    return parser


def default_config_command(args: Any) -> None:
    """Write the file, and say where it is."""
    written = write_basic_config(args.mixed_precision, args.save_location)
    if written:
        print(f"Wrote {written}. `accelerate launch` reads it.")
