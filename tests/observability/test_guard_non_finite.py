"""Updates whose gradients are not finite: named, left out or refused, alike on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded_run import Poison, batch, guarded, network

from slipstream import Accelerator, ConfigError, DistributedDataParallelKwargs
from slipstream.errors import MismatchError
from slipstream.observability.guards.findings import NonFiniteError
from slipstream.observability.options import GuardKwargs
from slipstream.parallel.local_sgd import LocalSGD
from slipstream.strategies.base import Strategy
from slipstream.utils import GradScalerKwargs

QUIET = {"loss_spike": None, "drift_every": None, "starving": None, "straggler": None, "schedule": False}
STEPS = 6


def train(
    accelerator: Accelerator, passes: Any = (), bad_rank: int = 0, name: str = "0.weight", leave_out: Any = (), clip: bool = False
) -> dict[str, Any]:
    """Weights, state and rates after some steps, with a gradient that is poisoned, or with batches that are left out."""
    net = network()
    if accelerator.process_index == bad_rank:
        Poison(dict(net.named_parameters())[name], passes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    skipped, rates = [], []
    for number in range(STEPS):
        if number in leave_out:
            continue
        with accelerator.accumulate(net):
            accelerator.backward(net(batch(number, accelerator.process_index)).square().mean())
            if clip:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    weights = [parameter.detach().clone() for parameter in accelerator.unwrap_model(net).parameters()]
    return {"tensors": weights + state, "skipped": skipped, "rates": rates, "updates": optimizer.updates}


def same(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(entry["tensors"], other["tensors"], strict=True))


@pytest.mark.parametrize("clip", [False, True])
def test_skipped_update(clip: bool) -> None:
    """An update that is left out is as if the batch had not been there."""
    accelerator, guards = guarded(GuardKwargs(on_nan="skip", **QUIET))
    skipped = train(accelerator, passes=[2], clip=clip)

    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for number in (0, 1, 3, 4, 5):
        net(batch(number)).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plain = [parameter.detach() for parameter in net.parameters()] + [
        v for entry in optimizer.state_dict()["state"].values() for v in entry.values()
    ]

    assert all(torch.equal(entry, other) for entry, other in zip(skipped["tensors"], plain, strict=True))
    assert skipped["skipped"] == [False, False, True, False, False, False]
    assert skipped["rates"][-1] == scheduler.get_last_lr()[0]
    assert skipped["rates"][1] == skipped["rates"][2], "the scheduler does not move"
    assert skipped["updates"] == STEPS - 1
    [finding] = guards.reporter.reported
    assert (finding.kind, finding.step) == ("nan", 2)
    assert finding.details["parameter"] == "0.weight", "although a norm that is NaN makes every gradient so"


@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_all_ranks_skip(ranks: Any, device: str) -> None:
    """Every rank leaves the update out and names the rank and the parameter."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(on_nan="skip", **QUIET))
        skipped = train(accelerator, passes=[3], bad_rank=1, clip=True)
        without = train(Accelerator(), leave_out=[3], clip=True)
        refusing, _ = guarded(GuardKwargs(on_nan="raise", **QUIET))
        with pytest.raises(NonFiniteError) as raised:
            train(refusing, passes=[3], bad_rank=1)
        same_rate = skipped["rates"][-1] == without["rates"][-1]
        return same(skipped, without), skipped["skipped"], same_rate, guards.reporter.reported, str(raised.value)

    for equal, skipped, same_rate, said, message in ranks(2, device=device).run(run):
        assert equal
        assert same_rate
        assert skipped == [False] * 3 + [True] + [False] * 2
        assert [(entry.step, entry.rank, entry.details["parameter"], entry.details["ranks"]) for entry in said] == [(3, 1, "0.weight", [1])]
        assert "step 3, rank 1: the gradient of 0.weight is nan on rank 1" in message
        assert "set_detect_anomaly" in message


def test_averages_equal_ddp(ranks: Any) -> None:
    """Averages are those of DDP bit for bit."""
    def run() -> bool:
        results = []
        for options in (GuardKwargs(**QUIET), GuardKwargs(on_nan="raise", **QUIET)):
            accelerator, _ = guarded(options)
            net = accelerator.prepare(network(torch.float32))
            for number in range(3):
                accelerator.backward(net(batch(number, accelerator.process_index, torch.float32)).square().mean())
            results.append([parameter.grad.clone() for parameter in net.parameters()])
        return all(torch.equal(result, other) for result, other in zip(*results, strict=True))

    assert ranks(3).run(run) == [True] * 3


def test_accumulation_window_skipped(ranks: Any) -> None:
    """A window of accumulation is left out as a whole."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(on_nan="skip", **QUIET), gradient_accumulation_steps=2)
        skipped = train(accelerator, passes=[2], bad_rank=1, name="2.bias")
        without = train(Accelerator(gradient_accumulation_steps=2), leave_out=[2, 3])
        return same(skipped, without), skipped["skipped"], [(found.rank, found.details["parameter"]) for found in guards.reporter.reported]

    for equal, skipped, said in ranks(2).run(run):
        assert equal
        assert skipped == [False, False, False, True, True, False], "until the next update is made"
        assert said == [(1, "2.bias")]


def test_without_averaging(ranks: Any) -> None:
    """Without averaging each rank decides for itself."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(on_nan="skip", **QUIET))
        net = network()
        if accelerator.process_index == 1:
            Poison(net[0].weight, [1])
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with LocalSGD(accelerator, net, local_sgd_steps=2) as local:
            for number in range(4):
                accelerator.backward(net(batch(number, accelerator.process_index)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        reported = [found.rank for found in guards.reporter.reported]
        return optimizer.updates, reported, [parameter.sum().item() for parameter in net.parameters()]

    (first, said, weights), (second, told, others) = ranks(2).run(run)
    assert (first, said) == (4, [])
    assert (second, told) == (3, [1])
    assert weights == others


def test_gradient_spoilt_after_averaging(ranks: Any) -> None:
    """A gradient that one rank spoils after averaging is named on every rank."""
    def run() -> str:
        accelerator, _ = guarded(GuardKwargs(on_nan="raise", **QUIET))
        net = network()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(net(batch(0)).mean())
        if accelerator.process_index == 1:
            net[2].weight.grad[0, 0] = float("nan")

        def go_on() -> None:
            optimizer.step()
            accelerator.wait_for_everyone()

        with pytest.raises((NonFiniteError, MismatchError)) as raised:
            go_on()
        return f"{raised.type.__name__} {raised.value}"

    other, spoilt = ranks(2).run(run)
    assert spoilt.startswith("NonFiniteError step 0, rank 1: the gradient of 2.weight is nan on rank 1, but not on other ranks")
    assert other.startswith("MismatchError")
    assert "(step 0: the gradient of 2.weight is nan on rank 1)" in other


class Sharded(Strategy):
    """A strategy for models that were sharded before they are prepared."""

    name = "sharded"
    replicated = False


def test_sharded_models(ranks: Any) -> None:
    """Sharded models are left out alike and never compared as replicas."""
    def run() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        accelerator, guards = guarded(GuardKwargs(on_nan="skip", drift_every=1))
        accelerator._components.strategy = accelerator._components.stepper.engine = Sharded()
        mesh = init_device_mesh(accelerator.device.type, (2,))
        net = torch.nn.Linear(3, 3, bias=False)
        net.weight = torch.nn.Parameter(distribute_tensor(torch.ones(3, 3, device=accelerator.device), mesh, [Shard(0)]))
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        skipped = []
        for row in (0, 2, None):
            gradient = torch.ones(3, 3, device=accelerator.device)
            if row is not None:
                gradient[row] = float("nan")
            net.weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
        reported = [(found.rank, found.details["parameter"]) for found in guards.reporter.reported]
        return skipped, optimizer.updates, reported, len(guards._drifts)

    assert ranks(2).run(run) == [([True, True, False], 1, [(0, "weight")], 0)] * 2


def test_join_uneven_inputs(ranks: Any) -> None:
    """Ranks that are done are not asked."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(on_nan="skip", **QUIET))
        net, rank = network(), accelerator.process_index
        if rank == 1:
            Poison(net[0].weight, [1, 2])
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with accelerator.join_uneven_inputs([net]):
            for number in range(2 + rank):
                accelerator.backward(net(batch(number, rank)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        reported = [(found.step, found.rank) for found in guards.reporter.reported]
        return optimizer.updates, reported, bool(torch.isfinite(net[0].weight).all())

    assert ranks(2).run(run) == [(1, [(1, None)], True), (1, [(1, 1)], True)]


def test_sparse_gradients(ranks: Any) -> None:
    """Sparse gradients and views of buckets are looked at too."""
    def run() -> Any:
        told = []
        for options in ({}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}):
            accelerator, _ = guarded(GuardKwargs(on_nan="raise", **QUIET), [DistributedDataParallelKwargs(**options)])
            is_sparse = not options and accelerator.device.type == "cpu"  # the stand-in device has no sparse kernels
            net = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=is_sparse), torch.nn.Linear(3, 1))
            if accelerator.process_index == 1:
                net[0].weight.register_hook(lambda gradient: gradient * float("inf"))
            net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            accelerator.backward(net(torch.tensor([1, 2], device=accelerator.device)).mean())
            with pytest.raises(NonFiniteError) as raised:
                optimizer.step()
            word = str(raised.value).split(" (loss")[0]
            told.append(word if options or is_sparse else word.replace("is nan", "is infinite"))
        return told

    for sparse, dense in ranks(2).run(run):
        assert sparse == "step 0, rank 1: the gradient of 0.weight is infinite on rank 1"
        assert dense == "step 0, rank 1: the gradient of 0.weight is nan on rank 1"


def test_user_hooks(ranks: Any) -> None:
    """Hooks of users run after the look and power hooks are refused."""
    def run() -> Any:
        accelerator, _ = guarded(GuardKwargs(on_nan="raise", **QUIET))
        seen: list[int] = []

        def hook(state: Any, bucket: Any) -> Any:
            seen.append(bucket.buffer().numel())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        net = network()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net.register_comm_hook(None, hook)
        with pytest.raises(RuntimeError, match="register_comm_hook"):
            net.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        accelerator.backward(net(batch(0)).square().mean())
        optimizer.step()
        power = DistributedDataParallelKwargs(comm_hook="power_sgd")
        with pytest.raises(ConfigError, match="on_nan='skip'.*power_sgd.*on_nan='raise'"):
            guarded(GuardKwargs(on_nan="skip", **QUIET), kwargs_handlers=[power])
        guarded(GuardKwargs(on_nan="raise", **QUIET), kwargs_handlers=[power])
        return seen

    assert ranks(2).run(run) == [[21]] * 2


class Backwards(torch.nn.Module):
    """Registers the last part first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_nearest_parameter_named() -> None:
    """The parameter that is named is the one nearest to the loss."""
    accelerator, _ = guarded(GuardKwargs(on_nan="raise", **QUIET))
    net = Backwards()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(torch.full((1, 2), 1e30)).square().mean())
    with pytest.raises(NonFiniteError, match=r"step 0, rank 0: the gradient of last\.\w+ is infinite \(loss inf\)"):
        optimizer.step()
    optimizer.zero_grad()
    net.first.bias.register_hook(lambda gradient: gradient * float("nan"))
    net.last.bias.register_hook(lambda gradient: gradient * float("inf"))
    accelerator.backward(net(torch.ones(1, 2)).mean())
    with pytest.raises(NonFiniteError, match=r"the gradient of last\.bias is infinite"):
        optimizer.step()


def test_large_gradients_are_finite() -> None:
    accelerator, _ = guarded(GuardKwargs(on_nan="raise", **QUIET))
    net = torch.nn.Linear(2, 1, bias=False)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-38))
    accelerator.backward(net(torch.full((1, 2), 3e38)).sum())
    optimizer.step()
    assert optimizer.updates == 1


def test_closure_refused() -> None:
    """A closure is refused where gradients are looked at first."""
    accelerator, _ = guarded(GuardKwargs(on_nan="skip", **QUIET))
    net = torch.nn.Linear(2, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ConfigError, match="LBFGS.step\\(closure\\) with on_nan='skip'"):
        optimizer.step(lambda: None)


def test_fp16_overflow_streak() -> None:
    """Overflows of fp16 are normal and a row of them is not."""
    accelerator, guards = guarded(
        GuardKwargs(on_nan="raise", **QUIET), mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    net = torch.nn.Linear(2, 1)
    Poison(net.weight, [0, 1, *range(5, 40)], float("inf"))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def step() -> bool:
        accelerator.backward(net(torch.ones(1, 2)).mean())
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.optimizer_step_was_skipped

    assert [step() for _ in range(25)] == [True, True] + [False] * 3 + [True] * 20
    assert not guards.reporter.reported
    with pytest.raises(NonFiniteError, match="fp16 has left out 20 updates in a row"):
        step()


def _clipped_on_device(value: float) -> tuple[str, list[int]]:
    """The error of an update whose gradient is poisoned before it is clipped, and the waits for the device of each update until then."""
    module = torch.get_device_module("standin")
    accelerator = Accelerator(on_nan="raise")
    net = network()
    Poison(dict(net.named_parameters())["2.weight"], [2], value)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    waits = []
    try:
        for number in range(STEPS):
            inputs = batch(number, 0).to(accelerator.device)
            loss = net(inputs).square().mean()
            accelerator.backward(loss)
            module.reset_counters()
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            waits.append(module.counters().copies_to_host)
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return str(error), waits
    return "none", waits


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("inf"), "infinite")])
def test_clipped_on_device(ranks: Any, value: float, word: str) -> None:
    """On a device, clipping reads nothing; an update that is refused still names the gradient that was bad before it was clipped."""
    ((error, waits),) = ranks(1, device="standin").run(_clipped_on_device, value)
    assert f"the gradient of 2.weight is {word}" in error
    assert waits == [0, 0, 0]
