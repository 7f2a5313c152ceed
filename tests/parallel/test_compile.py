"""Compilation in place: the model stays the object it was, and settings that the user chose survive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import Accelerator
from slipstream.config.schema import Compute
from slipstream.errors import ConfigError
from slipstream.parallel.compile import (
    DynamoBackend,
    TorchDynamoPlugin,
    compile_in_place,
    compile_model,
    compile_regions,
    complete_plugin,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)
from slipstream.precision.autocast import install_autocast
from slipstream.precision.policy import make_policy

# torch's tracer looks at the gradient of whatever comes in, and so meets its own warning where an input was computed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

X = torch.ones(2, 4)


class Counting:
    """A backend that counts the graphs it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Breaking(nn.Module):
    """Cannot be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        torch._dynamo.graph_break()
        return out + 1


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


# --- compiling -----------------------------------------------------------------------------------------------------------


def test_compile_whole_model(backend: Counting) -> None:
    """The whole model is compiled in place."""
    model = Model()
    keys, expected = list(model.state_dict()), model(X)
    assert compile_model(model, TorchDynamoPlugin(backend=backend, fullgraph=True)) is model
    assert type(model) is Model
    assert list(model.state_dict()) == keys
    assert is_compiled_module(model)
    assert torch.equal(model(X), expected)
    assert backend.graphs == 1


def test_equal_blocks_compiled_once(backend: Counting) -> None:
    """Blocks that are alike are compiled once."""
    model, x = Model(depth=12), X.clone().requires_grad_()  # as what comes out of a block does
    keys, expected = list(model.state_dict()), model(x)
    compile_model(model, TorchDynamoPlugin(backend=backend, fullgraph=True, use_regional_compilation=True))
    assert [is_compiled_module(block) for block in (model, model.head, *model.blocks)] == [False, False] + [True] * 12
    assert has_compiled_regions(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), expected)
    assert backend.graphs == 1


def test_gradients_of_compiled_blocks(backend: Counting) -> None:
    """Gradients of compiled blocks are those of the model."""
    model = Model()
    model(X).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compile_regions(model, backend="aot_eager")(X).sum().backward()
    assert all(torch.equal(parameter.grad, wanted) for parameter, wanted in zip(model.parameters(), expected, strict=True))


def test_model_without_blocks(backend: Counting, caplog: pytest.LogCaptureFixture) -> None:
    """A model without blocks is compiled as a whole and that is reported."""
    model = Block()
    compile_model(model, TorchDynamoPlugin(backend=backend, use_regional_compilation=True))
    assert is_compiled_module(model)
    assert "compiled as a whole" in caplog.text


def test_user_settings_kept(backend: Counting, caplog: pytest.LogCaptureFixture) -> None:
    """Settings of the user are not overruled."""
    model = Model()
    model.compile(backend=backend)
    compile_model(model, TorchDynamoPlugin(backend="aot_eager"))
    assert "compiled already" in caplog.text
    model(X)
    assert backend.graphs == 1


@pytest.mark.parametrize("regional", [False, True])
def test_compile_twice(regional: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Compiling again as before changes nothing and says nothing."""
    model, plugin = Model(), TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    compile_model(model, plugin)
    before = [module._compiled_call_impl for module in model.modules()]
    compile_model(model, plugin)
    assert [module._compiled_call_impl for module in model.modules()] == before
    assert caplog.text == ""


@pytest.mark.parametrize("plugin", [TorchDynamoPlugin(), TorchDynamoPlugin(backend="no"), TorchDynamoPlugin(backend="eager", disable=True)])
def test_not_compiled_by_default(plugin: TorchDynamoPlugin) -> None:
    """Nothing is compiled unless asked for."""
    assert not is_compiled_module(compile_model(Block(), plugin))


def test_autocast_compiled_along(backend: Counting) -> None:
    """What is installed on a model is compiled with it."""
    model = Model()
    install_autocast(model, make_policy("bf16", outputs_to_fp32=False), "cpu")
    compile_model(model, TorchDynamoPlugin(backend=backend, fullgraph=True))
    assert model(X).dtype is torch.bfloat16
    assert backend.graphs == 1


# --- options -------------------------------------------------------------------------------------------------------------


def test_unknown_backend_refused() -> None:
    """A backend that this torch does not have is refused when used."""
    for plugin in (TorchDynamoPlugin(backend=DynamoBackend.FX2TRT), TorchDynamoPlugin(backend="inductr")):
        with pytest.raises(ConfigError, match=r"(fx2trt|inductr).*inductor"):
            compile_model(Block(), plugin)


@pytest.mark.parametrize("values", [{"backend": 3}, {"mode": "max-autotune", "options": {"shape_padding": True}}])
def test_invalid_values_refused(values: dict[str, Any]) -> None:
    """Values that make no sense are refused."""
    with pytest.raises(ConfigError, match="TorchDynamoPlugin"):
        TorchDynamoPlugin(**values)


def test_compile_arguments() -> None:
    """Arguments are those of torch compile."""
    plugin = TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER, mode="default", dynamic=False, use_regional_compilation=True)
    assert plugin.to_kwargs() == {"backend": "aot_eager", "mode": "default", "dynamic": False}
    assert plugin.to_dict()["backend"] == "aot_eager"
    assert plugin.to_dict()["use_regional_compilation"] is True
    assert TorchDynamoPlugin(backend="Eager").backend is DynamoBackend.EAGER


def test_plugin_precedence() -> None:
    """The plugin wins over the other sources."""
    options = Compute(
        dynamo_backend="eager",
        dynamo_mode="reduce-overhead",
        dynamo_use_fullgraph=True,
        dynamo_use_dynamic=True,
        dynamo_use_regional_compilation=True,
    )
    taken = complete_plugin(None, options)
    assert taken.to_kwargs() == {"backend": "eager", "mode": "reduce-overhead", "fullgraph": True, "dynamic": True}
    assert taken.use_regional_compilation is True
    own = TorchDynamoPlugin(backend="aot_eager", options={"a": 1}, fullgraph=False, dynamic=False, use_regional_compilation=False)
    assert complete_plugin(own, options) == own
    assert not complete_plugin(None, Compute()).compiles


# --- regions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "repeats"),
    [
        (nn.ModuleList([Block(), Block()]), True),
        (nn.ModuleList([Block()]), True),
        (nn.ModuleList([]), False),
        (nn.ModuleList([Block(), nn.Linear(4, 4)]), False),
        (nn.Sequential(Block(), Block()), True),
        (nn.Sequential(Block()), False),
        (nn.ModuleList([nn.Sequential(Block(), nn.ReLU()), nn.Sequential(nn.ReLU())]), False),
        (Block(), False),
        ("no module", False),
    ],
)
def test_is_repeated_blocks(module: Any, repeats: bool) -> None:
    """Repeated blocks are lists of one class."""
    assert is_repeated_blocks(module) is repeats


def test_has_repeated_blocks() -> None:
    """Repeated blocks are found inside."""
    assert has_repeated_blocks(Model())
    assert not has_repeated_blocks(Block())
    assert not has_repeated_blocks(None)


def test_nested_block_lists() -> None:
    """Nested lists are compiled at their outermost blocks."""
    inner = [nn.ModuleList([Model(2), Model(2)]), nn.ModuleList([Block(), Block()])]
    model = nn.ModuleList(inner)
    compile_regions(model, backend="eager")
    assert [name for name, module in model.named_modules() if is_compiled_module(module)] == ["0.0", "0.1", "1.0", "1.1"]


# --- compiled by the user before -----------------------------------------------------------------------------------------


def test_compile_wrapper_settled(backend: Counting) -> None:
    """A compiled model becomes its original with the same settings."""
    model = Model()
    expected = model(X)
    settled = compile_in_place(torch.compile(model, backend=backend, fullgraph=True))
    assert settled is model
    assert is_compiled_module(model)
    assert not any("_orig_mod" in key for key in model.state_dict())
    assert torch.equal(model(X), expected)
    assert backend.graphs == 1


def test_fullgraph_survives(backend: Counting) -> None:
    strict, lenient = (compile_in_place(torch.compile(Breaking(), backend=backend, fullgraph=flag)) for flag in (True, False))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        strict(X)
    torch._dynamo.reset()
    assert lenient(X).shape == X.shape
    assert backend.graphs == 2


def test_dynamic_shapes_survive(backend: Counting) -> None:
    model = compile_in_place(torch.compile(Block(), backend=backend, dynamic=True))
    for rows in (2, 3, 5):
        model(torch.ones(rows, 4))
    assert backend.graphs == 1


def test_hand_compiled_regions_settled(backend: Counting) -> None:
    """Regions that were compiled by hand are settled too."""
    model = Model()
    keys, expected = list(model.state_dict()), model(X)
    for position, block in enumerate(model.blocks):
        model.blocks[position] = torch.compile(block, backend=backend, fullgraph=True)
    model.head = torch.compile(model.head, backend=backend)
    outer = torch.compile(nn.Sequential(model), backend=backend)
    settled = compile_in_place(outer)
    assert list(settled.state_dict()) == [f"0.{key}" for key in keys]
    assert [is_compiled_module(block) for block in (settled, model, *model.blocks, model.head)] == [True, False, True, True, True, True]
    assert [type(block) for block in model.blocks] == [Block] * 3
    assert torch.equal(settled(X), expected)


def test_shared_block_stays_shared(backend: Counting) -> None:
    """A block that is shared stays shared."""
    shared = torch.compile(Block(), backend=backend)
    model = nn.Sequential(shared, shared)
    compile_in_place(model)
    assert model[0] is model[1]
    assert type(model[1]) is Block


def test_autocast_after_settling(backend: Counting) -> None:
    """What is installed after settling is compiled too."""
    model = Model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert compiled(X).dtype is torch.float32
    install_autocast(compile_in_place(compiled), make_policy("bf16", outputs_to_fp32=False), "cpu")
    assert model(X).dtype is compiled(X).dtype is torch.bfloat16


def test_hooks_of_wrapper_moved(backend: Counting) -> None:
    """Hooks of the wrapper go with the model."""
    calls: list[int] = []
    model = Block()
    compiled = torch.compile(model, backend=backend)
    handle = compiled.register_forward_hook(lambda *_: calls.append(1))
    compile_in_place(compiled)
    model(X)
    handle.remove()
    model(X)
    assert calls == [1]


def test_hooks_in_both_places(backend: Counting) -> None:
    """Hooks in both places are refused."""
    model = Block()
    compiled = torch.compile(model, backend=backend)
    for entry in (model, compiled):
        entry.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="before torch.compile"):
        compile_in_place(compiled)


def test_prepared_model_not_compiled() -> None:
    """A prepared model counts as compiled only if it is: its timer stands where torch keeps a compiled call."""
    accelerator = Accelerator(cpu=True)
    assert not is_compiled_module(accelerator.prepare(nn.Linear(2, 2)))
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    assert is_compiled_module(accelerator.prepare(model))


def test_plain_model_unchanged() -> None:
    """A model that is not compiled stays as it is."""
    model = Model()
    assert compile_in_place(model) is model
    assert not has_compiled_regions(model)
    assert not is_compiled_module(model)
    assert not has_compiled_regions(None)


# --- with replicas -------------------------------------------------------------------------------------------------------


def _gradients_of_compiled_replicas() -> list[list[list[float]]]:
    from slipstream import PartialState

    state = PartialState(cpu=True)
    state.wait_for_everyone()
    rows = torch.arange(16, dtype=torch.float64).view(4, 4)[2 * state.process_index : 2 * state.process_index + 2]
    found = []
    for regional in (False, True):
        torch.manual_seed(0)
        model = Model().double()
        compile_model(model, TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional))
        replica = nn.parallel.DistributedDataParallel(model)
        replica(rows).mean().backward()
        found.append([parameter.grad.flatten().tolist() for parameter in model.parameters()])
        torch._dynamo.reset()
    return found


def test_compiled_replicas(ranks: Any) -> None:
    """Compiled replicas have the gradients of one process."""
    torch.manual_seed(0)
    model = Model().double()
    model(torch.arange(16, dtype=torch.float64).view(4, 4)).mean().backward()
    expected = [parameter.grad.flatten() for parameter in model.parameters()]
    for whole_and_regional in ranks(2).run(_gradients_of_compiled_replicas):
        for gradients in whole_and_regional:
            for found, wanted in zip(gradients, expected, strict=True):
                torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())])
@pytest.mark.parametrize("wrapped", [False, True])
def test_classes_of_torch(make, wrapped):
    """A model whose class is one of torch's own is compiled too; `Module.compile` compiles nothing of it."""
    graphs = []
    torch._dynamo.reset()
    model = make()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    if wrapped:
        model = compile_in_place(torch.compile(model, backend=backend))
    else:
        compile_model(model, TorchDynamoPlugin(backend=backend))
    model(torch.ones(1, 2))
    assert len(graphs) == 1


def test_many_blocks_of_torch():
    """Equal blocks of a class of torch's share compilations, however many they are."""
    graphs = []
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    blocks = [torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(10)]
    model = compile_regions(torch.nn.Sequential(*blocks), backend=backend)
    model(torch.ones(2, 3, 8))
    assert 1 <= len(graphs) <= 2
