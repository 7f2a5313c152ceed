"""The command `slipstream`: find the command that was named, import only that one, and turn errors into messages.

A mistake in the input is a message of a few lines on stderr and exit code 2; a failed job returns the exit code of its first failure; no
error that we raise on purpose shows a traceback. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import click

from slipstream.config.names import nearest
from slipstream.errors import CheckpointError, ConfigError, LaunchError, SlipstreamError
from slipstream.public_names import COMMANDS as ABSENT_COMMANDS, absence_message

__all__ = ["cli", "main"]

_COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "launch": "Run a script in one or more processes, on one or more machines.",
        "config": "Make or change a configuration file.",
        "to-fsdp2": "Rewrite a configuration file of FSDP version 1 for version 2.",
        "env": "Describe this machine and installation, for a bug report.",
        "test": "Check that processes here can work together, and train.",
        "merge-weights": "Merge weights in several files into one file.",
        "checkpoint": "Inspect checkpoints: list, verify, show, compare.",
        "report": "Make a page of curves, times and settings of one or several runs.",
        "watch": "Show runs in progress, in a browser or in the terminal.",
        "estimate": "Estimate the memory of a model before it is loaded.",
        "migrate": "Move scripts from Accelerate, DDP or DeepSpeed to Slipstream.",
        "doctor": "Look for common problems of a machine, with remedies.",
    }
)

_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"estimate-memory": "estimate"})
"""Names that users of other tools know."""


class _Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = _ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        module = f"slipstream.cli.{cmd_name.replace('-', '_')}"
        try:
            found: click.Command = importlib.import_module(module).command
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ConfigError(f"The command {cmd_name} is not available in this version.") from None
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in ABSENT_COMMANDS:
            raise ConfigError(absence_message(f"There is no command {name}", ABSENT_COMMANDS[name]))
        if name not in _COMMANDS and name not in _ALIASES:
            near = nearest(name, _COMMANDS)
            hint = f"Did you mean {near[0]}?" if near else "The commands are: " + ", ".join(_COMMANDS) + "."
            raise ConfigError(f"There is no command {name}.\n{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"slipstream {version('slipstream')}")
        ctx.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="`slipstream COMMAND --help` says more about each.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version.")
def cli() -> None:
    """Run plain PyTorch scripts in many processes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        code = cli.main(list(arguments) if arguments is not None else None, prog_name="slipstream", standalone_mode=False)
    except ConfigError as error:
        return _print_error(_escape(str(error)), 2)
    except LaunchError as error:
        return _print_error(str(error), error.exit_code)
    except CheckpointError as error:
        return _print_error(_escape(str(error)), 1)
    except SlipstreamError as error:
        return _print_error(str(error), 1)
    except click.ClickException as error:
        return _print_error(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone, which is not a failure
        return 141
    return code if isinstance(code, int) else 0


def _escape(message: str) -> str:
    """Escape control characters in text that may come from a file."""
    from slipstream.observability.report.text_charts import escape_control

    return "\n".join(map(escape_control, message.split("\n")))


def _print_error(message: str, exit_code: int) -> int:
    print(f"slipstream: {message}", file=sys.stderr, flush=True)
    return exit_code
