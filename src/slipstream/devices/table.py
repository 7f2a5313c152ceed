"""The device table: one row per device family, and the functions that choose among the rows.

A row (`Family`) holds the device type, communication backend, visible-devices variable, probes and limits of a family. This is the only
module that names families other than "cpu": a new family is a new row. CPU and the stand-in accelerator are what this project runs;
every other row follows the vendor's documentation and is checked by signature. Importing this module imports no torch: a row finds its
torch namespace (`torch.<type>`) only when `module()` is called, and no function starts a device runtime if that can be avoided.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, EnumMeta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import for_worker
from slipstream.errors import ConfigError, StateError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPU", "DistributedType", "FAMILIES", "Family", "RNGType", "StringEnum", "best_family", "choose_family",
    "default_family", "device_file_counter", "device_for", "family_of", "family_types", "import_plugin", "is_bf16_available",
    "is_cuda_available", "is_fp16_available", "is_habana_gaudi1", "is_hpu_available", "is_mlu_available", "is_mps_available",
    "is_musa_available", "is_neuron_available", "is_npu_available", "is_rocm_available", "is_sdaa_available", "is_torch_xla_available",
    "is_xccl_available", "is_xpu_available", "named_family", "set_device", "torch_namespace", "unusable", "visible_count",
]


def torch_namespace(name: str, plugin: str | None = None) -> Callable[[], Any]:
    """Return a function that returns `torch.<name>`, after importing the plugin that adds it; None if there is none.

    A plugin that is installed but cannot be imported (for example without its driver) is reported as a warning, and its devices are
    ignored: the machine may have others.
    """

    def find() -> Any:
        if plugin is not None and not import_plugin(plugin):
            return None
        return getattr(importlib.import_module("torch"), name, None)

    return find


def import_plugin(plugin: str) -> bool:
    """Import a plugin of torch; return whether it is installed and works."""
    if plugin in sys.modules:
        return True
    if importlib.util.find_spec(plugin.partition(".")[0]) is None:
        return False
    try:
        importlib.import_module(plugin)
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(f"{plugin} is installed but cannot be imported ({error}); its devices are not used", stacklevel=2)
        return False
    return True


def device_file_counter(*patterns: str) -> Callable[[Path], int]:
    """Return a function that counts the files of the first pattern that matches below a root.

    >>> device_file_counter("no/such/*")(Path("/"))
    0
    """

    def count(root: Path) -> int:
        return next((number for number in (sum(1 for _ in root.glob(pattern)) for pattern in patterns) if number), 0)

    return count


def visible_count(value: str) -> int:
    """Return how many devices a visible-devices variable allows: names, numbers and ranges; -1 ends the list.

    >>> visible_count("0,1"), visible_count("0-3"), visible_count(""), visible_count("-1"), visible_count("GPU-8a1c,MIG-77")
    (2, 4, 0, 0, 2)
    """
    total = 0
    for entry in (part.strip() for part in value.split(",")):
        first, dash, last = entry.partition("-")
        if entry in ("", "-1"):
            break
        total += max(int(last) - int(first) + 1, 0) if dash and first.isdigit() and last.isdigit() else 1
    return total


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the device table. Tests put a fake in with `dataclasses.replace(row, module=lambda: fake)`."""

    type: str
    """The type of its `torch.device`."""
    backend: str
    """The backend of `torch.distributed` for its tensors."""
    multi: str
    """The `DistributedType` of several processes on it; "NO" where processes cannot share such devices."""
    module: Callable[[], Any]
    """Returns a namespace like torch's own device modules, or None if this installation has none. Imports torch."""
    plugin: str | None = None
    """The package that adds the family to torch; None if torch has it."""
    backend_plugin: str | None = None
    """A module that must be imported before `backend` exists."""
    visible: str | None = None
    """The variable that says which devices a process may see."""
    also_visible: tuple[str, ...] = ()
    """Further variables that limit the devices."""
    entries: Callable[[Path], int] = lambda root: 0
    """Counts the device files below a root, without torch."""
    on_request: bool = False
    """Whether the family is there only if an option names it, or if the process called `enable()` of its plugin."""
    declared: tuple[str, int] | None = None
    """The variable that says how many devices there are, and their number without it; None if device files tell."""
    builds: tuple[str, ...] = ()
    """The start of the local part of torch's version in builds with the family (for families without a plugin)."""
    probe: Callable[[Any], bool] = lambda namespace: bool(namespace.is_available())
    """Whether the namespace has a device that works; should not initialise it."""
    indexed: bool = True
    """Whether devices have numbers; if not, the type alone names the device of this process."""
    many_per_host: bool = True
    fork_safe: bool = False
    """Whether a process may fork after importing (not after using) the family; False if that was not tried."""
    bf16: Callable[[Any], bool] = lambda namespace: bool(getattr(namespace, "is_bf16_supported", lambda: True)())
    """Whether the namespace computes in bfloat16."""
    out_of_memory: tuple[str, ...] = ()
    """Parts of its out-of-memory messages, for errors that are a plain RuntimeError."""
    prefixes: tuple[str, ...] = ()
    """How the names of its environment variables begin, for reports."""

    @property
    def group_backend(self) -> str:
        """What a process group is opened with: the backend of the family for its tensors, and gloo for those in host memory."""
        return f"{CPU.type}:{CPU.backend},{self.type}:{self.backend}" if self.indexed and self.backend != CPU.backend else self.backend

    def enable(self) -> None:
        """Load a family that is there on request; raise the error of its plugin if that is impossible. Starts no device."""
        if self.on_request and self.plugin is not None:
            importlib.import_module(self.plugin).enable()

    def obstacle(self) -> str | None:
        """Return why torch cannot use a device of the family here, as the end of a sentence; None if it can."""
        namespace = self.module()
        try:
            if namespace is not None and self.probe(namespace):
                return None
        except RuntimeError as error:  # the driver refuses
            return f"torch.{self.type} says: {error}"
        missing = self.missing_software()
        if missing is not None:
            return missing
        if namespace is None:
            return f"{self.plugin or f'torch.{self.type}'} cannot be loaded"
        return f"torch sees no such device{f' (it sees those of {self.visible}, if that is set)' if self.visible else ''}"

    def missing_software(self) -> str | None:
        """Return what this installation lacks for the family, as the end of a sentence, without importing torch; None if nothing."""
        from slipstream.devices.packages import version_of

        version = version_of("torch")
        if self.installed(version):
            return None
        if version is not None and self.plugin is not None:
            return f"the package {self.plugin.partition('.')[0]} is not installed"
        return "torch is not installed" if version is None else f"torch {version} is a build without it"

    def is_available(self) -> bool:
        """Return whether torch can use a device of the family here."""
        namespace = self.module()
        return namespace is not None and self.probe(namespace)

    def count(self) -> int:
        """Return the number of devices of the family that this process sees."""
        return int(self.ask("device_count", default=0)) if self.is_available() else 0

    def has(self, function: str) -> bool:
        """Return whether the namespace exists and has a function of this name."""
        return hasattr(self.module(), function)

    def ask(self, function: str, *arguments: Any, device: Any = None, default: Any = None) -> Any:
        """Call a function of the namespace; return the default if the namespace or the function does not exist.

        `device` is passed as the last argument if the devices of the family have numbers; the functions of other families take none.
        Name the function literally: a test compares every call with the signatures of all families.
        """
        place = (device,) if self.indexed and device is not None else ()
        return getattr(self.module(), function, lambda *_: default)(*arguments, *place)

    def computes_bf16(self) -> bool:
        """Return whether devices of the family compute in bfloat16."""
        return self.bf16(self.module())

    def is_loaded(self) -> bool:
        """Return whether the code of the family is imported."""
        return (self.plugin or "torch") in sys.modules

    def may_be_used(self) -> bool:
        """Return whether this process may have used a device of the family; some families do not tell."""
        return self.is_loaded() and bool(self.ask("is_initialized", default=True)) and self.is_available()

    def installed(self, torch_version: str | None) -> bool:
        """Return whether this installation of torch has the family, without importing it."""
        if torch_version is None:
            return False
        if self.plugin is not None:
            return importlib.util.find_spec(self.plugin.partition(".")[0]) is not None
        build = torch_version.partition("+")[2]
        return not build or build.startswith(self.builds)

    def count_files(self, environ: Mapping[str, str], root: Path = Path("/")) -> int:
        """Return how many devices a process with this environment would see, from files and variables; 0 if unknown."""
        present = self.total(environ, root)
        if not present:
            return 0
        limits = [environ[name] for name in (self.visible, *self.also_visible) if name is not None and name in environ]
        return min([present, *map(visible_count, limits)])

    def total(self, environ: Mapping[str, str], root: Path = Path("/")) -> int:
        """Return how many devices this machine has, whatever a process may see of them; 0 if unknown."""
        if self.declared is None:
            return self.entries(root)
        variable, usual = self.declared
        text = environ.get(variable) or str(usual)
        if not text.isdecimal() or not int(text):
            raise ConfigError(f"The variable {variable}={text!r} is not a number of devices.\nSet a whole number from 1, or unset it.")
        return int(text)


# --- public names -------------------------------------------------------------------------------------------


class _ContainsValues(EnumMeta):
    """Makes `"MULTI_CPU" in DistributedType` true on every Python that we support."""

    def __contains__(cls, item: object) -> bool:
        return any(item == member for member in cls)

    def __iter__(cls) -> Iterator[Any]:
        return super().__iter__()


class StringEnum(str, Enum, metaclass=_ContainsValues):
    """An enumeration of texts that prints its values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return every value, in the order of the declaration."""
        return [str(member.value) for member in cls]


class DistributedType(StringEnum):
    """How the processes of a job work together: what `PartialState.distributed_type` says.

    >>> "MULTI_CPU" in DistributedType, DistributedType("NO") == "NO"
    (True, True)
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class RNGType(StringEnum):
    """The streams of random numbers that can be captured and made equal between processes.

    >>> RNGType.list()[:3]
    ['python', 'numpy', 'torch']
    """

    PYTHON = "python"
    NUMPY = "numpy"
    TORCH = "torch"
    CUDA = "cuda"
    MPS = "mps"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


# --- functions of rows ---------------------------------------------------------------------------


def _has_devices(namespace: Any) -> bool:
    # Counting goes through the driver's management library where it can and leaves fork safe; `is_available` may not.
    return bool(namespace.device_count() > 0)


def _apple_silicon(_: Path) -> int:
    return int(sys.platform == "darwin" and os.uname().machine == "arm64")


def _nvidia_or_amd(root: Path) -> int:
    nvidia = device_file_counter("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*")(root)
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")  # processors are nodes too, with the id 0
    return nvidia or sum(node.read_text().strip() not in ("", "0") for node in nodes)


def _intel(root: Path) -> int:
    vendors = root.glob("sys/class/drm/renderD*/device/vendor")
    return sum(vendor.read_text().strip() == "0x8086" for vendor in vendors)


def _xla_namespace() -> Any:
    if not import_plugin("torch_xla"):
        return None
    from slipstream.devices.lazy_runtime import LazyRuntime

    package, runtime, model = map(importlib.import_module, ("torch_xla", "torch_xla.runtime", "torch_xla.core.xla_model"))
    # torch internals: torch_xla has no public question that does not start the runtime. Tried on fakes alone.
    return LazyRuntime(package._XLAC._xla_runtime_is_initialized, runtime, model)


def _mps_bf16(_: Any) -> bool:
    import torch

    return bool(torch.backends.mps.is_macos_or_newer(14, 0))


# --- the rows, the first choice first --------------------------------------------------------------------------------------

def _plugin_family(
    kind: str, backend: str, visible: str, device_files: str, prefixes: tuple[str, ...], also_visible: tuple[str, ...] = ()
) -> Family:
    """Return the row of a family that the plugin `torch_<kind>` adds to torch."""
    return Family(
        type=kind,
        backend=backend,
        multi=f"MULTI_{kind.upper()}",
        module=torch_namespace(kind, f"torch_{kind}"),
        plugin=f"torch_{kind}",
        visible=visible,
        also_visible=also_visible,
        entries=device_file_counter(device_files),
        out_of_memory=(f"{kind.upper()} out of memory",),
        prefixes=prefixes,
    )


CPU = Family(
    type="cpu",
    backend="gloo",
    multi="MULTI_CPU",
    module=torch_namespace("cpu"),
    builds=("",),
    indexed=False,
    fork_safe=True,
    out_of_memory=("CPU out of memory", "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory"),
    prefixes=("OMP_", "MKL_", "KMP_", "GLOO_"),
)

_STANDIN = "slipstream.testing.standin"

FAMILIES: tuple[Family, ...] = (
    Family(  # first: a process that has enabled it wants it
        type="standin",
        backend="standin",
        multi="MULTI_GPU",
        module=torch_namespace("standin"),  # there once the process has called `enable()` of the plugin
        plugin=_STANDIN,
        visible="STANDIN_VISIBLE_DEVICES",
        on_request=True,
        declared=("SLIPSTREAM_STANDIN_DEVICES", 4),
        probe=_has_devices,
        fork_safe=True,
        prefixes=("STANDIN_",),
    ),
    Family(
        type="mps",
        backend="gloo",
        multi="NO",
        module=torch_namespace("mps"),
        entries=_apple_silicon,
        builds=("",),
        indexed=False,
        many_per_host=False,
        bf16=_mps_bf16,
        # Both come as a plain RuntimeError; the second is an allocation above the largest buffer that Metal allows.
        out_of_memory=("MPS backend out of memory", "Invalid buffer size: "),
        prefixes=("PYTORCH_MPS_", "PYTORCH_ENABLE_MPS_"),
    ),
    _plugin_family("mlu", "cncl", "MLU_VISIBLE_DEVICES", "dev/cambricon_dev[0-9]*", ("MLU_", "CN_", "CNCL_"), ("CN_VISIBLE_DEVICES",)),
    _plugin_family("sdaa", "tccl", "SDAA_VISIBLE_DEVICES", "dev/tcaicard[0-9]*", ("SDAA_", "TCCL_")),
    _plugin_family("musa", "mccl", "MUSA_VISIBLE_DEVICES", "dev/mtgpu.[0-9]*", ("MUSA_", "MCCL_")),
    _plugin_family("npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "dev/davinci[0-9]*", ("ASCEND_", "HCCL_")),
    Family(
        type="hpu",
        backend="hccl",
        multi="MULTI_HPU",
        module=torch_namespace("hpu", "habana_frameworks.torch"),
        plugin="habana_frameworks.torch",
        backend_plugin="habana_frameworks.torch.distributed.hccl",
        visible="HABANA_VISIBLE_MODULES",
        entries=device_file_counter("dev/accel/accel[0-9]*"),
        out_of_memory=("HPU out of memory", "Allocation failed for size"),
        prefixes=("HABANA_", "PT_HPU_", "HCCL_"),
    ),
    Family(
        type="cuda",
        backend="nccl",
        multi="MULTI_GPU",
        module=torch_namespace("cuda"),
        visible="CUDA_VISIBLE_DEVICES",
        also_visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        entries=_nvidia_or_amd,
        builds=("cu", "rocm"),
        probe=_has_devices,
        fork_safe=True,
        out_of_memory=("CUDA out of memory", "HIP out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_ALLOC_FAILED"),
        prefixes=("CUDA_", "NCCL_", "NVIDIA_", "HIP_", "ROCR_", "RCCL_", "HSA_"),
    ),
    Family(
        type="xpu",
        backend="xccl",
        multi="MULTI_XPU",
        module=torch_namespace("xpu"),
        visible="ZE_AFFINITY_MASK",
        entries=_intel,
        builds=("xpu",),
        fork_safe=True,
        out_of_memory=("XPU out of memory",),
        prefixes=("ZE_", "CCL_", "SYCL_"),
    ),
    Family(
        type="neuron",
        backend="neuron",
        multi="MULTI_NEURON",
        module=torch_namespace("neuron", "torch_neuronx"),
        plugin="torch_neuronx",
        visible="NEURON_RT_VISIBLE_CORES",
        entries=device_file_counter("sys/devices/virtual/neuron_device/neuron[0-9]*/neuron_core[0-9]*", "dev/neuron[0-9]*"),
        prefixes=("NEURON_",),
    ),
    Family(
        type="xla",
        backend="xla",
        multi="XLA",
        module=_xla_namespace,
        plugin="torch_xla",
        visible="TPU_VISIBLE_CHIPS",
        entries=device_file_counter("dev/accel[0-9]*", "dev/vfio/[0-9]*"),
        indexed=False,
        out_of_memory=("RESOURCE_EXHAUSTED",),
        prefixes=("XLA_", "PJRT_", "TPU_"),
    ),
    CPU,
)


# --- choosing among them -----------------------------------------------------------------------------------------------------


def best_family(cpu: bool = False, *, distributed: bool = False, families: tuple[Family, ...] = FAMILIES) -> Family:
    """Return the first family of the table with a device here. `cpu` always returns the CPU; `distributed` leaves out families
    whose devices several processes cannot share.

    >>> best_family(cpu=True).type
    'cpu'
    """
    if cpu:
        return CPU
    usable = (family for family in families if not (distributed and family.multi == DistributedType.NO))
    return next((family for family in usable if family.is_available()), CPU)


def named_family(name: str, given: str = "") -> Family:
    """Return the row of a family that an option names; `given` is the option with its origin, for the error.

    >>> named_family("cpu") is CPU
    True
    """
    row = next((family for family in FAMILIES if family.type == name), None)
    if row is None:
        known = ", ".join(family_types())
        raise ConfigError(f"{given or repr(name)}: there is no such device family.\nWrite one of {known}, or leave it out.")
    return row


def choose_family(name: str | None, given: str = "", *, distributed: bool = False) -> Family:
    """Return the family that an option names, or the best one if none does; raise if torch cannot use the named one here.

    >>> choose_family("cpu").type
    'cpu'
    """
    if name is None:
        return best_family(distributed=distributed)
    family, given = named_family(name, given), given or f"device={name}"
    if distributed and family.multi == DistributedType.NO:
        raise ConfigError(f"{given}, but several processes cannot share such a device.\nStart one process, or leave it out.")
    family.enable()
    obstacle = family.obstacle()
    if obstacle is not None:
        raise unusable(given, obstacle)
    return family


def unusable(given: str, obstacle: str) -> ConfigError:
    """Return the error for a family that an option names (`given`, with its origin) and that cannot be used here."""
    return ConfigError(f"{given} cannot be used here: {obstacle}.\nLeave it out to take the best device that is here, or write cpu.")


def default_family(*, distributed: bool = False) -> Family:
    """Return the family that the options of this process name (through the launcher or a variable), or the best one."""
    config = for_worker()
    return choose_family(config.device.family, config.describe_device(), distributed=distributed)


def device_for(family: Family, local_rank: int = 0, override: str | None = None) -> torch.device:
    """Return the device of a process: its local rank modulo the number of devices, unless `override` names another.

    >>> device_for(CPU, local_rank=3)
    device(type='cpu')
    """
    import torch

    if override is not None:
        try:
            return torch.device(override)
        except RuntimeError as error:
            known = ", ".join(family_types())
            raise ConfigError(f"torch does not support the device {override!r} here; write one of {known}, or type:number") from error
    if not family.indexed:
        return torch.device(family.type)
    count = family.count()
    if count == 0:
        narrowed = f"; {family.visible} may hide them" if family.visible else ""
        raise StateError(f"torch sees no {family.type} device in this process{narrowed}; use cpu=True to run without")
    return torch.device(family.type, local_rank % count)


def set_device(device: torch.device) -> None:
    """Make a device the current one of its family, where the family has a current device."""
    family = family_of(device)
    if family.indexed and device.index is not None:
        family.ask("set_device", device.index)


def family_of(device: torch.device | str) -> Family:
    """Return the row of a device.

    >>> family_of("cpu") is CPU
    True
    """
    kind = str(device).partition(":")[0]
    row = next((family for family in FAMILIES if family.type == kind), None)
    if row is None:
        raise StateError(f"device {str(device)!r} is not of a supported device family; supported are {', '.join(family_types())}")
    return row


def family_types() -> tuple[str, ...]:
    """Return the device type of every row, the first choice first."""
    return tuple(family.type for family in FAMILIES)


# --- one question per family -------------------------------------------------------------------------------------------------


def _available(kind: str, check_device: bool = False) -> bool:
    family = family_of(kind)
    try:
        return family.is_available() and (not check_device or family.count() > 0)
    except RuntimeError:  # the driver refuses: no device can be used
        return False


def _availability_function(kind: str, device: str) -> Callable[..., bool]:
    def ask(check_device: bool = False) -> bool:
        return _available(kind, check_device)

    ask.__name__ = ask.__qualname__ = f"is_{kind}_available"
    ask.__doc__ = f"Return whether torch sees {device}; `check_device` also counts the devices."
    return ask


is_xpu_available = _availability_function("xpu", "an Intel GPU")
is_npu_available = _availability_function("npu", "an Ascend NPU")
is_mlu_available = _availability_function("mlu", "a Cambricon MLU")
is_musa_available = _availability_function("musa", "a Moore Threads GPU")
is_sdaa_available = _availability_function("sdaa", "a Tecorigin card")
is_neuron_available = _availability_function("neuron", "an AWS Neuron core")


def is_cuda_available() -> bool:
    """Return whether torch sees a CUDA or ROCm device; starts no device runtime where the driver can be asked without."""
    return _available("cuda")


def is_rocm_available() -> bool:
    """Return whether torch was built for ROCm."""
    return importlib.import_module("torch").version.hip is not None


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch sees an Apple GPU, and is at least of a version."""
    from slipstream.devices.packages import is_torch_version

    return is_torch_version(">=", min_version) and _available("mps")


def is_xccl_available() -> bool:
    """Return whether torch was built with the communication library for Intel GPUs."""
    import torch.distributed as distributed

    return distributed.is_available() and distributed.is_xccl_available()


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether torch sees an Intel Gaudi; `init_hccl` also imports its communication backend."""
    plugin = family_of("hpu").backend_plugin
    return _available("hpu") and (not init_hccl or (plugin is not None and import_plugin(plugin)))


def is_habana_gaudi1() -> bool:
    """Return whether the device is a first-generation Gaudi, which computes no float16."""
    if not is_hpu_available():
        return False
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    # torch internals: the generation of a Gaudi has no public name. Not run on hardware.
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is there; optionally only if it drives a TPU, or a GPU."""
    if check_is_tpu and check_is_gpu:
        raise ConfigError("check_is_tpu and check_is_gpu cannot both hold; ask for one of them")
    wanted = ("TPU",) if check_is_tpu else ("CUDA", "GPU") if check_is_gpu else None
    family = family_of("xla")
    return family.module() is not None and (wanted is None or family_of("xla").ask("hardware") in wanted)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device that would be chosen here computes in bfloat16."""
    families = tuple(family for family in FAMILIES if not (ignore_tpu and family.type == "xla"))
    family = best_family(families=families)
    return family.computes_bf16()


def is_fp16_available() -> bool:
    """Return whether the device that would be chosen here computes in float16."""
    return not is_habana_gaudi1()
