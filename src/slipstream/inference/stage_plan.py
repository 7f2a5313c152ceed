"""Where a model is cut into pipeline stages: its blocks in execution order, and the most even contiguous stages.

A block is a module that is never cut inside: one of several siblings of the same class in a list, one of a class in
`no_split_module_classes`, a composite module of torch, or a leaf. Where that gives fewer blocks than processes, the largest divisible
ones are divided too. The cut is exact: the largest stage is as small as possible. A weight that several blocks share counts once in each
stage that needs it. Nothing here runs a model or communicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slipstream.big_models.device_map.partition import parameter_identity
from slipstream.big_models.device_map.validation import parse_class_names
from slipstream.config.handlers import check_count
from slipstream.errors import ConfigError
from slipstream.files.sizes import parse_size

__all__ = ["StageBlock", "order_blocks", "partition_evenly", "generate_device_map", "find_no_split_classes"]

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class StageBlock(NamedTuple):
    """A module that stays in one piece, and the bytes of every tensor that comes with it, by the tensor's identity."""

    name: str
    held: dict[Hashable, int]

    @property
    def size(self) -> int:
        return sum(self.held.values())


def generate_device_map(
    model: torch.nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Collection[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
) -> dict[str, int]:
    """Return which process gets which block of a model: contiguous stages, the largest as small as possible.

    `max_memory` limits stages by number, in bytes or as text ("2GB"); stages that it does not name are not limited.

    >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    >>> generate_device_map(model, 2)
    {'0': 0, '1': 0, '2': 1, '3': 1}
    """
    check_count(num_processes, f"num_processes={num_processes!r} is not a number of processes: write 1 or more")
    blocks = order_blocks(model, find_no_split_classes(model, no_split_module_classes), at_least=num_processes)
    if not blocks:
        return {"": 0}
    starts = partition_evenly(blocks, num_processes, _limits(max_memory, num_processes))
    stages = {block.name: sum(position >= start for start in starts[1:]) for position, block in enumerate(blocks)}
    return {**dict.fromkeys(_outside(model, stages), 0), **stages}


def _outside(model: torch.nn.Module, blocks: Collection[str]) -> list[str]:
    """Return the names of tensors that are in none of these blocks."""
    names = [name for tensors in (model.named_parameters, model.named_buffers) for name, _ in tensors(remove_duplicate=False)]
    return [name for name in names if not any(name[:end] in blocks for end, letter in enumerate(name) if letter == ".")]


def _limits(max_memory: Mapping[Any, int | str] | None, count: int) -> dict[int, int]:
    unknown = [key for key in max_memory or {} if key not in range(count)]
    if unknown:
        raise ConfigError(f"max_memory names {unknown[0]!r}, which is not a stage: {count} processes have the stages 0 to {count - 1}")
    return {int(stage): parse_size(size, f"max_memory[{stage}]") for stage, size in (max_memory or {}).items()}


def find_no_split_classes(model: torch.nn.Module, given: Collection[str] | None) -> frozenset[str]:
    """Return the names of classes that are not cut inside: those of the caller, else those of the model."""
    return parse_class_names(given if given is not None else getattr(model, "_no_split_modules", None))


# -- blocks -----------------------------------------------------------------------------------------------------------


def order_blocks(
    model: torch.nn.Module, whole: Collection[str], *, at_least: int = 1, called: Mapping[str, int] | None = None
) -> list[StageBlock]:
    """Return the blocks that hold weights, in the order of `called` (name -> turn) or, without it, of definition.

    Modules that are not called by themselves are no block; what they hold goes with the first one. There may be fewer than `at_least`.
    """
    turn = called if called is not None else {name: position for position, (name, _) in enumerate(model.named_modules())}
    units = list(_find_units(model, "", whole))
    while True:
        ordered = sorted((name for name in units if name in turn), key=lambda name: turn[name])
        blocks = [StageBlock(name, _tensor_sizes(model.get_submodule(name))) for name in ordered]
        blocks = [block for block in blocks if block.held]  # a cut before one without weights would leave a stage with nothing to do
        divisible = [block for block in blocks if _may_divide(model.get_submodule(block.name), whole)]
        if len(blocks) >= at_least or not divisible:
            return _with_remaining_tensors(model, blocks)
        largest = max(divisible, key=lambda block: block.size).name
        position = units.index(largest)
        units[position : position + 1] = [f"{largest}.{name}" for name, _ in model.get_submodule(largest).named_children()]


def _find_units(module: torch.nn.Module, prefix: str, whole: Collection[str]) -> Iterator[str]:
    children = list(module.named_children())
    alike = Counter(type(child) for _, child in children) if isinstance(module, _CONTAINERS) else Counter()
    for name, child in children:
        divided = isinstance(child, _CONTAINERS) or (
            alike[type(child)] < 2 and any(isinstance(inner, torch.nn.ModuleList) for inner in child.modules())
        )
        if divided and _may_divide(child, whole):
            yield from _find_units(child, f"{prefix}{name}.", whole)
        else:
            yield f"{prefix}{name}"


def _may_divide(module: torch.nn.Module, whole: Collection[str]) -> bool:
    composite = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
    return not composite and type(module).__name__ not in whole and any(True for _ in module.children())


def _with_remaining_tensors(model: torch.nn.Module, blocks: list[StageBlock]) -> list[StageBlock]:
    inside = _union(blocks)
    for block in blocks[:1]:
        block.held.update({tensor: size for tensor, size in _tensor_sizes(model).items() if tensor not in inside})
    return blocks


def _tensor_sizes(module: torch.nn.Module) -> dict[Hashable, int]:
    parameters = {parameter_identity(parameter): parameter.numel() * parameter.element_size() for parameter in module.parameters()}
    return parameters | {id(buffer): buffer.numel() * buffer.element_size() for buffer in module.buffers()}


# -- the cut ----------------------------------------------------------------------------------------------------------


class _Partition(NamedTuple):
    """The first blocks divided into stages; compared by the largest stage, then by how even they are."""

    largest: int
    squares: int
    starts: tuple[int, ...]


def partition_evenly(
    blocks: Sequence[StageBlock], count: int, limits: Mapping[int, int] | None = None, origin: str = "max_memory"
) -> list[int]:
    """Return where each of `count` contiguous stages begins; `limits` bounds the bytes of stages by number, and `origin` says whence.

    >>> partition_evenly([StageBlock(name, {position: size}) for position, (name, size) in enumerate(zip("abcd", [5, 1, 1, 3]))], 2)
    [0, 1]
    """
    if len(blocks) < count:
        raise ConfigError(
            f"a model with {len(blocks)} block{'s' * (len(blocks) != 1)} cannot be cut into {count} stages, one for each process: use at "
            f"most {len(blocks)} process{'es' * (len(blocks) != 1)}, or name fewer classes in no_split_module_classes"
        )
    limits = limits or {}
    best: list[_Partition | None] = [_Partition(0, 0, ()), *[None] * len(blocks)]
    for stage in range(count):
        best = [None, *(_best_end(blocks, best, end, limits.get(stage)) for end in range(1, len(blocks) + 1))]
    found = best[-1]
    if found is None:
        sizes = ", ".join(f"{stage}: {size} bytes" for stage, size in sorted(limits.items()))
        total = sum(_union(blocks).values())
        raise ConfigError(
            f"the model holds {total} bytes in {len(blocks)} blocks (the largest, {max(blocks, key=lambda block: block.size).name!r}, "
            f"{max(block.size for block in blocks)}), which do not fit into {count} stages within {origin} ({sizes}): "
            "give them more, or use more processes"
        )
    return list(found.starts)


def _best_end(blocks: Sequence[StageBlock], before: list[_Partition | None], end: int, limit: int | None) -> _Partition | None:
    """Return the best partition in which one more stage ends here, over all places where it may begin."""
    best: _Partition | None = None
    held: dict[Hashable, int] = {}
    size = 0
    for start in range(end - 1, -1, -1):
        for tensor, length in blocks[start].held.items():
            if tensor not in held:
                held[tensor] = length
                size += length
        if (limit is not None and size > limit) or (best is not None and size > best.largest):
            break  # it only grows from here on
        previous = before[start]
        if previous is not None:
            cut = _Partition(max(previous.largest, size), previous.squares + size * size, (*previous.starts, start))
            best = cut if best is None or cut[:2] < best[:2] else best
    return best


def _union(blocks: Sequence[StageBlock]) -> dict[Hashable, int]:
    return {tensor: size for block in blocks for tensor, size in block.held.items()}
