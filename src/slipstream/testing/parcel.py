"""Functions and their arguments as bytes, closures and lambdas included, for a process of our own on this machine.

A function of a test file travels by value: the ranks need not import the file (and pytest's rewritten asserts come along); other
modules travel by name and are imported there. Never used on anything that came from a file or a network.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from slipstream.errors import StateError

__all__ = ["pack", "unpack"]


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """One call as bytes.

    >>> base = 40
    >>> call, args, kwargs = unpack(pack(lambda x: base + x, (2,), {}))
    >>> call(*args, **kwargs)
    42
    """
    cloudpickle = _cloudpickle()
    with ExitStack() as stack:
        for module in _test_modules(function):
            stack.enter_context(_by_value(cloudpickle, module))
        data: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    return data


def unpack(data: bytes) -> Any:
    """What `pack` was given, or what a rank sent back."""
    return _cloudpickle().loads(data)


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError as error:
        raise StateError("the pool sends functions to other processes and needs cloudpickle: pip install 'slipstream[testing]'") from error
    module: ModuleType = cloudpickle
    return module


def _test_modules(function: Callable[..., Any]) -> Iterator[ModuleType]:
    """Modules whose asserts pytest has rewritten, and the function's own if a fresh interpreter could not import it by name."""
    own = getattr(function, "__module__", None)
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not isinstance(module, ModuleType):
            continue  # cloudpickle sends __main__ by value anyway
        if "@pytest_ar" in vars(module) or (name == own and not _importable(name)):
            yield module


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def _by_value(cloudpickle: ModuleType, module: ModuleType) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
