"""`Accelerator`: the class of Slipstream with the constructor, attributes and deliberate behaviour of Accelerate's."""

from __future__ import annotations

from accelerate._accelerator_checkpoints import CheckpointsMixin
from accelerate._accelerator_data import DataMixin
from accelerate._accelerator_trackers import TrackersMixin
from accelerate._forwarding import forward_names
from slipstream.accelerator import Accelerator as _Accelerator


class Accelerator(CheckpointsMixin, DataMixin, TrackersMixin, _Accelerator):
    """Prepare and run a training loop on one or many processes, as scripts written for Accelerate expect it."""


_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.checkpointing": "load_accelerator_state load_custom_state save_accelerator_state save_custom_state",
        "accelerate.data_loader": "DataLoaderDispatcher prepare_data_loader skip_first_batches",
        "accelerate.logging": "get_logger",
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.state": "AcceleratorState GradientState PartialState",
        "accelerate.tracking": "GeneralTracker filter_trackers",
        "accelerate.utils.ao": "convert_model_to_fp8_ao",
        "accelerate.utils.dataclasses": """AORecipeKwargs AutocastKwargs DataLoaderConfiguration DeepSpeedPlugin
            DistributedDataParallelKwargs DistributedType DynamoBackend FP8BackendType FP8RecipeKwargs
            FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType MSAMPRecipeKwargs MegatronLMPlugin
            PrecisionType ProfileKwargs ProjectConfiguration RNGType TERecipeKwargs TorchDynamoPlugin
            TorchTensorParallelPlugin""",
        "accelerate.utils.environment": "parse_choice_from_env",
        "accelerate.utils.fsdp_utils": """ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer
            save_fsdp_model save_fsdp_optimizer""",
        "accelerate.utils.imports": """is_bf16_available is_bitsandbytes_multi_backend_available is_deepspeed_available
            is_lomo_available is_megatron_lm_available is_mlu_available is_msamp_available
            is_musa_available is_npu_available is_torch_xla_available is_torchao_available
            is_transformer_engine_available is_xpu_available""",
        "accelerate.utils.memory": "release_memory",
        "accelerate.utils.modeling": """get_grad_scaler get_mixed_precision_context_manager get_state_dict_offloaded_model
            has_offloaded_params""",
        "accelerate.utils.operations": "convert_outputs_to_fp32 gather gather_object pad_across_processes recursively_apply reduce",
        "accelerate.utils.other": """check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
            compile_regions_fsdp2 extract_model_from_parallel get_model_tp_size get_pretty_name
            is_compiled_module model_has_dtensor save wait_for_everyone""",
        "accelerate.utils.transformer_engine": "apply_fp8_autowrap convert_model",
        "accelerate.utils.versions": "compare_versions is_torch_version",
        "slipstream.utils": """MODEL_NAME PROFILE_PATTERN_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME
            SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME""",
    },
)

__all__ = ["Accelerator", *_forwarded]
