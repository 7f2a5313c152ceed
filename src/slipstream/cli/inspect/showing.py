"""`slipstream checkpoint show`: what is in one checkpoint. Headers and small files are read, tensors are not.

`described` gives plain data, `text` makes lines of it. A part that cannot be read is described by the reason; the others still are.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from slipstream.checkpoint.format import Manifest, ModelEntry
from slipstream.cli.inspect.folder import Look, sizes
from slipstream.cli.inspect.parts import Stored, part_of, weights_of
from slipstream.cli.inspect.text import ago, brief, count, number, printable, size, when
from slipstream.errors import CheckpointError
from slipstream.files.blocks import sums_name

__all__ = ["described", "text"]

_MANY = 24


def described(one: Look, shown: str, *, tensors: bool) -> dict[str, Any]:
    """All that is known of a checkpoint, as plain data; with `tensors`, every tensor too."""
    manifest = one.manifest
    assert manifest is not None
    ranks = sorted({*manifest.ranks, *one.ranks()})
    kinds = [kind.get("kind") for kind in _mappings(manifest.receipt.get("optimizers"))]
    optimizers = [
        {"kind": kinds[place] if place < len(kinds) else None, **_part(one, name, tensors, _groups)}
        for place, name in enumerate(manifest.optimizers)
    ]
    return {
        "folder": shown,
        **_facts(manifest),
        "size": one.size,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "problems": sizes(one),
        "receipt": dict(manifest.receipt),
        "models": [_model(one, model, tensors) for model in manifest.models],
        "optimizers": optimizers,
        "training": None if manifest.training is None else _part(one, manifest.training, tensors, _keys),
        "objects": [_part(one, name, tensors, _keys) for name in manifest.objects],
        "ranks": ranks,
        "ranks_missing": max(0, manifest.world - len(ranks)),
        "other_files": sorted(set(manifest.files) - set(_named(manifest))),
        "note": one.note,
    }


def _facts(manifest: Manifest) -> dict[str, Any]:
    names = ("step", "created", "written_by", "world", "strategy", "metric", "stamp")
    return {**{name: getattr(manifest, name) for name in names}, "mesh": dict(manifest.mesh)}


def _named(manifest: Manifest) -> Iterator[str]:
    for model in manifest.models:
        yield from (*model.files, *(name for name in (model.index, model.extra) if name is not None))
    yield from (file for name in manifest.all_pieces() for file in (name, sums_name(name)))
    yield from (*manifest.optimizers, *manifest.objects, *manifest.ranks.values(), *([manifest.training] if manifest.training else []))


def _model(one: Look, model: ModelEntry, tensors: bool) -> dict[str, Any]:
    files = [*model.files, *model.pieces]
    known = {"number": model.number, "kind": model.kind, "files": files, "aliases": dict(model.aliases), "extra": model.extra}
    try:
        stored = weights_of(one.folder, model)
    except CheckpointError as error:
        return {**known, "problem": str(error)}
    return {**known, **_counted(stored.values(), tensors)}


def _part(one: Look, name: str, tensors: bool, more: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        assert one.manifest is not None
        tree, stored = part_of(one.folder, name, one.manifest.pieces.get(name, ()))
    except CheckpointError as error:
        return {"file": name, "problem": str(error)}
    return {"file": name, **more(tree), **_counted(stored.values(), tensors)}


def _counted(stored: Iterable[Stored], listed: bool) -> dict[str, Any]:
    """How many tensors of which types, and how large."""
    dtypes: dict[str, int] = {}
    tensors = elements = held = 0
    rows = []
    for one in stored:
        inside = math.prod(one.entry.shape)
        tensors, elements, held = tensors + 1, elements + inside, held + one.size
        dtypes[one.entry.dtype] = dtypes.get(one.entry.dtype, 0) + inside
        rows.append({"name": one.entry.name, "dtype": one.entry.dtype, "shape": list(one.entry.shape), "file": ", ".join(one.files)})
    return {"tensors": tensors, "elements": elements, "bytes": held, "dtypes": dtypes, **({"tensor_list": rows} if listed else {})}


def _groups(tree: Any) -> dict[str, Any]:
    """Groups of parameters and their learning rates."""
    groups = _mappings(tree.get("param_groups") if isinstance(tree, dict) else None)
    return {"groups": len(groups), "learning_rates": [group.get("lr") for group in groups]}


def _keys(tree: Any) -> dict[str, Any]:
    """The names on the first level of a state."""
    if not isinstance(tree, dict):
        return {"keys": [], "is": type(tree).__name__}
    for tag in ("$ordered", "$dict", "$defaultdict"):
        pairs = tree.get(tag)
        if isinstance(pairs, list):
            return {"keys": [str(pair[0]) for pair in pairs if isinstance(pair, list) and pair], "is": "mapping"}
    return {"keys": list(tree), "is": "mapping"}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# -- as text ------------------------------------------------------------------------------------------------------------


def text(data: dict[str, Any], now: datetime.datetime) -> Iterator[str]:
    """The lines for a terminal."""
    yield f"{printable(data['folder'])}: step {data['step']:,}"
    age = ago(data["created"], now)
    facts = {
        "saved": f"{when(data['created'])}{f' ({age})' if age else ''} by {data['written_by']}",
        "size": f"{size(data['size'])} in {count(len(data['files']), 'file')}",
        "processes": f"{data['world']}, strategy {data['strategy']}{_mesh(data['mesh'])}",
        "metric": number(data["metric"]),
        "random states": _ranks(data),
        "whole": "sizes fit; `slipstream checkpoint verify` reads everything" if not data["problems"] else "NO",
        "note": data["note"],
    }
    yield from (f"  {name:<14} {printable(value)}" for name, value in facts.items() if value)
    yield from (f"  {printable(problem)}" for problem in data["problems"])
    if data["receipt"]:
        yield "receipt"
        yield from (f"  {line}" for line in _nested(data["receipt"]))
    for model in data["models"]:
        yield f"model {model['number']} ({printable(model['kind'])}): {_content(model, 'parameters')}"
        yield from (f"  {printable(name)} is tied to {printable(target)}" for name, target in list(model["aliases"].items())[:_MANY])
        if len(model["aliases"]) > _MANY:
            yield f"  ... and {count(len(model['aliases']) - _MANY, 'more tied name')}"
        yield from _tensors(model)
    for place, one in enumerate(data["optimizers"]):
        rates = ", ".join(brief(rate) for rate in one.get("learning_rates", []))
        inside = f", {count(one['groups'], 'group')}, learning rate {rates}" if rates else ""
        yield f"optimizer {place} ({printable(one['kind'] or 'kind unknown')}): {_content(one)}{inside}"
        yield from _tensors(one)
    for title, one in [("training", data["training"]), *((f"object {place}", one) for place, one in enumerate(data["objects"]))]:
        if one is not None:
            held = f": {', '.join(printable(key) for key in one['keys'][:_MANY])}" if one.get("keys") else ""
            yield f"{title} ({printable(one['file'])}, {_content(one)}){held}"
            yield from _tensors(one)
    for name in data["other_files"]:
        yield f"file {printable(name)}: {size(data['files'][name])}"


def _mesh(mesh: Mapping[str, int]) -> str:
    return f", mesh {' x '.join(f'{axis} {length}' for axis, length in mesh.items())}" if mesh else ""


def _ranks(data: dict[str, Any]) -> str:
    there = ", ".join(map(str, data["ranks"][:_MANY])) + (", ..." if len(data["ranks"]) > _MANY else "")
    missing = data["ranks_missing"]
    return f"of rank {there or 'none'}" + (f"; those of {count(missing, 'process', 'processes')} are not in it" if missing else "")


def _content(one: dict[str, Any], elements: str = "elements") -> str:
    if "problem" in one:
        return printable(one["problem"])
    if not one["tensors"]:
        return "no tensors"
    dtypes = ", ".join(sorted(one["dtypes"]))
    return f"{count(one['tensors'], 'tensor')}, {one['elements']:,} {elements} ({dtypes}), {size(one['bytes'])}"


def _tensors(one: dict[str, Any]) -> Iterator[str]:
    for tensor in one.get("tensor_list", ()):
        yield f"  {tensor['dtype']:<8} {tensor['shape']!s:<20} {printable(tensor['name'])}"


def _nested(value: Mapping[str, Any]) -> Iterator[str]:
    for name, held in value.items():
        if isinstance(held, list) and any(isinstance(one, dict) for one in held):
            for place, one in enumerate(held[:_MANY]):
                yield f"{printable(name)}[{place}]  {_inline(one)}"
        else:
            yield f"{printable(name):<28} {_inline(held)}"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{printable(name)} {brief(held)}" for name, held in list(value.items())[:_MANY])
    return printable(value) if isinstance(value, str) and len(value) < 200 else brief(value, 200)
