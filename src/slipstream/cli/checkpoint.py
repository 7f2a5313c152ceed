"""`slipstream checkpoint`: list, verify, show and compare checkpoints.

    slipstream checkpoint ls runs                       a table of the checkpoints in a folder
    slipstream checkpoint verify runs                   reads every byte; exit code 1 if anything is wrong
    slipstream checkpoint show runs/checkpoint_3        what is in one checkpoint
    slipstream checkpoint diff runs/checkpoint_3 other  exit code 0 if they are equal, 1 if not, 2 if one cannot be read
    slipstream checkpoint export-dcp runs/checkpoint_3 out  writes a folder of torch.distributed.checkpoint

Folders of torch.distributed.checkpoint are looked into by the same commands. Nothing here changes a checkpoint, and only comparing and
writing such folders imports torch. Text from files is escaped before it is printed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from slipstream.checkpoint import inspect
from slipstream.checkpoint.dcp_inspect import find_dcp_problems
from slipstream.checkpoint.inspect import (
    CheckpointSummary,
    FolderSurvey,
    find_single_checkpoint,
    open_readable,
    split_duplicates,
    survey_location,
)
from slipstream.cli import checkpoint_dcp, checkpoint_view
from slipstream.cli.text_format import format_count
from slipstream.devices.memory import convert_bytes
from slipstream.distributed.progress_bar import bar
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.object_store import redact
from slipstream.observability.report.text_charts import escape_control

__all__ = ["command"]

_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="checkpoint", short_help="Inspect checkpoints: list, verify, show, compare, export.")
def command() -> None:
    """Inspect checkpoints: list, verify, show, compare.

    DIR is a checkpoint of save_state, a folder of checkpoints, or a URL such as
    s3://bucket/run. No checkpoint is changed, and inspecting needs no torch.
    """


@command.command(name="ls", short_help="List the checkpoints in folders.")
@click.argument("places", metavar="DIR...", nargs=-1, required=True)
@click.option("--verify", is_flag=True, help="Read every byte, not sizes alone.")
@_JSON
def _list(places: tuple[str, ...], verify: bool, as_json: bool) -> None:
    """List the checkpoints in folders: step, time, size, processes, metric.

    Sizes of files are compared with the manifest; --verify reads everything.
    Also lists what `latest` names, leftovers of interrupted saves, and folders
    that are not checkpoints.

    \b
    Examples:
      slipstream checkpoint ls runs
      slipstream checkpoint ls --verify runs/checkpoint_3
      slipstream checkpoint ls --json s3://bucket/run
    """
    surveys = _surveys(places)
    with _progress([checkpoint for found in surveys for checkpoint in found.checkpoints], shown=verify) as advance:
        found = [checkpoint_view.describe_survey(survey, verify=verify, advance=advance) for survey in surveys]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for data in found:
        for line in checkpoint_view.survey_lines(data, _now()):
            click.echo(line)


@command.command(name="verify", short_help="Read checkpoints completely and report damage.")
@click.argument("places", metavar="DIR...", nargs=-1, required=True)
@click.pass_context
def _verify(context: click.Context, places: tuple[str, ...]) -> None:
    """Read every byte of checkpoints and compare it with what was written.

    Every problem is a line that begins with the file. The exit code is 0 if
    there is no problem, 1 if there is one, 2 if there is nothing to verify.

    \b
    Examples:
      slipstream checkpoint verify runs/checkpoint_3
      slipstream checkpoint verify runs && echo all whole
    """
    wrong = sum(map(_verify_dcp, places))
    surveys = _surveys([place for place in places if not checkpoint_dcp.dcp_parts(place)])
    if empty := [found.given for found in surveys if not found.checkpoints and not any(_folder_problems(found))]:
        raise ConfigError(f"There is no checkpoint in {', '.join(map(redact, empty))}.\nGive a folder that save_state made.")
    with _progress([checkpoint for found in surveys for checkpoint in found.checkpoints]) as advance:
        for found in surveys:
            for problem in _folder_problems(found):
                wrong += 1
                click.echo(escape_control(problem))
            for checkpoint in found.checkpoints:
                problems = _problems(checkpoint, advance)
                wrong += len(problems)
                for problem in problems:
                    click.echo(escape_control(problem))
                if not problems:
                    assert checkpoint.manifest is not None, "a checkpoint without a manifest has problems"
                    size, step = convert_bytes(checkpoint.size), f"{checkpoint.manifest.step:,}"
                    click.echo(f"{escape_control(checkpoint.folder)}: whole ({size}, step {step})")
    if wrong:
        click.echo(f"{format_count(wrong, 'problem')}.", err=True)
        context.exit(1)


@command.command(name="show", short_help="Show what is in a checkpoint.")
@click.argument("place", metavar="DIR")
@click.option("--tensors", is_flag=True, help="List every tensor with its type and shape.")
@_JSON
@click.pass_context
def _show(context: click.Context, place: str, tensors: bool, as_json: bool) -> None:
    """Show what is in a checkpoint: facts, receipt, models, states, ranks.

    Headers are read, tensors are not. The exit code is 1 if files are missing
    or have the wrong size.

    \b
    Examples:
      slipstream checkpoint show runs/checkpoint_3
      slipstream checkpoint show --tensors runs/checkpoint_3
      slipstream checkpoint show --json runs/checkpoint_3 | jq .receipt
    """
    if parts := checkpoint_dcp.dcp_parts(place):
        data = checkpoint_dcp.describe_dcp(place, parts, tensors=tensors)
        for line in [json.dumps(data, indent=2)] if as_json else checkpoint_dcp.dcp_lines(data):
            click.echo(line)
        context.exit(1 if data["problems"] else 0)
    with open_readable(find_single_checkpoint(place)) as checkpoint:
        data = checkpoint_view.describe_checkpoint(checkpoint, redact(place), tensors=tensors)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        for line in checkpoint_view.checkpoint_lines(data, _now()):
            click.echo(line)
    context.exit(1 if data["problems"] else 0)


@command.command(name="diff", short_help="Compare two checkpoints.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help="Show every difference, not the first 20 of a part.")
@_JSON
@click.pass_context
def _diff(context: click.Context, first: str, second: str, everything: bool, as_json: bool) -> None:
    """Compare two checkpoints: facts, receipt, weights, states.

    For each tensor that differs: the share of elements whose bits changed, and
    the largest absolute difference. The time of the saves is ignored. The exit
    code is 0 if they are equal, 1 if not, 2 if one of them cannot be read.

    \b
    Examples:
      slipstream checkpoint diff runs/checkpoint_3 runs/checkpoint_4
      slipstream checkpoint diff --json before after | jq .equal
    """
    from slipstream.cli import checkpoint_diff  # imports numpy, which the other commands do not need

    if split_duplicates([first, second])[1]:
        raise ConfigError(f"{redact(first)} and {redact(second)} are the same folder.\nGive two different checkpoints.")
    try:
        parts = checkpoint_dcp.dcp_parts(first), checkpoint_dcp.dcp_parts(second)
        checkpoint_dcp.require_same_kind(first, second, parts)
        if parts[0]:
            sections = list(checkpoint_dcp.compare_dcp(*parts))
        else:
            with open_readable(find_single_checkpoint(first)) as left, open_readable(find_single_checkpoint(second)) as right:
                sections = list(checkpoint_diff.compare_checkpoints(left, right))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error  # exit code 2: 1 means that they differ
    if as_json:
        click.echo(json.dumps(checkpoint_diff.sections_as_data(sections), indent=2))
    else:
        for line in checkpoint_diff.diff_lines(sections, everything=everything):
            click.echo(line)
    context.exit(1 if any(section.apart for section in sections) else 0)


@command.command(name="export-dcp", short_help="Write a checkpoint as a folder of torch.distributed.checkpoint.")
@click.argument("place", metavar="DIR")
@click.argument("output", metavar="OUT", type=click.Path())
def _export_dcp(place: str, output: str) -> None:
    """Write models and optimizers of a checkpoint as a folder that
    torch.distributed.checkpoint reads (load, dcp_to_torch_save).

    OUT is a new folder. The file .metadata in it is a pickle, because torch
    reads nothing else: checkpoints of Slipstream hold none. Loops, random
    states and registered objects are not exported.

    \b
    Examples:
      slipstream checkpoint export-dcp runs/checkpoint_3 exported
    """
    from slipstream.checkpoint.dcp_writer import export_dcp  # takes torch, which the other commands do not need

    click.echo(str(export_dcp(place, output)))


def _verify_dcp(place: str) -> int:
    """Print what is wrong with folders of torch.distributed.checkpoint at a place, and return how much that is."""
    wrong = 0
    for folder in checkpoint_dcp.dcp_parts(place).values():
        problems = list(find_dcp_problems(folder))
        wrong += len(problems)
        for problem in problems or [f"{folder}: whole, as far as torch.distributed.checkpoint writes checksums"]:
            click.echo(escape_control(problem))
    return wrong


def _surveys(places: Sequence[str]) -> list[FolderSurvey]:
    kept, again = split_duplicates(places)
    for place in again:
        click.echo(f"{escape_control(redact(place))} was given twice, and is read once.", err=True)
    return [survey_location(place) for place in kept]


def _folder_problems(found: FolderSurvey) -> Iterator[str]:
    """Yield the folders that should be checkpoints and are not."""
    for other in found.others:
        if found.single or other.name.startswith("checkpoint_"):
            yield other.why if str(other.folder) in other.why else f"{other.folder}: {other.why}"
    if found.lost_latest:
        yield f"{found.folder / 'latest'} names {found.latest!r}, and there is no such checkpoint"


def _problems(checkpoint: CheckpointSummary, advance: Callable[[int], object]) -> list[str]:
    try:
        with open_readable(checkpoint) as local:
            return list(inspect.find_problems(local, advance))
    except CheckpointError as error:
        return [str(error)]


@contextmanager
def _progress(checkpoints: Sequence[CheckpointSummary], *, shown: bool = True) -> Iterator[Callable[[int], Any]]:
    """Show a bar of the bytes that are read."""
    total = sum(map(inspect.bytes_to_read, checkpoints)) if shown else None
    with bar(total, "reading", "B", wanted=None if shown else False) as visible:
        yield visible.update


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
