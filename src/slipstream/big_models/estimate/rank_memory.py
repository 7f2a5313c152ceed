"""What each rank holds in sharded training of a model that is only described: the blocks, and the bytes for each training mode.

A model that was built on the meta device is divided by the wrap policy of training. Of weights files and formulas only names are known:
there a block is a numbered layer with modules inside of it, and everything else belongs to the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slipstream.big_models.estimate.tensors import OPTIMIZERS, WEIGHT_DTYPES, EstimatedTensor, EstimatedTensors, TrainingMode, find_layer
from slipstream.errors import ConfigError
from slipstream.parallel.mesh import MeshSizes
from slipstream.parallel.shard_sizes import ParameterSize, ShardSizes

if TYPE_CHECKING:
    import torch

__all__ = ["ShardedMemory", "ShardedTensors", "estimate_ranks", "group_by_name", "group_by_policy", "resolve_mesh"]


class ShardedMemory(NamedTuple):
    """Bytes of one rank in sharded training. `peak` is without activations."""

    precision: str
    rank: int
    parameters: int
    gradients: int
    optimizer: int
    largest_gather: int
    largest_block: str
    """The block with the largest all-gather; "" is the root."""
    peak: int


@dataclass(frozen=True)
class ShardedTensors:
    """The tensors of each block ("" is the root), those that are not sharded, and how the blocks were found."""

    blocks: Mapping[str, Sequence[EstimatedTensor]]
    whole: Sequence[EstimatedTensor]
    reason: str


def resolve_mesh(num_processes: int | None, dp_replicate: int | None, dp_shard: int | None, *, training: bool = True) -> MeshSizes | None:
    """Return the mesh that was asked for, or None; sizes that do not fit are an error with the arithmetic.

    >>> print(resolve_mesh(8, 2, None))
    8 processes = dp_replicate 2 x dp_shard 4
    """
    if num_processes is None and dp_replicate is None and dp_shard is None:
        return None
    if not training:
        raise ConfigError("--num_processes is about sharded training, and --inference leaves training out.\nLeave one of them out.")
    if num_processes is None and dp_shard is None:
        raise ConfigError(
            f"--dp_replicate_size {dp_replicate} alone does not say how many processes there are.\nGive --num_processes or --dp_shard_size."
        )
    sizes = MeshSizes(dp_replicate=1 if dp_replicate is None else dp_replicate, dp_shard=-1 if dp_shard is None else dp_shard)
    if num_processes is None and not sizes.is_resolved:
        raise ConfigError("A size of -1 is what is left of the number of processes.\nGive --num_processes too.")
    return sizes.resolve(sizes.total if num_processes is None else num_processes)


def group_by_name(tensors: EstimatedTensors) -> ShardedTensors:
    """Return the tensors of each block, by their names.

    >>> names = ["embed.weight", "layers.0.up.weight", "layers.0.norm.weight", "layers.1.up.weight"]
    >>> groups = group_by_name(EstimatedTensors([EstimatedTensor(name, (4, 4), "F32") for name in names]))
    >>> {block: len(tensors) for block, tensors in groups.blocks.items()}, groups.reason
    ({'': 1, 'layers.0': 2, 'layers.1': 1}, 'numbered layers of layers, by their names')
    """
    layers = {tensor.name: find_layer(tensor.name) for tensor in tensors.tensors}
    deep = {layer for name, layer in layers.items() if layer.rpartition(".")[2].isdigit() and "." in name[len(layer) + 1 :]}
    lists = [layer.rpartition(".")[0] for layer in deep]
    repeated = {layer for layer in deep if lists.count(layer.rpartition(".")[0]) > 1}
    blocks: dict[str, list[EstimatedTensor]] = {"": []}
    for tensor in tensors.tensors:
        if tensor.trainable:
            blocks.setdefault(layers[tensor.name] if layers[tensor.name] in repeated else "", []).append(tensor)
    found = sorted({layer.rpartition(".")[0] or "the root" for layer in repeated})
    reason = f"numbered layers of {', '.join(found)}, by their names" if found else "no numbered layers were found by their names"
    return ShardedTensors(blocks, [tensor for tensor in tensors.tensors if not tensor.trainable], reason)


class _AutomaticPolicy:
    """The options of a wrap policy that is not given."""

    auto_wrap_policy = None
    transformer_cls_names_to_wrap = ()
    min_num_params = 1
    ignored_modules = None


def group_by_policy(model: torch.nn.Module) -> ShardedTensors:
    """Return the tensors of each block that training without a wrap policy would choose."""
    from slipstream.big_models.estimate.meta_model import list_tensors
    from slipstream.parallel.wrap_policy import group_parameters, plan_blocks

    plan = plan_blocks(model, _AutomaticPolicy())
    tensors = {tensor.name: tensor for tensor in list_tensors(model).tensors}
    groups = group_parameters(model, plan)
    blocks = {block: [tensors.pop(name) for name in parameters] for block, parameters in groups.items() if block is not None}
    return ShardedTensors(blocks, list(tensors.values()), plan.reason)


def estimate_ranks(groups: ShardedTensors, mesh: MeshSizes, modes: Iterable[TrainingMode], optimizer: str) -> list[ShardedMemory]:
    """Return the bytes for each mode, of one rank if all hold the same, else of those that hold most and least."""
    rows = []
    for mode in modes:
        sizes = _shard_sizes(groups, mesh, mode, optimizer)
        held = {sizes.on_rank(rank): rank for rank in reversed(sizes.ends)}
        for memory, rank in sorted(held.items(), key=lambda item: item[1]):
            states = memory.optimizer or 0
            block, largest = sizes.largest_gather
            rows.append(ShardedMemory(mode.name, rank, memory.parameters, memory.gradients, states, largest, block, sizes.peak(rank)))
    return rows


def _shard_sizes(groups: ShardedTensors, mesh: MeshSizes, mode: TrainingMode, optimizer: str) -> ShardSizes:
    weights, computes = WEIGHT_DTYPES[mode.weights], WEIGHT_DTYPES[mode.computes]

    def size_of(tensor: EstimatedTensor) -> ParameterSize:
        width = weights.bits // 8 if tensor.floating else tensor.stored // max(1, tensor.count)
        gathered = computes.bits // 8 if tensor.floating else width
        return ParameterSize(tensor.name, tensor.shape, width, gathered, tensor.trainable and tensor.floating)

    return ShardSizes(
        blocks={block: [size_of(tensor) for tensor in tensors] for block, tensors in groups.blocks.items()},
        mesh=mesh,
        state_size=lambda parameter, shape: OPTIMIZERS[optimizer](shape, parameter.width),
        buffers=sum(tensor.size(weights) for tensor in groups.whole),
        reduced=weights.bits // 8,
    )
