"""Output of `slipstream checkpoint ls` and `slipstream checkpoint show`: plain data for --json, and lines for a terminal.

Headers and small files are read, tensors are not. A part that cannot be read is described by the reason; the others are still shown.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from slipstream.checkpoint.inspect import (
    CheckpointSummary,
    FolderSurvey,
    StoredTensor,
    find_problems,
    open_readable,
    read_model_tensors,
    read_state_part,
    size_problems,
)
from slipstream.checkpoint.manifest import Manifest, ModelEntry
from slipstream.cli.text_format import format_age, format_columns, format_count, format_number, format_time, shorten
from slipstream.devices.memory import convert_bytes
from slipstream.errors import CheckpointError
from slipstream.observability.report.text_charts import escape_control

__all__ = ["checkpoint_lines", "content_line", "describe_checkpoint", "describe_survey", "survey_lines", "tensor_lines"]


_TITLES = ("name", "step", "saved", "", "size", "processes", "metric", "whole", "")


def describe_survey(found: FolderSurvey, *, verify: bool, advance: Callable[[int], object]) -> dict[str, Any]:
    """Return what `ls` prints of a folder, as plain data."""
    return {
        "folder": found.given,
        "latest": found.latest,
        "latest_is_missing": found.lost_latest,
        "checkpoints": [_describe_entry(checkpoint, found, verify, advance) for checkpoint in found.checkpoints],
        "others": [{"name": other.name, "why": other.why} for other in found.others],
        "leftovers": [
            {"name": leftover.name, "of": leftover.of, "what": leftover.what, "size": leftover.size, "saving_now": leftover.alive or None}
            for leftover in found.leftovers
        ],
    }


def _describe_entry(
    checkpoint: CheckpointSummary, found: FolderSurvey, verify: bool, advance: Callable[[int], object]
) -> dict[str, Any]:
    manifest = checkpoint.manifest
    assert manifest is not None
    wrong, ranks = _checked(checkpoint, verify, advance)
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.folder),
        "step": manifest.step,
        "created": manifest.created,
        "size": checkpoint.size,
        "processes": manifest.world,
        "ranks": ranks,
        "metric": manifest.metric,
        "whole": None if wrong is None else not wrong,
        "verified": verify,
        "problems": wrong or [],
        "latest": found.latest == checkpoint.name,
        "note": checkpoint.note,
    }


def _checked(
    checkpoint: CheckpointSummary, verify: bool, advance: Callable[[int], object]
) -> tuple[list[str] | None, list[int] | None]:
    """Return problems (None: not checked), and the ranks whose own files are there."""
    assert checkpoint.manifest is not None
    if checkpoint.url is not None and not verify:
        return None, None
    try:
        with open_readable(checkpoint) as local:
            ranks = sorted({*checkpoint.manifest.ranks, *local.ranks()})
            return list(find_problems(local, advance)) if verify else size_problems(local), ranks
    except CheckpointError as error:
        return [str(error)], sorted(checkpoint.manifest.ranks)


def survey_lines(data: dict[str, Any], now: datetime.datetime) -> Iterator[str]:
    """Yield the lines for one folder."""
    yield f"{escape_control(data['folder'])}: {format_count(len(data['checkpoints']), 'checkpoint')}"
    if data["checkpoints"]:
        rows = [_TITLES, *(_survey_row(entry, now) for entry in data["checkpoints"])]
        yield from format_columns(rows, left=(0, 2, 3, 7, 8))
    for entry in data["checkpoints"]:
        yield from (f"  {escape_control(entry['name'])}: {escape_control(problem)}" for problem in entry["problems"])
        if entry["note"]:
            yield f"  {escape_control(entry['name'])}: {escape_control(entry['note'])}"
        missing = None if entry["ranks"] is None else entry["processes"] - len(entry["ranks"])
        if missing:
            yield f"  {escape_control(entry['name'])}: the random state of {format_count(missing, 'process', 'processes')} is not in it"
    if data["latest_is_missing"]:
        yield f"  `latest` says {escape_control(data['latest'])}, and there is no such checkpoint"
    for entry in data["leftovers"]:
        state = f"being saved by {entry['saving_now']}" if entry["saving_now"] else f"{entry['what']}; the next save there tidies it up"
        yield f"  {escape_control(entry['name'])} ({convert_bytes(entry['size'])}): {escape_control(state)}"
    for entry in data["others"]:
        yield f"  no checkpoint: {escape_control(entry['why'])}"


def _survey_row(entry: dict[str, Any], now: datetime.datetime) -> tuple[str, ...]:
    whole = {None: "not checked", True: "yes" if entry["verified"] else "sizes fit", False: "NO"}[entry["whole"]]
    metric, latest = format_number(entry["metric"]), "latest" if entry["latest"] else ""
    step, created = f"{entry['step']:,}", entry["created"]
    return (
        entry["name"],
        step,
        format_time(created),
        format_age(created, now),
        convert_bytes(entry["size"]),
        str(entry["processes"]),
        metric,
        whole,
        latest,
    )


_MANY = 24


def describe_checkpoint(checkpoint: CheckpointSummary, shown: str, *, tensors: bool) -> dict[str, Any]:
    """Return what `show` prints of a checkpoint, as plain data; with `tensors`, every tensor too."""
    manifest = checkpoint.manifest
    assert manifest is not None
    ranks = sorted({*manifest.ranks, *checkpoint.ranks()})
    kinds = [kind.get("kind") for kind in _mappings(manifest.receipt.get("optimizers"))]
    optimizers = [
        {"kind": kinds[place] if place < len(kinds) else None, **_part(checkpoint, name, tensors, _groups)}
        for place, name in enumerate(manifest.optimizers)
    ]
    return {
        "folder": shown,
        **_facts(manifest),
        "size": checkpoint.size,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "problems": size_problems(checkpoint),
        "receipt": dict(manifest.receipt),
        "models": [_model(checkpoint, model, tensors) for model in manifest.models],
        "optimizers": optimizers,
        "training": None if manifest.training is None else _part(checkpoint, manifest.training, tensors, _keys),
        "objects": [_part(checkpoint, name, tensors, _keys) for name in manifest.objects],
        "ranks": ranks,
        "ranks_missing": max(0, manifest.world - len(ranks)),
        "other_files": sorted(manifest.other_files()),
        "note": checkpoint.note,
    }


def _facts(manifest: Manifest) -> dict[str, Any]:
    names = ("step", "created", "written_by", "world", "strategy", "metric", "stamp")
    return {**{name: getattr(manifest, name) for name in names}, "mesh": dict(manifest.mesh)}


def _model(checkpoint: CheckpointSummary, model: ModelEntry, tensors: bool) -> dict[str, Any]:
    files = [*model.files, *model.shards]
    known = {"number": model.number, "kind": model.kind, "files": files, "aliases": dict(model.aliases), "extra": model.extra}
    try:
        stored = read_model_tensors(checkpoint.folder, model)
    except CheckpointError as error:
        return {**known, "problem": str(error)}
    return {**known, **_counted(stored.values(), tensors)}


def _part(checkpoint: CheckpointSummary, name: str, tensors: bool, more: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        assert checkpoint.manifest is not None
        tree, stored = read_state_part(checkpoint.folder, name, checkpoint.manifest.shards.get(name, ()))
    except CheckpointError as error:
        return {"file": name, "problem": str(error)}
    return {"file": name, **more(tree), **_counted(stored.values(), tensors)}


def _counted(stored: Iterable[StoredTensor], listed: bool) -> dict[str, Any]:
    """Return the number of tensors, their dtypes and sizes."""
    dtypes: dict[str, int] = {}
    tensors = elements = held = 0
    rows = []
    for tensor in stored:
        entry = tensor.entry
        count = math.prod(entry.shape)
        tensors, elements, held = tensors + 1, elements + count, held + tensor.size
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + count
        rows.append({"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "file": ", ".join(tensor.files)})
    return {"tensors": tensors, "elements": elements, "bytes": held, "dtypes": dtypes, **({"tensor_list": rows} if listed else {})}


def _groups(tree: Any) -> dict[str, Any]:
    """Return the number of parameter groups and their learning rates."""
    groups = _mappings(tree.get("param_groups") if isinstance(tree, dict) else None)
    return {"groups": len(groups), "learning_rates": [group.get("lr") for group in groups]}


def _keys(tree: Any) -> dict[str, Any]:
    """Return the names on the first level of a state."""
    if not isinstance(tree, dict):
        return {"keys": [], "is": type(tree).__name__}
    for tag in ("$ordered", "$dict", "$defaultdict"):
        pairs = tree.get(tag)
        if isinstance(pairs, list):
            return {"keys": [str(pair[0]) for pair in pairs if isinstance(pair, list) and pair], "is": "mapping"}
    return {"keys": list(tree), "is": "mapping"}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


# -- as text ------------------------------------------------------------------------------------------------------------


def checkpoint_lines(data: dict[str, Any], now: datetime.datetime) -> Iterator[str]:
    """Yield the lines for a terminal."""
    yield f"{escape_control(data['folder'])}: step {data['step']:,}"
    age = format_age(data["created"], now)
    facts = {
        "saved": f"{format_time(data['created'])}{f' ({age})' if age else ''} by {data['written_by']}",
        "size": f"{convert_bytes(data['size'])} in {format_count(len(data['files']), 'file')}",
        "processes": f"{data['world']}, strategy {data['strategy']}{_mesh(data['mesh'])}",
        "metric": format_number(data["metric"]),
        "random states": _ranks(data),
        "whole": "sizes fit; `slipstream checkpoint verify` reads everything" if not data["problems"] else "NO",
        "note": data["note"],
    }
    yield from (f"  {name:<14} {escape_control(value)}" for name, value in facts.items() if value)
    yield from (f"  {escape_control(problem)}" for problem in data["problems"])
    if data["receipt"]:
        yield "receipt"
        yield from (f"  {line}" for line in _nested(data["receipt"]))
    for model in data["models"]:
        yield f"model {model['number']} ({escape_control(model['kind'])}): {content_line(model, 'parameters')}"
        yield from (
            f"  {escape_control(name)} is tied to {escape_control(target)}" for name, target in list(model["aliases"].items())[:_MANY]
        )
        if len(model["aliases"]) > _MANY:
            yield f"  ... and {format_count(len(model['aliases']) - _MANY, 'more tied name')}"
        yield from tensor_lines(model)
    for place, entry in enumerate(data["optimizers"]):
        rates = ", ".join(shorten(rate) for rate in entry.get("learning_rates", []))
        inside = f", {format_count(entry['groups'], 'group')}, learning rate {rates}" if rates else ""
        yield f"optimizer {place} ({escape_control(entry['kind'] or 'kind unknown')}): {content_line(entry)}{inside}"
        yield from tensor_lines(entry)
    for title, entry in [("training", data["training"]), *((f"object {place}", entry) for place, entry in enumerate(data["objects"]))]:
        if entry is not None:
            held = f": {', '.join(escape_control(key) for key in entry['keys'][:_MANY])}" if entry.get("keys") else ""
            yield f"{title} ({escape_control(entry['file'])}, {content_line(entry)}){held}"
            yield from tensor_lines(entry)
    for name in data["other_files"]:
        yield f"file {escape_control(name)}: {convert_bytes(data['files'][name])}"


def _mesh(mesh: Mapping[str, int]) -> str:
    return f", mesh {' x '.join(f'{axis} {length}' for axis, length in mesh.items())}" if mesh else ""


def _ranks(data: dict[str, Any]) -> str:
    there = ", ".join(map(str, data["ranks"][:_MANY])) + (", ..." if len(data["ranks"]) > _MANY else "")
    missing = data["ranks_missing"]
    return f"of rank {there or 'none'}" + (f"; those of {format_count(missing, 'process', 'processes')} are not in it" if missing else "")


def content_line(entry: dict[str, Any], elements: str = "elements") -> str:
    """Return how many tensors of which types there are, or why that is not known."""
    if "problem" in entry:
        return escape_control(entry["problem"])
    if not entry["tensors"]:
        return "no tensors"
    dtypes = ", ".join(sorted(entry["dtypes"]))
    return f"{format_count(entry['tensors'], 'tensor')}, {entry['elements']:,} {elements} ({dtypes}), {convert_bytes(entry['bytes'])}"


def tensor_lines(entry: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each tensor that is listed."""
    for tensor in entry.get("tensor_list", ()):
        yield f"  {tensor['dtype']:<8} {tensor['shape']!s:<20} {escape_control(tensor['name'])}"


def _nested(value: Mapping[str, Any]) -> Iterator[str]:
    for name, held in value.items():
        if isinstance(held, list) and any(isinstance(entry, dict) for entry in held):
            for place, entry in enumerate(held[:_MANY]):
                yield f"{escape_control(name)}[{place}]  {_inline(entry)}"
        else:
            yield f"{escape_control(name):<28} {_inline(held)}"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{escape_control(name)} {shorten(held)}" for name, held in list(value.items())[:_MANY])
    return escape_control(value) if isinstance(value, str) and len(value) < 200 else shorten(value, 200)
