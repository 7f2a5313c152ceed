"""Names of `accelerate.commands.env`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "load_config_from_file",
        "accelerate.utils.imports": """is_mlu_available is_mps_available is_musa_available is_neuron_available is_npu_available
            is_sdaa_available is_xpu_available""",
    },
)
