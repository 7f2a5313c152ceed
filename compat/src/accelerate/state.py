"""The processes of a run: `PartialState`, `AcceleratorState`, `GradientState`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.dataclasses": "DistributedType DynamoBackend GradientAccumulationPlugin SageMakerDistributedType",
        "accelerate.utils.environment": """check_cuda_fp8_capability check_cuda_p2p_ib_support get_cpu_distributed_information
            get_int_from_env parse_choice_from_env parse_flag_from_env set_numa_affinity""",
        "accelerate.utils.imports": """deepspeed_required is_datasets_available is_deepspeed_available is_fp8_available
            is_habana_gaudi1 is_hpu_available is_mlu_available is_mps_available is_musa_available
            is_neuron_available is_npu_available is_sdaa_available is_torch_xla_available
            is_xccl_available is_xpu_available""",
        "slipstream": "AcceleratorState GradientState PartialState",
        "slipstream.distributed.state": "is_initialized",
    },
)
