"""Device maps: against a packer that tries everything, and what users rely on."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from slipstream.big_models.device_map.plan import (
    DeviceMap,
    clean_device_map,
    fallback_allocate,
    infer_auto_device_map,
)
from slipstream.big_models.device_map.sizes import compute_module_sizes
from slipstream.big_models.device_map.validation import check_device_map, find_entry
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.errors import ConfigError

# --- random models -----------------------------------------------------------------------------------------------------------


class Leaf(nn.Module):
    def __init__(self, weight: int, buffer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(weight, dtype=torch.uint8, device="meta"), requires_grad=False)
        if buffer:
            self.register_buffer("table", torch.empty(buffer, dtype=torch.uint8, device="meta"), persistent=buffer % 2 == 0)


class Node(nn.Module):
    def __init__(self, children: list[nn.Module], direct: int, buffer: int) -> None:
        super().__init__()
        if direct:
            self.scale = nn.Parameter(torch.empty(direct, dtype=torch.uint8, device="meta"), requires_grad=False)
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)
        if buffer:
            self.register_buffer("table", torch.empty(buffer, dtype=torch.uint8, device="meta"))


class Whole(Node):
    """A class that must not be split."""


SIZES = st.integers(0, 9)
LEAVES = st.builds(Leaf, SIZES, st.sampled_from([0, 0, 0, 1, 2])) | st.builds(nn.ReLU)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda kind, children, direct, buffer: kind(children, direct, buffer),
        st.sampled_from([Node, Node, Whole]),
        st.lists(inner, min_size=1, max_size=3),
        st.sampled_from([0, 0, 3]),
        st.sampled_from([0, 0, 0, 2]),
    ),
    max_leaves=6,
)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A root with one to three trees, and sometimes weights that two leaves share, or one module in two places."""
    model = Node(draw(st.lists(TREES, min_size=1, max_size=3)), draw(st.sampled_from([0, 2])), draw(st.sampled_from([0, 0, 1])))
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    if len(leaves) > 1 and draw(st.booleans()):
        first, second = draw(st.lists(st.sampled_from(leaves), min_size=2, max_size=2, unique_by=id))
        second.weight = first.weight
    if draw(st.integers(0, 4)) == 0:
        model.again = draw(st.sampled_from([module for module in model.modules() if module is not model]))
    return model


BUDGETS = st.fixed_dictionaries(
    {}, optional={0: st.integers(0, 30), 1: st.integers(0, 30), "cpu": st.integers(0, 40), "disk": st.integers(0, 30)}
)


# --- the packer that tries everything ----------------------------------------------------------------------------------------


@dataclass
class Bundle:
    """Pieces that share something: names, bytes together, bytes of buffers, and the largest of them alone."""

    names: list[str]
    size: int
    buffers: int
    layer: int


def pieces(model: nn.Module, name: str = "") -> list[tuple[str, list[nn.Module], list[tuple[nn.Module, str]]]]:
    """(name, modules in it, tensors in it by module and attribute) of what cannot be divided."""
    inside = [(module, key) for module in model.modules() for key in (*module._parameters, *module._buffers)]
    if not list(model.children()) or isinstance(model, Whole):
        return [(name, [*model.modules()], inside)] if inside else []
    start = f"{name}." if name else ""
    found = [(start + key, [], [(model, key)]) for key in model._parameters]
    for key, child in model._modules.items():
        found += pieces(child, start + key)
    return found + [(start + key, [], [(model, key)]) for key in model._buffers]


def bundles(model: nn.Module, stay: bool) -> list[Bundle]:
    found = pieces(model)
    ids = [{id(getattr(m, key)) if key in m._parameters else (id(m), key) for m, key in tensors} for _, _, tensors in found]
    sets: list[set[int]] = []
    for number in range(len(found)):
        joined = [entry for entry in sets if any(ids[number] & ids[other] for other in entry)]
        sets = [entry for entry in sets if entry not in joined] + [{number}.union(*joined)]

    def weigh(numbers: set[int]) -> tuple[int, int]:
        tensors = {}
        for number in numbers:
            for module, key in found[number][2]:
                tensor, is_buffer = getattr(module, key), key in module._buffers
                tensors[(id(module), key) if is_buffer else id(tensor)] = (tensor.numel(), is_buffer)
        return sum(size for size, _ in tensors.values()), sum(size for size, buffer in tensors.values() if buffer)

    result = []
    for numbers in sorted(sets, key=min):
        layers = [weigh({number}) for number in numbers]
        layer = max(size - buffers if stay else size for size, buffers in layers)
        result.append(Bundle([found[number][0] for number in sorted(numbers)], *weigh(numbers), layer))
    return result


def allowed(items: list[Bundle], places: tuple, caps: dict, main, stay: bool) -> list[int] | None:
    """Bytes per device if nothing exceeds its cap; None if something does."""
    held = dict.fromkeys(caps, 0)
    away = []
    for item, place in zip(items, places, strict=True):
        offloaded = place == "disk" or (place == "cpu" and main != "cpu")
        held[place] += item.size - (item.buffers if offloaded and stay else 0)
        away += [item] if offloaded else []
    extra = max((item.layer for item in away), default=0) + (sum(item.buffers for item in away) if stay else 0)
    fits = all(held[place] + (extra if place == main else 0) <= cap for place, cap in caps.items())
    return [*held.values()] if fits else None


def brute_force(items: list[Bundle], caps: dict, stay: bool) -> list[int] | None:
    """Bytes per device of the best packing in order; None if there is none."""
    devices = list(caps)
    found, passing = [], {}
    for places in combinations_with_replacement(devices, len(items)):
        used = [device for device in devices if device in places and device not in ("cpu", "disk")]
        main = used[0] if used else "cpu" if "cpu" in places else None
        if main is not None:
            found.append(allowed(items, places, caps, main, stay))
        if not used:
            for passed in (device for device in devices if device != "disk" and device not in places):
                passing.setdefault(passed, []).append(allowed(items, places, caps, passed, stay))
    for candidates in (found, *(passing[device] for device in devices if device in passing)):
        if any(candidate is not None for candidate in candidates):
            return max(candidate for candidate in candidates if candidate is not None)
    return None


def loads(plan: DeviceMap, items: list[Bundle], caps: dict, stay: bool) -> list[int] | None:
    places = tuple(plan[find_entry(plan, item.names[0])] for item in items)
    return allowed(items, places, caps, plan.main_device, stay)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(), BUDGETS, st.booleans(), st.booleans())
def test_plans_equal_exhaustive_search(model: nn.Module, budget: dict, offload_buffers: bool, clean: bool) -> None:
    """Plans equal those of a packer that tries everything."""
    stay = not offload_buffers
    items = bundles(model, stay)
    caps = {device: budget[device] for device in (0, 1, "cpu") if budget.get(device)} | {"disk": budget.get("disk", 10**9)}
    caps = {device: cap for device, cap in caps.items() if cap}
    best = brute_force(items, caps, stay) if items else []
    try:
        options = {"offload_buffers": offload_buffers, "clean_result": clean, "read_ahead": 0}
        plan = infer_auto_device_map(model, budget, no_split_module_classes=["Whole"], **options)
    except ConfigError:
        assert best is None or not set(caps) - {"disk"}
        return
    check_device_map(model, plan)
    names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert all(find_entry(plan, name) is not None for name, _ in names), "a tensor was left out"
    if not items:
        return
    found = loads(plan, items, caps, stay)
    assert found is not None
    assert best is None or found >= best
    tied = any(len(item.names) > 1 for item in items)
    assert tied or found == best, "better than the best"
    for item in items:
        assert len({plan[find_entry(plan, name)] for name in item.names}) == 1, "tied weights were taken apart"
    turns = [list(caps).index(plan[find_entry(plan, item.names[0])]) for item in items]
    assert found != best or turns == sorted(turns), "not in order"
    whole = [name for name, module in model.named_modules() if isinstance(module, Whole)]
    assert not [entry for entry in plan for name in whole if entry.startswith(f"{name}.")], "a whole class was split"
    assert sum(plan.held.values()) == sum(item.size for item in items)
    for device, cap in caps.items():
        assert plan.held.get(device, 0) + plan.reserved.get(device, 0) <= cap


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(), BUDGETS, st.booleans())
def test_fallback_is_never_worse(model: nn.Module, budget: dict, offload_buffers: bool) -> None:
    """Filling with later blocks is valid and never worse."""
    stay = not offload_buffers
    items = bundles(model, stay)
    caps = {device: budget[device] for device in (0, 1, "cpu") if budget.get(device)} | {"disk": budget.get("disk", 10**9)}
    caps = {device: cap for device, cap in caps.items() if cap}
    options = {"no_split_module_classes": "Whole", "offload_buffers": offload_buffers}
    try:
        plain = loads(infer_auto_device_map(model, budget, read_ahead=0, **options), items, caps, stay)
    except ConfigError:
        plain = None
    try:
        plan = infer_auto_device_map(model, budget, fallback_allocation=True, read_ahead=0, **options)
    except ConfigError:
        assert plain is None
        return
    check_device_map(model, plan)
    found = loads(plan, items, caps, stay)
    assert found is not None
    assert plain is None or found >= plain
    assert all(len({plan[find_entry(plan, name)] for name in item.names}) == 1 for item in items)


# --- what users rely on ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)


class Big(nn.Module):
    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)


EMBED, BLOCK, HEAD = 16 * 8 * 4, (8 * 32 * 2 + 40) * 4, 16 * 8 * 4


def test_single_device_is_one_entry() -> None:
    """Everything that fits on one device is one entry and nothing is kept free."""
    whole = compute_module_sizes(Big())[""]
    plan = infer_auto_device_map(Big(), {0: whole, 1: whole, "cpu": whole}, no_split_module_classes=["Block"])
    assert plan == {"": 0}
    assert (plan.held, plan.reserved, plan.main_device) == ({0: whole}, {}, 0)


def test_devices_are_filled_in_order() -> None:
    """Devices are filled in order."""
    plan = infer_auto_device_map(Big(), {1: 2 * BLOCK, 0: EMBED + BLOCK, "cpu": 10**6}, no_split_module_classes={"Block"})
    assert plan == {"embed": 0, "blocks.0": 1, "blocks.1": 1, "blocks.2": "cpu", "blocks.3": "cpu", "head": "cpu"}
    assert (plan.main_device, plan.held[0], plan.reserved) == (0, EMBED, {0: BLOCK})
    plan = infer_auto_device_map(Big(), {0: EMBED + BLOCK, 1: 2 * BLOCK, 2: 10**6}, no_split_module_classes={"Block"})
    assert plan == {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2, "head": 2}


def test_largest_offloaded_layer_reserved() -> None:
    """Room for the largest offloaded layer is kept where it runs."""
    model = Big()
    plan = infer_auto_device_map(model, {0: EMBED + 3 * BLOCK, "cpu": 10**6}, no_split_module_classes="Block", read_ahead=0)
    assert plan == {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": "cpu", "blocks.3": "cpu", "head": "cpu"}
    assert plan.reserved == {0: BLOCK}
    plan = infer_auto_device_map(model, {"cpu": EMBED + 3 * BLOCK}, no_split_module_classes="Block", read_ahead=0)
    assert plan == {"embed": "cpu", "blocks.0": "cpu", "blocks.1": "cpu", "blocks.2": "disk", "blocks.3": "disk", "head": "disk"}
    assert plan.reserved == {"cpu": BLOCK}
    plan = infer_auto_device_map(model, {"cpu": EMBED + 4 * BLOCK + HEAD}, no_split_module_classes="Block")
    assert plan == {"": "cpu"}


def test_prefetch_room_on_cpu() -> None:
    """The CPU keeps room to read layers ahead."""
    model = Big()
    plan = infer_auto_device_map(model, {"cpu": EMBED + 3 * BLOCK}, no_split_module_classes="Block")
    assert plan == {"embed": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "blocks.3": "disk", "head": "disk"}
    assert plan.reserved == {"cpu": 2 * BLOCK}
    assert plan.whole == ("Block",)
    model._no_split_modules = ["Block"]  # as models of transformers have it
    assert infer_auto_device_map(model, {"cpu": EMBED + 3 * BLOCK}) == plan
    with pytest.raises(ConfigError, match="read_ahead=-1"):
        infer_auto_device_map(model, {"cpu": 10**6}, read_ahead=-1)


def test_prefetch_room_on_accelerator() -> None:
    """An accelerator keeps room for the next layer beside the one that runs, in a third of what it has at most."""
    plan = infer_auto_device_map(Big(), {0: EMBED + 3 * BLOCK, "cpu": 10**6}, no_split_module_classes="Block")
    assert plan == {"embed": 0, "blocks.0": 0, "blocks.1": "cpu", "blocks.2": "cpu", "blocks.3": "cpu", "head": "cpu"}
    assert plan.reserved == {0: 2 * BLOCK}
    plan = infer_auto_device_map(Big(), {0: 3 * BLOCK - 1, "cpu": 10**6}, no_split_module_classes="Block")
    assert plan.reserved == {0: BLOCK}


def test_split_modules_and_own_tensors() -> None:
    """What may be split is and its own tensors have entries."""
    block = Block(8)
    block.scale = nn.Parameter(torch.ones(4))
    block.register_buffer("table", torch.ones(2))
    model = nn.Sequential(block, nn.Linear(4, 4))
    plan = infer_auto_device_map(model, {0: 16 + 32 * 9 * 4, 1: 10**5})
    assert plan == {"0.scale": 0, "0.up": 0, "0.act": 0, "0.down": 1, "0.table": 1, "1": 1}
    check_device_map(model, plan)


def test_clean_result_false() -> None:
    """Layers stay apart if the result is not cleaned."""
    plan = infer_auto_device_map(nn.Sequential(Block(2), nn.ReLU()), {0: 10**6}, clean_result=False)
    assert plan == {"0.up": 0, "0.act": 0, "0.down": 0, "1": 0}


def test_tied_weights_together() -> None:
    """Tied weights go together and count once."""
    model = Big()
    model.head.weight = model.embed.weight
    plan = infer_auto_device_map(model, {0: EMBED + 2 * BLOCK, 1: 10**6}, no_split_module_classes=["Block"])
    assert plan == {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 0}
    assert plan.reasons["head"] == "shares weights with embed"
    assert sum(plan.held.values()) == EMBED + 4 * BLOCK


def test_module_around_tied_head() -> None:
    """What is around a tied head comes along where that is better."""
    model = nn.ModuleDict({"embed": Leaf(10, 0), "body": Leaf(40, 0), "top": nn.ModuleDict({"norm": Leaf(5, 0), "head": Leaf(10, 0)})})
    model["top"]["head"].weight = model["embed"].weight
    assert infer_auto_device_map(model, {0: 20, 1: 40}) == {"embed": 0, "body": 1, "top": 0}
    assert infer_auto_device_map(model, {0: 14, 1: 99}) == {"embed": 0, "body": 1, "top.norm": 1, "top.head": 0}
    assert infer_auto_device_map(model, {0: 50, 1: 99}) == {"embed": 0, "body": 0, "top.norm": 1, "top.head": 0}


def test_buffers_counted_where_they_stay() -> None:
    """Buffers of offloaded layers are counted where they stay."""
    model = nn.Sequential(*(Leaf(10, 6) for _ in range(4)))
    stay = infer_auto_device_map(model, {0: 60, "cpu": 1000}, read_ahead=0)
    assert (list(stay.values()), stay.held, stay.reserved) == ([0, 0, "cpu", "cpu"], {0: 44, "cpu": 20}, {0: 10})
    go = infer_auto_device_map(model, {0: 60, "cpu": 1000}, offload_buffers=True, read_ahead=0)
    assert (list(go.values()), go.held, go.reserved) == ([0, 0, "cpu", "cpu"], {0: 32, "cpu": 32}, {0: 16})
    with pytest.raises(ConfigError, match="24 bytes for buffers that stay"):
        infer_auto_device_map(model, {0: 33, "cpu": 20, "disk": 100})
    assert set(infer_auto_device_map(model, {0: 33, "cpu": 20}, offload_buffers=True).values()) == {0, "cpu", "disk"}


def test_room_for_activations_is_kept() -> None:
    """Room for activations is kept."""
    model = nn.Sequential(*(Leaf(10, 0) for _ in range(4)))
    assert infer_auto_device_map(model, {0: 40, "cpu": 99}) == {"": 0}
    plan = infer_auto_device_map(model, {0: 40, "cpu": 99}, activations=5, read_ahead=0)
    assert (list(plan.values()), plan.reserved) == ([0, 0, "cpu", "cpu"], {0: 15, "cpu": 5})
    plan = infer_auto_device_map(model, {0: 40, 1: 20, "cpu": 99}, activations={0: "20B"})
    assert (list(plan.values()), plan.reserved) == ([0, 0, 1, 1], {0: 20})
    with pytest.raises(ConfigError, match="activations names device 3"):
        infer_auto_device_map(model, {0: 40}, activations={3: 5})


def test_types_change_what_fits() -> None:
    """Types change what fits."""
    assert infer_auto_device_map(Big(), {0: compute_module_sizes(Big())[""] // 2}, dtype=torch.float16) == {"": 0}


def test_fallback_fills_room() -> None:
    """A later block fills the room that the next one leaves."""
    model = nn.Sequential(Leaf(50, 0), Leaf(8, 0), Leaf(10, 0))
    assert infer_auto_device_map(model, {0: 20, 1: 70}) == {"": 1}
    plan = infer_auto_device_map(model, {0: 20, 1: 70}, fallback_allocation=True)
    assert plan == {"0": 1, "1": 0, "2": 0}
    assert infer_auto_device_map(model, {0: 10, 1: 70}, fallback_allocation=True) == {"0": 1, "1": 1, "2": 0}


def test_torch_attention_stays_whole() -> None:
    """Attention of torch is not taken apart."""
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    sizes = compute_module_sizes(model)
    plan = infer_auto_device_map(model, {0: sizes["0"] - 1, 1: sizes["0"], 2: sizes["1"]})
    assert plan == {"0": 1, "1": 2}


@pytest.mark.parametrize(
    ("budget", "missing"),
    [({"cpu": 100}, BLOCK - 100), ({0: 300, "cpu": 100}, BLOCK - 300), ({0: BLOCK - 1}, 1), ({0: 300, "cpu": 100, "disk": 0}, BLOCK - 300)],
)
def test_unplaceable_layer_named(budget: dict, missing: int) -> None:
    """A layer that fits nowhere is named with what is missing."""
    with pytest.raises(ConfigError, match=rf"blocks\.0, fits on no device.*{missing} bytes too small.*Raise max_memory"):
        infer_auto_device_map(Big(), budget, no_split_module_classes="Block")


def test_no_room_without_disk() -> None:
    """A model that does not fit without disk says what is left over."""
    with pytest.raises(ConfigError, match="20 bytes have no place"):
        infer_auto_device_map(nn.Sequential(*(Leaf(10, 0) for _ in range(5))), {0: 20, "cpu": 20, "disk": 0})
    with pytest.raises(ConfigError, match="no device that could run the model"):
        infer_auto_device_map(Big(), {"disk": 100})


def test_unused_device_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A device too small for anything is passed over with a word."""
    plan = infer_auto_device_map(Big(), {0: 100, "cpu": 10**6})
    assert plan == {"": "cpu"}
    assert "Device 0 is not used" in caplog.text


def test_one_layer_device_runs_all() -> None:
    """All of it passes through a device that can hold one layer only."""
    plan = infer_auto_device_map(nn.Sequential(*(Leaf(10, 0) for _ in range(4))), {0: 12, "cpu": 5})
    assert (plan, plan.main_device, plan.reserved) == ({"": "disk"}, 0, {0: 10})


def test_plan_is_a_dict() -> None:
    """A plan is a dict that keeps what it knows."""
    plan = infer_auto_device_map(Big(), {0: EMBED + 3 * BLOCK, "cpu": 10**6}, no_split_module_classes="Block")
    assert json.loads(json.dumps(plan)) == dict(plan) == plan
    for other in (copy.copy(plan), copy.deepcopy(plan), plan.copy()):
        assert other == plan
        assert (other.budget, other.held, other.reasons) == (plan.budget, plan.held, plan.reasons)
        assert other is not plan
    assert set(plan.reasons) == set(plan)
    assert sum(plan.sizes.values()) == sum(plan.held.values())


def test_shared_modules_counted_once() -> None:
    """What modules share counts once in a table as it does on the device."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight  # type: ignore[assignment]
    model.append(model[1])
    plan = infer_auto_device_map(model, {"cpu": 10**4}, clean_result=False)
    assert plan.sizes == {"0": 256, "1": 288, "2": 32, "3": 0}
    assert plan.held == {"cpu": 576}


def test_the_table_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """The table says why."""
    budget = {0: EMBED + 3 * BLOCK, "cpu": 10**6}
    plan = infer_auto_device_map(Big(), budget, no_split_module_classes="Block", verbose=True, read_ahead=0)
    printed = capsys.readouterr().out
    assert printed.strip() == plan.table()
    line = next(line for line in printed.splitlines() if line.startswith("blocks.2"))
    assert "cpu" in line
    assert "needs 2.16 KB, 0 has 0 bytes left, 2.16 KB kept free for offloaded layers" in line
    assert plan.reasons["blocks.1"] == "fits, after blocks.0"


def test_plan_of_meta_and_empty_model() -> None:
    """A model without weights is as good as a model and an empty model has a place."""
    with init_empty_weights():
        skeleton = Big()
    budget = {0: EMBED + 3 * BLOCK, "cpu": 10**6}
    assert infer_auto_device_map(skeleton, budget) == infer_auto_device_map(Big(), budget)
    assert infer_auto_device_map(nn.ReLU(), {"cpu": 5}) == {"": "cpu"}


# --- maps of users -----------------------------------------------------------------------------------------------------------


def test_the_longest_name_decides() -> None:
    """The longest name decides."""
    device_map = {"": "cpu", "blocks.1": 0, "blocks.1.down": 1}
    names = ["embed.weight", "blocks.1", "blocks.1.up.bias", "blocks.1.down.weight", "blocks.10.up", "blocks"]
    assert [device_map[find_entry(device_map, name)] for name in names] == ["cpu", 0, 0, 1, "cpu", "cpu"]
    assert find_entry({"embed": 0}, "head.weight") is None


def test_wrong_maps_refused() -> None:
    """Maps that do not fit the model are refused by name."""
    good = {"embed": 0, "blocks": torch.device("cpu"), "blocks.1.up.weight": "meta", "head.weight": "disk"}
    check_device_map(Big(), good)
    with pytest.raises(ConfigError, match=r"no device for head\.weight\."):
        check_device_map(Big(), {"embed": 0, "blocks": 0})
    with pytest.raises(ConfigError, match=r"names block, which the model does not have. Did you mean blocks\?"):
        check_device_map(Big(), {"": 0, "block": 1})
    with pytest.raises(ConfigError, match=r"device_map\['head'\] has 'gpu7', which is not a device"):
        check_device_map(Big(), {"": 0, "head": "gpu7"})
    with pytest.raises(ConfigError, match="is not a dict"):
        check_device_map(Big(), "auto")  # type: ignore[arg-type]


def test_children_merged_in_place() -> None:
    """Children on one device are merged in place."""
    device_map = {"a.x": 0, "a.y": 0, "b.1.x": 1, "b.1.y": 1, "b.10": 0, "c": 1}
    assert clean_device_map(device_map) is device_map
    assert list(device_map.items()) == [("a", 0), ("b.1", 1), ("b.10", 0), ("c", 1)]
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1}, "b") == {"a.x": 0, "a.y": 0, "b": 1}
    assert clean_device_map({"a.x": 0, "b": 0}) == {"": 0}
    assert clean_device_map({}) == {}


def test_fallback_allocate_with_ties() -> None:
    """A later block that fits is found with its ties."""
    model = Big(depth=1)
    sizes = compute_module_sizes(model)
    modules = [*model.named_children()]
    name, module, rest = fallback_allocate(modules, sizes, BLOCK - 1, tied_parameters=[["embed.weight", "head.weight"]])
    assert (name, module) == ("embed", model.embed)
    name, module, rest = fallback_allocate(modules[1:2], sizes, BLOCK - 1)
    assert (name, [other for other, _ in rest]) == ("blocks.0.up", ["blocks.0.act", "blocks.0.down"])
    assert fallback_allocate(modules[1:2], sizes, BLOCK - 1, no_split_module_classes=["Block"]) == (None, None, modules[1:2])
