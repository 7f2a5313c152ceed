"""`accelerate launch`: the options of Accelerate, started by the launcher of Slipstream.

`launch_command_parser` and `launch_command` are an interface: trl builds its command on them. `launch_command` returns when the job has
ended, and raises if it failed; the console command replaces its own process where one process runs, as `slipstream launch` does.

The values come from the command line, then the file, then the defaults (`_validate_launch_command`). They reach the workers twice: as the
variables of Accelerate (`utils/launch.py`), which scripts, transformers and the drop-in read, and as the configuration of Slipstream.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._enumerations import ComputeEnvironment
from accelerate._forwarding import forward_names
from accelerate.commands._launch_arguments import DYNAMO_BACKENDS, add_launch_arguments
from accelerate.commands._unused_options import name_unused
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, default_config_file, load_config_from_file
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils.launch import launch_environment, prepare_simple_launcher_cmd_env, refuse
from slipstream.devices.table import DistributedType
from slipstream.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.launch.plan import LaunchPlan

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.environment": """check_cuda_p2p_ib_support convert_dict_to_env_variables get_int_from_env patch_environment
            str_to_bool""",
        "accelerate.utils.imports": """is_bf16_available is_deepspeed_available is_hpu_available is_mlu_available is_musa_available
            is_neuron_available is_npu_available is_rich_available is_sagemaker_available
            is_sdaa_available is_torch_xla_available is_xpu_available""",
        "accelerate.utils.constants": "DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES",
        "accelerate.utils.launch": """PrepareForLaunch _filter_args prepare_deepspeed_cmd_env prepare_multi_gpu_env
            prepare_sagemager_args_inputs prepare_tpu""",
    },
)
__all__ += [
    "ComputeEnvironment", "CustomHelpFormatter", "DYNAMO_BACKENDS", "DistributedType", "SageMakerConfig", "clean_option",
    "default_config_file", "deepspeed_launcher", "launch_command", "launch_command_parser", "load_config_from_file", "main",
    "multi_gpu_launcher", "prepare_simple_launcher_cmd_env", "sagemaker_launcher", "simple_launcher", "tpu_launcher", "tpu_pod_launcher",
]

_USAGE = "accelerate launch [options] script [arguments of the script]"  # argparse would list a hundred options after each mistake
_BLOCKS = ("deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "dynamo_config", "mpirun_config")
_FP8_NAMES = {
    "amax_history_length": "fp8_amax_history_len",
    "amax_compute_algorithm": "fp8_amax_compute_algo",
    "optimization_level": "fp8_opt_level",
    "fp8_format": "fp8_format",
}
"""Keys of fp8_config that are not the option without `fp8_`: the questionnaire of Accelerate writes three of them, which it never reads."""
_FORMER_NESTED = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
_FILE_ONLY = ("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "fp8_config", *_BLOCKS)
_RENAMED = {"tpu_vm": "vm", "tpu_env": "env"}
_SAME = (
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "num_cpu_threads_per_process", "max_restarts"),
    *("monitor_interval", "role", "tee", "log_dir", "num_machines", "gradient_accumulation_steps", "mixed_precision"),
    *("dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
)
"""Options with the same name and meaning here and there."""


class CustomHelpFormatter(argparse.HelpFormatter):
    """The formatter of the help of `accelerate launch`: it shows every option."""


def clean_option(option: str) -> str | None:
    """Return the name of a long option, and None for anything else.

    >>> clean_option("--use_fsdp"), clean_option("-m")
    ('use_fsdp', None)
    """
    return option[2:] if option.startswith("--") else None


def launch_command_parser(subparsers: Any = None) -> CustomArgumentParser:
    """Return the parser of `accelerate launch`; with `subparsers`, added to those of `accelerate`."""
    description = (
        "Run a script in one or more processes. Options can be written with underscores or with dashes, as in --num_processes or "
        "--num-processes. What is not given is read from the configuration file, if there is one."
    )
    if subparsers is not None:
        parser = subparsers.add_parser("launch", usage=_USAGE, description=description, add_help=False, allow_abbrev=False)
    else:
        parser = CustomArgumentParser("accelerate launch", usage=_USAGE, description=description, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    add_launch_arguments(parser)
    if subparsers is not None:
        parser.set_defaults(func=_launch_in_place)
    return parser


# -- from the command line and the file to one set of arguments ----------------------------------------------------------------------------


def _validate_launch_command(
    args: argparse.Namespace,
) -> tuple[argparse.Namespace, ClusterConfig | SageMakerConfig | None, bool]:
    """Complete the arguments from the file; return them, the file, and whether the precision is from the file. Changes `args`."""
    chosen = [name for name in ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm") if getattr(args, name)]
    if len(chosen) > 1 and set(chosen) != {"cpu", "use_fsdp"}:
        raise ConfigError(f"{' and '.join('--' + name for name in chosen)} contradict each other: give one of them.")
    if not hasattr(args, "nondefault"):  # a namespace that was made by hand: what differs from a default was given
        parser = launch_command_parser()
        args.nondefault = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    path = args.config_file
    unread = path is None and (args.cpu or not os.path.isfile(default_config_file))
    defaults = None if unread else load_config_from_file(path)
    from_file = False
    if isinstance(defaults, ClusterConfig):
        from_file = _fill_from_file(args, defaults, str(path or default_config_file))
    args.mixed_precision = args.mixed_precision or "no"
    args.dynamo_backend = (args.dynamo_backend or "no").lower()
    args.debug = bool(args.debug)
    args.num_machines = args.num_machines or 1
    args.use_cpu = bool(args.cpu or getattr(args, "use_cpu", False))
    _check_processes(args)
    return args, defaults, from_file


def _fill_from_file(args: argparse.Namespace, config: ClusterConfig, path: str) -> bool:
    """Set what was not given to what the file says; name the keys of blocks that no option has."""
    given = args.nondefault
    kind = config.distributed_type
    if not any((args.cpu, args.multi_gpu, args.tpu, args.use_deepspeed, args.use_fsdp, args.use_megatron_lm)):
        args.use_deepspeed = kind == DistributedType.DEEPSPEED
        args.use_fsdp = kind == DistributedType.FSDP
        args.use_megatron_lm = kind == DistributedType.MEGATRON_LM
        args.tpu = kind == DistributedType.XLA
        args.multi_gpu = str(kind).startswith("MULTI_") and kind != DistributedType.MULTI_CPU
        args.use_cpu = config.use_cpu or kind == DistributedType.MULTI_CPU
        if kind == DistributedType.NO and "num_processes" not in given:
            given.add("num_processes")  # the number in such a file counts for nothing: one process runs
            args.num_processes = 1
    for block in _BLOCKS:
        for key, value in (getattr(config, block) or {}).items():
            _set_from_block(args, _FORMER_NESTED.get(key, key), value, f"{block}.{key}", path)
    for key, value in (config.fp8_config or {}).items():
        _set_from_block(args, _FP8_NAMES.get(key, f"fp8_{key}"), value, f"fp8_config.{key}", path)
    args.use_parallelism_config = args.use_parallelism_config or bool(config.parallelism_config)
    for name, value in vars(config).items():
        option = _RENAMED.get(name, name)
        if name not in _FILE_ONLY and option not in given and value is not None:
            setattr(args, option, value)
            given.add(option)
    args.debug = args.debug or config.debug
    if args.mixed_precision is None:
        args.mixed_precision = config.mixed_precision
        return config.mixed_precision is not None
    return False


def _set_from_block(args: argparse.Namespace, name: str, value: Any, key: str, path: str) -> None:
    if name == "fp8_override_linear_precision" and isinstance(value, str):
        from accelerate.commands._launch_arguments import _three_flags

        value = _three_flags(value)
    if name == "fp8_backend" and isinstance(value, str):
        value = value.lower()
    if not hasattr(args, name) and name != "fsdp_ignored_modules":
        print(f"accelerate launch: {key} in {path} has no effect: there is no such option.", file=sys.stderr)
    elif name not in args.nondefault:
        setattr(args, name, value)
        args.nondefault.add(name)


def _check_processes(args: argparse.Namespace) -> None:
    if args.num_processes == -1:
        raise ConfigError("The file leaves the number of processes open (num_processes: -1). Give --num_processes.")
    ids = [entry for entry in str(args.gpu_ids or "all").split(",") if entry]
    if args.multi_gpu and ids != ["all"] and len(ids) < 2 and args.num_machines < 2:
        raise ConfigError(f"--multi_gpu needs several accelerators, and gpu_ids={args.gpu_ids} leaves one. Give more of them.")


# -- from the arguments to the launcher of Slipstream --------------------------------------------------------------------------------------


def _refuse_engines(args: argparse.Namespace, defaults: Any) -> None:
    if isinstance(defaults, SageMakerConfig) or getattr(defaults, "compute_environment", None) == ComputeEnvironment.AMAZON_SAGEMAKER:
        raise refuse("sagemaker")
    for name, engine in (("use_deepspeed", "deepspeed"), ("tpu", "tpu"), ("tpu_use_cluster", "tpu")):
        if getattr(args, name, False):
            raise refuse(engine)
    if args.use_megatron_lm and not args.quiet:
        # Files with this type are also used to start scripts that make no Accelerator, and those run
        note = "The processes start; the first Accelerator that one of them makes raises."
        print(f"accelerate launch: {refuse('megatron')} {note}", file=sys.stderr)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the options of Slipstream are given; defaults of Accelerate that change nothing are left out."""
    found: dict[str, Any] = {name: getattr(args, name) for name in _SAME if name in args.nondefault}
    found["mixed_precision"] = str(args.mixed_precision).lower()
    found["dynamo_backend"] = args.dynamo_backend
    found["num_machines"] = args.num_machines
    found["num_processes"] = args.num_processes or None
    for name in ("module", "no_python", "quiet", "debug", "use_fsdp"):
        found[name] = bool(getattr(args, name)) or None
    found["cpu"] = args.use_cpu or None
    if args.gpu_ids not in (None, "all") and not args.use_cpu:
        found["gpu_ids"] = args.gpu_ids
    if args.num_machines > 1 and args.rdzv_backend != "static":
        found["same_network"] = bool(args.same_network)
    if str(args.mixed_precision).lower() == "fp8":
        found["fp8_backend"] = args.fp8_backend
        found["fp8_pad_inner_dim"] = bool(args.fp8_pad_inner_dim)
    if args.use_fsdp:
        blocks = [name for name in vars(args) if name.startswith("fsdp_") and name in args.nondefault]
        found |= {name: _text(getattr(args, name)) for name in blocks if getattr(args, name) is not None}
        found["fsdp_version"] = args.fsdp_version
    if args.use_parallelism_config:
        found["use_parallelism_config"] = True
        sizes = [name for name in args.nondefault if name.startswith("parallelism_config_") and name.endswith("_size")]
        found |= {name: getattr(args, name) for name in sizes}
    return {name: value for name, value in found.items() if value is not None and value != ""}


def _text(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value).lower() if isinstance(value, bool) else value


def _plan(args: argparse.Namespace) -> tuple[LaunchPlan, Config]:
    """Return the plan of Slipstream's launcher, whose workers also get the variables of Accelerate."""
    from slipstream.config import resolve
    from slipstream.devices.count import count_without_torch, launch_facts
    from slipstream.launch.plan import MachineSpec, Target, VisibleAccelerators, make_plan

    environ = dict(os.environ)
    config = resolve(flags=_options(args), environ=environ)
    kind = "module" if args.module else "executable" if args.no_python else "script"
    device = config.device.family, config.describe_device()
    family, _ = count_without_torch(environ, *device)
    machine = MachineSpec(accelerators=VisibleAccelerators(**launch_facts(environ, *device)))
    plan = make_plan(config, Target(kind, args.training_script, tuple(args.training_script_args or ())), environ, machine)
    variables = {**plan.environment, **launch_environment(args), **_nccl_variables(family.type, plan, args)}
    return replace(plan, environment=variables), config


def _nccl_variables(device: str, plan: LaunchPlan, args: argparse.Namespace) -> Mapping[str, str]:
    if device != "cuda" or plan.single or args.use_cpu or "NCCL_P2P_DISABLE" in os.environ:
        return {}
    from accelerate.utils.environment import check_cuda_p2p_ib_support

    if check_cuda_p2p_ib_support():
        return {}
    print("accelerate launch: these GPUs cannot copy between each other with this driver; NCCL goes through memory.", file=sys.stderr)
    return {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def _prepare(args: argparse.Namespace) -> tuple[argparse.Namespace, LaunchPlan | None]:
    """Return the complete arguments, and the plan, unless mpirun starts the processes."""
    typed = set(getattr(args, "nondefault", ()))
    args, defaults, _ = _validate_launch_command(args)
    _refuse_engines(args, defaults)
    name_unused(args, typed, defaults)
    return args, None if args.mpirun_hostfile else _plan(args)[0]


def launch_command(args: argparse.Namespace) -> None:
    """Run the script with these arguments, and return when all processes have ended; raise if one failed."""
    args, plan = _prepare(args)
    if plan is None or plan.single:
        simple_launcher(args, plan)
    else:
        multi_gpu_launcher(args, plan)


def _launch_in_place(args: argparse.Namespace) -> None:
    """Run the script as the console command does: one process takes the place of this one, and a failure is the exit code."""
    from slipstream.launch.agent import launch
    from slipstream.launch.worker_main import end_interpreter
    from slipstream.launch.worker_processes import flush_streams

    args, plan = _prepare(args)
    if plan is None:
        command, environ = prepare_simple_launcher_cmd_env(args)
    elif plan.single:
        command, environ = list(plan.command), _environ_of_one(args, plan)
    else:
        end_interpreter(launch(plan))
    flush_streams()
    os.execvpe(command[0], command, environ)


def _environ_of_one(args: argparse.Namespace, plan: LaunchPlan) -> dict[str, str]:
    """Return the environment of a job of one process.

    As in Accelerate, it has ranks and a meeting point only where an engine for several processes was chosen: scripts and transformers ask
    for WORLD_SIZE to find out whether a launcher for several processes started them. Those of a job around this one are left out.
    """
    from slipstream.launch.agent import _single_process_environ

    ranks = _single_process_environ()
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    distributed = args.use_fsdp or args.use_megatron_lm or (args.multi_gpu and not args.use_cpu)
    return {**kept, **(ranks if distributed else {}), **plan.environment}


def simple_launcher(args: argparse.Namespace, plan: LaunchPlan | None = None) -> None:
    """Run one process, or mpirun, and wait for it."""
    command, environ = prepare_simple_launcher_cmd_env(args)
    if plan is not None:
        command, environ = list(plan.command), _environ_of_one(args, plan)
    with subprocess.Popen(command, env=environ) as process:
        code = process.wait()
    if code and args.quiet:
        sys.exit(code)
    if code:
        raise subprocess.CalledProcessError(code, command)


def multi_gpu_launcher(args: argparse.Namespace, plan: LaunchPlan | None = None) -> None:
    """Run several processes, and wait for them. They are started by an interpreter of their own, which this process waits for."""
    from slipstream.launch.function_launcher import _read_result, _run_launcher

    plan = plan or _plan(args)[0]
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        (folder / "job.json").write_text(json.dumps({"plan": plan.to_json(), "parent": os.getpid(), "path": path}))
        code = _run_launcher(folder, None)
        report = str(_read_result(folder).get("report") or f"The launcher ended with exit code {code}.")
    if code and args.quiet:
        sys.exit(code)
    if code:
        raise LaunchError(report, exit_code=code)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Raise: DeepSpeed does not run here."""
    raise refuse("deepspeed")


def tpu_launcher(args: argparse.Namespace) -> None:
    """Raise: TPUs are not supported."""
    raise refuse("tpu")


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Raise: TPUs are not supported."""
    raise refuse("tpu")


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Raise: SageMaker jobs are not started from here."""
    raise refuse("sagemaker")


def main() -> None:
    """Run the command `accelerate-launch`."""
    from accelerate.commands.accelerate_cli import run_and_report

    args = launch_command_parser().parse_args()
    sys.exit(run_and_report(_launch_in_place, args))


if __name__ == "__main__":
    main()
