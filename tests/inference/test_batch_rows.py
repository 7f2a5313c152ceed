"""Tensors that only look as if they had a row for each entry of the batch: the output is that of the plain model all the same."""

from __future__ import annotations

from typing import Any

import torch
from stage_models import fixed, same

from slipstream.errors import ConfigError
from slipstream.inference.microbatches import PipelineBatch
from slipstream.inference.pipeline import prepare_pippy
from slipstream.inference.trace import resolve_rows


class Masked(torch.nn.Module):
    """Positions (batch, length, 4), and a mask for positions, a memory of two parts, or one weight for each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

    def forward(
        self, x: torch.Tensor, mask: Any = None, keys: Any = None, values: Any = None, weight: Any = None, selected: Any = None
    ) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if mask is not None:
                x = x + (torch.sigmoid(x @ x.transpose(1, 2)) * mask) @ x
            if keys is not None:
                x = x + torch.softmax(x @ keys.T, -1) @ values
            if selected is not None:  # by number, which shapes do not tell
                x = x * selected[torch.arange(len(x)), 0][:, None, None]
            if weight is not None:
                x = x * weight[:, None, None]
        return x


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def test_mask_as_long_as_batch(ranks):
    """In the example, and in later calls of another structure, when the weights of other stages are gone."""

    def run() -> list[bool]:
        plain, mask = fixed(Masked()), random(4, 4)
        model = prepare_pippy(fixed(Masked()), example_args=(random(4, 4, 4), mask), num_chunks=4, gather_output=True)
        calls: list[Any] = [((random(rows, 4, 4), mask), {}) for rows in (4, 3)]
        calls += [((random(4, 4, 4),), {"mask": mask, "weight": random(4)})]
        return [same(model(*args, **kwargs), plain(*args, **kwargs)) for args, kwargs in calls]

    assert ranks(2).run(run) == [[True] * 3] * 2


def test_ambiguous_rows_refused(ranks):
    """What cannot be told without weights is refused."""
    def run() -> str:
        model = prepare_pippy(fixed(Masked()), example_args=(random(4, 4, 4),))
        try:
            model(random(4, 4, 4), keys=random(4, 4), values=random(4, 4))
        except ConfigError as error:
            return str(error)
        return ""

    for said in ranks(2).run(run):
        assert "whether keys and values has a row for each of the 4 entries" in said


def test_rows_told_apart():
    """What has a row per entry is reported from what has none."""
    def read(**given: torch.Tensor) -> dict[str, bool]:
        batch = PipelineBatch((random(4, 4, 4),), given)
        model = fixed(Masked())
        found = resolve_rows(model, batch, torch.device("cpu"))
        return dict(zip(found.labels(model), found.is_cut, strict=True))

    assert read(selected=random(4, 4) > 0.5) == {"x": True, "selected": True}
    assert read(mask=random(4, 4)) == {"x": True, "mask": False}
    assert read(mask=random(4, 4, 4)) == {"x": True, "mask": True}
    assert read(keys=random(4, 4), values=random(4, 4), weight=random(4)) == {"x": True, "keys": False, "values": False, "weight": True}
