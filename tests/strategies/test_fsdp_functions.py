"""The single steps of sharded training do what `prepare` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_training import Net, adamw, batches, loss_of, net, same
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.errors import ConfigError
from slipstream.utils import (
    compile_regions_fsdp2,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    get_parameters_from_modules,
    is_compiled_module,
)

Ranks = Any
Plugin = FullyShardedDataParallelPlugin


def update(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Train on two batches of this rank, and return the weights."""
    for words, following in list(accelerator.prepare(batches(accelerator, 24))):
        accelerator.backward(loss_of(model(words), following))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def train_by_prepare() -> dict[str, torch.Tensor]:
    accelerator = Accelerator()
    model, optimizer = net(), None
    model, optimizer = accelerator.prepare(model, adamw(model))
    return update(accelerator, model, optimizer)


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["parameter", "address"])
def test_by_hand(ranks: Ranks, key: str) -> None:
    """A model that is sharded and an optimizer that is switched by hand train as one process does."""

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = net(seed=accelerator.process_index)  # rank 0's weights count
        optimizer = adamw(model)
        old = dict(model.named_parameters())
        keys = {name: parameter if key == "parameter" else parameter.data_ptr() for name, parameter in old.items()}
        assert fsdp2_apply_ac(accelerator, model) is model
        assert fsdp2_prepare_model(accelerator, model) is model
        assert fsdp2_prepare_model(accelerator, model) is model
        assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert model.head.weight is model.embed.weight
        fsdp2_switch_optimizer_parameters(optimizer, {keys[name]: parameter for name, parameter in model.named_parameters()})
        model, optimizer = accelerator.prepare(model, optimizer)
        return update(accelerator, model, optimizer)

    expected = ranks(1).run(train_by_prepare)[0]
    for found in ranks(2).run(run):
        same(found, expected)


def test_checkpointed_blocks(ranks: Ranks) -> None:
    """`fsdp2_apply_ac` makes the blocks that the plugin shards run twice, whether the model is sharded already or not."""

    def run(early: bool) -> list[int]:
        accelerator = Accelerator(fsdp_plugin=Plugin(transformer_cls_names_to_wrap=["Block"]))
        model, calls = net(), []
        for name, module in model.named_modules():
            if name in ("blocks.0.wide", "norm"):
                module.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
        if early:
            fsdp2_apply_ac(accelerator, model)
        fsdp2_prepare_model(accelerator, model)
        if not early:
            fsdp2_apply_ac(accelerator, model)
        model(torch.ones(2, 5, dtype=torch.long, device=accelerator.device)).sum().backward()
        return [calls.count(name) for name in ("blocks.0.wide", "norm")]

    for early in (True, False):
        assert ranks(2).run(run, early) == [[2, 1], [2, 1]]


def test_without_plugin() -> None:
    """An Accelerator that does not shard cannot say how to."""
    for function in (fsdp2_prepare_model, fsdp2_apply_ac):
        with pytest.raises(ConfigError, match=rf"{function.__name__} with an Accelerator that does not shard.*\n.*fsdp_plugin="):
            function(Accelerator(), net())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"transformer_cls_names_to_wrap": ["Block"]}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 200}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"auto_wrap_policy": lambda module: isinstance(module, torch.nn.LayerNorm)}, ["norm"]),
        ({"auto_wrap_policy": "no_wrap"}, None),
    ],
)
def test_wrap_policy(options: dict[str, Any], expected: list[str] | None) -> None:
    """The function of a policy says which modules are blocks."""
    model = net()
    is_block = fsdp2_prepare_auto_wrap_policy(Plugin(**options), model)
    assert (is_block and [name for name, module in model.named_modules() if is_block(module)]) == expected


def test_wrap_policy_refused() -> None:
    """A class that is not there, and something that is no plugin."""
    with pytest.raises(ConfigError, match="Blok"):
        fsdp2_prepare_auto_wrap_policy(Plugin(transformer_cls_names_to_wrap=["Blok"]), net())
    with pytest.raises(ConfigError, match="NoneType"):
        fsdp2_prepare_auto_wrap_policy(None, net())  # type: ignore[arg-type]


def test_compiled_regions(ranks: Ranks) -> None:
    """Blocks are compiled in place, before or after the model is sharded, and nothing else changes."""

    def run(early: bool) -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = net()
        optimizer = adamw(model)
        if early:
            assert compile_regions_fsdp2(model, backend="eager") is model
        model, optimizer = accelerator.prepare(model, optimizer)
        if not early:
            assert compile_regions_fsdp2(model, backend="eager") is model
        assert is_compiled_module(model.blocks[0])
        assert not is_compiled_module(model)
        return update(accelerator, model, optimizer)

    expected = ranks(1).run(train_by_prepare)[0]
    for early in (True, False):
        for found in ranks(2).run(run, early):
            same(found, expected)


# -- parameters -------------------------------------------------------------------------------------------------------


def test_load_full(ranks: Ranks) -> None:
    """Rank 0's state dict reaches every shard, whole parameter and buffer; other ranks need none. Names of wrappers do not matter."""

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules="norm", reshard_after_forward=False))
        model = accelerator.prepare(net())
        words = torch.arange(5, device=accelerator.device).view(1, 5)
        model(words)  # parameters stay gathered after it
        state = net(seed=5).state_dict() if accelerator.is_main_process else {}
        if state:
            state["temperature"] = torch.tensor(0.25)
            state = {f"_orig_mod.{name}": value.double() for name, value in state.items()}
            del state["_orig_mod.embed.weight"]  # tied: its other name is there
        before = list(accelerator.unwrap_model(model).state_dict(keep_vars=True).values())
        fsdp2_load_full_state_dict(accelerator, model, state, cpu_offload=accelerator.device.type == "cpu")
        assert all(old is new for old, new in zip(before, model.state_dict(keep_vars=True).values(), strict=True))
        return accelerator.get_state_dict(model), model(words).detach()

    plain = net(seed=5)
    plain.temperature.fill_(0.25)
    for found, outputs in ranks(2).run(run):
        same(found, plain.state_dict(), atol=0)
        assert torch.allclose(outputs, plain(torch.arange(5).view(1, 5)), atol=1e-5)


@pytest.mark.parametrize("placement", [0, 1])
def test_load_meta(ranks: Ranks, placement: int) -> None:
    """A model that the script sharded on the meta device gets memory and values, and an optimizer made before follows."""

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
        mesh = accelerator.torch_device_mesh
        by_column = {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)} if placement else {}
        fully_shard(model[0], mesh=mesh["dp_shard"], **by_column)
        fully_shard(model, mesh=mesh["dp_shard"], **by_column)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
        fsdp2_load_full_state_dict(accelerator, model, plain.state_dict() if accelerator.is_main_process else {})
        model, optimizer = accelerator.prepare(model, optimizer)
        same(accelerator.get_state_dict(model), plain.state_dict(), atol=0)
        simple = torch.optim.SGD(plain.parameters(), lr=0.1)
        inputs = torch.arange(18.0).view(3, 6)
        for network, stepper, rows in ((plain, simple, inputs), (model, optimizer, inputs.to(accelerator.device))):
            network(rows).square().mean().backward()
            stepper.step()
        same(accelerator.get_state_dict(model), plain.state_dict())

    ranks(2).run(run)


BAD_STATES = {
    "missing": (lambda state: {name: value for name, value in state.items() if name != "norm.bias"}, r"no 'norm\.bias'"),
    "strange": (lambda state: {**state, "extra": torch.ones(1)}, "extra, which is no parameter"),
    "shape": (lambda state: {**state, "norm.bias": torch.ones(3)}, r"shape \[3\], but the model needs \[7\]"),
    "text": (lambda state: {**state, "norm.bias": "none"}, "is no tensor"),
    "meta": (lambda state: {**state, "norm.bias": torch.ones(7, device="meta")}, "on the meta device"),
    "twice": (lambda state: {**state, "_orig_mod.norm.bias": torch.ones(7)}, r"two of the names are 'norm\.bias'"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_full_state(ranks: Ranks, name: str) -> None:
    """A state dict that does not fit is an error on every rank, and nothing has changed."""
    change, message = BAD_STATES[name]

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = accelerator.prepare(net())
        with pytest.raises(ConfigError, match=message):
            fsdp2_load_full_state_dict(accelerator, model, change(net(seed=5).state_dict()) if accelerator.is_main_process else {})
        return accelerator.get_state_dict(model)

    for found in ranks(2).run(run):
        same(found, net().state_dict(), atol=0)


def test_load_replicas(ranks: Ranks) -> None:
    """Replicas get rank 0's values too."""

    def run() -> Any:
        accelerator = Accelerator()
        model = accelerator.prepare(net())
        fsdp2_load_full_state_dict(accelerator, model, net(seed=5).state_dict() if accelerator.is_main_process else {})
        return accelerator.get_state_dict(model)

    for found in ranks(2).run(run):
        same({name: value.detach() for name, value in found.items()}, net(seed=5).state_dict(), atol=0)


def test_retied() -> None:
    """A function that gives every place memory of its own leaves tied weights tied; without ties it is the function itself."""
    with torch.device("meta"):
        model = Net()

    def initialize(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            torch.nn.init.constant_(parameter, 2.0)

    retied = ensure_weights_retied(initialize, model, torch.device("cpu"))
    for module in model.modules():
        retied(module)
    assert model.head.weight is model.embed.weight
    assert all(bool((parameter == 2).all()) for parameter in model.parameters())
    assert ensure_weights_retied(initialize, net(tied=False), torch.device("cpu")) is initialize


def test_retied_whole() -> None:
    """A function that initialises everything at once, and leaves the tied weight to the device that was asked for."""
    model = net()
    retied = ensure_weights_retied(lambda module: module.to_empty(device="meta"), model, "cpu")
    assert retied(model) is model
    assert model.head.weight is model.embed.weight
    assert model.head.weight.is_cpu
    assert model.norm.weight.is_meta


def test_retied_in_prepare(ranks: Ranks) -> None:
    """The function serves as `param_init_fn` of a model that has values nowhere."""

    def run() -> Any:
        with torch.device("meta"):
            model = Net()

        def initialize(module: torch.nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                torch.nn.init.constant_(parameter, 0.5)

        plugin = Plugin(param_init_fn=ensure_weights_retied(initialize, model, "cpu"))
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = fsdp2_prepare_model(accelerator, model)
        assert model.head.weight is model.embed.weight
        return accelerator.get_state_dict(model)

    for found in ranks(2).run(run):
        assert all(bool((value == 0.5).all()) for name, value in found.items() if name != "temperature")


def test_canonical_names() -> None:
    """Names of wrappers that are nested in any order go; other names stay."""
    names = ["a._checkpoint_wrapped_module._orig_mod.b", "_fsdp_wrapped_module.c", "module.d"]
    assert list(fsdp2_canonicalize_names(dict.fromkeys(names))) == ["a.b", "c", "module.d"]
    assert fsdp2_canonicalize_names({}) == {}
    with pytest.raises(ConfigError, match="two of the names are 'a'"):
        fsdp2_canonicalize_names({"_orig_mod.a": 1, "a": 2})


def test_parameters_of_modules() -> None:
    """Modules, or a pattern over whole names; they are moved to the device, meta parameters excepted."""
    model = net()
    blocks = {*model.blocks[0].parameters(), *model.blocks[2].parameters()}
    assert get_parameters_from_modules([model.blocks[0], model.blocks[2]], model, "cpu") == blocks
    assert get_parameters_from_modules(r"blocks\.[02]", model, torch.device("cpu")) == blocks
    assert get_parameters_from_modules(None, model, "cpu") == set()
    empty = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"))
    assert all(parameter.is_meta for parameter in get_parameters_from_modules("0", empty, "cpu"))
    with pytest.raises(ConfigError, match="modules='block' matches no module"):
        get_parameters_from_modules("block", model, "cpu")
    with pytest.raises(ConfigError, match="modules has a Linear that is not a module of Net"):
        get_parameters_from_modules([torch.nn.Linear(1, 1)], model, "cpu")


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_switch_keeps_state() -> None:
    """Groups, their settings and the state of the parameters go along."""
    first, second, new = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0, 3.0))
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    (first.sum() + second.sum()).backward()
    optimizer.step()
    moment = optimizer.state[second]["exp_avg"]
    fsdp2_switch_optimizer_parameters(optimizer, {first: first, second: new})
    assert [group["params"][0] for group in optimizer.param_groups] == [first, new]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.state[new]["exp_avg"] is moment
    assert second not in optimizer.state


def test_switch_refused() -> None:
    """A parameter that the mapping does not know is an error, and no group has changed. Meta parameters share no address."""
    known, unknown = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.SGD([known, unknown], lr=0.1)
    with pytest.raises(ConfigError, match=r"group 0 of SGD has a parameter of the shape \[3\]"):
        fsdp2_switch_optimizer_parameters(optimizer, {known: torch.nn.Parameter(torch.zeros(2)), 0: known})
    assert optimizer.param_groups[0]["params"][0] is known


def test_scaler(ranks: Ranks) -> None:
    """An overflow in the shard of one rank skips the update of all; the next one is made."""

    def run() -> list[float]:
        accelerator = Accelerator(fsdp_plugin=Plugin(auto_wrap_policy="no_wrap"))
        model = fsdp2_prepare_model(accelerator, torch.nn.Linear(1, 4, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = get_fsdp2_grad_scaler(init_scale=8.0, growth_interval=1000)
        scales = []
        for factor in (torch.tensor([1.0, 1.0, 1.0, torch.inf]), torch.ones(4)):  # the last row is on the last rank
            before = accelerator.get_state_dict(model)["weight"].clone()
            scaler.scale((model(torch.ones(1, 1, device=accelerator.device)) * factor.to(accelerator.device)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = (accelerator.get_state_dict(model)["weight"] - before).flatten()
            scales += [scaler.get_scale(), round(float(moved.abs().max()), 4), round(float(moved.abs().min()), 4)]
        return scales

    assert ranks(2).run(run) == [[4.0, 0.0, 0.0, 4.0, 0.1, 0.1]] * 2
