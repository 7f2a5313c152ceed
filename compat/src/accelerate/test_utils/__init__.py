"""Test utilities: decorators, helpers, and the scripts that `accelerate test` runs (modules of `scripts`)."""

import importlib
from typing import Any

from accelerate._forwarding import forward_names

_SCRIPTS = ("test_cli", "test_ops", "test_script", "test_sync")

_exported, _find_forwarded, __dir__ = forward_names(
    __name__,
    {
        "accelerate.test_utils.testing": """DEFAULT_LAUNCH_COMMAND are_the_same_tensors assert_exception capture_call_output device_count
            execute_subprocess_async get_launch_command get_torch_dist_unique_port memory_allocated_func
            path_in_accelerate_package pytest_xdist_worker_id require_bnb require_cpu require_cuda
            require_cuda_or_hpu require_cuda_or_xpu require_fp16 require_fp8 require_huggingface_suite
            require_mlu require_mps require_multi_device require_multi_gpu require_multi_gpu_or_xpu
            require_multi_xpu require_musa require_non_cpu require_non_hpu require_non_torch_xla
            require_non_xpu require_npu require_pippy require_sdaa require_single_device
            require_single_gpu require_single_xpu require_torch_min_version require_torchao
            require_torchvision require_tpu require_transformer_engine require_transformer_engine_mxfp8
            require_xpu run_first skip slow torch_device""",
        "accelerate.test_utils.training": "RegressionDataset RegressionModel",
    },
    submodules="examples scripts testing training",
)
__all__ = sorted([*_exported, *_SCRIPTS])


def __getattr__(name: str) -> Any:
    if name in _SCRIPTS:
        return importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    return _find_forwarded(name)
