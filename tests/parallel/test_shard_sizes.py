"""The bytes that are computed before sharding are those that `fully_shard` holds, on every rank."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream import PartialState
from slipstream.devices.table import CPU
from slipstream.parallel.mesh import MeshSizes
from slipstream.parallel.shard_sizes import ParameterSize, ShardSizes, describe_shard_sizes, measure_shard_sizes
from slipstream.parallel.wrap_policy import BlockPlan, plan_blocks

OPTIONS = SimpleNamespace(
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=("Odd",),
    min_num_params=1,
    ignored_modules=None,
    param_dtype=None,
    reduce_dtype=None,
    reshard_after_forward=True,
    cpu_offload=False,
)


def options(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(OPTIONS), **changes})


class Odd(nn.Module):
    """A block whose rows no number of ranks divides, with a frozen parameter and a buffer."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, rows)
        self.down = nn.Linear(rows, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x))) + self.shift


class Uneven(nn.Module):
    def __init__(self, width: int = 7, rows: tuple[int, ...] = (5, 3, 11)) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Odd(width, count) for count in rows)
        self.head = nn.Linear(width, 2, bias=False)
        self.kept = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.kept(self.head(x).to(self.kept.weight.dtype))


def storages(tensors: Any) -> int:
    """Return the bytes behind local tensors, each storage once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hold(mesh_sizes: MeshSizes, chosen: SimpleNamespace, policy: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return what was computed for this rank, and what it holds after an update."""
    state = PartialState()
    model = Uneven()
    chosen.param_dtype, chosen.reduce_dtype = policy
    plan = plan_blocks(model, chosen)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = measure_shard_sizes(model, plan, chosen, mesh_sizes, optimizer)
    assert mesh_sizes.total == state.num_processes
    axes = ("dp_replicate", "dp_shard") if mesh_sizes.dp_replicate > 1 else ("dp_shard",)
    mesh = mesh_sizes.build(CPU.type)[axes]
    gathers: list[int] = []
    original = torch.distributed.all_gather_single

    def gather(output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathers.append(output_tensor.nbytes)
        return original(output_tensor, *args, **kwargs)

    ignored = {parameter for _, module in plan.ignored for parameter in module.parameters()}
    for _, module in (*plan.blocks, ("", model)):
        fully_shard(module, mesh=mesh, ignored_params=ignored, mp_policy=MixedPrecisionPolicy(*policy))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    torch.distributed.all_gather_single = gather
    try:
        loss = model(torch.ones(4, 2)).square().mean()
        forward = sorted(gathers)
        loss.backward()
    finally:
        torch.distributed.all_gather_single = original
    optimizer.step()
    locals_ = [local(parameter) for parameter in parameters]
    states = [local(value) for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    held = sizes.on_rank(state.process_index)
    gathered = sorted(sizes.gathers.values())
    computed = (held.parameters, held.parameters - held.padding, held.gradients, held.optimizer, held.buffers, gathered)
    actual = (
        storages(locals_),
        sum(tensor.nbytes for tensor in locals_),
        storages(local(parameter.grad) for parameter in parameters if parameter.grad is not None),
        storages(states),
        sum(buffer.nbytes for buffer in model.buffers()),
        forward,
    )
    return computed, actual


@pytest.mark.parametrize(
    "sizes", [MeshSizes(dp_shard=2), MeshSizes(dp_shard=3), MeshSizes(dp_shard=4), MeshSizes(dp_replicate=2, dp_shard=2)], ids=str
)
@pytest.mark.parametrize(("ignored", "policy"), [(None, (None, None)), ("kept", (torch.bfloat16, torch.float32))])
def test_bytes_of_fully_shard(ranks: Any, sizes: MeshSizes, ignored: str | None, policy: tuple[Any, Any]) -> None:
    """Parameters, gradients, states and all-gathers are as large as computed, on every rank."""
    for computed, actual in ranks(sizes.total).run(hold, sizes, options(ignored_modules=ignored), policy):
        assert computed == actual


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make and resize, and remembers the most that was alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, weakref.ref(storage))
        self.most = max(self.most, self.live())
        return result

    def live(self) -> int:
        alive = {key: found for key, reference in self.storages.items() if (found := reference()) is not None}
        self.storages = {key: self.storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def measure_peak(shards: int, reshard: bool | int, policy: tuple[Any, Any], depth: int) -> tuple[int, int]:
    """Return the most that was alive in a step with hardly any activations, and the computed peak."""
    rank = PartialState().process_index
    model = Uneven(256, (256,) * depth)
    chosen = options(reshard_after_forward=reshard, param_dtype=policy[0], reduce_dtype=policy[1])
    plan = plan_blocks(model, chosen)
    optimizer = torch.optim.SGD(model.parameters())
    sizes = measure_shard_sizes(model, plan, chosen, MeshSizes(dp_shard=shards), optimizer)
    mesh = MeshSizes(dp_shard=shards).build(CPU.type)
    for name, module in (*plan.blocks, ("", model)):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(*policy), reshard_after_forward=reshard if name else None)
    peaks = []
    with LiveBytes() as live:
        for _ in range(4):
            live.most = 0
            model(torch.ones(1, 2)).square().mean().backward()
            peaks.append(live.most)
    return min(peaks[1:]), sizes.peak(rank)  # the threads of gloo may let go of a buffer late


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("policy", [(None, None), (torch.bfloat16, torch.float32)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [1, 6])
def test_peak_of_fully_shard(ranks: Any, reshard: bool | int, policy: tuple[Any, Any], depth: int) -> None:
    """The computed peak is what a step takes."""
    for measured, computed in ranks(4).run(measure_peak, 4, reshard, policy, depth):
        assert 0.85 * computed <= measured <= 1.02 * computed  # with a few activations


# Pure


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 9))
def test_shards_cover_rows(rows: int, columns: int, shards: int) -> None:
    """The shards of a parameter add up to it and are those of torch.chunk; none is larger than the first."""
    parameter = ParameterSize("weight", (rows, columns), 4, 4)
    shapes = [parameter.local_shape(shards, index) for index in range(shards)]
    assert sum(map(math.prod, shapes)) == rows * columns
    assert max(map(math.prod, shapes)) == parameter.padded(shards)
    chunks = [tuple(chunk.shape) for chunk in torch.chunk(torch.empty(rows, columns), shards)] if rows else []
    assert [shape for shape in shapes if shape[0]] == chunks


def test_whole_parameters() -> None:
    """A parameter without dimensions and those of ignored modules are whole on every rank."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.inner = nn.Linear(4, 4, bias=False)
    model.left = nn.Linear(2, 2, bias=False)
    plan = BlockPlan((), "by hand", (("left", model.left),))
    sizes = measure_shard_sizes(model, plan, options(), MeshSizes(dp_shard=4), torch.optim.SGD(model.parameters(), momentum=0.9))
    for rank in range(4):
        held = sizes.on_rank(rank)
        assert (held.parameters, held.gradients, held.optimizer, held.padding) == (4 + 16 + 16, 36, 36, 0)
    assert sizes.gathers == {"": 64}


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (torch.optim.AdamW, 2),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3),
        (torch.optim.NAdam, 2),
        (torch.optim.RAdam, 2),
        (torch.optim.Adamax, 2),
        (torch.optim.Adadelta, 2),
        (torch.optim.Rprop, 2),
        (torch.optim.Adagrad, 1),
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.5), 1),
        (lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.5), 3),
    ],
)
def test_states_of_optimizers(make: Any, count: int) -> None:
    """The states of torch's optimizers are counted as they are."""
    model = nn.Linear(16, 16, bias=False)
    optimizer = make(model.parameters())
    sizes = measure_shard_sizes(model, BlockPlan((), "", ()), options(), MeshSizes(dp_shard=2), optimizer)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    tensors = [value for value in optimizer.state[model.weight].values() if torch.is_tensor(value) and value.numel() > 1]
    assert sum(tensor.nbytes for tensor in tensors) == count * model.weight.nbytes == 2 * (sizes.on_rank(0).optimizer or 0)


def test_unknown_optimizer() -> None:
    """The states of another optimizer are unknown, and said to be."""

    class Own(torch.optim.Optimizer):
        pass

    model = Uneven()
    plan = plan_blocks(model, options())
    optimizers = [torch.optim.SGD(model.head.parameters(), lr=1.0), Own(model.embed.parameters(), {})]
    sizes = measure_shard_sizes(model, plan, options(), MeshSizes(dp_shard=2), optimizers)
    assert sizes.on_rank(0).optimizer is None
    assert "an unknown size of SGD and Own states" in describe_shard_sizes(model, plan, options(), MeshSizes(dp_shard=2), optimizers)


def test_description() -> None:
    """The text has the mesh, the blocks and the bytes; ranks that differ are both named."""
    with torch.device("meta"):
        model = Uneven(64, (64, 64))
    plan = plan_blocks(model, options(ignored_modules="kept"))
    text = describe_shard_sizes(model, plan, options(), MeshSizes(dp_replicate=2, dp_shard=2), torch.optim.AdamW(model.parameters()))
    assert text.startswith("Uneven is sharded over 2 ranks (4 processes = dp_replicate 2 x dp_shard 2), in 2 blocks and the root: Odd,")
    assert "Rank 0 holds" in text
    assert "of AdamW states; at its peak" in text
    assert "The largest all-gather is" in text
    assert "Whole on every rank: kept." in text


def test_offloaded_peak() -> None:
    """With offloaded shards the device holds what is gathered, and the buffers."""
    model = Uneven(64, (64, 64))
    plan = plan_blocks(model, options())
    kept, moved = (measure_shard_sizes(model, plan, options(cpu_offload=offload), MeshSizes(dp_shard=2)) for offload in (False, True))
    held = kept.on_rank(0)
    assert kept.peak(0) - moved.peak(0) == held.persistent - held.buffers
    text = describe_shard_sizes(model, plan, options(cpu_offload=True), MeshSizes(dp_shard=2))
    assert "holds in host memory" in text
    assert "on the device, without activations" in text


def test_one_rank_gathers_nothing() -> None:
    """A rank that holds the whole model gathers nothing: its peak is what it holds."""
    model = Uneven()
    sizes = measure_shard_sizes(model, plan_blocks(model, options()), options(), MeshSizes(dp_replicate=3))
    assert sizes.largest_gather[1] == 0
    assert sizes.peak(2) == sizes.on_rank(2).persistent


def test_many_ranks() -> None:
    """1,024 ranks are as quick as two, and the first holds the most."""
    block = [ParameterSize(f"{name}.weight", (4096, 4096), 4, 2) for name in "abc"]
    mesh = MeshSizes(dp_replicate=8, dp_shard=128)
    sizes = ShardSizes(
        blocks={f"layers.{number}": block for number in range(32)}, mesh=mesh, state_size=lambda parameter, shape: 8 * math.prod(shape)
    )
    total = 32 * 3 * 4096 * 4096
    assert sizes.on_rank(0) == sizes.on_rank(1023)
    assert sizes.on_rank(0).persistent == total * 16 // 128
    assert sizes.largest_gather == ("layers.0", 3 * 4096 * 4096 * 2)
