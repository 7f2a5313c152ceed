"""Pipeline inference gives what the plain model gives, on any number of processes, and each holds a part of it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from stage_models import Crossing, Tower, fixed, same

from slipstream import PartialState
from slipstream.distributed.process_group import torch_group_is_open
from slipstream.inference.pipeline import build_pipeline, find_pippy_batch_size, pippy_forward, prepare_pippy


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_output_equals_plain_model(ranks, world):
    """With exactly the rows that were given, of batches of any size; every weight is held by one process."""

    def run() -> tuple[list[bool], int, int]:
        plain = fixed(Tower())
        model = prepare_pippy(copy.deepcopy(plain), example_args=(torch.ones(6, 4, dtype=torch.float64),), gather_output=True)
        held = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
        found = []
        for rows in (6, 1, 5, 7, 30):
            given = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
            found.append(same(model(given), plain(given)))
        return found, held, sum(parameter.nbytes for parameter in plain.parameters())

    results = ranks(world).run(run)
    assert all(found == [True] * 5 for found, _, _ in results)
    assert sum(held for _, held, _ in results) == results[0][2]
    assert max(held for _, held, _ in results) < results[0][2] or world == 1


def test_output_on_last_process(ranks):
    """Without gather output the last process has the output and the others none."""
    def run() -> bool:
        plain, given = fixed(Tower()), torch.ones(5, 4).double()
        output = prepare_pippy(copy.deepcopy(plain), example_args=(given,), num_chunks=4)(given)
        return same(output, plain(given)) if PartialState().is_last_process else output is None

    assert ranks(2).run(run) == [True, True]


def test_weights_of_other_stages_are_freed(ranks):
    """Weights of other stages are freed."""
    def run() -> list[str]:
        model = fixed(Tower())
        weights = {name: weakref.ref(parameter) for name, parameter in model.named_parameters() if name.endswith("weight")}
        model = prepare_pippy(model, ["layers.4"], example_args=(torch.ones(4, 4).double(),))
        model(torch.ones(4, 4).double())
        gc.collect()
        return [name for name, weight in weights.items() if weight() is not None]

    first, second = ranks(2).run(run)
    assert first == ["first.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.3.weight"]
    assert second == ["layers.4.weight", "layers.5.weight", "head.weight"]


def test_one_process_plain_model():
    """One process runs the plain model and opens no group."""
    plain = fixed(Tower())
    model = prepare_pippy(copy.deepcopy(plain), example_args=(torch.ones(2, 4, dtype=torch.float64),), gather_output=True)
    given = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    output = model(given)
    assert torch.equal(output, plain(given))
    assert not output.requires_grad
    assert not torch_group_is_open()


def test_nested_inputs_and_outputs(ranks):
    """Inputs that only a late stage uses, outputs of an early one, flags, None, tensors without rows, and ones that are not contiguous."""

    def run() -> list[Any]:
        plain = fixed(Crossing())
        model = prepare_pippy(copy.deepcopy(plain), example_kwargs=Crossing.arguments(6), gather_output=True)
        found = []
        for change in ({}, {"rows": 2}, {"rows": 4, "length": 5}, {"flag": False}, {"rows": 3}):
            given = Crossing.arguments(**{"rows": 6, **change})
            output, expected = model(**given), plain(**given)
            found.append(same(output, expected) and type(output) is type(expected) and list(output) == list(expected))
        return found

    assert ranks(3).run(run) == [[True] * 5] * 3


def test_split_point_list(ranks):
    """A list of split points begins stages there."""
    def run() -> tuple[list[str], list[str], bool]:
        plain = fixed(Tower())
        model = prepare_pippy(copy.deepcopy(plain), ["layers.1", "head"], example_args=(torch.ones(4, 4).double(),), gather_output=True)
        held = [name for name, parameter in model.named_parameters() if not parameter.is_meta and name.endswith("weight")]
        return held, model.hf_split_points, same(model(torch.ones(4, 4).double()), plain(torch.ones(4, 4).double()))

    held = [["first.weight", "layers.0.weight"], [f"layers.{number}.weight" for number in range(1, 6)], ["head.weight"]]
    assert ranks(3).run(run) == [(names, ["layers.1", "head"], True) for names in held]


def test_tied_weight_in_both_stages(ranks):
    """A tied weight of a transformers model is in both stages."""
    def run() -> tuple[bool, list[str], bool]:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
        plain = fixed(GPT2LMHeadModel(config))
        mask = torch.ones(5, 7, dtype=torch.long)
        mask[0, -2:] = 0
        given = {"input_ids": torch.arange(35).view(5, 7), "attention_mask": mask, "use_cache": False}
        model = prepare_pippy(copy.deepcopy(plain), example_kwargs=given, gather_output=True)
        output = model(**given)
        blocks = [name for name, module in model.named_modules() if name.count(".") == 2 and not module.ln_1.weight.is_meta]
        return same(output.logits, plain(**given).logits), blocks, model.lm_head.weight.is_meta

    first, second = ranks(2).outcomes(run)
    assert first.value == (True, ["transformer.h.0", "transformer.h.1"], False), first.traceback
    assert second.value == (True, ["transformer.h.2", "transformer.h.3"], False)
    assert "lm_head.weight = transformer.wte.weight is one weight, used in the stages 0 and 1: each of them holds a copy" in first.output


def test_inference_only_is_said_once(ranks):
    """Inference only is logged once."""
    def run() -> bool:
        model = prepare_pippy(fixed(Tower()).train(), example_args=(torch.ones(4, 4).double(),), gather_output=True)
        outputs = [model(torch.ones(4, 4, requires_grad=True).double()) for _ in range(2)]
        return model.training or any(output.requires_grad for output in outputs)

    first, second = ranks(2).outcomes(run)
    assert first.value is second.value is False
    assert first.output.count("in eval mode now") == 1
    assert first.output.count("has no gradients") == 1
    assert second.output == ""


def test_autocast_of_the_call(ranks):
    """Autocast and inference mode are those of the call."""
    def run() -> list[bool]:
        plain, given = fixed(Tower()).float(), torch.ones(4, 4)
        with torch.inference_mode():
            model = prepare_pippy(copy.deepcopy(plain), example_args=(given,), gather_output=True)
            found = [same(model(given), plain(given))]
        found.append(same(model(given), plain(given)))
        with torch.autocast(PartialState().device.type, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            half = model(given)
            found.append(half.dtype == torch.bfloat16 and same(half, plain(given)))
        return [*found, same(model(given), plain(given))]

    assert ranks(2).run(run) == [[True] * 4] * 2


def test_a_pipeline_outlives_the_process_group(ranks):
    """A pipeline outlives the process group."""
    def run() -> list[bool]:
        plain, given = fixed(Tower()), torch.ones(4, 4).double()
        model = prepare_pippy(copy.deepcopy(plain), example_args=(given,), gather_output=True)
        found = [same(model(given), plain(given))]
        PartialState().destroy_process_group()
        return [*found, same(model(given), plain(given))]

    assert ranks(2).run(run) == [[True, True]] * 2


def test_a_pipeline_of_ones_own_steps(ranks):
    """`build_pipeline` and `pippy_forward` are what `prepare_pippy` is made of, for those who want the steps; the model stays whole."""

    def run() -> tuple[bool, bool, int]:
        model, plain, given = fixed(Tower()), fixed(Tower()), torch.ones(5, 4).double()
        pipeline = build_pipeline(model, ["layers.3"], (given,), {}, 2)
        output = pippy_forward(pipeline.step, 2, False, given)
        last = same(output, plain(given)) if PartialState().is_last_process else output is None
        shared = pippy_forward(pipeline.step, 2, True, given)
        return last, same(shared, plain(given)), sum(parameter.is_meta for parameter in model.parameters())

    assert ranks(2).run(run) == [(True, True, 0)] * 2


def test_pippy_batch_size():
    """The number of rows is that of the first tensor with a dimension."""
    assert find_pippy_batch_size((), {"scale": torch.tensor(2.0), "x": [torch.ones(3, 2)]}) == 3
    assert find_pippy_batch_size((1, "text"), None) is None
