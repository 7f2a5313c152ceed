"""Read configuration files of `accelerate config`.

Keys with the same meaning become options. Keys that ask for a feature that is not available are errors. Keys that ask for nothing (null,
false, an empty block, a block whose `distributed_type` is not chosen) are returned with the reason, so that a command can print them:
nothing is dropped silently. Keys that neither tool knows are errors in `files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from slipstream.config.names import missing_feature, nearest, not_available
from slipstream.config.resolved_config import UnusedKey
from slipstream.errors import ConfigError

__all__ = ["KEYS", "Entry", "recognise", "translate"]

Entry = tuple[str, Any, str]
"""The key of an option, what it was given, and the key as the file has it."""

_BLOCKS: Final = ("deepspeed_config", "megatron_lm_config", "mpirun_config")
_TPU_KEYS: Final = ("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env")
_SINGLE_KEYS: Final = (*_TPU_KEYS, "command_file", "commands", "enable_cpu_affinity", "main_training_function")
_OPTION_BLOCKS: Final = ("dynamo_config", "fp8_config", "fsdp_config", "parallelism_config")
KEYS: Final = ("compute_environment", "distributed_type", "use_cpu", *_OPTION_BLOCKS, *_BLOCKS, *_SINGLE_KEYS)
"""Keys that only files of `accelerate config` have."""

_ENGINES: Final = {"DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
_BLOCK_NEEDS: Final = {block: ("distributed_type", kind) for kind, block in _ENGINES.items()}
_MESH_DETAILS: Final = (
    "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
    "sp_attn_implementation",
)
"""Keys of the mesh that say how an axis works; the axis has the size 1 here, or the file is refused."""
_FP8_OPTIONS: Final = {"backend": "fp8_backend", "pad_inner_dim": "fp8_pad_inner_dim"}
_FP8_OTHERS: Final = {
    "enable_fsdp_float8_all_gather": "sharded weights are gathered in the format of mixed_precision, not in float8",
    **dict.fromkeys(
        (
            *("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_length", "amax_history_len"),
            *("amax_compute_algorithm", "amax_compute_algo", "override_linear_precision", "use_mxfp8_block_scaling"),
        ),
        "belongs to the recipe of TransformerEngine; fp8 runs through torchao",
    ),
    **dict.fromkeys(("optimization_level", "opt_level"), "belongs to the recipe of MS-AMP; fp8 runs through torchao"),
}
_COMPUTE: Final = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")


def recognise(data: Mapping[str, Any]) -> bool:
    """Return whether a mapping looks like a file of `accelerate config`: it has one of its keys, and no version of ours."""
    return "version" not in data and any(key in KEYS for key in data)


def translate(data: Mapping[str, Any], path: str) -> tuple[list[Entry], list[UnusedKey]]:
    """Return the entries that are options, and the keys that have no effect here."""
    _check_compute_environment(data, path)
    entries, unused = _distributed_type(data, path)
    for key, raw in data.items():
        if key in ("compute_environment", "distributed_type"):
            continue
        if key in _OPTION_BLOCKS:
            chosen, others = _READERS[key](raw, data, path)
            entries, unused = entries + chosen, unused + others
        elif key in _BLOCKS or key in _SINGLE_KEYS:
            unused.append(UnusedKey(key, _why_unused(key, raw, data, path)))
        elif key == "num_processes" and raw == -1:
            unused.append(UnusedKey(key, "-1 leaves the number to the command line"))
        elif not (key == "use_cpu" and any(name == "cpu" for name, _, _ in entries)):
            entries.append((key, raw, key))
    return entries, unused


def _check_compute_environment(data: Mapping[str, Any], path: str) -> None:
    given = _as_word(data.get("compute_environment", "LOCAL_MACHINE"))
    if given == "AMAZON_SAGEMAKER":
        raise _unavailable(f"compute_environment: {given}", "sagemaker_job", path)
    if given not in _COMPUTE:
        near = nearest(given, _COMPUTE)
        raise ConfigError(
            f"compute_environment={given} (from {path}: compute_environment) is not known.\nWrite {near[0] if near else 'LOCAL_MACHINE'}."
        )


def _distributed_type(data: Mapping[str, Any], path: str) -> tuple[list[Entry], list[UnusedKey]]:
    """Return the options behind `distributed_type`, which mixes hardware, engine and "distributed or not"."""
    raw = data.get("distributed_type")
    if raw is None:
        return [], []
    kind = _as_word(raw)
    on_cpu = _as_bool(data.get("use_cpu"))
    if kind == "FSDP":
        return [("use_fsdp", True, "distributed_type")], []
    if kind in _ENGINES:
        raise _unavailable(f"distributed_type: {kind}", _ENGINES[kind], path)
    if kind == "NO":
        _check_one_process(data, path)
        return [], []
    if kind == "MULTI_CPU":
        if on_cpu is False:
            raise _contradiction_error(
                path, "distributed_type: MULTI_CPU", "use_cpu: false", "Write use_cpu: true, or another distributed_type."
            )
        return [("cpu", True, "distributed_type")], []
    if kind.startswith("MULTI_"):
        if on_cpu:
            raise _contradiction_error(
                path, f"distributed_type: {kind}", "use_cpu: true", "Write use_cpu: false, or distributed_type: MULTI_CPU."
            )
        return [], [
            UnusedKey("distributed_type", f"{kind}: num_processes says how many start, and they take the accelerators that are here")
        ]
    raise ConfigError(
        f"distributed_type={kind} (from {path}: distributed_type) is not available in this version.\n"
        "Write one of NO, MULTI_CPU, MULTI_GPU, FSDP, or leave the key out."
    )


def _check_one_process(data: Mapping[str, Any], path: str) -> None:
    for key in ("num_processes", "num_machines"):
        number = data.get(key)
        if isinstance(number, int) and number > 1:
            advice = f"Write distributed_type: MULTI_GPU (or MULTI_CPU), or {key}: 1."
            raise _contradiction_error(path, "distributed_type: NO", f"{key}: {number}", advice)


def _nested_options(block: str, raw: Any, path: str) -> list[Entry]:
    if raw is None:
        return []
    if not isinstance(raw, dict):
        raise ConfigError(f"The key {block} (in {path}) holds no keys of its own.\nWrite them below it, indented, or leave it out.")
    return [(str(key), value, f"{block}.{key}") for key, value in raw.items()]


def _dynamo(raw: Any, data: Mapping[str, Any], path: str) -> tuple[list[Entry], list[UnusedKey]]:
    return _nested_options("dynamo_config", raw, path), []


def _fsdp(raw: Any, data: Mapping[str, Any], path: str) -> tuple[list[Entry], list[UnusedKey]]:
    """Return the block of sharding: every key is an option; a list of classes becomes the text of the option."""
    if _as_word(data.get("distributed_type")) != "FSDP":
        return [], [UnusedKey("fsdp_config", "asks for nothing" if _asks_nothing(raw) else "distributed_type is not FSDP")]
    nested = _nested_options("fsdp_config", raw, path)
    return [(key, ",".join(map(str, value)) if isinstance(value, list) else value, shown) for key, value, shown in nested], []


def _mesh(raw: Any, data: Mapping[str, Any], path: str) -> tuple[list[Entry], list[UnusedKey]]:
    """Return the block of the mesh: sizes are options, and details of axes that have the size 1 have no effect."""
    if _asks_nothing(raw):
        return [], [UnusedKey("parallelism_config", "asks for nothing")]
    nested = _nested_options("parallelism_config", raw, path)
    details = {f"parallelism_config_{name}": name[:2] for name in _MESH_DETAILS}
    unused = [UnusedKey(shown, f"the mesh has no {details[key]} axis") for key, _, shown in nested if key in details]
    return [entry for entry in nested if entry[0] not in details], unused


def _fp8(raw: Any, data: Mapping[str, Any], path: str) -> tuple[list[Entry], list[UnusedKey]]:
    """Return the fp8 block: keys of torchao are options, keys of other engines have no effect."""
    if _asks_nothing(raw):
        return [], [UnusedKey("fp8_config", "asks for nothing")]
    if _as_word(data.get("mixed_precision", "NO")) != "FP8":
        return [], [UnusedKey("fp8_config", "mixed_precision is not FP8")]
    nested = _nested_options("fp8_config", raw, path)
    unused = [UnusedKey(shown, _FP8_OTHERS[key]) for key, _, shown in nested if key in _FP8_OTHERS]
    return [(_FP8_OPTIONS.get(key, key), value, shown) for key, value, shown in nested if key not in _FP8_OTHERS], unused


_READERS: Final = {"dynamo_config": _dynamo, "fp8_config": _fp8, "fsdp_config": _fsdp, "parallelism_config": _mesh}


def _why_unused(key: str, raw: Any, data: Mapping[str, Any], path: str) -> str:
    """Return why a key has no effect here; raise if it asks for something that is not available."""
    if _asks_nothing(raw):
        return "asks for nothing"
    if key == "main_training_function":
        return "scripts are started whole; no function is picked"
    other, needed = _BLOCK_NEEDS.get(key, ("", ""))
    if other and _as_word(data.get(other, "NO")) != needed:
        return f"{other} is not {needed}"
    raise _unavailable(key, key, path)


def _asks_nothing(raw: Any) -> bool:
    if isinstance(raw, dict):
        return all(_asks_nothing(value) for value in raw.values())
    return raw is None or raw is False or raw == [] or (isinstance(raw, str) and raw.strip().lower() in ("", "no", "false"))


def _unavailable(what: str, name: str, path: str) -> ConfigError:
    feature = missing_feature(name)
    assert feature is not None, f"{name} is not listed in FEATURES"
    return not_available(f"{what} (in {path})", feature)


def _contradiction_error(path: str, text: str, other: str, advice: str) -> ConfigError:
    return ConfigError(f"{text} contradicts {other} (both from {path}).\n{advice}")


def _as_word(raw: Any) -> str:
    """Return a value as a word in capitals; YAML reads a bare NO as false."""
    return "NO" if raw is False or raw is None else str(raw).strip().upper()


def _as_bool(raw: Any) -> bool | None:
    words: Iterable[tuple[bool, tuple[str, ...]]] = ((True, ("true", "yes", "1")), (False, ("false", "no", "0")))
    return next((value for value, spellings in words if str(raw).strip().lower() in spellings), None)
