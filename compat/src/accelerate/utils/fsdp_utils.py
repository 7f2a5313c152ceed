"""Names of `accelerate.utils.fsdp_utils`: checkpoints of sharded models, and the single steps of sharding one."""

from __future__ import annotations

import os

from accelerate._forwarding import forward_names

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate._fsdp_checkpoints": "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer",
        "accelerate.logging": "get_logger",
        "accelerate.utils.dataclasses": "get_module_class_from_name",
        "accelerate.utils.modeling": "get_non_persistent_buffers is_peft_model",
        "accelerate.utils.other": "get_module_children_bottom_up is_compiled_module save",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME ensure_weights_retied fsdp2_apply_ac
            fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy
            fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
            get_parameters_from_modules merge_fsdp_weights""",
    },
)
__all__ = sorted([*_forwarded, "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading"])


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that make transformers load weights on the main process only, with the words of Accelerate."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Set the variable that makes transformers load weights on every process."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"
