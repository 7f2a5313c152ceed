"""Names of `accelerate.utils.ao`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.imports": "is_torchao_available torchao_required",
        "slipstream.precision.fp8": "filter_linear_layers find_first_last_linear_layers",
        "slipstream.utils": "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers",
    },
)
