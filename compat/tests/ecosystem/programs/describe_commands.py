"""Print, as JSON, what the commands of the accelerate that is imported are: parsers, configurations read from files, variables of a worker.

Used by `test_commands_beside_accelerate.py` with the drop-in and with Accelerate itself.
"""

import argparse
import json
import sys


def describe(parser: argparse.ArgumentParser) -> dict:
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update({f"subcommand {name}": describe(below) for name, below in action.choices.items()})
        elif action.dest != "help":
            choices = None if action.choices is None else sorted(map(str, action.choices))
            shape = {"dest": action.dest, "default": repr(action.default), "nargs": repr(action.nargs), "choices": choices}
            found[" ".join(sorted(action.option_strings)) or action.dest] = shape
    return found


def parsers() -> dict:
    from accelerate.commands.config import get_config_parser
    from accelerate.commands.env import env_command_parser
    from accelerate.commands.estimate import estimate_command_parser
    from accelerate.commands.launch import launch_command_parser
    from accelerate.commands.merge import merge_command_parser
    from accelerate.commands.test import test_command_parser
    from accelerate.commands.to_fsdp2 import to_fsdp2_command_parser
    from accelerate.commands.tpu import tpu_command_parser

    makers = (
        *(env_command_parser, estimate_command_parser, get_config_parser, launch_command_parser, merge_command_parser, test_command_parser),
        *(to_fsdp2_command_parser, tpu_command_parser),
    )
    return {make.__name__: describe(make()) for make in makers}


def configurations(paths: list[str]) -> dict:
    from accelerate.commands.config import load_config_from_file

    return {path: load_config_from_file(path).to_dict() for path in paths}


def variables(words: list[str]) -> dict:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environ = prepare_multi_gpu_env(args) if args.use_fsdp or args.multi_gpu else prepare_simple_launcher_cmd_env(args)[1]
    return {name: value for name, value in environ.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "KMP_"))}


if __name__ == "__main__":
    asked, *rest = sys.argv[1:]
    print(json.dumps({"parsers": parsers, "configurations": lambda: configurations(rest), "variables": lambda: variables(rest)}[asked]()))
