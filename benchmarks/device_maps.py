"""Device maps: ours against Accelerate, in one process, interleaved.

    python benchmarks/device_maps.py [--quick] [--json FILE]

The model is a Llama-style skeleton: 80 layers, 70 billion parameters, no memory. The script times building it and planning it for
several machines, in CPU time, compared as in `turns.py`; each ratio is followed by the best round of both. Then plans are compared on
small random models with tied weights, by the bytes that they put on the first device, then on the second, and so on. A plan that exceeds
a budget, counting the room for the largest offloaded layer, or that leaves a tensor out, is invalid. Goals:

- planning                            at most 1.0 x Accelerate's time
- plans that are worse than theirs    none
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import torch
from figures import Figure, options, report
from torch import nn
from turns import Times, compared, in_turns

from slipstream.big_models.device_map.partition import divide_model
from slipstream.big_models.device_map.plan import infer_auto_device_map
from slipstream.big_models.device_map.sizes import make_sizer
from slipstream.big_models.device_map.validation import find_entry
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.errors import ConfigError

GIB = 2**30
MACHINES: dict[str, tuple[dict[Any, int], list[str]]] = {
    "two of 80 GiB and memory": ({0: 80 * GIB, 1: 80 * GIB, "cpu": 64 * GIB}, ["Layer"]),
    "one of 24 GiB and memory": ({0: 24 * GIB, "cpu": 64 * GIB}, ["Layer"]),
    "four of 80 GiB": (dict.fromkeys(range(4), 80 * GIB), ["Layer"]),
    "four of 80 GiB, layers may be split": (dict.fromkeys(range(4), 80 * GIB), []),
    "memory alone": ({"cpu": 64 * GIB}, ["Layer"]),
}


# --- the large skeleton ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, narrow, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, narrow, bias=False), nn.Linear(width, width, bias=False)


class Mlp(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down_proj, self.act_fn = nn.Linear(wide, width, bias=False), nn.SiLU()


class Layer(nn.Module):
    def __init__(self, width: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(width, narrow), Mlp(width, wide)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)


class Llama(nn.Module):
    def __init__(self, width: int = 8192, narrow: int = 1024, wide: int = 28672, depth: int = 80, words: int = 128256) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, narrow, wide) for _ in range(depth))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)


def build(context: Callable[[], Any]) -> nn.Module:
    with context():
        return Llama()


def times(rounds: int) -> list[Figure]:
    """Time building the skeleton, and planning it."""
    ours, theirs = partial(build, init_empty_weights), partial(build, accelerate.init_empty_weights)
    found = [_figure("building a skeleton of 70 billion", ours, theirs, max(3, rounds // 5), None)]
    model = ours()
    for what, (budget, whole) in MACHINES.items():
        ours = partial(infer_auto_device_map, model, budget, whole)
        theirs = partial(their_plan, model, budget, whole)
        found.append(_figure(f"planning it: {what}", ours, theirs, rounds))
    return found


def their_plan(model: nn.Module, budget: dict[Any, int], whole: list[str], **options: Any) -> dict[str, Any]:
    return dict(accelerate.infer_auto_device_map(model, dict(budget), no_split_module_classes=whole, **options))


def _figure(what: str, ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, goal: float | None = 1.0) -> Figure:
    def contender(call: Callable[[], Any]) -> Callable[[int], Any]:
        return lambda calls: [call() for _ in range(calls)]

    found = in_turns({"ours": contender(ours), "accelerate": contender(theirs)}, rounds, 1)
    behind = [f"best {name} {min(entry.cpu) * 1e3:.1f} ms" for name, entry in found.items()]
    return compared(what, goal, _clocks(found["ours"]), _clocks(found["accelerate"]), "accelerate", behind)


def _clocks(times: Times) -> dict[str, list[float]]:
    return {"cpu": times.cpu, "wall": times.wall}


# --- small random models -----------------------------------------------------------------------------------------------------


LEVELS = ("", "leaf", "twig", "branch")
"""Names differ from level to level, because Accelerate matches substrings of names."""


class Leaf(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)


class Node(nn.Module):
    """A module that may be split."""


class Whole(Node):
    """A module that must not be split."""


def random_model(chance: random.Random, depth: int = 3) -> nn.Module:
    model = Node()
    for number in range(chance.randint(2, 5)):
        model.add_module(f"part{number}", _random_part(chance, depth))
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    if chance.random() < 0.3 and len(leaves) > 1:
        leaves[-1].weight = leaves[0].weight
    return model


def _random_part(chance: random.Random, depth: int) -> nn.Module:
    if depth == 0 or chance.random() < 0.4:
        return Leaf(chance.randint(1, 60))
    part = chance.choice([Node, Node, Whole])()
    for number in range(chance.randint(1, 4)):
        part.add_module(f"{LEVELS[depth]}{number}", _random_part(chance, depth - 1))
    return part


def loads(model: nn.Module, budget: dict[Any, int], plan: dict[str, Any]) -> list[int] | None:
    """Return the bytes on each device; None if the plan leaves something out or exceeds a budget."""
    groups = divide_model(model, frozenset({"Whole"}), make_sizer()).groups
    held = dict.fromkeys([*budget, "disk"], 0)
    layers: list[tuple[Any, int]] = []
    for group in groups:
        devices = {plan.get(find_entry(plan, piece.name) or "") for piece in group.pieces}
        device = devices.pop()
        if device is None or devices:
            return None
        held[device] += group.size
        layers.append((device, max(piece.size for piece in group.pieces)))
    holding = [device for device in budget if held[device] and device != "cpu"]
    for main in holding[:1] or budget:  # where nothing is held on a device that computes, any may bring in what runs
        needed = max((size for device, size in layers if device in ("cpu", "disk") and device != main), default=0)
        if all(held[device] + (needed if device == main else 0) <= room for device, room in budget.items()):
            return list(held.values())
    return None


def packings(count: int, fallback: bool) -> list[Figure]:
    """Count how often one is better than the other."""
    chance = random.Random(0)
    found = dict.fromkeys(("same", "ours", "theirs", "invalid", "none"), 0)
    for _ in range(count):
        model = random_model(chance)
        whole = sum(parameter.numel() for parameter in model.parameters())
        budget: dict[Any, int] = {device: int(whole * chance.uniform(0.05, 0.7)) for device in range(chance.randint(0, 3))}
        budget["cpu"] = int(whole * chance.uniform(0.3, 1.0))
        try:
            ours = loads(model, budget, infer_auto_device_map(model, budget, ["Whole"], fallback_allocation=fallback, read_ahead=0))
        except ConfigError:
            ours = None
        try:
            theirs = loads(model, budget, their_plan(model, budget, ["Whole"], fallback_allocation=fallback))
        except IndexError:  # their search for a later block loses the partner of a tied weight
            theirs = None
        if theirs is None:
            found["none" if ours is None else "invalid"] += 1
        else:
            found["same" if ours == theirs else "ours" if ours is not None and ours > theirs else "theirs"] += 1
    words = f"({found['same']} equal, {found['ours']} of ours better, {found['invalid']} of theirs exceed a budget or fail, "
    words += f"{found['none']} models fit nowhere)"
    name = "with fallback_allocation" if fallback else "in order"
    return [Figure(f"plans worse than Accelerate's of {count}, {name}", found["theirs"], "plans", goal=0, spread=words)]


def measure(quick: bool = False) -> list[Figure]:
    """Return all figures; without the warnings of both about devices that are not there."""
    logging.disable(logging.WARNING)
    return times(10 if quick else 40) + packings(100 if quick else 500, False) + packings(100 if quick else 500, True)


def main() -> None:
    parser = options(__doc__)
    given = parser.parse_args()
    found = measure(given.quick)
    report("device maps", found, given)


if __name__ == "__main__":
    main()
