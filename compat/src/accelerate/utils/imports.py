"""Names of `accelerate.utils.imports`."""

from __future__ import annotations

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.environment": "parse_flag_from_env patch_environment str_to_bool",
        "accelerate.utils.versions": "compare_versions is_torch_version",
        "slipstream": "is_rich_available",
        "slipstream.utils": """deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available
            is_amdsmi_available is_bf16_available is_bitsandbytes_multi_backend_available
            is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available
            is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
            is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
            is_import_timer_available is_lomo_available is_matplotlib_available is_megatron_lm_available
            is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available
            is_neuron_available is_npu_available is_numpy_available is_pandas_available
            is_peft_available is_pippy_available is_pynvml_available is_pytest_available
            is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available
            is_swanlab_available is_tensorboard_available is_timm_available
            is_torch_distributed_available is_torch_xla_available is_torchao_available
            is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available
            is_tqdm_available is_trackio_available is_transformer_engine_available
            is_transformer_engine_mxfp8_available is_transformers_available is_triton_available
            is_wandb_available is_weights_only_available is_xccl_available is_xpu_available
            torchao_required""",
    },
)


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Return whether a package can be imported and is installed as a distribution, so that a folder of that name does not count.

    Private in Accelerate, and used by programs that test for packages of their own.

    >>> _is_package_available("torch"), _is_package_available("no_such_package")
    (True, False)
    """
    import importlib.util

    from slipstream.devices.packages import version_of

    return importlib.util.find_spec(pkg_name) is not None and version_of(metadata_name or pkg_name) is not None
