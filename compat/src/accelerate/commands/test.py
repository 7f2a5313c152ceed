"""`accelerate test`: run the bundled script that checks the runtime, with the configuration of ordinary jobs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["main", "test_command", "test_command_parser"]


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028  # no test
    """Return the parser of `accelerate test`."""
    description = "Check that processes can work together and train here, with the configuration of ordinary jobs."
    if subparsers is not None:
        parser = subparsers.add_parser("test", description=description)
    else:
        parser = argparse.ArgumentParser("Accelerate test command", description=description)
    parser.add_argument("--config_file", default=None, help="The configuration to use, instead of the default one.")
    if subparsers is not None:
        parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the script, and say how it went; a failure, whose output has been shown, ends the command with a message."""
    from accelerate.test_utils.testing import execute_subprocess_async, path_in_accelerate_package
    from slipstream.errors import SlipstreamError

    script = path_in_accelerate_package("test_utils", "scripts", "test_script.py")
    options = [] if args.config_file is None else [f"--config_file={args.config_file}"]
    try:
        execute_subprocess_async([sys.executable, "-m", "accelerate.commands.launch", *options, str(script)])
    except RuntimeError as error:
        raise SlipstreamError("test: the check failed; its output is above.") from error
    print("Everything that was checked works.")


def main() -> None:
    """Run the command."""
    from accelerate.commands.accelerate_cli import run_and_report

    raise SystemExit(run_and_report(test_command, test_command_parser().parse_args()))


if __name__ == "__main__":
    main()
