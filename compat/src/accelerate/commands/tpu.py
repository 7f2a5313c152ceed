"""`accelerate tpu-config`: run commands on all machines of a TPU pod, through gcloud."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from slipstream.errors import ConfigError

__all__ = ["main", "tpu_command_launcher", "tpu_command_parser"]

_FOLDER = "cd /usr/share"
_FROM_SOURCE = "git+https://github.com/huggingface/accelerate.git"


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate tpu-config`."""
    description = "Run commands on all machines of a TPU pod, through gcloud. Training on TPUs itself does not run on Slipstream."
    if subparsers is not None:
        parser = subparsers.add_parser("tpu-config", description=description)
    else:
        parser = argparse.ArgumentParser("Accelerate tpu-config command", description=description)
    config = parser.add_argument_group("Config Arguments", "Which pod; what is not given is read from the file.")
    config.add_argument("--config_file", type=str, default=None, help="The configuration file.")
    config.add_argument("--tpu_name", default=None, help="The name of the TPU.")
    config.add_argument("--tpu_zone", default=None, help="The zone of the TPU.")
    pod = parser.add_argument_group("TPU Arguments", "What runs there.")
    pod.add_argument("--use_alpha", action="store_true", help="Use `gcloud alpha`.")
    pod.add_argument("--command_file", default=None, help="A file with commands, one in a line.")
    pod.add_argument("--command", action="append", nargs="+", help="A command; can be given several times.")
    pod.add_argument("--install_accelerate", action="store_true", help="Install Accelerate (the original) on the pod first.")
    pod.add_argument("--accelerate_version", default="latest", help="Which version of it: latest, dev, or a number.")
    pod.add_argument("--debug", action="store_true", help="Print the command and run nothing.")
    if subparsers is not None:
        parser.set_defaults(func=tpu_command_launcher)
    return parser


def _complete(args: argparse.Namespace) -> None:
    """Set what was not given to what the file says."""
    if args.config_file is None and not os.path.isfile(default_config_file):
        return
    config = load_config_from_file(args.config_file)
    if not args.command_file and not args.command:
        args.command_file, args.command = getattr(config, "command_file", None), getattr(config, "commands", None)
    args.tpu_name = args.tpu_name or getattr(config, "tpu_name", None)
    args.tpu_zone = args.tpu_zone or getattr(config, "tpu_zone", None)


def _commands(args: argparse.Namespace) -> list[str]:
    if args.command_file:
        return Path(args.command_file).read_text(encoding="utf-8").rstrip().splitlines()
    return [" ".join(entry) if isinstance(entry, list) else str(entry) for entry in args.command]


def _installation(version: str) -> str:
    wanted = {"latest": "accelerate -U", "dev": _FROM_SOURCE}.get(version, f"accelerate=={version}")
    return f"pip install {wanted}"


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands on the pod, or print them with --debug."""
    _complete(args)
    if not args.command_file and not args.command:
        raise ConfigError("There is nothing to run on the pod: give --command or --command_file.")
    if not args.tpu_name or not args.tpu_zone:
        raise ConfigError("It is not said which pod: give --tpu_name and --tpu_zone, or a configuration file that has them.")
    lines = [_FOLDER, *([_installation(args.accelerate_version)] if args.install_accelerate else []), *_commands(args)]
    command = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", args.tpu_name]
    command += ["--zone", args.tpu_zone, "--command", "; ".join(lines), "--worker", "all"]
    if args.debug:
        print(f"Running {' '.join(command)}")
        return
    subprocess.run(command, check=True)
    print("The commands ran on the pod.")


def main() -> None:
    """Run the command."""
    tpu_command_launcher(tpu_command_parser().parse_args())


if __name__ == "__main__":
    main()
