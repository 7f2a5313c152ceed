"""Names of `accelerate.scheduler`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState GradientState",
        "slipstream.training.scheduler": "AcceleratedScheduler",
    },
)
