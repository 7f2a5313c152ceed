"""A loop that was cut anywhere, also inside a window of accumulation, goes on as if nothing had happened."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

from slipstream import Accelerator
from slipstream.distributed.gradient_state import LoaderPass
from slipstream.errors import ConfigError
from slipstream.training.accumulation import Accumulation
from slipstream.training.loop_state import redistribute_loop_state
from slipstream.utils import DataLoaderConfiguration, GradScalerKwargs


def batch(number: int, rank: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


class Loop:
    """A model in training; `way` is how its losses are given."""

    def __init__(self, way: str = "mean", steps: int = 4, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)
        self.net, self.optimizer = self.accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        self.way, self.dtype = way, dtype
        self.norms: list[float] = []

    @property
    def parts(self) -> Any:
        return self.accelerator._components

    def step(self, number: int, rank: int | None = None, rows: int = 2) -> None:
        rank = self.accelerator.process_index if rank is None else rank
        x, y = (entry.to(self.accelerator.device, self.dtype) for entry in batch(number, rank, rows))
        with self.accelerator.accumulate(self.net):
            difference = ((self.net(x).to(self.dtype) - y) ** 2).flatten()
            if self.way == "sum":
                keep = 1 + (number + rank) % rows  # tokens, say: a number of its own on each rank
                self.accelerator.backward(difference[:keep].sum(), weight=keep)
            else:
                self.accelerator.backward(difference.mean() * (3e38 if self.way == "overflow" and number == 4 else 1.0))
            self.norms.append(float(self.accelerator.clip_grad_norm_(self.net.parameters(), 10.0)))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> dict[str, Any]:
        stepper, scaler = self.parts.stepper, self.parts.precision.scaler
        loop = json.loads(json.dumps(stepper.loop_state()))
        gradients = stepper.open_gradients()
        return {
            "loop": loop,
            "gradients": copy.deepcopy(gradients),
            "clip": copy.deepcopy(self.parts.clipper.state()),
            "net": copy.deepcopy(self.accelerator.unwrap_model(self.net).state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scaler": copy.deepcopy(scaler.state_dict()),
            "updates": (self.optimizer.updates, self.optimizer.step_was_skipped),
        }

    def load(self, saved: dict[str, Any]) -> None:
        stepper = self.parts.stepper
        stepper.check(saved["loop"], saved["gradients"])
        self.accelerator.unwrap_model(self.net).load_state_dict(saved["net"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self.parts.precision.scaler.load_state_dict(saved["scaler"])
        self.parts.clipper.restore(saved["clip"])
        stepper.restore(saved["loop"])
        stepper.set_gradients(saved["gradients"])
        self.optimizer.updates, self.optimizer.step_was_skipped = saved["updates"]

    def outcome(self) -> Any:
        weights = [parameter.detach().clone() for parameter in self.accelerator.unwrap_model(self.net).parameters()]
        scaler = self.parts.precision.scaler
        return weights, scaler.get_scale(), scaler.state_dict(), self.optimizer.updates, self.norms


def same(value: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(value[0], other[0], strict=True)) and value[1:-1] == other[1:-1]


WAYS = ("mean", "sum", "overflow")


def loop_of(way: str) -> Loop:
    if way != "overflow":
        return Loop(way)
    handler = GradScalerKwargs(init_scale=2.0**10, growth_interval=2)
    return Loop(way, dtype=torch.float32, mixed_precision="fp16", kwargs_handlers=[handler])


def cut_everywhere(batches: int) -> list[str]:
    """What went wrong: for every way and every cut point, a fresh loop goes on from what was saved there."""
    wrong = []
    for way in WAYS:
        straight = loop_of(way)
        saved = [straight.save()]
        for number in range(batches):
            straight.step(number)
            saved.append(straight.save())
        if way == "overflow" and not any(entry["updates"][1] for entry in saved):
            wrong.append("no step was skipped: the case says nothing")
        for cut in range(batches + 1):
            resumed = loop_of(way)
            resumed.load(saved[cut])
            for number in range(cut, batches):
                resumed.step(number)
            if not same(straight.outcome(), resumed.outcome()) or str(straight.norms[cut:]) != str(resumed.norms):
                wrong.append(f"{way}, cut after {cut}")
    return wrong


@pytest.mark.parametrize(("world", "device"), [(1, None), (2, None), (2, "standin")])
def test_loop_resumes_bit_for_bit(ranks: Any, world: int, device: str | None) -> None:
    """A loop cut after any batch continues bit for bit.

    Accumulation of 4, means and weighted sums, and fp16 with overflows and a growing scale.
    """
    assert ranks(world, device=device).run(lambda: cut_everywhere(11)) == [[]] * world


def test_gradients_saved_when_needed() -> None:
    """Gradients are saved only while they are needed."""
    loop, held = Loop(), []
    for number in range(6):
        loop.step(number)
        held.append(loop.parts.stepper.open_gradients() is not None)
    assert held == [True, True, True, False, True, True]
    assert sorted(loop.parts.stepper.open_gradients()) == ["0.0.bias", "0.0.weight", "0.2.bias", "0.2.weight"]


def test_hand_accumulated_gradients_saved() -> None:
    """Gradients that a script adds up by itself are saved until an optimizer steps."""
    loop = Loop(steps=1)
    x, y = batch(0, 0)
    held = []
    for number in range(4):
        loop.accelerator.backward(((loop.net(x) - y) ** 2).mean())
        held.append(loop.parts.stepper.open_gradients() is not None)
        if number % 2:
            loop.optimizer.step()
            held.append(loop.parts.stepper.open_gradients() is not None)
            loop.optimizer.zero_grad()
    assert held == [True, True, False] * 2
    loop.accelerator.backward(((loop.net(x) - y) ** 2).mean())
    saved, again = loop.save(), Loop(steps=1)
    again.load(saved)
    for entry in (loop, again):
        entry.accelerator.backward(((entry.net(x) - y) ** 2).mean())
        entry.optimizer.step()
    assert same(loop.outcome(), again.outcome())


def test_following_model_saved() -> None:
    """A model that follows the window of another is saved with it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with accelerator.accumulate(first):
        accelerator.backward((first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum())
    stepper = accelerator._components.stepper
    assert sorted(stepper.open_gradients()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    state = stepper.loop_state()
    assert [(window["index"], window["named"]) for window in state["windows"]] == [(1, True), (1, False)]
    assert not state["sync_gradients"]


def test_due_scale_before_save() -> None:
    """A scale that is due reaches gradients of other windows before they are saved.

    Two models with windows of their own: the one is updated and the scale grows, while the other still adds gradients up.
    """

    def run(saves: bool) -> torch.Tensor:
        handler = GradScalerKwargs(init_scale=4.0, growth_interval=1)
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler], gradient_accumulation_steps=2)
        nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
        for net in nets:
            torch.nn.init.ones_(net.weight)
        first, second, entry, other = accelerator.prepare(*nets, *optimizers)

        def step(net: Any, optimizer: Any) -> None:
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.ones(1, 1)).float().sum())
                optimizer.step()
                optimizer.zero_grad()

        step(first, entry)
        step(second, other)
        step(second, other)  # an update: the scale is due
        if saves:
            accelerator._components.stepper.loop_state()
            assert accelerator.scaler.state_dict()["scale"] == 8.0
        step(first, entry)
        return nets[0].weight.detach()

    assert torch.equal(run(True), run(False))
    assert run(True).item() == 0.5


def test_sparse_gradients() -> None:
    """Sparse gradients come back as they were added up."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    table = accelerator.prepare(torch.nn.Embedding(5, 2, sparse=True))
    for rows in ([1, 1], [4, 0]):
        with accelerator.accumulate(table):
            accelerator.backward(table(torch.tensor(rows)).sum())
    stepper, before = accelerator._components.stepper, table.weight.grad
    saved = copy.deepcopy(stepper.open_gradients())
    assert sorted(saved) == ["0.weight::indices", "0.weight::values"]
    stepper.set_gradients(None)
    assert table.weight.grad is None
    stepper.set_gradients(saved)
    assert table.weight.grad.layout == torch.sparse_coo
    assert torch.equal(table.weight.grad.to_dense(), before.to_dense())
    saved["0.weight::indices"] = saved["0.weight::indices"] + 10
    with pytest.raises(ConfigError, match="sparse gradient"):
        stepper.set_gradients(saved)


def test_resumed_loader_counts_anew() -> None:
    """A loader that continues counts anew and no batch is taken for a piece of another.

    Cut after the first of three batches: the loader's next batch is number 1 again.
    """

    def loop() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(3), batch_size=1))
        return accelerator, net, loader

    accelerator, net, loader = loop()
    for _ in loader:
        with accelerator.accumulate(net):
            pass
        state = accelerator._components.stepper.loop_state()
        break
    accelerator, net, loader = loop()
    accelerator._components.stepper.restore(state)
    closed = []
    for _ in accelerator.skip_first_batches(loader, 1):
        with accelerator.accumulate(net):
            closed.append(accelerator.sync_gradients)
    assert closed == [True, True]


def test_count_of_updates() -> None:
    """Updates count what was really updated."""
    loop, found = loop_of("overflow"), []
    for number in range(8):
        loop.step(number)
        found.append((loop.optimizer.updates, loop.optimizer.step_was_skipped))
    assert found[3] == (1, False)
    assert found[7] == (1, True)
    loop.optimizer.forget()
    assert loop.optimizer.updates == 1
    with pytest.raises(ConfigError, match="whole number from 0"):
        loop.optimizer.updates = -1


# -- on another number of processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["mean", "sum"])
@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2), (2, 4), (4, 3)])
def test_open_window_other_world_size(ranks: Any, way: str, old: int, new: int) -> None:
    """An open window continues with another number of ranks.

    Windows of 3 batches, cut after the first: the update is that of the same 'batches', whoever adds them up.
    """

    def begin() -> Any:
        loop = Loop(way, steps=3)
        loop.step(0)
        saved = loop.save()
        loop.step(1)
        return saved

    saved = ranks(old).run(begin)

    def go_on() -> Any:
        loop = Loop(way, steps=3)
        state, gradients = redistribute_loop_state([(entry["loop"], entry["gradients"]) for entry in saved], saved_by=old, world_size=new)
        loop.load({**saved[0], "loop": state, "gradients": gradients})
        loop.step(1)
        loop.step(2)
        return loop.outcome()[0]

    outcomes = ranks(new).run(go_on)
    oracle = Loop(way, steps=1)
    shares = [(0, rank, old) for rank in range(old)] + [(number, rank, new) for number in (1, 2) for rank in range(new)]
    losses, total = [], 0.0
    for number, rank, world in shares:
        x, y = batch(number, rank)
        difference = ((oracle.net(x) - y) ** 2).flatten()
        keep = 1 + (number + rank) % 2
        losses.append(difference[:keep].sum() if way == "sum" else difference.mean() / world)
        total += keep if way == "sum" else 1 / world
    (sum(losses) / total).backward()
    torch.nn.utils.clip_grad_norm_(oracle.net.parameters(), 10.0)
    oracle.optimizer.optimizer.step()
    for outcome in outcomes:
        for found, expected in zip(outcome, oracle.net.parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)


class Epoch(Loop):
    """An epoch of 48 samples, 24 of them in each update, on any number of processes; and its states after every batch."""

    def __init__(self, size: int) -> None:
        config = DataLoaderConfiguration(data_seed=5, even_batches=False)
        super().__init__(effective_batch_size=24, steps=1, dataloader_config=config)
        self.loader = self.accelerator.prepare(DataLoader(range(48), batch_size=size, shuffle=True))

    def run(self) -> tuple[list[Any], list[torch.Tensor]]:
        states = []
        for numbers in self.loader:
            x = torch.stack([batch(int(number), 0, 1)[0][0] for number in numbers]).to(self.accelerator.device)
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(((self.net(x) - x.sum(1, keepdim=True).sin()) ** 2).mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            states.append({**self.save(), "loader": copy.deepcopy(self.loader.state_dict()), "batch": self.loader.total_batch_size})
        return states, self.outcome()[0]


@pytest.mark.parametrize(("old", "new"), [((2, 4), (1, 4)), ((1, 4), (2, 4)), ((2, 3), (4, 3)), ((4, 2), (3, 2)), ((3, 4), (4, 3))])
def test_updates_after_world_size_change(ranks: Any, old: tuple[int, int], new: tuple[int, int]) -> None:
    """Updates are the same after a change of processes at any batch.

    (ranks, batch size): also where the cut lies inside of a global batch as it is now, in the middle of a window.
    """
    saved = [states for states, _ in ranks(old[0]).run(lambda: Epoch(old[1]).run())]
    straight = ranks(1).run(lambda: Epoch(8).run())[0][1]
    cuts = range(len(saved[0]))

    def go_on() -> Any:
        found = []
        for cut in cuts:
            loop, parts = Epoch(new[1]), [states[cut] for states in saved]
            ratio = parts[0]["batch"] / loop.loader.total_batch_size
            state, gradients = redistribute_loop_state(
                [(part["loop"], part["gradients"]) for part in parts], saved_by=old[0], world_size=new[0], batch_ratio=ratio
            )
            loop.load({**parts[0], "loop": state, "gradients": gradients})
            loop.loader.load_state_dict(parts[0]["loader"])
            found.append((loop.run()[1], loop.optimizer.updates))
        return found

    for outcomes in ranks(new[0]).run(go_on):
        for cut, (weights, updates) in zip(cuts, outcomes, strict=True):
            assert updates == 2, f"cut after {cut + 1}"
            for found, expected in zip(weights, straight, strict=True):
                assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11), f"cut after {cut + 1}"


@given(
    steps=st.integers(2, 6),
    cut=st.integers(1, 5),
    ratio=st.sampled_from([0.5, 2.0, 4 / 3, 0.25]),
    values=st.lists(st.floats(-5, 5), min_size=6, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_window_with_both_sizes(steps: int, cut: int, ratio: float, values: list[float]) -> None:
    """The mean of a window counts batches of both sizes."""
    cut = min(cut, steps - 1)
    window, gradient = Accumulation(), 0.0
    for value in values[:cut]:
        window.begin(steps, None)
        divisor = window.add_mean()
        gradient = gradient * window.change_divisor(divisor) + value / divisor
    state = {"windows": [window.state()], "sync_gradients": False, "loose": False}
    begun, _ = redistribute_loop_state([(state, None)], saved_by=1, world_size=1, batch_ratio=ratio)
    again = Accumulation()
    again.restore(begun["windows"][0])
    again.begin(steps, LoaderPass().hand_out(None, True, 0, None, None))
    assert not again.is_whole_window
    divisor = again.add_mean()
    gradient = gradient * again.change_divisor(divisor) + values[cut] / divisor
    expected = (ratio * sum(values[:cut]) + values[cut]) / (ratio * cut + 1.0)
    assert gradient == pytest.approx(expected, rel=1e-9, abs=1e-9)


# -- what does not fit -----------------------------------------------------------------------------------------------------------


def broken() -> list[tuple[Any, Any, str]]:
    loop = Loop()
    loop.step(0)
    saved = loop.save()
    state, gradients = saved["loop"], saved["gradients"]
    window = state["windows"][0]

    def with_window(**changes: Any) -> dict[str, Any]:
        return {**state, "windows": [{**window, **changes}]}

    return [
        (None, None, "not a state of a training loop"),
        ({}, None, "not a state of a training loop"),
        ({**state, "windows": [window, window]}, None, "windows of 2 models, but 1 are prepared"),
        ({**state, "windows": [{}]}, None, "not the state of an accumulation window"),
        ({**state, "latest": 1}, None, "not a state of a training loop"),
        ({**state, "loose": 0}, None, "loose=0"),
        (with_window(index=-1), None, "index=-1"),
        (with_window(index=True), None, "index=True"),
        (with_window(total=float("nan")), None, "total=nan"),
        (with_window(total=10**400), None, "total="),
        (with_window(carried=0.0), None, "carried=0.0"),
        (with_window(kind="other"), None, "kind='other'"),
        (state, {"1.weight": torch.ones(1)}, "no prepared model has such a parameter"),
        (state, {**gradients, "0.0.weight": torch.ones(2, 2)}, r"shape \(2, 2\), but the parameter has \(4, 3\)"),
        (state, {"0.0.weight": [1.0]}, "tensors by name"),
        (state, [], "tensors by name"),
    ]


@pytest.mark.parametrize(("state", "gradients", "words"), broken())
def test_state_of_other_loop_refused(state: Any, gradients: Any, words: str) -> None:
    """What belongs to another loop is refused before anything changes."""
    loop = Loop()
    loop.step(0)
    stepper = loop.parts.stepper
    before, there = stepper.loop_state(), {name: gradient.clone() for name, gradient in stepper.open_gradients().items()}
    with pytest.raises(ConfigError, match=words):
        stepper.check(state, gradients)
    restore = (lambda: stepper.restore(state)) if gradients is None else (lambda: stepper.set_gradients(gradients))
    with pytest.raises(ConfigError, match=words):
        restore()
    assert stepper.loop_state() == before
    assert all(torch.equal(gradient, there[name]) for name, gradient in stepper.open_gradients().items())


def test_invalid_clip_state_refused() -> None:
    """A state of clipping that cannot be one is refused."""
    clipper = Loop().parts.clipper
    for state in (
        None,
        [1],
        [{"models": [3], "norm": torch.ones(())}],
        [{"models": [0], "norm": 1.0}],
        [{"models": [0], "norm": torch.ones(2)}],
    ):
        with pytest.raises(ConfigError, match="not a state of the gradient clipper"):
            clipper.restore(state)  # type: ignore[arg-type]
