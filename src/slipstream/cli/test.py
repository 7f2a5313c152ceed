"""`slipstream test [options of launch]`: run a small job that checks whether processes can work together here.

Runs `slipstream.testing.selfcheck` through `slipstream launch` with the options and configuration of an ordinary job, on the device that
they choose, and prints the result; its last line can be pasted into an issue. Exit code 0: every check passed; 1: a check or the job
failed; 2: options that cannot be used. With several machines, run it on each; machine 0 prints the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from slipstream.cli.launch import command as launch_command
from slipstream.config import Config, resolve
from slipstream.errors import ConfigError
from slipstream.launch.worker_processes import die_with_parent
from slipstream.observability.run_dir.environment import software_line

__all__ = ["command"]

_JOB: Final = "slipstream.testing.selfcheck"
_PATIENCE: Final = {"timeout": "120", "barrier_timeout": "120"}
"""A check waits less long than training, unless the user says otherwise."""


def _configuration(arguments: Sequence[str]) -> Config:
    """Return the configuration of the options of `launch`; raise if a job would be refused, or if they do not fit a check."""
    given: dict[str, Any] = launch_command.make_context("test", list(arguments)).params
    words = given.pop("words")
    if words:
        raise ConfigError(
            f"`slipstream test` runs a check of its own, so it takes no script: {words[0]}.\nWrite: slipstream launch {words[0]}"
        )
    for name in ("module", "no_python"):
        if given.get(name):
            raise ConfigError(f"--{name} is about a script, and `slipstream test` takes none.\nLeave it out.")
    return resolve(flags=given, default_file=True)


def _command_line(arguments: Sequence[str], config: Config, report: Path) -> list[str]:
    patience = [word for name, value in _PATIENCE.items() if config.origin(name).kind == "default" for word in (f"--{name}", value)]
    return [sys.executable, "-m", "slipstream", "launch", *arguments, *patience, "--module", _JOB, "--report", str(report)]


def _run(command_line: Sequence[str], *, stdout: int | None) -> int:
    """Return the exit code of the job; an interrupt reaches the launcher by itself, which then ends the job."""
    with subprocess.Popen(command_line, stdout=stdout, preexec_fn=partial(die_with_parent, os.getpid())) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise


@click.command(
    name="test",
    short_help="Check that processes here can work together, and train.",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS OF LAUNCH]",
    epilog="`slipstream launch --help` lists the options of launch, such as --cpu, --device, --num_processes and --config_file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON; what the job prints goes to stderr.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(as_json: bool, arguments: tuple[str, ...]) -> None:
    """Check that processes here can work together, and train.

    Runs a small job: collectives, a deliberate mistake that must be reported, and a training whose result must equal that of one process.
    """
    config = _configuration(arguments)
    with tempfile.TemporaryDirectory(prefix="slipstream-test-") as folder:
        report = Path(folder) / "report.json"
        code = _run(_command_line(arguments, config, report), stdout=sys.stderr.fileno() if as_json else None)
        outcome = json.loads(report.read_text()) if report.exists() else None
    if as_json:
        click.echo(json.dumps(outcome or {"verdict": _without_report(code, config), "checks": []}, indent=2))
    elif outcome is None and not config.command.show:
        click.echo(_without_report(code, config), err=code != 0)
    click.get_current_context().exit(code if code in (0, 1, 2) else 1)


def _without_report(code: int, config: Config) -> str:
    if code == 0:
        return "This machine did its part; machine 0 has the outcome."
    where = f"{config.device.family or 'the device of this machine'}, {software_line()}"
    return f"The check did not come to an end: the job failed with exit code {code}.\ndid not work (no outcome) on {where}"
