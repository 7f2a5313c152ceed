"""The tensors of decoders in the manner of Llama, from the config alone: no model is built, and 1,000 layers are answered at once.

They are those that transformers makes for the architectures that `formula.py` knows; `tests/offload/test_estimates.py` compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from slipstream.offload.estimate.formula import Shape
from slipstream.offload.estimate.parts import Part, Parts

__all__ = ["described_parts"]

_TYPES: Final = MappingProxyType({"float32": "F32", "float16": "F16", "bfloat16": "BF16"})


def described_parts(config: Mapping[str, Any], shape: Shape) -> Parts | None:
    """The parameters and buffers of a decoder; None if the config leaves open what they are.

    >>> from slipstream.offload.estimate.formula import known
    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    >>> config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    >>> described_parts(config, known(config, 128)).count
    95056
    """
    family = config["model_type"]
    dtype = _TYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."))
    if dtype is None or config.get("auto_map") or (family != "llama" and not config.get("num_key_value_heads")):
        return None
    head = shape.queries // shape.heads
    parts = [Part("model.embed_tokens.weight", (shape.vocabulary, shape.hidden), dtype)]
    for number in range(shape.layers):
        parts += _layer(f"model.layers.{number}", config, shape, head, dtype)
    parts.append(Part("model.norm.weight", (shape.hidden,), dtype))
    if not config.get("tie_word_embeddings"):
        parts.append(Part("lm_head.weight", (shape.vocabulary, shape.hidden), dtype))
    frequencies = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    return Parts([*parts, *(Part(name, (head // 2,), "F32", trainable=False) for name in frequencies)])


def _layer(name: str, config: Mapping[str, Any], shape: Shape, head: int, dtype: str) -> Iterator[Part]:
    family, hidden, inner = config["model_type"], shape.hidden, shape.intermediate
    on_inputs = family == "qwen2" or (family in ("llama", "qwen3") and bool(config.get("attention_bias")))
    on_output = family != "qwen2" and on_inputs
    in_mlp = family == "llama" and bool(config.get("mlp_bias"))
    linear = (
        ("self_attn.q_proj", shape.queries, hidden, on_inputs),
        ("self_attn.k_proj", shape.keys, hidden, on_inputs),
        ("self_attn.v_proj", shape.keys, hidden, on_inputs),
        ("self_attn.o_proj", hidden, shape.queries, on_output),
        ("mlp.gate_proj", inner, hidden, in_mlp),
        ("mlp.up_proj", inner, hidden, in_mlp),
        ("mlp.down_proj", hidden, inner, in_mlp),
    )
    for module, rows, columns, bias in linear:
        yield Part(f"{name}.{module}.weight", (rows, columns), dtype, linear=True, layer=name)
        if bias:
            yield Part(f"{name}.{module}.bias", (rows,), dtype, layer=name)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.normed_heads:
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    for module, size in norms.items():
        yield Part(f"{name}.{module}.weight", (size,), dtype, layer=name)
