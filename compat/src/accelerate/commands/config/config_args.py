"""Configuration files: what they hold, reading and writing them, and where the default one is.

Files of every version of Accelerate are read. Keys of earlier versions become today's (`fp16`, `dynamo_backend`, `tpu_use_...`), or are
named in a warning where nothing reads them any more (`ipex_config`); keys that no version knew are an error that names them. A file for an
engine that does not run here can be read, shown and rewritten all the same: launching it is what raises.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from accelerate._enumerations import ComputeEnvironment, SageMakerDistributedType
from slipstream.config.names import nearest
from slipstream.devices.table import DistributedType
from slipstream.errors import ConfigError

__all__ = [
    "BaseConfig", "ClusterConfig", "SageMakerConfig", "cache_dir", "default_config_file", "default_json_config_file",
    "default_yaml_config_file", "hf_cache_home", "load_config_from_file",
]

SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"

hf_cache_home = os.path.expanduser(
    os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache")), "huggingface"))
)
cache_dir = os.path.join(hf_cache_home, "accelerate")
default_yaml_config_file = os.path.join(cache_dir, "default_config.yaml")
default_json_config_file = os.path.join(cache_dir, "default_config.json")
if os.path.isfile(default_yaml_config_file) or not os.path.isfile(default_json_config_file):
    default_json_config_file = default_yaml_config_file  # what has been written last under either name is what is read
default_config_file = default_yaml_config_file if os.path.isfile(default_yaml_config_file) else default_json_config_file

_FORMER_KEYS = {
    "ipex_config": "Intel's extension for PyTorch has ended, and PyTorch itself has its kernels",
    "use_xpu": "accelerators are found by themselves",
    "command": "its place is the option --command of tpu-config",
    "tpu_use_pjrt": "there is no other runtime of TPUs any more",
    "num_cpu_threads_per_process": "it is an option of launch, not of files",
}
"""Keys of files that earlier versions of Accelerate wrote or documented, and why they have no effect."""


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> ClusterConfig | SageMakerConfig:
    """Return the configuration in a file, by default the one that `accelerate config` writes."""
    if config_file is not None and not os.path.isfile(config_file):
        raise FileNotFoundError(
            f"The configuration file {config_file} does not exist. Give one that does, or leave --config_file out: then "
            f"{default_config_file} is read, if `accelerate config` has written it."
        )
    path = os.fspath(config_file or default_config_file)
    data = _read(path)
    kind: Any = ClusterConfig
    if _word(data.get("compute_environment", "LOCAL_MACHINE")) == "AMAZON_SAGEMAKER":
        kind = SageMakerConfig
    return kind._from_data(data, path)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    text = Path(path).read_text(encoding="utf-8")
    if str(path).endswith(".json"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from None
    else:
        import yaml

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no keys. Write a configuration with `accelerate config --config_file {path}`.")
    return data


def _word(value: Any) -> str:
    """Return a value in capitals; YAML reads a bare NO as false."""
    return "NO" if value is False or value is None else str(getattr(value, "value", value)).upper()


@dataclass
class BaseConfig:
    """What the files of clusters and of SageMaker have in common."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of a file: members of enumerations as text, and without what is None or an empty block."""
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in vars(self).items()}
        return {name: value for name, value in plain.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of a file with today's names, and with the values that every configuration has."""
        data = dict(config_dict)
        data.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
        if "distributed_type" not in data:
            kinds = ", ".join(DistributedType.list())
            raise ConfigError(f"The file has no distributed_type. Write one of {kinds}.")
        half = data.pop("fp16", None)
        if "mixed_precision" not in data:
            data["mixed_precision"] = "fp16" if half else None
        elif data["mixed_precision"] is False:  # YAML reads a bare no as false
            data["mixed_precision"] = "no"
        data.setdefault("use_cpu", False)
        data.setdefault("debug", False)
        backend = data.pop("dynamo_backend", None)
        if backend is not None:
            block = {} if _word(backend) == "NO" else {"dynamo_backend": backend}
            data["dynamo_config"] = {**block, **(data.get("dynamo_config") or {})}
        return data

    @classmethod
    def _from_data(cls, data: dict[str, Any], path: str | os.PathLike[str]) -> Any:
        """Return the configuration that a file holds; name the keys that have no effect, and refuse those that nobody knows."""
        known = {field.name for field in fields(cls)}
        data = cls.process_config(data)
        for key in [key for key in data if key in _FORMER_KEYS and key not in known]:
            warnings.warn(f"{path}: the key {key} has no effect: {_FORMER_KEYS[key]}.", stacklevel=4)
            del data[key]
        unknown = sorted(set(data) - known)
        if unknown:
            hints = [f"{key} (did you mean {near[0]}?)" if (near := nearest(key, known)) else key for key in unknown]
            raise ConfigError(f"{path} has keys that do not exist: {', '.join(hints)}. Mend them, or take them out.")
        return cls(**data)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str] | None = None) -> Any:
        """Return the configuration in a JSON file."""
        path = os.fspath(json_file or default_json_config_file)
        return cls._from_data(_read(path), path)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> Any:
        """Return the configuration in a YAML file."""
        path = os.fspath(yaml_file or default_yaml_config_file)
        return cls._from_data(_read(path), path)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON."""
        _write(json_file, json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the configuration as YAML."""
        import yaml

        _write(yaml_file, yaml.safe_dump(self.to_dict()))

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(_word(self.compute_environment))
        on_sagemaker = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        kinds: Any = SageMakerDistributedType if on_sagemaker else DistributedType
        given = _word(self.distributed_type)
        given = "XLA" if given == "TPU" else given  # the name until 0.27
        if given not in kinds.list():
            near = nearest(given, kinds.list())
            hint = f"Did you mean {near[0]}?" if near else f"Write one of {', '.join(kinds.list())}."
            raise ConfigError(f"distributed_type {given} does not exist. {hint}")
        self.distributed_type = kinds(given)
        if getattr(self, "dynamo_config", None) is None:
            self.dynamo_config: dict[str, Any] | None = {}


def _write(path: str | os.PathLike[str], text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """The configuration of this machine, or of this and others."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for block in ("fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config"):
            if getattr(self, block) is None:
                setattr(self, block, {})
        super().__post_init__()


@dataclass
class SageMakerConfig(BaseConfig):
    """The configuration of a SageMaker job. It can be read and written; launching it raises."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False
