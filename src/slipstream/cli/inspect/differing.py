"""`slipstream checkpoint diff`: what is different in two checkpoints.

Models, optimizers and objects are paired by their numbers. Files that have the same size and checksum in both manifests are equal
without being read; of the others one tensor at a time is read, in pieces, so that memory stays small. When and by which save they were
made is shown and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.checkpoint.format import MANIFEST, FileEntry, Manifest, ModelEntry, RankFile
from slipstream.cli.inspect.folder import Look
from slipstream.cli.inspect.parts import part_of, resolved, weights_of
from slipstream.cli.inspect.text import brief, count, number, printable
from slipstream.cli.inspect.trees import Apart, compare_stored, compare_trees
from slipstream.files.blocks import sums_name

__all__ = ["Section", "compared", "plain", "text"]

_FACTS = ("step", "world", "strategy", "mesh", "metric", "written_by")
_SHOWN = 20
_OWN_STAMP = frozenset({"stamp"})


@dataclass
class Section:
    """One part of two checkpoints."""

    title: str
    apart: list[Apart] = field(default_factory=list)
    compared: int = 0
    """How many tensors were compared, or known to be equal, where it holds tensors."""

    @property
    def changed(self) -> int:
        """How many tensors are not the same."""
        return sum(one.difference is not None for one in self.apart)


def compared(one: Look, other: Look) -> Iterator[Section]:
    """The parts of two checkpoints, each with what is different."""
    a, b = one.manifest, other.manifest
    assert a is not None
    assert b is not None
    yield Section("facts", list(compare_trees((_facts(a), {}), (_facts(b), {}))))
    yield Section("receipt", list(compare_trees((dict(a.receipt), {}), (dict(b.receipt), {}))))
    models_a, models_b = ({model.number: model for model in manifest.models} for manifest in (a, b))
    for key in sorted({*models_a, *models_b}):
        yield _models(f"model {key}", (one, models_a.get(key)), (other, models_b.get(key)))
    parts_a, parts_b = _parts(one, a), _parts(other, b)
    for title in dict.fromkeys([*parts_a, *parts_b]):
        yield _pair(title, parts_a.get(title), parts_b.get(title))
    yield _files(a, b)


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {name: dict(manifest.mesh) if name == "mesh" else getattr(manifest, name) for name in _FACTS}


def _models(title: str, one: tuple[Look, ModelEntry | None], other: tuple[Look, ModelEntry | None]) -> Section:
    (look_a, a), (look_b, b) = one, other
    known = a or b
    section = Section(f"{title} ({known.kind})" if known else title)
    if a is None or b is None:
        section.apart.append(Apart("weights", None if a is None else a.kind, None if b is None else b.kind))
        return section
    if a.kind != b.kind:
        section.apart.append(Apart("kind", a.kind, b.kind))
    stored_a, stored_b = weights_of(look_a.folder, a), weights_of(look_b.folder, b)
    names_a = resolved(stored_a, a.aliases, str(look_a.folder / MANIFEST))
    names_b = resolved(stored_b, b.aliases, str(look_b.folder / MANIFEST))
    same = _equal_files(look_a, look_b)
    for name in dict.fromkeys([*names_a, *names_b]):
        left, right = names_a.get(name), names_b.get(name)
        if left is None or right is None:
            section.apart.append(Apart(name, None if left is None else left.described(), None if right is None else right.described()))
            continue
        if a.aliases.get(name) != b.aliases.get(name):
            section.apart.append(Apart(name, _tied(a, name), _tied(b, name)))
        elif name in a.aliases:
            continue  # compared under the name that it is stored by
        section.compared += 1
        equal = len(left.files) == len(right.files) and same.issuperset(zip(left.files, right.files, strict=True))
        if not equal and (apart := compare_stored(name, left, right)):
            section.apart.append(apart)
    return section


def _tied(model: ModelEntry, name: str) -> str:
    return f"tied to {model.aliases[name]}" if name in model.aliases else "a tensor of its own"


def _equal_files(one: Look, other: Look) -> set[tuple[str, str]]:
    """Pairs of files that their manifests say are the same."""
    assert one.manifest is not None
    assert other.manifest is not None
    known = {entry: name for name, entry in one.manifest.files.items()}
    return {(known[entry], name) for name, entry in other.manifest.files.items() if entry in known}


_Place = tuple[Path, str, list[FileEntry], tuple[str, ...]]
"""Where the state is: its folder and file, what these files are like, and those of them that hold pieces."""


def _parts(one: Look, manifest: Manifest) -> dict[str, _Place]:
    """The states in a checkpoint, by titles that two checkpoints have in common."""
    named = {f"optimizer {place}": name for place, name in enumerate(manifest.optimizers)}
    named |= {} if manifest.training is None else {"training": manifest.training}
    named |= {f"object {place}": name for place, name in enumerate(manifest.objects)}
    named |= {f"model {model.number}, what is no tensor": model.extra for model in manifest.models if model.extra is not None}
    named |= {f"rank {rank}": name for rank, name in sorted(manifest.ranks.items())}
    found: dict[str, _Place] = {}
    for title, name in named.items():
        pieces = manifest.pieces.get(name, ())
        found[title] = (one.folder, name, [manifest.files[file] for file in (name, *pieces)], pieces)
    for rank, path in sorted(one.ranks().items()):
        said = RankFile.of(path.name[path.name.index("rank_") :])
        assert said is not None
        found.setdefault(f"rank {rank}", (path.parent, path.name, [FileEntry(-1, said.checksum)], ()))
    return found


def _pair(title: str, one: _Place | None, other: _Place | None) -> Section:
    section = Section(title)
    if one is None or other is None:
        section.apart.append(Apart("file", None if one is None else one[1], None if other is None else other[1]))
        return section
    if one[2] == other[2]:
        return section
    left, right = part_of(one[0], one[1], one[3]), part_of(other[0], other[1], other[3])
    section.compared = len(left[1])
    section.apart += compare_trees(left, right, _OWN_STAMP if title.startswith("rank ") else frozenset())
    return section


def _files(a: Manifest, b: Manifest) -> Section:
    """Files of the script's own hooks."""
    section = Section("other files")
    left, right = ({name: entry for name, entry in one.files.items() if name not in _known(one)} for one in (a, b))
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name):
            section.apart.append(Apart(name, _entry(left.get(name)), _entry(right.get(name))))
    return section


def _entry(entry: FileEntry | None) -> str | None:
    return None if entry is None else f"{entry.size:,} bytes, checksum {entry.checksum}"


def _known(manifest: Manifest) -> set[str]:
    names = {name for model in manifest.models for name in (*model.files, model.index, model.extra) if name is not None}
    names.update(manifest.optimizers, manifest.objects, manifest.ranks.values())
    names.update(file for name in manifest.all_pieces() for file in (name, sums_name(name)))
    return names if manifest.training is None else {*names, manifest.training}


# -- as data and as text ------------------------------------------------------------------------------------------------


def plain(sections: list[Section]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "equal": not any(section.apart for section in sections),
        "sections": [
            {"title": one.title, "tensors": one.compared, "differences": [_as_data(apart) for apart in one.apart]} for one in sections
        ],
    }


def _as_data(apart: Apart) -> dict[str, Any]:
    found = {"place": apart.place, "one": apart.one, "other": apart.other}
    if apart.difference is None:
        return found
    largest = apart.difference.largest
    shown = largest if largest is None or largest < float("inf") else None  # JSON has no word for infinity
    return {**found, "changed": apart.difference.share, "largest_difference": shown, "nan": apart.difference.special}


def text(sections: list[Section], *, everything: bool) -> Iterator[str]:
    """The lines for a terminal, a summary at the end."""
    for section in sections:
        if not section.apart:
            continue
        tensors = f": {section.changed:,} of {count(section.compared, 'tensor')} changed" if section.compared else ""
        yield f"{printable(section.title)}{tensors}"
        shown = section.apart if everything else section.apart[:_SHOWN]
        yield from (f"  {_line(apart)}" for apart in shown)
        if len(shown) < len(section.apart):
            yield f"  ... and {count(len(section.apart) - len(shown), 'more difference')} (--all shows them)"
    total = sum(section.compared for section in sections)
    changed = sum(section.changed for section in sections)
    others = sum(len(section.apart) for section in sections) - changed
    if not changed and not others:
        yield f"The checkpoints are equal: {count(total, 'tensor')}, and every state."
    else:
        yield f"The checkpoints differ: {changed:,} of {count(total, 'tensor')} changed, and {count(others, 'other difference')}."


def _line(apart: Apart) -> str:
    place = printable(apart.place)
    if apart.one is None or apart.other is None:
        side, held = ("first", apart.one) if apart.other is None else ("second", apart.other)
        return f"{place}: only in the {side} ({brief(held)})" if held is not None else f"{place}: in neither"
    if apart.difference is None:
        return f"{place}: {_shown(apart.one)} -> {_shown(apart.other)}"
    found = apart.difference
    largest = "" if found.largest is None else f", largest difference {number(found.largest)}"
    return f"{place} {printable(apart.one)}: {100 * found.share:.3g} % changed{largest}{', NaN among them' if found.special else ''}"


def _shown(value: str) -> str:
    text = printable(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
