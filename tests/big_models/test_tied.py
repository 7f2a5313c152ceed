"""Tied weights: found, kept together, tied again."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from slipstream.big_models.device_map.sizes import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.errors import ConfigError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_find_ties_with_meta() -> None:
    """Ties are found with and without memory."""
    with init_empty_weights():
        empty = Tied()
    assert find_tied_parameters(empty) == find_tied_parameters(Tied()) == [["embed.weight", "head.weight"]]


def test_module_in_two_places() -> None:
    """One module in two places is tied."""
    shared = nn.Linear(2, 2)
    assert find_tied_parameters(nn.ModuleDict({"b": shared, "a": shared})) == [["a.bias", "b.bias"], ["a.weight", "b.weight"]]


def test_ties_by_memory() -> None:
    """The same memory is a tie and parts of one memory are not."""
    flat = torch.zeros(8)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:4]), "b": nn.Parameter(flat[4:]), "c": nn.Parameter(flat[:4])})
    model["d"] = nn.Parameter(torch.empty(0))
    model["e"] = nn.Parameter(torch.empty(0))
    assert find_tied_parameters(model) == [["a", "c"]]


def test_what_is_no_model_is_refused() -> None:
    """What is no model is refused."""
    with pytest.raises(ConfigError, match="got a dict"):
        find_tied_parameters({})


def test_retie_keeps_values() -> None:
    """Retying keeps the one with values."""
    model = Tied()
    groups = find_tied_parameters(model)
    kept = model.head.weight
    model.embed.weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    retie_parameters(model, groups)
    assert model.embed.weight is kept
    assert model.head.weight is kept
    with pytest.raises(ConfigError, match="'tail.weight', which the model does not have"):
        retie_parameters(model, [["embed.weight", "tail.weight"]])


def test_tie_on_two_devices_warned(caplog: pytest.LogCaptureFixture) -> None:
    """A map that takes ties apart is logged."""
    groups = find_tied_parameters(Tied())
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(groups, {"": 0})
        check_tied_parameters_on_same_device(groups, {"embed": 0, "body": 1, "head.weight": 0})
        assert not caplog.records
        check_tied_parameters_on_same_device(groups, {"embed": 0, "body": 1, "head": "cpu"})
    assert "'head.weight': 'cpu'" in caplog.text


@pytest.mark.parametrize("tie", [True, False])
def test_ties_in_config(tie: bool) -> None:
    """A configuration says whether weights are tied."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, tie_word_embeddings=tie
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert check_tied_parameters_in_config(model) is tie
    assert check_tied_parameters_in_config(model.model) is False
