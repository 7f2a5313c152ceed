"""The namespaces that calls are compared with: those of the installed torch, and the recorded ones of vendors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from device_calls import FAMILY, DeviceCall, bind

from slipstream.devices.lazy_runtime import LazyRuntime
from slipstream.devices.table import Family

IN_TORCH = ("cuda", "xpu", "mps", "cpu")
_RECORD = Path(__file__).with_name("family_functions.txt")


@dataclass
class Recorded:
    """One section of the record."""

    source: str
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def read_record(text: str | None = None) -> dict[str, Recorded]:
    """Return the sections of the record by family or module."""
    sections: dict[str, Recorded] = {}
    section = Recorded("")
    for line in (_RECORD.read_text() if text is None else text).splitlines():
        if header := re.fullmatch(r"\[(\S+)\] (.+)", line):
            section = sections[header[1]] = Recorded(header[2])
        elif lacking := re.fullmatch(r"no (.+?): (.+)", line):
            section.absent.update(dict.fromkeys(lacking[1].split(", "), lacking[2]))
        elif line and not line.startswith("#"):
            scope: dict[str, Any] = {}
            exec(f"def {line}: ...", scope)  # noqa: S102
            name = line.partition("(")[0]
            section.functions[name] = scope[name]
    return sections


def find_function(namespace: str, name: str, record: Mapping[str, Recorded]) -> Callable[..., Any] | None:
    """Return a function of a family or module: from torch where it is installed, else as it is recorded."""
    if namespace in IN_TORCH:
        found = getattr(getattr(torch, namespace), name, None)
    elif namespace == "xla":
        found = getattr(LazyRuntime(bool, None, None), name, None)
    elif namespace.partition(".")[0] == "torch":
        found = getattr(_module(namespace), name, None)
    else:
        found = record[namespace].functions.get(name) if namespace in record else None
    return found


def _module(name: str) -> Any:
    """Return a module or class of torch by its full name."""
    outer, _, inner = name.rpartition(".")
    return importlib.import_module(name) if not outer or not hasattr(_module(outer), inner) else getattr(_module(outer), inner)


def misfits(calls: list[DeviceCall], family: Family, record: Mapping[str, Recorded]) -> list[str]:
    """Return what is wrong with the calls that run on a family."""
    known = record.get(family.type, Recorded("nothing"))
    found = []
    for call in calls:
        if call.namespace not in (FAMILY, family.type):
            continue
        function = find_function(family.type, call.function, record)
        if function is not None:
            wrong = bind(call, function, indexed=family.indexed)
            found += [f"{call.file}, on {family.type}: {wrong}"] if wrong else []
            if call.function in known.absent:
                found.append(f"{family.type} has {call.function}, and family_functions.txt says that it has not")
        elif call.function not in known.absent:
            found.append(f"{call.file}: {family.type} has no {call.function}; say in family_functions.txt what happens then")
    return found


def table_rows(calls: list[DeviceCall], families: tuple[Family, ...], record: Mapping[str, Recorded]) -> list[str]:
    """Return the lines of the table in docs/devices.md."""
    asked = sorted({call.function for call in calls if call.namespace == FAMILY})
    lines = ["| type | checked against | functions called | of these it has |", "|---|---|---|---|"]
    for family in families:
        known = record[family.type]
        has = [name for name in asked if find_function(family.type, name, record) is not None]
        lines.append(f"| `{family.type}` | {known.source} | {len(asked)} | {len(has)} |")
    return lines
