"""Modules whose names are found in their own rooms when they are first used, so that importing a namespace imports nothing else.

`lazily` gives a file of ours (`__init__.py`, `utils.py`) its `__getattr__`; `offer` makes the module paths of `accelerate_names.py`, which
are no files. A name that is not there is an error which says where it lives, or that this version does not have it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from slipstream.accelerate_names import MODULES, explain, home_of, names_of

__all__ = ["lazily", "offer"]


def lazily(
    namespace: str, homes: Mapping[str, tuple[str, ...]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a module whose names live elsewhere (PEP 562); `homes` is module -> names.

    `submodules` are the modules below it that are found as attributes without having been imported.

    >>> find, names = lazily("example", {"math": ("pi", "tau")})
    >>> names(), find("pi")
    (['pi', 'tau'], 3.141592653589793)
    """
    home = {name: module for module, names in homes.items() for name in names}
    below = frozenset(submodules)

    def find(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(home[name]), name)
        if name in below or f"{namespace}.{name}" in sys.modules:
            return importlib.import_module(f"{namespace}.{name}")
        raise _missing(namespace, name, sys._getframe(1))

    return find, lambda: sorted(home)


def offer(namespace: str) -> None:
    """Make the module paths right below a namespace importable: `slipstream.state`, `slipstream.utils.operations`, ...

    They are entered in `sys.modules` by the module that they are below of, which Python imports first: no file and no finder is needed.
    """
    for path in (f"slipstream.{path}" for path in MODULES):
        parent = path.rpartition(".")[0]
        if parent == namespace or (namespace == "slipstream" and parent.partition(".")[2] in MODULES):
            sys.modules.setdefault(path, _module(path))


def _module(path: str) -> ModuleType:
    module = ModuleType(path, f"Names of `{path.replace('slipstream', 'accelerate', 1)}`, found where they live in Slipstream.")

    def find(name: str) -> Any:
        if name in names_of(path):
            found = home_of(name)
            assert found is not None, f"{path} offers {name}, which is nowhere"
            return getattr(importlib.import_module(found), name)
        if name == "__all__":
            return names_of(path)
        if f"{path}.{name}" in sys.modules:
            return sys.modules[f"{path}.{name}"]
        raise _missing(path, name, sys._getframe(1))

    vars(module).update(__spec__=ModuleSpec(path, None), __getattr__=find, __dir__=lambda: names_of(path))
    return module


def _missing(namespace: str, name: str, caller: FrameType) -> AttributeError | ImportError:
    """The error for a name that a module does not have.

    It has to be an AttributeError, for `hasattr`. `from module import name` would replace that by a text of Python's own, so this
    statement gets an ImportError. It is told by the instruction that the calling frame is at: tried on CPython 3.10 to 3.13; where it is
    not recognised, Python's own text appears. `tests/test_names.py` notices. It can go when Python keeps the AttributeError as a cause.
    """
    text = explain(namespace, name)
    if text is None:
        return AttributeError(f"module {namespace!r} has no attribute {name!r}", name=name, obj=sys.modules.get(namespace))
    if _imports(caller):
        return ImportError(text, name=namespace)
    return AttributeError(text, name=name, obj=sys.modules.get(namespace))


def _imports(frame: FrameType) -> bool:
    import opcode  # only here: names are right most of the time

    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opcode.opmap.get("IMPORT_FROM")
