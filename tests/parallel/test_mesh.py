"""Sizes are arithmetic; torch's mesh, built over 64 fake ranks, agrees with it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch.distributed
from hypothesis import given, strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.parallel.mesh import AXES, USES, MeshSizes, describe_mesh

SIZES = st.builds(MeshSizes, **{axis: st.integers(1, 3) for axis in AXES})
NAMES = st.lists(st.sampled_from([*AXES, *USES]), min_size=1, max_size=3)
FULL = MeshSizes(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2)


@given(SIZES)
def test_coordinates_and_ranks(sizes: MeshSizes) -> None:
    """Coordinates and ranks are inverse and follow the grid."""
    grid = sizes.grid()
    for rank in range(sizes.total):
        here = sizes.coordinates(rank)
        assert sizes.rank_at(**here) == rank == grid[tuple(here[axis] for axis in AXES)]


@given(SIZES, NAMES)
def test_groups_and_peers(sizes: MeshSizes, names: list[str]) -> None:
    """Groups share out all ranks and peers are their members."""
    groups = sizes.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(sizes.total))
    assert {len(group) for group in groups} == {sizes.size(*names)}
    for group in groups[:3]:
        assert sizes.peers(group[-1], *names) == group


@given(SIZES, st.sampled_from(AXES))
def test_open_axis(sizes: MeshSizes, axis: str) -> None:
    """The open axis takes what is left."""
    known = {name: getattr(sizes, name) for name in AXES}
    assert MeshSizes(**{**known, axis: -1}).resolve(sizes.total) == sizes
    assert sizes.resolve(sizes.total) is sizes


@given(SIZES, st.integers(1, 64))
def test_wrong_world_size(sizes: MeshSizes, world: int) -> None:
    """Another number of processes is an error with both numbers."""
    if math.prod(sizes.shape) == world:
        return
    with pytest.raises(ConfigError, match=f"is for {sizes.total} processes, but there are {world}"):
        sizes.resolve(world)


def test_error_suggests_size() -> None:
    """The error says which size would fit."""
    with pytest.raises(ConfigError, match=r"dp_shard 4 x tp 2 is for 8 processes, but there are 6\. .*dp_shard=-1 \(or 3\) would fit"):
        MeshSizes(dp_shard=4, tp=2).resolve(6)


def test_open_axis_not_whole() -> None:
    """An open axis that would not be whole."""
    with pytest.raises(ConfigError, match=r"dp_shard would be 8 / 3.*multiple of 3"):
        MeshSizes(dp_shard=-1, tp=3).resolve(8)


@pytest.mark.parametrize("size", [0, -2, 1.0, "2", True, None])
def test_invalid_axis_size(size: object) -> None:
    """A size is a number from one or minus one."""
    with pytest.raises(ConfigError, match="axis tp was given the size"):
        MeshSizes(tp=size)  # type: ignore[arg-type]


def test_only_one_axis_can_be_open() -> None:
    with pytest.raises(ConfigError, match=r"\(dp_shard, tp\)"):
        MeshSizes(dp_shard=-1, tp=-1)


@pytest.mark.parametrize(
    "ask", [lambda mesh: mesh.total, lambda mesh: mesh.grid(), lambda mesh: mesh.coordinates(0), lambda mesh: mesh.active]
)
def test_unresolved_mesh(ask: object) -> None:
    """An open mesh has to be resolved first."""
    with pytest.raises(ConfigError, match="resolve"):
        ask(MeshSizes(dp_shard=-1))  # type: ignore[operator]


def test_rank_layout() -> None:
    """Neighbours along tp have consecutive ranks and pipeline stages are furthest apart."""
    assert FULL.peers(0, "tp") == (0, 1)
    assert FULL.peers(0, "pp") == (0, 32)


def test_the_grid_over_named_axes() -> None:
    assert MeshSizes(dp_shard=2, tp=3).grid("tp", "dp_shard").tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="leave out dp_shard"):
        MeshSizes(dp_shard=2, tp=3).grid("tp")


def test_printed_form() -> None:
    assert str(FULL) == "64 processes = pp 2 x dp_replicate 2 x dp_shard 4 x cp 2 x tp 2"
    assert str(MeshSizes()) == "1 processes = 1"
    assert str(MeshSizes(dp_shard=-1, tp=2)) == "dp_shard -1 x tp 2"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: FULL.size("dp"), "'dp' is not a mesh axis .*and not a use"),
        (lambda: FULL.coordinates(64), "no rank 64"),
        (lambda: FULL.rank_at(tp=2), "no position tp=2"),
        (lambda: FULL.rank_at(batch=0), "Name the axes"),
    ],
)
def test_wrong_questions(ask: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask()  # type: ignore[operator]


@pytest.fixture(params=[0, 13, 63])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=64)
    yield request.param
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sizes", [FULL, MeshSizes(dp_shard=64), MeshSizes(dp_replicate=8, sp=2, tp=4)], ids=str)
def test_torch_mesh_agrees(rank: int, sizes: MeshSizes) -> None:
    """Torch agrees about every axis and use."""
    mesh = sizes.build(CPU.type)
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (sizes.active, tuple(sizes.size(axis) for axis in sizes.active))
    for name in (*sizes.active, *(use for use in USES if sizes.size(use) > 1)):
        view = sizes.view(mesh, name)
        assert (view.mesh.tolist(), view.size()) == (list(sizes.peers(rank, name)), sizes.size(name))
        assert view.get_local_rank() == sizes.peers(rank, name).index(rank)


def test_build_resolves_open_axis(rank: int) -> None:
    """Building resolves the open axis with the open group."""
    mesh = MeshSizes(dp_shard=-1, tp=4).build(CPU.type)
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("dp_shard", "tp"), (16, 4))
    with pytest.raises(ConfigError, match="is for 2 processes, but there are 64"):
        MeshSizes(tp=2).build(CPU.type)


def test_view_twice(rank: int) -> None:
    """A view can be taken again without another group."""
    mesh = FULL.build(CPU.type)
    assert FULL.view(mesh, "loss") is FULL.view(mesh, "loss")


def test_no_view_of_size_one(rank: int) -> None:
    """A use of size one has no view."""
    sizes = MeshSizes(tp=64)
    with pytest.raises(ConfigError, match="batch has the size 1"):
        sizes.view(sizes.build(CPU.type), "batch")


def test_mesh_of_one_process() -> None:
    """A mesh of one process."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert MeshSizes().build(CPU.type).mesh.tolist() == [0]
    finally:
        torch.distributed.destroy_process_group()


@given(st.builds(MeshSizes, dp_replicate=st.integers(1, 6), dp_shard=st.integers(1, 6)), st.integers(1, 4), st.integers(0, 3))
def test_described_groups(sizes: MeshSizes, machines: int, machine: int) -> None:
    """What is said to stay within a machine does."""
    if sizes.total % machines or machine >= machines:
        return
    local = sizes.total // machines
    rows = describe_mesh(sizes, local, machine)
    axes = [f"{axis} {sizes.size(axis)}" for axis in sizes.active]
    assert [name for name, _ in rows if name[0] != " "] == ["sizes", *axes, "data parallel"]
    for axis in sizes.active:
        text = next(text for name, text in rows if name.startswith(axis))
        within = all(len({rank // local for rank in group}) == 1 for group in sizes.groups(axis))
        assert within == ("across machines" not in text)
        assert f"{len(sizes.groups(axis))} group" in text
