"""Names of `accelerate.hooks`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "PartialState",
        "accelerate.utils.imports": "is_mlu_available is_musa_available is_npu_available",
        "accelerate.utils.memory": "clear_device_cache",
        "accelerate.utils.modeling": "get_non_persistent_buffers named_module_tensors set_module_tensor_to_device",
        "accelerate.utils.offload": "PrefixedDataset",
        "accelerate.utils.operations": "find_device send_to_device",
        "accelerate.utils.other": "recursive_getattr",
        "slipstream.hooks": """AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook
            add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks
            attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules""",
    },
    unlisted={"accelerate.big_modeling": "attach_layerwise_casting_hooks"},
)
