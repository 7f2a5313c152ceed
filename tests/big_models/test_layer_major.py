"""Layer-major running: the results of a plain loop, with every block read once for all calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import dispatch_model, layer_major
from slipstream.big_models.layer_major import find_weight_stores
from slipstream.big_models.weight_store.store import WeightBlock
from slipstream.errors import ConfigError, StateError


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


class Stack(torch.nn.Module):
    def __init__(self, width: int = 8, depth: int = 5) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MAP: dict[str, Any] = {"embed": "cpu", "head": "cpu"} | {f"blocks.{number}": "disk" for number in range(5)}


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    torch.manual_seed(0)
    model = Stack().eval()
    dispatch_model(model, MAP, offload_dir=tmp_path)
    return model


@pytest.fixture
def plain() -> Stack:
    torch.manual_seed(0)
    return Stack().eval()


def repeated(model: Stack, x: torch.Tensor, times: int = 3) -> torch.Tensor:
    """As generation does: each forward needs the one before."""
    for _ in range(times):
        x = model(x).tanh()
    return x


def entered(model: Stack) -> list[int]:
    """From now on, the blocks in the order in which they are entered; one that is entered again at once counts once."""
    (store,) = find_weight_stores(model)
    seen: list[int] = []
    enter = store.enter

    def watched(block: WeightBlock) -> Sequence[torch.Tensor]:
        seen.extend([block.number] if seen[-1:] != [block.number] else [])
        return enter(block)

    store.enter = watched  # type: ignore[method-assign]
    return seen


@torch.inference_mode()
def test_results_equal_loop(stack: Stack, plain: Stack) -> None:
    """Results are those of a loop and blocks are entered once for all."""
    inputs = [torch.randn(2 + number % 3, 4) for number in range(6)]
    seen = entered(stack)
    found = layer_major(stack, lambda x: repeated(stack, x), inputs)
    assert all(torch.equal(entry, repeated(plain, x)) for entry, x in zip(found, inputs, strict=True))
    assert seen == [0, 1, 2, 3, 4] * 3


@torch.inference_mode()
def test_different_lengths_join(stack: Stack, plain: Stack) -> None:
    """Calls of different lengths join the next pass."""
    inputs = [(torch.randn(1, 4), times) for times in (1, 4, 2, 3, 1, 1)]
    seen = entered(stack)
    found = layer_major(stack, lambda given: repeated(stack, *given), inputs, lanes=2)
    assert all(torch.equal(entry, repeated(plain, *given)) for entry, given in zip(found, inputs, strict=True))
    assert len(seen) <= 5 * 8  # twelve passes in a loop


@torch.inference_mode()
def test_modes_of_caller(stack: Stack) -> None:
    """Modes of the caller hold in lanes."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer_major(stack, lambda x: (stack(x).dtype, torch.is_inference_mode_enabled()), [torch.ones(1, 4)] * 2)
    assert found == [(torch.bfloat16, True)] * 2
    with torch.inference_mode(False), torch.no_grad():
        assert layer_major(stack, lambda x: torch.is_grad_enabled(), [1, 2]) == [False, False]
    variable = ContextVar("variable", default=0)
    variable.set(3)
    assert layer_major(stack, lambda x: variable.get(), [1, 2]) == [3, 3]


@torch.no_grad()
def test_random_numbers_independent_of_lanes(stack: Stack) -> None:
    """Random numbers do not depend on how lanes take turns."""
    def sampled(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = stack(x) + torch.rand(1, 4)
        return x

    found = []
    for lanes in (1, 2, 5):
        torch.manual_seed(3)
        found.append(layer_major(stack, sampled, [torch.ones(1, 4)] * 5, lanes=lanes))
        found[-1].append(torch.rand(1))  # and the caller's own go on from one place
    assert all(torch.equal(entry, other) for entry, other in zip(found[0], found[1], strict=True))
    assert all(torch.equal(entry, other) for entry, other in zip(found[0], found[2], strict=True))
    assert not torch.equal(found[0][0], found[0][1])


@torch.no_grad()
def test_error_names_the_call(stack: Stack) -> None:
    """An error in one call ends all and says which."""
    def call(number: int) -> None:
        stack(torch.ones(1, 4))
        if number == 2:
            raise ValueError("no such prompt")
        stack(torch.ones(1, 4))

    before = threading.active_count()
    with pytest.raises(ValueError, match="no such prompt") as raised:
        layer_major(stack, call, range(4))
    assert "input 2" in getattr(raised.value, "__notes__", ["input 2"])[0]
    assert threading.active_count() == before
    assert stack.blocks[0].inner.weight.is_meta
    assert layer_major(stack, lambda x: stack(x).shape, [torch.ones(1, 4)]) == [torch.Size([1, 4])]  # and it can be called again


def test_plain_loop_without_offload(plain: Stack) -> None:
    """Without offloaded blocks it is a loop."""
    assert layer_major(plain, lambda x: x + 1, [1, 2]) == [2, 3]
    assert layer_major(plain, lambda x: x, []) == []


def test_wrong_use_says_what_to_do(stack: Stack) -> None:
    """Wrong use says what to do."""
    with pytest.raises(ConfigError, match="lanes=0"):
        layer_major(stack, lambda x: x, [1], lanes=0)
    with pytest.raises(StateError, match="another layer_major"):
        layer_major(stack, lambda x: layer_major(stack, lambda y: y, [x]), [1])


@torch.inference_mode()
def test_generation_of_a_language_model(tmp_path: Path) -> None:
    """Generation of a language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    prompts = [torch.randint(1, 50, (2, 3 + number)) for number in range(3)]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = [model.generate(prompt, attention_mask=torch.ones_like(prompt), **options) for prompt in prompts]
    layers = {f"model.layers.{number}": "disk" for number in range(3)}
    dispatch_model(
        model,
        {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **layers},
        offload_dir=tmp_path,
    )
    found = layer_major(model, lambda prompt: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options), prompts)
    assert all(torch.equal(entry, other) for entry, other in zip(found, wanted, strict=True))
