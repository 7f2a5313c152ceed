"""Names of `accelerate.utils.random`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils.constants": "CUDA_DISTRIBUTED_TYPES",
        "accelerate.utils.dataclasses": "DistributedType RNGType",
        "accelerate.utils.imports": """is_hpu_available is_mlu_available is_musa_available is_neuron_available is_npu_available
            is_sdaa_available is_torch_xla_available is_xpu_available""",
        "slipstream": "synchronize_rng_states",
        "slipstream.utils": "set_seed synchronize_rng_state",
    },
)
