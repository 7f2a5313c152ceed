"""Small independent helpers that scripts import from `slipstream.utils`: names, dicts, ports, and walks through modules.

Nothing else in the package uses them.
"""

from __future__ import annotations

import functools
import logging
import platform
import re
import socket
from typing import Any

import torch

__all__ = [
    "check_os_kernel",
    "get_free_port",
    "get_module_children_bottom_up",
    "get_module_class_from_name",
    "get_pretty_name",
    "is_port_in_use",
    "merge_dicts",
    "recursive_getattr",
]

_OLDEST_KERNEL = (5, 5)
_USUAL_PORT = 29500


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `source` into `destination`, including nested dicts, and return `destination`.

    >>> merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3})
    {'a': {'c': 2, 'b': 1}, 'd': 3}
    """
    for key, value in source.items():
        present = destination.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            merge_dicts(value, present)
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at the end of a dotted name.

    >>> recursive_getattr(torch.nn.Linear(2, 3), "weight.shape")
    torch.Size([3, 2])
    """
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of the class of any other object.

    >>> get_pretty_name(torch.nn.Linear), get_pretty_name(torch.nn.ReLU()), get_pretty_name(len)
    ('Linear', 'ReLU', 'len')
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a port of this machine is in use (by default 29500, the usual port of rendezvous).

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     is_port_in_use(server.getsockname()[1])
    True
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", _USUAL_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a free port. Another process may take it before it is used; if possible, let a server choose its own port.

    >>> is_port_in_use(get_free_port())
    False
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def check_os_kernel() -> None:
    """Warn about a Linux kernel before 5.5, with which several processes are known to hang."""
    if platform.system() != "Linux":
        return
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST_KERNEL:
        logging.getLogger(__name__).warning(
            f"this Linux kernel is {platform.release()}; several processes may hang with kernels before 5.5.0: a newer one is better"
        )


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return every module of a model, children before their parents and the model itself last; with `return_fqns`, with names.

    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.ReLU()))
    >>> [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    ['0', '1.0', '1', '']
    """
    named: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: torch.nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        named.append((name, module))

    visit("", model)
    return named if return_fqns else [module for _, module in named]


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """The class of this name among the modules of a model; None if there is none.

    >>> get_module_class_from_name(torch.nn.Sequential(torch.nn.ReLU()), "ReLU")
    <class 'torch.nn.modules.activation.ReLU'>
    """
    return next((type(entry) for entry in module.modules() if type(entry).__name__ == name), None)
