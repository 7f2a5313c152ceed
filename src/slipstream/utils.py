"""The flat namespace of helpers: `from slipstream.utils import set_seed, gather_object`.

Each name is found in its own room when it is first used; nothing is defined here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.comm.nested import (
        CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    )
    from slipstream.comm.nested import (
        ConvertOutputsToFp32 as ConvertOutputsToFp32,
    )
    from slipstream.comm.nested import (
        TensorInformation as TensorInformation,
    )
    from slipstream.comm.nested import (
        concatenate as concatenate,
    )
    from slipstream.comm.nested import (
        convert_outputs_to_fp32 as convert_outputs_to_fp32,
    )
    from slipstream.comm.nested import (
        convert_to_fp32 as convert_to_fp32,
    )
    from slipstream.comm.nested import (
        find_batch_size as find_batch_size,
    )
    from slipstream.comm.nested import (
        find_device as find_device,
    )
    from slipstream.comm.nested import (
        get_data_structure as get_data_structure,
    )
    from slipstream.comm.nested import (
        get_shape as get_shape,
    )
    from slipstream.comm.nested import (
        ignorant_find_batch_size as ignorant_find_batch_size,
    )
    from slipstream.comm.nested import (
        initialize_tensors as initialize_tensors,
    )
    from slipstream.comm.nested import (
        is_tensor_information as is_tensor_information,
    )
    from slipstream.comm.nested import (
        is_torch_tensor as is_torch_tensor,
    )
    from slipstream.comm.nested import (
        listify as listify,
    )
    from slipstream.comm.nested import (
        pad_input_tensors as pad_input_tensors,
    )
    from slipstream.comm.nested import (
        recursively_apply as recursively_apply,
    )
    from slipstream.comm.nested import (
        send_to_device as send_to_device,
    )
    from slipstream.comm.nested import (
        slice_tensors as slice_tensors,
    )
    from slipstream.comm.tree import (
        honor_type as honor_type,
    )
    from slipstream.comm.tree import (
        is_namedtuple as is_namedtuple,
    )
    from slipstream.config.write import (
        write_basic_config as write_basic_config,
    )
    from slipstream.devices.memory import (
        clear_device_cache as clear_device_cache,
    )
    from slipstream.devices.memory import (
        convert_bytes as convert_bytes,
    )
    from slipstream.devices.memory import (
        release_memory as release_memory,
    )
    from slipstream.devices.memory import (
        should_reduce_batch_size as should_reduce_batch_size,
    )
    from slipstream.devices.packages import (
        compare_versions as compare_versions,
    )
    from slipstream.devices.packages import (
        deepspeed_required as deepspeed_required,
    )
    from slipstream.devices.packages import (
        is_4bit_bnb_available as is_4bit_bnb_available,
    )
    from slipstream.devices.packages import (
        is_8bit_bnb_available as is_8bit_bnb_available,
    )
    from slipstream.devices.packages import (
        is_aim_available as is_aim_available,
    )
    from slipstream.devices.packages import (
        is_amdsmi_available as is_amdsmi_available,
    )
    from slipstream.devices.packages import (
        is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    )
    from slipstream.devices.packages import (
        is_bnb_available as is_bnb_available,
    )
    from slipstream.devices.packages import (
        is_boto3_available as is_boto3_available,
    )
    from slipstream.devices.packages import (
        is_clearml_available as is_clearml_available,
    )
    from slipstream.devices.packages import (
        is_comet_ml_available as is_comet_ml_available,
    )
    from slipstream.devices.packages import (
        is_datasets_available as is_datasets_available,
    )
    from slipstream.devices.packages import (
        is_deepspeed_available as is_deepspeed_available,
    )
    from slipstream.devices.packages import (
        is_dvclive_available as is_dvclive_available,
    )
    from slipstream.devices.packages import (
        is_fp8_available as is_fp8_available,
    )
    from slipstream.devices.packages import (
        is_import_timer_available as is_import_timer_available,
    )
    from slipstream.devices.packages import (
        is_lomo_available as is_lomo_available,
    )
    from slipstream.devices.packages import (
        is_matplotlib_available as is_matplotlib_available,
    )
    from slipstream.devices.packages import (
        is_megatron_lm_available as is_megatron_lm_available,
    )
    from slipstream.devices.packages import (
        is_mlflow_available as is_mlflow_available,
    )
    from slipstream.devices.packages import (
        is_msamp_available as is_msamp_available,
    )
    from slipstream.devices.packages import (
        is_numpy_available as is_numpy_available,
    )
    from slipstream.devices.packages import (
        is_pandas_available as is_pandas_available,
    )
    from slipstream.devices.packages import (
        is_peft_available as is_peft_available,
    )
    from slipstream.devices.packages import (
        is_pippy_available as is_pippy_available,
    )
    from slipstream.devices.packages import (
        is_pynvml_available as is_pynvml_available,
    )
    from slipstream.devices.packages import (
        is_pytest_available as is_pytest_available,
    )
    from slipstream.devices.packages import (
        is_rich_available as is_rich_available,
    )
    from slipstream.devices.packages import (
        is_sagemaker_available as is_sagemaker_available,
    )
    from slipstream.devices.packages import (
        is_schedulefree_available as is_schedulefree_available,
    )
    from slipstream.devices.packages import (
        is_swanlab_available as is_swanlab_available,
    )
    from slipstream.devices.packages import (
        is_tensorboard_available as is_tensorboard_available,
    )
    from slipstream.devices.packages import (
        is_timm_available as is_timm_available,
    )
    from slipstream.devices.packages import (
        is_torch_distributed_available as is_torch_distributed_available,
    )
    from slipstream.devices.packages import (
        is_torch_version as is_torch_version,
    )
    from slipstream.devices.packages import (
        is_torchao_available as is_torchao_available,
    )
    from slipstream.devices.packages import (
        is_torchdata_available as is_torchdata_available,
    )
    from slipstream.devices.packages import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from slipstream.devices.packages import (
        is_torchvision_available as is_torchvision_available,
    )
    from slipstream.devices.packages import (
        is_tqdm_available as is_tqdm_available,
    )
    from slipstream.devices.packages import (
        is_trackio_available as is_trackio_available,
    )
    from slipstream.devices.packages import (
        is_transformer_engine_available as is_transformer_engine_available,
    )
    from slipstream.devices.packages import (
        is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    )
    from slipstream.devices.packages import (
        is_transformers_available as is_transformers_available,
    )
    from slipstream.devices.packages import (
        is_triton_available as is_triton_available,
    )
    from slipstream.devices.packages import (
        is_wandb_available as is_wandb_available,
    )
    from slipstream.devices.packages import (
        is_weights_only_available as is_weights_only_available,
    )
    from slipstream.devices.packages import (
        torchao_required as torchao_required,
    )
    from slipstream.devices.table import (
        DistributedType as DistributedType,
    )
    from slipstream.devices.table import (
        RNGType as RNGType,
    )
    from slipstream.devices.table import (
        is_bf16_available as is_bf16_available,
    )
    from slipstream.devices.table import (
        is_cuda_available as is_cuda_available,
    )
    from slipstream.devices.table import (
        is_fp16_available as is_fp16_available,
    )
    from slipstream.devices.table import (
        is_habana_gaudi1 as is_habana_gaudi1,
    )
    from slipstream.devices.table import (
        is_hpu_available as is_hpu_available,
    )
    from slipstream.devices.table import (
        is_mlu_available as is_mlu_available,
    )
    from slipstream.devices.table import (
        is_mps_available as is_mps_available,
    )
    from slipstream.devices.table import (
        is_musa_available as is_musa_available,
    )
    from slipstream.devices.table import (
        is_neuron_available as is_neuron_available,
    )
    from slipstream.devices.table import (
        is_npu_available as is_npu_available,
    )
    from slipstream.devices.table import (
        is_rocm_available as is_rocm_available,
    )
    from slipstream.devices.table import (
        is_sdaa_available as is_sdaa_available,
    )
    from slipstream.devices.table import (
        is_torch_xla_available as is_torch_xla_available,
    )
    from slipstream.devices.table import (
        is_xccl_available as is_xccl_available,
    )
    from slipstream.devices.table import (
        is_xpu_available as is_xpu_available,
    )
    from slipstream.errors import (
        DistributedOperationException as DistributedOperationException,
    )
    from slipstream.runtime.collectives import (
        broadcast as broadcast,
    )
    from slipstream.runtime.collectives import (
        broadcast_object_list as broadcast_object_list,
    )
    from slipstream.runtime.collectives import (
        copy_tensor_to_devices as copy_tensor_to_devices,
    )
    from slipstream.runtime.collectives import (
        gather as gather,
    )
    from slipstream.runtime.collectives import (
        gather_object as gather_object,
    )
    from slipstream.runtime.collectives import (
        gather_tensor_shape as gather_tensor_shape,
    )
    from slipstream.runtime.collectives import (
        pad_across_processes as pad_across_processes,
    )
    from slipstream.runtime.collectives import (
        reduce as reduce,
    )
    from slipstream.runtime.collectives import (
        set_seed as set_seed,
    )
    from slipstream.runtime.collectives import (
        wait_for_everyone as wait_for_everyone,
    )

_HOMES = {
    "slipstream.comm.nested": (
        "CannotPadNestedTensorWarning",
        "ConvertOutputsToFp32",
        "TensorInformation",
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "get_data_structure",
        "get_shape",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_tensor_information",
        "is_torch_tensor",
        "listify",
        "pad_input_tensors",
        "recursively_apply",
        "send_to_device",
        "slice_tensors",
    ),
    "slipstream.comm.tree": (
        "honor_type",
        "is_namedtuple",
    ),
    "slipstream.config.write": ("write_basic_config",),
    "slipstream.devices.memory": (
        "clear_device_cache",
        "convert_bytes",
        "release_memory",
        "should_reduce_batch_size",
    ),
    "slipstream.devices.packages": (
        "compare_versions",
        "deepspeed_required",
        "is_4bit_bnb_available",
        "is_8bit_bnb_available",
        "is_aim_available",
        "is_amdsmi_available",
        "is_bitsandbytes_multi_backend_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp8_available",
        "is_import_timer_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_msamp_available",
        "is_numpy_available",
        "is_pandas_available",
        "is_peft_available",
        "is_pippy_available",
        "is_pynvml_available",
        "is_pytest_available",
        "is_rich_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_timm_available",
        "is_torch_distributed_available",
        "is_torch_version",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_tqdm_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformer_engine_mxfp8_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_weights_only_available",
        "torchao_required",
    ),
    "slipstream.devices.table": (
        "DistributedType",
        "RNGType",
        "is_bf16_available",
        "is_cuda_available",
        "is_fp16_available",
        "is_habana_gaudi1",
        "is_hpu_available",
        "is_mlu_available",
        "is_mps_available",
        "is_musa_available",
        "is_neuron_available",
        "is_npu_available",
        "is_rocm_available",
        "is_sdaa_available",
        "is_torch_xla_available",
        "is_xccl_available",
        "is_xpu_available",
    ),
    "slipstream.errors": ("DistributedOperationException",),
    "slipstream.runtime.collectives": (
        "broadcast",
        "broadcast_object_list",
        "copy_tensor_to_devices",
        "gather",
        "gather_object",
        "gather_tensor_shape",
        "pad_across_processes",
        "reduce",
        "set_seed",
        "wait_for_everyone",
    ),
}

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "DistributedType",
    "RNGType",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "compare_versions",
    "concatenate",
    "convert_bytes",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "deepspeed_required",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp16_available",
    "is_fp8_available",
    "is_habana_gaudi1",
    "is_hpu_available",
    "is_import_timer_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_namedtuple",
    "is_neuron_available",
    "is_npu_available",
    "is_numpy_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensor_information",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_distributed_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "should_reduce_batch_size",
    "slice_tensors",
    "torchao_required",
    "wait_for_everyone",
    "write_basic_config",
]


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
