"""Weights put into a model: first it is found out whether they fit, then they are loaded by the model itself.

`check_fit` compares names, shapes and kinds of numbers with what the model has, and changes nothing. Names are matched as they are; what
is left over is matched without the parts that wrappers add ("module.", "_orig_mod."). Tied weights count as there if one of their names
is. A model that renames keys while it loads (hooks, or methods of its own) is asked by loading into a copy of it that has no memory.

`load_into` calls the model's own `load_state_dict`, so hooks run, and tensors keep their place in memory: optimizers go on using them.
Weights on the meta device get memory first. What was tied in the model is tied afterwards.
"""

from __future__ import annotations

import copy
import difflib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from slipstream.checkpoint.raw import DTYPES, identity, packed
from slipstream.checkpoint.shares import is_sharded
from slipstream.errors import CheckpointError
from slipstream.logging import get_logger

__all__ = [
    "METADATA",
    "LoadReport",
    "Place",
    "Placed",
    "arranged",
    "bare",
    "check_fit",
    "give_dtype",
    "load_into",
    "may_translate",
    "places_of",
    "put",
    "tied_names",
]

METADATA: Final = "_metadata"
"""Under this name the versions of a model's layers stand among what is no tensor."""
_SHOWN: Final = 10
_MOST_COMPARED: Final = 2000
_LONGEST: Final = 200

Place = tuple[torch.nn.Module, str]
"""A module, and the name of one of its tensors."""
Placed = tuple[torch.Tensor, list[tuple[str, Place]]]
"""A tensor, and all places where it stands, each with its full name."""


@dataclass(frozen=True)
class LoadReport:
    """How weights fit a model."""

    missing: tuple[str, ...] = ()
    """Names of the model that the weights have not."""
    unexpected: tuple[str, ...] = ()
    """Names of the weights that the model has not."""
    mismatched: Mapping[str, str] = field(default_factory=dict)
    """Names that both have, and why the one does not go into the other."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of the weights that a wrapper had changed, and the model's names for them."""

    def __bool__(self) -> bool:
        """Whether everything fits."""
        return not (self.missing or self.unexpected or self.mismatched)

    def demand(self, where: str, kind: str, *, strict: bool) -> None:
        """An error if they do not fit; without `strict`, missing and unexpected names are a warning.

        `where` (the file) and `kind` (the model's class) are for messages.
        """
        logger = get_logger(__name__)
        if self.renamed:
            old, new = next(iter(self.renamed.items()))
            logger.warning(
                f"{where}: {len(self.renamed)} names are those of a wrapped model ({old!r}); they are taken for its weights ({new!r})."
            )
        if self.mismatched or (strict and not self):
            raise CheckpointError(self.described(where, kind, strict=strict))
        if not self:
            logger.warning(self.described(where, kind, strict=strict))

    def described(self, where: str, kind: str, *, strict: bool) -> str:
        """The report in words: a few names of each kind, what they may have been meant to be, and what to do."""
        lines = [f"{where} does not fit the model {kind}:" if strict or self.mismatched else f"{where} fits the model {kind} in part:"]
        lines += _listed("the model has and the file has not", self.missing, self.unexpected)
        lines += _listed("the file has and the model has not", self.unexpected, self.missing)
        lines += _listed("do not fit", [f"{name} ({why})" for name, why in self.mismatched.items()], ())
        return "\n".join([*lines, f"  {self._remedy(strict)}"])

    def demand_values(self, model: torch.nn.Module, where: str) -> None:
        """An error if weights that the file has not are on the meta device: the model would compute with nothing.

        What modules that load in a way of their own make up (a counter that older files have not) is left to them.
        """
        if not self.missing or self.mismatched:
            return
        expected, modules = model.state_dict(), dict(model.named_modules())
        plain = torch.nn.Module._load_from_state_dict
        owners = {name: type(modules.get(name.rpartition(".")[0], model)) for name in self.missing}
        empty = [name for name, kind in owners.items() if kind._load_from_state_dict is plain and getattr(expected[name], "is_meta", False)]
        if not empty:
            return
        remedy = "Load a checkpoint that has them, or build the model outside of init_empty_weights: they keep their first values then."
        if self.unexpected:
            remedy = (
                "If it is of another library, which renames weights while it loads: load it there, write the model with save_model, and "
                "load what that has written."
            )
        lines = [f"{where} leaves weights of the model {type(model).__name__} without values, as they are on the meta device:"]
        lines += _listed("are not in the file", empty, self.unexpected)
        lines += _listed("are in the file and not in the model", self.unexpected, empty)
        raise CheckpointError("\n".join([*lines, f"  {remedy}"]))

    def _remedy(self, strict: bool) -> str:
        if self.mismatched:
            return "Build the model with the sizes with which it was saved, or take these entries out of the file."
        prefix = self.unexpected[0].partition(".")[0] if self.unexpected else ""
        of_wrapper = prefix in ("module", "_orig_mod", "model") and all(name.startswith(f"{prefix}.") for name in self.unexpected)
        if of_wrapper and not any(name.startswith(f"{prefix}.") for name in self.missing):
            return f"Did you save a wrapped model? All of these begin with {prefix!r}. Load into the model that was wrapped the same way."
        if strict:
            return "Build the model as it was when it was saved, or load what fits with strict=False."
        return "What the file has not keeps the values it had."


def _printable(name: str) -> str:
    """A name from a file as it may be shown: without what a terminal would obey, and not a page of it."""
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}... ({len(name):,} characters)"
    return shown if shown.isprintable() else ascii(shown)


def _listed(what: str, names: Iterable[str], others: Iterable[str]) -> Iterator[str]:
    found, others = [_printable(one) for one in names], map(_printable, others)
    if found:
        near = _near(found[:_SHOWN], list(others)[:_MOST_COMPARED])
        shown = ", ".join(f"{name} (near: {near[name]})" if name in near else name for name in found[:_SHOWN])
        yield f"  {len(found)} {what}: {shown}{f', and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''}"


def _near(names: list[str], others: list[str]) -> dict[str, str]:
    found = {name: difflib.get_close_matches(name, others, n=1, cutoff=0.75) for name in names}
    return {name: close[0] for name, close in found.items() if close}


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of the wrappers of data parallelism and compilation."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def check_fit(
    model: torch.nn.Module,
    given: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
    extra: Any = None,
    *,
    tied: Mapping[str, list[str]] | None = None,
) -> LoadReport:
    """How weights would fit, without a change to anything.

    `given` has a shape, or a tensor, for each name; `aliases` the other names of tied weights; `extra` the entries that are no tensors
    (None: not known, and then none of them is missed); `tied` what `tied_names` says of the model, where that is known.

    >>> check_fit(torch.nn.Linear(2, 3), {"weight": (3, 2), "scale": (1,)})
    LoadReport(missing=('bias',), unexpected=('scale',), mismatched={}, renamed={})
    """
    everything: dict[str, Any] = {
        name: value if isinstance(value, torch.Tensor) else _Form.of(value) for name, value in given.items()
    } | dict(extra or {})
    everything.pop(METADATA, None)
    everything |= {name: everything[kept] for name, kept in (aliases or {}).items() if kept in everything and name not in everything}
    expected = dict(model.state_dict())
    renamed = _renamed(everything, expected)
    held = {renamed.get(name, name): value for name, value in everything.items()}
    tied = tied_names(model) if tied is None else tied
    known = {name for name in expected if name in held or any(other in held for other in tied.get(name, ()))}
    missing = tuple(name for name in expected if name not in known and (extra is not None or _is_stored(expected[name])))
    report = LoadReport(
        missing,
        tuple(name for name in held if name not in expected),
        {name: why for name, value in held.items() if name in expected and (why := _misfit(value, expected[name]))},
        renamed,
    )
    return report if report or not may_translate(model) else _tried(model, held, report)


@dataclass(frozen=True)
class _Form:
    """What is known of a tensor in a file before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> _Form:
        return cls(tuple(value)) if isinstance(value, (tuple, list)) else cls(tuple(value.shape), value.dtype)


def _is_stored(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES


def _renamed(given: Iterable[str], expected: Mapping[str, Any]) -> dict[str, str]:
    """Names that are the model's but for the parts that wrappers add; only where that is certain."""
    given = list(given)
    left = [name for name in given if name not in expected]
    open_names: dict[str, list[str]] = {}
    for name in sorted(expected.keys() - set(given)):
        open_names.setdefault(_unwrapped(name), []).append(name)
    wanted = [(name, open_names.get(_unwrapped(name), [])) for name in left]
    found = {name: names[0] for name, names in wanted if len(names) == 1}
    return found if len(set(found.values())) == len(found) else {}


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _misfit(given: Any, expected: Any) -> str | None:
    if isinstance(expected, (UninitializedParameter, UninitializedBuffer)) or not isinstance(expected, torch.Tensor):
        return None
    if not isinstance(given, (torch.Tensor, _Form)):
        return f"a {type(given).__name__} in the file, a tensor in the model"
    shape, dtype = tuple(given.shape), given.dtype or expected.dtype
    if shape != tuple(expected.shape) and not (shape == (1,) and not expected.shape):
        return f"{list(shape)} in the file, {list(expected.shape)} in the model"
    loses = dtype.is_complex and not expected.is_complex()
    loses |= dtype.is_floating_point and not (expected.is_floating_point() or expected.is_complex())
    return f"{dtype} in the file, {expected.dtype} in the model" if loses else None


def may_translate(model: torch.nn.Module) -> bool:
    """Whether the model may change names while it loads."""
    own = (torch.nn.Module.load_state_dict, torch.nn.Module._load_from_state_dict)
    for module in model.modules():
        kind = type(module)
        if module._load_state_dict_pre_hooks or kind.load_state_dict is not own[0] or "load_state_dict" in vars(module):
            return True
        if kind._load_from_state_dict is not own[1] and not kind._load_from_state_dict.__module__.startswith("torch."):
            return True
    return False


def _tried(model: torch.nn.Module, held: Mapping[str, Any], report: LoadReport) -> LoadReport:
    """What a copy of the model without memory says of weights without memory; the report as it is where there can be none."""
    try:
        twin = _weightless(model)
        values = OrderedDict((name, _weightless_value(value)) for name, value in held.items())
        answer = twin.load_state_dict(values, strict=False)
    except Exception as error:  # code of the model, or an attribute that cannot be copied: what it cannot say, the comparison has said
        get_logger(__name__).debug(f"{type(model).__name__} cannot be loaded on trial: {error}")
        return report
    tied = tied_names(model)
    missing = [name for name in answer.missing_keys if not any(other in held for other in tied.get(name, ()))]
    return replace(report, missing=tuple(missing), unexpected=tuple(answer.unexpected_keys), mismatched={})


def _weightless(model: torch.nn.Module) -> Any:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _weightless_value(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, (torch.Tensor, _Form)) else value


def load_into(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    extra: Mapping[str, Any],
    *,
    strict: bool = True,
) -> LoadReport:
    """Loads weights; if they do not fit, an error before anything has changed. Without `strict`, what is missing keeps its value.

    >>> model = torch.nn.Linear(2, 1)
    >>> load_into(model, {"weight": torch.tensor([[1.0, 2.0]])}, {}, {}, strict=False).missing
    ('bias',)
    >>> model.weight.tolist()
    [[1.0, 2.0]]
    """
    kind = type(model).__name__
    report = check_fit(model, tensors, aliases, extra)
    if report.mismatched or (strict and not report):
        raise CheckpointError(report.described("What is to be loaded", kind, strict=strict))
    state = arranged(model, tensors, aliases, extra, report, strict=strict)
    places = places_of(model)
    _give_memory(places, state)
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{kind} refused to load: {error}. Its weights may be loaded in part.") from error
    _tie(places)
    return report


def arranged(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    extra: Mapping[str, Any],
    report: LoadReport,
    *,
    strict: bool,
    tied: Mapping[str, list[str]] | None = None,
) -> OrderedDict[str, Any]:
    """The state dict that the model gets: under its own names, tied ones under all of them. Nothing is loaded yet."""
    everything: dict[str, Any] = {**tensors, **extra}
    versions = everything.pop(METADATA, None)
    everything |= {name: everything[kept] for name, kept in aliases.items() if kept in everything and name not in everything}
    state: OrderedDict[str, Any] = OrderedDict((report.renamed.get(name, name), value) for name, value in everything.items())
    for name, others in (tied_names(model) if tied is None else tied).items():
        there = [other for other in others if other in state]
        if name not in state and there:
            state[name] = state[there[0]]
        elif name in state:
            _agree(state, name, there, strict=strict)
    if isinstance(versions, Mapping):  # only those that are not 1 were stored
        state._metadata = {path: {"version": 1} for path, _ in model.named_modules()} | dict(versions)  # type: ignore[attr-defined]
    return state


def _agree(state: OrderedDict[str, Any], name: str, others: list[str], *, strict: bool) -> None:
    """Names of one weight have one value; where the file has two, the first of them counts, and it is said."""
    for other in others:
        one, two = state[name], state[other]
        if one is two or _same(one, two):
            continue
        problem = f"{name} and {other} are one weight in this model, and the file has two different values for them"
        if strict:
            raise CheckpointError(f"{problem}. Build a model in which they are not tied, or load with strict=False.")
        get_logger(__name__).warning(f"{problem}: that of {name} is taken.")
        state[other] = one


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether they have the same bits, as far as this rank holds them: nan equals nan here."""
    if is_sharded(one) and is_sharded(two):
        return tuple(one.shape) == tuple(two.shape) and _same(one.to_local(), two.to_local())  # type: ignore[attr-defined]
    if one.dtype != two.dtype or one.shape != two.shape or not one.numel():
        return one.dtype == two.dtype and one.shape == two.shape
    return identity(one) == identity(two) or torch.equal(packed(one), packed(two))


def places_of(model: torch.nn.Module) -> list[Placed]:
    """Every parameter and buffer with all places where it stands: more than one if it is tied."""
    found: dict[int, Placed] = {}
    waiting = [("", model)]
    while waiting:  # in the order of named_modules, whose generators inside of generators take three times as long
        path, module = waiting.pop()
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((path + name, (module, name)))
        waiting += [(f"{path}{name}.", child) for name, child in reversed(module._modules.items()) if child is not None]
    return list(found.values())


def tied_names(model: torch.nn.Module, places: Iterable[Placed] | None = None) -> dict[str, list[str]]:
    """The other names of every weight that has several, in the order of the model; `places` are those of `places_of`, where known."""
    groups: dict[Any, list[str]] = {}
    for tensor, where in places_of(model) if places is None else places:
        groups.setdefault(identity(tensor), []).extend([name for name, _ in where])
    return {name: [other for other in group if other != name] for group in groups.values() if len(group) > 1 for name in group}


def give_dtype(model: torch.nn.Module, names: Collection[str], dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    """Floating point weights of these names become `dtype`; in modules whose names are in `keep`, float32. They stay the same objects."""
    for tensor, where in places_of(model):
        if tensor.is_floating_point() and any(name in names for name, _ in where):
            kept = any(f".{one}." in f".{name}." for name, _ in where for one in keep)
            tensor.data = tensor.data.to(torch.float32 if kept else dtype)


def _give_memory(places: list[Placed], state: Mapping[str, Any]) -> None:
    """Weights without memory that are about to be loaded get some; tied ones stay one."""
    for tensor, where in places:
        if tensor.is_meta and any(name in state for name, _ in where):
            with torch.inference_mode(False):  # weights of that mode could not be used outside of it
                empty = torch.empty_like(tensor, device="cpu")
                made = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
            for _, place in where:
                put(place, made)


def _tie(places: list[Placed]) -> None:
    """What was one weight before is one again, also where loading has replaced it."""
    for _, where in places:
        if len(where) > 1:
            first = _get(where[0][1])
            for _, place in where[1:]:
                if _get(place) is not first and first is not None:
                    put(place, first)


def _get(place: Place) -> torch.Tensor | None:
    module, name = place
    return module._parameters.get(name, module._buffers.get(name))


def put(place: Place, tensor: torch.Tensor) -> None:
    """Makes a tensor the one that stands in this place."""
    module, name = place
    if isinstance(tensor, torch.nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._buffers[name] = tensor
