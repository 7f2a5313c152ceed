"""`slipstream migrate`: show, or make, the changes that move scripts to Slipstream."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from slipstream.errors import ConfigError
from slipstream.migrate.migration import ORIGINS, Migration, migrate_text
from slipstream.migrate.notebook_cells import migrate_notebook
from slipstream.migrate.script_files import ScriptFile, decode_script, find_scripts, read_script, write_scripts

__all__ = ["command"]

_COLORS = {"+": "green", "-": "red", "@": "cyan"}


@click.command(name="migrate", short_help="Move scripts from Accelerate, DDP or DeepSpeed to Slipstream.")
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--write", is_flag=True, help="Make the changes. Each old file is kept beside the new one, as FILE.bak.")
@click.option("--check", is_flag=True, help="Change nothing, and exit with 1 if there is something to change.")
@click.option(
    "--from",
    "origin",
    type=click.Choice(ORIGINS),
    default="auto",
    show_default=True,
    help="What the scripts are written for; auto finds out by their imports.",
)
def command(paths: tuple[str, ...], write: bool, check: bool, origin: str) -> int:
    """Move scripts to Slipstream: from Accelerate, from hand-written DDP, or from DeepSpeed's launcher.

    PATH is a script, a notebook, a folder of them, or - for the standard input.

    Prints a diff to the standard output, with the reason of each hunk behind its @@; `patch -p1` and `git apply` take it. What has to be
    done by hand is listed with line numbers on the standard error. Scripts are read, never run, and keep their comments and formatting.
    With - and --write, the new script is printed instead of the diff.

    \b
    Exit codes:
      0  done, or nothing to do
      1  --check: there are changes to make
      2  a file cannot be read or written, or is not Python; then nothing is written
    """
    if not paths:
        raise ConfigError("There is nothing to migrate.\nWrite: slipstream migrate train.py")
    if write and check:
        raise ConfigError("--write makes changes and --check makes none.\nGive one of them.")
    if "-" in paths:
        return _migrate_stdin(paths, write, check, origin)
    scripts: list[tuple[ScriptFile, Migration]] = []
    errors: list[str] = []
    for path in find_scripts(paths):
        try:
            script = read_script(path)
            scripts.append((script, _migrate(script, origin)))
        except ConfigError as error:
            errors.append(str(error))
    if errors and (write or not scripts):
        raise ConfigError("\n".join(errors))
    changed = [(script, migration) for script, migration in scripts if migration.is_changed]
    if write:
        write_scripts([(script, migration.written or migration.new) for script, migration in changed], _tell)
    else:
        for _, migration in changed:
            _print_diff(migration)
    for _, migration in scripts:
        _print_notes(migration, alone=len(scripts) == 1)
    if errors:
        raise ConfigError("\n".join(errors))
    _summarize(len(scripts), changed, write)
    return 1 if check and changed else 0


def _migrate(script: ScriptFile, origin: str) -> Migration:
    if script.path.suffix == ".ipynb":
        return migrate_notebook(script.text, str(script.path), lambda text, name: migrate_text(text, name, origin))
    if script.path.suffix in (".json", ".yaml", ".yml", ".sh"):
        raise ConfigError(f"{script.path} is not a Python script.\nGive the script that uses it: slipstream migrate train.py")
    return migrate_text(script.text, str(script.path), origin)


def _migrate_stdin(paths: tuple[str, ...], write: bool, check: bool, origin: str) -> int:
    if len(paths) > 1:
        raise ConfigError("- is the standard input, which is one script.\nGive it alone.")
    script = decode_script(sys.stdin.buffer.read(), Path("stdin"))
    migration = migrate_text(script.text, "stdin", origin)
    if write:
        click.echo(migration.new, nl=False)
    else:
        _print_diff(migration)
    _print_notes(migration, alone=True)
    return 1 if check and migration.is_changed else 0


def _print_diff(migration: Migration) -> None:
    for line in migration.diff().splitlines(keepends=True):
        click.secho(line, fg=_COLORS.get(line[0]), nl=False)


def _print_notes(migration: Migration, *, alone: bool) -> None:
    for note in migration.notes:
        _tell(f"{migration.name}:{note.line}: {note.text}")
    if alone and not migration.is_changed:
        why = "see the notes above" if migration.notes else "it has no use of Accelerate, DDP or DeepSpeed that is to be changed"
        _tell(f"{migration.name}: nothing to change; {why}.")


def _summarize(count: int, changed: list[tuple[ScriptFile, Migration]], write: bool) -> None:
    if not changed:
        if count > 1:
            _tell(f"Nothing to change in {count} scripts.")
        return
    by_hand = sum(len(migration.notes) for _, migration in changed)
    rest = f" {by_hand} {'place has' if by_hand == 1 else 'places have'} to be looked at by hand: the lines above." if by_hand else ""
    names = ", ".join(migration.name for _, migration in changed)
    if write:
        _tell(f"Changed {names}.{rest}\nStart: slipstream launch {changed[0][1].name}")
    else:
        _tell(f"Would change {names}; --write does it.{rest}")


def _tell(text: str) -> None:
    click.echo(text, err=True)
