"""Names of `accelerate.utils.environment`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "slipstream": "clear_environment get_int_from_env parse_flag_from_env patch_environment str_to_bool",
        "slipstream.utils": "parse_choice_from_env",
    },
)
