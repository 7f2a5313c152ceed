"""The options of `accelerate launch`, as tables: one row per option, by the group that the help shows it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from accelerate.commands.utils import CustomArgumentParser
from slipstream.config.sources import str_to_bool

__all__ = ["DYNAMO_BACKENDS", "GROUPS", "UNGROUPED", "add_launch_arguments"]

DYNAMO_BACKENDS = [
    *("EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT", "TENSORRT"),
    *("AOT_TORCHXLA_TRACE_ONCE", "TORHCHXLA_TRACE_ONCE", "TVM"),
]
"""The names that Accelerate accepts (one is misspelt there); those that this torch lacks are refused at launch."""
_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_NOT_RUN = "Read, and refused at launch: "


class Row(NamedTuple):
    """One option: its names, what a value is (None: a switch), the default, the help, and what argparse needs besides."""

    names: str
    type: Callable[[str], Any] | None
    default: Any
    help: str
    more: dict[str, Any] = {}


def _three_flags(text: str) -> tuple[bool, ...]:
    return tuple(bool(str_to_bool(word)) for word in text.strip("() ").split(","))


def _yes_or_no(text: str) -> bool:
    return bool(str_to_bool(text))


UNGROUPED = (
    Row("--config_file", str, None, "Read the options that are not given here from this file (YAML or JSON)."),
    Row("--quiet -q", None, None, "When a process fails, end with its exit code and without a traceback of the launcher."),
    Row("-m --module", None, None, "The script is the name of a module, as with `python -m`."),
    Row("--no_python", None, None, "The script is a program: start it without Python."),
    Row("--debug", None, None, "Check before each collective call that the processes agree on shapes (ACCELERATE_DEBUG_MODE)."),
)

_HARDWARE = (
    Row("--cpu", None, False, "Compute on the CPU; with --num_processes N, N processes start."),
    Row("--multi_gpu", None, False, "Several processes, each with an accelerator of its own if there are any."),
    Row("--tpu", None, False, _NOT_RUN + "TPUs."),
)
_RESOURCES = (
    Row(
        "--mixed_precision", str, None, "The number format of the forward and backward pass.", {"choices": ["no", "fp16", "bf16", "fp8"]}
    ),
    Row("--num_processes", int, None, "Processes in total, over all machines; by default one per accelerator."),
    Row("--num_machines", int, None, "How many machines take part."),
    Row("--num_cpu_threads_per_process", int, None, "Threads of each process (OMP_NUM_THREADS); by default the cores are shared out."),
    Row("--enable_cpu_affinity", None, False, "Bind each process to the cores next to its GPU."),
    Row("--dynamo_backend", str, None, "Compile models with this backend.", {"choices": ["no", *map(str.lower, DYNAMO_BACKENDS)]}),
    Row("--dynamo_mode", str, "default", "The mode of torch.compile.", {"choices": _DYNAMO_MODES}),
    Row("--dynamo_use_fullgraph", None, False, "Each model must be one graph."),
    Row("--dynamo_use_dynamic", None, False, "Compile for changing shapes."),
    Row("--dynamo_use_regional_compilation", None, False, "Compile repeated blocks once, instead of whole models."),
)
_PARADIGMS = (
    Row("--use_deepspeed", None, False, _NOT_RUN + "DeepSpeed. --use_fsdp shards in the same way as ZeRO."),
    Row("--use_fsdp", None, False, "Shard models over the processes."),
    Row("--use_parallelism_config", None, False, "Lay the processes out as the --parallelism_config_ sizes say."),
    Row("--use_megatron_lm", None, False, "Megatron-LM, which does not run here: an Accelerator raises."),
)
_MACHINES = (
    Row("--gpu_ids", str, None, "Which accelerators of this machine: all, or numbers separated by commas."),
    Row("--same_network", None, False, "All machines reach the main process directly."),
    Row("--machine_rank", int, None, "Which of the machines this is, from 0."),
    Row("--main_process_ip", str, None, "Where the machines meet: the address of machine 0."),
    Row("--main_process_port", int, None, "On which port they meet; 0 picks a free one."),
    Row("-t --tee", str, "0", "Which streams of which process are shown and kept: 0, 1, 2, 3, or RANK:N,RANK:N."),
    Row("--log_dir", str, None, "Keep the output of every process in files below this folder."),
    Row("--role", str, "default", "The name of these processes in reports."),
    Row("--rdzv_backend", str, "static", "How machines find each other: static, c10d, etcd."),
    Row("--rdzv_conf", str, "", "Further settings of that, as NAME=VALUE,NAME=VALUE."),
    Row("--max_restarts", int, 0, "How often a failed job starts again."),
    Row("--monitor_interval", float, 0.1, "Seconds between two looks at the processes."),
)
_TPU = (
    Row("--tpu_cluster", None, False, _NOT_RUN + "TPU pods.", {"dest": "tpu_use_cluster"}),
    Row("--no_tpu_cluster", None, False, "No TPU pod.", {"dest": "tpu_use_cluster", "action": "store_const", "const": False}),
    Row("--tpu_use_sudo", None, False, "For TPU pods, which do not run here."),
    Row("--vm", str, None, "For TPU pods, which do not run here.", {"action": "append"}),
    Row("--env", str, None, "For TPU pods, which do not run here.", {"action": "append"}),
    Row("--main_training_function", str, None, "For TPUs: the function that runs. Scripts are started whole here."),
    Row("--downcast_bf16", None, False, "For TPUs, which do not run here."),
)
_DEEPSPEED = tuple(
    Row(f"--{name}", kind, None, f"DeepSpeed (not run here): {meaning}.")
    for name, kind, meaning in (
        ("deepspeed_config_file", str, "its configuration file"),
        ("zero_stage", int, "the stage of ZeRO"),
        ("offload_optimizer_device", str, "where the optimizer state is kept"),
        ("offload_param_device", str, "where the parameters are kept"),
        ("offload_optimizer_nvme_path", str, "the disk for the optimizer state"),
        ("offload_param_nvme_path", str, "the disk for the parameters"),
        ("gradient_accumulation_steps", int, "batches per update; this one is used, and sets ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("gradient_clipping", float, "the norm that gradients are clipped to"),
        ("zero3_init_flag", str, "whether models are built sharded"),
        ("zero3_save_16bit_model", str, "whether whole weights are saved"),
        ("deepspeed_hostfile", str, "the file of hosts"),
        ("deepspeed_exclusion_filter", str, "hosts that are left out"),
        ("deepspeed_inclusion_filter", str, "hosts that take part"),
        ("deepspeed_multinode_launcher", str, "what starts processes on other machines"),
        ("deepspeed_moe_layer_cls_names", str, "classes of expert layers"),
    )
)
_FSDP = (
    Row("--fsdp_version", str, "1", "The version that the options are written for; version 2 runs in any case.", {"choices": ["1", "2"]}),
    Row("--fsdp_offload_params", str, "false", "Keep shards in CPU memory."),
    Row("--fsdp_min_num_params", int, 100_000_000, "Parameters that make a block, for SIZE_BASED_WRAP."),
    Row("--fsdp_sharding_strategy", str, "FULL_SHARD", "The strategy of version 1."),
    Row("--fsdp_reshard_after_forward", str, "true", "Free gathered parameters after the forward pass."),
    Row("--fsdp_auto_wrap_policy", str, None, "How blocks are found: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP."),
    Row("--fsdp_transformer_layer_cls_to_wrap", str, None, "Classes of blocks, separated by commas."),
    Row("--fsdp_backward_prefetch", str, None, "Of version 1: version 2 prefetches by itself."),
    Row("--fsdp_state_dict_type", str, None, "What is saved: FULL_STATE_DICT or SHARDED_STATE_DICT."),
    Row("--fsdp_forward_prefetch", str, "false", "Of version 1: version 2 prefetches by itself."),
    Row("--fsdp_use_orig_params", str, "true", "Of version 1: parameters are always the original ones in version 2."),
    Row("--fsdp_cpu_ram_efficient_loading", str, "true", "Only the main process loads the weights."),
    Row("--fsdp_sync_module_states", str, "true", "The weights of the main process count."),
    Row("--fsdp_activation_checkpointing", str, "false", "Compute activations again in the backward pass."),
    Row("--fsdp_activation_checkpointing_offload", str, "false", "Keep the inputs of such blocks in CPU memory."),
)
_MEGATRON = tuple(
    Row(f"--megatron_lm_{name}", kind, default, "Megatron-LM (not run here).")
    for name, kind, default in (
        *((name, int, 1) for name in ("tp_degree", "pp_degree")),
        *(
            (name, _yes_or_no, False)
            for name in (
                *("use_custom_fsdp", "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim"),
                *("optimizer_cpu_offload", "use_precision_aware_optimizer"),
            )
        ),
        *(
            (name, int, None)
            for name in (
                *("decoder_last_pipeline_num_layers", "num_micro_batches", "recompute_num_layers", "expert_model_parallel_size"),
                *("context_parallel_size", "expert_tensor_parallel_size"),
            )
        ),
        ("gradient_clipping", float, 1.0),
        *((name, float, None) for name in ("attention_dropout", "hidden_dropout")),
        *(
            (name, str, None)
            for name in (
                *("sequence_parallelism", "recompute_activations", "use_distributed_optimizer", "recompute_granularity"),
                *("recompute_method", "attention_backend", "attention_softmax_in_fp32", "calculate_per_token_loss"),
                "use_rotary_position_embeddings",
            )
        ),
    )
)
_FP8 = (
    Row("--fp8_backend", str, None, "What computes in float8: ao is torchao; others do not run.", {"choices": ["ao", "te", "msamp"]}),
    Row("--fp8_use_autocast_during_eval", None, False, "TransformerEngine (not run here)."),
    Row("--fp8_margin", int, 0, "TransformerEngine (not run here)."),
    Row("--fp8_interval", int, 1, "TransformerEngine (not run here)."),
    Row("--fp8_format", str, "HYBRID", "TransformerEngine (not run here).", {"choices": ["HYBRID", "E4M3", "E5M2"]}),
    Row("--fp8_amax_history_len", int, 1024, "TransformerEngine (not run here)."),
    Row("--fp8_amax_compute_algo", str, "most_recent", "TransformerEngine (not run here).", {"choices": ["max", "most_recent"]}),
    Row("--fp8_override_linear_precision", _three_flags, (False, False, False), "TransformerEngine (not run here)."),
    Row("--fp8_opt_level", str, "O2", "MS-AMP (not run here).", {"choices": ["O1", "O2"]}),
    Row("--fp8_enable_fsdp_float8_all_gather", str_to_bool, "true", "torchao: gather sharded weights in float8."),
    Row("--fp8_pad_inner_dim", str_to_bool, "true", "torchao: pad products whose inner size is no multiple of 16."),
)
_AWS = (
    Row("--aws_access_key_id", str, None, "SageMaker (not run here)."),
    Row("--aws_secret_access_key", str, None, "SageMaker (not run here)."),
)
_MPI = (Row("--mpirun_hostfile", str, None, "Start the processes with mpirun on the hosts of this file."),)
_MESH = (
    Row("--parallelism_config_dp_replicate_size", int, 1, "Replicas of the sharded model."),
    Row("--parallelism_config_dp_shard_size", int, 1, "Processes that share one replica."),
    Row("--parallelism_config_tp_size", int, 1, "Tensor parallelism; 1 runs here."),
    Row("--parallelism_config_cp_size", int, 1, "Context parallelism; 1 runs here."),
    Row("--parallelism_config_cp_backend", str, "torch", "How context parallelism works.", {"choices": ["torch"]}),
    Row("--parallelism_config_cp_comm_strategy", str, "allgather", "How context parallelism communicates."),
    Row("--parallelism_config_sp_size", int, 1, "Sequence parallelism; 1 runs here."),
    Row("--parallelism_config_sp_backend", str, "deepspeed", "How sequence parallelism works.", {"choices": ["deepspeed"]}),
    Row("--parallelism_config_sp_seq_length", str, None, "The length of sequences under sequence parallelism."),
    Row("--parallelism_config_sp_seq_length_is_variable", _yes_or_no, True, "Whether that length changes."),
    Row("--parallelism_config_sp_attn_implementation", str, "sdpa", "The attention under sequence parallelism."),
)

GROUPS = {
    "Hardware Selection Arguments": ("What the processes compute on.", _HARDWARE),
    "Resource Selection Arguments": ("How many processes, and how they compute.", _RESOURCES),
    "Training Paradigm Arguments": ("How models are spread over the processes.", _PARADIGMS),
    "Distributed GPUs": ("Machines, and how the processes find each other.", _MACHINES),
    "TPU": ("Options of TPUs.", _TPU),
    "DeepSpeed Arguments": ("Options of DeepSpeed.", _DEEPSPEED),
    "FSDP Arguments": ("Options of sharded training.", _FSDP),
    "Megatron-LM Arguments": ("Options of Megatron-LM.", _MEGATRON),
    "FP8 Arguments": ("Options of --mixed_precision fp8.", _FP8),
    "AWS Arguments": ("Options of SageMaker.", _AWS),
    "MPI Arguments": ("Options of mpirun.", _MPI),
    "ParallelismConfig Arguments": ("The mesh of processes.", _MESH),
}
"""The titles are Accelerate's, because programs that build on the parser look groups up by them."""


def _add(parser: Any, row: Row) -> None:
    options: dict[str, Any] = {"default": row.default, "help": row.help, **row.more}
    if row.type is None:
        options.setdefault("action", "store_true")
    else:
        options["type"] = row.type
    parser.add_argument(*row.names.split(), **options)


def add_launch_arguments(parser: CustomArgumentParser) -> None:
    """Add every option of `accelerate launch`, the script, and its arguments."""
    for row in UNGROUPED:
        _add(parser, row)
    for title, (description, rows) in GROUPS.items():
        group = parser.add_argument_group(title, description)
        for row in rows:
            _add(group, row)
    parser.add_argument("training_script", type=str, help="The script to run, or the module or program with -m or --no_python.")
    parser.add_argument("training_script_args", nargs="...", help="The arguments of the script.")
