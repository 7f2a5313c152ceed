"""State dicts of models whose weights are elsewhere: every tensor with its values, as if nothing had been offloaded.

Weights that lie in files are given as views of the mapped pages: a state dict of them takes no memory until it is read. Nothing is
brought to a device, and the model does not change.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.errors import StateError
from slipstream.offload.hooking.tensors import has_offloaded_params
from slipstream.offload.targets import HOST, device_here

__all__ = ["get_state_dict_from_offload", "get_state_dict_offloaded_model"]


def get_state_dict_offloaded_model(model: torch.nn.Module) -> dict[str, Any]:
    """The whole state dict of a model, on the CPU, wherever its weights are.

    >>> from slipstream.offload.dispatch import dispatch_model
    >>> model = dispatch_model(torch.nn.Sequential(torch.nn.Linear(2, 1)), {"": "disk"})
    >>> [(name, tensor.device.type) for name, tensor in get_state_dict_offloaded_model(model).items()]
    [('0.weight', 'cpu'), ('0.bias', 'cpu')]
    """
    found = {name: _on(value, HOST) for name, value in model.state_dict().items()}
    if nowhere := [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise StateError(
            f"{', '.join(nowhere[:5])} of this {type(model).__name__} have no values: they are on the meta device, and nothing says where "
            "they are. Load the weights first."
        )
    return found


def get_state_dict_from_offload(
    module: torch.nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Puts the values of one module into a state dict, under the names that are in it already; the same dict comes back.

    `module_name` is the full name of one of the module's tensors ("blocks.0.up.weight"). Offloaded ones go to `device_to_put_offload`.

    >>> from slipstream.offload.dispatch import dispatch_model
    >>> model = dispatch_model(torch.nn.Sequential(torch.nn.Linear(2, 1)), {"": "disk"})
    >>> found = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": "?", "1.weight": "?"})
    >>> found["0.weight"].shape, found["1.weight"]
    (torch.Size([1, 2]), '?')
    """
    device = device_here(device_to_put_offload, "device_to_put_offload") if _is_offloaded(module) else None
    prefix = "".join(module_name.rpartition(".")[:2])
    for name, value in module.state_dict().items():
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}{name}"] = value if device is None else _on(value, device)
    return state_dict


def _on(value: Any, device: torch.device) -> Any:
    return value.detach().to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value


def _is_offloaded(module: torch.nn.Module) -> bool:
    """Whether it has weights that are away: by a hook of its own, or of a module around it."""
    return has_offloaded_params(module) or any(one.is_meta for one in (*module.parameters(), *module.buffers()))
