"""Names of `accelerate.inference`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "PartialState",
        "accelerate.utils.imports": "is_pippy_available",
        "accelerate.utils.modeling": "calculate_maximum_sizes infer_auto_device_map",
        "accelerate.utils.operations": "copy_tensor_to_devices ignorant_find_batch_size pad_input_tensors send_to_device",
        "accelerate.utils.other": "convert_bytes",
        "slipstream": "prepare_pippy",
        "slipstream.inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    },
)
