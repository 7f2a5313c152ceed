"""Names of `accelerate.commands.launch`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "SageMakerConfig load_config_from_file",
        "accelerate.commands.utils": "CustomArgumentParser",
        "accelerate.utils.dataclasses": "ComputeEnvironment DistributedType",
        "accelerate.utils.environment": """check_cuda_p2p_ib_support convert_dict_to_env_variables get_int_from_env patch_environment
            str_to_bool""",
        "accelerate.utils.imports": """is_bf16_available is_deepspeed_available is_hpu_available is_mlu_available is_musa_available
            is_neuron_available is_npu_available is_rich_available is_sagemaker_available
            is_sdaa_available is_torch_xla_available is_xpu_available""",
        "accelerate.utils.launch": """PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env
            prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu""",
    },
)
