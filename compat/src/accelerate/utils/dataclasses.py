"""Names of `accelerate.utils.dataclasses`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.environment": "parse_flag_from_env str_to_bool",
        "accelerate.utils.imports": """is_cuda_available is_hpu_available is_mlu_available is_msamp_available is_musa_available
            is_neuron_available is_npu_available is_rocm_available is_torchao_available
            is_transformer_engine_available is_xpu_available""",
        "accelerate.utils.versions": "compare_versions is_torch_version",
        "slipstream": """AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration
            DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin
            GradScalerKwargs InitProcessGroupKwargs ProfileKwargs""",
        "slipstream.utils": """AORecipeKwargs BnbQuantizationConfig CustomDtype DynamoBackend FP8BackendType
            FP8RecipeKwargs GradientAccumulationPlugin KwargsHandler LoggerType MSAMPRecipeKwargs
            PrecisionType ProjectConfiguration RNGType TERecipeKwargs TensorInformation
            TorchDynamoPlugin get_module_class_from_name""",
    },
)
