"""Names of `accelerate.checkpointing`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.imports": """is_cuda_available is_hpu_available is_mlu_available is_musa_available is_neuron_available
            is_sdaa_available is_torch_xla_available is_xpu_available""",
        "accelerate.utils.other": "get_pretty_name load save",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME
            SCALER_NAME SCHEDULER_NAME WEIGHTS_NAME""",
    },
)
