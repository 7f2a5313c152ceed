"""Names of `accelerate.utils.memory`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.imports": """is_cuda_available is_hpu_available is_mlu_available is_mps_available is_musa_available
            is_neuron_available is_npu_available is_sdaa_available is_xpu_available""",
        "slipstream": "find_executable_batch_size",
        "slipstream.utils": "clear_device_cache release_memory should_reduce_batch_size",
    },
)
