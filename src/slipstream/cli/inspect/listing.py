"""`slipstream checkpoint ls`: a table of checkpoints, and what lies beside them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.cli.inspect.checking import problems
from slipstream.cli.inspect.folder import Look, Survey, sizes
from slipstream.cli.inspect.places import readable
from slipstream.cli.inspect.text import ago, columns, count, number, printable, size, when
from slipstream.errors import CheckpointError

__all__ = ["described", "table"]

_TITLES = ("name", "step", "saved", "", "size", "processes", "metric", "whole", "")


def described(found: Survey, *, verify: bool, advance: Callable[[int], object]) -> dict[str, Any]:
    """All that `ls` knows of a folder, as plain data."""
    return {
        "folder": found.given,
        "latest": found.latest,
        "latest_is_missing": found.lost_latest,
        "checkpoints": [_described(one, found, verify, advance) for one in found.checkpoints],
        "others": [{"name": one.name, "why": one.why} for one in found.others],
        "leftovers": [
            {"name": one.name, "of": one.of, "what": one.what, "size": one.size, "saving_now": one.alive or None} for one in found.leftovers
        ],
    }


def _described(one: Look, found: Survey, verify: bool, advance: Callable[[int], object]) -> dict[str, Any]:
    manifest = one.manifest
    assert manifest is not None
    wrong, ranks = _checked(one, verify, advance)
    return {
        "name": one.name,
        "path": str(one.folder),
        "step": manifest.step,
        "created": manifest.created,
        "size": one.size,
        "processes": manifest.world,
        "ranks": ranks,
        "metric": manifest.metric,
        "whole": None if wrong is None else not wrong,
        "verified": verify,
        "problems": wrong or [],
        "latest": found.latest == one.name,
        "note": one.note,
    }


def _checked(one: Look, verify: bool, advance: Callable[[int], object]) -> tuple[list[str] | None, list[int] | None]:
    """Problems (None: nobody looked), and the ranks whose own files are there."""
    assert one.manifest is not None
    if one.url is not None and not verify:
        return None, None
    try:
        with readable(one) as local:
            ranks = sorted({*one.manifest.ranks, *local.ranks()})
            return list(problems(local, advance)) if verify else sizes(local), ranks
    except CheckpointError as error:
        return [str(error)], sorted(one.manifest.ranks)


def table(data: dict[str, Any], now: datetime.datetime) -> Iterator[str]:
    """The lines for one folder."""
    yield f"{printable(data['folder'])}: {count(len(data['checkpoints']), 'checkpoint')}"
    if data["checkpoints"]:
        rows = [_TITLES, *(_row(one, now) for one in data["checkpoints"])]
        yield from (f"  {line}" for line in columns(rows, right=(1, 4, 5, 6)))
    for one in data["checkpoints"]:
        yield from (f"  {printable(one['name'])}: {printable(problem)}" for problem in one["problems"])
        if one["note"]:
            yield f"  {printable(one['name'])}: {printable(one['note'])}"
        missing = None if one["ranks"] is None else one["processes"] - len(one["ranks"])
        if missing:
            yield f"  {printable(one['name'])}: the random state of {count(missing, 'process', 'processes')} is not in it"
    if data["latest_is_missing"]:
        yield f"  `latest` says {printable(data['latest'])}, and there is no such checkpoint"
    for one in data["leftovers"]:
        state = f"being saved by {one['saving_now']}" if one["saving_now"] else f"{one['what']}; the next save there tidies it up"
        yield f"  {printable(one['name'])} ({size(one['size'])}): {printable(state)}"
    for one in data["others"]:
        yield f"  no checkpoint: {printable(one['why'])}"


def _row(one: dict[str, Any], now: datetime.datetime) -> tuple[str, ...]:
    whole = {None: "not checked", True: "yes" if one["verified"] else "sizes fit", False: "NO"}[one["whole"]]
    metric, latest = number(one["metric"]), "latest" if one["latest"] else ""
    step, created = f"{one['step']:,}", one["created"]
    return one["name"], step, when(created), ago(created, now), size(one["size"]), str(one["processes"]), metric, whole, latest
