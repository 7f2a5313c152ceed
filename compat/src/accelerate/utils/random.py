"""Names of `accelerate.utils.random`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils.dataclasses": "DistributedType RNGType",
        "slipstream": "synchronize_rng_states",
        "slipstream.utils": "set_seed synchronize_rng_state",
    },
)
