"""`accelerate config update`: rewrite a configuration file with today's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.config.config_utils import SubcommandHelpFormatter

__all__ = ["update_command_parser", "update_config", "update_config_command"]

description = "Rewrite a configuration file of an earlier version with today's keys and defaults."


def update_config(args: Any) -> str:
    """Rewrite a file, and return its path."""
    path = args.config_file
    if path is None:
        path = default_config_file
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist. `accelerate config` writes a new one.")
    config = load_config_from_file(path)
    if str(path).endswith(".json"):
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    return str(path)


def update_command_parser(parser: Any, parents: Any) -> Any:
    """Add the subcommand `update` to those of `accelerate config`."""
    parser = parser.add_parser("update", parents=parents, help=description, formatter_class=SubcommandHelpFormatter)
    parser.add_argument("--config_file", default=None, help=f"The file (default: {default_config_file}).")
    parser.set_defaults(func=update_config_command)
    return parser


def update_config_command(args: Any) -> None:
    """Rewrite the file, and say where it is."""
    print(f"Rewrote {update_config(args)}.")
