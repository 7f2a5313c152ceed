"""The user's model comes out of any nesting of wrappers, and is not changed by taking it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from slipstream.parallel.unwrap import extract_model_from_parallel as unwrap
from slipstream.precision.autocast import install_autocast
from slipstream.precision.policy import make_policy

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "parallel": DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def wrapped(model: Any, names: tuple[str, ...]) -> Any:
    """From the inside to the outside."""
    for name in names:
        model = WRAPPERS[name](model)
    return model


# torch.compile of what torch.compile made is a function, not a model
TWICE = "compiled-compiled"
NESTINGS = [names for depth in range(5) for names in product(WRAPPERS, repeat=depth) if TWICE not in "-".join(names)]


@pytest.mark.parametrize("names", NESTINGS, ids="-".join)
def test_any_nesting_is_peeled(names: tuple[str, ...]) -> None:
    model = nn.Linear(2, 2)
    outside = wrapped(model, names)
    keys = list(outside.state_dict())
    assert unwrap(outside, keep_torch_compile=False) is model
    kept = unwrap(outside)
    if "compiled" in names:
        assert kept._orig_mod is model
        assert kept.dynamo_ctx.fullgraph
    else:
        assert kept is model
    assert list(outside.state_dict()) == keys


def test_unwrap_compiled_model() -> None:
    """A compiled model comes back as the object it was."""
    compiled = wrapped(nn.Linear(2, 2), ("compiled",))
    assert unwrap(DataParallel(compiled)) is compiled
    assert unwrap(compiled) is compiled


def test_unwrap_keeps_compile_settings() -> None:
    """Settings are kept where the compiled wrapper was further out."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = nn.Linear(2, 2)
    again = unwrap(torch.compile(DataParallel(model), backend=backend))
    again(torch.ones(1, 2))
    assert len(graphs) == 1
    assert again._orig_mod is model


def test_unwrap_compiled_in_place() -> None:
    """A model that was compiled in place is the user's own."""
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    assert unwrap(DataParallel(model)) is unwrap(model, keep_torch_compile=False) is model


def test_unwrap_and_autocast() -> None:
    """Autocast stays unless it is to go."""
    model = nn.Linear(2, 2)
    install_autocast(model, make_policy("bf16"), "cpu")
    outside = DataParallel(model)
    assert unwrap(outside) is model
    assert "forward" in vars(model)
    assert unwrap(outside, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_unwrap_submodules() -> None:
    """Submodules are peeled where asked for."""
    inner = [nn.Linear(2, 2) for _ in range(3)]
    install_autocast(inner[0], make_policy("bf16"), "cpu")
    shared = DataParallel(inner[1])

    def build() -> nn.Module:
        nested = nn.ModuleDict({"a": DataParallel(inner[0]), "b": shared, "again": shared})
        return DataParallel(nn.ModuleList([nested, wrapped(inner[2], ("compiled", "parallel"))]))

    model = unwrap(build())
    assert isinstance(model[0]["a"], DataParallel)
    model = unwrap(build(), recursive=True)
    assert [model[0]["a"], model[0]["b"], model[0]["again"], model[1]._orig_mod] == [inner[0], inner[1], inner[1], inner[2]]
    assert "forward" in vars(inner[0])
    model = unwrap(build(), keep_fp32_wrapper=False, keep_torch_compile=False, recursive=True)
    assert [model[0]["a"], model[1]] == [inner[0], inner[2]]
    assert "forward" not in vars(inner[0])
    assert list(model.state_dict()) == [f"{place}.{kind}" for place in ("0.a", "0.b", "0.again", "1") for kind in ("weight", "bias")]


def test_unwrap_other_objects() -> None:
    """What is no module comes back as it is."""
    thing = object()
    assert unwrap(thing) is thing


def _peels_replicas() -> bool:
    from torch.nn.parallel import DistributedDataParallel

    from slipstream import PartialState

    PartialState(cpu=True).wait_for_everyone()
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    return (
        unwrap(DistributedDataParallel(model)) is model
        and unwrap(DistributedDataParallel(compiled)) is compiled
        and unwrap(torch.compile(DistributedDataParallel(model), backend="eager"), keep_torch_compile=False) is model
    )


def test_replicas_are_peeled(ranks: Any) -> None:
    assert all(ranks(2).run(_peels_replicas))
