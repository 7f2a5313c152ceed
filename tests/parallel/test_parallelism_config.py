"""`ParallelismConfig`: sizes from every source, the arithmetic in messages, and the mesh of torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import ConfigError, ParallelismConfig
from slipstream.config import resolve
from slipstream.config.schema import Parallelism
from slipstream.parallel.mesh import MeshSizes
from slipstream.parallel.parallelism_config import resolve_mesh
from slipstream.utils import get_model_tp_size, model_has_dtensor, patch_environment


@pytest.mark.parametrize(
    ("replicas", "shards", "data", "fsdp"),
    [
        (1, 1, [], []),
        (2, 1, ["dp_replicate"], ["dp_replicate"]),
        (1, 4, ["dp_shard"], ["dp_shard"]),
        (2, 4, ["dp_replicate", "dp_shard"], ["dp_replicate", "dp_shard"]),
    ],
)
def test_properties(replicas: int, shards: int, data: list[str], fsdp: list[str]) -> None:
    """The properties are those of a mesh of these sizes."""
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (replicas * shards, replicas * shards, 1)
    assert (config.dp_dim_names, config.fsdp_dim_names, config.active_mesh_dims, config.dp_cp_dim_names) == (data, fsdp, data, data)
    assert (config.non_dp_dim_names, config.dp_shard_cp_dim_names) == ([], [name for name in data if name == "dp_shard"])
    assert (config.dp_replicate_enabled, config.dp_shard_enabled) == (replicas > 1, shards > 1)
    assert (config.tp_enabled, config.cp_enabled, config.sp_enabled) == (False, False, False)
    assert config.mesh_sizes(replicas * shards) == MeshSizes(dp_replicate=replicas, dp_shard=shards)
    assert json.loads(config.to_json()) == {
        "dp_replicate_size": replicas, "dp_shard_size": shards, "tp_size": 1, "cp_size": 1, "sp_size": 1, "pp_size": 1,
    }  # fmt: skip


def test_unset_sizes() -> None:
    """A size that nobody gave is 1; the shards are what the replicas leave, where the strategy shards."""
    config = ParallelismConfig(dp_replicate_size=2)
    assert (config.dp_shard_size, config.tp_size, config.pp_size) == (1, 1, 1)
    with pytest.raises(ConfigError, match="dp_replicate 2 is for 2 processes, but there are 6"):
        config.mesh_sizes(6, sharded=False)
    for world in (6, 2, 8):  # the same object on another number of processes
        assert config.mesh_sizes(world) == MeshSizes(dp_replicate=2, dp_shard=world // 2)
        assert (config.total_size, config.dp_shard_enabled) == (world, world > 2)
    assert ParallelismConfig(dp_shard_size=-1).mesh_sizes(6) == MeshSizes(dp_shard=6)
    assert ParallelismConfig(dp_replicate_size=-1).mesh_sizes(6) == MeshSizes(dp_replicate=6)


def test_sizes_from_variables() -> None:
    """Sizes that the script does not give come from the variables, unless they are turned off; an argument is stronger."""
    with patch_environment(parallelism_config_dp_replicate_size=2, slipstream_parallelism_config_dp_shard_size=3):
        assert ParallelismConfig().mesh_sizes(6) == MeshSizes(dp_replicate=2, dp_shard=3)
        assert ParallelismConfig(dp_replicate_size=1).total_size == 3
        with patch_environment(accelerate_use_parallelism_config="false"):
            assert ParallelismConfig().total_size == 1


@pytest.mark.parametrize(
    ("sizes", "world", "why"),
    [
        ({"dp_shard_size": 3}, 4, "dp_shard 3 is for 3 processes, but there are 4"),
        ({"dp_replicate_size": 3}, 4, "dp_shard would be 4 / 3, which is no whole number"),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, 4, "is for 8 processes, but there are 4.*dp_shard=-1 .or 2. would fit"),
        ({"dp_replicate_size": 8}, 4, "dp_shard would be 4 / 8"),
    ],
)
def test_arithmetic_in_message(sizes: dict[str, int], world: int, why: str) -> None:
    """Sizes that do not multiply to the number of processes are an error with the numbers."""
    with pytest.raises(ConfigError, match=why):
        ParallelismConfig(**sizes).mesh_sizes(world)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"dp_shard_size": 0}, "dp_shard was given the size 0"),
        ({"dp_shard_size": "two"}, "dp_shard was given the size 'two'"),
        ({"dp_shard_size": -1, "dp_replicate_size": -1}, "only one can be what is left"),
        ({"tp_size": 2}, r"tp_size=2.* asks for tensor parallelism.*this version runs dp_replicate and dp_shard"),
        ({"cp_size": 2}, "context parallelism"),
        ({"sp_size": 4}, "sequence parallelism"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"cp_backend": "torch"}, "cp_backend=.*context parallelism"),
        ({"tp_handler": object()}, "tp_handler=.*tensor parallelism"),
    ],
)
def test_refused(arguments: dict[str, Any], why: str) -> None:
    """A size that is none, and an axis that does not run here, are refused where they are written."""
    with pytest.raises(ConfigError, match=why):
        ParallelismConfig(**arguments)


@pytest.mark.parametrize(
    ("given", "options", "sharded", "hybrid", "mesh"),
    [
        (None, {}, False, False, {"dp_replicate": 8}),
        (None, {}, True, False, {"dp_shard": 8}),
        (None, {}, True, True, {"dp_replicate": 2, "dp_shard": 4}),
        (None, {"dp_replicate_size": 4}, True, False, {"dp_replicate": 4, "dp_shard": 2}),
        (None, {"dp_replicate_size": 4}, True, True, {"dp_replicate": 4, "dp_shard": 2}),
        (None, {"dp_replicate_size": 4, "dp_shard_size": 2}, True, False, {"dp_replicate": 4, "dp_shard": 2}),
        ({"dp_replicate_size": 8, "dp_shard_size": 1}, {}, False, False, {"dp_replicate": 8}),
        ({"dp_replicate_size": 2}, {"dp_replicate_size": 4}, True, False, {"dp_replicate": 2, "dp_shard": 4}),
        (None, {"tp_size": 1}, False, False, {"dp_replicate": 8}),
        (None, {"dp_replicate_size": 1, "dp_shard_size": 1}, True, False, {"dp_shard": 8}),
        ({}, {}, False, False, {"dp_replicate": 8}),
        ({"dp_shard_size": -1}, {}, True, False, {"dp_shard": 8}),
        ({"dp_replicate_size": -1, "dp_shard_size": 2}, {}, True, True, {"dp_replicate": 4, "dp_shard": 2}),
        ({}, {}, True, True, {"dp_replicate": 2, "dp_shard": 4}),
    ],
)
def test_resolve_mesh(given: Any, options: dict[str, int], sharded: bool, hybrid: bool, mesh: dict[str, int]) -> None:
    """The mesh of a run: the argument, else the options, else one axis over all processes or the machines."""
    section = Parallelism(**{f"parallelism_config_{name}": size for name, size in options.items()})
    config = None if given is None else ParallelismConfig(**given)
    found = resolve_mesh(config, section, world_size=8, local_world_size=4, sharded=sharded, hybrid=hybrid)
    assert found == MeshSizes(**mesh)


def test_resolve_mesh_turned_off() -> None:
    """Sizes of a file do not count under --no_use_parallelism_config."""
    config = resolve(environ={"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3"}, flags={"use_parallelism_config": False})
    found = resolve_mesh(None, config.parallelism, world_size=4, local_world_size=4, sharded=True)
    assert found == MeshSizes(dp_shard=4)


def test_shards_without_strategy() -> None:
    """A mesh that shards, without a strategy that does, is refused with what to write."""
    with pytest.raises(ConfigError, match="no strategy that shards was asked for.\nPass Accelerator.fsdp_plugin="):
        resolve_mesh(ParallelismConfig(dp_shard_size=4), Parallelism(), world_size=4, local_world_size=4, sharded=False)


def test_hybrid_uneven_machines() -> None:
    """Machines that do not divide the processes are an error with the numbers."""
    with pytest.raises(ConfigError, match="dp_replicate would be 6 / 4"):
        resolve_mesh(None, Parallelism(), world_size=6, local_world_size=4, sharded=True, hybrid=True)


def test_device_mesh() -> None:
    """`build_device_mesh` lays the sizes over the open group, and `get_device_mesh` keeps what was built."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        config = ParallelismConfig(dp_replicate_size=2)
        assert config.get_device_mesh() is None
        mesh = config.get_device_mesh("cpu")
        assert mesh is not None
        assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("dp_replicate", "dp_shard"), (2, 4))
        assert config.get_device_mesh() is config.get_device_mesh("cpu") is config.device_mesh is mesh
        assert ParallelismConfig.device_mesh is None
    finally:
        torch.distributed.destroy_process_group()


def test_model_questions() -> None:
    """A plain model has no DTensor and no tensor parallelism; a size that transformers recorded is found."""
    model = nn.Linear(2, 2)
    assert (model_has_dtensor(model), get_model_tp_size(model)) == (False, None)
    model._tp_size = 4  # type: ignore[assignment]
    assert get_model_tp_size(model) == 4
