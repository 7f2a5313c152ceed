"""`slipstream doctor`: looks for what keeps jobs from running here, and says what helps.

On one machine it judges facts about that machine. With `--num_machines`, run on every machine at the same time, the machines
also meet on the port of the main process and compare ranks, versions and clocks. Under Slurm and other systems that number
machines, ranks and addresses come from their variables. Exit code 1 if something is wrong, 2 for options that cannot be used.
"""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import click

from slipstream.cli.health.checks import Finding, judge
from slipstream.cli.health.facts import collect
from slipstream.cli.health.meeting import Machine, Meeting, join, listen, serve
from slipstream.cli.health.together import judge_meeting, no_meeting
from slipstream.config import OPTIONS, Config, flag_names, resolve
from slipstream.config.sources import environment
from slipstream.devices.packages import version_of
from slipstream.errors import ConfigError
from slipstream.runtime.clusters import detect

__all__ = ["command", "diagnose"]

_FLAGS: Final = (
    "config_file",
    "cpu",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "num_cpu_threads_per_process",
)
_STYLES: Final = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def diagnose(config: Config, environ: Mapping[str, str], *, seconds: float) -> list[Finding]:
    """Every finding for a run with this configuration."""
    config, findings = _placed(config, environ)
    findings += judge(collect(config, environ))
    if config.launch.num_machines == 1:
        return [*findings, *no_meeting()]
    config.require_main_process()
    return [*findings, *judge_meeting(_meet(config, seconds))]


def _placed(config: Config, environ: Mapping[str, str]) -> tuple[Config, list[Finding]]:
    """The configuration with what a cluster says of this machine, where nobody said otherwise."""
    try:
        process = detect(environ)
    except ConfigError as error:
        remedy = "correct these variables, or unset them all to run as a single process"
        return config, [Finding("rank variables", "error", str(error), remedy)]
    if process.num_nodes == 1 or config.origin("num_machines").kind != "default":
        return config, [Finding("rank variables", "ok", f"{process.cluster}: process {process.rank} of {process.world_size}")]
    known = {
        "num_machines": process.num_nodes,
        "machine_rank": process.node_rank,
        "main_process_ip": process.master_addr,
        "main_process_port": process.master_port,
    }
    unsaid = {name: value for name, value in known.items() if config.origin(name).kind == "default"}
    text = f"{process.cluster}: machine {process.node_rank} of {process.num_nodes}"
    return config.replace(caller=process.cluster, **unsaid), [Finding("rank variables", "ok", text)]


def _meet(config: Config, seconds: float) -> Meeting:
    launch = config.launch
    assert launch.main_process_ip is not None
    assert launch.main_process_port is not None
    versions = {name: version_of(name) or "missing" for name in ("slipstream", "torch")}
    me = Machine(
        machine_rank=launch.machine_rank,
        host=socket.gethostname(),
        num_machines=launch.num_machines,
        versions={**versions, "python": ".".join(platform.python_version_tuple()[:2])},
    )
    if launch.machine_rank != 0:
        return join(launch.main_process_ip, launch.main_process_port, me, seconds=seconds)
    try:
        with listen(launch.main_process_port) as listener:
            return serve(listener, me, seconds=seconds)
    except OSError as error:
        return Meeting(problems=(f"port {launch.main_process_port} cannot be listened on: {error.strerror or error}",))


def _table(findings: list[Finding]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for title in ("", "check", "finding, and what helps"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = Text(finding.level, style=_STYLES[finding.level])
        remedy = Text(f"\n> {finding.remedy}", style="italic") if finding.remedy else ""
        table.add_row(mark, Text(finding.name), Text.assemble(finding.text, remedy))
    return table


def _verdict(findings: list[Finding]) -> str:
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if errors:
        return f"{errors} of {len(findings)} checks found something that has to be put right."
    if warnings:
        return f"Jobs can run here; {warnings} of {len(findings)} checks found something that may disturb them."
    return f"All {len(findings)} checks are fine."


def _with_flags(command: click.Command) -> click.Command:
    for name in _FLAGS:
        option = OPTIONS[name]
        kind: dict[str, Any] = {"is_flag": True, "default": None} if option.is_switch else {"metavar": option.type.__name__.upper()}
        command.params.append(click.Option([*flag_names(option), name], help=option.help, **kind))
    return command


@_with_flags
@click.command(name="doctor", short_help="Look for what keeps jobs from running here, and say what helps.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--wait", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Seconds to wait for other machines."
)
def command(as_json: bool, wait: float, **flags: Any) -> None:
    """Look for what keeps jobs from running here, and say what helps.

    With --num_machines, run it on every machine at the same time, each with its own --machine_rank.
    """
    environ = environment()
    config = resolve(flags=flags, environ=environ, default_file=True)
    findings = diagnose(config, environ, seconds=wait)
    if as_json:
        click.echo(json.dumps({"verdict": _verdict(findings), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        from rich.console import Console

        Console().print(_table(findings))
        click.echo(_verdict(findings))
    click.get_current_context().exit(1 if any(finding.level == "error" for finding in findings) else 0)
