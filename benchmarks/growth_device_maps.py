"""How `infer_auto_device_map` grows with the modules of a model, beside Accelerate's.

    python benchmarks/growth_device_maps.py [--quick] [--json FILE] [--draw]

The models are towers of 10 to 10,000 blocks of ten modules each, without memory, and a machine with two devices and host memory that
together have room for four fifths of the tensors; blocks are not split. CPU time, the best of three. Accelerate is measured up to the size
that it plans in less than a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from curves import Curve, Growth, main
from torch import nn

from slipstream.big_models.device_map.plan import infer_auto_device_map

BLOCKS = (10, 100, 1_000, 10_000)
ROUNDS = 3
LONGEST = 60.0
"""Seconds; the next size is ten times as large, so a contender that would take longer is not asked."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("q", "k", "v", "o")})
        self.feed_forward = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
        self.norm = nn.LayerNorm(16)


class Tower(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(100, 16)
            self.layers = nn.ModuleList(Layer() for _ in range(blocks))
            self.head = nn.Linear(16, 100)


def best_time(call: Callable[[], Any]) -> float:
    """Return the best CPU time of some rounds, or of one if it is long."""
    times: list[float] = []
    while len(times) < ROUNDS and sum(times) < LONGEST / 6:
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def measure(quick: bool) -> list[Growth]:
    """Plan towers of all sizes."""
    import accelerate

    logging.disable(logging.WARNING)  # it says that these devices are not here
    plans: dict[str, Callable[..., Any]] = {"slipstream": infer_auto_device_map, "Accelerate": accelerate.infer_auto_device_map}
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for blocks in BLOCKS[:3] if quick else BLOCKS:
        model = Tower(blocks)
        count = sum(1 for _ in model.modules())
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        room = {0: size * 3 // 10, 1: size * 3 // 10, "cpu": size * 2 // 10}
        for name, plan in plans.items():
            last = points[name][-1][1] if points[name] else 0.0
            if last * 100 < LONGEST * 1e3 or name == "slipstream":  # even if it were quadratic
                took = best_time(partial(plan, model, room, no_split_module_classes=["Layer"]))
                points[name].append((count, took * 1e3))
    curves = tuple(Curve(name, tuple(found), dashed=name != "slipstream") for name, found in points.items())
    return [Growth("device-maps", "infer_auto_device_map over the modules of a model", "modules", "ms", curves)]


if __name__ == "__main__":
    main(measure, __doc__)
