"""`accelerate merge-weights`: merge the shards of a model that FSDP saved into one file."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.utils import CustomArgumentParser

__all__ = ["main", "merge_command", "merge_command_parser"]

description = "Merge the sharded weights of an FSDP checkpoint into one file, or one with its index."


def merge_fsdp_weights(*args: Any, **kwargs: Any) -> Any:
    """Call `accelerate.utils.merge_fsdp_weights`; imported when it is needed."""
    from accelerate.utils.fsdp_utils import merge_fsdp_weights as merge

    return merge(*args, **kwargs)


def merge_command(args: argparse.Namespace) -> None:
    """Merge the weights."""
    merge_fsdp_weights(args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`."""
    if subparsers is not None:
        parser = subparsers.add_parser("merge-weights", description=description)
    else:
        parser = CustomArgumentParser(description=description)
    parser.add_argument("checkpoint_directory", type=str, help="The folder with the shards.")
    parser.add_argument("output_path", type=str, help="Where the weights are written.")
    parser.add_argument("--unsafe_serialization", action="store_true", default=False, help="Write a .bin file, not safetensors.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", default=False, help="Delete the shards afterwards.")
    if subparsers is not None:
        parser.set_defaults(func=merge_command)
    return parser


def main() -> None:
    """Run the command."""
    merge_command(merge_command_parser().parse_args())


if __name__ == "__main__":
    main()
