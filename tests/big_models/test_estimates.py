"""Figures of memory: what weights, gradients and states count for, and whether activations are what torch really takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from allocated import most_allocated
from torch import nn

from slipstream.big_models.estimate import tensors
from slipstream.big_models.estimate.formula import list_decoder_tensors, parse_decoder_shape
from slipstream.big_models.estimate.meta_model import ModelInputs, from_entry_point, list_tensors, measure, plain_transformers_paths
from slipstream.big_models.estimate.rank_memory import group_by_name
from slipstream.big_models.estimate.report import EstimateOptions, estimate
from slipstream.big_models.estimate.tensors import WEIGHT_DTYPES, parse_weight_dtype, read_tensors
from slipstream.checkpoint.model_io import save_model
from slipstream.errors import ConfigError
from slipstream.parallel.mesh import MeshSizes

BATCH, LENGTH = 2, 96
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 160, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip


def decoder(kind: str = "llama", **sizes: object) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens(device: str) -> ModelInputs:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=device)
    return ModelInputs((), {"input_ids": ids}, {"labels": ids, "use_cache": False}, {"use_cache": True})


def really_kept(run) -> int:
    """What autograd keeps in a real run, by its own account: every piece of memory once, weights not."""
    memory: dict[int, int] = {}

    def pack(tensor):
        memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model, _ = run()
    for parameter in (*model.parameters(), *model.buffers()):
        memory.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(memory.values())


def stepping(dtype: str):
    """One training step of a small decoder, once that is called; see `allocated.py`."""
    model = decoder(num_hidden_layers=2).train().to(getattr(torch, dtype))
    ids = torch.randint(0, 300, (BATCH, LENGTH))

    def step():
        outputs = model(input_ids=ids, labels=ids, use_cache=False)  # held, as scripts do
        outputs.loss.backward()

    step()
    return step


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_measured_equals_real_run(dtype, autocast):
    """What is measured on shapes is what a real run keeps."""
    model = decoder().train()
    with plain_transformers_paths():
        found = measure(model, tokens("meta"), dtype=dtype, autocast=autocast)
    model.to(torch.float32 if autocast else dtype)
    ids = torch.randint(0, 300, (BATCH, LENGTH))
    results = []

    def run():
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            results.append(model(input_ids=ids, labels=ids, use_cache=False))
        return model, results

    real = really_kept(run)
    logits = results[0].logits.untyped_storage().nbytes()  # an output, which the caller holds
    assert real <= found.kept <= real * 1.03 + logits


def test_peak_equals_allocator():
    """The peak of a step is what the allocator sees."""
    model = decoder(num_hidden_layers=2).train()
    with plain_transformers_paths():
        found = measure(model, tokens("meta"), dtype=torch.float32)
    assert found.peak == pytest.approx(most_allocated("test_estimates:stepping", "float32")["float32"], rel=0.03)


def test_measure_restores_model():
    """Measuring leaves the model as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).eval()
    before = [(id(parameter), parameter.clone()) for parameter in model.parameters()]
    measure(model, ModelInputs((torch.empty(2, 4),)), dtype=torch.bfloat16, checkpointing=True)
    assert [id(parameter) for parameter in model.parameters()] == [key for key, _ in before]
    assert all(torch.equal(parameter, old) for parameter, (_, old) in zip(model.parameters(), before, strict=True))
    assert not any(module.training or "forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("llama", False), ("llama", True), ("qwen3", True), ("qwen2", False), ("mistral", False)]
)
def test_the_formula_says_what_is_measured(tmp_path, kind, checkpointing):
    """The formula says what is measured."""
    decoder(kind, hidden_size=128, num_hidden_layers=2, intermediate_size=512, vocab_size=2000).save_pretrained(tmp_path)
    settings = {"dtypes": tuple(WEIGHT_DTYPES.values()), "batch_size": 3, "sequence_length": 200, "gradient_checkpointing": checkpointing}
    computed = estimate(str(tmp_path), EstimateOptions(**settings), {})
    measured = estimate(str(tmp_path), EstimateOptions(**settings, measure=True), {})
    for entry, other in zip((*computed.inference, *computed.training), (*measured.inference, *measured.training), strict=True):
        assert entry.weights == other.weights
        assert entry.activations == pytest.approx(other.activations, rel=0.05)
    assert [row.cache for row in computed.inference] == pytest.approx([row.cache for row in measured.inference], rel=0.01)
    assert any("by formula" in note for note in computed.notes)
    assert not any("by formula" in note for note in measured.notes)


def test_checkpointing_keeps_block_inputs():
    """Checkpointing keeps inputs of blocks alone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(6)))
    rows = ModelInputs((torch.empty(64, 8),))
    plain = measure(model, rows, dtype=torch.float32)
    again = measure(model, rows, dtype=torch.float32, checkpointing=True)
    assert plain.kept == 64 * 4 * (6 * (8 + 32) + 8) + 4
    assert again.kept == 64 * 4 * (6 * 8 + 8) + 4


def test_experts_are_measured_in_every_type(tmp_path):
    """Experts are measured in every type."""
    sizes = {**SIZES, "num_local_experts": 4, "architectures": ["MixtralForCausalLM"]}
    transformers.MixtralConfig(**sizes).save_pretrained(tmp_path)
    found = estimate(
        str(tmp_path), EstimateOptions((WEIGHT_DTYPES["float32"], WEIGHT_DTYPES["bfloat16"]), batch_size=2, sequence_length=64), {}
    )
    assert not any("could not be measured" in note for note in found.notes)
    full, mixed, pure = (row.activations for row in found.training)
    assert mixed > pure  # it has copies of the weights
    assert pure == pytest.approx(full / 2, rel=0.25)


def test_encoder_decoder_caches():
    """Both caches of an encoder and decoder count."""
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    ids = torch.zeros(BATCH, 10, dtype=torch.long)
    inputs = ModelInputs((), {"input_ids": ids}, None, {"decoder_input_ids": ids, "use_cache": True})
    with plain_transformers_paths():
        found = measure(model, inputs, dtype=torch.float32, training=False)
    assert found.cache == 2 * 2 * 2 * BATCH * 10 * 32 * 4  # layers, caches, keys and values


def test_cache_equals_model_output():
    """The cache is what the model returns."""
    model = decoder()
    with plain_transformers_paths():
        found = measure(model, tokens("meta"), dtype=torch.bfloat16, training=False)
    assert found.cache == 3 * 2 * BATCH * LENGTH * 2 * 16 * 2


def test_optimizer_sizes_are_real(tmp_path):
    """Weights gradients and states are those of a real optimizer."""
    (tmp_path / "net.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 7))\n"
    )
    model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 7))
    makers = {
        "adamw": torch.optim.AdamW,
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "sgd-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
    }
    for name, maker in makers.items():
        optimizer = maker(model.parameters())
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        states = [
            value for state in optimizer.state.values() for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step"
        ]
        found = estimate(f"{tmp_path / 'net.py'}:build", EstimateOptions((parse_weight_dtype("fp32"),), optimizer=name), {}).training[0]
        assert found.weights == found.gradients == sum(parameter.numel() * 4 for parameter in model.parameters())
        assert found.optimizer == pytest.approx(sum(state.numel() * 4 for state in states), abs=16)
        assert found.total == found.weights + found.gradients + found.optimizer + found.activations


def test_eight_bit_state_size():
    """Eight bit states take about two bytes."""
    entry = estimate(f"{__file__}:wide", EstimateOptions((parse_weight_dtype("fp32"),), optimizer="adam8bit"), {}).training[0]
    assert entry.optimizer == pytest.approx(2 * 256 * 256 * (1 + 4 / 256), rel=0.05)


def wide() -> nn.Module:
    return nn.Linear(256, 256)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 10, bias=False))
    model[0].weight.requires_grad_(False)
    return model


def test_frozen_weights_not_trained():
    """Frozen weights have no gradients and no states."""
    found = estimate(f"{__file__}:frozen", EstimateOptions((parse_weight_dtype("fp32"),)), {})
    row = found.training[0]
    assert (row.weights, row.gradients, row.optimizer) == (4 * 11_000, 4 * 1_000, 8 * 1_000)
    assert any("10,000 of 11,000 numbers are frozen" in note for note in found.notes)


def test_tied_weights_count_once_anywhere(tmp_path):
    """Tied weights count once however they are stored."""
    model = decoder(tie_word_embeddings=True)
    expected = sum(parameter.numel() for parameter in model.parameters()) * 4
    model.save_pretrained(tmp_path / "once")
    state = dict(model.state_dict())
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "config.json").write_text((tmp_path / "once" / "config.json").read_text())
    import safetensors.torch

    safetensors.torch.save_file({name: entry.clone() for name, entry in state.items()}, tmp_path / "twice" / "model.safetensors")
    torch.save(state, tmp_path / "tied.bin")
    assert list_tensors(model).size(WEIGHT_DTYPES["float32"]) == pytest.approx(expected, rel=0.001)  # and a few buffers
    for path in (tmp_path / "once", tmp_path / "twice"):
        assert estimate(str(path), EstimateOptions((WEIGHT_DTYPES["float32"],)), {}).inference[0].weights == expected
    assert read_tensors(tmp_path / "tied.bin").size(WEIGHT_DTYPES["float32"]) == expected


def test_shards_file_and_checkpoint_agree(tmp_path, monkeypatch):
    """Shards one file and checkpoints give the same."""
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))
    save_model(model, tmp_path / "one")
    save_model(model, tmp_path / "many", max_shard_size=1000)
    save_model(model, tmp_path / "bin", safe_serialization=False)
    from slipstream import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "state")
    expected = sum(parameter.numel() * parameter.element_size() for parameter in (*model.parameters(), *model.buffers()))
    assert (tmp_path / "state" / tensors.MANIFEST).is_file()
    for name in ("one", "many", "bin", "state"):
        assert read_tensors(tmp_path / name).size(WEIGHT_DTYPES["float32"]) == expected, name


def test_quantized_sizes_without_head(tmp_path):
    """Quantised sizes count linear layers but not the head."""
    decoder().save_pretrained(tmp_path)
    from_files, from_model = read_tensors(tmp_path), list_tensors(decoder())
    linear = {tensor.name for tensor in from_model.tensors if tensor.linear}
    assert {tensor.name for tensor in from_files.tensors if tensor.linear} == linear
    assert "lm_head.weight" not in linear
    assert len(linear) == 3 * 7


def test_packed_weights_as_stored(tmp_path):
    """Packed weights are counted as they are."""
    import safetensors.torch

    safetensors.torch.save_file(
        {"up.qweight": torch.zeros(8, 8, dtype=torch.int32), "up.scales": torch.ones(8)}, tmp_path / "m.safetensors"
    )
    parts = read_tensors(tmp_path / "m.safetensors")
    assert [parts.size(WEIGHT_DTYPES[name]) for name in ("float32", "bfloat16")] == [256 + 32, 256 + 16]
    assert "counted as they are stored" in parts.notes[0]


@pytest.mark.parametrize(
    ("code", "said"),
    [("lambda width: nn.Linear(width, 1)", "build needs width"), ("lambda: nn.Sequential(nn.LazyLinear(4))", "lazy modules: 0.weight")],
)
def test_entry_point_errors(tmp_path, code, said):
    """What an entry point cannot be is reported."""
    (tmp_path / "odd.py").write_text(f"from torch import nn\nbuild = {code}\n")
    with pytest.raises(ConfigError, match=said):
        from_entry_point(f"{tmp_path / 'odd.py'}:build", 3, 50)


def test_entry_point_arguments(tmp_path):
    """An entry point is reported batch and length."""
    (tmp_path / "made.py").write_text(
        "import torch\n\ndef build(batch_size, sequence_length):\n"
        "    return torch.nn.Conv1d(4, 8, 3), (torch.empty(batch_size, 4, sequence_length),)\n"
    )
    model, inputs = from_entry_point(f"{tmp_path / 'made.py'}:build", 3, 50)
    assert inputs is not None
    assert inputs.arguments[0].shape == (3, 4, 50)
    assert next(model.parameters()).is_meta


class Rates(nn.Module):
    """Looks at values while it is made, as models with stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(rows), self.rates[1])


def test_entry_point_reading_values():
    """A model that looks at values while it is made is made all the same."""
    found = estimate(f"{__file__}:Rates", EstimateOptions((WEIGHT_DTYPES["float32"],), batch_size=4), {})
    assert found.parameters == 110
    assert found.training[0].activations is not None


def test_unmeasurable_model_noted(tmp_path):
    """A model that needs values says that it could not be measured."""
    (tmp_path / "made.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x) if x.sum().item() > 0 else x\n"
        "\ndef build():\n    return Net(4, 4)\n"
    )
    found = estimate(f"{tmp_path / 'made.py'}:build", EstimateOptions((WEIGHT_DTYPES["float32"],)), {})
    assert found.inference[0].activations is None
    assert found.inference[0].total == 80
    assert any("could not be measured" in note for note in found.notes)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("mistral", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})],
)
def test_decoder_tensors_equal_built(kind, more):
    """The tensors of known decoders are those that are built."""
    model = decoder(kind, **more)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    shape = parse_decoder_shape(config, 16)
    found, built = list_decoder_tensors(config, shape).tensors, list_tensors(model).tensors
    assert {tensor.name: (tensor.shape, tensor.dtype, tensor.trainable, tensor.linear) for tensor in found} == {
        tensor.name: (tensor.shape, tensor.dtype, tensor.trainable, tensor.linear) for tensor in built
    }


def test_estimate_70b_without_memory(tmp_path):
    """Seventy billion parameters take no memory to estimate."""
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "head_dim": 128, **sizes}
    path = Path(tmp_path, "config.json")
    path.write_text(json.dumps(config))
    found = estimate(str(path), EstimateOptions((WEIGHT_DTYPES["bfloat16"],), training=False), {})
    assert found.parameters == pytest.approx(70.55e9, rel=0.001)
    assert found.inference[0].weights == pytest.approx(141.1e9, rel=0.001)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_sharded_by_name_and_by_policy(tmp_path, kind):
    """The blocks that names show are those of the wrap policy, with the same bytes on every rank."""
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [type(model).__name__]}))
    options = EstimateOptions((WEIGHT_DTYPES["bfloat16"],), inference=False, mesh=MeshSizes(dp_replicate=2, dp_shard=3))
    by_name = estimate(str(tmp_path), options, {})
    by_policy = estimate(str(tmp_path), options._replace(measure=True), {})
    assert by_name.blocks_reason == "numbered layers of model.layers, by their names"
    assert by_policy.blocks_reason.endswith("from the model's _no_split_modules")
    assert by_name.blocks == by_policy.blocks == SIZES["num_hidden_layers"]
    assert by_name.sharded == by_policy.sharded


def test_sharded_leaf_layers():
    """Numbered layers without modules inside, and single ones, are no blocks."""
    names = ["net.0.weight", "net.2.weight", "blocks.0.up.weight", "blocks.0.down.weight"]
    groups = group_by_name(tensors.EstimatedTensors([tensors.EstimatedTensor(name, (4, 4), "F32") for name in names]))
    assert list(groups.blocks) == [""]
    assert groups.reason == "no numbered layers were found by their names"
