"""Models of transformers and adapters of peft under every kind of device map: what they compute, generate and save is what plain models do.

Models are tiny and made from configs. On a machine without accelerators the maps have "cpu" and "disk".
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map, load_checkpoint_and_dispatch
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

pytestmark = pytest.mark.timeout(300)
TOKENS = torch.tensor([[5, 9, 2, 7], [3, 1, 4, 8]])


def llama() -> LlamaForCausalLM:
    """Untied, with rotary buffers that are not saved."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    """The head is the embedding, and layers are Conv1D."""
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def t5() -> T5ForConditionalGeneration:
    """An encoder and a decoder that share their embedding."""
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))


def bert() -> BertForSequenceClassification:
    """A model that classifies."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=32, num_labels=3))


MODELS = {"llama": llama, "gpt2": gpt2, "t5": t5, "bert": bert}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A plain model, and the folder where it is saved: in one file, in shards, and as torch writes it."""
    set_seed(0)
    model = MODELS[request.param]().eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    model.save_pretrained(folder / "torch")
    weights = safetensors.torch.load_file(folder / "torch/model.safetensors")
    torch.save(weights, folder / "torch/pytorch_model.bin")
    (folder / "torch/model.safetensors").unlink()
    return model, folder


def load(plain: Any, folder: Path, **options: Any) -> Any:
    """Load quietly: a map that puts something on the disk is warned of by transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return type(plain).from_pretrained(folder, **options).eval()


def save(model: Any, folder: Path, **options: Any) -> None:
    """Save quietly: transformers warns of the memory that an offloaded model may need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)


def logits(model: Any) -> torch.Tensor:
    further = {"decoder_input_ids": TOKENS[:, :2]} if model.config.is_encoder_decoder else {}
    found: torch.Tensor = model(input_ids=TOKENS, **further).logits
    return found


def outputs(model: Any) -> list[torch.Tensor]:
    """Return logits and, from a model that generates, greedy and sampled tokens."""
    with torch.no_grad():
        found = [logits(model)]
        if isinstance(model, BertForSequenceClassification):
            return found
        found.append(model.generate(TOKENS, max_new_tokens=6, do_sample=False))
        set_seed(1)
        found.append(model.generate(TOKENS, max_new_tokens=6, do_sample=True))
        found.append(model.generate(TOKENS, max_new_tokens=4, num_beams=3))
        return found


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def total_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def on_disk(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


# -- loading ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["whole", "shards", "torch"])
@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_strategies(saved, strategy, form):
    """By the name of a strategy, everything that fits is in memory."""
    plain, folder = saved
    model = load(plain, folder / form, device_map=strategy)
    assert not on_disk(model)
    assert_equal(outputs(model), outputs(plain))


@pytest.mark.parametrize("form", ["whole", "shards", "torch"])
@pytest.mark.parametrize("strategy", ["auto", "sequential"])
def test_little_memory(saved, strategy, form, tmp_path):
    """With a budget, what does not fit is on the disk: in the files of the checkpoint, or in the offload folder."""
    plain, folder = saved
    budget = {"cpu": total_bytes(plain) // 2}
    model = load(plain, folder / form, device_map=strategy, max_memory=budget, offload_folder=tmp_path / "offload")
    assert on_disk(model)
    assert "disk" in model.hf_device_map.values()
    assert_equal(outputs(model), outputs(plain))


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_everything_on_disk(saved, offload_buffers, tmp_path):
    """A whole model on the disk."""
    plain, folder = saved
    model = load(plain, folder / "whole", device_map={"": "disk"}, offload_folder=tmp_path, offload_buffers=offload_buffers)
    remaining = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    assert not remaining
    assert_equal(outputs(model), outputs(plain))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu", torch.device("cpu")], ids=str)
def test_one_device(saved, device_map):
    """One device needs no hooks."""
    plain, folder = saved
    model = load(plain, folder / "whole", device_map=device_map)
    assert not on_disk(model)
    assert_equal(outputs(model), outputs(plain))


EXPLICIT = {
    "llama": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
              "model.layers.3": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"},
    "gpt2": {"transformer.wte": "cpu", "transformer.wpe": "disk", "transformer.h.0": "disk", "transformer.h.1": "cpu",
             "transformer.h.2": "disk", "transformer.ln_f": "cpu", "lm_head": "cpu"},
    "t5": {"shared": "cpu", "encoder": "disk", "decoder.embed_tokens": "cpu", "decoder.block.0": "disk", "decoder.block.1": "cpu",
           "decoder.final_layer_norm": "disk", "lm_head": "cpu"},
    "bert": {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "disk", "classifier": "cpu"},
}  # fmt: skip


def explicit_map(model: Any) -> dict[str, str]:
    return next(EXPLICIT[name] for name, make in MODELS.items() if make.__annotations__["return"] == type(model).__name__)


@pytest.mark.parametrize("form", ["whole", "shards", "torch"])
def test_explicit_map(saved, form, tmp_path):
    """A map by hand, with devices that alternate."""
    plain, folder = saved
    model = load(plain, folder / form, device_map=explicit_map(plain), offload_folder=tmp_path)
    assert model.hf_device_map == explicit_map(plain)
    assert on_disk(model)
    assert_equal(outputs(model), outputs(plain))


def test_another_dtype(saved, tmp_path):
    """Weights on the disk in bfloat16."""
    plain, folder = saved
    expected = load(plain, folder / "whole", dtype=torch.bfloat16)
    model = load(plain, folder / "whole", dtype=torch.bfloat16, device_map=explicit_map(plain), offload_folder=tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {parameter.dtype for parameter in expected.parameters()}
    assert_equal(outputs(model), outputs(expected))


def test_accelerates_own_loading(saved, tmp_path):
    """The functions of accelerate on a skeleton of transformers."""
    plain, folder = saved
    with torch.device("meta"):
        skeleton = type(plain)(plain.config)
    skeleton.tie_weights()
    whole = list(plain._no_split_modules or ())
    options = {"max_memory": {"cpu": total_bytes(plain) // 2}, "no_split_module_classes": whole, "offload_folder": tmp_path}
    with torch.device("cpu"):
        buffers = {name: value for name, value in plain.named_buffers() if name not in plain.state_dict()}
    for name, value in buffers.items():
        above, _, key = name.rpartition(".")
        skeleton.get_submodule(above).register_buffer(key, value.clone(), persistent=False)
    model = load_checkpoint_and_dispatch(skeleton, folder / "whole", device_map="auto", **options).eval()
    assert on_disk(model)
    model.generation_config = getattr(plain, "generation_config", None)
    assert_equal(outputs(model), outputs(plain))


# -- what is in memory already --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offload_a_model_in_memory(saved, way, tmp_path):
    """A loaded model is offloaded, and with its hooks removed it is what it was."""
    plain, folder = saved
    model = load(plain, folder / "whole")
    if way == "cpu_offload":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif way == "disk_offload":
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        plan = infer_auto_device_map(model, {"cpu": total_bytes(plain) // 2}, no_split_module_classes=list(model._no_split_modules or ()))
        dispatch_model(model, plan, offload_dir=tmp_path)
    assert on_disk(model)
    assert_equal(outputs(model), outputs(plain))
    remove_hook_from_submodules(model)
    assert not on_disk(model)
    assert_equal(outputs(model), outputs(plain))


# -- saving -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_size", ["20KB", "5GB"])
def test_save_pretrained(saved, max_shard_size, tmp_path):
    """An offloaded model is saved whole: the same weights as the plain model has."""
    plain, folder = saved
    model = load(plain, folder / "whole", device_map=explicit_map(plain), offload_folder=tmp_path / "offload")
    save(model, tmp_path / "saved", max_shard_size=max_shard_size)
    again = load(plain, tmp_path / "saved")
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert_equal(outputs(model), outputs(plain))


# -- what transformers, peft and diffusers look for -----------------------------------------------------------------------------


def test_hooks_as_clients_find_them(saved, tmp_path):
    """Every layer with weights has a hook; an offloaded one leads to the file of its weights."""
    plain, folder = saved
    model = load(plain, folder / "whole", device_map=explicit_map(plain), offload_folder=tmp_path)
    for name, module in model.named_modules():
        if name and next(module.parameters(recurse=False), None) is not None:
            hook = module._hf_hook
            assert isinstance(hook, AlignDevicesHook), name
            assert torch.device(hook.execution_device) == torch.device("cpu"), name
            if hook.offload:
                assert isinstance(hook.weights_map, PrefixedDataset)
                assert isinstance(hook.weights_map.dataset, OffloadedWeightsLoader)
                key = next(key for key, _ in module.named_parameters(recurse=False))
                entry = hook.weights_map.dataset.index.get(f"{name}.{key}")
                assert entry is None or Path(entry["safetensors_file"]).is_file()
                assert dict(hook.weights_map.dataset)


def test_embeddings_resized():
    """An embedding of a dispatched model can grow: transformers moves the hook to the new one."""
    set_seed(0)
    plain = llama().eval()
    model = dispatch_model(llama(), {"": "cpu"}, force_hooks=True).eval()
    model.load_state_dict(plain.state_dict())
    for one in (plain, model):
        set_seed(2)
        one.resize_token_embeddings(70, mean_resizing=False)
    assert_equal([model(TOKENS).logits], [plain(TOKENS).logits])


# -- peft ---------------------------------------------------------------------------------------------------------------------

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"], "t5": ["q", "wo"], "bert": ["query", "value"]}


def adapt(model: Any) -> Any:
    """Return a model with a LoRA adapter whose both matrices have values."""
    name = next(name for name, make in MODELS.items() if make.__annotations__["return"] == type(model).__name__)
    set_seed(3)
    config = LoraConfig(r=4, target_modules=TARGETS[name], init_lora_weights=False, fan_in_fan_out=name == "gpt2")
    return get_peft_model(model, config).eval()


@pytest.fixture(params=["adapter_in_memory", "all_within_budget"])
def adapted(
    request: pytest.FixtureRequest, saved: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, Path]:
    """A plain model with an adapter, and an offloaded one with the same adapter.

    The adapter is in memory beside layers on the disk, or peft loads it onto an offloaded model, and offloads it with its layers.
    """
    monkeypatch.chdir(tmp_path)  # peft writes weights that it converts below the working folder
    plain, folder = saved
    expected = adapt(load(plain, folder / "whole"))
    expected.save_pretrained(tmp_path / "adapter")
    if request.param == "adapter_in_memory":
        model = adapt(load(plain, folder / "whole"))
        layers = [name for name, _ in model.named_modules() if name.endswith(".base_layer")]
        dispatch_model(model, {"": "cpu", **dict.fromkeys(layers, "disk")}, offload_dir=tmp_path / "offload")
        return expected, model, tmp_path
    model = load(plain, folder / "whole", device_map=explicit_map(plain), offload_folder=tmp_path / "first")
    options = {"max_memory": {"cpu": total_bytes(plain) // 2}, "offload_folder": str(tmp_path / "offload"), "device_map": "auto"}
    return expected, load_adapter(model, tmp_path / "adapter", **options), tmp_path


def load_adapter(model: Any, folder: Path, **options: Any) -> Any:
    """Load quietly: torch warns of the adapter that peft makes on the meta device before it fills it in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder, **options).eval()


def assert_same_files(one: Path, other: Path) -> None:
    found, expected = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-6), name


def test_adapter_computes(adapted):
    """The adapter beside offloaded weights."""
    expected, model, _ = adapted
    assert on_disk(model)
    assert_equal([logits(model)], [logits(expected)])


def test_adapter_saved_apart(adapted):
    """The adapter alone is saved."""
    expected, model, folder = adapted
    save(model, folder / "found")
    assert_same_files(folder / "found/adapter_model.safetensors", folder / "adapter/adapter_model.safetensors")


def test_adapter_merged(adapted):
    """Merged into weights on the disk, unloaded and saved."""
    expected, model, folder = adapted
    save(expected.merge_and_unload(), folder / "expected")
    save(model.merge_and_unload(), folder / "found")
    assert_same_files(folder / "found/model.safetensors", folder / "expected/model.safetensors")


def test_adapter_merged_and_taken_out(adapted):
    """Merged, used, and taken out again."""
    expected, model, _ = adapted
    before = logits(expected)
    model.merge_adapter()
    assert torch.allclose(logits(model), before, atol=1e-5)
    model.unmerge_adapter()
    assert torch.allclose(logits(model), before, atol=1e-5)


@pytest.mark.parametrize("adapted", ["adapter_in_memory"], indirect=True)
def test_adapter_trains_on_offloaded_weights(adapted):
    """Gradients of the adapter, beside frozen weights that are loaded for each layer, are those of the plain model."""
    expected, model, _ = adapted
    for one in (expected, model):
        logits(one).square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == wanted.keys()
    assert wanted
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name


def test_adapter_without_values_is_refused(saved, tmp_path):
    """peft makes an adapter for offloaded layers on the meta device; the first forward says so, instead of computing noise."""
    plain, folder = saved
    model = load(plain, folder / "whole", device_map={"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(RuntimeError, match="lora.*dispatch_model"):
        logits(adapt(model))


def test_auto_class(tmp_path):
    """AutoModelForCausalLM with a budget in words."""
    set_seed(0)
    plain = llama().eval()
    plain.save_pretrained(tmp_path)
    options = {"device_map": "auto", "max_memory": {"cpu": "80KB"}, "offload_folder": tmp_path / "offload", "offload_state_dict": True}
    model = load_auto(tmp_path, **options)
    assert on_disk(model)
    assert_equal(outputs(model), outputs(plain))


def load_auto(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
