"""`accelerate env`: versions, devices and configuration, for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
from shutil import which
from typing import Any

from accelerate import __version__ as version
from accelerate.commands.config.config_args import default_config_file, load_config_from_file

__all__ = ["env_command", "env_command_parser", "main"]


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate env`."""
    description = "Describe this installation, for a bug report."
    if subparsers is not None:
        parser = subparsers.add_parser("env", description=description)
    else:
        parser = argparse.ArgumentParser("Accelerate env command", description=description)
    parser.add_argument("--config_file", default=None, help="The configuration file to show.")
    if subparsers is not None:
        parser.set_defaults(func=env_command)
    return parser


def _accelerator() -> tuple[str, str | None]:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "N/A", None
    module = getattr(torch, device.type)
    return device.type.upper(), module.get_device_name() if hasattr(module, "get_device_name") else None


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print what this installation is, and return it."""
    import numpy
    import psutil
    import torch

    import slipstream

    kind, name = _accelerator()
    config: Any = "Not found"
    if args.config_file is not None or os.path.isfile(default_config_file):
        config = load_config_from_file(args.config_file).to_dict()
    info: dict[str, Any] = {
        "`Accelerate` version": version,
        "Provided by": f"Slipstream {slipstream.__version__}",
        "Platform": platform.platform(),
        "`accelerate` bash location": which("accelerate") or "Not found",
        "Python version": platform.python_version(),
        "Numpy version": numpy.__version__,
        "PyTorch version": torch.__version__,
        "PyTorch accelerator": kind,
        "System RAM": f"{psutil.virtual_memory().total / 1024**3:.2f} GB",
    }
    if name is not None:
        info[f"{kind} type"] = name
    print("\nFor a bug report:\n")
    print("\n".join(f"- {key}: {value}" for key, value in info.items()))
    shown = "\n".join(f"\t- {key}: {value}" for key, value in config.items()) if isinstance(config, dict) else f"\t{config}"
    print(f"- `Accelerate` default config:\n{shown}")
    info["`Accelerate` configs"] = config
    return info


def main() -> int:
    """Run the command."""
    env_command(env_command_parser().parse_args())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
