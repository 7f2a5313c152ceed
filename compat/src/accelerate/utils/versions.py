"""Names of `accelerate.utils.versions`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "slipstream.utils": "compare_versions is_torch_version",
    },
)
