"""The receipt of a run: what decides its meaning, noted when it is saved and compared when it goes on.

A checkpoint can be loaded into a run with another batch size, other data, another schedule or precision; often that is wanted,
sometimes it is a slip that nobody would notice. `changes` says in words what is different and what it does.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["changes", "receipt", "versions"]

_PACKAGES = ("slipstream", "torch", "numpy")


def versions() -> dict[str, str]:
    """The versions that results may depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


@functools.lru_cache(maxsize=len(_PACKAGES))
def _version(package: str) -> str:
    """Looking it up takes longer than the rest of a small save, so it is done once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def receipt(
    *,
    effective_batch: int | None,
    accumulation: int,
    precision: str,
    seed: int,
    loaders: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Mapping[str, Any]],
    schedulers: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What decides the meaning of a run, as plain data."""
    return {
        "effective_batch": effective_batch,
        "gradient_accumulation_steps": accumulation,
        "mixed_precision": precision,
        "seed": seed,
        "loaders": [dict(one) for one in loaders],
        "optimizers": [dict(one) for one in optimizers],
        "schedulers": [dict(one) for one in schedulers],
        "versions": versions(),
    }


def changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What means something else now than when it was saved, each as a sentence; empty if nothing does.

    >>> before = receipt(effective_batch=64, accumulation=1, precision="no", seed=0, loaders=[], optimizers=[], schedulers=[])
    >>> changes(before, {**before, "effective_batch": 32})
    ['an update has 32 samples now, and had 64: learning rate and schedule were chosen for the other']
    """
    said = []
    before, now = saved.get("effective_batch"), present.get("effective_batch")
    if before != now and before is not None and now is not None:
        said.append(f"an update has {now} samples now, and had {before}: learning rate and schedule were chosen for the other")
    before, now = saved.get("mixed_precision"), present.get("mixed_precision")
    if before != now:
        said.append(f"mixed_precision is {now!r} now, and was {before!r}: results will not be the same")
    said += _loaders(_listed(saved, "loaders"), _listed(present, "loaders"))
    said += _kinds("optimizer", _listed(saved, "optimizers"), _listed(present, "optimizers"))
    said += _kinds("scheduler", _listed(saved, "schedulers"), _listed(present, "schedulers"))
    said += _settings("optimizer", _listed(saved, "optimizers"), _listed(present, "optimizers"))
    said += _settings("schedule", _listed(saved, "schedulers"), _listed(present, "schedulers"))
    return said


def _listed(receipt: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of a receipt; one that was made by a later version may look otherwise."""
    value = receipt.get(name)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _loaders(saved: list[Mapping[str, Any]], present: list[Mapping[str, Any]]) -> list[str]:
    said = []
    for number, (before, now) in enumerate(zip(saved, present, strict=False)):
        if before.get("order") == now.get("order"):
            continue
        different = [
            f"{name} {now.get(name)!r} now, {before.get(name)!r} before"
            for name in ("dataset", "length", "sampler", "drop_last", "even")
            if before.get(name) != now.get(name)
        ]
        if different:
            said.append(f"loader {number} reads other data: {'; '.join(different)}")
    return said


def _kinds(what: str, saved: list[Mapping[str, Any]], present: list[Mapping[str, Any]]) -> list[str]:
    pairs = enumerate(zip(saved, present, strict=False))
    return [
        f"{what} {number} is {now.get('kind')} now, and was {before.get('kind')}"
        for number, (before, now) in pairs
        if before.get("kind") != now.get("kind")
    ]


def _settings(what: str, saved: list[Mapping[str, Any]], present: list[Mapping[str, Any]]) -> list[str]:
    """Settings of optimizers or schedules that the script now gives otherwise; those of the checkpoint are loaded over them."""
    said = []
    for number, (before, now) in enumerate(zip(saved, present, strict=False)):
        old, new = before.get("settings"), now.get("settings")
        if before.get("kind") != now.get("kind") or not isinstance(old, Mapping) or not isinstance(new, Mapping):
            continue
        names = [name for name in new if name in old and new[name] != old[name]]
        different = [f"{name} {new[name]!r} in the script, {old[name]!r} in the checkpoint" for name in names]
        if different:
            said.append(f"{what} {number} ({now.get('kind')}) goes on with the settings of the checkpoint: {'; '.join(different)}")
    return said
