"""Activations, cache and tensors of Llama-like decoders by formula, from the config alone, without torch.

`meta_model.py` gives the same figures for any model. The formulas are kept for their speed: an 8B model takes 0.2 s of CPU time, where
building it on the meta device and measuring it takes 10 s (2 cores, torch 2.13) and needs transformers.

The formulas hold for `llama`, `mistral`, `qwen2` and `qwen3`. What autograd keeps for one token of one layer as transformers runs it with
scaled dot product attention, with h = hidden size, i = intermediate size, q = heads x head size, k = the same for keys, w = bytes of the
compute dtype:

    attention     w (2 q + 2 k)      queries and output, keys and values; and 4 bytes for each head
    MLP           w 4 i              gate, its activation, up, their product
    two norms     24 h in float32    input, normalised, output, in 4 bytes each
                  16 h in 16 bits    the input in 4 bytes, the others in 2
                  26 h mixed         8 for each norm, and a copy in 16 bits for each of the five linear layers after them
    norms of q, k (qwen3)            8 (q + k) in float32, 6 (q + k) otherwise

After the layers: logits and their log-softmax, (w + 4) for each word of the vocabulary, twice 4 more while they are differentiated, and
the last norm. Mixed precision also keeps a 16-bit copy of every weight of a linear layer. With activation checkpointing a layer keeps its
input alone, and one layer at a time everything. `tests/big_models/test_estimates.py` compares all this with what torch does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from slipstream.big_models.estimate.tensors import EstimatedTensor, EstimatedTensors

__all__ = [
    "DecoderShape", "compute_cache_size", "compute_forward_peak", "compute_step_peak", "list_decoder_tensors", "parse_decoder_shape",
]


_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
_NORMED_HEADS: Final = ("qwen3",)


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, from the config."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    normed_heads: bool

    @property
    def linear(self) -> int:
        """Elements of the weights of linear layers, the head's included."""
        inner = self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)
        return self.layers * inner + self.vocabulary * self.hidden


def parse_decoder_shape(config: Mapping[str, Any] | None, sequence_length: int) -> DecoderShape | None:
    """Return the sizes of a decoder if the formulas hold for this config, else None.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    >>> parse_decoder_shape({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}, 128).keys
    64
    """
    if config is None or config.get("model_type") not in _FAMILIES or config.get("quantization_config"):
        return None
    kind = (config.get("architectures") or [""])[0]
    if not str(kind).endswith("ForCausalLM") or config.get("attention_dropout") or config.get("_attn_implementation", "sdpa") != "sdpa":
        return None
    window = config.get("sliding_window") if config.get("use_sliding_window", config["model_type"] == "mistral") else None
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not all(isinstance(config.get(name), int) and config[name] > 0 for name in names) or (window and sequence_length >= window):
        return None
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or (128 if config["model_type"] == "qwen3" else config["hidden_size"] // heads)
    return DecoderShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        queries=heads * size,
        keys=(config.get("num_key_value_heads") or heads) * size,
        vocabulary=config["vocab_size"],
        normed_heads=config["model_type"] in _NORMED_HEADS,
    )


def compute_cache_size(shape: DecoderShape, tokens: int, width: int) -> int:
    """Return the bytes of the keys and values of all layers for `tokens` tokens."""
    return shape.layers * 2 * shape.keys * width * tokens


def compute_step_peak(shape: DecoderShape, tokens: int, width: int, *, mixed: bool, checkpointing: bool) -> int:
    """Return the peak of a training step beside weights and gradients; `width` is the bytes of the compute dtype."""
    layer = _count_layer_bytes(shape, width, mixed=mixed)
    last_norm = shape.hidden * (10 if mixed else 12 if width == 4 else 8)
    after_layers = (width + 4) * shape.vocabulary + last_norm
    backward = 3 * width * shape.intermediate  # gradients within one layer, on their way back
    copies = 2 * shape.linear if mixed else 0
    if not checkpointing:
        return copies + tokens * (shape.layers * layer + max(after_layers + 8 * shape.vocabulary, backward))
    inputs = shape.layers * shape.hidden * (4 if mixed else width)
    layer_copies = copies // max(1, shape.layers)
    return max(
        copies + tokens * (inputs + after_layers),
        layer_copies + tokens * (inputs + layer + backward),
        (2 * shape.vocabulary * shape.hidden if mixed else 0) + tokens * (inputs + after_layers + 8 * shape.vocabulary),
    )


def compute_forward_peak(shape: DecoderShape, tokens: int, width: int) -> int:
    """Return the peak of a forward pass without gradients, beside weights and cache: in an MLP, in attention, or the logits."""
    mlp = width * (3 * shape.intermediate + 4 * shape.hidden)
    attention = width * (shape.hidden + 3 * shape.queries + 2 * shape.keys)
    norm = shape.hidden * (2 * width + 8)
    return tokens * max(mlp, attention, norm, width * (shape.vocabulary + shape.hidden))


def _count_layer_bytes(shape: DecoderShape, width: int, *, mixed: bool) -> int:
    norms = shape.hidden * (26 if mixed else 24 if width == 4 else 16)
    head_norms = (8 if width == 4 else 6) * (shape.queries + shape.keys) if shape.normed_heads else 0
    return width * (4 * shape.intermediate + 2 * shape.queries + 2 * shape.keys) + 4 * shape.heads + 8 + norms + head_norms


_HEADER_DTYPES: Final = MappingProxyType({"float32": "F32", "float16": "F16", "bfloat16": "BF16"})


def list_decoder_tensors(config: Mapping[str, Any], shape: DecoderShape) -> EstimatedTensors | None:
    """Return the parameters and buffers of a decoder; None if the config leaves open what they are.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    >>> config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    >>> list_decoder_tensors(config, parse_decoder_shape(config, 128)).count
    95056
    """
    family = config["model_type"]
    dtype = _HEADER_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."))
    if dtype is None or config.get("auto_map") or (family != "llama" and not config.get("num_key_value_heads")):
        return None
    head = shape.queries // shape.heads
    tensors = [EstimatedTensor("model.embed_tokens.weight", (shape.vocabulary, shape.hidden), dtype)]
    for number in range(shape.layers):
        tensors += _layer_tensors(f"model.layers.{number}", config, shape, head, dtype)
    tensors.append(EstimatedTensor("model.norm.weight", (shape.hidden,), dtype))
    if not config.get("tie_word_embeddings"):
        tensors.append(EstimatedTensor("lm_head.weight", (shape.vocabulary, shape.hidden), dtype))
    frequencies = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    return EstimatedTensors([*tensors, *(EstimatedTensor(name, (head // 2,), "F32", trainable=False) for name in frequencies)])


def _layer_tensors(name: str, config: Mapping[str, Any], shape: DecoderShape, head: int, dtype: str) -> Iterator[EstimatedTensor]:
    family, hidden, inner = config["model_type"], shape.hidden, shape.intermediate
    qkv_bias = family == "qwen2" or (family in ("llama", "qwen3") and bool(config.get("attention_bias")))
    output_bias = family != "qwen2" and qkv_bias
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
    linear = (
        ("self_attn.q_proj", shape.queries, hidden, qkv_bias),
        ("self_attn.k_proj", shape.keys, hidden, qkv_bias),
        ("self_attn.v_proj", shape.keys, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, shape.queries, output_bias),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    )
    for module, rows, columns, bias in linear:
        yield EstimatedTensor(f"{name}.{module}.weight", (rows, columns), dtype, linear=True, layer=name)
        if bias:
            yield EstimatedTensor(f"{name}.{module}.bias", (rows,), dtype, layer=name)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.normed_heads:
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    for module, size in norms.items():
        yield EstimatedTensor(f"{name}.{module}.weight", (size,), dtype, layer=name)
