"""Hooks around a forward, and weights that are in their module only while it runs."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.big_models.hooks.forward_hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from slipstream.errors import ConfigError

CPU = torch.device("cpu")


class Block(nn.Module):
    """A block with two layers, a buffer, and a weight that is there twice."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, dtype=dtype)
        self.second = nn.Linear(width, width, bias=False, dtype=dtype)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((width,), 2.0, dtype=dtype))
        self.register_buffer("offset", torch.ones(width, dtype=dtype), persistent=False)

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        out = self.second(torch.relu(self.first(x))) * self.scale + self.offset
        return out * 2 if twice else out


class CountingBundle:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self.taken, self.given_back = tensors, 0, 0

    def take(self) -> Sequence[torch.Tensor]:
        self.taken += 1
        return self.tensors

    def give_back(self) -> None:
        self.given_back += 1


class Bundling(Mapping[str, torch.Tensor]):
    """A map of weights with bundles, as stores have them."""

    prefix = "model.block."

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.asked: list[tuple[list[str], torch.device]] = []
        self.bundles: list[CountingBundle] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def bundle(self, names: Sequence[str], device: torch.device) -> CountingBundle:
        self.asked.append((list(names), device))
        self.bundles.append(CountingBundle([self.weights[name] for name in names]))
        return self.bundles[-1]


def offloaded(block: nn.Module, **options: Any) -> Any:
    hook = AlignDevicesHook(**{"execution_device": "cpu", "offload": True, "place_submodules": True, **options})
    return add_hook_to_module(block, hook)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


class Recording(ModelHook):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"{self.name} before")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append(f"{self.name} after")
        return output

    def abandon(self, module: nn.Module) -> None:
        self.log.append(f"{self.name} abandoned")


# --- attaching and removing ------------------------------------------------------------------------------------------------------


def test_hooks_change_arguments_and_outputs() -> None:
    """Hooks change arguments and outputs."""
    class Adding(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tuple(argument + 1 for argument in args), {"twice": True}

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return [output]

    block, x = Block(), torch.randn(2, 4)
    expected = block(x + 1, twice=True)
    add_hook_to_module(block, Adding())
    assert torch.equal(block(x)[0], expected)


def test_hooked_module_signature() -> None:
    """A hooked module shows the signature and names that others look for."""
    block = Block()
    signature, hook = inspect.signature(block.forward), ModelHook()
    assert add_hook_to_module(block, hook) is block
    assert inspect.signature(block.forward) == signature
    assert block._hf_hook is hook
    assert block._old_forward.__self__ is block


def test_removing_leaves_no_trace() -> None:
    """Removing leaves no trace."""
    block = Block()
    before = set(block.__dict__)
    for module in (block, block.first):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True))
    remove_hook_from_module(block, recurse=True)
    for module in block.modules():
        assert not {"_hf_hook", "_old_forward", "forward"} & set(module.__dict__)
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks
    assert set(block.__dict__) == before
    add_hook_to_module(block.first, ModelHook())
    remove_hook_from_submodules(block)
    assert not hasattr(block.first, "_hf_hook")


def test_replaced_forward_restored() -> None:
    """A forward that was replaced before is returned."""
    linear = nn.Linear(2, 2)
    linear.forward = replacement = lambda x: x + 1  # type: ignore[method-assign]
    add_hook_to_module(linear, ModelHook())
    assert torch.equal(linear(torch.zeros(1)), torch.ones(1))
    assert remove_hook_from_module(linear).forward is replacement


def test_appended_hooks_order() -> None:
    """Appended hooks run in order and others replace."""
    log: list[str] = []
    module = add_hook_to_module(nn.Identity(), Recording("a", log))
    add_hook_to_module(module, Recording("b", log), append=True)
    add_hook_to_module(module, Recording("c", log), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert [hook.name for hook in module._hf_hook.hooks] == ["a", "b", "c"]
    module(1)
    assert log == ["a before", "b before", "c before", "a after", "b after", "c after"]
    add_hook_to_module(module, Recording("d", log))
    log.clear()
    module(1)
    assert log == ["d before", "d after"]


def test_begun_hooks_abandoned() -> None:
    """Every hook that began hears of a failure."""
    class Failing(Recording):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no")

    log: list[str] = []
    module = add_hook_to_module(nn.Identity(), SequentialHook(Recording("a", log), Failing("b", log), Recording("c", log)))
    with pytest.raises(RuntimeError, match="no"):
        module(1)
    assert log == ["a before", "a abandoned"]
    module = add_hook_to_module(nn.Linear(2, 2), SequentialHook(Recording("a", log), Recording("b", log)))
    log.clear()
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 3))
    assert log == ["a before", "b before", "b abandoned", "a abandoned"]


def test_no_grad_hook() -> None:
    """No grad of a hook holds for the forward."""
    class Frozen(ModelHook):
        no_grad = True

    linear = nn.Linear(2, 2)
    add_hook_to_module(linear, Frozen())
    assert not linear(torch.ones(1, 2)).requires_grad
    add_hook_to_module(linear, ModelHook(), append=True)
    assert not linear(torch.ones(1, 2)).requires_grad
    remove_hook_from_module(linear)
    assert linear(torch.ones(1, 2)).requires_grad


# --- weights that come and go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [False, True])
def test_offloaded_only_while_running(buffers: bool) -> None:
    """Offloaded weights give the same and are there only while the module runs."""
    block, x = Block(), torch.randn(3, 4)
    expected, weights, names = block(x), weights_of(block), set(block.state_dict())
    seen: list[bool] = []
    block.second.register_forward_hook(lambda module, *_: seen.append(module.weight.is_meta))
    offloaded(block, offload_buffers=buffers)
    for _ in range(3):
        assert all(parameter.is_meta for parameter in block.parameters())
        assert block.scale.is_meta is buffers
        assert not block.offset.is_meta
        assert torch.equal(block(x), expected)
    assert seen == [False] * 3
    assert block.first.weight is block.second.weight
    assert block._hf_hook.original_devices == {name: CPU for name in (*names, "offset")}
    remove_hook_from_module(block)
    assert block.first.weight is block.second.weight
    assert torch.equal(block(x), expected)
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        name: entry.tolist() for name, entry in block.state_dict().items()
    }
    assert block.first.weight.requires_grad


def test_own_tensors_only() -> None:
    """Only own tensors without place submodules."""
    block = Block()
    offloaded(block, place_submodules=False, offload_buffers=True)
    assert block.scale.is_meta
    assert not block.first.weight.is_meta
    assert block(torch.ones(1, 4)).shape == (1, 4)


def test_bundle_taken_once_per_forward() -> None:
    """Bundles are asked for once and taken once per forward."""
    block, x = Block(), torch.randn(2, 4)
    expected = block(x)
    weights = Bundling(weights_of(block))
    offloaded(block, weights_map=weights, execution_device="cpu:0")
    for _ in range(3):
        assert torch.equal(block(x), expected)
    assert weights.asked == [(["first.weight", "first.bias"], CPU)]
    assert (weights.bundles[0].taken, weights.bundles[0].given_back) == (3, 3)


def test_parameter_made_once() -> None:
    """The parameter of a tensor is made once."""
    block = Block()
    offloaded(block, weights_map=Bundling(weights_of(block)))
    seen = []
    block.first.register_forward_hook(lambda module, *_: seen.append(module.weight))
    for _ in range(2):
        block(torch.ones(1, 4))
    assert seen[0] is seen[1]
    assert isinstance(seen[0], nn.Parameter)


def test_nested_calls_take_once() -> None:
    """Nested calls and threads take once."""
    barrier = threading.Barrier(3)

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            barrier.wait(20)
            out = self.inner(x) if depth == 0 else self(x, depth - 1)
            barrier.wait(20)
            return self.inner(out)

    module = Recursive()
    weights = Bundling(weights_of(module))
    offloaded(module, weights_map=weights)
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(module(torch.ones(1, 2), 2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (weights.bundles[0].taken, weights.bundles[0].given_back) == (1, 1)
    assert len(results) == 3
    assert torch.equal(results[0], results[2])
    assert module.inner.weight.is_meta


def test_exception_offloads_again() -> None:
    """An exception in forward offloads again."""
    block = Block()
    weights = Bundling(weights_of(block))
    offloaded(block, weights_map=weights)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            block(torch.ones(1, 3))
        assert block.first.weight.is_meta
    block(torch.ones(1, 4))
    assert block.first.weight.is_meta
    assert weights.bundles[0].taken == weights.bundles[0].given_back == 3


def test_manual_pre_and_post_forward() -> None:
    """Others call pre forward and post forward themselves."""
    block, x = Block(), torch.ones(1, 4)
    expected = block(x)
    offloaded(block)
    hook = block._hf_hook
    assert hook.pre_forward(block) == ((), {})
    assert not block.first.weight.is_meta
    assert hook.post_forward(block, ()) == ()
    assert block.first.weight.is_meta
    hook.pre_forward(block)  # diffusers never calls post_forward: the next forward ends it
    hook.pre_forward(block)
    assert torch.equal(block(x), expected)
    assert block.first.weight.is_meta
    hook.post_forward(block, torch.tensor([]))
    assert torch.equal(block(x), expected)


def test_assign_weights_map() -> None:
    """Weights map may be assigned at any time."""
    block, x = Block(), torch.ones(1, 4)
    offloaded(block, weights_map=Bundling(weights_of(block)))
    hook = block._hf_hook
    other = {name: tensor + 1 for name, tensor in block.state_dict().items()}
    hook.weights_map = other
    plain = Block()
    plain.load_state_dict(other)
    plain.scale.fill_(2.0)
    assert hook.weights_map is other
    assert torch.equal(block(x), plain(x))
    hook.pre_forward(block)
    with torch.no_grad():
        block.first.weight.data.mul_(2)
        plain.first.weight.mul_(2)
    hook.weights_map = {name: parameter.to("cpu") for name, parameter in block.named_parameters()}
    other["first.weight"].fill_(7)  # the memory that was in use goes back to whoever owns it
    hook.post_forward(block, torch.tensor([]))
    assert torch.equal(block(x), plain(x))


def test_hook_attribute_names() -> None:
    """Attributes have the names of the parameters."""
    hook = AlignDevicesHook(execution_device="cpu", offload=True, weights_map={}, skip_keys="cache")
    names = set(inspect.signature(AlignDevicesHook.__init__).parameters) - {"self"}
    assert names <= set(hook.__dict__)
    again = AlignDevicesHook(**{name: hook.__dict__[name] for name in names})
    assert {name: again.__dict__[name] for name in names} == {name: hook.__dict__[name] for name in names}


def test_hook_moved_to_module() -> None:
    """A hook that continues to another module keeps the values of that one."""
    old = nn.Embedding(4, 2)
    offloaded(old, weights_map=weights_of(old))
    new = nn.Embedding(6, 2)
    expected = new(torch.tensor([5]))
    add_hook_to_module(new, old._hf_hook)
    assert new.weight.is_meta
    assert torch.equal(new(torch.tensor([5])), expected)


def test_tied_copies_shared_and_dropped() -> None:
    """Tied copies are shared between modules and let go."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    weight = torch.ones(2, 2)
    tied: dict[int, dict[torch.device, torch.Tensor]] = {weight.data_ptr(): {}}
    meta = torch.device("meta")  # stands for a device that the weights have to be moved to
    for module in (first, second):
        offloaded(module, weights_map={"weight": weight}, tied_params_map=tied, execution_device=meta)
    first._hf_hook.pre_forward(first)
    copy_of = tied[weight.data_ptr()][meta]
    second._hf_hook.pre_forward(second)
    assert tied[weight.data_ptr()] == {meta: copy_of}
    first._hf_hook.post_forward(first, ())
    assert tied == {weight.data_ptr(): {}}


# --- bad input and what is said -----------------------------------------------------------------------------------------------


def test_meta_weights_refused() -> None:
    """Meta weights without values are refused by name."""
    block = Block().to("meta")
    with pytest.raises(ConfigError, match="first.weight has no values.*there is no weights_map"):
        offloaded(block)
    with pytest.raises(ConfigError, match="first.bias has no values.*weights_map does not have it"):
        offloaded(block, weights_map={"first.weight": torch.ones(4, 4)})
    with pytest.raises(ConfigError, match="scale of a Block cannot go to cpu"):
        add_hook_to_module(block, AlignDevicesHook(execution_device="cpu", place_submodules=True))


def test_weight_shape_mismatch() -> None:
    """A weight of another shape is refused by name."""
    linear = nn.Linear(2, 2, bias=False)
    offloaded(linear, weights_map=Bundling({"weight": torch.ones(3, 2)}))
    with pytest.raises(ConfigError, match=r"model.block.weight with shape \[3, 2\], but the module expects \[2, 2\]"):
        linear(torch.ones(1, 2))
    assert linear.weight.is_meta


def test_write_into_weight_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Writing into a weight is reported once."""
    class Writing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.add_(1)
            return super().forward(x)

    module = Writing(2, 2)
    offloaded(module, weights_map=Bundling(weights_of(module)))
    with caplog.at_level(logging.WARNING):
        module(torch.ones(1, 2))
        module(torch.ones(1, 2))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["model.block.weight was written to while its module ran"]


def test_replaced_data_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Replaced data does not stay."""
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = module(x)
    offloaded(module, weights_map=Bundling(weights_of(module)))
    module._hf_hook.pre_forward(module)
    module.weight.data = torch.zeros(2, 2)
    with caplog.at_level(logging.WARNING):
        module._hf_hook.post_forward(module, ())
    assert "is lost" in caplog.text
    assert torch.equal(module(x), expected)


def test_gradient_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    """A gradient for an offloaded weight is reported once."""
    module = nn.Linear(2, 2)
    offloaded(module, weights_map=Bundling(weights_of(module)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
    assert len(caplog.records) == 1
    assert "offloaded weights are not trained" in caplog.text


# --- state dicts, copies, freezing, converting --------------------------------------------------------------------------------


def test_state_dicts_have_the_weights() -> None:
    """State dicts have the weights."""
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    expected = weights_of(model)
    offloaded(model[0], weights_map=Bundling(weights_of(model[0])), offload_buffers=True)
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(model[0].first.state_dict()["weight"], expected["0.first.weight"])


def test_load_state_dict_refused() -> None:
    """Loading into offloaded weights is refused or keeps them in memory."""
    block, x = Block(), torch.ones(1, 4)
    other = Block()
    offloaded(block)
    with pytest.raises(ConfigError, match="first.weight, which is offloaded"):
        block.load_state_dict(other.state_dict())
    block.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(block(x), other(x))
    assert not block.first.weight.is_meta
    assert torch.equal(block(x), other(x))


@pytest.mark.parametrize("way", ["copy", "bytes"])
def test_copy_hooked_module(way: str) -> None:
    """A hooked module can be copied."""
    model, x = nn.Sequential(Block(), nn.Linear(4, 4)), torch.ones(1, 4)
    expected = model(x)
    offloaded(model[0])
    model(x)
    if way == "copy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    remove_hook_from_module(model, recurse=True)
    with torch.no_grad():
        model[0].first.weight.zero_()
    assert twin[0].first.weight.is_meta
    assert twin[0]._old_forward.__self__ is twin[0]
    assert torch.equal(twin(x), expected)
    assert torch.equal(twin(x), expected)
    assert twin[0].first.weight.is_meta
    assert not twin[0].first.state_dict()["weight"].is_meta
    remove_hook_from_module(twin, recurse=True)
    assert torch.equal(twin(x), expected)


def test_placeholder_changes_apply() -> None:
    """Freezing and converting the placeholders holds for the weights."""
    block, x = Block(), torch.ones(1, 4)
    half = copy.deepcopy(block).to(torch.bfloat16)
    offloaded(block)
    assert block(x).requires_grad
    block.requires_grad_(False)
    assert not block(x).requires_grad
    block.to(torch.bfloat16)
    assert torch.equal(block(x.to(torch.bfloat16)), half(x.to(torch.bfloat16)))
    assert block.state_dict()["first.weight"].dtype is torch.bfloat16


class Special(nn.Parameter):
    pass


def test_parameter_classes_kept() -> None:
    """Classes and attributes of parameters are kept."""
    linear = nn.Linear(2, 2)
    linear.weight = Special(linear.weight.detach())
    linear.weight.tag = "mine"  # type: ignore[attr-defined]
    offloaded(linear)
    assert (type(linear.weight), linear.weight.tag) == (Special, "mine")
    linear._hf_hook.pre_forward(linear)
    assert (type(linear.weight), linear.weight.tag, linear.weight.is_meta) == (Special, "mine", False)


def test_inference_mode_then_training() -> None:
    """Inference mode leaves nothing behind that training cannot use."""
    linear, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    offloaded(linear.requires_grad_(False))
    with torch.inference_mode():
        linear(x.detach())
    linear(x).sum().backward()
    assert x.grad is not None


# --- gradients, graphs, devices ------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, 6, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + self.up(self.down(x))


def test_adapters_get_same_gradients() -> None:
    """Adapters beside offloaded weights get the same gradients."""
    model = nn.Sequential(Adapted(), Adapted())
    plain = copy.deepcopy(model)
    for layer in model:
        offloaded(layer.base, weights_map=Bundling(weights_of(layer.base)))
    x = torch.randn(5, 6, dtype=torch.float64)
    for entry in (plain, model):
        entry(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_same_outputs(backend: str) -> None:
    """Compiled models give the same."""
    model, x = nn.Sequential(Block(), nn.Linear(4, 4), Block()).requires_grad_(False), torch.randn(2, 4)
    expected = model(x), model(x + 1)
    weights = Bundling(weights_of(model[0]))
    offloaded(model[0], weights_map=weights)
    offloaded(model[2])
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        assert torch.allclose(compiled(x), expected[0], atol=1e-6)
        assert torch.allclose(compiled(x + 1), expected[1], atol=1e-6)
    assert weights.bundles[0].taken == weights.bundles[0].given_back == 4
    assert model[0].first.weight.is_meta


def test_the_block_itself_is_compiled() -> None:
    """The block itself is compiled."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), Block()).requires_grad_(False)
    offloaded(model[1])
    torch.compiler.reset()
    torch.compile(model, backend=backend)(torch.ones(1, 4))
    assert any("relu" in graph.code for graph in graphs)


def test_inputs_moved_outputs_returned() -> None:
    """Inputs go to the execution device and outputs back."""
    class Probe(nn.Module):
        def forward(self, x: torch.Tensor, *, cache: Any, other: Any) -> Any:
            return [x.device.type, cache.device.type, other[0].device.type, x]

    probe = add_hook_to_module(Probe(), AlignDevicesHook(execution_device="meta", skip_keys=["cache"]))
    ones = torch.ones(2)
    assert probe(ones, cache=ones, other=[ones])[:3] == ["meta", "cpu", "meta"]
    back = add_hook_to_module(nn.Identity(), AlignDevicesHook(execution_device="meta"))
    back._hf_hook.io_same_device = True
    assert back(torch.ones(2, device="meta")).device.type == "meta"
    assert not back._hf_hook._input_devices


def test_outputs_on_first_input_device() -> None:
    """Outputs return to the device of the first input."""
    class Answer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.device.type == "meta"
            return torch.zeros(3)  # elsewhere than the input came from

    module = add_hook_to_module(Answer(), AlignDevicesHook(execution_device="meta", io_same_device=True))
    assert module(torch.ones(1, device="meta")).device.type == "meta"


class Moving(nn.Linear):
    """Counts how often it is moved, and to where."""

    moves: tuple[str, ...] = ()

    def to(self, device: Any) -> Moving:  # type: ignore[override]
        self.moves = (*self.moves, str(device))
        return super().to(device)


def test_cpu_offload_chain() -> None:
    """Whole models hop and send the one before away."""
    first, second = Moving(2, 2), Moving(2, 2)
    first_handle = UserCpuOffloadHook(first, CpuOffload(execution_device="cpu"))
    add_hook_to_module(first, first_handle.hook)
    add_hook_to_module(second, CpuOffload(execution_device="cpu", prev_module_hook=first_handle))
    second(first(torch.ones(1, 2)))
    assert (first.moves, second.moves) == (("cpu",), ("cpu",))  # where it is already nothing is moved
    second._hf_hook.execution_device = "meta"
    first.to("meta")
    first._hf_hook.init_hook = lambda module: module.to("meta")  # there is no way back from meta
    second._hf_hook.pre_forward(second, torch.ones(1))
    assert first.moves == ("cpu", "meta", "meta")
    assert second.moves == ("cpu", "meta")
    first_handle.offload()
    assert first.moves[-1] == "meta"
    first_handle.remove()
    assert not hasattr(first, "_hf_hook")
