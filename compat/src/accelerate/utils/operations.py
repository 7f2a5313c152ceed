"""Names of `accelerate.utils.operations`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils.dataclasses": "DistributedType TensorInformation",
        "accelerate.utils.imports": "is_npu_available is_torch_distributed_available is_torch_xla_available",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream": "DistributedOperationException",
        "slipstream.utils": """CannotPadNestedTensorWarning ConvertOutputsToFp32 broadcast broadcast_object_list
            concatenate convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size
            find_device gather gather_object gather_tensor_shape get_data_structure get_shape honor_type
            ignorant_find_batch_size initialize_tensors is_namedtuple is_tensor_information
            is_torch_tensor listify pad_across_processes pad_input_tensors recursively_apply reduce
            send_to_device slice_tensors""",
    },
)
