"""What is known of one family of devices: a record, and the questions that can be asked of it.

The rows themselves are in `table.py`; nothing here names a family. Importing this module imports no torch: a row finds its
torch namespace (`torch.<type>`, with `is_available`, `device_count` and so on) only when `module()` is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Family", "files", "import_plugin", "nothing", "torch_namespace", "visible_count"]


def torch_namespace(name: str, plugin: str | None = None) -> Callable[[], Any]:
    """A function that gives `torch.<name>`, after importing the plugin that puts it there; None where there is none.

    A plugin that is installed but cannot be imported (its driver is missing, say) is reported as a warning, and its devices
    count as not there: the machine may have others.
    """

    def find() -> Any:
        if plugin is not None and not import_plugin(plugin):
            return None
        return getattr(importlib.import_module("torch"), name, None)

    return find


def import_plugin(plugin: str) -> bool:
    """Import a plugin of torch; whether it is there and works."""
    if plugin in sys.modules:
        return True
    if importlib.util.find_spec(plugin.partition(".")[0]) is None:
        return False
    try:
        importlib.import_module(plugin)
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(f"{plugin} is installed but cannot be imported ({error}); its devices are not used", stacklevel=2)
        return False
    return True


def nothing(_: Path) -> int:
    """The number of device files of a family that leaves none."""
    return 0


def files(*patterns: str) -> Callable[[Path], int]:
    """A function that counts what the first matching pattern matches below a root.

    >>> files("no/such/*")(Path("/"))
    0
    """

    def count(root: Path) -> int:
        return next((number for number in (sum(1 for _ in root.glob(pattern)) for pattern in patterns) if number), 0)

    return count


def visible_count(value: str) -> int:
    """How many devices a visible-devices variable lets through: names, numbers and ranges; -1 ends the list.

    >>> visible_count("0,1"), visible_count("0-3"), visible_count(""), visible_count("-1"), visible_count("GPU-8a1c,MIG-77")
    (2, 4, 0, 0, 2)
    """
    total = 0
    for entry in (part.strip() for part in value.split(",")):
        first, dash, last = entry.partition("-")
        if entry in ("", "-1"):
            break
        total += max(int(last) - int(first) + 1, 0) if dash and first.isdigit() and last.isdigit() else 1
    return total


def _asks_namespace(namespace: Any) -> bool:
    return bool(namespace.is_available())


def _asks_bf16(namespace: Any) -> bool:
    return bool(getattr(namespace, "is_bf16_supported", lambda: True)())


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the device table. Tests put a fake in with `dataclasses.replace(row, module=lambda: fake)`."""

    type: str
    """The type of its `torch.device`."""
    backend: str
    """The backend of `torch.distributed` for its tensors."""
    multi: str
    """The `DistributedType` of several processes on it; "NO" where processes cannot share such devices."""
    module: Callable[[], Any]
    """Gives the namespace in the manner of torch's own device modules, or None where this installation has none. Imports torch."""
    plugin: str | None = None
    """The package that teaches torch the family; None if torch knows it by itself."""
    backend_plugin: str | None = None
    """A module that must be imported before `backend` exists."""
    visible: str | None = None
    """The variable that says which devices a process may see."""
    also_visible: tuple[str, ...] = ()
    """Further variables that narrow the choice."""
    entries: Callable[[Path], int] = nothing
    """Counts the device files below a root, without torch."""
    builds: tuple[str, ...] = ()
    """How the local part of torch's version begins in builds with the family (for families that torch knows by itself)."""
    probe: Callable[[Any], bool] = _asks_namespace
    """Whether the namespace has a device that works; must not initialise it if that can be helped."""
    indexed: bool = True
    """Devices have numbers. False: one name stands for what this process has."""
    many_per_host: bool = True
    fork_safe: bool = False
    """A process may fork after importing (not after using) the family. False also where nobody has tried."""
    bf16: Callable[[Any], bool] = _asks_bf16
    """Whether the namespace computes in bfloat16."""
    out_of_memory: tuple[str, ...] = ()
    """Parts of the texts of its out-of-memory errors, for those that come as a plain RuntimeError."""
    prefixes: tuple[str, ...] = ()
    """How the names of its environment variables begin, for reports."""

    def is_available(self) -> bool:
        """Whether torch can use a device of the family here."""
        namespace = self.module()
        return namespace is not None and self.probe(namespace)

    def count(self) -> int:
        """How many devices of the family this process sees."""
        return int(self.ask("device_count", default=0)) if self.is_available() else 0

    def ask(self, function: str, *arguments: Any, default: Any = None) -> Any:
        """Call a function of the namespace; the default where the namespace, or the function in it, does not exist."""
        return getattr(self.module(), function, lambda *_: default)(*arguments)

    def is_loaded(self) -> bool:
        """Whether the family's code is imported already, so that asking it costs no import."""
        return (self.plugin or "torch") in sys.modules

    def is_initialised(self) -> bool:
        """Whether this process has used a device of the family (and must not fork any more). Imports nothing."""
        return self.is_loaded() and bool(self.ask("is_initialized", default=False))

    def may_be_used(self) -> bool:
        """Whether this process has used a device of the family, or may have: some families have devices and do not tell."""
        return self.is_loaded() and bool(self.ask("is_initialized", default=True)) and self.is_available()

    def installed(self, torch_version: str | None) -> bool:
        """Whether this installation of torch has the family, judged by what is installed and without importing it."""
        if torch_version is None:
            return False
        if self.plugin is not None:
            return importlib.util.find_spec(self.plugin.partition(".")[0]) is not None
        build = torch_version.partition("+")[2]
        return not build or build.startswith(self.builds)

    def count_files(self, environ: Mapping[str, str], root: Path = Path("/")) -> int:
        """How many devices a process with this environment would see, from device files; 0 if that cannot be known."""
        present = self.entries(root)
        if not present:
            return 0
        limits = [environ[name] for name in (self.visible, *self.also_visible) if name is not None and name in environ]
        return min([present, *map(visible_count, limits)])
