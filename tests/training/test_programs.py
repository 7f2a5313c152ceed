"""Random training programs on 1, 2 and 3 processes against their meaning in plain PyTorch.

`make test` tries the same programs every time, for a minute; `make soak` tries others, for an hour. What fails is made as small as it can
be and shown as a script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings, strategies as st
from problems import Batches, Net
from programs import GLOBAL, Loss, Program, blocks_of, data, expected, flat, global_batches, script
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.utils import GradientAccumulationPlugin


class Cut(Exception):
    """The run was saved, and ends."""


def in_windows(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while window := list(islice(batches, 3)):
        yield from window


def one_ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def execute(source: str, offset: int, cuts: bool, folder: str, shards: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Runs a program on this rank; one that is cut, in two parts."""
    kind = partial(Accelerator, fsdp_plugin=FullyShardedDataParallelPlugin()) if shards else Accelerator
    names = {
        "torch": torch, "Accelerator": kind, "GradientAccumulationPlugin": GradientAccumulationPlugin, "DataLoader": DataLoader,
        "TensorDataset": TensorDataset, "Net": Net, "Batches": Batches, "data": data, "flat": flat, "Cut": Cut, "in_windows": in_windows,
        "one_ahead": one_ahead, "folder": folder, "offset": offset, "resumed": False, "cuts": cuts,
    }  # fmt: skip
    code = compile(source, "program.py", "exec")
    try:
        exec(code, names)
    except Cut:
        names.update(resumed=True, cuts=False)
        exec(code, names)
    return names["result"]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(1, 3))
    blocks = draw(st.sampled_from(["together", "together", "apart", "follow", "none"]))
    models = tuple(range(count))
    steps = 1 if blocks == "none" else draw(st.integers(1, 4))
    if blocks == "apart":
        losses = tuple(Loss((model,), draw(_ways), draw(st.booleans())) for model in models)
    else:
        reached = st.sets(st.sampled_from(models), min_size=1).map(sorted).map(tuple)
        losses = tuple(Loss(draw(reached), draw(_ways), draw(st.booleans())) for _ in range(draw(st.integers(1, 2))))
        missing = tuple(model for model in models if not any(model in loss.models for loss in losses))
        losses += (Loss(missing, draw(_ways)),) if missing else ()
    kind = draw(st.sampled_from(["SGD", "AdamW"]))
    split = draw(st.booleans())
    if blocks != "apart" and draw(st.booleans()):
        optimizers: Any = ((kind, tuple((model, "all") for model in models)),)
    elif split:
        optimizers = tuple((kind, ((model, part),)) for model in models for part in ("inner", "outer"))
    else:
        optimizers = tuple((kind, ((model, "all"),)) for model in models)
    samples, epochs = draw(st.integers(1, 32)), draw(st.integers(1, 3))
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))) if draw(st.sampled_from([False, False, True])) else ()
    samples = sum(sizes) if sizes else samples
    batches = len(sizes) // 3 if sizes else -(-samples // GLOBAL)
    read = draw(st.sampled_from(["plain", "plain", "list", "windows", "ahead"]))
    plain = read == "plain"
    skips = draw(st.integers(0, max(0, batches - 1)))
    leaves = draw(st.none() | st.integers(1, max(1, batches - skips))) if plain and epochs > 1 else None
    companion = draw(st.sampled_from([0, 0, 1, 4, 40])) if plain and not leaves else 0
    cut = None
    if plain and not companion and not leaves and batches and draw(st.booleans()):
        epoch = draw(st.integers(0, epochs - 1))
        cut = epoch, draw(st.integers(skips if epoch == 0 else 0, batches - 1))
    return Program(
        widths=tuple(draw(st.sampled_from([2, 4, 7])) for _ in models), optimizers=optimizers, losses=losses, blocks=blocks, steps=steps,
        samples=samples, epochs=epochs, weighs=draw(st.booleans()), clears_first=draw(st.booleans()), clips=draw(st.booleans()),
        sync_each_batch=draw(st.sampled_from([False, False, True])), follows_loader=draw(st.sampled_from([True, True, False])), read=read,
        skips=skips, leaves=leaves, cut=cut, evaluates=plain and not companion and not cut and draw(st.booleans()), companion=companion,
        sizes=sizes,
    )  # fmt: skip


_ways = st.sampled_from(["forward", "method", "parts"])


def check(ranks: Any, program: Program, shards: bool = False) -> None:
    """Runs a program on 1, 2 and 3 processes (on 2 and 3, if it shards its models), and compares."""
    source = script(program)
    for world in (2, 3) if shards else (1, 2, 3):
        if program.sizes and (program.skips or program.cut):
            whole = len(global_batches(program, world))
            if program.skips >= whole or (program.cut is not None and program.cut[1] >= whole):
                continue
        wanted = expected(program, world)
        offset = 0 if program.cut is None else program.cut[1] + 1
        with tempfile.TemporaryDirectory() as folder:
            results = ranks(world).run(execute, source, offset, program.cut is not None, folder, shards)
        for rank, (found, metrics) in enumerate(results):
            assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-8), f"rank {rank} of {world}: {found - wanted}"
            for epoch in range(len(metrics) and program.epochs):
                count = len(metrics) // program.epochs
                assert sum(map(len, metrics[epoch * count : (epoch + 1) * count])) == program.samples


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_programs(ranks: Any, rounds: Callable[..., int]) -> None:
    """Models, optimizers, losses, windows, weights, loaders, breaks, skips, evaluation, saving and loading, in any combination."""
    count = rounds(ci=75, soak=5000)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=count < 100)
    @given(program=programs())
    def run(program: Program) -> None:
        note(script(program))
        check(ranks, program)

    run()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_sharded_programs(ranks: Any, rounds: Callable[..., int]) -> None:
    """The same programs with models that are sharded."""
    count = rounds(ci=20, soak=2000)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=count < 100)
    @given(program=programs())
    def run(program: Program) -> None:
        note(script(program))
        check(ranks, program, shards=True)

    run()


SMALL = {"optimizers": (("SGD", ((0, "all"), (1, "all"))),), "samples": 18, "epochs": 2, "weighs": False}
EXAMPLES = {
    "race": Program(**{**SMALL, "widths": (4, 7), "losses": (Loss((0, 1), "parts", True),), "blocks": "together", "steps": 1}),
    "one batch": Program((2,), (("SGD", ((0, "all"),)),), (Loss((0,)),), "together", 4, 12, 3, skips=1),
    "blocks apart": Program(
        (2, 4), (("SGD", ((0, "all"),)), ("SGD", ((1, "all"),))), (Loss((0,)), Loss((1,))), "apart", 2, 18, 2, weighs=True,
        sizes=(1, 4, 2, 3, 5, 3),
    ),  # fmt: skip
    "weights together": Program((2, 4), SMALL["optimizers"], (Loss((0,)), Loss((1,))), "together", 1, 12, 1, weighs=True),
    "short batch": Program((2,), (("SGD", ((0, "all"),)),), (Loss((0,)),), "together", 2, 9, 1),
    "side by side": Program((2,), (("SGD", ((0, "all"),)),), (Loss((0,)),), "together", 2, 1, 2, companion=40),
    "read ahead": Program((2,), (("SGD", ((0, "all"),)),), (Loss((0,)),), "together", 4, 30, 2, read="windows"),
}


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_known_programs(ranks: Any, name: str, shards: bool) -> None:
    """Programs whose gradients were once wrong; a race shows in some of several runs."""
    for _ in range(4 if name == "race" else 1):
        check(ranks, EXAMPLES[name], shards)


def test_blocks_of_a_program() -> None:
    """The oracle itself: three batches, the first skipped, left after one."""
    program = Program((2,), (), (), "together", 2, 14, 2, skips=1, leaves=1)
    assert blocks_of(program, 1) == [(6, 12, False), (0, 6, False), (6, 12, False), (12, 14, True)]
