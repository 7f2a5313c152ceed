"""Pipelines that cannot be, or that break: every process hears of it, by name and with the remedy, and nobody waits in vain."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_models import Crossing, Lookup, Tower, fixed, same

from slipstream import ConfigError, PartialState
from slipstream.inference.pipeline import prepare_pippy
from slipstream.testing import faults

GIVEN = torch.ones(4, 4, dtype=torch.float64)


class Deciding(torch.nn.Sequential):
    """Looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Giving(torch.nn.Sequential):
    """Gives something else than its layers do."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(*[torch.nn.Linear(4, 4) for _ in range(3)])
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(super().forward(x))


def caught(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


REFUSED = {
    "control flow": (
        lambda: Deciding(*[torch.nn.Linear(4, 4) for _ in range(3)]),
        {},
        r"Deciding cannot.*stopped at test_pipeline_failures.py:\d+ in forward: .*torch.where.*is that of the batch, 4: x \(4, 4\)",
    ),
    "another width": (Tower, {"example_args": (GIVEN[:, :3],), "split_points": ["head"]}, "does not run with these arguments.*shapes"),
    "rows that are mixed": (
        lambda: Giving(lambda x: x - x.mean(0)),
        {},
        r"for a part of the example than for all of it \(apart by.*rows of the batch: x ",
    ),
    "no such module": (Tower, {"split_points": ["tower.head"]}, "'tower.head', which is not a module of this Tower. Did you mean 'head'"),
    "no such layer": (Tower, {"split_points": ["layers.99"]}, r"There are: layers.0, layers.1, layers.2, ..., layers.5\."),
    "a list, never called": (Tower, {"split_points": ["layers"]}, "'layers' is never called when Tower runs"),
    "too few points": (Tower, {"split_points": []}, "0 split points make 1 stage, but there are 2 processes"),
    "the same twice": (Tower, {"split_points": ["head", "head"]}, "'head' twice"),
    "one text": (Tower, {"split_points": "head"}, r'write "auto", or a list of names of modules, \[\'head\'\]'),
    "too few blocks": (lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), {}, "1 block cannot be cut into 2 stages.* 1 process, or"),
    "no pieces": (Tower, {"num_chunks": 0}, "num_chunks=0"),
    "no example": (Tower, {"example_args": ()}, "to prepare_pippy as example_args="),
    "an example of no rows": (Tower, {"example_args": (GIVEN[:0],)}, "a batch of no rows"),
    "an object": (Tower, {"example_args": (GIVEN, object())}, "called with a object"),
    "a loss": (lambda: Giving(torch.mean), {}, r"tensor of shape \(\) for 2 rows.*compute means and losses from them"),
    "a foreign object": (lambda: Giving(lambda x: (x, {1, 2})), {}, "returns a set.*use_cache=False"),
    "no tensor": (lambda: Giving(lambda x: 3), {}, "returns no tensor"),
    "an argument that the model does not take": (Tower, {"example_kwargs": {"wrong": 1}}, "unexpected keyword argument 'wrong'"),
}


def test_wrong_arguments_on_all_ranks(ranks):
    """What cannot be is refused on every process."""
    def run() -> dict[str, tuple[str, str]]:
        found = {}
        logged: list[logging.LogRecord] = []
        logging.getLogger("torch._subclasses.fake_tensor").addFilter(logged.append)  # what would be shown beside the error
        for case, (make, options, _) in REFUSED.items():
            model = fixed(make())
            found[case] = caught(lambda model=model, options=options: prepare_pippy(model, **{"example_args": (GIVEN,), **options}))
        logging.getLogger("torch._subclasses.fake_tensor").removeFilter(logged.append)
        assert not logged
        return found

    for found in ranks(2).run(run):
        for case, (_, _, told) in REFUSED.items():
            kind, text = found[case]
            assert kind == ("TypeError" if case.startswith("an argument") else "ConfigError"), (case, kind, text)
            assert re.search(told, text, re.DOTALL), (case, text)


def test_mistake_of_one_rank(ranks):
    """Another shape, another number of rows, a tensor that lost its rows, a value that cannot be sent."""

    def run() -> tuple[list[tuple[str, str]], bool]:
        rank = PartialState().process_index
        plain, arguments = fixed(Crossing()), Crossing.arguments(4)
        model = prepare_pippy(fixed(Crossing()), example_kwargs=arguments, gather_output=True)
        mistakes = [Crossing.arguments(4 + rank), Crossing.arguments(4, 3 + rank), {**arguments, "name": object() if rank else None}]
        found = [caught(lambda given=given: model(**given)) for given in mistakes]
        lost = {**arguments, "pair": (arguments["pair"][0], {"mask": arguments["pair"][1]["mask"][:3]})}
        found.append(caught(lambda: model(**lost)))
        return found, same(model(**arguments), plain(**arguments))

    for (rows, length, value, lost), goes_on in ranks(2).run(run):
        assert rows[0] == length[0] == value[0] == "MismatchError"
        assert "rank 0: pipeline 4 rows of" in rows[1]
        assert "rank 1: pipeline 5 rows of" in rows[1]
        assert "test_pipeline_failures.py:" in rows[1]
        assert lost == ("ConfigError", lost[1])
        assert "shape (3, 3) in a batch of 4 rows" in lost[1]
        assert "rank 1: pipeline (which could not be sent: a pipeline was called with a object" in value[1]
        assert goes_on


@pytest.mark.parametrize("world", [2, 3])
def test_stage_failure_ends_waits(ranks, world):
    """A process that fails in its stage ends the waits of the others."""
    def run() -> tuple[tuple[str, str], bool]:
        PartialState(timeout=60)
        plain, model = fixed(Lookup()), fixed(Lookup())
        x, numbers = torch.ones(6, 8).double(), torch.arange(6)
        prepare_pippy(model, example_args=(x, numbers), gather_output=True)
        return caught(lambda: model(x, numbers + 7)), same(model(x, numbers), plain(x, numbers))

    *others, last = ranks(world).run(run)
    assert last[0] == ("IndexError", "index out of range in self")
    for (kind, text), _ in others:
        assert kind == "PeerLostError", text
        assert f"rank {world - 1} failed in its stage with IndexError: index out of range in self" in text
    assert all(goes_on for _, goes_on in (*others, last)), "the next call opens the group again"


def test_killed_stage_named(ranks):
    """Survivors of a kill in a stage name the rank."""
    def run() -> tuple[str, str]:
        state = PartialState(timeout=40)
        model = prepare_pippy(fixed(Tower()), example_args=(GIVEN,), gather_output=True)
        model(GIVEN)
        (program,) = model.pippy_stage._programs.values()
        program.traced.module.register_forward_pre_hook(lambda *_: faults.kill_at(1, 0).reach(state.process_index, 0))
        return caught(lambda: model(GIVEN))

    first, second = ranks(2).outcomes(run)
    assert second.exit is not None
    assert first.value[0] == "PeerLostError", first
    assert "rank 1" in first.value[1]
    assert "pipeline" in first.value[1]


def test_stage_timeout(ranks):
    """Where torch waits and not we: the limit is that of the process group, and the error is ours."""

    def run() -> tuple[str, str]:
        state = PartialState(timeout=4)
        model = prepare_pippy(fixed(Tower()), example_args=(GIVEN,))
        (program,) = model.pippy_stage._programs.values()
        if state.process_index == 0:
            program.traced.module.register_forward_pre_hook(lambda *_: time.sleep(6))
        return caught(lambda: model(GIVEN))

    first, second = ranks(2).run(run)
    assert first[0] == "PeerLostError"
    assert "rank 1 gave up waiting in pipeline number 1" in first[1]
    assert second[0] == "WaitTimeoutError"
    assert "in pipeline number 1 at test_pipeline_failures.py:" in second[1]


def test_prepare_twice_refused(ranks):
    """A prepared model is not prepared again and weights that are gone are named."""
    def run() -> list[tuple[str, str]]:
        arguments = Crossing.arguments(4)
        model = prepare_pippy(fixed(Crossing()), example_kwargs=arguments)
        again = caught(lambda: prepare_pippy(model, example_kwargs=arguments))
        with torch.device("meta"):
            empty = Tower().eval().double()
        return [again, caught(lambda: prepare_pippy(empty, example_args=(GIVEN,)))]

    for again, empty in ranks(2).run(run):
        assert again[0] == "ConfigError"
        assert "a pipeline already" in again[1]
        assert empty[0] in ("ConfigError", "MismatchError")
        assert "no memory for '" in empty[1]


def test_what_is_no_model_is_refused() -> None:
    """What is no model is refused."""
    with pytest.raises(ConfigError, match="given a"):
        prepare_pippy(3)  # type: ignore[arg-type]
