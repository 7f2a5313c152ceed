"""Bytes that each rank holds in sharded training, by arithmetic: nothing is allocated, and torch is not imported.

`fully_shard` cuts dimension 0 of a parameter into chunks of ceil(rows / shards) rows. Every rank stores a whole chunk, the last ones with
padding, for its parameters and gradients; optimizer states have no padding. A parameter without dimensions and one of an ignored module
are whole on every rank. Before a block runs, all its chunks are gathered in the dtype that it computes in. `tests/parallel` compares the
figures with what `fully_shard` holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from slipstream.devices.memory import convert_bytes
from slipstream.parallel.mesh import MeshSizes

if TYPE_CHECKING:
    import torch

    from slipstream.parallel.wrap_policy import BlockPlan

__all__ = ["ParameterSize", "RankSizes", "ShardSizes", "StateSize", "describe_shard_sizes", "measure_shard_sizes"]


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """One parameter: `width` is the bytes of an element as it is stored, `gathered` those of an element as it is computed with."""

    name: str
    shape: tuple[int, ...]
    width: int
    gathered: int
    trainable: bool = True

    def local_shape(self, shards: int, index: int) -> tuple[int, ...]:
        """Return the shape of one of the shards.

        >>> [ParameterSize("weight", (5, 3), 4, 4).local_shape(4, index)[0] for index in range(4)]
        [2, 2, 1, 0]
        """
        if not self.shape:
            return ()
        chunk = math.ceil(self.shape[0] / shards)
        return (max(0, min(chunk, self.shape[0] - index * chunk)), *self.shape[1:])

    def padded(self, shards: int) -> int:
        """Return the elements that every rank stores."""
        return math.prod(self.local_shape(shards, 0))


StateSize = Callable[[ParameterSize, Sequence[int]], "int | None"]
"""Bytes of an optimizer's states for a parameter, of which a rank holds the given shape; None if that is unknown."""


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Bytes that one rank holds."""

    parameters: int
    gradients: int
    optimizer: int | None
    """None: the optimizer is not known."""
    buffers: int
    padding: int
    """The part of `parameters` that only makes the shards equally large."""

    @property
    def persistent(self) -> int:
        """What is held all the time, optimizer states from the first update on."""
        return self.parameters + self.gradients + (self.optimizer or 0) + self.buffers


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """Bytes of a model that is sharded in blocks over a mesh.

    >>> weight = ParameterSize("up.weight", (6, 2), 4, 2)
    >>> sizes = ShardSizes(blocks={"up": [weight]}, mesh=MeshSizes(dp_shard=4), state_size=lambda parameter, shape: 8 * math.prod(shape))
    >>> sizes.on_rank(0).optimizer, sizes.on_rank(3).optimizer, sizes.on_rank(3).parameters, sizes.gathers
    (32, 0, 16, {'up': 32})
    """

    blocks: Mapping[str, Sequence[ParameterSize]]
    """The parameters of each block; "" is the root."""
    mesh: MeshSizes
    state_size: StateSize
    whole: Sequence[ParameterSize] = ()
    """Parameters of ignored modules."""
    buffers: int = 0
    reduced: int | None = None
    """Bytes of an element of a gradient that is reduced; None: as it is computed."""
    reshard_after_forward: bool | int = True
    cpu_offload: bool = False
    """Whether the host holds what is persistent, and the device what is gathered; `peak` is that of the device."""

    @property
    def shards(self) -> int:
        """How many ranks hold one copy of the parameters."""
        return self.mesh.size("fsdp")

    def _sharded(self, block: str) -> list[ParameterSize]:
        return [parameter for parameter in self.blocks[block] if parameter.shape]

    def _whole(self) -> Iterator[ParameterSize]:
        yield from self.whole
        for parameters in self.blocks.values():
            yield from (parameter for parameter in parameters if not parameter.shape)

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks that hold most and least of the first copy of the parameters."""
        group = self.mesh.peers(0, "fsdp")
        return group[0], group[-1]

    def on_rank(self, rank: int) -> RankSizes:
        """Return what one rank holds. The first rank of a copy holds the most."""
        index = self.mesh.peers(rank, "fsdp").index(rank)
        parameters = gradients = states = padding = 0
        known = True
        for parameter, shards in [
            *((parameter, self.shards) for block in self.blocks for parameter in self._sharded(block)),
            *((parameter, 1) for parameter in self._whole()),
        ]:
            shape = parameter.local_shape(shards, index if shards > 1 else 0)
            held = parameter.padded(shards) * parameter.width
            parameters += held
            padding += held - math.prod(shape) * parameter.width
            if parameter.trainable:
                gradients += held
                state = self.state_size(parameter, shape) if math.prod(shape) else 0
                known = known and state is not None
                states += state or 0
        return RankSizes(
            parameters=parameters, gradients=gradients, optimizer=states if known else None, buffers=self.buffers, padding=padding
        )

    @property
    def gathers(self) -> dict[str, int]:
        """Bytes of the all-gather of each block. A rank that holds everything gathers nothing."""
        if self.shards == 1:
            return dict.fromkeys(self.blocks, 0)
        return {
            block: sum(parameter.padded(self.shards) * self.shards * parameter.gathered for parameter in self._sharded(block))
            for block in self.blocks
        }

    @property
    def largest_gather(self) -> tuple[str, int]:
        """The block whose all-gather is the largest, and its bytes."""
        return max(self.gathers.items(), key=lambda item: item[1], default=("", 0))

    def _gradients(self, block: str) -> tuple[int, int]:
        """Return the bytes of the whole gradients of a block as they are computed, and as they are reduced."""
        if self.shards == 1:
            return 0, 0
        trained = [parameter for parameter in self._sharded(block) if parameter.trainable]
        computed = sum(math.prod(parameter.shape) * parameter.gathered for parameter in trained)
        return computed, sum(parameter.padded(self.shards) * self.shards * (self.reduced or parameter.gathered) for parameter in trained)

    @property
    def accumulated_gradients(self) -> int:
        """Bytes of whole gradients that a rank keeps while it accumulates without communication."""
        return sum(self._gradients(block)[0] for block in self.blocks)

    def peak(self, rank: int) -> int:
        """Return the most that a rank holds in one step of training, without activations.

        The root stays gathered, and its gradients wait for the end of backward. On top of that comes the largest of three moments:
        a block is gathered in forward, while the buffer of the one before is still there; a block has its whole gradients in backward,
        while the next is gathered in advance and the gradients of the one before are reduced; gradients are reduced (gloo copies them).
        """
        sizes = self.gathers
        root = sizes.pop("", 0)
        whole, reduced = self._gradients("") if "" in self.blocks else (0, 0)
        moments = [2 * reduced + reduced // self.shards - whole, reduced]
        gradients = {block: self._gradients(block) for block in sizes}
        for block, size in sizes.items():
            others = [other for other in sizes if other != block]
            neighbour = max((sizes[other] for other in others), default=root)
            before = max((gradients[other][1] for other in others), default=0)
            ahead = 0 if self.reshard_after_forward is False or not others else neighbour
            computed, reducing = gradients[block]
            kept = self._kept_after_forward(sum(sizes[other] for other in others))
            own_too = 0 if isinstance(self.reshard_after_forward, bool) else self._kept_after_forward(sum(sizes.values()))
            moments += [
                max(kept, own_too) + 2 * size + neighbour,
                kept + size + ahead + computed + before,
                kept + ahead + 2 * reducing + reducing // self.shards,
            ]
        held = self.on_rank(rank)
        return (held.buffers if self.cpu_offload else held.persistent) + root + whole + max(moments)

    def _kept_after_forward(self, gathered: int) -> int:
        """Return what of gathered blocks stays in memory between forward and backward."""
        if isinstance(self.reshard_after_forward, bool):
            return 0 if self.reshard_after_forward else gathered
        return gathered // self.reshard_after_forward


# A model


class _ShardOptions(Protocol):
    """What the sizes depend on among the options of sharding."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def reshard_after_forward(self) -> bool | int: ...
    @property
    def cpu_offload(self) -> bool: ...


def measure_shard_sizes(
    model: torch.nn.Module, plan: BlockPlan, options: _ShardOptions, mesh: MeshSizes, optimizer: Any = None
) -> ShardSizes:
    """Return the bytes that the ranks of a mesh will hold of a model that is not sharded yet; it may be on the meta device.

    optimizer: one, or several, with the parameters of the model. Without one no states are counted.
    """
    from slipstream.parallel.wrap_policy import group_parameters

    def size_of(name: str, parameter: torch.nn.Parameter) -> ParameterSize:
        width = parameter.element_size()
        dtype = options.param_dtype if parameter.is_floating_point() else None
        return ParameterSize(name, tuple(parameter.shape), width, dtype.itemsize if dtype else width, parameter.requires_grad)

    groups = group_parameters(model, plan)
    sizes = {block: [size_of(name, parameter) for name, parameter in parameters.items()] for block, parameters in groups.items()}
    states = _count_states(_list_optimizers(optimizer))
    counts = {name: states.get(id(parameter), 0) for parameters in groups.values() for name, parameter in parameters.items()}

    def state_size(parameter: ParameterSize, shape: Sequence[int]) -> int | None:
        count = counts[parameter.name]
        return None if count is None else count * math.prod(shape) * parameter.width

    return ShardSizes(
        blocks={block: parameters for block, parameters in sizes.items() if block is not None},
        mesh=mesh,
        state_size=state_size,
        whole=sizes[None],
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        reduced=options.reduce_dtype.itemsize if options.reduce_dtype else None,
        reshard_after_forward=options.reshard_after_forward,
        cpu_offload=options.cpu_offload,
    )


def describe_shard_sizes(model: torch.nn.Module, plan: BlockPlan, options: _ShardOptions, mesh: MeshSizes, optimizer: Any = None) -> str:
    """Return what each rank will hold of a model, as text for a log. The arguments are those of `measure_shard_sizes`."""
    sizes = measure_shard_sizes(model, plan, options, mesh, optimizer)
    optimizers = " and ".join(dict.fromkeys(type(each).__name__ for each in _list_optimizers(optimizer)))
    count = len(plan.blocks)
    lines = [
        f"{type(model).__name__} is sharded over {sizes.shards} ranks ({mesh}), in {count} {'block' if count == 1 else 'blocks'} "
        f"and the root: {plan.reason}."
    ]
    first, last = sizes.ends
    most, least = sizes.on_rank(first), sizes.on_rank(last)
    for rank, held in [(first, most)] if most == least else [(first, most), (last, least)]:
        who = "Each rank" if most == least else f"Rank {rank}"
        where = " in host memory" if sizes.cpu_offload else ""
        text = f"{who} holds{where} {convert_bytes(held.parameters)} of parameters, {convert_bytes(held.gradients)} of gradients"
        if optimizers:
            states = "an unknown size" if held.optimizer is None else convert_bytes(held.optimizer)
            text += f", {states} of {optimizers} states"
        device = " on the device" if sizes.cpu_offload else ""
        lines.append(f"{text}; at its peak {convert_bytes(sizes.peak(rank))}{device}, without activations.")
    block, size = sizes.largest_gather
    lines.append(f"The largest all-gather is {convert_bytes(size)} ({block or 'the root'}).")
    if plan.ignored:
        names = ", ".join(name for name, _ in plan.ignored[:3]) + (", ..." if len(plan.ignored) > 3 else "")
        lines.append(f"Whole on every rank: {names}.")
    return " ".join(lines)


def _list_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of torch inside of one, several or none."""
    if optimizer is None:
        return []
    given: Iterable[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [getattr(each, "optimizer", each) for each in given]


def _count_states(optimizers: Iterable[Any]) -> dict[int, int | None]:
    """Return, by the id of a parameter, how many tensors of its size the optimizers keep; None if an optimizer is not known."""
    found: dict[int, int | None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")]
            count = next((_STATES[name](group) for name in known if name in _STATES), None)
            for parameter in group["params"]:
                before = found.get(id(parameter), 0)
                found[id(parameter)] = None if count is None or before is None else before + count
    return found


def _always(count: int) -> Callable[[Mapping[str, Any]], int]:
    return lambda group: count


_STATES: Final[Mapping[str, Callable[[Mapping[str, Any]], int]]] = MappingProxyType(
    {
        "Adam": lambda group: 3 if group.get("amsgrad") else 2,
        "AdamW": lambda group: 3 if group.get("amsgrad") else 2,
        "NAdam": _always(2),
        "RAdam": _always(2),
        "Adamax": _always(2),
        "Adadelta": _always(2),
        "Rprop": _always(2),
        "Adagrad": _always(1),
        "RMSprop": lambda group: 1 + bool(group.get("centered")) + bool(group.get("momentum")),
        "SGD": lambda group: 1 if group.get("momentum") else 0,
    }
)
"""How many tensors of the size of a parameter each optimizer of torch keeps. Counters of a few bytes are left out."""
