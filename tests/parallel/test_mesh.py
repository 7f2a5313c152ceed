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
from slipstream.parallel.mesh import AXES, USES, MeshSizes

SIZES = st.builds(MeshSizes, **{axis: st.integers(1, 3) for axis in AXES})
NAMES = st.lists(st.sampled_from([*AXES, *USES]), min_size=1, max_size=3)
FULL = MeshSizes(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2)


@given(SIZES)
def test_coordinates_and_ranks_are_inverse_and_follow_the_grid(sizes: MeshSizes) -> None:
    grid = sizes.grid()
    for rank in range(sizes.total):
        here = sizes.coordinates(rank)
        assert sizes.rank_at(**here) == rank == grid[tuple(here[axis] for axis in AXES)]


@given(SIZES, NAMES)
def test_groups_share_out_all_ranks_and_peers_are_their_members(sizes: MeshSizes, names: list[str]) -> None:
    groups = sizes.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(sizes.total))
    assert {len(group) for group in groups} == {sizes.size(*names)}
    for group in groups[:3]:
        assert sizes.peers(group[-1], *names) == group


@given(SIZES, st.sampled_from(AXES))
def test_the_open_axis_takes_what_is_left(sizes: MeshSizes, axis: str) -> None:
    known = {name: getattr(sizes, name) for name in AXES}
    assert MeshSizes(**{**known, axis: -1}).resolve(sizes.total) == sizes
    assert sizes.resolve(sizes.total) is sizes


@given(SIZES, st.integers(1, 64))
def test_another_number_of_processes_is_an_error_with_both_numbers(sizes: MeshSizes, world: int) -> None:
    if math.prod(sizes.shape) == world:
        return
    with pytest.raises(ConfigError, match=f"is for {sizes.total} processes, but there are {world}"):
        sizes.resolve(world)


def test_the_error_says_which_size_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"dp_shard 4 x tp 2 is for 8 processes, but there are 6\. .*dp_shard=-1 \(or 3\) would fit"):
        MeshSizes(dp_shard=4, tp=2).resolve(6)


def test_an_open_axis_that_would_not_be_whole() -> None:
    with pytest.raises(ConfigError, match=r"dp_shard would be 8 / 3.*multiple of 3"):
        MeshSizes(dp_shard=-1, tp=3).resolve(8)


@pytest.mark.parametrize("size", [0, -2, 1.0, "2", True, None])
def test_a_size_is_a_number_from_one_or_minus_one(size: object) -> None:
    with pytest.raises(ConfigError, match="axis tp was given the size"):
        MeshSizes(tp=size)  # type: ignore[arg-type]


def test_only_one_axis_can_be_open() -> None:
    with pytest.raises(ConfigError, match=r"\(dp_shard, tp\)"):
        MeshSizes(dp_shard=-1, tp=-1)


@pytest.mark.parametrize(
    "ask", [lambda mesh: mesh.total, lambda mesh: mesh.grid(), lambda mesh: mesh.coordinates(0), lambda mesh: mesh.active]
)
def test_an_open_mesh_has_to_be_resolved_first(ask: object) -> None:
    with pytest.raises(ConfigError, match="resolve"):
        ask(MeshSizes(dp_shard=-1))  # type: ignore[operator]


def test_neighbours_along_tp_have_consecutive_ranks_and_pipeline_stages_are_furthest_apart() -> None:
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
def test_torch_agrees_about_every_axis_and_use(rank: int, sizes: MeshSizes) -> None:
    mesh = sizes.build(CPU.type)
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (sizes.active, tuple(sizes.size(axis) for axis in sizes.active))
    for name in (*sizes.active, *(use for use in USES if sizes.size(use) > 1)):
        view = sizes.view(mesh, name)
        assert (view.mesh.tolist(), view.size()) == (list(sizes.peers(rank, name)), sizes.size(name))
        assert view.get_local_rank() == sizes.peers(rank, name).index(rank)


def test_building_resolves_the_open_axis_with_the_open_group(rank: int) -> None:
    mesh = MeshSizes(dp_shard=-1, tp=4).build(CPU.type)
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("dp_shard", "tp"), (16, 4))
    with pytest.raises(ConfigError, match="is for 2 processes, but there are 64"):
        MeshSizes(tp=2).build(CPU.type)


def test_a_view_can_be_taken_again_without_another_group(rank: int) -> None:
    mesh = FULL.build(CPU.type)
    assert FULL.view(mesh, "loss") is FULL.view(mesh, "loss")


def test_a_use_of_size_one_has_no_view(rank: int) -> None:
    sizes = MeshSizes(tp=64)
    with pytest.raises(ConfigError, match="batch has the size 1"):
        sizes.view(sizes.build(CPU.type), "batch")


def test_a_mesh_of_one_process() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert MeshSizes().build(CPU.type).mesh.tolist() == [0]
    finally:
        torch.distributed.destroy_process_group()
