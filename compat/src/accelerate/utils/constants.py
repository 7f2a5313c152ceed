"""Names of `accelerate.utils.constants`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "slipstream.utils": """MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME
            SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME
            SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME""",
    },
)
