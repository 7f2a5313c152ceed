"""`ParallelismConfig`: the sizes of the mesh as a script gives them, over `MeshSizes`.

A size that is not given comes from the configuration (`parallelism_config_dp_replicate_size` and the like), else it is 1; `dp_shard_size`
is what the other axes leave where a strategy shards. `resolve_mesh` returns the sizes of a run. This version runs `dp_replicate` and
`dp_shard`: a larger size of another axis is an error where it is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.config.resolve import for_worker
from slipstream.config.schema import Parallelism
from slipstream.errors import ConfigError
from slipstream.parallel.mesh import AXES, MeshSizes

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelismConfig", "get_model_tp_size", "model_has_dtensor", "resolve_mesh"]

_DATA_AXES = ("dp_replicate", "dp_shard")
_TITLES = {
    "tp": "tensor parallelism", "cp": "context parallelism", "sp": "sequence parallelism", "pp": "pipeline parallelism in training",
}
_HANDLERS = ("tp_handler", "cp_handler", "sp_handler", "cp_backend", "sp_backend")


@dataclass
class ParallelismConfig:
    """The sizes of the mesh of processes, for `Accelerator(parallelism_config=...)`.

    `dp_replicate_size` is the number of replicas, `dp_shard_size` the number of processes that share one; their product is the number of
    processes.

    >>> mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    >>> mesh.total_size, mesh.dp_dim_names, mesh.fsdp_dim_names
    (8, ['dp_replicate', 'dp_shard'], ['dp_replicate', 'dp_shard'])
    >>> print(mesh.mesh_sizes(8))
    8 processes = dp_replicate 2 x dp_shard 4
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int | None = None
    _completed_shards: int | None = field(default=None, init=False, repr=False, compare=False)
    """What `dp_shard_size` got because nobody gave it: a sharding strategy makes it what the replicas leave."""

    device_mesh: ClassVar[DeviceMesh | None] = None
    """The mesh that `build_device_mesh` made."""

    def __post_init__(self) -> None:
        section = for_worker().parallelism
        for axis in AXES:
            name = f"{axis}_size"
            if getattr(self, name) is None:
                configured = None if section.use_parallelism_config is False else getattr(section, f"parallelism_config_{name}", None)
                setattr(self, name, configured or 1)
                if axis == "dp_shard" and configured is None:
                    self._completed_shards = 1
        for name in _HANDLERS:
            if getattr(self, name) is not None:
                raise _axis_error(f"ParallelismConfig({name}=...)", name[:2])
        self._open_sizes()

    # -- sizes ----------------------------------------------------------------------------------------------------

    def _open_sizes(self, *, fill: bool = False) -> MeshSizes:
        """Return the sizes as given, checked; with `fill`, a `dp_shard_size` that nobody gave is open."""
        given: dict[str, Any] = {axis: getattr(self, f"{axis}_size") for axis in AXES}
        for axis, title in _TITLES.items():
            if given[axis] not in (1, None):
                raise _axis_error(f"ParallelismConfig({axis}_size={given[axis]!r})", axis, title)
        if fill and given["dp_shard"] == self._completed_shards and -1 not in given.values():
            given["dp_shard"] = -1
        return MeshSizes(**given)

    def mesh_sizes(self, world_size: int, *, sharded: bool = True) -> MeshSizes:
        """Return the sizes of all axes for `world_size` processes; raise a ConfigError with the arithmetic if they do not fit.

        A `dp_shard_size` that was not given becomes what the other axes leave, if the strategy shards; so does a size of -1.

        >>> config = ParallelismConfig(dp_replicate_size=2)
        >>> config.mesh_sizes(6).dp_shard, config.dp_shard_size, config.total_size
        (3, 3, 6)
        """
        sizes = self._open_sizes(fill=sharded).resolve(world_size)
        if self._completed_shards == self.dp_shard_size:
            self._completed_shards = sizes.dp_shard
        self.dp_replicate_size, self.dp_shard_size = sizes.dp_replicate, sizes.dp_shard
        return sizes

    @property
    def total_size(self) -> int:
        """The product of the sizes."""
        return self._open_sizes().total

    @property
    def data_parallel_size(self) -> int:
        """How many processes see different samples: replicas times shards."""
        return self._open_sizes().size("batch")

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes see the same samples: the product of the other sizes."""
        return self.total_size // self.data_parallel_size

    # -- names of axes --------------------------------------------------------------------------------------------

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes that are larger than 1."""
        return list(self._open_sizes().active)

    def _active(self, *names: str) -> list[str]:
        return [axis for axis in self._open_sizes().active if axis in names]

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes along which samples differ."""
        return self._active(*_DATA_AXES)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes along which samples are the same."""
        return self._active("tp", "cp", "sp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which parameters are sharded."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which the loss is averaged."""
        return self._active(*_DATA_AXES, "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of the mesh that fully_shard is given: replicas, and those that shard."""
        return self._active(*_DATA_AXES, "cp")

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one replica."""
        return bool(self._active("dp_replicate"))

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return bool(self._active("dp_shard"))

    @property
    def tp_enabled(self) -> bool:
        """Whether matrices are split between processes."""
        return bool(self._active("tp"))

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split between processes."""
        return bool(self._active("cp"))

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split between processes and attention heads exchanged for them."""
        return bool(self._active("sp"))

    # -- torch ----------------------------------------------------------------------------------------------------

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh over the open process group, and keep it as `device_mesh`."""
        self.device_mesh = self._open_sizes(fill=True).build(device_type)  # type: ignore[misc]
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh that was built; with `device_type`, build it if there is none, or one of another device."""
        if device_type is not None and (self.device_mesh is None or self.device_mesh.device_type != device_type):
            return self.build_device_mesh(device_type)
        return self.device_mesh

    def to_json(self) -> str:
        """Return the sizes as JSON.

        >>> json.loads(ParallelismConfig(dp_shard_size=2).to_json())["dp_shard_size"]
        2
        """
        return json.dumps({entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name.endswith("_size")})


def _axis_error(what: str, axis: str, title: str | None = None) -> ConfigError:
    return ConfigError(
        f"{what} asks for {title or _TITLES[axis]}, which is not available yet: this version runs dp_replicate and dp_shard.\n"
        "Leave it out, and write for example ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)."
    )


def resolve_mesh(
    given: ParallelismConfig | None, section: Parallelism, *, world_size: int, local_world_size: int, sharded: bool, hybrid: bool = False
) -> MeshSizes:
    """Return the sizes of the mesh of a run: those that were given, else one axis over all processes.

    `sharded` says whether the strategy shards parameters; `hybrid` asks for shards within a machine and replicas across machines.

    >>> print(resolve_mesh(None, Parallelism(), world_size=8, local_world_size=4, sharded=True, hybrid=True))
    8 processes = dp_replicate 2 x dp_shard 4
    """
    if given is None and section.use_parallelism_config is not False:
        configured = {f"{axis}_size": getattr(section, f"parallelism_config_{axis}_size", None) for axis in AXES}
        if any((size or 1) > 1 for size in configured.values()):
            given = ParallelismConfig(**configured)
    if given is None or (given._completed_shards and given._open_sizes() == MeshSizes()):
        if not sharded:
            return MeshSizes(dp_replicate=world_size)
        shards = local_world_size if hybrid else world_size
        return MeshSizes(dp_replicate=-1, dp_shard=shards).resolve(world_size)
    sizes_of_run = given.mesh_sizes(world_size, sharded=sharded)
    if not sharded and sizes_of_run.dp_shard > 1:
        raise ConfigError(
            f"The mesh {sizes_of_run} shards parameters (dp_shard), but no strategy that shards was asked for.\n"
            "Pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) or --use_fsdp, or make dp_shard_size 1."
        )
    return sizes_of_run


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a parameter of the model is a DTensor: sharded or split between processes."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return over how many processes transformers split the model (`tp_plan`), or None.

    >>> import torch
    >>> get_model_tp_size(torch.nn.Linear(2, 2)) is None
    True
    """
    told: Any = getattr(getattr(model, "config", None), "distributed_config", None)  # transformers 5; a dict if it was read from JSON
    sizes = [getattr(model, name, None) for name in ("tp_size", "_tp_size")]
    sizes.append(told.get("tp_size") if isinstance(told, dict) else getattr(told, "tp_size", None))
    return next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool)), None)
