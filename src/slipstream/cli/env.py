"""`slipstream env`: describe this machine and installation for a bug report, without secrets.

A configuration that cannot be read is reported, not raised, because this command is run when something is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from slipstream.config.sources import environment
from slipstream.observability.run_dir.environment import environment_report

__all__ = ["command"]


def _as_text(sections: Mapping[str, dict[str, Any]]) -> str:
    lines: list[str] = []
    for title, entries in sections.items():
        width = max((len(key) for key in entries), default=0)
        lines.append(f"{title.capitalize()}")
        lines += [f"  {key:<{width}}  {str(value).replace(chr(10), ' ')}".rstrip() for key, value in entries.items()] or ["  (none)"]
    return "\n".join(lines)


@click.command(name="env", short_help="Describe this machine for a bug report; secrets are left out.")
@click.option("--config_file", "--config-file", "config_file", metavar="FILE", help="Report this configuration file, not the default one.")
@click.option("--deep", is_flag=True, help="Import torch too and ask it for devices, backends and threads (slower).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config_file: str | None, deep: bool, as_json: bool) -> None:
    """Describe this machine for a bug report; secrets are left out."""
    sections = environment_report(environment(), config_file=config_file, deep=deep)
    click.echo(json.dumps(sections, indent=2) if as_json else _as_text(sections))
