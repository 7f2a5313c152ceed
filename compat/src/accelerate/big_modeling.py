"""Names of `accelerate.big_modeling`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.hooks": """AlignDevicesHook CpuOffload LayerwiseCastingHook UserCpuOffloadHook add_hook_to_module
            attach_align_device_hook attach_align_device_hook_on_blocks""",
        "accelerate.utils.environment": "check_cuda_p2p_ib_support parse_flag_from_env",
        "accelerate.utils.imports": """is_bnb_available is_mlu_available is_musa_available is_neuron_available is_npu_available
            is_sdaa_available is_xpu_available""",
        "accelerate.utils.modeling": """check_device_map find_tied_parameters get_balanced_memory infer_auto_device_map
            load_checkpoint_in_model retie_parameters""",
        "accelerate.utils.offload": "OffloadedWeightsLoader extract_submodules_state_dict offload_state_dict",
        "accelerate.utils.other": "recursive_getattr",
        "slipstream": """cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights
            init_on_device load_checkpoint_and_dispatch""",
        "slipstream.hooks": "attach_layerwise_casting_hooks",
    },
)
