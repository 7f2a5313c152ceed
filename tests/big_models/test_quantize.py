"""Weights of 8 and 4 bits: which layers get them, what they compute, how much memory the conversion takes, and what is refused."""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from allocated import most_allocated
from torch import nn

from slipstream.big_models import quantization_config
from slipstream.big_models.dispatch import dispatch_model
from slipstream.big_models.empty_weights import init_empty_weights
from slipstream.big_models.quantization_config import BnbQuantizationConfig, TorchaoQuantizationConfig, has_4bit_bnb_layers
from slipstream.big_models.quantize import (
    get_keys_to_not_convert,
    get_parameter_device,
    get_quantized_model_device_map,
    load_and_quantize_model,
    quantize_and_offload_8bit,
    replace_with_bnb_layers,
)
from slipstream.checkpoint.model_io import save_model
from slipstream.devices.packages import compare_versions, version_of
from slipstream.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.skipif(
    not compare_versions(version_of("torchao") or "0", ">=", "0.18"), reason="torchao is before 0.18, which torch 2.8 cannot run"
)

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
BITS = {
    "torchao 8": (TorchaoQuantizationConfig(8), 1 / 254),
    "torchao 8 groups": (TorchaoQuantizationConfig(8, group_size=64), 1 / 254),
    "torchao 4": (TorchaoQuantizationConfig(4, group_size=32), 1 / 30),
    "bnb 8": (BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32"), 1 / 254),
    "bnb fp4": (BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32"), 1 / 6),
    "bnb nf4": (BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32"), 0.16),
    "bnb nf4 double": (
        BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="fp32"),
        0.17,
    ),
}
"""Configs, and the most that a weight may be off, as a share of the range of all weights: half the distance of two steps."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 7))


def applied(layer: nn.Module, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight that a layer really computes with: its answers to unit vectors."""
    bias = layer.bias
    answers = layer(torch.eye(columns, dtype=dtype))
    return (answers - (bias if bias is not None else 0)).t()


@pytest.mark.parametrize("name", list(BITS))
def test_quantization_error_bound(name):
    """A converted layer computes with weights that are at most half a step off."""
    config, half = BITS[name]
    plain = net()
    weight, bias = plain[0].weight.detach().clone(), plain[0].bias.detach().clone()
    model = load_and_quantize_model(plain, config, device_map={"": "cpu"})
    inputs = torch.randn(5, 128)
    with torch.no_grad():
        used = applied(model[0], 128)
        width = 2 * weight.abs().max()
        assert (used - weight).abs().max() <= half * width * 1.1
        assert not torch.equal(used, weight)
        reference = nn.functional.linear(inputs, used, bias)
        # products of 8 bits by bitsandbytes round their inputs to 8 bits too
        off = inputs.abs().max() / 127 * weight.abs().sum(1).max() if name == "bnb 8" else 1e-4
        assert (model[0](inputs) - reference).abs().max() <= off


@pytest.mark.parametrize("name", ["torchao 8", "torchao 4", "bnb 8", "bnb nf4"])
def test_head_and_ties_skipped(name):
    """Head and tied modules stay as they are."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    before = model.lm_head.weight.detach().clone()
    assert get_keys_to_not_convert(model) == ["lm_head", "model.embed_tokens"]
    model = load_and_quantize_model(model, BITS[name][0])
    assert torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_find_heads():
    """Heads are found with and without a name."""
    assert get_keys_to_not_convert(net()) == ["4"]
    llama = transformers.LlamaConfig(**SIZES)
    assert get_keys_to_not_convert(transformers.LlamaModel(llama)) == []
    bert = transformers.BertConfig(**SIZES, num_labels=3)
    assert get_keys_to_not_convert(transformers.BertForSequenceClassification(bert)) == ["classifier"]


@pytest.mark.parametrize("form", ["folder", "file", "index", "bin"])
def test_empty_model_with_weights(tmp_path, form):
    """An empty model and a place of weights give the same as a full one."""
    full = net().eval()
    save_model(full, tmp_path, max_shard_size=20_000 if form == "index" else "1GB", safe_serialization=form != "bin")
    place = {"file": tmp_path / "model.safetensors", "index": tmp_path / "model.safetensors.index.json"}.get(form, tmp_path)
    with init_empty_weights():
        empty = net().eval()
    loaded = load_and_quantize_model(empty, TorchaoQuantizationConfig(8), weights_location=place)
    expected = load_and_quantize_model(full, TorchaoQuantizationConfig(8))
    inputs = torch.randn(3, 128)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), expected(inputs))


def test_types_of_the_rest():
    """Types of the rest."""
    config = TorchaoQuantizationConfig(8, torch_dtype="bf16", keep_in_fp32_modules=["1"], skip_modules=["2"])
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.BatchNorm1d(32))
    model = load_and_quantize_model(model, config)
    assert type(model[0].weight) is not nn.Parameter
    assert model[0].bias.dtype is model[2].weight.dtype is torch.bfloat16
    assert model[1].weight.dtype is torch.float32
    assert (model[3].running_mean.dtype, model[3].num_batches_tracked.dtype) == (torch.bfloat16, torch.int64)


SIDE, COUNT = 256, 24
LAYERS = {"torchao 8": (8, 4), "torchao 4": (4, 6), "bnb 8": (8, 4), "bnb nf4": (4, 4)}
"""Bits of a weight, and how many layers in 32 bits the conversion of one may take: itself, and what is made of it."""


def loading(name: str) -> Callable[[], object]:
    """Loads and quantises a model of many layers, once that is called; see `allocated.py`."""
    folder = tempfile.mkdtemp()
    save_model(nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(COUNT))), folder)
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(COUNT)))
    config = BITS[name][0]
    load_and_quantize_model(net(), config)  # so that libraries are imported and have what they allocate once
    return lambda: (load_and_quantize_model(model, config, weights_location=folder), shutil.rmtree(folder))


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    return most_allocated("test_quantize:loading", *LAYERS)


@pytest.mark.parametrize(("name", "bits", "layers"), [(name, *numbers) for name, numbers in LAYERS.items()])
def test_quantization_peak_memory(peaks, name, bits, layers):
    """One layer in full, with what its conversion makes of it: up to six copies in 32 bits."""
    entry = SIDE * SIDE * 4
    quantised = (COUNT - 1) * entry * bits // 32
    assert quantised < peaks[name] < quantised * 1.25 + layers * entry < COUNT * entry


def test_shared_layer_converted_once():
    """A shared layer is converted once and stays shared."""
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.Sequential(layer), nn.Linear(64, 4))
    made = load_and_quantize_model(model, BITS["bnb nf4"][0])
    assert made[0] is made[1][0]
    assert has_4bit_bnb_layers(made)


def test_unfit_layers_named(caplog):
    """Layers that do not fit stay and are named."""
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 30), nn.Linear(30, 30), nn.Linear(30, 2))
    load_and_quantize_model(model, TorchaoQuantizationConfig(4, group_size=32))
    assert [type(layer.weight) is nn.Parameter for layer in model] == [False, True, True, True]
    assert "2 of 3 linear layers stay as they are, such as 1: its 30 rows are not a multiple of 16" in caplog.text


def test_hooks_of_users_stay():
    """Hooks of users stay."""
    model, calls = net(), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    load_and_quantize_model(model, BITS["bnb nf4"][0])(torch.zeros(1, 128))
    assert calls == [1]


def test_plans_count_quantized_bits():
    """Plans count the bits that weights will have."""
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False), nn.Linear(100, 1, bias=False))
    room = {"cpu": 25_000, "disk": 10**9}
    small = get_quantized_model_device_map(model, TorchaoQuantizationConfig(8), "sequential", room)
    assert set(small.values()) == {"cpu"}
    assert get_quantized_model_device_map(model, TorchaoQuantizationConfig(8)) == {"": "cpu"}
    tight = get_quantized_model_device_map(model, TorchaoQuantizationConfig(8), "auto", {"cpu": 15_000, "disk": 10**9})
    assert "disk" in tight.values()
    with pytest.raises(ConfigError, match="quantised weights are not offloaded"):
        load_and_quantize_model(model, TorchaoQuantizationConfig(8), device_map=tight)


def test_dtype_change_warning(caplog):
    """A type that nobody asked for is logged with the way back."""
    model = load_and_quantize_model(net(), BnbQuantizationConfig(load_in_8bit=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.int8, torch.float16}
    assert "were float32 and are float16 now" in caplog.text
    caplog.clear()
    model = load_and_quantize_model(net(), BnbQuantizationConfig(load_in_8bit=True, torch_dtype="float32"))
    assert model(torch.ones(2, model[0].in_features)).dtype is torch.float32
    assert not caplog.text


def test_what_has_no_effect_is_said(caplog, tmp_path):
    """What has no effect is logged."""
    model = load_and_quantize_model(net(), TorchaoQuantizationConfig(8), max_memory={"cpu": "1GB"}, offload_folder=tmp_path)
    assert model.hf_device_map == {"": "cpu"}
    assert "max_memory has no effect" in caplog.text
    assert "offload_folder has no effect" in caplog.text


def test_layers_are_replaced_alone():
    """Layers are replaced alone."""
    with init_empty_weights():
        empty = net()
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert type(replace_with_bnb_layers(empty, config)[0]).__name__ == "Linear8bitLt"
    assert get_parameter_device(empty).type == "meta"
    full = replace_with_bnb_layers(net(), config, modules_to_not_convert=["2"])
    assert [type(layer).__name__ for layer in full][::2] == ["Linear8bitLt", "Linear", "Linear8bitLt"]
    assert full[0].weight.dtype is torch.int8
    assert not has_4bit_bnb_layers(full)


def test_offload_8bit_weight(tmp_path):
    """One weight is offloaded in 8 bits."""
    from slipstream.big_models.weight_store.offload_folder import load_offloaded_weight

    model = net()
    weight = model[0].weight.detach().clone()
    index: dict[str, dict[str, object]] = {}
    quantize_and_offload_8bit(model, weight, "0.weight", torch.float16, tmp_path, index, None)
    assert model[0].weight.is_meta
    data, scale = (load_offloaded_weight(tmp_path / f"{name}.dat", index[name]) for name in ("0.weight", "0.SCB"))
    assert data.dtype is torch.int8
    assert (data * scale[:, None] / 127 - weight).abs().max() <= weight.abs().max() * (1 / 254 + 2**-11)  # half a step, after 16 bits


CONFIGS = {
    "neither": (lambda: BnbQuantizationConfig(), "neither of load_in_8bit and load_in_4bit"),
    "both": (lambda: BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True), "both of load_in_8bit"),
    "flag": (lambda: BnbQuantizationConfig(load_in_8bit=1), "load_in_8bit=1"),
    "threshold": (lambda: BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold="6"), "llm_int8_threshold='6'"),
    "kind": (lambda: BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="int4"), "Write 'fp4' or 'nf4'"),
    "compute": (lambda: BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp8"), "bnb_4bit_compute_dtype='fp8'"),
    "dtype": (lambda: TorchaoQuantizationConfig(torch_dtype=torch.int8), "torch_dtype=torch.int8"),
    "names": (lambda: TorchaoQuantizationConfig(skip_modules="head"), "skip_modules='head' is not a list"),
    "bits": (lambda: TorchaoQuantizationConfig(weight_bits=5), "weight_bits=5"),
    "group": (lambda: TorchaoQuantizationConfig(weight_bits=4, group_size=48), "group_size=48"),
    "no group": (lambda: TorchaoQuantizationConfig(weight_bits=8, group_size=0), "group_size=0"),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_config_errors(name):
    """Configs that cannot be say which field."""
    make, said = CONFIGS[name]
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        make()


def test_refused_before_changes(tmp_path):
    """What cannot be quantised is refused before anything changes."""
    config = TorchaoQuantizationConfig(8)
    with init_empty_weights():
        empty = net()
    cases = [
        (lambda: load_and_quantize_model(empty, config), "have no values. Give weights_location"),
        (lambda: load_and_quantize_model(nn.Linear(4, 4), config), "single linear layer"),
        (lambda: load_and_quantize_model("model", config), "was given a str"),
        (lambda: load_and_quantize_model(net(), {"load_in_8bit": True}), "is a dict. Pass a BnbQuantizationConfig"),
        (lambda: load_and_quantize_model(net(), TorchaoQuantizationConfig(8, skip_modules=["haed"])), "names 'haed'"),
        (lambda: load_and_quantize_model(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), config), "There is no layer to quantise"),
        (lambda: load_and_quantize_model(load_and_quantize_model(net(), config), config), "quantised already"),
        (lambda: load_and_quantize_model(net(), config, device_map={"": "disk"}), "not offloaded"),
        (lambda: load_and_quantize_model(net(), config, device_map="best"), "device_map='best'"),
        (lambda: load_and_quantize_model(net(), config, device_map={"0": "cpu"}), "2"),
        (lambda: get_parameter_device(nn.ReLU()), "has no parameters"),
    ]
    for call, said in cases:
        with pytest.raises(ConfigError) as caught:
            call()
        assert said in str(caught.value)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_no_offload_of_quantized():
    """Quantised weights do not go to the disk and weights that are offloaded are not quantised."""
    with pytest.raises(ConfigError, match=r"0\.weight is a Int8Tensor: quantised weights, .* cannot go to the disk"):
        dispatch_model(load_and_quantize_model(net(), TorchaoQuantizationConfig(8)), {"": "disk"})
    with pytest.raises(ConfigError, match=r"is dispatched, .*dispatch_model\(model, {\"\": \"cpu\"}\)"):
        load_and_quantize_model(dispatch_model(net(), {"": "disk"}), TorchaoQuantizationConfig(8))


def test_missing_weights_are_named(tmp_path, caplog):
    """Missing weights are named."""
    save_model({"0.weight": torch.zeros(64, 128)}, tmp_path)
    with init_empty_weights():
        empty = net()
    with pytest.raises(CheckpointError, match=r"without values.*\s+5 are missing in the file: 0\.bias, 2\.weight"):
        load_and_quantize_model(empty, TorchaoQuantizationConfig(8), weights_location=tmp_path)


@pytest.mark.parametrize(("library", "config"), [("bitsandbytes", "bnb 8"), ("torchao.quantization", "torchao 8")])
def test_missing_library_named(monkeypatch, library, config):
    """A library that is not there is named with its extra."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[(bitsandbytes|quantize)\]'"):
        load_and_quantize_model(net(), BITS[config][0])


def test_no_warnings_by_default():
    """Nothing is warned of when all is well."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_and_quantize_model(net(), TorchaoQuantizationConfig(4, group_size=32))


def test_older_torchao_is_named(monkeypatch):
    """An older torchao is an error with what is installed and what to install, and no failure inside of it."""
    monkeypatch.setattr(quantization_config, "version_of", lambda name: {"torchao": "0.13.0", "torch": "2.8.0"}[name])
    with pytest.raises(ConfigError, match=r"torchao 0\.18 or later; installed are torchao 0\.13\.0 and torch 2\.8\.0\. pip install"):
        load_and_quantize_model(net(), TorchaoQuantizationConfig(8))
