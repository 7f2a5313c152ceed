"""The questionnaire of `accelerate config` for this machine, or this and others. It asks for what runs on Slipstream."""

from __future__ import annotations

import os
from typing import Any

from accelerate._enumerations import ComputeEnvironment
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.config.config_utils import (
    DYNAMO_BACKENDS,
    _ask_field,
    _ask_options,
    _convert_dynamo_backend,
    _convert_yes_no_to_bool,
)
from slipstream.devices.count import count_without_torch

__all__ = ["get_cluster_input"]

_KINDS = ("One process", "Several processes on the CPU", "Several processes, each with a GPU or another accelerator")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
_MODES = ("default", "reduce-overhead", "max-autotune")


def _ask_yes_no(question: str, default: bool = False) -> bool:
    answer = _ask_field(
        f"{question} [{'YES/no' if default else 'yes/NO'}]: ", _convert_yes_no_to_bool, default=default, error_message="Answer yes or no."
    )
    return bool(answer)


def _ask_number(question: str, default: int | None = None) -> int:
    hint = f" [{default}]" if default is not None else ""
    return int(_ask_field(f"{question}{hint}: ", int, default=default, error_message="Give a whole number."))


def _ask_text(question: str, default: str = "") -> str | None:
    return _ask_field(f"{question}{f' [{default}]' if default else ''}: ", str, default=default) or None


def _ask_machines() -> dict[str, Any]:
    machines = _ask_number("How many machines take part?", 1)
    if machines == 1:
        return {"num_machines": 1, "machine_rank": 0, "rdzv_backend": "static", "same_network": True}
    found: dict[str, Any] = {"num_machines": machines}
    found["machine_rank"] = _ask_number("Which of them is this (0 has the main process)?", 0)
    found["main_process_ip"] = _ask_text("Under which address do the others reach machine 0?")
    found["main_process_port"] = _ask_number("On which port?", 29500)
    found["same_network"] = _ask_yes_no("Do all machines reach that address directly?", True)
    found["rdzv_backend"] = "static" if found["same_network"] else _ask_text("Through which rendezvous backend do they meet?", "c10d")
    return found


def _ask_compilation() -> dict[str, Any]:
    if not _ask_yes_no("Compile models with torch.compile?"):
        return {}
    backend = _ask_options("Which backend?", [name.lower() for name in DYNAMO_BACKENDS], _convert_dynamo_backend, default=2)
    found: dict[str, Any] = {"dynamo_backend": backend}
    if _ask_yes_no("Change how it compiles?"):
        found["dynamo_mode"] = _ask_options("Which mode?", list(_MODES), lambda number: _MODES[int(number)])
        found["dynamo_use_fullgraph"] = _ask_yes_no("Must each model be one graph?")
        found["dynamo_use_dynamic"] = _ask_yes_no("Do shapes change from batch to batch?")
        found["dynamo_use_regional_compilation"] = _ask_yes_no("Compile repeated blocks instead of whole models?")
    return found


def _ask_sharding() -> dict[str, Any]:
    found: dict[str, Any] = {"fsdp_version": 2}
    found["fsdp_reshard_after_forward"] = _ask_yes_no("Free gathered parameters after the forward pass (saves memory)?", True)
    found["fsdp_offload_params"] = _ask_yes_no("Keep shards in CPU memory?")
    policy = _ask_options("How are blocks found?", list(_POLICIES), lambda number: _POLICIES[int(number)])
    found["fsdp_auto_wrap_policy"] = policy
    if policy == "TRANSFORMER_BASED_WRAP":
        classes = _ask_text("Which classes are blocks (names separated by commas; empty: those that the model names)?")
        if classes:
            found["fsdp_transformer_layer_cls_to_wrap"] = classes
    elif policy == "SIZE_BASED_WRAP":
        found["fsdp_min_num_params"] = _ask_number("How many parameters make a block?", 100_000_000)
    found["fsdp_state_dict_type"] = _ask_options("What is saved?", list(_STATE_DICTS), lambda number: _STATE_DICTS[int(number)])
    found["fsdp_cpu_ram_efficient_loading"] = _ask_yes_no("Load weights on the main process only?", True)
    found["fsdp_activation_checkpointing"] = _ask_yes_no("Compute activations again in the backward pass (saves memory)?")
    if found["fsdp_activation_checkpointing"]:
        found["fsdp_activation_checkpointing_offload"] = _ask_yes_no("Keep the inputs of those blocks in CPU memory?")
    return found


def _ask_mesh() -> dict[str, Any]:
    if not _ask_yes_no("Keep several replicas of the sharded model (HSDP)?"):
        return {}
    return {
        "parallelism_config_dp_replicate_size": _ask_number("How many replicas?", 2),
        "parallelism_config_dp_shard_size": _ask_number("Over how many processes is each sharded?", 2),
    }


def _ask_mpi() -> dict[str, Any]:
    if not _ask_yes_no("Start the processes with mpirun?"):
        return {}
    return {"mpirun_hostfile": os.path.expanduser(_ask_text("Which file lists the hosts?", "~/hostfile") or "")}


def _ask_processes(kind: int, family: str, count: int) -> dict[str, Any]:
    """Ask what the chosen kind of job leaves open."""
    found: dict[str, Any] = {"distributed_type": "NO", "num_processes": 1, "num_machines": 1, "same_network": True}
    if kind == 0:
        found["use_cpu"] = _ask_yes_no("Compute on the CPU, even where there is an accelerator?")
        if not found["use_cpu"]:
            found["gpu_ids"] = _ask_text("Which accelerator of this machine (all, or its number)?", "all")
    elif kind == 1:
        found |= {"distributed_type": "MULTI_CPU", "use_cpu": True, **_ask_machines(), "mpirun_config": _ask_mpi()}
        found["num_processes"] = _ask_number("How many processes in total?", 2)
    else:
        found |= {"use_cpu": False, **_ask_machines()}
        sharded = _ask_yes_no("Shard models over the processes (FSDP)?")
        found["distributed_type"] = "FSDP" if sharded else "MULTI_GPU" if family in ("cpu", "cuda") else f"MULTI_{family.upper()}"
        found["num_processes"] = _ask_number("How many processes in total?", max(1, count) * found["num_machines"])
        if sharded:
            found |= {"fsdp_config": _ask_sharding(), "parallelism_config": _ask_mesh()}
        else:
            found["gpu_ids"] = _ask_text("Which accelerators of this machine (all, or numbers separated by commas)?", "all")
        found["enable_cpu_affinity"] = family == "cuda" and _ask_yes_no("Bind each process to the cores next to its GPU?")
    return found


def get_cluster_input() -> ClusterConfig:
    """Ask all questions about this machine and return the configuration."""
    family, count = count_without_torch(dict(os.environ))
    kind = int(_ask_options("What runs?", list(_KINDS), int, default=2 if count > 1 else 0))
    found = _ask_processes(kind, family.type, count)
    found["dynamo_config"] = _ask_compilation()
    precisions = ["no", "fp16", "bf16", "fp8"]
    found["mixed_precision"] = _ask_options("Which number format does training use?", precisions, lambda number: precisions[int(number)])
    if found["mixed_precision"] == "fp8":
        found["fp8_config"] = {"backend": "AO"}
    found["debug"] = kind != 0 and _ask_yes_no("Check before each collective call that the processes agree on shapes (slower)?")
    # The two keys of TPUs are written as Accelerate writes them, so that files can be compared
    return ClusterConfig(compute_environment=ComputeEnvironment.LOCAL_MACHINE, downcast_bf16="no", tpu_env=[], **found)  # type: ignore[arg-type]
