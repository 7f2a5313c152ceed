"""Tied weights: parameters that several modules share. Which they are, whether a plan keeps them together, and tying them again.

Two names are tied if they stand for the same `Parameter`, or for two that lie in the same memory in the same shape. On the meta device
there is no memory, so only the object counts there. Views of different parts of one memory are not tied. Time is linear.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.checkpoint.raw import identity
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "find_tied_parameters",
    "identity_of",
    "retie_parameters",
]


def identity_of(parameter: torch.Tensor) -> Hashable:
    """Equal for parameters that are tied. It means nothing any more once the parameter is gone."""
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
        return identity(parameter)  # type: ignore[no-any-return]
    return id(parameter)  # other classes may hold their values somewhere else than where they seem to


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The groups of names that share a parameter, each sorted.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"find_tied_parameters got a {type(model).__name__}. Give it a torch.nn.Module.")
    groups: dict[Hashable, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(identity_of(parameter), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make the names of each group stand for one parameter again: the first that has values, else the first there is.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> retie_parameters(model, [["0.weight", "1.weight"]])
    >>> model[1].weight is model[0].weight
    True
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for group in tied_params:
        slots = []
        for name in group:
            path, _, last = name.rpartition(".")
            if path not in modules or not isinstance(getattr(modules[path], last, None), torch.Tensor):
                raise ConfigError(f"tied_params names {name!r}, which the model does not have. Take the groups of find_tied_parameters.")
            slots.append((modules[path], last))
        tensors = [getattr(module, last) for module, last in slots]
        kept = next((one for one in tensors if one.device.type != "meta"), tensors[0] if tensors else None)
        for module, last in slots:
            if getattr(module, last) is not kept:
                setattr(module, last, kept)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the configuration of a transformers model asks for tied weights, whatever the model does at the moment.

    >>> check_tied_parameters_in_config(nn.Linear(2, 2))
    False
    """
    config = getattr(model, "config", None)
    if config is None:
        return False
    read = getattr(config, "get_text_config", None)
    text = read(decoder=True) if callable(read) else config
    words = any(getattr(one, "tie_word_embeddings", False) for one in (config, text))
    output = getattr(model, "get_output_embeddings", None)
    has_output = callable(output) and output() is not None
    halves = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool((words and has_output) or halves)


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of each group of tied weights that a device map takes apart: every device would get a copy, and they drift apart.

    >>> check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": "cpu"})
    """
    for group in tied_params:
        places = {name: _place(name, device_map) for name in group}
        if len(set(map(str, places.values()))) > 1:
            get_logger(__name__).warning(
                f"These tied parameters are on different devices: {places}. Each device gets a copy of its own; "
                "give them the same device in device_map to keep them one."
            )


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)
