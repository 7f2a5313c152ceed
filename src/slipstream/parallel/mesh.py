"""The sizes of the six mesh axes, and views of them; nothing is applied here.

Axes from the outermost: `pp`, `dp_replicate`, `dp_shard`, `cp`, `sp`, `tp`; ranks are numbered along the last one first, so that ranks
that communicate most are neighbours. Code asks for uses (`USES`) rather than axes: `batch` ranks see different samples, `loss` ranks see
different tokens and average their loss, `fsdp` ranks hold different shards of one copy of the parameters. Sizes that do not multiply to
the number of processes are an error that shows the numbers. All but `build` and `view` is arithmetic without processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import numpy
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "USES", "MeshSizes", "describe_mesh"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Outermost first: neighbours along the last axis have consecutive ranks."""

USES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("dp_replicate", "dp_shard"),
        "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
        "fsdp": ("dp_shard", "cp", "sp"),
    }
)
"""What the axes are for. A use with no axis larger than one is a group of one process."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The size of every axis; one may be -1, which means whatever is left of the number of processes.

    >>> sizes = MeshSizes(dp_shard=-1, tp=2).resolve(8)
    >>> print(sizes)
    8 processes = dp_shard 4 x tp 2
    >>> sizes.coordinates(5)["dp_shard"], sizes.peers(5, "tp"), sizes.peers(5, "fsdp")
    (2, (4, 5), (1, 3, 5, 7))
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self._sizes().items():
            if type(size) is not int or (size < 1 and size != -1):
                raise ConfigError(
                    f"The mesh axis {axis} was given the size {size!r}; it has to be a number from 1, or -1 for what is left."
                )
        free = [axis for axis, size in self._sizes().items() if size == -1]
        if len(free) > 1:
            raise ConfigError(
                f"Several mesh axes have the size -1 ({', '.join(free)}), but only one can be what is left. Give the others a number."
            )

    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def _text(self) -> str:
        named = [f"{axis} {size}" for axis, size in self._sizes().items() if size != 1]
        return " x ".join(named) or "1"

    def __str__(self) -> str:
        return f"{self.total} processes = {self._text()}" if self.is_resolved else self._text()

    # Sizes

    @property
    def is_resolved(self) -> bool:
        """No axis is left open."""
        return -1 not in self._sizes().values()

    def resolve(self, world_size: int) -> MeshSizes:
        """Return the same mesh with every size known; their product is `world_size`."""
        free = next((axis for axis, size in self._sizes().items() if size == -1), None)
        fixed = math.prod(size for size in self._sizes().values() if size != -1)
        if free is not None and world_size % fixed == 0 and world_size >= fixed:
            return replace(self, **{free: world_size // fixed})
        if free is None and fixed == world_size:
            return self
        raise ConfigError(self._misfit(free, fixed, world_size))

    def _misfit(self, free: str | None, fixed: int, world_size: int) -> str:
        if free is not None:
            return (
                f"The mesh {self._text()} cannot be laid over {world_size} processes: {free} would be {world_size} / {fixed}, which is no "
                f"whole number. Start a multiple of {fixed} processes, or change the other sizes."
            )
        advice = f"Start {fixed} processes, or change the sizes"
        for axis in ("dp_shard", "dp_replicate"):
            others = fixed // self._sizes()[axis]
            if world_size % others == 0:
                advice += f"; {axis}=-1 (or {world_size // others}) would fit"
                break
        return f"The mesh {self._text()} is for {fixed} processes, but there are {world_size}. {advice}."

    @property
    def total(self) -> int:
        """The number of processes of the mesh."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        if not self.is_resolved:
            raise ConfigError(f"The mesh {self._text()} has an open axis (-1). Call resolve(world_size) first.")
        return tuple(self._sizes().values())

    @property
    def active(self) -> tuple[str, ...]:
        """The axes that are larger than one."""
        return tuple(axis for axis, size in zip(AXES, self.shape, strict=True) if size > 1)

    def axes(self, *names: str) -> tuple[str, ...]:
        """Return the axes that these names of axes or uses stand for, in the order of `AXES`."""
        wanted: set[str] = set()
        for name in names:
            if name not in AXES and name not in USES:
                raise ConfigError(f"{name!r} is not a mesh axis ({', '.join(AXES)}) and not a use of axes ({', '.join(USES)}).")
            wanted.update(USES.get(name, (name,)))
        return tuple(axis for axis in AXES if axis in wanted)

    def size(self, *names: str) -> int:
        """Return how many processes there are along these axes or uses together.

        >>> MeshSizes(dp_replicate=2, dp_shard=4, cp=2).size("loss")
        16
        """
        wanted = self.axes(*names)
        return math.prod(size for axis, size in zip(AXES, self.shape, strict=True) if axis in wanted)

    # Views

    def grid(self, *names: str) -> numpy.ndarray[Any, Any]:
        """Return the ranks as an array with one dimension per axis: all six, or the named ones if the others have the size 1.

        >>> MeshSizes(dp_shard=2, tp=4).grid("dp_shard", "tp").tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        import numpy

        wanted = self.axes(*names) if names else AXES
        hidden = [axis for axis in self.active if axis not in wanted]
        if hidden:
            raise ConfigError(
                f"A grid over {', '.join(wanted)} would leave out {', '.join(hidden)} of the mesh {self._text()}. Name these too."
            )
        return numpy.arange(self.total).reshape([self._sizes()[axis] for axis in wanted])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank sits along each axis."""
        self._check_rank(rank)
        position: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, position[axis] = divmod(rank, size)
        return {axis: position[axis] for axis in AXES}

    def rank_at(self, **position: int) -> int:
        """Return the rank at these coordinates; axes that are not named count as 0."""
        rank = 0
        for axis, size in zip(AXES, self.shape, strict=True):
            at = position.pop(axis, 0)
            if not 0 <= at < size:
                raise ConfigError(f"The mesh {self._text()} has no position {axis}={at}: that axis goes from 0 to {size - 1}.")
            rank = rank * size + at
        if position:
            self.axes(*position)
            raise ConfigError(f"{', '.join(position)} is a use of several axes, not a coordinate. Name the axes.")
        return rank

    def peers(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along these axes or uses, itself included: the members of its group."""
        here, moving = self.coordinates(rank), self.axes(*names)
        positions = product(*(range(self.size(axis)) for axis in moving))
        return tuple(self.rank_at(**{**here, **dict(zip(moving, position, strict=True))}) for position in positions)

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes or uses; every rank is in exactly one.

        >>> MeshSizes(dp_shard=2, tp=2).groups("tp")
        ((0, 1), (2, 3))
        """
        moving = self.axes(*names)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.total):
            here = self.coordinates(rank)
            members.setdefault(tuple(here[axis] for axis in AXES if axis not in moving), []).append(rank)
        return tuple(map(tuple, members.values()))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.total:
            raise ConfigError(f"There is no rank {rank} in the mesh {self._text()}: ranks go from 0 to {self.total - 1}.")

    # torch

    def build(self, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
        """Build torch's DeviceMesh of the active axes over the open process group; a mesh of one process has the single axis dp_shard.

        Collectives of the mesh end after `timeout`. `view` gives the part of it that a use needs.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        sizes = self.resolve(dist.get_world_size())
        axes = sizes.active or ("dp_shard",)
        if timeout is None or len(axes) == 1:
            return init_device_mesh(device_type, tuple(sizes.size(axis) for axis in axes), mesh_dim_names=axes)
        rank, groups = dist.get_rank(), []
        for axis in axes:  # every rank has to open every group, in the same order
            opened = [(members, dist.new_group(list(members), timeout=timeout)) for members in sizes.groups(axis)]
            groups.append(next(group for members, group in opened if rank in members))
        grid = torch.tensor(sizes.grid(*axes).tolist())
        return DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=axes)

    def view(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        """Return the one-dimensional mesh of an axis or use, for a mesh that `build` made. Every process has to call it, in the same order.

        An axis or use of size one has no view: ask `size(name) > 1` first.
        """
        inside = tuple(axis for axis in self.axes(name) if axis in (mesh.mesh_dim_names or ()))
        if not inside:
            raise ConfigError(f"{name} has the size 1 in the mesh {self._text()}, so there is no group of processes for it.")
        # The flat view is handed out, not looked up by name in the root: torch is about to stop answering that.
        # torch internals: `_flatten` (torch 2.13) has no public name yet. tests/parallel/test_mesh.py notices a change.
        return mesh[inside[0]] if len(inside) == 1 else mesh[inside]._flatten(name)


_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "pp": "stages of the model",
        "dp_replicate": "copies of the shards, which average their gradients",
        "dp_shard": "shards of one copy of the model",
        "cp": "parts of a sequence",
        "sp": "parts of a sequence",
        "tp": "parts of each matrix",
    }
)
_SHOWN_GROUPS = 4


def describe_mesh(sizes: MeshSizes, local_processes: int, machine_rank: int = 0) -> list[tuple[str, str]]:
    """Return rows of a table about a mesh: its axes, the groups that ranks of one machine are in, and the global batch.

    Ranks of a machine are consecutive.

    >>> for row in describe_mesh(MeshSizes(dp_replicate=2, dp_shard=4), 4):
    ...     print("%s: %s" % row)
    sizes: 8 processes = dp_replicate 2 x dp_shard 4, 4 on each of 2 machines
    dp_replicate 2: copies of the shards, which average their gradients; 4 groups of 2 ranks across machines
      of machine 0: 0 4 | 1 5 | 2 6 | 3 7
    dp_shard 4: shards of one copy of the model; 2 groups of 4 ranks, each within a machine
      of machine 0: 0-3
    data parallel: 8 processes read different samples: the global batch is 8 x the batch size of a process
    """
    machines = math.ceil(sizes.total / local_processes)
    local = range(machine_rank * local_processes, min((machine_rank + 1) * local_processes, sizes.total))
    rows = [("sizes", f"{sizes}, {local_processes} on {f'each of {machines} machines' if machines > 1 else 'one machine'}")]
    for axis in sizes.active:
        groups = tuple(dict.fromkeys(sizes.peers(rank, axis) for rank in local))
        length = sizes.size(axis)
        stride = groups[0][1] - groups[0][0]
        # a group lies within a machine if the ranks that it spans fit into one, and no machine ends inside of it
        within = local_processes % (stride * length) == 0 or machines == 1
        where = ("" if machines == 1 else ", each within a machine") if within else " across machines"
        count = sizes.total // length
        number = f"{count} {'group' if count == 1 else 'groups'} of {length} ranks"
        shown = " | ".join(_compress(group) for group in groups[:_SHOWN_GROUPS])
        more = f" | ... ({len(groups)} in all)" if len(groups) > _SHOWN_GROUPS else ""
        rows += [(f"{axis} {length}", f"{_MEANINGS[axis]}; {number}{where}"), (f"  of machine {machine_rank}", shown + more)]
    batch = sizes.size("batch")
    readers = f"{batch} processes read different samples" if batch == sizes.total else f"{batch} groups of processes read different samples"
    return [*rows, ("data parallel", f"{readers}: the global batch is {batch} x the batch size of a process")]


def _compress(ranks: tuple[int, ...]) -> str:
    """Return the ranks of a group, which are equally far apart, in a few characters.

    >>> _compress((0, 1, 2, 3)), _compress((0, 8)), _compress(tuple(range(0, 1024, 8)))
    ('0-3', '0 8', '0 8 16 ... 1016')
    """
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks)) if len(ranks) <= _SHOWN_GROUPS else f"{' '.join(map(str, ranks[:3]))} ... {ranks[-1]}"
