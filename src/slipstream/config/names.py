"""Names that are not options: features that this version does not have, internal variables, and misspelt names.

`unknown_name` returns the error for a name that `OPTIONS` does not hold, wherever it was given: the feature that it belongs to, or the
nearest existing names. Values are never shown here, because the value of an unknown name may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from slipstream.config.option import Kind, Origin, flag_names, negative_flag_names, shown
from slipstream.config.schema import OPTIONS
from slipstream.errors import ConfigError

__all__ = [
    "FEATURES", "INTERNAL_VARIABLES", "Feature", "is_internal", "missing_feature", "nearest", "not_available", "unknown_flag",
    "unknown_name", "variable_names",
]


@dataclass(frozen=True)
class Feature:
    """A feature that this version does not have, and the names that ask for it."""

    title: str
    names: str
    """Names separated by spaces; one that ends with a star is the start of names."""
    instead: str

    def claims(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names.split())


_PLAIN: Final = "Leave it out: the processes then train replicas of the model."

FEATURES: Final = (
    Feature(
        "DeepSpeed",
        "use_deepspeed deepspeed_* zero_stage zero3_* offload_optimizer_* offload_param_* gradient_clipping",
        _PLAIN,
    ),
    Feature("Megatron-LM", "use_megatron_lm megatron_lm_*", _PLAIN),
    Feature(
        "Tensor, context and sequence parallelism",
        "parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_sp_backend parallelism_config_sp_seq_* "
        "parallelism_config_sp_attn_* parallelism_config_pp_*",
        "Leave it out; parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size make a mesh.",
    ),
    Feature(
        "Recipes of TransformerEngine and MS-AMP for fp8",
        "fp8_use_* fp8_margin fp8_interval fp8_format fp8_amax_* fp8_override_* fp8_opt_level fp8_enable_*",
        "Leave it out: fp8 runs through torchao, whose recipe is AORecipeKwargs in the script.",
    ),
    Feature(
        "Launching on TPU hosts",
        "tpu tpu_* no_tpu_cluster vm env main_training_function downcast_bf16 command_file commands",
        "Leave it out, and start the script on every host yourself.",
    ),
    Feature("Launching through mpirun", "mpirun_*", "Start the script with mpirun directly: its rank variables are understood."),
    Feature("Binding processes to CPU cores", "enable_cpu_affinity", "Leave it out, or start the launcher under numactl or taskset."),
    Feature(
        "Submitting jobs to SageMaker",
        "aws_* sagemaker_* ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version "
        "py_version additional_args",
        "Leave it out, and submit the job with SageMaker's own tools: a script started there finds its processes.",
    ),
)

INTERNAL_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "SLIPSTREAM_CONFIG": "the resolved configuration, from the launcher to its workers",
        "SLIPSTREAM_HOME": "the folder of the default configuration file",
        "SLIPSTREAM_STANDIN_DEVICES": "how many devices the stand-in accelerator has",
        "SLIPSTREAM_STANDIN_MEMORY": "how many bytes each of its devices has",
        "SLIPSTREAM_STANDIN_CACHE": "the folder in which it is built",
    }
)
_INTERNAL_PREFIXES: Final = ("SLIPSTREAM_INTERNAL_", "SLIPSTREAM_TEST_")
"""Variables with these beginnings pass between our own processes; nobody sets them by hand."""


_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nproc": "num_processes",
        "nprocs": "num_processes",
        "nproc_per_node": "num_processes",
        "world_size": "num_processes",
        "nnodes": "num_machines",
        "node_rank": "machine_rank",
        "master_addr": "main_process_ip",
        "master_port": "main_process_port",
        "rdzv_endpoint": "main_process_ip",
    }
)
"""What other launchers call an option of ours."""


def is_internal(variable: str) -> bool:
    """Return whether our own processes set a variable for each other, or read it elsewhere."""
    return variable in INTERNAL_VARIABLES or variable.startswith(_INTERNAL_PREFIXES)


def missing_feature(name: str) -> Feature | None:
    """Return the missing feature that a name belongs to, or None.

    >>> missing_feature("zero_stage").title
    'DeepSpeed'
    >>> missing_feature("num_processes") is None
    True
    """
    if name in OPTIONS:
        return None
    return next((feature for feature in FEATURES if feature.claims(name)), None)


def not_available(what: str, feature: Feature) -> ConfigError:
    """Return the error for a feature that is missing; `what` is the flag, key or variable that asks for it."""
    return ConfigError(f"{what} asks for something that is not available in this version: {feature.title}.\n{feature.instead}")


def variable_names() -> list[str]:
    """Return every variable that a user may set."""
    return [option.variable for option in OPTIONS.values() if option.variable] + ["SLIPSTREAM_HOME"]


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that look like `name`, best first.

    >>> nearest("num_procs", ["num_processes", "num_machines", "cpu"])[0]
    'num_processes'
    """
    import difflib  # only here: names are right most of the time

    typed = _normalized(name)
    scores = {candidate: difflib.SequenceMatcher(None, typed, _normalized(candidate)).ratio() for candidate in known}
    best = max(scores.values(), default=0.0)
    close = [candidate for candidate, score in scores.items() if score >= max(0.6, best - 0.1)]
    if not close and len(typed) >= 3:
        close = [candidate for candidate in scores if typed in _normalized(candidate)]
    return sorted(close, key=lambda candidate: -scores[candidate])[:3]


def _normalized(name: str) -> str:
    """Return a name without case, dashes and underscores."""
    return re.sub("[-_ ]", "", name).lower()


def unknown_name(name: str, origin: Origin, also: Iterable[str] = ()) -> ConfigError:
    """Return the error for a name that is no option; `also` are further names that it may have meant."""
    bare = name.removeprefix("SLIPSTREAM_").lower() if origin.kind == "environment" else name
    place = _place(name, origin)
    feature = missing_feature(bare)
    if feature:
        return not_available(place, feature)
    if bare in OPTIONS and not OPTIONS[bare].in_file:
        return ConfigError(f"{place} cannot be used here: it belongs to one command line.\nWrite it as a flag: --{bare}")
    candidates = _candidates(origin.kind) | {other: other for other in also}
    near = [candidates[found] for found in ([_ELSEWHERE[bare]] if bare in _ELSEWHERE else nearest(bare, candidates))]
    hint = f"Did you mean {' or '.join(near)}?" if near else _where_listed(origin.kind)
    return ConfigError(f"{place} is not an option of Slipstream.\n{hint}")


def _place(name: str, origin: Origin) -> str:
    """Return the name and where it was given, as the start of a sentence."""
    if origin.kind == "file":
        path, _, _ = origin.where.rpartition(": ")
        return f"The key {shown(name)} (in {path})"
    if origin.kind == "constructor":
        return f"The argument {origin.where}"
    return shown(origin.where)


def _candidates(kind: Kind) -> dict[str, str]:
    """Return the names that a misspelt name is compared with, and how to write each in this kind of source."""
    options = OPTIONS.values()
    if kind == "environment":
        return {name.removeprefix("SLIPSTREAM_").lower(): name for name in variable_names()}
    if kind == "flag":
        return {flag.lstrip("-"): flag for option in options for flag in (flag_names(option)[0], *negative_flag_names(option)[:1])}
    return {option.name: option.name for option in options if option.in_file}


def _where_listed(kind: Kind) -> str:
    return {
        "flag": "`slipstream launch --help` lists the options.",
        "environment": "`slipstream launch --help` lists the options; a variable is SLIPSTREAM_ and the option's name in capitals.",
    }.get(kind, "`slipstream launch --help` lists the options; take the key out.")


def unknown_flag(flag: str) -> ConfigError:
    """Return the error for a flag as the user typed it, with its dashes and without its value.

    >>> print(unknown_flag("--num-procs"))
    --num-procs is not an option of Slipstream.
    Did you mean --num_processes?
    >>> print(str(unknown_flag("--use-deepspeed")).splitlines()[0])
    --use-deepspeed asks for something that is not available in this version: DeepSpeed.
    """
    typed = flag.partition("=")[0]
    return unknown_name(typed.lstrip("-").replace("-", "_"), Origin("flag", typed))
