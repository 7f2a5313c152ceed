"""`slipstream merge-weights`: merge weights from several files into one file, without loading all of them into memory."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command(name="merge-weights", short_help="Merge weights in several files into one file.")
@click.argument("folder", type=click.Path())
@click.argument("output", type=click.Path())
@click.option("--unsafe_serialization", "--unsafe-serialization", "unsafe", is_flag=True, help="Write pytorch_model.bin, by torch.save.")
@click.option(
    "--remove_checkpoint_dir",
    "--remove-checkpoint-dir",
    "remove",
    is_flag=True,
    help="Delete the files that were merged, and their folder if nothing else is in it.",
)
def command(folder: str, output: str, unsafe: bool, remove: bool) -> None:
    """Merge weights in several files into one file.

    FOLDER holds the files and their index, or a checkpoint. OUTPUT is a folder for model.safetensors, or the path of a file.
    """
    from slipstream.checkpoint.model_io import merge_weights

    written = merge_weights(folder, output, remove=remove, safe_serialization=not unsafe)
    click.echo(f"{written} ({written.stat().st_size:,} bytes)")
