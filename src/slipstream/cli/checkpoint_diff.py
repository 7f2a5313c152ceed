"""`slipstream checkpoint diff`: compare two checkpoints by facts, state trees and tensors.

Models, optimizers and objects are paired by number. Files with the same size and checksum in both manifests are equal without being read;
other tensors are read one at a time, in pieces, and compared bit by bit, so memory stays small. The time and the identity of a save do
not count. Imports numpy, so the command imports it only when used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy

from slipstream.checkpoint.inspect import CheckpointSummary, StoredTensor, read_model_tensors, read_state_part, resolve_aliases
from slipstream.checkpoint.manifest import MANIFEST, Manifest, ModelEntry, RankFile
from slipstream.cli.text_format import format_count, shorten, truncate
from slipstream.files.disk import FileEntry
from slipstream.files.safetensors_layout import ITEM_SIZE
from slipstream.observability.report.text_charts import escape_control

__all__ = [
    "DiffSection", "TensorDifference", "ValueDifference", "compare_checkpoints", "compare_stored", "compare_tensors", "compare_trees",
    "diff_lines", "sections_as_data",
]


_Array = numpy.ndarray[Any, Any]

_PLAIN: Final[Mapping[str, str]] = MappingProxyType(
    {"F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
    | {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1"}
)


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors of one type and shape differ."""

    elements: int
    changed: int
    largest: float | None = None
    """The largest absolute difference; None for equal tensors, and for values that cannot be subtracted."""
    special: bool = False
    """Whether changed elements are NaN on a side."""

    @property
    def share(self) -> float:
        """The share of changed elements."""
        return self.changed / self.elements if self.elements else 0.0


def compare_tensors(dtype: str, first: Iterable[bytes], second: Iterable[bytes]) -> TensorDifference:
    """Return the difference of two tensors given as pieces of the same lengths.

    >>> compare_tensors("F32", [numpy.float32([1, 2, 3]).tobytes()], [numpy.float32([1, 2, 5]).tobytes()])
    TensorDifference(elements=3, changed=1, largest=2.0, special=False)
    """
    width = ITEM_SIZE[dtype]
    elements = changed = 0
    largest: float | None = None
    special = False
    for left, right in zip(first, second, strict=True):
        if len(left) != len(right):
            raise ValueError(f"pieces of {len(left)} and {len(right)} bytes cannot be compared")
        elements += len(left) // width
        if left == right:
            continue
        places = _changed(left, right, width)
        changed += int(places.size)
        if dtype not in _PLAIN and dtype != "BF16":  # 8-bit floats, which numpy does not support
            continue
        apart = _distances(_elements(dtype, left)[places], _elements(dtype, right)[places])
        known = apart[~numpy.isnan(apart)]
        special = special or known.size < apart.size
        if known.size:
            largest = max(largest if largest is not None else -math.inf, float(known.max()))
    return TensorDifference(elements, changed, largest, special)


def _changed(left: bytes, right: bytes, width: int) -> _Array:
    """Return the places of elements whose bits differ."""
    kind = f"<u{width}"
    return numpy.flatnonzero(numpy.frombuffer(left, kind) != numpy.frombuffer(right, kind))


def _elements(dtype: str, data: bytes) -> _Array:
    if dtype == "BF16":
        return (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return numpy.frombuffer(data, _PLAIN[dtype])


def _distances(left: _Array, right: _Array) -> _Array:
    """Return absolute differences; exact for integers, whose differences always fit into 64 bits without a sign."""
    if left.dtype.kind in "iu":
        low, high = numpy.minimum(left, right), numpy.maximum(left, right)
        whole: _Array = (high.astype("<u8") - low.astype("<u8")).astype(numpy.float64)
        return whole
    wide: Any = numpy.complex128 if left.dtype.kind == "c" else numpy.float64
    with numpy.errstate(all="ignore"):
        apart: _Array = numpy.abs(left.astype(wide) - right.astype(wide))
    return apart


_PAIRS: Final = ("$dict", "$ordered", "$counter", "$defaultdict")
_ITEMS: Final = ("$tuple", "$set", "$frozenset", "$deque")
_TENSORS: Final = ("$tensor", "$array", "$numbers")
_ABSENT: Final = object()


@dataclass(frozen=True)
class ValueDifference:
    """One place in which two checkpoints differ; `first` and `second` are None where it is missing on that side."""

    place: str
    first: str | None
    second: str | None
    difference: TensorDifference | None = None
    """For two tensors of one type and shape."""


def compare_trees(
    first: tuple[Any, Mapping[str, StoredTensor]], second: tuple[Any, Mapping[str, StoredTensor]], ignored: frozenset[str] = frozenset()
) -> Iterator[ValueDifference]:
    """Yield where two parts differ; places in `ignored` do not count."""
    for apart in _TreeWalk(first[1], second[1]).nodes(first[0], second[0], ""):
        if apart.place not in ignored:
            yield apart


def compare_stored(place: str, first: StoredTensor, second: StoredTensor) -> ValueDifference | None:
    """Return how two tensors differ; None if they are equal."""
    if first.entry.dtype != second.entry.dtype or first.entry.shape != second.entry.shape:
        return ValueDifference(place, first.describe(), second.describe())
    difference = compare_tensors(first.entry.dtype, first.chunks(), second.chunks())
    return ValueDifference(place, first.describe(), second.describe(), difference) if difference.changed else None


class _TreeWalk:
    def __init__(self, first: Mapping[str, StoredTensor], second: Mapping[str, StoredTensor]) -> None:
        self._first = first
        self._second = second

    def nodes(self, first: Any, second: Any, place: str) -> Iterator[ValueDifference]:
        if first is _ABSENT or second is _ABSENT:
            yield ValueDifference(place or "value", self._text(first, self._first), self._text(second, self._second))
            return
        left, right = _children(first), _children(second)
        if left is not None and right is not None and _tag(first) == _tag(second):
            for key in dict.fromkeys([*left, *right]):
                yield from self.nodes(left.get(key, _ABSENT), right.get(key, _ABSENT), f"{place}{key}".lstrip("."))
        elif _tag(first) in _TENSORS and _tag(first) == _tag(second):
            yield from self._tensors(first, second, place or "value")
        elif first != second or type(first) is not type(second):
            yield ValueDifference(place or "value", self._text(first, self._first), self._text(second, self._second))

    def _tensors(self, first: dict[str, Any], second: dict[str, Any], place: str) -> Iterator[ValueDifference]:
        tag = _tag(first)
        left, right = self._first.get(str(first[tag])), self._second.get(str(second[tag]))
        if left is None or right is None or {**first, tag: ""} != {**second, tag: ""}:
            yield ValueDifference(place, self._text(first, self._first), self._text(second, self._second))
        elif (apart := compare_stored(place, left, right)) is not None:
            yield apart

    def _text(self, node: Any, tensors: Mapping[str, StoredTensor]) -> str | None:
        if node is _ABSENT:
            return None
        tag = _tag(node)
        if tag not in _TENSORS:
            return json.dumps(node)
        stored = tensors.get(str(node[tag]))
        held = "a tensor that is not there" if stored is None else stored.describe()
        rest = {key: value for key, value in node.items() if key != tag}
        return f"{held} {json.dumps(rest)}" if rest else held


def _tag(node: Any) -> str:
    """Return the kind of value that a node represents."""
    if isinstance(node, dict):
        return next((key for key in node if key.startswith("$")), "object")
    return "list" if isinstance(node, list) else ""


def _children(node: Any) -> dict[str, Any] | None:
    """Return the children of a container by their suffix of its path; None if it is not a container."""
    if isinstance(node, list):
        return {f"[{number}]": item for number, item in enumerate(node)}
    if not isinstance(node, dict):
        return None
    tag = _tag(node)
    if tag == "object":
        return {f".{key}": item for key, item in node.items()}
    held: Any = node[tag]
    if tag in ("$defaultdict", "$deque") and isinstance(held, list) and len(held) == 2:
        held = held[1]
    if not isinstance(held, list):
        return None
    if tag in _PAIRS and all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        return {f"[{json.dumps(key)}]": item for key, item in held}
    return {f"[{number}]": item for number, item in enumerate(held)} if tag in _ITEMS else None


_FACTS = ("step", "world", "strategy", "mesh", "metric", "written_by")
_SHOWN = 20
_OWN_STAMP = frozenset({"stamp"})


@dataclass
class DiffSection:
    """One part of two checkpoints."""

    title: str
    apart: list[ValueDifference] = field(default_factory=list)
    compared: int = 0
    """How many tensors were compared, or known to be equal, where it holds tensors."""

    @property
    def changed(self) -> int:
        """How many tensors are not the same."""
        return sum(entry.difference is not None for entry in self.apart)


def compare_checkpoints(first: CheckpointSummary, second: CheckpointSummary) -> Iterator[DiffSection]:
    """Yield the parts of two checkpoints, each with what is different."""
    a, b = first.manifest, second.manifest
    assert a is not None
    assert b is not None
    yield DiffSection("facts", list(compare_trees((_facts(a), {}), (_facts(b), {}))))
    yield DiffSection("receipt", list(compare_trees((dict(a.receipt), {}), (dict(b.receipt), {}))))
    models_a, models_b = ({model.number: model for model in manifest.models} for manifest in (a, b))
    for key in sorted({*models_a, *models_b}):
        yield _models(f"model {key}", (first, models_a.get(key)), (second, models_b.get(key)))
    parts_a, parts_b = _parts(first, a), _parts(second, b)
    for title in dict.fromkeys([*parts_a, *parts_b]):
        yield _pair(title, parts_a.get(title), parts_b.get(title))
    yield _files(a, b)


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {name: dict(manifest.mesh) if name == "mesh" else getattr(manifest, name) for name in _FACTS}


def _models(
    title: str, first: tuple[CheckpointSummary, ModelEntry | None], second: tuple[CheckpointSummary, ModelEntry | None]
) -> DiffSection:
    (checkpoint_a, a), (checkpoint_b, b) = first, second
    known = a or b
    section = DiffSection(f"{title} ({known.kind})" if known else title)
    if a is None or b is None:
        section.apart.append(ValueDifference("weights", None if a is None else a.kind, None if b is None else b.kind))
        return section
    if a.kind != b.kind:
        section.apart.append(ValueDifference("kind", a.kind, b.kind))
    stored_a, stored_b = read_model_tensors(checkpoint_a.folder, a), read_model_tensors(checkpoint_b.folder, b)
    names_a = resolve_aliases(stored_a, a.aliases, str(checkpoint_a.folder / MANIFEST))
    names_b = resolve_aliases(stored_b, b.aliases, str(checkpoint_b.folder / MANIFEST))
    same = _equal_files(checkpoint_a, checkpoint_b)
    for name in dict.fromkeys([*names_a, *names_b]):
        left, right = names_a.get(name), names_b.get(name)
        if left is None or right is None:
            section.apart.append(
                ValueDifference(name, None if left is None else left.describe(), None if right is None else right.describe())
            )
            continue
        if a.aliases.get(name) != b.aliases.get(name):
            section.apart.append(ValueDifference(name, _tied(a, name), _tied(b, name)))
        elif name in a.aliases:
            continue  # compared under the name that it is stored by
        section.compared += 1
        equal = len(left.files) == len(right.files) and same.issuperset(zip(left.files, right.files, strict=True))
        if not equal and (apart := compare_stored(name, left, right)):
            section.apart.append(apart)
    return section


def _tied(model: ModelEntry, name: str) -> str:
    return f"tied to {model.aliases[name]}" if name in model.aliases else "a tensor of its own"


def _equal_files(first: CheckpointSummary, second: CheckpointSummary) -> set[tuple[str, str]]:
    """Return pairs of files that their manifests say are the same."""
    assert first.manifest is not None
    assert second.manifest is not None
    known = {entry: name for name, entry in first.manifest.files.items()}
    return {(known[entry], name) for name, entry in second.manifest.files.items() if entry in known}


_PartFiles = tuple[Path, str, list[FileEntry], tuple[str, ...]]
"""Where the state is: its folder and file, what these files are like, and those of them that hold pieces."""


def _parts(checkpoint: CheckpointSummary, manifest: Manifest) -> dict[str, _PartFiles]:
    """Return the states in a checkpoint, by titles that two checkpoints have in common."""
    named = {f"optimizer {place}": name for place, name in enumerate(manifest.optimizers)}
    named |= {} if manifest.training is None else {"training": manifest.training}
    named |= {f"object {place}": name for place, name in enumerate(manifest.objects)}
    named |= {f"model {model.number}, what is not a tensor": model.extra for model in manifest.models if model.extra is not None}
    named |= {f"rank {rank}": name for rank, name in sorted(manifest.ranks.items())}
    found: dict[str, _PartFiles] = {}
    for title, name in named.items():
        shards = manifest.shards.get(name, ())
        found[title] = (checkpoint.folder, name, [manifest.files[file] for file in (name, *shards)], shards)
    for rank, path in sorted(checkpoint.ranks().items()):
        said = RankFile.of(path.name[path.name.index("rank_") :])
        assert said is not None
        found.setdefault(f"rank {rank}", (path.parent, path.name, [FileEntry(-1, said.checksum)], ()))
    return found


def _pair(title: str, first: _PartFiles | None, second: _PartFiles | None) -> DiffSection:
    section = DiffSection(title)
    if first is None or second is None:
        section.apart.append(ValueDifference("file", None if first is None else first[1], None if second is None else second[1]))
        return section
    if first[2] == second[2]:
        return section
    left, right = read_state_part(first[0], first[1], first[3]), read_state_part(second[0], second[1], second[3])
    section.compared = len(left[1])
    section.apart += compare_trees(left, right, _OWN_STAMP if title.startswith("rank ") else frozenset())
    return section


def _files(a: Manifest, b: Manifest) -> DiffSection:
    """Return files of the script's own hooks."""
    section = DiffSection("other files")
    left, right = ({name: manifest.files[name] for name in manifest.other_files()} for manifest in (a, b))
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name):
            section.apart.append(ValueDifference(name, _entry(left.get(name)), _entry(right.get(name))))
    return section


def _entry(entry: FileEntry | None) -> str | None:
    return None if entry is None else f"{entry.size:,} bytes, checksum {entry.checksum}"


# -- as data and as text ------------------------------------------------------------------------------------------------


def sections_as_data(sections: list[DiffSection]) -> dict[str, Any]:
    """Return the same as plain data."""
    return {
        "equal": not any(section.apart for section in sections),
        "sections": [
            {"title": section.title, "tensors": section.compared, "differences": [_as_data(apart) for apart in section.apart]}
            for section in sections
        ],
    }


def _as_data(apart: ValueDifference) -> dict[str, Any]:
    found = {"place": apart.place, "one": apart.first, "other": apart.second}
    if apart.difference is None:
        return found
    largest = apart.difference.largest
    shown = largest if largest is None or largest < float("inf") else None  # JSON has no word for infinity
    return {**found, "changed": apart.difference.share, "largest_difference": shown, "nan": apart.difference.special}


def diff_lines(sections: list[DiffSection], *, everything: bool) -> Iterator[str]:
    """Yield the lines for a terminal, a summary at the end."""
    for section in sections:
        if not section.apart:
            continue
        tensors = f": {section.changed:,} of {format_count(section.compared, 'tensor')} changed" if section.compared else ""
        yield f"{escape_control(section.title)}{tensors}"
        shown = section.apart if everything else section.apart[:_SHOWN]
        yield from (f"  {_line(apart)}" for apart in shown)
        if len(shown) < len(section.apart):
            yield f"  ... and {format_count(len(section.apart) - len(shown), 'more difference')} (--all shows them)"
    total = sum(section.compared for section in sections)
    changed = sum(section.changed for section in sections)
    others = sum(len(section.apart) for section in sections) - changed
    if not changed and not others:
        yield f"The checkpoints are equal: {format_count(total, 'tensor')}, and every state."
    else:
        yield (
            f"The checkpoints differ: {changed:,} of {format_count(total, 'tensor')} changed, and "
            f"{format_count(others, 'other difference')}."
        )


def _line(apart: ValueDifference) -> str:
    place = escape_control(apart.place)
    if apart.first is None or apart.second is None:
        side, held = ("first", apart.first) if apart.second is None else ("second", apart.second)
        return f"{place}: only in the {side} ({shorten(held)})" if held is not None else f"{place}: in neither"
    if apart.difference is None:
        return f"{place}: {truncate(apart.first, 80)} -> {truncate(apart.second, 80)}"
    found = apart.difference
    largest = "" if found.largest is None else f", largest difference {found.largest:.6g}"
    return f"{place} {escape_control(apart.first)}: {100 * found.share:.3g} % changed{largest}{', NaN among them' if found.special else ''}"
