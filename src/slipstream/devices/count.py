"""Devices counted without torch, from device files and variables: for launchers and reports, which import no torch.

A count may be wrong where a system shows its devices differently, so the processes themselves ask torch again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.devices.packages import version_of
from slipstream.devices.table import CPU, FAMILIES, Family, named_family, unusable

__all__ = ["count_without_torch", "launch_facts"]


def count_without_torch(
    environ: Mapping[str, str],
    named: str | None = None,
    given: str = "",
    *,
    root: Path = Path("/"),
    families: tuple[Family, ...] = FAMILIES,
) -> tuple[Family, int]:
    """Return the family that a worker would use and how many devices it would see, from device files and variables alone.

    `(CPU, 0)` means that no accelerator was found. It starts no process and imports nothing. A family counts only if the installed torch
    supports it, so a CPU-only build on a machine with accelerators returns 0 too. `named` is the family that an option names (`given`,
    with its origin): no other is looked for then.
    """
    installed = version_of("torch")
    considered = [family for family in families if not family.on_request] if named is None else [named_family(named, given)]
    for family in considered:
        if family is not CPU and family.installed(installed) and (count := family.count_files(environ, root)):
            return family, count
    return (CPU if named is None else considered[0]), 0


def launch_facts(environ: Mapping[str, str], named: str | None = None, given: str = "") -> dict[str, Any]:
    """Return what a launcher has to know of the devices here, found without torch: the fields of its `VisibleAccelerators`.

    `named` is the family that an option names (`given`, with its origin); raises if this installation cannot have it.

    >>> launch_facts({}, "cpu")["count"]
    0
    """
    family, count = count_without_torch(environ, named, given)
    missing = family.missing_software() if named is not None else None
    if missing is not None:
        raise unusable(given, missing)
    facts: dict[str, Any] = {"count": count, "variable": family.visible}
    if family.on_request:
        facts["plugin"] = family.plugin
    if family.declared is not None:
        facts |= {"total": family.total(environ), "total_variable": family.declared[0]}
    return facts
