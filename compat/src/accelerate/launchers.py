"""`notebook_launcher` and `debug_launcher`: Slipstream's, with the arguments and variables of Accelerate.

The processes are forked from a fresh interpreter, so devices and state of the notebook do not matter, and a state that exists in the
notebook already does not turn a job of several processes into several jobs of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate._forwarding import forward_names
from slipstream.config.sources import patch_environment
from slipstream.errors import ConfigError

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils.dataclasses": "PrecisionType",
        "accelerate.utils.environment": "are_libraries_initialized check_cuda_p2p_ib_support get_current_device_type get_gpu_info",
        "accelerate.utils.imports": "is_mps_available is_rocm_available",
        "accelerate.utils.launch": "PrepareForLaunch",
        "accelerate.utils.versions": "is_torch_version",
    },
)
__all__ = [*_forwarded, "debug_launcher", "notebook_launcher", "patch_environment", "test_launch"]

_DEFAULT_PORT = "29500"


def test_launch() -> None:
    """Open and use the process group, to see whether a process that a launcher started can."""
    from accelerate.state import PartialState

    PartialState().wait_for_everyone()


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = _DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Call `function(*args)` in `num_processes` processes of this machine; one process means here, in the notebook itself.

    The arguments about several machines are those of Accelerate; other values than the defaults raise, because a notebook reaches one.

    >>> notebook_launcher(print, ("training with", 3), num_processes=1)
    training with 3
    """
    import slipstream

    if num_processes is None:
        num_processes = _number_on_colab()
    precision = str(mixed_precision).lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise ConfigError(f"mixed_precision={mixed_precision!r} does not exist: write no, fp16, bf16 or fp8")
    variables = {} if precision == "no" else {"accelerate_mixed_precision": precision}
    with patch_environment(**variables):
        slipstream.notebook_launcher(
            function,
            tuple(args),
            num_processes,
            precision,
            None if str(use_port) == _DEFAULT_PORT else use_port,
            master_addr,
            node_rank,
            num_nodes,
            rdzv_backend,
            rdzv_endpoint,
            rdzv_conf,
            rdzv_id,
            max_restarts,
            monitor_interval,
            log_line_prefix_template,
        )


def _number_on_colab() -> int | None:
    """Return the number of accelerators in a notebook of Colab or Kaggle, where Accelerate asks for no number; otherwise None."""
    from slipstream.devices.count import count_without_torch

    if not any(name in sys.modules for name in ("google.colab", "kaggle_web_client")):
        return None
    return max(1, count_without_torch({})[1])


def debug_launcher(function: Callable[..., Any], args: Sequence[object] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in `num_processes` processes on the CPU, to try out distributed code."""
    import slipstream

    with patch_environment(accelerate_use_cpu="yes", accelerate_mixed_precision="no"):
        slipstream.debug_launcher(function, tuple(args), num_processes)
