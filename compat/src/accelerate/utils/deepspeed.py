"""Names of `accelerate.utils.deepspeed`: DeepSpeed is not an engine of this version of Slipstream, and using one of them says so.

`accelerate.utils` exports them only where the package deepspeed is installed, because clients take the names for a sign of that.
"""

from __future__ import annotations

from typing import Any

from accelerate._forwarding import forward_names
from accelerate._unsupported import placeholders

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": "is_bnb_available",
        "accelerate.utils.versions": "compare_versions",
    },
)
_placeholders = placeholders(
    __name__,
    "deepspeed",
    classes="""DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler
        HfDeepSpeedConfig""",
    functions="map_pytorch_optim_to_deepspeed",
)
globals().update(_placeholders)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Raise: no state has a DeepSpeed plugin."""
    raise ValueError(f"{type(state).__name__} has no DeepSpeed plugin: DeepSpeed is not an engine of this version of Slipstream")


__all__ = sorted([*_placeholders, "get_active_deepspeed_plugin", *_forwarded])
