"""Options that are objects: enumerations, handlers for `kwargs_handlers`, and plugins.

Most are Slipstream's classes under Accelerate's path. A class stands here where its defaults or its environment variables are those of
Accelerate (it is then a subclass of Slipstream's, so that both Accelerators take it), or where it belongs to an engine that is not
supported, and raises when an object of it is made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from accelerate._enumerations import ComputeEnvironment, SageMakerDistributedType
from accelerate._forwarding import forward_names
from accelerate._unsupported import placeholder_class, placeholder_function, raise_unsupported
from slipstream.config.handlers import InitProcessGroupKwargs as _InitProcessGroupKwargs
from slipstream.config.sources import parse_flag_from_env, str_to_bool
from slipstream.data.options import DataLoaderConfiguration as _DataLoaderConfiguration
from slipstream.errors import ConfigError
from slipstream.parallel.compile import DynamoBackend, TorchDynamoPlugin as _TorchDynamoPlugin
from slipstream.strategies.ddp_options import DistributedDataParallelKwargs as _DistributedDataParallelKwargs
from slipstream.strategies.fsdp_options import FullyShardedDataParallelPlugin as _FullyShardedDataParallelPlugin

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.constants": """BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
            BETA_TP_AVAILABLE_TRANSFORMERS_VERSION FSDP2_PYTORCH_VERSION FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH
            FSDP_SHARDING_STRATEGY MITA_PROFILING_AVAILABLE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION""",
        "accelerate.utils.imports": """is_cuda_available is_hpu_available is_mlu_available is_msamp_available is_musa_available
            is_neuron_available is_npu_available is_rocm_available is_torchao_available
            is_transformer_engine_available is_xpu_available""",
        "accelerate.utils.versions": "compare_versions is_torch_version",
        "slipstream": "AutocastKwargs DDPCommunicationHookType DistributedType GradScalerKwargs ProfileKwargs",
        "slipstream.utils": """AORecipeKwargs BnbQuantizationConfig CustomDtype FP8BackendType
            FP8RecipeKwargs GradientAccumulationPlugin KwargsHandler LoggerType MSAMPRecipeKwargs
            PrecisionType ProjectConfiguration RNGType TERecipeKwargs TensorInformation
            get_module_class_from_name""",
    },
)

# -- enumerations -----------------------------------------------------------------------------------------------------


class EnumWithContains(type(Enum)):  # type: ignore[misc]
    """A metaclass whose enumerations answer `"value" in Kind`."""

    def __contains__(cls, item: Any) -> bool:
        return any(item is member or item == member.value for member in cls)


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration that prints as its value and can list its values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values."""
        return [str(member.value) for member in cls]


# -- handlers and options with the defaults of Accelerate ---------------------------------------------------------------


@dataclass
class InitProcessGroupKwargs(_InitProcessGroupKwargs):
    """How the process group is opened. The default "nccl" leaves the choice to the device, as it does in Accelerate."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class DataLoaderConfiguration(_DataLoaderConfiguration):
    """How loaders are shared between processes, with the defaults of Accelerate: a short last batch is filled from the start.

    `resume` is Slipstream's; "manual" is the default, because scripts written for Accelerate skip batches themselves.
    """

    even_batches: bool = True
    use_seedable_sampler: bool = False  # type: ignore[assignment]
    resume: str = "manual"

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader and self.resume == "manual":
            self.resume = "auto"
        super().__post_init__()


@dataclass
class DistributedDataParallelKwargs(_DistributedDataParallelKwargs):
    """Options of torch's DistributedDataParallel. What torch ignores is warned about, and not refused."""

    def __post_init__(self) -> None:
        ignored = {name: getattr(self, name) for name in ("dim", "check_reduction") if getattr(self, name)}
        if ignored:
            import warnings

            given = ", ".join(f"{name}={value}" for name, value in ignored.items())
            warnings.warn(f"DistributedDataParallelKwargs({given}) has no effect: torch ignores it", stacklevel=3)
        self.dim, self.check_reduction = 0, False
        super().__post_init__()


_DYNAMO = "ACCELERATE_DYNAMO_"


@dataclass
class TorchDynamoPlugin(_TorchDynamoPlugin):
    """How `prepare` compiles models. A field that is None is read from ACCELERATE_DYNAMO_*.

    >>> TorchDynamoPlugin(backend="eager").to_kwargs()
    {'backend': 'eager', 'mode': 'default'}
    """

    def __post_init__(self) -> None:
        if self.backend is None:
            self.backend = os.environ.get(_DYNAMO + "BACKEND", "no")
        _check_backend_name(self.backend)
        if self.mode is None and self.options is None:
            self.mode = os.environ.get(_DYNAMO + "MODE", "default")
        for name, variable in (("fullgraph", "USE_FULLGRAPH"), ("use_regional_compilation", "USE_REGIONAL_COMPILATION")):
            if getattr(self, name) is None:
                setattr(self, name, parse_flag_from_env(_DYNAMO + variable))
        dynamic = os.environ.get(_DYNAMO + "USE_DYNAMIC")
        if self.dynamic is None and dynamic is not None:
            self.dynamic = bool(str_to_bool(dynamic))
        super().__post_init__()


def _check_backend_name(backend: Any) -> None:
    if not isinstance(backend, str) or backend.upper() in DynamoBackend:
        return
    import torch._dynamo

    if backend not in (known := torch._dynamo.list_backends(exclude_tags=None)):
        raise ConfigError(f"TorchDynamoPlugin(backend={backend!r}): there is no such backend; write one of {', '.join(['no', *known])}")


_FSDP_VARIABLES = {
    "fsdp_version": "FSDP_VERSION",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "ignored_modules": "FSDP_IGNORED_MODULES",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
}
_FSDP_UNASKED = {"min_num_params": 100_000_000}
"""What `accelerate launch` writes for options that nobody gave, and that a warning must not blame on the user."""
_FSDP_FLAGS = (
    "cpu_offload", "use_orig_params", "sync_module_states", "forward_prefetch", "activation_checkpointing",
    "activation_checkpointing_offload", "cpu_ram_efficient_loading",
)  # fmt: skip


@dataclass
class FullyShardedDataParallelPlugin(_FullyShardedDataParallelPlugin):
    """Shard models over the processes. A field that is None is read from FSDP_* variables; options of version 1 become those of 2."""

    def __post_init__(self) -> None:
        unasked = {}
        for name, variable in _FSDP_VARIABLES.items():
            text = os.environ.get(variable)
            if getattr(self, name) is not None or text in (None, ""):
                continue
            value = _read_fsdp_option(name, str(text))
            if value == _FSDP_UNASKED.get(name):
                unasked[name] = value
            else:
                setattr(self, name, value)
        super().__post_init__()
        for name, value in unasked.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Make the policy of "bf16", "fp16" or a dtype; one that is there is kept without `override`."""
        if buffer_autocast:
            import warnings

            warnings.warn("set_mixed_precision(buffer_autocast=True) has no effect: sharded models keep their buffers", stacklevel=2)
        super().set_mixed_precision(mixed_precision, override=override)


def _read_fsdp_option(name: str, text: str) -> Any:
    if name in _FSDP_FLAGS:
        return bool(str_to_bool(text))
    if name in ("fsdp_version", "min_num_params"):
        return int(text)
    if name == "transformer_cls_names_to_wrap":
        return [part.strip() for part in text.split(",") if part.strip()]
    if name == "reshard_after_forward" and text.lower() in ("true", "false"):
        return bool(str_to_bool(text))
    return text.lower() if name == "auto_wrap_policy" else text


# -- mesh axes: they can be described, and are refused where an Accelerator would have to use them ---------------------------------


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism for `ParallelismConfig(tp_handler=...)`."""

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise_unsupported("TorchTensorParallelConfig(enable_async_tp=True)", "tensor_parallel")


@dataclass
class TorchTensorParallelPlugin:
    """The older way to ask for tensor parallelism. Size 1 asks for nothing; any other is refused."""

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ConfigError(f"TorchTensorParallelPlugin(tp_size={self.tp_size!r}): write a whole number from 1")
        if self.tp_size > 1 or self.torch_device_mesh is not None:
            raise_unsupported(f"TorchTensorParallelPlugin(tp_size={self.tp_size})", "tensor_parallel")


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism for `ParallelismConfig(cp_handler=...)`: how keys and values travel."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ConfigError(f"Invalid cp_comm_strategy: {self.cp_comm_strategy}; write 'allgather' or 'alltoall'")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism for `ParallelismConfig(sp_handler=...)`."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        prefix = "PARALLELISM_CONFIG_SP_"
        if self.sp_seq_length is None and prefix + "SEQ_LENGTH" in os.environ:
            self.sp_seq_length = int(os.environ[prefix + "SEQ_LENGTH"])
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = parse_flag_from_env(prefix + "SEQ_LENGTH_IS_VARIABLE", True)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError("DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False) needs sp_seq_length")
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = os.environ.get(prefix + "ATTN_IMPLEMENTATION")
        known = ("flash_attention_2", "flash_attention_3", "sdpa")
        if self.sp_attn_implementation is not None and self.sp_attn_implementation not in known:
            raise ConfigError(f"Invalid sp_attn_implementation: {self.sp_attn_implementation}; write one of {', '.join(known)}")


# -- engines that are not supported -----------------------------------------------------------------------------------

DeepSpeedPlugin = placeholder_class("DeepSpeedPlugin", "deepspeed", __name__)
MegatronLMPlugin = placeholder_class("MegatronLMPlugin", "megatron", __name__)
add_model_config_to_megatron_parser = placeholder_function("add_model_config_to_megatron_parser", "megatron", __name__)
parse_bert_config = placeholder_function("parse_bert_config", "megatron", __name__)
parse_gpt2_config = placeholder_function("parse_gpt2_config", "megatron", __name__)
parse_t5_config = placeholder_function("parse_t5_config", "megatron", __name__)
parse_llama_config = placeholder_function("parse_llama_config", "megatron", __name__)
parse_glm4_moe_config = placeholder_function("parse_glm4_moe_config", "megatron", __name__)
MODEL_CONFIGS_TO_MEGATRON_PARSERS = {
    "megatron-bert": parse_bert_config, "gpt2": parse_gpt2_config, "t5": parse_t5_config, "llama": parse_llama_config,
    "glm4_moe": parse_glm4_moe_config,
}  # fmt: skip

__all__ = [
    "BaseEnum", "ComputeEnvironment", "DataLoaderConfiguration", "DeepSpeedPlugin", "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs", "DynamoBackend", "EnumWithContains", "FullyShardedDataParallelPlugin", "InitProcessGroupKwargs",
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS", "MegatronLMPlugin",
    "SageMakerDistributedType", "TorchContextParallelConfig", "TorchDynamoPlugin", "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin", "add_model_config_to_megatron_parser", "parse_bert_config", "parse_flag_from_env",
    "parse_glm4_moe_config", "parse_gpt2_config", "parse_llama_config", "parse_t5_config", "str_to_bool", *_forwarded,
]  # fmt: skip
