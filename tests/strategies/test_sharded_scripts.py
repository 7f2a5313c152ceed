"""What scripts do with sharded models beyond a plain loop: outputs changed in place, odd parameters, optimizers that were not prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sharded_training import Net, adamw, loss_of, net, same, same_run, sentences, train
from torch.distributed.tensor import DTensor

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.errors import ConfigError, MismatchError, SlipstreamError

Ranks = Any
Plugin = FullyShardedDataParallelPlugin


class Residual(torch.nn.Module):
    """Blocks that return views, to which the model adds in place; an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6)) for _ in range(2)
        )
        self.head = torch.nn.Linear(6, 11)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            changed = block(hidden)
            changed += hidden
            hidden = changed
        return self.head(hidden) + self.empty.sum()


def residual() -> Residual:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Residual()


def halve_in_place(model: Any, words: torch.Tensor) -> torch.Tensor:
    """Return a slice of the output, changed in place: the backward pass must still reach the model."""
    logits = model(words)
    logits /= 2
    return logits


@pytest.mark.parametrize("policy", ["no_wrap", None])
def test_outputs_changed_in_place(ranks: Ranks, policy: str | None) -> None:
    """Outputs of a model and of its blocks may be changed in place, also where they are views."""

    def run(**options: Any) -> Any:
        return train(2, model=residual(), call=halve_in_place, **options)

    expected = ranks(1).run(run)[0]
    for found in ranks(2).run(lambda: run(fsdp_plugin=Plugin(auto_wrap_policy=policy))):
        same_run(found, expected)


def test_loss_in_an_attribute(ranks: Ranks) -> None:
    """A loss that the model keeps in an attribute, and returns in no form that torch sees, trains it all the same."""

    class Keeping(Residual):
        def forward(self, words: torch.Tensor) -> Any:
            self.kept = super().forward(words)
            return object()

    def through_an_attribute(model: Any, words: torch.Tensor) -> torch.Tensor:
        model(words)
        return model.kept  # type: ignore[no-any-return]

    def run(**options: Any) -> Any:
        model = Keeping()
        model.load_state_dict(residual().state_dict())
        return train(2, model=model, call=through_an_attribute, **options)

    expected = ranks(1).run(run)[0]
    for found in ranks(2).run(lambda: run(fsdp_plugin=Plugin(auto_wrap_policy="no_wrap"))):
        same_run(found, expected)


def test_views_of_other_operations(ranks: Ranks) -> None:
    """A view of something that autograd needs again becomes a copy."""

    class Power(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 15).reshape(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).exp().view(-1)

    def run(**options: Any) -> torch.Tensor:
        accelerator = Accelerator(**options)
        model = accelerator.prepare(Power())
        output = model(torch.full((2, 5), 0.3, device=accelerator.device))
        output = output.clone() if not options else output  # a plain model refuses the next line
        output *= 2
        accelerator.backward(output.sum())
        gradient: torch.Tensor = model.weight.grad
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    expected = ranks(1).run(run)[0]
    for found in ranks(2).run(lambda: run(fsdp_plugin=Plugin())):
        assert torch.allclose(found, expected)


def test_checkpointing_turns_cache_off() -> None:
    """A block of transformers that runs twice must not add to the cache of keys and values twice."""
    model = net()
    for block in model.blocks:
        block.config = SimpleNamespace(use_cache=True)
    Accelerator(fsdp_plugin=Plugin(activation_checkpointing=True)).prepare(model)
    assert [block.config.use_cache for block in model.blocks] == [False, False, False]


@pytest.mark.parametrize("kind", ["prepared", "unprepared", "group added later"])
def test_optimizer_of_old_parameters(ranks: Ranks, kind: str) -> None:
    """An optimizer made of the unsharded parameters trains the model, also if it is not prepared, or gets some of them later."""

    def run(kind: str, **options: Any) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(**options)
        words, following = (rows.to(accelerator.device) for rows in sentences(12)[:])
        model: Any = net(tied=False)
        head = list(model.head.parameters())
        optimizer: Any = adamw(model)
        if kind == "group added later":
            others = [parameter for name, parameter in model.named_parameters() if not name.startswith("head.")]
            optimizer = torch.optim.AdamW(others, lr=0.01)
        model = accelerator.prepare(model)
        optimizer = optimizer if kind == "unprepared" else accelerator.prepare(optimizer)
        if kind == "group added later":
            optimizer.add_param_group({"params": head, "lr": 0.02})
        for _ in range(3):
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    expected = ranks(1).run(run, kind)[0]
    for found in ranks(2).run(lambda: run(kind, fsdp_plugin=Plugin())):
        same(found, expected)


def test_prepare_after_failed_backward(ranks: Ranks) -> None:
    """A script that catches an error of the backward pass goes on with another model."""

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        words, following = (rows.to(accelerator.device) for rows in sentences(4)[:])
        model = accelerator.prepare(net())
        hidden = model.encode(words)
        hidden.register_hook(_fail)
        with pytest.raises(ArithmeticError):
            accelerator.backward(loss_of(model.score(hidden), following))
        return train(fsdp_plugin=Plugin())

    def _fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("no gradient")

    expected = ranks(1).run(train)[0]
    for found in ranks(2).run(run):
        same_run(found, expected)


def test_different_options(ranks: Ranks) -> None:
    """Options that differ between the ranks are refused with both values, and a number that does not divide with the arithmetic."""

    def run(rank: int) -> tuple[str, str, str]:
        def refused(kind: type[Exception], model: torch.nn.Module, **options: Any) -> str:
            with pytest.raises(kind) as caught:
                Accelerator(fsdp_plugin=Plugin(**options)).prepare(model)
            return str(caught.value)

        return (
            refused(MismatchError, Net(), reshard_after_forward=bool(rank)),
            refused(MismatchError, Net(width=7 + rank, depth=0)),
            refused(ConfigError, Net(), reshard_after_forward=7),
        )

    for options, shapes, number in ranks(2).run(lambda: run(Accelerator().process_index)):
        assert "reshard_after_forward of the fsdp_plugin: rank 0 (False) | rank 1 (True)" in options
        assert "embed.weight: rank 0 ([11, 7] torch.float32 trained: True) | rank 1 ([11, 8]" in shapes
        assert "2 / 7 = 0.29" in number


@pytest.mark.parametrize("kind", ["leaf", "block"])
def test_different_experts(ranks: Ranks, kind: str) -> None:
    """Ranks that use different parts of a model are refused before the optimizer steps: torch would mix their gradients or weights."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            made = [torch.nn.Linear(4, 4) if kind == "leaf" else torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in "12"]
            self.experts = torch.nn.ModuleList(made)

        def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
            return self.experts[chosen](self.first(x))

    def run() -> str:
        policy = "no_wrap" if kind == "leaf" else lambda module: isinstance(module, torch.nn.Sequential)
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy=policy))
        model = Experts()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for chosen in (0, accelerator.process_index):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(2, 4, device=accelerator.device), chosen).mean())
            try:
                optimizer.step()
            except SlipstreamError as error:
                return str(error)
        return "nothing was said"

    expected = "the parameters of FSDPExperts with gradients" if kind == "leaf" else "have run different blocks"
    assert all(expected in text for text in ranks(2).run(run))


def test_whole_weights_loaded(ranks: Ranks) -> None:
    """What `get_state_dict` returned can be loaded again, e.g. the best weights of a run."""

    def run() -> None:
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        model = accelerator.prepare(net())
        best = accelerator.get_state_dict(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.load_state_dict(best)
        same(accelerator.get_state_dict(model), best)
        with pytest.raises(ConfigError, match="LBFGS cannot update sharded parameters"):
            accelerator.prepare(torch.optim.LBFGS(model.parameters()))

    ranks(2).run(run)
