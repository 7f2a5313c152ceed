"""Options and keys of files that have no effect in a launch, each with the reason.

Accelerate reads many options for engines that a launch does not use, and drops them without a word. Here they are named, so that a
misplaced option is noticed; they are no error, because files and commands carry them along (`main_training_function: main`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

from accelerate.commands._launch_arguments import GROUPS
from accelerate.commands.config.config_args import ClusterConfig

__all__ = ["name_unused", "unused_keys", "unused_options"]

_TE = ("margin", "interval", "format", "amax_history_len", "amax_compute_algo", "override_linear_precision", "use_autocast_during_eval")


def _names(group: str) -> list[str]:
    """Return the options of a group of the help, as attributes.

    >>> _names("AWS Arguments")
    ['aws_access_key_id', 'aws_secret_access_key']
    """
    return [row.names.split()[-1].lstrip("-") for row in GROUPS[group][1]]


def unused_options(args: argparse.Namespace, typed: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that were typed and have no effect, with the reason."""
    sharded, mesh, fp8 = bool(args.use_fsdp), bool(args.use_parallelism_config), str(args.mixed_precision).lower() == "fp8"
    reasons: dict[str, str] = {}
    for name in _names("DeepSpeed Arguments"):
        reasons[name] = "it is for DeepSpeed, which does not run here"
    del reasons["gradient_accumulation_steps"]
    for name in _names("Megatron-LM Arguments"):
        reasons[name] = "it is for Megatron-LM, which does not run here"
    for name in _names("AWS Arguments"):
        reasons[name] = "it is for SageMaker jobs, which are not started from here"
    for name in ("tpu_use_sudo", "vm", "env", "downcast_bf16"):
        reasons[name] = "it is for TPUs, which do not run here"
    reasons["main_training_function"] = "scripts are started whole"
    if not sharded:
        reasons |= dict.fromkeys(_names("FSDP Arguments"), "it is for sharded training: give --use_fsdp as well")
    if not mesh:
        reasons |= dict.fromkeys(_names("ParallelismConfig Arguments"), "give --use_parallelism_config as well")
    for axis, meaning in (("cp", "context parallelism"), ("sp", "sequence parallelism")):
        if mesh and int(getattr(args, f"parallelism_config_{axis}_size") or 1) == 1:
            idle = [name for name in _names("ParallelismConfig Arguments") if f"_{axis}_" in name and not name.endswith("_size")]
            reasons |= dict.fromkeys(idle, f"it is for {meaning}, and parallelism_config_{axis}_size is 1")
    reasons |= dict.fromkeys((f"fp8_{name}" for name in _TE), "it is for TransformerEngine, and fp8 runs through torchao here")
    reasons["fp8_opt_level"] = "it is for MS-AMP, and fp8 runs through torchao here"
    if not fp8:
        reasons |= dict.fromkeys(_names("FP8 Arguments"), "it is for --mixed_precision fp8")
    if args.num_machines < 2:
        reasons["same_network"] = "it is for jobs of several machines"
    if args.multi_gpu and not _has_accelerator():
        reasons["multi_gpu"] = "there is no accelerator, so the processes compute on the CPU"
    yield from ((name, why) for name, why in reasons.items() if name in typed)


def _has_accelerator() -> bool:
    from slipstream.devices.count import count_without_torch

    return count_without_torch(dict(os.environ))[1] > 0


def unused_keys(args: argparse.Namespace, defaults: ClusterConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of a file that ask for something and have no effect, with the reason."""
    kind = str(defaults.distributed_type)
    idle = [
        ("deepspeed_config", kind != "DEEPSPEED", f"distributed_type is {kind}"),
        ("megatron_lm_config", kind != "MEGATRON_LM", f"distributed_type is {kind}"),
        ("fsdp_config", not args.use_fsdp, f"distributed_type is {kind}"),
        ("fp8_config", args.mixed_precision != "fp8", f"mixed_precision is {args.mixed_precision}"),
        *((key, True, "it is for TPUs") for key in ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "tpu_use_sudo")),
        *((key, True, "it is for tpu-config") for key in ("command_file", "commands")),
    ]
    yield from ((key, why) for key, unused, why in idle if unused and getattr(defaults, key))
    if str(defaults.downcast_bf16).lower() not in ("no", "false"):
        yield "downcast_bf16", "it is for TPUs"
    if defaults.main_training_function != "main":
        yield "main_training_function", "scripts are started whole"


def name_unused(args: argparse.Namespace, typed: Collection[str], defaults: Any) -> None:
    """Say which options and which keys of the file have no effect; nothing with --quiet."""
    if args.quiet:
        return
    for name, why in unused_options(args, typed):
        print(f"accelerate launch: --{name} has no effect: {why}.", file=sys.stderr)
    if isinstance(defaults, ClusterConfig):
        for key, why in unused_keys(args, defaults):
            print(f"accelerate launch: {key} in the configuration file has no effect: {why}.", file=sys.stderr)
