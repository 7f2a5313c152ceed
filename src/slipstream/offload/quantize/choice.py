"""Which layers of a model are quantised, and which stay as they are. Nothing here changes a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from slipstream.errors import ConfigError
from slipstream.offload.planning.tied import find_tied_parameters
from slipstream.offload.quantize.config import QuantizationConfig

__all__ = ["chosen", "get_keys_to_not_convert", "names_any", "spared"]


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """The modules that lose most by being quantised: the one that makes the output, and those with tied weights.

    >>> get_keys_to_not_convert(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4)))
    ['2']
    """
    groups = [[name.rpartition(".")[0] for name in group] for group in find_tied_parameters(model)]
    # One module under several names is converted as one; it is between modules that a weight would come apart.
    tied = {name for names in groups if len({id(model.get_submodule(name)) for name in names}) > 1 for name in names}
    head = _head(model)
    return sorted({*tied, *([head] if head is not None else [])})


def _head(model: nn.Module) -> str | None:
    """The module that makes the output: the one that the model names, else its last linear layer; a model without a head has none."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ask = getattr(model, "get_output_embeddings", None)
    if not callable(ask):
        return linear[-1][0] if linear else None
    found = ask()
    if found is not None:
        return next((name for name, module in model.named_modules() if module is found), None)
    inner = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    if not isinstance(inner, nn.Module):
        return None  # the inner part of a model alone, without what is on top of it
    inside = {id(module) for module in inner.modules()}
    return next((name for name, module in reversed(linear) if id(module) not in inside), None)


def names_any(name: str, parts: Collection[str]) -> bool:
    """Whether a module is one of those named, or within one of them.

    >>> names_any("model.lm_head", ["lm_head"]), names_any("model.lm_head_2", ["lm_head"])
    (True, False)
    """
    return any(f".{part}." in f".{name}." for part in parts)


def spared(model: nn.Module, config: QuantizationConfig) -> list[str]:
    """Names of modules that stay as they are."""
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    kept = config.keep_in_fp32_modules or []
    known = [name for name, _ in model.named_modules()]
    for field, names in (("skip_modules", config.skip_modules or []), ("keep_in_fp32_modules", kept)):
        if unknown := [one for one in names if not any(names_any(name, [one]) for name in known)]:
            raise ConfigError(f"{field} names {unknown[0]!r}, and the model has no such module. It has: {', '.join(known[1:9])}, ...")
    return [*skipped, *kept]


def chosen(model: nn.Module, spared_names: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers to convert; a class of the user's own that derives from Linear may compute something else, and stays."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not names_any(name, spared_names):
            yield name, module
