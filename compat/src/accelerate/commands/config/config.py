"""`accelerate config`: ask how this machine trains, and write the answers to a file."""

from __future__ import annotations

import argparse
import os
from typing import Any

from accelerate._enumerations import ComputeEnvironment
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.config.config_args import cache_dir, default_config_file, default_yaml_config_file, load_config_from_file
from accelerate.commands.config.config_utils import _ask_options, _convert_compute_environment
from accelerate.commands.config.sagemaker import get_sagemaker_input

__all__ = ["config_command", "config_command_parser", "default_config_file", "get_user_input", "load_config_from_file", "main"]

description = "Ask how this machine trains, and write the answers to a configuration file that `accelerate launch` reads."


def get_user_input() -> Any:
    """Ask all questions and return the configuration."""
    place = _ask_options("Where does it run?", ["This machine", "AWS (Amazon SageMaker)"], _convert_compute_environment)
    return get_sagemaker_input() if place == ComputeEnvironment.AMAZON_SAGEMAKER else get_cluster_input()


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`."""
    if subparsers is not None:
        parser = subparsers.add_parser("config", description=description)
    else:
        parser = argparse.ArgumentParser("Accelerate config command", description=description)
    parser.add_argument("--config_file", default=None, help=f"Where the answers are written (default: {default_yaml_config_file}).")
    if subparsers is not None:
        parser.set_defaults(func=config_command)
    return parser


def config_command(args: Any) -> None:
    """Ask, write the file, and say where it is."""
    config = get_user_input()
    path = args.config_file
    if path is None:
        os.makedirs(cache_dir, exist_ok=True)
        path = default_yaml_config_file
    if str(path).endswith(".json"):
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    print(f"Wrote {path}.")


def main() -> None:
    """Run the command."""
    config_command(config_command_parser().parse_args())


if __name__ == "__main__":
    main()
