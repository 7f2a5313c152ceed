"""`slipstream to-fsdp2`: rewrite a configuration file of FSDP version 1 for version 2."""

from __future__ import annotations

import os
from pathlib import Path

import click

from slipstream.config.files import back_up, parse_config_file, write_data
from slipstream.config.fsdp2 import convert_file
from slipstream.config.resolved_config import build_config
from slipstream.config.sources import read_file
from slipstream.errors import ConfigError

__all__ = ["command"]


@click.command(name="to-fsdp2", short_help="Rewrite a configuration file of FSDP version 1 for version 2.")
@click.option("--config_file", "--config-file", "config_file", metavar="FILE", help="The file to convert; YAML or JSON.")
@click.option("--output_file", "--output-file", "output_file", metavar="FILE", help="The file to write; without it, --config_file.")
@click.option("--overwrite", is_flag=True, help="Replace the file that is written if it exists.")
def command(config_file: str | None, output_file: str | None, overwrite: bool) -> None:
    """Rewrite a configuration file of FSDP version 1 for version 2.

    Takes files of `slipstream config` and of `accelerate config`, and keeps their format. Says what became of every option. A file that
    is replaced is kept beside the new one.
    """
    if not config_file:
        raise ConfigError("There is no file to convert.\nWrite: slipstream to-fsdp2 --config_file FILE --output_file NEW_FILE")
    target = Path(os.path.expanduser(output_file or config_file))
    if target.exists() and not overwrite:
        other = "" if output_file else " --output_file for another place, or"
        raise ConfigError(f"The file {target} exists already.\nGive{other} --overwrite to replace it.")
    converted, notes = convert_file(read_file(config_file), config_file)
    build_config(parse_config_file(converted, config_file).choices)
    if not notes:
        click.echo(f"{config_file} is written for version 2 already.")
        if target == Path(os.path.expanduser(config_file)):
            return
    if target.exists():
        click.echo(f"Kept the old file as {back_up(target)}.")
    write_data(target, converted)
    for note in notes:
        click.echo(note)
    click.echo(f"Wrote {target}.")
