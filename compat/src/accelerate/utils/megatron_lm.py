"""Names of `accelerate.utils.megatron_lm`: Megatron-LM is not an engine of Slipstream, and using one of them says so."""

from __future__ import annotations

from accelerate._forwarding import forward_names
from accelerate._unsupported import placeholders

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.utils.imports": "is_megatron_lm_available",
        "accelerate.utils.operations": "recursively_apply send_to_device",
    },
)
_placeholders = placeholders(
    __name__,
    "megatron",
    classes="""AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
        MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep""",
    functions="""avg_losses_across_data_parallel_group finish_mpu_init gather_across_data_parallel_groups initialize model_provider_func
        prepare_data_loader prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler""",
)
globals().update(_placeholders)
__all__ = sorted([*_placeholders, *_forwarded])
