"""The console command `accelerate`. Errors in the input are a message and exit code 2, without a traceback. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from accelerate.commands.config import get_config_parser
from accelerate.commands.env import env_command_parser
from accelerate.commands.estimate import estimate_command_parser
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.merge import merge_command_parser
from accelerate.commands.test import test_command_parser
from accelerate.commands.to_fsdp2 import to_fsdp2_command_parser
from accelerate.commands.tpu import tpu_command_parser
from accelerate.commands.utils import CustomArgumentParser
from slipstream.errors import ConfigError, LaunchError, SlipstreamError

__all__ = ["get_parser", "main", "run_and_report"]


def get_parser() -> CustomArgumentParser:
    """Return the parser of `accelerate` with all subcommands."""
    parser = CustomArgumentParser(
        "accelerate",
        usage="accelerate <command> [<args>]",
        allow_abbrev=False,
        description="The commands of Accelerate, carried out by Slipstream. `accelerate <command> --help` says more about each.",
    )
    subparsers = parser.add_subparsers(help="The commands.")
    get_config_parser(subparsers=subparsers)
    estimate_command_parser(subparsers=subparsers)
    env_command_parser(subparsers=subparsers)
    launch_command_parser(subparsers=subparsers)
    merge_command_parser(subparsers=subparsers)
    tpu_command_parser(subparsers=subparsers)
    test_command_parser(subparsers=subparsers)
    to_fsdp2_command_parser(subparsers=subparsers)
    return parser


def run_and_report(command: Callable[[Any], Any], args: Any) -> int:
    """Call a command and return its exit code; print errors that are raised on purpose as messages."""
    try:
        command(args)
    except (ConfigError, FileNotFoundError) as error:
        code = 2
        print(f"accelerate: {error}", file=sys.stderr)
    except LaunchError as error:
        code = error.exit_code
        print(error, file=sys.stderr)
    except SlipstreamError as error:
        code = 1
        print(f"accelerate: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    else:
        code = 0
    return code


def main() -> None:
    """Run the command."""
    parser = get_parser()
    args = parser.parse_args()
    if not hasattr(args, "func"):
        parser.print_help()
        sys.exit(1)
    sys.exit(run_and_report(args.func, args))


if __name__ == "__main__":
    main()
