"""The commands and variables that `accelerate launch` starts processes with.

`prepare_simple_launcher_cmd_env` and `prepare_multi_gpu_env` turn the arguments of the command into the environment that scripts,
transformers and the drop-in read (ACCELERATE_*, FSDP_*, PARALLELISM_CONFIG_*). `launch_environment` is that part alone, without the
variables of this process. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from shutil import which
from typing import Any

from accelerate._forwarding import forward_names
from slipstream.errors import ConfigError

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "SageMakerConfig",
        "accelerate.utils.dataclasses": "DistributedType DynamoBackend PrecisionType SageMakerDistributedType",
        "accelerate.utils.environment": "str_to_bool",
        "accelerate.utils.imports": """is_fp8_available is_hpu_available is_mlu_available is_musa_available is_neuron_available
            is_npu_available is_sdaa_available is_torch_xla_available is_xpu_available""",
        "accelerate.utils.other": "get_free_port is_port_in_use merge_dicts",
        "accelerate.utils.versions": "compare_versions",
        "slipstream": "PrepareForLaunch",
    },
)
__all__ += [
    "env_var_path_add", "launch_environment", "prepare_deepspeed_cmd_env", "prepare_extend_env_parallelism_config", "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu", "refuse", "setup_fp8_env",
]

_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_DYNAMO = ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
_FSDP_VARIABLES = {
    **{
        f"fsdp_{name}": f"FSDP_{name.upper()}"
        for name in (
            *("version", "sharding_strategy", "reshard_after_forward", "offload_params", "min_num_params", "auto_wrap_policy"),
            *("backward_prefetch", "forward_prefetch", "state_dict_type", "use_orig_params", "cpu_ram_efficient_loading"),
            *("sync_module_states", "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"),
        )
    },
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
}
_MESH = (
    *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend"),
    *("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
)
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "mlu": "MLU_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
}
_ENGINES = {
    "deepspeed": "DeepSpeed does not run on Slipstream. --use_fsdp shards parameters, gradients and optimizer state like ZeRO stage 3, and "
    "with --fsdp_version 2 --fsdp_reshard_after_forward false like stage 2.",
    "megatron": "Megatron-LM does not run on Slipstream. Start such a script with Megatron-LM's own launcher.",
    "tpu": "TPUs are not supported by Slipstream. Start the script with torch_xla's own launcher.",
    "sagemaker": "Slipstream starts no SageMaker jobs. Submit the job with SageMaker's own tools; a script that they start finds its "
    "processes by itself.",
    "mpi": "--mpirun_hostfile asks for mpirun, which is not on the PATH. Install MPI, or start a launcher on each machine.",
}


def refuse(engine: str) -> ConfigError:
    """Return the error for something that does not run here.

    >>> str(refuse("tpu")).partition(".")[0]
    'TPUs are not supported by Slipstream'
    """
    return ConfigError(_ENGINES[engine])


def _filter_args(args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()) -> argparse.Namespace:
    """Return what another parser knows of these arguments, over its own defaults.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--size", default=1)
    >>> vars(_filter_args(argparse.Namespace(size=3, other=4), parser))
    {'size': 3}
    """
    found, _ = parser.parse_known_args(list(default_args))
    for name, value in vars(args).items():
        if hasattr(found, name):
            setattr(found, name, value)
    return found


def _get_mpirun_args() -> tuple[str, str, str, str]:
    """Return the name of the MPI launcher and its options for the file of hosts, the processes, and the processes of each host."""
    if not which("mpirun"):
        raise refuse("mpi")
    version = subprocess.check_output(["mpirun", "--version"]).decode()
    if "Open MPI" in version:
        return "mpirun", "--hostfile", "-n", "--npernode"
    return "mpirun", "-f", "-n", "-ppn"  # Intel MPI, MPICH, MVAPICH


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the options of fp8 to variables, as ACCELERATE_FP8_*."""
    for name, value in vars(args).items():
        if name.startswith("fp8_") and value is not None:
            if name == "fp8_override_linear_precision":
                for part, chosen in zip(("FPROP", "DGRAD", "WGRAD"), value, strict=False):
                    current_env[f"ACCELERATE_FP8_OVERRIDE_{part}"] = str(chosen)
            else:
                current_env[f"ACCELERATE_{name.upper()}"] = str(value)
    return current_env


def _checked(name: str, value: Any, known: Sequence[str]) -> str:
    text = str(getattr(value, "value", value)).lower()
    if text not in known:
        raise ConfigError(f"{name}={value} does not exist: write one of {', '.join(known)}")
    return text


def _compute_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of precision, compilation and accumulation."""
    from accelerate.commands._launch_arguments import DYNAMO_BACKENDS

    precision = _checked("mixed_precision", args.mixed_precision or "no", _PRECISIONS)
    backend = _checked("dynamo_backend", args.dynamo_backend or "no", ["no", *map(str.lower, DYNAMO_BACKENDS)])
    found = {"ACCELERATE_MIXED_PRECISION": precision, "ACCELERATE_DYNAMO_BACKEND": backend.upper()}
    for name in _DYNAMO:
        found[f"ACCELERATE_DYNAMO_{name.upper()}"] = str(getattr(args, f"dynamo_{name}", "default" if name == "mode" else False))
    if precision == "fp8":
        setup_fp8_env(args, found)
    if getattr(args, "gradient_accumulation_steps", None) is not None:
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(args.gradient_accumulation_steps)
    if getattr(args, "debug", False):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if getattr(args, "enable_cpu_affinity", False):
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    if getattr(args, "use_megatron_lm", False):
        found["ACCELERATE_USE_MEGATRON_LM"] = "true"  # the Accelerator of a worker reads it and raises
    return found


def _sharding_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of FSDP, if it is chosen; raise where two options contradict each other."""
    if not getattr(args, "use_fsdp", False):
        return {}
    lazy, synced = str(args.fsdp_cpu_ram_efficient_loading).lower(), str(args.fsdp_sync_module_states).lower()
    if lazy == "true" and synced == "false" and str(args.fsdp_version) == "1":
        raise ConfigError(
            "fsdp_cpu_ram_efficient_loading loads the weights on the main process only, so fsdp_sync_module_states, which sends them to "
            "the others, cannot be false."
        )
    found = {"ACCELERATE_USE_FSDP": "true"}
    left_out = _other_version(args)
    for name, variable in _FSDP_VARIABLES.items():
        value = getattr(args, name, None)
        if value is not None and name != left_out:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            found[variable] = text.lower() if text in ("True", "False") else text
    return found


def _other_version(args: argparse.Namespace) -> str | None:
    """Return which of two options that say the same, one for each version of FSDP, is a mere default and must not contradict the other."""
    given = getattr(args, "nondefault", None)
    old, new = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
    if given is None:
        return None
    if str(args.fsdp_version) == "1":
        return old if new in given and old not in given else new if new not in given else None
    return old if old not in given else None


def _device_variables(args: argparse.Namespace) -> dict[str, str]:
    ids = getattr(args, "gpu_ids", None)
    if ids in (None, "", "all"):
        return {}
    from slipstream.devices.count import count_without_torch

    family, _ = count_without_torch(dict(os.environ))
    return {_VISIBLE.get(family.type, "CUDA_VISIBLE_DEVICES"): str(ids)}


def _thread_variables(args: argparse.Namespace) -> dict[str, str]:
    threads = getattr(args, "num_cpu_threads_per_process", None)
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


def _cpu_variables(args: argparse.Namespace) -> dict[str, str]:
    on_cpu = bool(getattr(args, "cpu", False) or getattr(args, "use_cpu", False))
    found = {"ACCELERATE_USE_CPU": str(on_cpu)}
    if on_cpu:  # how Intel's OpenMP places its threads, unless the user says it
        for name, value in (("KMP_AFFINITY", "granularity=fine,compact,1,0"), ("KMP_BLOCKTIME", "1")):
            found[name] = os.environ.get(name, value)
    return found


def launch_environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that workers get in addition to those of this process."""
    mesh: dict[str, str] = {}
    if getattr(args, "use_parallelism_config", False):
        prepare_extend_env_parallelism_config(args, mesh)
    return {
        **_cpu_variables(args),
        **_compute_variables(args),
        **_sharding_variables(args),
        **mesh,
        **_device_variables(args),
        **_thread_variables(args),
    }


def _command_line(args: argparse.Namespace) -> list[str]:
    if args.module and args.no_python:
        raise ConfigError("--module and --no_python contradict each other: the script is a module of Python, or no Python at all.")
    start = [] if args.no_python else [sys.executable, *(["-m"] if args.module else [])]
    return [*start, args.training_script, *(args.training_script_args or [])]


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the whole environment of one process, or of mpirun where a file of hosts is given."""
    command = _command_line(args)
    hosts = getattr(args, "mpirun_hostfile", None)
    if hosts:
        launcher, hostfile, total, per_host = _get_mpirun_args()
        processes, machines = int(args.num_processes or 1), int(args.num_machines or 1)
        command = [launcher, hostfile, str(hosts), per_host, str(processes // machines), total, str(processes), *command]
    found = {**os.environ, **launch_environment(args)}
    if (args.num_processes or 0) > 1:
        found["MASTER_ADDR"] = str(args.main_process_ip or "127.0.0.1")
        found["MASTER_PORT"] = str(args.main_process_port or 29500)
    return command, found


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the whole environment of several processes; set what torchrun calls their numbers and meeting point on `args`."""
    from slipstream.utils import get_free_port, is_port_in_use

    machines, processes = int(args.num_machines or 1), int(args.num_processes)
    static = getattr(args, "rdzv_backend", "static") == "static"
    port = args.main_process_port if args.main_process_port is not None else 29500
    if port == 0:
        port = get_free_port()
    args.nproc_per_node = str(processes // machines)
    if machines > 1:
        args.nnodes, args.node_rank = str(machines), int(args.machine_rank or 0)
        if static and args.same_network:
            args.master_addr, args.master_port = str(args.main_process_ip), str(port)
        else:
            args.rdzv_endpoint = f"{args.main_process_ip}:{port}"
    else:
        args.master_port = str(port)
        if args.main_process_port and is_port_in_use(port):
            raise ConnectionError(f"The port {port} is in use by another process. Give another --main_process_port, or 0 for a free one.")
    return {**os.environ, **launch_environment(args)}


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the sizes of the mesh to variables, as PARALLELISM_CONFIG_*."""
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for name in _MESH:
        value = getattr(args, f"parallelism_config_{name}", None)
        if value is not None:
            current_env[f"PARALLELISM_CONFIG_{name.upper()}"] = str(value)
    return current_env


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Raise: DeepSpeed does not run here."""
    raise refuse("deepspeed")


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Raise: TPUs are not supported."""
    raise refuse("tpu")


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Return `--name value` words as a dictionary of typed values; a switch is True, but switches and true/false words do not mix.

    >>> _convert_nargs_to_dict(["--epochs", "3", "--rate", "5e-5", "--train", "False"])
    {'epochs': 3, 'rate': 5e-05, 'train': False}
    """
    found: dict[str, Any] = {}
    switches: list[str] = []
    words: list[str] = []
    for index, word in enumerate(nargs):
        if not word.startswith("-"):
            continue
        name = word.lstrip("-").replace("-", "_")
        value = nargs[index + 1] if index + 1 < len(nargs) else "-"
        if value.startswith("-") and not _is_number(value):
            switches.append(word)
            found[name] = True
        else:
            words += [word] if value.lower() in ("true", "false") else []
            found[name] = _typed(value)
    if switches and words:
        raise ConfigError(
            f"{', '.join(switches)} are switches, and {', '.join(words)} are followed by true or false. SageMaker passes both on as "
            "`--name value`, so a script cannot have both: write true or false after each."
        )
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) is not None


def _typed(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _is_number(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    return text


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Raise: SageMaker jobs are not started from here. (The name is spelt as in Accelerate.)"""
    raise refuse("sagemaker")


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return a variable that lists folders with one more at the end, without setting it.

    >>> env_var_path_add("NO_SUCH_PATH", "/tools")
    '/tools'
    """
    listed = [entry for entry in os.environ.get(env_var_name, "").split(os.pathsep) if entry]
    return os.pathsep.join([*listed, str(path_to_add)])
