"""`slipstream estimate`: how much memory a model needs, before it is loaded.

    slipstream estimate ./llama                              a folder with config.json and weights: answered from headers, without torch
    slipstream estimate config.json --batch-size 8           a config of transformers: built without memory, measured
    slipstream estimate my_package.models:build              any model that a Python function returns
    slipstream estimate org/name                             a name on the hub, when online
    slipstream estimate ./llama --num_processes 8            what each of 8 ranks holds in sharded training, too

Nothing here imports torch; `big_models/estimate` does if the answer needs it. No weight is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any, Final

import click

from slipstream.big_models.estimate.rank_memory import resolve_mesh
from slipstream.big_models.estimate.report import Estimate, EstimateOptions, estimate
from slipstream.big_models.estimate.tensors import OPTIMIZERS, WEIGHT_DTYPES, parse_weight_dtype
from slipstream.cli.text_format import format_columns, format_count
from slipstream.config.sources import environment
from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError
from slipstream.observability.report.text_charts import escape_control

__all__ = ["command"]

_UNKNOWN: Final = "?"


class _Several(click.Option):
    """An option with one or more values: `--dtypes float32 int8`, `--dtypes float32,int8`, or the option repeated."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        for option in self.opts:
            entry = parser._long_opt[option]
            entry.process = partial(_process_all, entry.process)


def _process_all(process: Any, value: str, state: Any) -> None:
    """Process a value of the option and all dtypes that follow it; any other word may be the model."""
    process(value, state)
    while state.rargs and _is_dtypes(state.rargs[0]):
        process(state.rargs.pop(0), state)


def _is_dtypes(word: str) -> bool:
    try:
        return bool([parse_weight_dtype(name) for name in word.split(",")])
    except ConfigError:
        return False


@click.command(name="estimate", short_help="Estimate the memory of a model before it is loaded.")
@click.argument("model", metavar="MODEL")
@click.option(
    "--dtypes", cls=_Several, multiple=True, metavar="TYPE...", help=f"One or more of {', '.join(WEIGHT_DTYPES)}.  [default: all]"
)
@click.option("--batch_size", "--batch-size", "batch_size", type=int, default=1, show_default=True, help="Sequences, or rows, at a time.")
@click.option("--sequence_length", "--sequence-length", "sequence_length", type=int, help="Tokens.  [default: 2048 or fewer]")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True, help="Whose states are counted.")
@click.option("--num_processes", "--num-processes", "num_processes", type=int, help="Ranks of sharded training (FSDP): what each holds.")
@click.option("--dp_replicate_size", "--dp-replicate-size", "dp_replicate", type=int, help="Copies of the shards (HSDP).  [default: 1]")
@click.option("--dp_shard_size", "--dp-shard-size", "dp_shard", type=int, help="Ranks that share one copy.  [default: what is left]")
@click.option("--inference", "only", flag_value="inference", help="Figures for running the model alone.")
@click.option("--training", "only", flag_value="training", help="Figures for training it alone.")
@click.option(
    "--gradient_checkpointing", "--gradient-checkpointing", "checkpointing", is_flag=True, help="Blocks keep inputs alone and run again."
)
@click.option("--measure", is_flag=True, help="Run the model on shapes even where a formula is known (slower: imports torch).")
@click.option("--trust_remote_code", "--trust-remote-code", "trust", is_flag=True, help="Run the code that comes with a model.")
@click.option("--library_name", "--library-name", "library", type=click.Choice(["transformers", "timm"]), help="Whose name it is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def command(
    model: str,
    dtypes: tuple[str, ...],
    batch_size: int,
    sequence_length: int | None,
    optimizer: str,
    num_processes: int | None,
    dp_replicate: int | None,
    dp_shard: int | None,
    only: str | None,
    checkpointing: bool,
    measure: bool,
    trust: bool,
    library: str | None,
    as_json: bool,
) -> None:
    """Estimate the memory of a model before it is loaded.

    MODEL is a folder (config.json, weights, or a checkpoint), a config.json, a
    file of weights, an entry point (package.module:function or
    path/file.py:function, which returns a model, or a model and its inputs), or
    a name on the hub. No weight is read.

    \b
    Examples:
      slipstream estimate ./llama-8b
      slipstream estimate ./llama-8b --dtypes bfloat16 int4 --inference
      slipstream estimate config.json --training --batch-size 8 --sequence-length 4096
      slipstream estimate ./llama-8b --training --num-processes 64 --dp-replicate-size 8
      slipstream estimate train.py:build_model --optimizer sgd-momentum
      slipstream estimate my_package.models:build --gradient-checkpointing --json
    """
    for flag, value in (("--batch-size", batch_size), ("--sequence-length", sequence_length), ("--num_processes", num_processes)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: it must be at least 1.\nWrite a whole number above zero.")
    if library == "timm":
        raise ConfigError(
            "--library-name timm: names of timm are not looked up on the hub.\n"
            "Give an entry point: a file with `def build(): return timm.create_model(...)`, as file.py:build."
        )
    names = [name for given in dtypes for name in given.split(",")] or list(WEIGHT_DTYPES)
    settings = EstimateOptions(
        tuple(dict.fromkeys(map(parse_weight_dtype, names))),
        batch_size,
        sequence_length,
        optimizer,
        inference=only != "training",
        training=only != "inference",
        gradient_checkpointing=checkpointing,
        trust_remote_code=trust,
        measure=measure,
        mesh=resolve_mesh(num_processes, dp_replicate, dp_shard, training=only != "inference"),
    )
    with redirect_stdout(sys.stderr):  # output of the user's code is not part of the estimate
        found = estimate(model, settings, environment())
    if as_json:
        click.echo(json.dumps(found.plain(), indent=2))
        return
    for line in _text(found, checkpointing=checkpointing):
        click.echo(line)


def _text(found: Estimate, *, checkpointing: bool) -> Iterator[str]:
    stored = ", ".join(f"{convert_bytes(number)} of {dtype}" for dtype, number in list(found.stored.items())[:3])
    yield (
        f"{escape_control(found.model)} ({found.kind}): {format_count(found.parameters, 'parameter')} in "
        f"{format_count(found.tensors, 'tensor')}, {stored}"
    )
    if found.largest_layer:
        yield f"largest layer: {escape_control(found.largest_layer)}"
    shape = f"batch {found.batch_size}" + (f", sequence {found.sequence_length:,}" if found.sequence_length else "")
    if found.inference:
        yield f"\nInference, {shape}"
        run = [(r.dtype, r.largest_layer, r.weights, r.cache, r.activations, r.total) for r in found.inference]
        yield from _table(("type", "largest layer", "weights", "KV cache", "activations", "total"), run)
    if found.training:
        yield f"\nTraining with {found.optimizer}, {shape}{', with gradient checkpointing' if checkpointing else ''}"
        train = [(r.precision, r.largest_layer, r.weights, r.gradients, r.optimizer, r.activations, r.total) for r in found.training]
        yield from _table(("precision", "largest layer", "weights", "gradients", "optimizer", "activations", "total"), train)
    yield from _sharded_text(found)
    yield ""
    for device, free in found.devices.items():
        runs = [row.dtype for row in found.inference if row.total <= free]
        trains = [row.precision for row in found.training if row.total <= free]
        verdicts = [("runs in", found.inference, runs), ("trains in", found.training, trains)]
        verdict = "; ".join(f"{verb} {', '.join(names) if names else 'none of these'}" for verb, rows, names in verdicts if rows)
        unsure = None in [*(row.activations for row in found.inference), *(row.activations for row in found.training)]
        yield f"{device} has {convert_bytes(free)} free: {verdict}{', without activations' if unsure else ''}"
    yield from (escape_control(note) for note in found.notes)


def _sharded_text(found: Estimate) -> Iterator[str]:
    if found.mesh is None:
        return
    yield f"\nSharded training with {found.optimizer}, for each rank of {found.mesh}"
    largest = dict.fromkeys(row.largest_block or "the root" for row in found.sharded)
    yield f"  {format_count(found.blocks, 'block')} and the root: {escape_control(found.blocks_reason)}"
    yield f"  largest all-gather: {escape_control(', '.join(largest))}"
    uneven = len({row.rank for row in found.sharded}) > 1
    ranks = {row: f"{row.precision}, rank {row.rank}" if uneven else row.precision for row in found.sharded}
    rows = [(name, r.parameters, r.gradients, r.optimizer, r.largest_gather, r.peak) for r, name in ranks.items()]
    yield from _table(("precision", "parameters", "gradients", "optimizer", "largest all-gather", "peak without activations"), rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[str(row[0]), *(_UNKNOWN if value is None else convert_bytes(value) for value in row[1:])] for row in rows]
    for cell in cells:
        cell[-1] = f"> {cell[-1]}" if _UNKNOWN in cell else cell[-1]
    return format_columns([list(titles), *cells], left=[0])
