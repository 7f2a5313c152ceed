"""`ParallelismConfig`: the sizes of the mesh of processes.

All axes of Accelerate can be described, printed and built as a mesh. An Accelerator runs `dp_replicate` and `dp_shard`; given one of the
others it raises.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from accelerate._forwarding import forward_names
from accelerate._unsupported import raise_unsupported
from slipstream.errors import ConfigError
from slipstream.parallel.mesh import AXES, MeshSizes
from slipstream.parallel.parallelism_config import ParallelismConfig as _ParallelismConfig

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.dataclasses": """DeepSpeedSequenceParallelConfig DistributedType TorchContextParallelConfig
            TorchTensorParallelConfig""",
        "accelerate.utils.versions": "is_torch_version",
    },
)
__all__ = ["ParallelismConfig", *_forwarded]

_VARIABLE = "PARALLELISM_CONFIG_"
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_ENGINES = {"tp": "tensor_parallel", "cp": "context_parallel", "sp": "context_parallel"}
_FLATTENED = ("dp", "dp_shard_cp", "dp_cp")
"""The joined axes that a built mesh has besides its own."""


@dataclass
class ParallelismConfig(_ParallelismConfig):
    """The sizes of the mesh, for `Accelerator(parallelism_config=...)`; a size that is None is read from PARALLELISM_CONFIG_*.

    >>> ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)._get_mesh()
    (('dp_replicate', 'dp_shard'), (2, 4))
    """

    def __post_init__(self) -> None:
        from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig

        told = [axis for axis in _AXES if f"{_VARIABLE}{axis.upper()}_SIZE" in os.environ]
        for axis in told:
            if getattr(self, f"{axis}_size") is None:
                setattr(self, f"{axis}_size", int(os.environ[f"{_VARIABLE}{axis.upper()}_SIZE"]))
        backends = {name: getattr(self, name) or os.environ.get(f"{_VARIABLE}{name.upper()}") for name in ("cp_backend", "sp_backend")}
        handlers = {name: getattr(self, name) for name in ("tp_handler", "cp_handler", "sp_handler")}
        for name in (*backends, *handlers):
            setattr(self, name, None)
        self._complete_sizes(told)
        self._check_sizes()
        self.cp_backend = _choose("cp_backend", backends["cp_backend"], "torch")
        self.sp_backend = _choose("sp_backend", backends["sp_backend"], "deepspeed")
        kinds = {"tp": TorchTensorParallelConfig, "cp": TorchContextParallelConfig, "sp": DeepSpeedSequenceParallelConfig}
        for axis, kind in kinds.items():
            given = handlers[f"{axis}_handler"]
            setattr(self, f"{axis}_handler", kind() if given is None and getattr(self, f"{axis}_size") > 1 else given)

    def _complete_sizes(self, told: list[str]) -> None:
        """Give the sizes that nobody gave a value: that of the configuration, else 1."""
        if not any(axis in _ENGINES for axis in told):
            super().__post_init__()
            return
        if self.dp_shard_size is None:  # the configuration would refuse axes that can be described here
            self._completed_shards = 1
        for axis in AXES:
            if getattr(self, f"{axis}_size") is None:
                setattr(self, f"{axis}_size", 1)

    def _check_sizes(self) -> None:
        for axis in AXES:
            size = getattr(self, f"{axis}_size")
            if size is not None and size < 1 and not (axis == "dp_shard" and size == -1):
                raise ConfigError(f"ParallelismConfig({axis}_size={size}): a size is at least 1")
        if self.cp_size > 1 and self.sp_size > 1:
            raise ConfigError(f"ParallelismConfig(cp_size={self.cp_size}, sp_size={self.sp_size}): only one of them may be above 1")
        if (self.tp_size > 1 or self.cp_size > 1) and self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise ConfigError(
                f"ParallelismConfig(dp_replicate_size={self.dp_replicate_size}, tp_size={self.tp_size}, cp_size={self.cp_size}): replicas "
                "combine with tensor or context parallelism only where parameters are sharded too; write dp_shard_size above 1"
            )

    # -- sizes ----------------------------------------------------------------------------------------------------

    def _open_sizes(self, *, fill: bool = False) -> MeshSizes:
        """Return the sizes as given; the axes that Slipstream does not run are refused in `mesh_sizes`."""
        given: dict[str, Any] = {axis: getattr(self, f"{axis}_size") for axis in AXES}
        if fill and given["dp_shard"] == self._completed_shards and -1 not in given.values():
            given["dp_shard"] = -1
        return MeshSizes(**given)

    def mesh_sizes(self, world_size: int, *, sharded: bool = True) -> MeshSizes:
        """Return the sizes of all axes for `world_size` processes; raise for an axis that Slipstream does not run."""
        for axis, engine in _ENGINES.items():
            if getattr(self, f"{axis}_size") > 1:
                raise_unsupported(f"Accelerator(parallelism_config=ParallelismConfig({axis}_size={getattr(self, f'{axis}_size')}))", engine)
        return super().mesh_sizes(world_size, sharded=sharded)

    def _set_size(self, parallelism: str, size: int) -> None:
        """Set the size of one axis by its name."""
        if f"{parallelism}_size" not in self.__dataclass_fields__:
            raise ConfigError(f"{parallelism!r} is not an axis of the mesh: write one of {', '.join(AXES)}")
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{parallelism}_size={size!r}: a size is a whole number from 1")
        setattr(self, f"{parallelism}_size", size)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of the mesh that fully_shard is given, as `build_device_mesh` names them: replicas, and those that shard as one."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), *(["dp_shard_cp"] if self.dp_shard_cp_dim_names else [])]

    def _get_mesh(self) -> Any:
        """Return the names and the sizes of the axes that are larger than 1, in the order of the mesh; () for none."""
        order = {axis: place for place, axis in enumerate(("dp_replicate", "dp_shard", "cp", "sp", "tp"))}
        active = sorted(((axis, getattr(self, f"{axis}_size")) for axis in self.active_mesh_dims), key=lambda entry: order[entry[0]])
        return tuple(zip(*active, strict=True))

    def build_device_mesh(self, device_type: str) -> Any:
        """Build the mesh over the open process group, with the joined axes `dp`, `dp_shard_cp` and `dp_cp`, and keep it."""
        from torch.distributed import device_mesh

        found = self._get_mesh()
        if not found:
            return None
        names, shape = found
        mesh = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
        for joined in _FLATTENED:
            axes = getattr(self, f"{joined}_dim_names")
            if axes:
                mesh[axes]._flatten(joined)
        self.device_mesh = mesh  # type: ignore[misc]
        return mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Raise if the mesh does not fit the processes of an Accelerator."""
        self.mesh_sizes(accelerator.num_processes)


def _choose(name: str, given: str | None, known: str) -> str:
    if given not in (None, known):
        raise ConfigError(f"ParallelismConfig({name}={given!r}): write {known!r}, which is the only one")
    return known
