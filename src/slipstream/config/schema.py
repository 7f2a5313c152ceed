"""The options of Slipstream, each declared once, in seven frozen sections.

`OPTIONS` holds every option by name, `SECTIONS` the section classes. To add an option, add a field here: its flag, variable, file key,
question and line of documentation follow from the declaration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from slipstream.config.option import Option, Value, declare, from_field

__all__ = [
    "OPTIONS", "RESHARD_OF", "SECTIONS", "SHARDING_STRATEGIES", "Command", "Compute", "Device", "Launch", "Parallelism", "Safety",
    "Sharding", "sharding_strategy_name", "split_pairs",
]

_DYNAMO_BACKENDS: Final = ("no", "eager", "aot_eager", "inductor", "cudagraphs", "tvm")
_DYNAMO_MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SHARDING_STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""The strategies of FSDP version 1, in the order in which torch numbers them from 1."""
RESHARD_OF: Final = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
"""What such a strategy means for `fsdp_reshard_after_forward` of version 2."""


def split_pairs(text: str) -> dict[str, str]:
    """Return the settings in a text like that of `rdzv_conf`.

    >>> split_pairs("timeout=900,endpoint=node0:29400")
    {'timeout': '900', 'endpoint': 'node0:29400'}
    """
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in text.split(",") if pair.strip())}


def _complaint_pairs(text: str) -> str | None:
    pairs = [pair for pair in text.split(",") if pair.strip()]
    names = [pair.partition("=")[0].strip() for pair in pairs]
    if not all(name and "=" in pair for name, pair in zip(names, pairs, strict=True)):
        return "is not a list of name=value pairs"
    return "gives a name twice" if len(set(names)) < len(names) else None


def _complaint_blank(text: str) -> str | None:
    return "is empty" if not text.strip() else None


def _complaint_host(text: str) -> str | None:
    if re.fullmatch(r"[\w.:\-\[\]%]+", text, re.ASCII):
        return None
    return "is not a host name or an address"


def _complaint_tee(text: str) -> str | None:
    if re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        return None
    return "is not a number from 0 to 3, nor a list of local_rank:number"


def _complaint_device_ids(text: str) -> str | None:
    entries = [entry.strip() for entry in text.split(",")]
    # an id is a number, or the identifier that a vendor's tool prints (always with a dash in it)
    if text.strip().lower() != "all" and not all(re.fullmatch(r"\d+|\w+-[\w\-/.]+", entry, re.ASCII) for entry in entries):
        return "is neither the word all nor a list of device numbers"
    return "names a device twice" if len(set(entries)) < len(entries) else None


def _complaint_device_family(text: str) -> str | None:
    if re.fullmatch(r"[a-z]\w*", text, re.ASCII):
        return None
    return "is not the name of a device family, which is a word without a number" + ("; gpu_ids says which devices" if ":" in text else "")


def _complaint_fp8_backend(text: str) -> str | None:
    engine = {"te": "TransformerEngine", "msamp": "MS-AMP"}.get(text.strip().lower())
    return f"is {engine}, which does not run here; fp8 runs through torchao" if engine else None


def sharding_strategy_name(text: str) -> str:
    """Return the name of a strategy of FSDP version 1 that is given by its name or number; any other text in small letters.

    >>> sharding_strategy_name("2"), sharding_strategy_name("full_shard"), sharding_strategy_name("True")
    ('SHARD_GRAD_OP', 'FULL_SHARD', 'true')
    """
    name = text.strip().upper().removeprefix("_")
    if name in SHARDING_STRATEGIES:
        return name
    return SHARDING_STRATEGIES[int(name) - 1] if name in ("1", "2", "3", "4", "5") else text.strip().lower()


def _usual_reshard(text: str) -> str:
    word = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(text.lower(), text)
    return word if word.isdigit() else sharding_strategy_name(word)


def _complaint_no_shard(text: str) -> str | None:
    return "shards nothing: without use_fsdp every process keeps a whole model" if text == "NO_SHARD" else None


def _complaint_reshard(text: str) -> str | None:
    if text in ("true", "false", *SHARDING_STRATEGIES) or (text.isdigit() and len(text) < 10):
        return _complaint_no_shard(text)
    return "is neither true nor false, nor a number of processes"


def _complaint_state_dict_type(text: str) -> str | None:
    if text.strip().upper() != "LOCAL_STATE_DICT":
        return None
    return "needs the flat parameters of FSDP version 1, which fully_shard does not have; a sharded state dict is as local"


def _complaint_pattern(text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        return f"is not a regular expression ({error})"
    return _complaint_blank(text)


def _complaint_axis(title: str, text: str) -> str | None:
    return f"asks for {title} parallelism, which is not available yet: this version runs replicas and shards" if text != "1" else None


def _several_machines(answers: Mapping[str, Value]) -> bool:
    machines = answers.get("num_machines")
    return isinstance(machines, int) and machines > 1


def _own_rendezvous(answers: Mapping[str, Value]) -> bool:
    return _several_machines(answers) and answers.get("same_network") is False


def _on_accelerators(answers: Mapping[str, Value]) -> bool:
    return answers.get("cpu") is not True and answers.get("device") != "cpu"


def _not_on_cpu(answers: Mapping[str, Value]) -> bool:
    return answers.get("cpu") is not True


def _compiles(answers: Mapping[str, Value]) -> bool:
    return answers.get("dynamo_backend") not in (None, "no")


def _several_processes(answers: Mapping[str, Value]) -> bool:
    return answers.get("num_processes") != 1


def _shards(answers: Mapping[str, Value]) -> bool:
    return answers.get("use_fsdp") is True


def _wraps_by_class(answers: Mapping[str, Value]) -> bool:
    return _shards(answers) and answers.get("fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP"


def _wraps_by_size(answers: Mapping[str, Value]) -> bool:
    return _shards(answers) and answers.get("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP"


def _checkpoints_activations(answers: Mapping[str, Value]) -> bool:
    return _shards(answers) and answers.get("fsdp_activation_checkpointing") is True


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the processes compute on."""

    cpu: bool = declare(
        False,
        help="Compute on the CPU even where an accelerator is present. Any number of processes may be started this way.",
        file_aliases=("use_cpu",),
        question="Compute on the CPU only?",
    )
    device: str | None = declare(
        None,
        usual=str.lower,
        check=_complaint_device_family,
        example="cpu",
        help="Device family to compute on, by the type of its devices in torch (docs/devices.md has the list); cpu is the same as the "
        "option cpu. An error where torch cannot use it. Without it: the first family that torch can use here.",
        question="On which device family (auto: the first that torch can use)?",
        unset="auto",
        asked_when=_not_on_cpu,
    )

    @property
    def family(self) -> str | None:
        """The device family that the options name; None for the first that torch can use."""
        return "cpu" if self.cpu else self.device


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How many processes, where, and how they find each other."""

    num_machines: int = declare(1, minimum=1, help="Machines that take part.", question="How many machines take part?", example="2")
    machine_rank: int = declare(
        0,
        minimum=0,
        help="Which of the machines this one is, counted from 0; the main process is on machine 0.",
        question="Which of them is this one (0 is the one with the main process)?",
        asked_when=_several_machines,
    )
    main_process_ip: str | None = declare(
        None,
        check=_complaint_host,
        example="10.0.0.1",
        help="Host name or address of machine 0, as the other machines reach it.",
        question="Under which host name or address do the others reach machine 0 (none: the cluster says it)?",
        asked_when=_several_machines,
    )
    main_process_port: int | None = declare(
        None,
        minimum=0,
        maximum=65535,
        example="29500",
        help="Port on machine 0 where the processes meet; 0 takes any free one, which only works on one machine.",
        question="On which port (auto: the usual one)?",
        unset="auto",
        asked_when=_several_machines,
    )
    same_network: bool = declare(
        True,
        help="The machines reach main_process_ip directly. If not, they meet through the endpoint of rdzv_backend.",
        question="Do all machines reach that address directly?",
        asked_when=_several_machines,
    )
    rdzv_backend: str = declare(
        "static",
        check=_complaint_blank,
        example="c10d",
        help="How the machines meet: static (machine ranks are given) or a rendezvous backend of torch, such as c10d.",
        question="Through which rendezvous backend do they meet?",
        asked_when=_own_rendezvous,
    )
    rdzv_conf: str = declare(
        "",
        check=_complaint_pairs,
        example="timeout=900",
        help="Settings for the rendezvous backend as name=value,name=value.",
        question="With which settings for it (name=value,name=value)?",
        asked_when=_own_rendezvous,
    )
    num_processes: int | None = declare(
        None,
        minimum=1,
        example="2",
        help="Processes in total, over all machines. Without it: one per visible accelerator, or one process where there is none.",
        question="How many processes in total, over all machines (auto: one per accelerator)?",
        unset="auto",
    )
    gpu_ids: str | None = declare(
        None,
        check=_complaint_device_ids,
        example="0,1",
        help="Which accelerators of this machine may be used: all, or their numbers separated by commas.",
        question="Which accelerators of this machine (all, or numbers separated by commas)?",
        unset="all",
        asked_when=_on_accelerators,
    )
    num_cpu_threads_per_process: int | None = declare(
        None, minimum=1, example="4", help="Threads that torch uses in each process. Without it: the cores divided by the processes."
    )
    start_method: str = declare(
        "auto",
        choices=("auto", "fork", "spawn"),
        help="How worker processes start: fork (from an interpreter that has torch imported already), spawn (fresh interpreters), "
        "or auto (fork where that is safe).",
    )
    max_restarts: int = declare(0, minimum=0, example="3", help="How often the processes are started again after one of them failed.")
    monitor_interval: float = declare(0.1, above=0, example="0.5", help="Seconds between two checks of the launcher on its processes.")
    role: str = declare("default", check=_complaint_blank, example="trainer", help="A name for these processes in logs and error reports.")
    tee: str = declare(
        "0",
        check=_complaint_tee,
        short="-t",
        example="3",
        help="Output that goes to the terminal with the rank before every line: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank, "
        "as in 0:3,1:1. The rest goes to files only where there is a log_dir, and to the terminal as it is where there is none.",
    )
    log_dir: str | None = declare(
        None,
        check=_complaint_blank,
        example="logs",
        help="Folder where every process writes its output to files of its own: RUN/attempt_N/RANK/stdout.log and stderr.log. "
        "The terminal shows what tee says, and everything without tee.",
    )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What a step does: precision, accumulation, compilation."""

    mixed_precision: str = declare(
        "no",
        choices=("no", "fp16", "bf16", "fp8"),
        example="bf16",
        help="Number format of the forward and backward pass.",
        question="Which number format for the forward and backward pass?",
    )
    gradient_accumulation_steps: int = declare(
        1,
        minimum=1,
        example="4",
        help="Batches whose gradients are added up before the optimizer steps.",
        question="Over how many batches are gradients accumulated?",
    )
    fp8_backend: str = declare(
        "auto",
        choices=("auto", "ao"),
        check=_complaint_fp8_backend,
        help="What computes in float8 under mixed_precision fp8: ao is torchao, and auto takes it.",
    )
    fp8_pad_inner_dim: bool = declare(
        False, help="Pad products whose inner size is not a multiple of 16, for fp8; AORecipeKwargs in the script overrides it."
    )
    dynamo_backend: str = declare(
        "no",
        choices=_DYNAMO_BACKENDS,
        example="inductor",
        help="Compile prepared models with this backend of torch.compile; no leaves them as they are.",
        question="Compile models, and with which backend?",
    )
    dynamo_mode: str = declare(
        "default",
        choices=_DYNAMO_MODES,
        example="reduce-overhead",
        help="The mode of torch.compile.",
        question="In which mode?",
        asked_when=_compiles,
    )
    dynamo_use_fullgraph: bool = declare(
        False,
        help="Compilation fails where the model cannot be one graph, instead of splitting it.",
        question="Must each model be one graph?",
        asked_when=_compiles,
    )
    dynamo_use_dynamic: bool = declare(
        False,
        help="Compile for changing shapes from the start.",
        question="Do shapes change from batch to batch?",
        asked_when=_compiles,
    )
    dynamo_use_regional_compilation: bool = declare(
        False,
        help="Compile each kind of repeated block once instead of the whole model, which starts sooner.",
        question="Compile repeated blocks instead of whole models?",
        asked_when=_compiles,
    )


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharded training (FSDP): every process keeps a part of the parameters, gradients and optimizer state."""

    use_fsdp: bool = declare(
        False,
        help="Shard prepared models over the processes with fully_shard of torch. FullyShardedDataParallelPlugin in the script does the "
        "same, and its fields are stronger than the fsdp_ options.",
        variable_aliases=("ACCELERATE_USE_FSDP",),
        question="Shard models over the processes (FSDP), instead of a whole model in each?",
        asked_when=_several_processes,
    )
    fsdp_version: int = declare(
        2,
        minimum=1,
        maximum=2,
        example="1",
        help="Version of FSDP that the options are written for. Options of version 1 are translated, and version 2 runs.",
        variable_aliases=("FSDP_VERSION",),
    )
    fsdp_reshard_after_forward: str = declare(
        "true",
        usual=_usual_reshard,
        check=_complaint_reshard,
        example="false",
        help="Whether a block frees its gathered parameters after the forward pass and gathers them again for the backward pass: true "
        "(least memory), false (least communication), or a number of processes that keep a copy between them. A strategy of version 1 "
        "is translated.",
        variable_aliases=("FSDP_RESHARD_AFTER_FORWARD",),
        question="Free gathered parameters after the forward pass (true, false, or a number of processes)?",
        asked_when=_shards,
    )
    fsdp_sharding_strategy: str | None = declare(
        None,
        choices=tuple(RESHARD_OF),
        usual=sharding_strategy_name,
        check=_complaint_no_shard,
        example="FULL_SHARD",
        help="Strategy of version 1, by its name or number: FULL_SHARD means fsdp_reshard_after_forward true, SHARD_GRAD_OP false, and "
        "the HYBRID_ ones shard within a machine and replicate across machines.",
        variable_aliases=("FSDP_SHARDING_STRATEGY",),
    )
    fsdp_offload_params: bool = declare(
        False,
        valued=True,
        help="Keep the sharded parameters, gradients and optimizer state in CPU memory.",
        variable_aliases=("FSDP_OFFLOAD_PARAMS",),
        question="Keep shards in CPU memory?",
        asked_when=_shards,
    )
    fsdp_auto_wrap_policy: str | None = declare(
        None,
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        help="How blocks are found, each of which is gathered as a whole: by class, by number of parameters, or the model as a single "
        "block. Without it: the classes that the model names, else repeated blocks.",
        variable_aliases=("FSDP_AUTO_WRAP_POLICY",),
        question="How are blocks found (auto: from the model)?",
        unset="auto",
        asked_when=_shards,
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = declare(
        None,
        check=_complaint_blank,
        example="LlamaDecoderLayer",
        help="Classes of blocks for TRANSFORMER_BASED_WRAP, separated by commas. Without it: those that the model names.",
        variable_aliases=("FSDP_TRANSFORMER_CLS_TO_WRAP",),
        question="Which classes are blocks (names separated by commas; auto: from the model)?",
        unset="auto",
        asked_when=_wraps_by_class,
    )
    fsdp_min_num_params: int = declare(
        100_000_000,
        minimum=1,
        example="1000000",
        help="Parameters that make a block for SIZE_BASED_WRAP.",
        variable_aliases=("FSDP_MIN_NUM_PARAMS",),
        question="How many parameters make a block?",
        asked_when=_wraps_by_size,
    )
    fsdp_state_dict_type: str = declare(
        "SHARDED_STATE_DICT",
        choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
        check=_complaint_state_dict_type,
        help="What save_state writes: the shards of every process, or whole tensors.",
        variable_aliases=("FSDP_STATE_DICT_TYPE",),
        question="What is saved, shards or whole tensors?",
        asked_when=_shards,
    )
    fsdp_cpu_ram_efficient_loading: bool = declare(
        False,
        valued=True,
        help="Only the main process needs to have the weights before prepare; the others may have the model on the meta device.",
        variable_aliases=("FSDP_CPU_RAM_EFFICIENT_LOADING",),
        question="Load weights on the main process only?",
        asked_when=_shards,
    )
    fsdp_sync_module_states: bool = declare(
        True,
        valued=True,
        help="The weights of the main process count at prepare. If not, every process shards its own.",
        variable_aliases=("FSDP_SYNC_MODULE_STATES",),
    )
    fsdp_activation_checkpointing: bool = declare(
        False,
        valued=True,
        help="Compute the activations of a block again in the backward pass instead of keeping them.",
        variable_aliases=("FSDP_ACTIVATION_CHECKPOINTING",),
        question="Compute activations again in the backward pass, which saves memory?",
        asked_when=_shards,
    )
    fsdp_activation_checkpointing_offload: bool = declare(
        False,
        valued=True,
        help="Keep the inputs of checkpointed blocks in CPU memory; needs fsdp_activation_checkpointing.",
        variable_aliases=("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",),
        question="Keep the inputs of those blocks in CPU memory?",
        asked_when=_checkpoints_activations,
    )
    fsdp_ignored_modules: str | None = declare(
        None,
        check=_complaint_pattern,
        example=r".*\.router",
        help="Regular expression over the whole names of modules that stay unsharded on every process.",
        variable_aliases=("FSDP_IGNORED_MODULES",),
    )
    fsdp_backward_prefetch: str | None = declare(
        None,
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        help="Option of version 1 without effect in version 2, which prefetches by itself.",
        file_aliases=("fsdp_backward_prefetch_policy",),
        variable_aliases=("FSDP_BACKWARD_PREFETCH",),
    )
    fsdp_forward_prefetch: bool | None = declare(
        None,
        valued=True,
        help="Option of version 1 without effect in version 2, which prefetches by itself.",
        variable_aliases=("FSDP_FORWARD_PREFETCH",),
    )
    fsdp_use_orig_params: bool | None = declare(
        None,
        valued=True,
        help="Option of version 1 without effect in version 2, whose parameters are always the original ones.",
        variable_aliases=("FSDP_USE_ORIG_PARAMS",),
    )


def _declare_size(axis: str, **details: Any) -> Any:
    return declare(None, **{"minimum": 1, "example": "2"} | details, variable_aliases=(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE",))


def _declare_size_one(axis: str, title: str) -> Any:
    text = f"Processes of {title} parallelism; this version runs 1."
    return _declare_size(axis, help=text, maximum=1, example="1", check=partial(_complaint_axis, title))


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The mesh of processes: how many replicas of the model, and over how many processes each is sharded."""

    use_parallelism_config: bool | None = declare(
        None,
        help="Whether the parallelism_config_ sizes count. Without it they do; --no_use_parallelism_config overrides those of a file.",
        variable_aliases=("ACCELERATE_USE_PARALLELISM_CONFIG",),
    )
    parallelism_config_dp_replicate_size: int | None = _declare_size(
        "dp_replicate",
        help="Replicas of the sharded model (HSDP). Without it: one under use_fsdp.",
        question="How many replicas of the sharded model (auto: one)?",
        unset="auto",
        asked_when=_shards,
    )
    parallelism_config_dp_shard_size: int | None = _declare_size(
        "dp_shard",
        help="Processes over which each replica is sharded. Without it: what the replicas leave.",
    )
    parallelism_config_tp_size: int | None = _declare_size_one("tp", "tensor")
    parallelism_config_cp_size: int | None = _declare_size_one("cp", "context")
    parallelism_config_sp_size: int | None = _declare_size_one("sp", "sequence")


@dataclass(frozen=True, kw_only=True)
class Safety:
    """How long a process waits for the others, and what is checked and reported."""

    debug: bool = declare(
        False,
        help="Check values too: weights of replicas and random states that should agree between processes.",
        question="Check values between processes too (slower)?",
    )
    timeout: float = declare(
        1800.0,
        above=0,
        example="600",
        help="Seconds that a process waits in a collective call for the others before it raises.",
    )
    barrier_timeout: float = declare(
        86400.0,
        above=0,
        example="3600",
        help="Seconds that a process waits in a barrier or for main_process_first before it raises.",
    )
    hang_warning: float = declare(
        10.0,
        minimum=0,
        example="30",
        help="Seconds of waiting after which a table of what every process is doing is printed; 0 never prints it.",
    )
    log_level: str | None = declare(None, choices=_LOG_LEVELS, example="INFO", help="Lowest level that loggers of get_logger let through.")
    log_format: str = declare(
        "text",
        choices=("text", "json"),
        example="json",
        help="How log records are printed: as text, or each as one line of JSON with time, level, logger, rank, host, message and place.",
    )
    all_warnings: bool = declare(
        False,
        help="Show a warning of Python or of a library from every process. Without it, processes of one machine that give the same "
        "warning at the same place show it once.",
    )


@dataclass(frozen=True, kw_only=True)
class Command:
    """What belongs to one command line only."""

    config_file: str | None = declare(
        None,
        check=_complaint_blank,
        in_file=False,
        example="config.yaml",
        help="File to read options from: one that `slipstream config` wrote, or one of `accelerate config`; YAML or JSON.",
    )
    module: bool = declare(
        False, short="-m", in_file=False, in_environment=False, help="The script is the name of a module, as with python -m."
    )
    no_python: bool = declare(
        False, in_file=False, in_environment=False, help="The script is an executable: start it without the Python interpreter."
    )
    multi_gpu: bool = declare(
        False,
        in_file=False,
        in_environment=False,
        help="Require more than one accelerator: an error where only one process would start, or with cpu. Changes nothing else.",
    )
    quiet: bool = declare(
        False, short="-q", in_file=False, in_environment=False, help="Suppress the launcher's own messages; failures are still reported."
    )
    show: bool = declare(
        False,
        flag_aliases=("dry_run",),
        in_file=False,
        in_environment=False,
        help="Print the resolved plan and where each value came from, and start nothing. With use_fsdp: the mesh of processes too.",
    )


_Section = type[Device] | type[Launch] | type[Compute] | type[Sharding] | type[Parallelism] | type[Safety] | type[Command]
SECTIONS: Final[Mapping[str, _Section]] = MappingProxyType(
    {
        **{"device": Device, "launch": Launch, "compute": Compute, "sharding": Sharding, "parallelism": Parallelism},
        **{"safety": Safety, "command": Command},
    }
)


def _options_of(section: str, declared: type) -> list[Option]:
    hints = get_type_hints(declared)
    return [from_field(field_.name, section, hints[field_.name], field_.default, field_.metadata["option"]) for field_ in fields(declared)]


OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {option.name: option for section, declared in SECTIONS.items() for option in _options_of(section, declared)}
)
"""Every option by name, in the order in which the interview and the documentation present them."""
