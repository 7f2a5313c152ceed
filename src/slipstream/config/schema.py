"""The options of Slipstream, each declared once, in five frozen sections.

`OPTIONS` holds every option by name, `SECTIONS` the section classes. To add an option, add a field here: its flag, variable, file key,
question and line of documentation follow from the declaration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, get_type_hints

from slipstream.config.option import Option, Value, declare, from_field

__all__ = ["OPTIONS", "SECTIONS", "Command", "Compute", "Device", "Launch", "Safety", "split_pairs"]

_DYNAMO_BACKENDS: Final = ("no", "eager", "aot_eager", "inductor", "cudagraphs", "tvm")
_DYNAMO_MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


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


def _complaint_fp8_backend(text: str) -> str | None:
    engine = {"te": "TransformerEngine", "msamp": "MS-AMP"}.get(text.strip().lower())
    return f"is {engine}, which does not run here; fp8 runs through torchao" if engine else None


def _several_machines(answers: Mapping[str, Value]) -> bool:
    machines = answers.get("num_machines")
    return isinstance(machines, int) and machines > 1


def _own_rendezvous(answers: Mapping[str, Value]) -> bool:
    return _several_machines(answers) and answers.get("same_network") is False


def _on_accelerators(answers: Mapping[str, Value]) -> bool:
    return answers.get("cpu") is not True


def _compiles(answers: Mapping[str, Value]) -> bool:
    return answers.get("dynamo_backend") not in (None, "no")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the processes compute on."""

    cpu: bool = declare(
        False,
        help="Compute on the CPU even where an accelerator is present. Any number of processes may be started this way.",
        file_aliases=("use_cpu",),
        question="Compute on the CPU only?",
    )


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
        False, in_file=False, in_environment=False, help="Print the resolved plan and where each value came from, and start nothing."
    )


SECTIONS: Final[Mapping[str, type[Device] | type[Launch] | type[Compute] | type[Safety] | type[Command]]] = MappingProxyType(
    {"device": Device, "launch": Launch, "compute": Compute, "safety": Safety, "command": Command}
)


def _options_of(section: str, declared: type) -> list[Option]:
    hints = get_type_hints(declared)
    return [from_field(field_.name, section, hints[field_.name], field_.default, field_.metadata["option"]) for field_ in fields(declared)]


OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {option.name: option for section, declared in SECTIONS.items() for option in _options_of(section, declared)}
)
"""Every option by name, in the order in which the interview and the documentation present them."""
