"""Describe the machine and the installation as plain data that can be shown.

Sections are versions, system, devices, options and environment variables. Versions come from package metadata and devices from device
files, so nothing slow or broken is imported; `deep=True` imports torch and asks it too. Secrets are removed (`config/redaction.py`), and
the home directory is written as ~.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any, Final

from slipstream.config import resolve
from slipstream.config.names import is_internal
from slipstream.config.redaction import redact, redact_text
from slipstream.config.resolved_config import VARIABLE
from slipstream.devices.count import count_without_torch
from slipstream.devices.memory import available_cores, available_memory, convert_bytes, host_memory
from slipstream.devices.packages import version_of
from slipstream.devices.table import FAMILIES, family_of
from slipstream.errors import ConfigError, SlipstreamError

__all__ = ["describe_device", "device_name", "environment_report", "software_line"]

_DISTRIBUTIONS: Final = ("slipstream", "torch", "numpy", "safetensors", "psutil", "accelerate", "transformers", "deepspeed")
_PREFIXES: Final = (
    "SLIPSTREAM_", "ACCELERATE_", "FSDP_", "TORCH", "PYTORCH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK",
    "SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "MV2_", "LSB_", "KUBERNETES_", "PET_", "SM_", "HF_", "PYTHON", "LD_", "CONDA_",
    "VIRTUAL_ENV", "TMPDIR", "XDG_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
_LONGEST_VALUE: Final = 300

_Section = dict[str, Any]


def environment_report(environ: Mapping[str, str], *, config_file: str | None = None, deep: bool = False) -> dict[str, _Section]:
    """Return the report as plain data, section by section; every text in it is fit to be shown."""
    sections: dict[str, _Section] = {
        "versions": _versions(),
        "system": _system(),
        "devices": _devices(environ, config_file),
        "configuration": _configuration(environ, config_file),
        "environment": _variables(environ),
    }
    if deep:
        sections["torch"] = _torch(environ, config_file)
    return {title: {key: _hide_home(value, environ) for key, value in entries.items()} for title, entries in sections.items()}


def _hide_home(value: Any, environ: Mapping[str, str]) -> Any:
    home = environ.get("HOME", "").rstrip("/")
    return value.replace(home, "~") if isinstance(value, str) and len(home) > 1 else value


def _versions() -> _Section:
    found = {name: version_of(name) for name in _DISTRIBUTIONS}
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    return {**{name: version for name, version in found.items() if version is not None}, "python": python}


def _system() -> _Section:
    memory = host_memory()
    limit = {} if memory.limit is None else {"memory limit of the control group": convert_bytes(memory.limit)}
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "cores": f"{available_cores()} usable of {os.cpu_count()}",
        "memory": f"{convert_bytes(memory.available)} available of {convert_bytes(memory.total)}",
        **limit,
    }


def _devices(environ: Mapping[str, str], config_file: str | None) -> _Section:
    named, given = _named_device(environ, config_file)
    try:
        family, count = count_without_torch(environ, named, given)
    except ConfigError as error:
        return {"error": redact_text(str(error))}
    missing = family.missing_software()
    found = {"type": family.type, "accelerators": count, "backend": family.backend, "found by": "device files and variables"}
    return {**found, **({} if named is None else {"chosen by": given}), **({} if missing is None else {"cannot be used": missing})}


def _named_device(environ: Mapping[str, str], config_file: str | None) -> tuple[str | None, str]:
    """Return the device family that an option names, and the option with its origin."""
    try:
        config = resolve(config_file=config_file, environ=environ, default_file=True)
    except ConfigError:  # the section about the configuration shows it
        return None, ""
    return config.device.family, config.describe_device()


def _configuration(environ: Mapping[str, str], config_file: str | None) -> _Section:
    try:
        config = resolve(config_file=config_file, environ=environ, default_file=True)
    except ConfigError as error:
        return {"error": redact_text(str(error))}
    given = {name: f"{redact(name, str(choice.value))} ({choice.origin})" for name, choice in config.given().items()}
    unused = {f"unused: {key}": redact_text(why) for key, why in config.unused}
    return {**given, **unused} or {"all": "by default"}


def _variables(environ: Mapping[str, str]) -> _Section:
    prefixes = (*_PREFIXES, *(prefix for family in FAMILIES for prefix in family.prefixes))
    names = sorted(name for name in environ if name.upper().startswith(prefixes) and not is_internal(name) and name != VARIABLE)
    return {name: _cut(redact(name, environ[name])) for name in names}


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"


def device_name(device: Any) -> str:
    """Return what the family of a device calls it; the machine where devices have no names.

    >>> device_name("cpu") == platform.machine()
    True
    """
    family = family_of(device)
    if not family.indexed:
        return platform.machine()
    return str(family.ask("get_device_name", device=getattr(device, "index", None), default=family.type))


def software_line() -> str:
    """Return the versions that matter for a bug report, on one line: "torch 2.13.0, Linux, slipstream 0.1.0"."""
    return f"torch {version_of('torch')}, {platform.system()}, slipstream {version_of('slipstream')}"


def describe_device(device: Any) -> str:
    """Return the name of a device and its free memory as text.

    >>> describe_device("cpu").endswith("free")
    True
    """
    free = available_memory(device)
    return f"{device_name(device)}, {'unknown' if free is None else convert_bytes(free)} free"


def _torch(environ: Mapping[str, str], config_file: str | None) -> _Section:
    import torch
    import torch.distributed as distributed

    from slipstream.devices.table import choose_family, device_for

    try:
        family = choose_family(*_named_device(environ, config_file))
    except SlipstreamError as error:
        return {"version": torch.__version__, "error": redact_text(str(error))}
    known = dict.fromkeys([*(family.backend for family in reversed(FAMILIES)), "mpi", "ucc"])
    backends = [name for name in known if getattr(distributed, f"is_{name}_available", bool)()]
    devices = {f"device {device}": describe_device(device) for device in (device_for(family, rank) for rank in range(family.count()))}
    return {
        "version": torch.__version__,
        "backends": ", ".join(backends),
        "threads": torch.get_num_threads(),
        **devices,
    }
