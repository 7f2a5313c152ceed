"""`accelerate config` and its subcommands `default` and `update`."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.config.config import config_command_parser
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.config.default import default_command_parser
from accelerate.commands.config.update import update_command_parser

__all__ = [
    "config_command_parser", "default_command_parser", "default_config_file", "get_config_parser", "load_config_from_file", "main",
    "update_command_parser",
]


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config` with its subcommands."""
    parser = config_command_parser(subparsers)
    if subparsers is None:
        from accelerate.commands.config.config import config_command

        parser.set_defaults(func=config_command)
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    subcommands = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(subcommands, parents=[shared])
    update_command_parser(subcommands, parents=[shared])
    return parser


def main() -> None:
    """Run the command `accelerate-config`."""
    args = get_config_parser().parse_args()
    args.func(args)


if __name__ == "__main__":
    main()
