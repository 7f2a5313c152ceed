"""Blocks are arithmetic over a tree of modules; `fully_shard` over fake ranks groups the parameters as the plan says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
import transformers
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.parallel.wrap_policy import BlockPlan, group_parameters, plan_blocks


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.inner(x))


class Other(Block):
    """Another class of block."""


class Model(nn.Module):
    def __init__(self, depth: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (hidden := self.embed(x), *self.layers)[1:]:
            hidden = layer(hidden)
        return self.head(hidden)


class Pair(nn.Module):
    """Two modules side by side, not in a list."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


def plan(model: nn.Module, policy: str | Callable[..., bool] | None = None, *names: str, **options: Any) -> BlockPlan:
    defaults = {"min_num_params": 100_000_000, "ignored_modules": None}
    return plan_blocks(model, SimpleNamespace(auto_wrap_policy=policy, transformer_cls_names_to_wrap=names, **{**defaults, **options}))


def names(plan: BlockPlan) -> list[str]:
    return [name for name, _ in plan.blocks]


# Classes


def test_named_classes() -> None:
    """The modules of the named classes are blocks, in the order of the model."""
    found = plan(Model(3), "transformer_based_wrap", "Block")
    assert names(found) == ["layers.0", "layers.1", "layers.2"]
    assert found.reason == "Block, from transformer_cls_names_to_wrap"
    assert names(plan(Model(1), "TRANSFORMER_BASED_WRAP", "Block", "Embedding")) == ["embed", "layers.0"]


def test_nested_innermost_first() -> None:
    """A block inside of a block comes before it; a subclass counts as its base."""
    assert names(plan(Model(1), "transformer_based_wrap", "Block", "Linear")) == ["layers.0.inner", "layers.0", "head"]
    assert names(plan(Pair(Other(), Block()), "transformer_based_wrap", "Block")) == ["left", "right"]


def test_unknown_class() -> None:
    """A class that is not in the model: the error names those that are."""
    with pytest.raises(ConfigError, match=r"no module of the class 'Blok' .* did you mean 'Block'\? .*classes: Block, Embedding, Linear"):
        plan(Model(), "transformer_based_wrap", "Block", "Blok")


def test_container_class() -> None:
    """A list without a forward is no block."""
    with pytest.raises(ConfigError, match="ModuleList .* containers without a forward"):
        plan(Model(), "transformer_based_wrap", "ModuleList")


def test_no_split_modules() -> None:
    """Without names the model's own list counts; without that list there is an error."""
    model = Model()
    with pytest.raises(ConfigError, match="transformer_based_wrap needs the classes of the blocks"):
        plan(model, "transformer_based_wrap")
    model._no_split_modules = ["Gone", "Block"]
    for policy in (None, "transformer_based_wrap"):
        assert names(plan(model, policy)) == ["layers.0", "layers.1"]
        assert plan(model, policy).reason.endswith("Block, from the model's _no_split_modules")
        assert names(plan(Pair(model, nn.Linear(2, 2)), policy)) == ["left.layers.0", "left.layers.1"]
    model._no_split_modules = ["Gone"]
    with pytest.raises(ConfigError, match="no module of the class 'Gone'"):
        plan(model, "transformer_based_wrap")
    assert plan(model).reason == "Block, which is repeated in layers"


def test_root_class() -> None:
    """A name that only the root has shards the root alone, and says so."""
    found = plan(Model(), "transformer_based_wrap", "Model")
    assert names(found) == []
    assert "it matches the root alone" in found.reason


# Without a policy


def test_repeated_siblings() -> None:
    """Repeated classes in lists are blocks, the outermost of them."""
    found = plan(nn.ModuleDict({"a": Model(2), "b": nn.Sequential(Other(), nn.ReLU(), Other())}))
    assert names(found) == ["a.layers.0", "a.layers.1", "b.0", "b.2"]
    assert found.reason == "Block, Other, which are repeated in a.layers, b"
    experts = nn.Sequential(*(Pair(nn.Linear(4, 4), nn.Sequential(Block(), Block())) for _ in range(2)))
    assert names(plan(experts)) == ["0", "1"]


def test_repeated_elsewhere() -> None:
    """A class that occurs twice is a block when nothing is repeated in a list."""
    found = plan(Pair(Block(), Pair(Block(), nn.Linear(4, 4))))
    assert names(found) == ["left", "right.left"]
    assert found.reason == "Block, which is found 2 times"


def test_nothing_repeated() -> None:
    """Layers are no blocks: the root alone is sharded, and the reason says so."""
    for model in (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(2, 2), Block()):
        found = plan(model)
        assert names(found) == []
        assert "root alone" in found.reason


def test_no_wrap() -> None:
    """no_wrap leaves everything to the root."""
    assert names(plan(Model(), "no_wrap")) == []


# Sizes


def test_size_based() -> None:
    """A module is a block when what its blocks do not hold reaches the number."""
    model = Model(2)  # embed 32, layers 28 each (20 + 8), head 32: 120
    assert names(plan(model, "size_based_wrap", min_num_params=30)) == ["embed", "head"]
    assert names(plan(model, "size_based_wrap", min_num_params=28)) == ["embed", "layers.0", "layers.1", "head"]
    assert names(plan(model, "size_based_wrap", min_num_params=20)) == ["embed", "layers.0.inner", "layers.1.inner", "head"]
    assert names(plan(Pair(model, model.head), "size_based_wrap", min_num_params=80)) == []


def test_size_based_nothing() -> None:
    """A number that the whole model does not reach matches nothing."""
    with pytest.raises(ConfigError, match=r"min_num_params=100,000,000 matches nothing: Model has 120 parameters in all"):
        plan(Model(), "size_based_wrap")
    with pytest.raises(ConfigError, match="needs a number of parameters from 1"):
        plan(Model(), "size_based_wrap", min_num_params=0)


def test_size_based_tied() -> None:
    """A module that shares a parameter with the rest is left to what contains both."""
    assert names(plan(Model(2, tied=True), "size_based_wrap", min_num_params=28)) == ["layers.0", "layers.1"]


def test_attention_is_whole() -> None:
    """What attention reads without calling it is never a block."""
    attention = nn.MultiheadAttention(4, 1)
    model = Pair(attention, nn.Linear(4, 4))
    assert names(plan(model, "size_based_wrap", min_num_params=10)) == ["left", "right"]
    assert names(plan(model, "transformer_based_wrap", "Linear")) == ["right"]
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert names(plan(Pair(parametrized, nn.Linear(4, 4)), lambda module: True)) == ["left", "right"]


# Functions


def test_function() -> None:
    """A function of a module decides for each module that can be a block."""
    assert names(plan(Model(1), lambda module: isinstance(module, (Block, nn.ModuleList, nn.ReLU)))) == ["layers.0"]
    with pytest.raises(ConfigError, match="wrap policy .*<lambda> matches no module"):
        plan(Model(), lambda module: False)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["layers.0", "layers.1"]),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=28), ["embed", "layers.0", "layers.1", "head"]),
        (ModuleWrapPolicy({Block}), ["layers.0", "layers.1"]),
    ],
)
def test_policies_of_fsdp1(policy: Callable[..., bool], expected: list[str]) -> None:
    """The policies that torch has for FSDP1 are asked as FSDP1 asks them."""
    assert names(plan(Model(2), policy)) == expected


def test_unknown_policy() -> None:
    """Another word or object is refused with what can be written."""
    with pytest.raises(ConfigError, match="'transformer_based_wrap', 'size_based_wrap', 'no_wrap'"):
        plan(Model(), "transformer_wrap")
    with pytest.raises(ConfigError, match="CustomPolicy, which only FSDP1 can run"):
        plan(Model(), CustomPolicy(lambda module: True))  # type: ignore[arg-type]


# Ignored modules


def test_ignored_pattern() -> None:
    """A regular expression matches whole names; what is inside is not listed again."""
    found = plan(Model(3), ignored_modules=r"layers\.1(\..*)?|head")
    assert names(found) == ["layers.0", "layers.2"]
    assert [name for name, _ in found.ignored] == ["layers.1", "head"]


def test_ignored_modules() -> None:
    """Modules are ignored by identity; a block with nothing left is no block."""
    model = Model(2)
    found = plan(model, "transformer_based_wrap", "Block", ignored_modules=(model.layers[0].inner, model.layers[0].norm, model.embed))
    assert names(found) == ["layers.1"]
    assert [name for name, _ in found.ignored] == ["layers.0.inner", "layers.0.norm", "embed"]


def test_ignored_mistakes() -> None:
    """A pattern without a match, one that is none, a stranger, and everything at once are refused."""
    model = Model()
    for ignored, text in [
        ("layer", "matches no module: .* are embed, layers, layers.0"),
        ("(", "is not a regular expression"),
        ((nn.Linear(2, 2),), "a Linear that is not a module of Model"),
        ("embed|layers|head", "ignored_modules covers all"),
    ]:
        with pytest.raises(ConfigError, match=text):
            plan(model, ignored_modules=ignored)


def test_tied_to_ignored() -> None:
    """A parameter that an ignored module shares is ignored everywhere."""
    model = Model(tied=True)
    found = plan(model, "transformer_based_wrap", "Block", "Linear", ignored_modules=(model.embed,))
    assert "head" not in names(found)
    assert list(group_parameters(model, found)[None]) == ["embed.weight"]


# Shared parameters


def test_shared_with_root() -> None:
    """A block that shares a parameter with the root is refused when it was asked for, and left to the root when it was not."""
    model = Model(2, tied=True)
    with pytest.raises(ConfigError, match=r"embed\.weight and head\.weight are one .*embed \(Embedding\) and the root.*Do not wrap"):
        plan(model, "transformer_based_wrap", "Block", "Embedding")
    model._no_split_modules = ["Embedding", "Block"]
    found = plan(model)
    assert names(found) == ["layers.0", "layers.1"]
    assert "without embed (Embedding), which shares a parameter" in found.reason


@pytest.mark.parametrize("policy", [None, "transformer_based_wrap"])
def test_shared_between_blocks(policy: str | None) -> None:
    """Two blocks with one parameter are refused under both names, and the module around them is named."""
    model = Model(3)
    model.layers[2].inner.weight = model.layers[0].inner.weight
    with pytest.raises(ConfigError, match=r"layers\.0\.inner\.weight and layers\.2\.inner\.weight .* the root holds both"):
        plan(model, policy, "Block")
    with pytest.raises(ConfigError, match=r"Wrap left \(Model\), which contains both, instead of Block"):
        plan(Pair(model, nn.Linear(2, 2)), policy, "Block")


def test_shared_module() -> None:
    """A block that stands in two places is one block."""
    block = Block()
    model = nn.Sequential(block, nn.ReLU(), block)
    assert names(plan(model, "transformer_based_wrap", "Block")) == ["0"]
    assert names(plan(nn.Sequential(Pair(block, Block()), Pair(block, Block())), "transformer_based_wrap", "Block", "Pair")) == [
        "0.left", "0.right", "0", "1.right", "1",
    ]  # fmt: skip


# Any tree


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A tree of modules in which a few parameters, and perhaps a module, are shared."""
    model = nn.Sequential(*(draw(nodes(depth)) for _ in range(draw(st.integers(1, 3)))))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(draw(st.integers(0, 2)) if len(linear) > 1 else 0):
        draw(st.sampled_from(linear)).weight = draw(st.sampled_from(linear)).weight
    pairs = [module for module in model.modules() if isinstance(module, Pair)]
    if len(pairs) > 1 and draw(st.booleans()):
        pairs[0].right = pairs[-1].left  # one module in two places
    return model


@st.composite
def nodes(draw: st.DrawFn, depth: int) -> nn.Module:
    kind = draw(st.sampled_from(("linear", "block", "list", "sequential", "pair", "none", "attention")))
    inner = functools.partial(nodes, depth - 1)
    if depth == 0 or kind == "linear":
        return nn.Linear(4, 4)
    if kind == "pair":
        return Pair(draw(inner()), draw(inner()))
    if kind in ("list", "sequential"):
        children = [draw(inner()) for _ in range(draw(st.integers(0, 3)))]
        return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)
    return {"block": Block, "none": nn.ReLU, "attention": lambda: nn.MultiheadAttention(4, 1)}[kind]()


POLICIES = st.one_of(
    st.none(),
    st.just("no_wrap"),
    st.integers(1, 80).map(lambda number: f"size_based_wrap {number}"),
    st.lists(st.sampled_from(["Block", "Pair", "Linear", "Sequential"]), min_size=1, max_size=3, unique=True).map(
        lambda found: "transformer_based_wrap " + " ".join(found)
    ),
    st.sampled_from([lambda module: True, ModuleWrapPolicy({Block, nn.Linear})]),
)


@settings(max_examples=300)
@given(trees(), POLICIES, st.sampled_from([None, r"0", r".*\.1", r".*\.inner"]))
def test_every_parameter_once(model: nn.Module, policy: Any, ignored: str | None) -> None:
    """Every parameter belongs to exactly one block, the root, or what is ignored; or the plan is refused."""
    words = policy.split() if isinstance(policy, str) else [policy]
    number = int(words[1]) if words[0] == "size_based_wrap" else 1
    chosen = words[1:] if words[0] == "transformer_based_wrap" else []
    try:
        found = plan(model, words[0], *chosen, min_num_params=number, ignored_modules=ignored)
    except ConfigError:
        return
    groups = group_parameters(model, found)
    listed = [parameter for parameters in groups.values() for parameter in parameters.values()]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(model.parameters())
    assert set(groups[None].values()) == {parameter for _, module in found.ignored for parameter in module.parameters()}
    order = [module for _, module in found.blocks]
    for index, (name, module) in enumerate(found.blocks):
        assert name
        assert model.get_submodule(name) is module
        assert not isinstance(module, (nn.ModuleList, nn.ReLU))
        assert set(module.modules()).isdisjoint(order[index + 1 :])
        assert set(groups[name].values()) <= set(module.parameters())
        assert words[0] != "size_based_wrap" or sum(parameter.numel() for parameter in groups[name].values()) >= number


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("policy", "classes"), [(None, ()), ("transformer_based_wrap", ("Block", "Linear")), ("size_based_wrap", ()), ("no_wrap", ())]
)
def test_groups_of_fully_shard(fake_ranks: None, policy: str | None, classes: tuple[str, ...]) -> None:
    """`fully_shard`, applied to the blocks of a plan, groups the parameters as the plan says."""
    model = Pair(Model(2, tied=not classes), nn.Linear(4, 4))
    found = plan(model, policy, *classes, min_num_params=28, ignored_modules=r"left\.layers\.1\.norm")
    expected = {name: set(parameters) for name, parameters in group_parameters(model, found).items() if name is not None}
    ignored = {parameter for _, module in found.ignored for parameter in module.parameters()}
    mesh = init_device_mesh(CPU.type, (4,))
    actual = {}
    for name, module in (*found.blocks, ("", model)):
        before = {name: parameter for name, parameter in model.named_parameters()}
        fully_shard(module, mesh=mesh, ignored_params=ignored)
        actual[name] = {key for key, parameter in model.named_parameters() if before[key] is not parameter}
    assert actual == expected


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
TOKENS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("policy", [None, "size_based_wrap"])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Transformer(32, 2, 2, 2, 64, batch_first=True), {"src": torch.ones(2, 8, 32), "tgt": torch.ones(2, 8, 32)}),
        (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), {"input_ids": TOKENS}),
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), {"input_ids": TOKENS}),
        (lambda: nn.Sequential(nn.Embedding(100, 32), nn.LSTM(32, 32, 2)), {"input": TOKENS}),
    ],
    ids=["transformer", "bert", "llama", "lstm"],
)
def test_planned_models_run(fake_ranks: None, policy: str | None, make: Callable[[], nn.Module], inputs: dict[str, Any]) -> None:
    """No module that is chosen is used without being called: its parameters are there when it runs, and all have gradients."""
    model = make()
    mesh = init_device_mesh(CPU.type, (4,))
    for _, module in (*plan(model, policy, min_num_params=500).blocks, ("", model)):
        fully_shard(module, mesh=mesh)
    outputs = model(**inputs)
    outputs = getattr(outputs, "logits", outputs)
    (outputs if torch.is_tensor(outputs) else outputs[0]).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
