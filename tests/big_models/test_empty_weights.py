"""Building models without their weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack

from slipstream.big_models.empty_weights import init_empty_weights, init_on_device
from slipstream.errors import ConfigError

LARGE = 1024
"""A square of so many floats is large enough to be promised only."""


class Tagged(nn.Parameter):
    """A parameter of a class of its own."""


class Rotary(nn.Module):
    """Has buffers that its constructor computes, in all the ways that constructors have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LARGE, LARGE))
        self.register_buffer("frequencies", 1.0 / 10 ** (torch.arange(4) / 4))
        self.register_buffer("mask", torch.tril(torch.ones(LARGE, LARGE)))
        self.register_buffer("zeros", torch.zeros(LARGE, LARGE), persistent=False)
        filled = torch.empty(LARGE, LARGE)
        self.filled_size = filled.numel()
        filled.fill_(2.0)
        self.register_buffer("filled", filled)
        self.plain = torch.full((LARGE, LARGE), 3.0)
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)


def test_parameters_empty_buffers_real() -> None:
    """Parameters are empty and buffers have their values."""
    with init_empty_weights():
        model = Rotary()
    assert model.weight.is_meta
    assert model.bias.is_meta
    assert not model.bias.requires_grad
    assert model.weight.requires_grad
    assert torch.equal(model.frequencies, 1.0 / 10 ** (torch.arange(4) / 4))
    assert torch.equal(model.mask, torch.ones(LARGE, LARGE).tril())
    assert not model.zeros.is_meta
    assert model.zeros.count_nonzero() == 0
    assert torch.equal(model.filled, torch.full((LARGE, LARGE), 2.0))
    assert torch.equal(model.plain, torch.full((LARGE, LARGE), 3.0))


def test_buffers_are_empty_too_if_asked() -> None:
    """Buffers are empty too if asked."""
    with init_empty_weights(include_buffers=True):
        model = nn.Sequential(nn.BatchNorm1d(3), Rotary())
        model.register_buffer("late", torch.from_numpy(torch.ones(2, device="cpu").numpy()))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_no_memory_is_asked_for() -> None:
    """A petabyte: no machine would even promise it."""
    with init_empty_weights():
        model = nn.Linear(2**24, 2**24)
        drawn = nn.ParameterList([nn.Parameter(torch.randn(2**24, 2**24))])
    assert model.weight.is_meta
    assert drawn[0].is_meta


def test_class_attributes_and_ties() -> None:
    """Class attributes and ties are kept."""
    weight = Tagged(torch.ones(2, 2), requires_grad=False)
    weight.tag = "mine"
    with init_empty_weights():
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.weight = weight
        second.weight = weight
        third = nn.Embedding(4, 2)
        fourth = nn.Linear(2, 4, bias=False)
        fourth.weight = third.weight
        lazy = nn.LazyLinear(3)
    assert first.weight is second.weight
    assert fourth.weight is third.weight
    assert (type(first.weight), first.weight.tag, first.weight.requires_grad) == (Tagged, "mine", False)
    assert first.weight.is_meta
    assert not weight.is_meta
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert lazy.weight.is_meta


def test_inner_context_wins() -> None:
    """The inner context wins and the outer continues."""
    with init_empty_weights(include_buffers=True):
        with init_on_device("cpu"):
            inside = nn.Sequential(nn.Linear(LARGE, LARGE), nn.BatchNorm1d(2))
        after = nn.BatchNorm1d(2)
        with init_empty_weights():
            third = nn.BatchNorm1d(2)
    assert not any(tensor.is_meta for tensor in [*inside.parameters(), *inside.buffers()])
    assert inside[0].weight.std() > 0
    assert after.running_mean.is_meta
    assert (third.weight.is_meta, third.running_mean.is_meta) == (True, False)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_an_error_leaves_nothing_behind(include_buffers: bool) -> None:
    """An error leaves nothing behind."""
    with pytest.raises(ZeroDivisionError), init_empty_weights(include_buffers):
        _ = 1 / 0
    assert not nn.Linear(2, 2).weight.is_meta
    assert not torch_module._global_parameter_registration_hooks
    assert not torch_module._global_buffer_registration_hooks
    assert _get_current_function_mode_stack() == []


def test_other_threads_build_as_always() -> None:
    """Other threads build as always."""
    built: list[nn.Module] = []

    def build() -> None:
        with init_on_device("cpu"):
            built.append(nn.BatchNorm1d(2))
        built.append(nn.Sequential(nn.Linear(LARGE, LARGE), nn.BatchNorm1d(2)))

    with init_empty_weights(include_buffers=True):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        mine = nn.Linear(2, 2)
    assert mine.weight.is_meta
    assert not any(tensor.is_meta for model in built for tensor in [*model.parameters(), *model.buffers()])


def test_transformers_model_tied_and_empty() -> None:
    """A model of transformers has its weights tied and empty."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=5000, tie_word_embeddings=True
    )
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = transformers.AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {
        name: buffer.tolist() for name, buffer in real.named_buffers()
    }


def test_unknown_device_named() -> None:
    """A device that is none is named."""
    with pytest.raises(ConfigError, match="'gpu7'"), init_on_device("gpu7"):
        nn.Linear(1, 1)
