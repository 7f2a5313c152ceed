"""Variables of the environment, and what this machine is, asked without starting a device.

Nothing here imports torch before a function needs it, because launchers use this module.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any, TypeVar

from slipstream.config.sources import (
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)

__all__ = [
    "CPUInformation", "are_libraries_initialized", "check_cuda_fp8_capability", "check_cuda_p2p_ib_support", "clear_environment",
    "convert_dict_to_env_variables", "get_cpu_distributed_information", "get_current_device_type", "get_driver_version", "get_gpu_info",
    "get_int_from_env", "override_numa_affinity", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
    "purge_accelerate_environment", "set_numa_affinity", "str_to_bool",
]

logger = logging.getLogger(__name__)

_UNSAFE = frozenset(";\n<> ")
"""Characters that a shell would act on in `NAME=VALUE` words."""
_P2P_DRIVER = "550.40.07"
"""From this NVIDIA driver on, cards of the RTX 40 series neither claim nor need what NCCL expects of peer-to-peer copies."""
_Decorated = TypeVar("_Decorated")


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """Return variables as lines `NAME=VALUE`; one that is empty or has characters for a shell is left out, with a warning.

    >>> convert_dict_to_env_variables({"ONE": "1", "TWO": "2"})
    ['ONE=1\\n', 'TWO=2\\n']
    """
    lines = []
    for name, value in current_env.items():
        if name and value and not _UNSAFE & set(f"{name}{value}"):
            lines.append(f"{name}={value}\n")
        else:
            logger.warning(f"The variable {name}={value} is left out: it is empty, or has a character with a meaning for the shell.")
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of these packages are imported already.

    >>> are_libraries_initialized("os", "no_such_package")
    ['os']
    """
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of device of this machine and the `DistributedType` of several processes on it, without starting the device."""
    from slipstream.devices.count import count_without_torch

    family, count = count_without_torch(dict(os.environ))
    if not count:
        return "cpu", "MULTI_CPU"
    return family.type, {"cuda": "MULTI_GPU", "xla": "XLA"}.get(family.type, f"MULTI_{family.type.upper()}")


def _nvidia_smi() -> str:
    """Return the command that asks the NVIDIA driver."""
    if platform.system() == "Windows":
        return which("nvidia-smi") or rf"{os.environ.get('SYSTEMDRIVE', 'C:')}\Program Files\NVIDIA Corporation\NVSMI\nvidia-smi.exe"
    return "nvidia-smi"


def _ask_nvidia(*fields: str) -> list[list[str]]:
    """Return these fields of every GPU; raise FileNotFoundError where there is no NVIDIA driver."""
    command = [_nvidia_smi(), f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs and how many there are, from nvidia-smi."""
    names = [row[-1] for row in _ask_nvidia("count", "name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver, from nvidia-smi."""
    return _ask_nvidia("driver_version")[0][0]


def check_cuda_p2p_ib_support() -> bool:
    """Return False for cards of the RTX 40 series with a driver that cannot copy between them: NCCL must not use P2P and IB there."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any("RTX 40" in name for name in names):
            return True
        from packaging.version import Version

        return Version(get_driver_version()) >= Version(_P2P_DRIVER)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return True  # no driver, no cards


def check_cuda_fp8_capability() -> bool:
    """Return whether the current GPU computes in fp8 (compute capability 8.9 and above). Starts CUDA."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@dataclass
class CPUInformation:
    """Which process of how many this is, in all and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks that torchrun or an MPI launcher (Intel MPI, Open MPI, MVAPICH) set for this process.

    >>> with patch_environment(rank=1, world_size=2):
    ...     get_cpu_distributed_information().rank
    1
    """
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        local_rank=get_int_from_env(["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"], 1
        ),
    )


def _parse_cpu_list(cpu_list_str: str) -> list[int]:
    """Return the cores in a list as Linux writes it.

    >>> _parse_cpu_list("0-2,8")
    [0, 1, 2, 8]
    """
    cores: list[int] = []
    for part in cpu_list_str.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return cores


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores next to its GPU, whatever it was bound to before.

    The cores are those that the kernel lists for the GPU's place on the PCI bus. `verbose` (by default: ACCELERATE_DEBUG_MODE) logs them.
    """
    import torch

    if not torch.cuda.is_available():
        logger.warning("The process is not bound to cores: binding follows the place of a GPU, and there is none.")
        return
    card = torch.cuda.get_device_properties(local_process_index)
    place = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices", place, "local_cpulist")
    try:
        cores = set(_parse_cpu_list(listed.read_text())) & os.sched_getaffinity(0)
    except (OSError, AttributeError, ValueError):
        cores = set()
    if not cores:
        logger.warning(f"Process {local_process_index} is not bound to cores: {listed} names none that it may use.")
        return
    os.sched_setaffinity(0, cores)
    if verbose if verbose is not None else parse_flag_from_env("ACCELERATE_DEBUG_MODE", False):
        logger.info(f"Assigning {len(cores)} cpu cores to process {local_process_index}: {sorted(cores)}")


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores next to its GPU, once: a second call with the same arguments does nothing."""
    override_numa_affinity(local_process_index=local_process_index, verbose=verbose)


@contextmanager
def _kept_accelerate_environment() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        os.environ.update(before)


def _purge_function(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def purging(*args: Any, **kwargs: Any) -> Any:
            with _kept_accelerate_environment():
                return await function(*args, **kwargs)

    else:

        @functools.wraps(function)
        def purging(*args: Any, **kwargs: Any) -> Any:
            with _kept_accelerate_environment():
                return function(*args, **kwargs)

    return purging


def _purge_methods(cls: type) -> None:
    for name, method in list(vars(cls).items()):
        if name.startswith("test") and inspect.isfunction(method):
            setattr(cls, name, _purge_function(method))


def purge_accelerate_environment(func_or_cls: _Decorated) -> _Decorated:
    """Restore the variables ACCELERATE_* after a function; of a class, after each test method, also those of its subclasses.

    `TrainingArguments(fp16=True)` of transformers leaves such variables behind, and the next test would see them.
    """
    if not inspect.isclass(func_or_cls):
        return _purge_function(func_or_cls)  # type: ignore[arg-type, return-value]
    decorated: Any = func_or_cls
    _purge_methods(decorated)
    own = vars(decorated).get("__init_subclass__")

    def purge_subclass(cls: type, **kwargs: Any) -> None:
        if own is None:
            super(decorated, cls).__init_subclass__(**kwargs)
        else:
            own.__func__(cls, **kwargs)
        _purge_methods(cls)

    decorated.__init_subclass__ = classmethod(purge_subclass)
    return func_or_cls
