"""Write `surface.json`: the public names of Accelerate 1.15 with kinds, parameters and plain defaults.

Run it with a Python that has the original package, for example `python compat/tests/make_surface.py compat/tests/surface.json`. It writes
facts alone (names, parameters, defaults, members); `test_surface.py` compares the drop-in with them. Names are those that a module defines
and that do not begin with an underscore, and what `accelerate` and `accelerate.utils` export.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

LEFT_OUT = ("accelerate.commands.menu", "accelerate.test_utils.scripts", "accelerate.utils.rich")
"""The menu of the questionnaire is drawn otherwise; the scripts are run by `accelerate test`; importing `rich` replaces the excepthook."""
OPAQUE = "..."


def plain(value: Any) -> Any:
    """Return a default as JSON has it; `OPAQUE` for an object."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        inside = [plain(item) for item in value]
        return OPAQUE if OPAQUE in inside else inside
    return OPAQUE


def parameters(function: Any) -> list[list[Any]]:
    """Return [name, kind] or [name, kind, default] for each parameter but the object itself."""
    found = []
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and parameter.name in ("self", "cls", "func_self"):
            continue
        entry = [parameter.name, parameter.kind.name]
        if parameter.default is not inspect.Parameter.empty:
            entry.append(plain(parameter.default))
        found.append(entry)
    return found


def describe_class(kind: type) -> dict[str, Any]:
    """Return the constructor, public methods, properties, fields and members of a class."""
    if issubclass(kind, enum.Enum):
        return {"kind": "enum", "members": {name: member.value for name, member in kind.__members__.items()}}
    described: dict[str, Any] = {"kind": "class", "methods": {}, "properties": {}}
    try:
        described["parameters"] = parameters(kind)
    except (ValueError, TypeError):
        described["parameters"] = None
    if dataclasses.is_dataclass(kind):
        described["fields"] = [field.name for field in dataclasses.fields(kind) if field.init]
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            described["properties"][name] = "settable" if value.fset is not None else "readable"
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            described["methods"][name] = parameters(getattr(kind, name))
    return described


def describe(value: Any) -> dict[str, Any]:
    """Return the kind and the parameters of a name."""
    if inspect.isclass(value):
        return describe_class(value)
    if callable(value):
        return {"kind": "function", "parameters": parameters(value)}
    if inspect.ismodule(value):
        return {"kind": "module"}
    return {"kind": "constant", "value": plain(value)}


def is_own(name: str, value: Any, module: Any) -> bool:
    """Return whether a name of a module is its own: defined there, or a constant in capitals."""
    if name.startswith("_") or inspect.ismodule(value):
        return False
    home = getattr(value, "__module__", None)
    if inspect.isclass(value) or inspect.isfunction(value) or hasattr(value, "__wrapped__"):
        return home == module.__name__
    return name.isupper() and module.__name__.endswith(("constants", "hooks", "tracking", "other", "operations"))


def collect() -> dict[str, dict[str, Any]]:
    """Return every module with its names."""
    import accelerate

    surface: dict[str, dict[str, Any]] = {}
    found = [entry.name for entry in pkgutil.walk_packages(accelerate.__path__, "accelerate.") if not entry.name.startswith(LEFT_OUT)]
    for path in ["accelerate", *found]:
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            print(f"left out {path}: {error}", file=sys.stderr)
            continue
        names = {name: value for name, value in vars(module).items() if is_own(name, value, module)}
        surface[path] = {name: describe(value) for name, value in sorted(names.items())}
    for path in ("accelerate", "accelerate.utils"):
        module = importlib.import_module(path)
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and not inspect.ismodule(value) and str(getattr(value, "__module__", "")).startswith("accelerate"):
                surface[path].setdefault(name, {"kind": "exported"})
            elif name.isupper():
                surface[path].setdefault(name, {"kind": "constant", "value": plain(value)})
    return surface


if __name__ == "__main__":
    blocks = []
    for path, names in collect().items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(names.items())]
        blocks.append(f" {json.dumps(path)}: {{\n" + ",\n".join(lines) + "\n }" if lines else f" {json.dumps(path)}: {{}}")
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
