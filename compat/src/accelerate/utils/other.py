"""Small helpers: saving, compiling by region, unwrapping models, dictionaries, ports."""

from __future__ import annotations

from typing import Any

import torch

from accelerate._forwarding import forward_names

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate._object_files": "load save",
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.constants": "FSDP_PYTORCH_VERSION",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": """is_deepspeed_available is_numpy_available is_torch_distributed_available
            is_torch_xla_available is_weights_only_available""",
        "accelerate.utils.modeling": "id_tensor_storage",
        "accelerate.utils.transformer_engine": "convert_model",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_fsdp2
            convert_bytes extract_model_from_parallel get_free_port get_model_tp_size
            get_module_children_bottom_up get_pretty_name has_compiled_regions has_repeated_blocks
            is_compiled_module is_port_in_use is_repeated_blocks merge_dicts model_has_dtensor
            recursive_getattr wait_for_everyone""",
    },
)
__all__ = sorted(["TORCH_SAFE_GLOBALS", "compile_regions_deepspeed", *_forwarded])

TORCH_SAFE_GLOBALS: list[Any] = []
"""Further classes that `load` may rebuild from a pickle; Slipstream's own list is fixed, and this one is empty."""


def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of a module in place, as `compile_regions` does; there is no DeepSpeed engine to spare."""
    from slipstream.utils import compile_regions

    compile_regions(module, **compile_kwargs)
