"""Names of `accelerate.commands.config.default`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "ClusterConfig",
        "accelerate.commands.config.config_utils": "SubcommandHelpFormatter",
        "accelerate.utils.imports": """is_hpu_available is_mlu_available is_musa_available is_neuron_available is_npu_available
            is_sdaa_available is_xpu_available""",
        "slipstream.utils": "write_basic_config",
    },
)
