"""Names of `accelerate.utils.offload`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "slipstream.utils": """OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
            offload_state_dict offload_weight save_offload_index""",
    },
)
