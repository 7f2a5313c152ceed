"""Training on an accelerator, on the stand-in: everything is on the device, and the updates are those of plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, LocalSGD
from slipstream.errors import ConfigError
from slipstream.parallel.activation import checkpoint_activations
from slipstream.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    GuardKwargs,
    find_executable_batch_size,
    release_memory,
)


class Tied(torch.nn.Module):
    """Tied and frozen weights, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.scale = torch.nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("mask", torch.tensor([True] * 8), persistent=False)
        self.shared = self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(torch.tanh(self.inner(x * self.mask + self.shift))) * self.scale)


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 8, generator=generator))


def mlp(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


def values(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in net.parameters()]


def devices(*tensors: torch.Tensor | None) -> set[str]:
    return {str(tensor.device) for tensor in tensors if tensor is not None}


@pytest.mark.parametrize("world", [1, 2])
def test_prepare_places_everything(ranks: Any, world: int) -> None:
    """Weights, buffers, gradients and moments are on the device of the process; tied weights stay tied; optimizers keep their parameters.

    Also of an optimizer that has made steps before, on the host.
    """

    def run() -> Any:
        accelerator = Accelerator()
        here = str(accelerator.device)
        found = {}
        for made in ("before", "after", "used"):
            net = Tied()
            optimizer = torch.optim.AdamW(net.parameters())
            if made == "used":
                net(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if made == "after":
                net = accelerator.prepare(net)
                optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters()))
            else:
                net, optimizer = accelerator.prepare(net, optimizer)
            inner = accelerator.unwrap_model(net)
            assert inner.outer.weight is inner.inner.weight
            assert inner.shared is inner.shift or devices(inner.shared) == {"cpu"}  # a plain attribute: torch moves buffers alone
            loss = net(torch.ones(4, 8, device=accelerator.device)).square().mean()
            accelerator.backward(loss)
            gradients = [parameter.grad for parameter in net.parameters()]
            optimizer.step()
            moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
            counts = [state["step"] for state in optimizer.state.values()]
            assert (len(moments), len(counts)) == (10, 5)
            assert devices(*net.parameters(), *net.buffers(), loss, *gradients, *moments) == {here}, made
            assert devices(*counts) == {"cpu"}  # as torch keeps them: a count on the device would be read in every step
            found[made] = [int(count) for count in counts]
        return here, found

    outcomes = ranks(world, device="standin").run(run)
    assert [here for here, _ in outcomes] == [f"standin:{rank}" for rank in range(world)]
    for _, found in outcomes:
        assert found == {"before": [1] * 5, "after": [1] * 5, "used": [2] * 5}


def test_device_placement_off(ranks: Any) -> None:
    """Without placement things stay where the script put them; a model elsewhere is an error, and a batch is handed out as it came."""

    def run() -> Any:
        accelerator = Accelerator(device_placement=False)
        with pytest.raises(ConfigError, match="is on cpu, but this process computes on standin"):
            accelerator.prepare(mlp())
        with pytest.raises(ConfigError, match=f"is on standin:3, but this process computes on {accelerator.device}"):
            accelerator.prepare(mlp().to("standin:3"))
        net = mlp().to(accelerator.device)
        net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(rows(4), batch_size=2))
        x, _ = next(iter(loader))
        placed = Accelerator().prepare(DataLoader(rows(4), batch_size=2), mlp(), device_placement=[False, True])
        return str(x.device), str(next(iter(placed[0]))[0].device), str(next(placed[1].parameters()).device)

    assert ranks(2, device="standin").run(run) == [("cpu", "cpu", f"standin:{rank}") for rank in range(2)]


def test_state_keeps_its_dtype(ranks: Any) -> None:
    """The state of an optimizer that was used before comes to the device as it is: moments in float32 of weights in bfloat16 too.

    A fused optimizer counts its steps on the device.
    """

    def run() -> Any:
        accelerator = Accelerator()
        net = mlp().bfloat16()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        net(torch.ones(2, 8).bfloat16()).sum().backward()
        optimizer.step()
        exact = torch.linspace(0, 1, 16)
        optimizer.state[net[0].bias]["exp_avg"] = exact
        net, optimizer = accelerator.prepare(net, optimizer)
        state = optimizer.state[net[0].bias]
        return str(state["exp_avg"].device), torch.equal(state["exp_avg"].cpu(), exact), str(state["step"].device), int(state["step"])

    assert ranks(1, device="standin").run(run) == [("standin:0", True, "standin:0", 1)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_updates_of_plain_pytorch(ranks: Any, world: int) -> None:
    """Two models, accumulation, clipping and a schedule: the weights are those of one process on the host, on one process bit for bit.

    Copies and collectives run late, so that reading one too early would show.
    """
    samples, steps, epochs = 48, 2, 2

    def run() -> Any:
        torch.standin.set_delay(copies=0.001)
        try:
            return updates()
        finally:
            torch.standin.set_delay(copies=0.0)

    def updates() -> Any:
        accelerator = Accelerator(gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(non_blocking=True))
        first, second = mlp(0), mlp(1)
        optimizers = [torch.optim.AdamW(first.parameters(), 0.01), torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
        loader = DataLoader(rows(samples), batch_size=4 // accelerator.num_processes, pin_memory=True)
        first, second, *optimizers, schedule, loader = accelerator.prepare(first, second, *optimizers, schedule, loader)
        norms = []
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(first, second):
                    accelerator.backward(torch.nn.functional.mse_loss(second(first(x)), y))
                    norms.append(accelerator.clip_grad_norm_(first.parameters(), 0.5))
                    accelerator.clip_grad_value_(second.parameters(), 0.01)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    schedule.step()
        assert devices(*norms) == {str(accelerator.device)}
        return values(first) + values(second), [norm.cpu() for norm in norms], schedule.get_last_lr()

    expected, norms, rate = plain_updates(samples, steps, epochs)
    for found, clipped, last in ranks(world, device="standin").run(run):
        compare = torch.equal if world == 1 else torch.allclose
        assert all(compare(one, other) for one, other in zip(found, expected, strict=True))
        assert torch.allclose(torch.stack(clipped[steps - 1 :: steps]), torch.stack(norms))
        assert clipped[0] == 0.0
        assert last == rate


def plain_updates(samples: int, steps: int, epochs: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """What `test_updates_of_plain_pytorch` trains, by hand."""
    first, second = mlp(0), mlp(1)
    optimizers = [torch.optim.AdamW(first.parameters(), 0.01), torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    norms = []
    for _ in range(epochs):
        for number, (x, y) in enumerate(DataLoader(rows(samples), batch_size=4), 1):
            (torch.nn.functional.mse_loss(second(first(x)), y) / steps).backward()
            if number % steps == 0:
                norms.append(torch.nn.utils.clip_grad_norm_(first.parameters(), 0.5))
                torch.nn.utils.clip_grad_value_(second.parameters(), 0.01)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
    return values(first) + values(second), norms, schedule.get_last_lr()


SPOILT = (2, 3, 7)
"""Batches whose loss overflows in fp16."""


def spoil(loss: torch.Tensor, number: int) -> torch.Tensor:
    return loss * (1e30 if number in SPOILT else 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_loss_scale_of_torch(ranks: Any, world: int, fused: bool) -> None:
    """With fp16 the scale after every update, the updates that are left out and the weights are those of torch's GradScaler."""
    options = {"init_scale": 2.0**10, "growth_interval": 3}

    def ours() -> Any:
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01, fused=fused)
        net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows(40), batch_size=4 // accelerator.num_processes))
        found = []
        for number, (x, y) in enumerate(loader):
            output = net(x)
            assert output.dtype == torch.float32
            accelerator.backward(spoil(torch.nn.functional.mse_loss(output, y), number))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((accelerator.scaler.get_scale(), optimizer.step_was_skipped))
        return found, optimizer.updates, values(net)

    def plain() -> Any:
        net = mlp().to("standin")
        optimizer = torch.optim.AdamW(net.parameters(), 0.01, fused=fused)
        scaler = torch.amp.GradScaler("standin", **options)
        found = []
        for number, (x, y) in enumerate(DataLoader(rows(40), batch_size=4)):
            with torch.autocast("standin", torch.float16):
                output = net(x.to("standin"))
            scaler.scale(spoil(torch.nn.functional.mse_loss(output.float(), y.to("standin")), number)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((scaler.get_scale(), number in SPOILT))
        return found, 10 - len(SPOILT), values(net)

    expected = ranks(1, device="standin").run(plain)[0]
    assert len({scale for scale, _ in expected[0]}) > 2, "the scale grows and shrinks"
    for found in ranks(world, device="standin").run(ours):
        assert found[:2] == expected[:2]
        tolerance = {"rtol": 0.0, "atol": 0.0} if world == 1 else {"rtol": 0.02, "atol": 2e-3}  # halves of a batch round apart in fp16
        torch.testing.assert_close(found[2], expected[2], **tolerance)


def test_precision_on_the_device(ranks: Any) -> None:
    """Autocast works on the type of the device: in prepared models, in `autocast` and not around them."""

    def run() -> Any:
        found = []
        for precision in ("bf16", "fp16"):
            accelerator = Accelerator(mixed_precision=precision)
            net = accelerator.prepare(mlp())
            inner = accelerator.unwrap_model(net)
            inside: list[torch.dtype] = []
            handle = inner[0].register_forward_hook(lambda module, inputs, output, inside=inside: inside.append(output.dtype))
            x = torch.ones(2, 8, device=accelerator.device)
            output = net(x)
            handle.remove()
            with accelerator.autocast():
                product = x @ x.t()
            found.append((inside[0], output.dtype, product.dtype, (x @ x.t()).dtype, torch.is_autocast_enabled("standin")))
        return found

    expected = [(kind, torch.float32, kind, torch.float32, False) for kind in (torch.bfloat16, torch.float16)]
    assert ranks(1, device="standin").run(run) == [expected]


def test_infinite_norm(ranks: Any) -> None:
    """A norm that is not finite is returned on the device, and clips as torch does: all gradients become NaN."""

    def run() -> Any:
        accelerator = Accelerator(on_nan="off")
        net, optimizer = accelerator.prepare(net := mlp(), torch.optim.SGD(net.parameters(), 0.1))
        accelerator.backward(net(torch.ones(2, 8, device=accelerator.device)).mean() * float("nan"))
        norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
        return str(norm.device), bool(norm.isfinite()), all(bool(parameter.grad.isnan().all()) for parameter in net.parameters())

    assert ranks(2, device="standin").run(run) == [(f"standin:{rank}", False, True) for rank in range(2)]


def train(accelerator: Accelerator, net: Any, samples: int = 24, batch_size: int = 2) -> list[torch.Tensor]:
    """A few updates of SGD; the weights then."""
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(rows(samples), batch_size=batch_size)
    )
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return values(accelerator.unwrap_model(net))


def test_ddp_options(ranks: Any) -> None:
    """Communication hooks, a static graph and gradients inside of buckets give the averages of plain replicas, and those of the host."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp16": {"comm_hook": "fp16"},
        "bf16": {"comm_hook": "bf16"},
        "powerSGD": {"comm_hook": "power_sgd"},
        "static": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
    }

    def run() -> Any:
        handlers = {name: DistributedDataParallelKwargs(**options) for name, options in cases.items()}
        return {name: train(Accelerator(kwargs_handlers=[handler]), mlp()) for name, handler in handlers.items()}

    (on_host, _), (first, second) = ranks(2, device="cpu").run(run), ranks(2, device="standin").run(run)
    for name in ("plain", "fp16", "bf16", "static", "views", "unused"):
        torch.testing.assert_close(first[name], on_host[name], rtol=0, atol=0)
    for name, tolerance in {"fp16": 1e-3, "bf16": 1e-2, "powerSGD": 1e-6, "static": 1e-6, "views": 1e-6, "unused": 1e-6}.items():
        torch.testing.assert_close(first[name], first["plain"], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


def test_uneven_inputs(ranks: Any) -> None:
    """Ranks with different numbers of batches join the collectives of the others on the device, with the weights of the host."""

    def run() -> Any:
        accelerator = Accelerator()
        net = mlp()
        net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(rows(5), batch_size=2))
        batches = 0
        with accelerator.join_uneven_inputs([net], even_batches=False):
            for x, y in loader:
                accelerator.backward(torch.nn.functional.mse_loss(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
        return batches, values(accelerator.unwrap_model(net))

    on_host, on_device = ranks(2, device="cpu").run(run), ranks(2, device="standin").run(run)
    assert [batches for batches, _ in on_device] == [2, 1]
    torch.testing.assert_close(on_device, on_host, rtol=0, atol=0)


def test_local_sgd_stays_on_the_device(ranks: Any) -> None:
    """The average of weights is taken on the device: nothing is copied to the host, and every rank has the mean of what each had."""

    def run() -> Any:
        accelerator = Accelerator()
        net = mlp(accelerator.process_index)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        x = torch.full((2, 8), float(accelerator.process_index), device=accelerator.device)
        with LocalSGD(accelerator, net, local_sgd_steps=2) as local:
            for step in range(2):
                accelerator.backward(net(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step:
                    before = values(accelerator.unwrap_model(net))
                    torch.standin.reset_counters()
                local.step()
                copies = torch.standin.counters().copies_to_host
        assert devices(*net.parameters()) == {str(accelerator.device)}
        return before, values(accelerator.unwrap_model(net)), copies

    outcomes = ranks(2, device="standin").run(run)
    means = [(one + other) / 2 for one, other in zip(outcomes[0][0], outcomes[1][0], strict=True)]
    for _, after, copies in outcomes:
        torch.testing.assert_close(after, means)
        assert copies == 0


def test_compiled_on_the_device(ranks: Any) -> None:
    """A compiled model trains to the weights of one that is not, in bf16 too."""

    def run() -> Any:
        found = []
        for precision in ("no", "bf16"):
            eager = train(Accelerator(mixed_precision=precision), mlp(), samples=8)
            found.append((eager, train(Accelerator(mixed_precision=precision, dynamo_backend="aot_eager"), mlp(), samples=8)))
        torch._dynamo.reset()
        return found

    for found in ranks(2, device="standin").run(run):
        for eager, compiled in found:
            torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)


def test_activation_checkpointing(ranks: Any) -> None:
    """Blocks that run again in the backward pass give the same gradients, dropout inside; inputs that wait in host memory come back."""

    def run() -> Any:
        accelerator = Accelerator(kwargs_handlers=[GuardKwargs(same_batches=False)])  # which looks at the first inputs on the host
        found = []
        for way in ("kept", "again", "offloaded"):
            net = torch.nn.Sequential(mlp().append(torch.nn.Dropout(0.5)), mlp(1))
            if way != "kept":
                checkpoint_activations([("0", net[0]), ("1", net[1])], offload=way == "offloaded", device=accelerator.device)
            net = accelerator.prepare(net)
            torch.manual_seed(4)
            x = torch.linspace(-1, 1, 512 * 8, device=accelerator.device).reshape(512, 8)
            torch.standin.reset_counters()
            loss = net(x).square().mean()
            copied = torch.standin.counters().bytes_to_host
            accelerator.backward(loss)
            found.append(([parameter.grad.cpu() for parameter in net.parameters()], copied >= x.numel() * 4))
        return found

    for (kept, first), (again, second), (offloaded, third) in ranks(2, device="standin").run(run):
        torch.testing.assert_close(again, kept, rtol=0, atol=0)
        torch.testing.assert_close(offloaded, kept, rtol=0, atol=0)
        assert (first, second, third) == (False, False, True)


def test_memory_comes_back(ranks: Any) -> None:
    """`free_memory` and `release_memory` give back all that a training had on the device."""

    def run() -> Any:
        accelerator = Accelerator(mixed_precision="bf16")
        torch.standin.synchronize()
        start = torch.standin.memory_allocated()
        net = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 8))
        net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(rows(8), batch_size=2))
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(net(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        used = torch.standin.memory_allocated() - start
        del x, y, loss
        net, optimizer, loader = accelerator.free_memory(net, optimizer, loader)
        left = torch.standin.memory_allocated() - start
        spare = torch.empty(1 << 20, device=accelerator.device)
        spare = release_memory(spare)[0]
        release_memory()
        return used > 16 * 8 * 4096, left, torch.standin.memory_allocated() - start, torch.standin.memory_reserved() < 4 << 20

    for used, left, after, given_back in ranks(2, device="standin").run(run):
        assert used
        assert left <= 4096, "a few numbers of the ledger may wait to be read"
        assert after <= 4096
        assert given_back


@pytest.mark.parametrize("world", [1, 2])
def test_batch_size_that_fits_the_device(ranks: Any, world: int) -> None:
    """`find_executable_batch_size` halves the batch until it fits the device with the least memory, on all ranks alike."""

    def run() -> Any:
        accelerator = Accelerator()
        rank = accelerator.process_index
        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=4096)
        def fit(batch_size: int) -> tuple[int, list[torch.Tensor]]:
            tried.append(batch_size)
            accelerator.free_memory()
            net = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
            net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
            for _ in range(2):
                x = torch.ones(batch_size, 8, device=accelerator.device)
                accelerator.backward(net(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return batch_size, values(net)

        torch.standin.set_capacity((12 if rank + 1 == accelerator.num_processes else 64) << 20, rank)
        try:
            size, _ = fit()
        finally:
            torch.standin.set_capacity(4 << 30, rank)
        return tried, size, torch.standin.memory_stats()["num_ooms"] > 0

    outcomes = ranks(world, device="standin").run(run)
    assert len({size for _, size, _ in outcomes}) == 1
    assert outcomes[0][1] < 4096
    assert [failed for *_, failed in outcomes] == [rank + 1 == world for rank in range(world)]
    assert all(tried == outcomes[0][0] for tried, *_ in outcomes)


def test_copies_of_prepared_models(ranks: Any) -> None:
    """A deep copy of a prepared model is on the device, and has weights of its own."""

    def run() -> Any:
        accelerator = Accelerator(mixed_precision="bf16")
        net = accelerator.prepare(mlp())
        twin = copy.deepcopy(accelerator.unwrap_model(net))
        with torch.no_grad():
            twin[0].weight.zero_()
        x = torch.ones(1, 8, device=accelerator.device)
        return str(twin[0].weight.device), bool((net(x) != twin(x)).any()), bool(accelerator.unwrap_model(net)[0].weight.any())

    assert ranks(2, device="standin").run(run) == [(f"standin:{rank}", True, True) for rank in range(2)]


def test_evaluated_model(ranks: Any) -> None:
    """A model that is only evaluated, and one without trained parameters, are on the device, and are not wrapped."""

    def run() -> Any:
        accelerator = Accelerator()
        net, frozen = accelerator.prepare_model(Tied(), evaluation_mode=True), accelerator.prepare(Tied().requires_grad_(False))
        x = torch.arange(16.0, device=accelerator.device).view(2, 8)
        equal = torch.equal(net.eval()(x).cpu(), Tied().eval()(x.cpu()))
        return devices(*net.parameters(), *net.buffers(), *frozen.parameters(), *frozen.buffers()), equal, type(net)

    assert ranks(2, device="standin").run(run) == [({f"standin:{rank}"}, True, Tied) for rank in range(2)]
