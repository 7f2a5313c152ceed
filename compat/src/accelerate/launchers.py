"""Names of `accelerate.launchers`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils.dataclasses": "PrecisionType",
        "accelerate.utils.environment": """are_libraries_initialized check_cuda_p2p_ib_support get_current_device_type get_gpu_info
            patch_environment""",
        "accelerate.utils.imports": "is_mps_available is_rocm_available",
        "accelerate.utils.launch": "PrepareForLaunch",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream": "debug_launcher notebook_launcher",
    },
)
