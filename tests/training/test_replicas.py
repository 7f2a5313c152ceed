"""Replicas: options and hooks of DistributedDataParallel, uneven inputs, blocks without averaging, and mistakes between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import close, mean_loss, model, rows, weights
from torch.utils.data import DataLoader

from slipstream import Accelerator, ConfigError, DistributedDataParallelKwargs
from slipstream.utils import GradScalerKwargs


def gradient(accelerator: Accelerator, net: Any) -> float:
    return accelerator.unwrap_model(net).weight.grad.item()


def one_weight(accelerator: Accelerator) -> Any:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    return accelerator.prepare(net)


def test_replicas_start_equal(ranks: Any) -> None:
    """Replicas start from the weights of rank 0."""

    def run() -> float:
        accelerator = Accelerator()
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(net.weight, accelerator.process_index + 1.0)
        return accelerator.unwrap_model(accelerator.prepare(net)).weight.item()

    assert ranks(3).run(run) == [1.0] * 3


def test_no_sync_and_trigger_sync(ranks: Any) -> None:
    """Blocks without averaging and the one that makes up for them."""

    def run() -> list[float]:
        accelerator = Accelerator()
        net = one_weight(accelerator)
        x = torch.full((1, 1), float(accelerator.process_index), device=accelerator.device)
        seen = []
        with accelerator.no_sync(net):
            accelerator.backward(net(x).sum())
            seen.append(gradient(accelerator, net))
            first, second = net(x), net(x)
            accelerator.backward(first.sum())
        with accelerator.trigger_sync_in_backward(net):
            accelerator.backward(second.sum())
        return [*seen, gradient(accelerator, net)]

    assert ranks(2).run(run) == [[0.0, 1.5], [1.0, 1.5]]
    assert ranks(1).run(run) == [[0.0, 0.0]]


@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd", "batched_power_sgd"])
def test_communication_hooks(ranks: Any, hook: str) -> None:
    def run() -> Any:
        state = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} if "power" in hook else {}
        wrapper = "fp16" if hook == "power_sgd" else "no"
        options = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=state)
        accelerator = Accelerator(kwargs_handlers=[options])
        net = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(net.weight)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(4):
            accelerator.backward(net(torch.full((1, 4), accelerator.process_index + 1.0)).mean())
            optimizer.step()
            optimizer.zero_grad()
        reduced = str(accelerator.precision)
        return accelerator.unwrap_model(net).weight.detach().flatten()[:2].tolist(), reduced

    found = ranks(2).run(run)
    assert found[0][0] == found[1][0] == pytest.approx([1 - 4 * 0.1 * 1.5 / 4] * 2, rel=0.01)
    if hook == "bf16":
        assert "gradients reduced in bfloat16" in found[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"comm_hook": "fp8"},
        {"comm_wrapper": "fp16"},
        {"comm_hook": "fp16", "comm_state_option": {"a": 1}},
        {"dim": 1},
        {"check_reduction": True},
    ],
)
def test_options_without_effect_refused(options: dict[str, Any]) -> None:
    """Options without effect are refused."""
    with pytest.raises(ConfigError):
        DistributedDataParallelKwargs(**options)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_join_uneven_inputs(ranks: Any, world: int) -> None:
    """Ranks may run out of batches in a join block.

    On the CPU, too.
    """

    def run() -> Any:
        accelerator = Accelerator()
        net = model()
        net, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(rows(5), batch_size=1)
        )
        batches = 0
        with accelerator.join_uneven_inputs([net], even_batches=False):
            for x, y, _ in loader:
                accelerator.backward(mean_loss(net, x, y))
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
        evened = len(list(loader))
        everyone = accelerator.gather(weights(accelerator.unwrap_model(net)).unsqueeze(0))
        assert all(close(row, everyone[0]) for row in everyone)
        return batches, evened

    counts = ranks(world).run(run)
    assert sum(batches for batches, _ in counts) == 5
    assert {evened for _, evened in counts} == {-(-5 // world)}


def test_clip_once_per_update(ranks: Any) -> None:
    """Clipping acts once per update on whole gradients.

    In full precision and with the scale of fp16: the norm is that of one process.
    """

    def run(precision: str) -> Any:
        accelerator = Accelerator(
            mixed_precision=precision,
            gradient_accumulation_steps=2,
            kwargs_handlers=[GradScalerKwargs(init_scale=8.0)] if precision == "fp16" else None,
        )
        net = torch.nn.Linear(3, 1).float()
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
            net.bias.zero_()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        net, optimizer = accelerator.prepare(net, optimizer)
        data = torch.arange(24.0, device=accelerator.device).reshape(8, 3) / 8
        norms = []
        for step in range(4):
            with accelerator.accumulate(net):
                mine = data[2 * step : 2 * step + 2].chunk(accelerator.num_processes)[accelerator.process_index]
                accelerator.backward(net(mine).float().square().mean())
                norms.append(round(float(accelerator.clip_grad_norm_(net.parameters(), 0.1)), 2))
                optimizer.step()
                optimizer.zero_grad()
        return norms, [round(value, 2) for value in weights(accelerator.unwrap_model(net)).tolist()]

    for precision in ("no", "fp16"):
        (norms, found), *_ = ranks(1).run(lambda precision=precision: run(precision))
        assert norms[0] == 0.0
        assert norms[1] == norms[2] != norms[3]
        assert norms[1] > 0.1
        for other in ranks(2).run(lambda precision=precision: run(precision)):
            assert other[1] == pytest.approx(found, abs=0.02)
            assert other[0] == pytest.approx(norms, rel=0.02)


def test_clip_value() -> None:
    """Values are clipped between no updates."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = one_weight(accelerator)
    for expected in (5.0, 1.0):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.full((1, 1), 10.0)).sum())
            accelerator.clip_grad_value_(net.parameters(), 1.0)
            assert gradient(accelerator, net) == expected


def test_precision_policy(ranks: Any) -> None:
    """The precision is what it says."""

    def run() -> Any:
        seen = {}
        for precision in ("no", "bf16", "fp16"):
            for upcast in (False, True):
                accelerator = Accelerator(mixed_precision=precision, outputs_to_fp32=upcast)
                net = accelerator.prepare(torch.nn.Linear(2, 2))
                x = torch.ones(2, 2, device=accelerator.device)
                out = net(x)
                with accelerator.autocast():
                    inside = (x @ x).dtype
                accelerator.backward(out.float().sum())
                grads = {parameter.grad.dtype for parameter in net.parameters()}
                assert grads == {accelerator.precision.param}
                assert inside == accelerator.precision.compute
                assert out.dtype == (accelerator.precision.output or accelerator.precision.compute)
                seen[precision, upcast] = str(accelerator.precision)
        return seen

    for world in (1, 2):
        texts = ranks(world).run(run)[0]
        assert texts["bf16", False] == "bf16: parameters float32, compute bfloat16, gradients reduced in float32, outputs as computed"
        assert texts["fp16", True].endswith("outputs cast to float32")


def test_float16_weights_refused() -> None:
    """Float16 weights cannot be trained with a scale."""
    with pytest.raises(ConfigError, match="Load the model in float32"):
        Accelerator(cpu=True, mixed_precision="fp16").prepare(torch.nn.Linear(1, 1).half())


def test_early_rank_is_named(ranks: Any) -> None:
    """A rank that leaves the loop early is named."""

    def run() -> str:
        accelerator = Accelerator(hang_warning=5.0)
        net = one_weight(accelerator)
        for number in range(4):
            if number == 2 and accelerator.process_index == 1:
                break
            accelerator.backward(net(torch.ones(1, 1)).sum())
        accelerator.gather(torch.ones(1))
        return "done"

    for outcome in ranks(2).outcomes(run):
        assert outcome.error is not None
        text = str(outcome.error)
        assert "backward" in text
        assert "gather" in text


def test_different_models_named(ranks: Any) -> None:
    """Different models are named before they are wrapped."""

    def run() -> None:
        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(2, 1 + accelerator.process_index))

    for outcome in ranks(2).outcomes(run):
        assert "the parameters of Linear" in str(outcome.error)
        assert "weight" in str(outcome.error)


def test_forward_on_one_rank_named(ranks: Any) -> None:
    """A forward with buffers on one rank alone is named.

    Evaluation on the main process of a model with batch norm, while the others wait for it.
    """

    def run() -> None:
        accelerator = Accelerator()
        net = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2)))
        accelerator.backward(net(torch.randn(4, 1)).sum())
        net.eval()
        if accelerator.is_main_process:
            with torch.no_grad():
                net(torch.ones(1, 1))
        accelerator.wait_for_everyone()

    for outcome in ranks(2).outcomes(run):
        assert "forward" in str(outcome.error)
        assert "wait_for_everyone" in str(outcome.error)


@pytest.mark.parametrize("steps", [1, 2])
def test_forward_on_one_rank_waits_for_nobody(ranks: Any, steps: int) -> None:
    """A forward of one rank alone, to look at the shape of an output, disturbs no rank: before the first update or between two."""

    def run() -> list[torch.Tensor]:
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        found = []
        for place in range(3):
            for rank in (None, 0, 1):
                original = model()
                net, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1))
                for number, (x, y, _) in enumerate(DataLoader(rows(12), batch_size=2)):
                    if number == place and rank == accelerator.process_index:
                        net(x)
                    accelerator.wait_for_everyone()
                    with accelerator.accumulate(net):
                        accelerator.backward(mean_loss(net, x, y) * (1 + accelerator.process_index))
                        optimizer.step()
                        optimizer.zero_grad()
                found.append(weights(original))
                accelerator.free_memory()
        return found

    for found in ranks(2).run(run):
        assert all(torch.equal(found[0], other) for other in found)
