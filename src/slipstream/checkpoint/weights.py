"""The weights of a model: split them into safetensors files, compare them with a model, and load them.

`split_state_dict` separates tensors, aliases of tied tensors (stored once) and other values; `plan_shards` assigns tensors to files and
`index_bytes` encodes the index. `check_fit` compares names, shapes and dtypes with the model and changes nothing; it ignores prefixes of
wrappers ("module.", "_orig_mod.") where needed, and tries a model that renames keys on a meta copy. `load_into` calls the model's own
`load_state_dict`, so hooks run and tensors keep their memory; meta tensors are allocated first, and tied weights stay tied. Nothing here
opens a file.
"""

from __future__ import annotations

import copy
import difflib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from slipstream.checkpoint.sharded import is_sharded
from slipstream.checkpoint.tensor_bytes import (
    DTYPES,
    EncodedFile,
    TensorReader,
    encode_tensors,
    is_utf8,
    memory_identity,
    pack_bytes,
    read_own_bytes,
    require_storable,
)  # fmt: skip
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.safetensors_layout import file_order_key
from slipstream.logging import get_logger

__all__ = [
    "LoadReport", "METADATA", "TensorSlot", "TensorSlots", "Weights", "all_modules", "arrange_state_dict", "unwrap_module",
    "cast_weights", "check_fit", "index_bytes", "load_into", "may_rename_keys", "plan_shards", "set_tensor", "shard_names",
    "split_sharded_state_dict", "split_state_dict", "tensor_slots", "tied_names", "write_weights",
]


METADATA: Final = "_metadata"
"""The key of the layer versions among the values that are not tensors."""
_SHOWN: Final = 10
_MOST_NAMES_COMPARED: Final = 2000
_LONGEST: Final = 200

TensorSlot = tuple[torch.nn.Module, str]
"""A module and the name of one of its tensors."""
TensorSlots = tuple[torch.Tensor, list[tuple[str, TensorSlot]]]
"""A tensor and all its slots, each with its full name."""


@dataclass(frozen=True)
class LoadReport:
    """How weights fit a model."""

    missing: tuple[str, ...] = ()
    """Names of the model that are not in the weights."""
    unexpected: tuple[str, ...] = ()
    """Names of the weights that are not in the model."""
    mismatched: Mapping[str, str] = field(default_factory=dict)
    """Names in both that differ in shape or dtype, and how."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names with the prefix of a wrapper, and the model's names for them."""

    def __bool__(self) -> bool:
        """Whether everything fits."""
        return not (self.missing or self.unexpected or self.mismatched)

    def demand(self, where: str, kind: str, *, strict: bool) -> None:
        """Raise if the weights do not fit; without `strict`, missing and unexpected names are only a warning.

        `where` (the file) and `kind` (the model's class) are for messages.
        """
        if self.renamed:
            old, new = next(iter(self.renamed.items()))
            get_logger(__name__).warning(
                f"{where}: {len(self.renamed)} names have the prefix of a wrapper ({old!r}) and are loaded as {new!r}."
            )
        if self.mismatched or (strict and not self):
            raise CheckpointError(self.described(where, kind, strict=strict))
        if not self:
            get_logger(__name__).warning(self.described(where, kind, strict=strict))

    def described(self, where: str, kind: str, *, strict: bool) -> str:
        """Return the report as text: a few names of each kind, similar names, and what to do."""
        lines = [f"{where} does not fit the model {kind}:" if strict or self.mismatched else f"{where} fits the model {kind} in part:"]
        lines += _listed("are missing in the file", self.missing, self.unexpected)
        lines += _listed("are not in the model", self.unexpected, self.missing)
        lines += _listed("do not fit", [f"{name} ({why})" for name, why in self.mismatched.items()], ())
        return "\n".join([*lines, f"  {self._remedy(strict)}"])

    def demand_values(self, model: torch.nn.Module, where: str) -> None:
        """Raise if missing weights are on the meta device: the model would have no values for them.

        Modules with their own loading code may create missing entries (a counter that older files lack), so they are not checked.
        """
        if not self.missing or self.mismatched:
            return
        expected, modules = model.state_dict(), dict(model.named_modules())
        # torch internals: as in `may_rename_keys`.
        plain = torch.nn.Module._load_from_state_dict
        owners = {name: type(modules.get(name.rpartition(".")[0], model)) for name in self.missing}
        empty = [name for name, kind in owners.items() if kind._load_from_state_dict is plain and getattr(expected[name], "is_meta", False)]
        if not empty:
            return
        remedy = "Load a checkpoint that has them, or build the model outside init_empty_weights, so that they keep their initial values."
        if self.unexpected:
            remedy = (
                "If another library wrote it and renames weights while loading: load it there, save the model with save_model, and load "
                "that."
            )
        lines = [f"{where} leaves weights of the model {type(model).__name__} on the meta device, without values:"]
        lines += _listed("are missing in the file", empty, self.unexpected)
        lines += _listed("are not in the model", self.unexpected, empty)
        raise CheckpointError("\n".join([*lines, f"  {remedy}"]))

    def _remedy(self, strict: bool) -> str:
        if self.mismatched:
            return "Build the model with the sizes that it was saved with, or remove these entries from the file."
        prefix = self.unexpected[0].partition(".")[0] if self.unexpected else ""
        of_wrapper = prefix in ("module", "_orig_mod", "model") and all(name.startswith(f"{prefix}.") for name in self.unexpected)
        if of_wrapper and not any(name.startswith(f"{prefix}.") for name in self.missing):
            return f"Did you save a wrapped model? All of these begin with {prefix!r}. Load into the model that was wrapped the same way."
        if strict:
            return "Build the model as it was when it was saved, or load what fits with strict=False."
        return "Missing weights keep their values."


def _printable(name: str) -> str:
    """Return a name from a file for messages: without control characters, and of limited length."""
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}... ({len(name):,} characters)"
    return shown if shown.isprintable() else ascii(shown)


def _listed(what: str, names: Iterable[str], others: Iterable[str]) -> Iterator[str]:
    found, others = [_printable(name) for name in names], map(_printable, others)
    if found:
        near = _closest_names(found[:_SHOWN], list(others)[:_MOST_NAMES_COMPARED])
        shown = ", ".join(f"{name} (near: {near[name]})" if name in near else name for name in found[:_SHOWN])
        yield f"  {len(found)} {what}: {shown}{f', and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''}"


def _closest_names(names: list[str], others: list[str]) -> dict[str, str]:
    found = {name: difflib.get_close_matches(name, others, n=1, cutoff=0.75) for name in names}
    return {name: close[0] for name, close in found.items() if close}


def unwrap_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers of data parallelism and compilation."""
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
    """Return how weights would fit, without changing anything.

    `given` has a shape or a tensor for each name; `aliases` are the other names of tied weights; `extra` the entries that are not tensors
    (None: unknown, and then none is reported as missing); `tied` is the result of `tied_names`, if it is known.

    >>> check_fit(torch.nn.Linear(2, 3), {"weight": (3, 2), "scale": (1,)})
    LoadReport(missing=('bias',), unexpected=('scale',), mismatched={}, renamed={})
    """
    everything: dict[str, Any] = {
        name: value if isinstance(value, torch.Tensor) else _TensorForm.of(value) for name, value in given.items()
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
    return report if report or not may_rename_keys(model) else _try_on_meta(model, held, report)


@dataclass(frozen=True)
class _TensorForm:
    """Shape and dtype of a tensor that was not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> _TensorForm:
        return cls(tuple(value)) if isinstance(value, (tuple, list)) else cls(tuple(value.shape), value.dtype)


def _is_stored(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in DTYPES


def _renamed(given: Iterable[str], expected: Mapping[str, Any]) -> dict[str, str]:
    """Return names that equal the model's without the prefixes of wrappers, where that is unambiguous."""
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
    if not isinstance(given, (torch.Tensor, _TensorForm)):
        return f"a {type(given).__name__} in the file, a tensor in the model"
    if given.shape == expected.shape and given.dtype is expected.dtype:
        return None
    shape, dtype = tuple(given.shape), given.dtype or expected.dtype
    if shape != tuple(expected.shape) and not (shape == (1,) and not expected.shape):
        return f"{list(shape)} in the file, {list(expected.shape)} in the model"
    loses = dtype.is_complex and not expected.is_complex()
    loses |= dtype.is_floating_point and not (expected.is_floating_point() or expected.is_complex())
    return f"{dtype} in the file, {expected.dtype} in the model" if loses else None


def may_rename_keys(model: torch.nn.Module) -> bool:
    """Whether the model may rename keys while it loads."""
    # torch internals: only these methods and hooks show whether a module has its own loading code (torch 2.13).
    # tests/checkpoint/test_weights.py notices; it can go when torch tells which names a module accepts.
    own = (torch.nn.Module.load_state_dict, torch.nn.Module._load_from_state_dict)
    for module in all_modules(model).values():
        kind = type(module)
        if module._load_state_dict_pre_hooks or kind.load_state_dict is not own[0] or "load_state_dict" in vars(module):
            return True
        if kind._load_from_state_dict is not own[1] and not kind._load_from_state_dict.__module__.startswith("torch."):
            return True
    return False


def _try_on_meta(model: torch.nn.Module, held: Mapping[str, Any], report: LoadReport) -> LoadReport:
    """Return the report of loading meta tensors into a meta copy of the model, or the given report if that fails."""
    try:
        meta_copy = _meta_copy(model)
        values = OrderedDict((name, _meta_value(value)) for name, value in held.items())
        answer = meta_copy.load_state_dict(values, strict=False)
    except Exception as error:  # code of the model, or an attribute that cannot be copied
        get_logger(__name__).debug(f"{type(model).__name__} cannot be tried on the meta device: {error}")
        return report
    tied = tied_names(model)
    missing = [name for name in answer.missing_keys if not any(other in held for other in tied.get(name, ()))]
    return replace(report, missing=tuple(missing), unexpected=tuple(answer.unexpected_keys), mismatched={})


def _meta_copy(model: torch.nn.Module) -> Any:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _meta_value(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, (torch.Tensor, _TensorForm)) else value


def load_into(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    extra: Mapping[str, Any],
    *,
    strict: bool = True,
) -> LoadReport:
    """Load weights; if they do not fit, raise before anything changes. Without `strict`, missing weights keep their values.

    >>> model = torch.nn.Linear(2, 1)
    >>> load_into(model, {"weight": torch.tensor([[1.0, 2.0]])}, {}, {}, strict=False).missing
    ('bias',)
    >>> model.weight.tolist()
    [[1.0, 2.0]]
    """
    kind = type(model).__name__
    report = check_fit(model, tensors, aliases, extra)
    if report.mismatched or (strict and not report):
        raise CheckpointError(report.described("The state dict", kind, strict=strict))
    state = arrange_state_dict(model, tensors, aliases, extra, report, strict=strict)
    places = tensor_slots(model)
    _allocate_meta(places, state)
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{kind} failed to load: {error}. Its weights may be partly loaded.") from error
    _retie(places)
    return report


def arrange_state_dict(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    extra: Mapping[str, Any],
    report: LoadReport,
    *,
    strict: bool,
    tied: Mapping[str, list[str]] | None = None,
) -> OrderedDict[str, Any]:
    """Return the state dict for the model: under its names, tied weights under all of theirs. Nothing is loaded yet."""
    everything: dict[str, Any] = {**tensors, **extra}
    versions = everything.pop(METADATA, None)
    everything |= {name: everything[kept] for name, kept in aliases.items() if kept in everything and name not in everything}
    state: OrderedDict[str, Any] = OrderedDict((report.renamed.get(name, name), value) for name, value in everything.items())
    for name, others in (tied_names(model) if tied is None else tied).items():
        there = [other for other in others if other in state]
        if name not in state and there:
            state[name] = state[there[0]]
        elif name in state:
            _require_equal_aliases(state, name, there, strict=strict)
    if isinstance(versions, Mapping):  # version 1 is not stored
        state._metadata = {path: {"version": 1} for path, _ in model.named_modules()} | dict(versions)  # type: ignore[attr-defined]
    return state


def _require_equal_aliases(state: OrderedDict[str, Any], name: str, others: list[str], *, strict: bool) -> None:
    """Raise if the file has different values for a tied weight; without `strict`, warn and use the first."""
    for other in others:
        value, other_value = state[name], state[other]
        if value is other_value or _same(value, other_value):
            continue
        problem = f"{name} and {other} are tied in this model, and the file has different values for them"
        if strict:
            raise CheckpointError(f"{problem}. Build a model in which they are not tied, or load with strict=False.")
        get_logger(__name__).warning(f"{problem}: that of {name} is used.")
        state[other] = value


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits on this rank; nan equals nan."""
    if is_sharded(tensor) and is_sharded(other):
        return tuple(tensor.shape) == tuple(other.shape) and _same(tensor.to_local(), other.to_local())  # type: ignore[attr-defined]
    if tensor.dtype != other.dtype or tensor.shape != other.shape or not tensor.numel():
        return tensor.dtype == other.dtype and tensor.shape == other.shape
    return memory_identity(tensor) == memory_identity(other) or torch.equal(pack_bytes(tensor), pack_bytes(other))


def all_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return a module and all below it, by name: those of `named_modules(remove_duplicate=False)`, in half of its time.

    >>> list(all_modules(torch.nn.Sequential(torch.nn.Linear(1, 1))))
    ['', '0']
    """
    found: dict[str, torch.nn.Module] = {}

    def add(name: str, module: torch.nn.Module) -> None:
        found[name] = module
        for key, child in module._modules.items():
            if child is not None:
                add(f"{name}.{key}" if name else key, child)

    add("", model)
    return found


def tensor_slots(model: torch.nn.Module) -> list[TensorSlots]:
    """Return every parameter and buffer with all its slots: more than one if it is tied."""
    found: dict[int, TensorSlots] = {}
    waiting = [("", model)]
    while waiting:  # in the order of named_modules, whose nested generators take three times as long
        path, module = waiting.pop()
        # torch internals: `named_parameters` omits the second slot of a tied tensor unless asked, and is slower (torch 2.13).
        # tests/checkpoint/test_weights.py notices; it can go when `named_parameters(remove_duplicate=False)` is as fast.
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((path + name, (module, name)))
        waiting += [(f"{path}{name}.", child) for name, child in reversed(module._modules.items()) if child is not None]
    return list(found.values())


def tied_names(model: torch.nn.Module, places: Iterable[TensorSlots] | None = None) -> dict[str, list[str]]:
    """Return the other names of every tied weight, in the order of the model; `places` is the result of `tensor_slots`, if known."""
    groups: dict[Any, list[str]] = {}
    for tensor, where in tensor_slots(model) if places is None else places:
        groups.setdefault(memory_identity(tensor), []).extend([name for name, _ in where])
    return {name: [other for other in group if other != name] for group in groups.values() if len(group) > 1 for name in group}


def cast_weights(model: torch.nn.Module, names: Collection[str], dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    """Cast floating-point weights of these names to `dtype`, in place; those in modules named in `keep` to float32."""
    for tensor, where in tensor_slots(model):
        if tensor.is_floating_point() and any(name in names for name, _ in where):
            kept = any(f".{entry}." in f".{name}." for name, _ in where for entry in keep)
            tensor.data = tensor.data.to(torch.float32 if kept else dtype)


def _allocate_meta(places: list[TensorSlots], state: Mapping[str, Any]) -> None:
    """Allocate meta weights that will be loaded; tied ones stay tied."""
    for tensor, where in places:
        if tensor.is_meta and any(name in state for name, _ in where):
            with torch.inference_mode(False):  # inference tensors could not be trained
                empty = torch.empty_like(tensor, device="cpu")
                made = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
            for _, place in where:
                set_tensor(place, made)


def _retie(places: list[TensorSlots]) -> None:
    """Tie weights again that loading has replaced."""
    for _, where in places:
        if len(where) > 1:
            first = _get(where[0][1])
            for _, place in where[1:]:
                if _get(place) is not first and first is not None:
                    set_tensor(place, first)


def _get(place: TensorSlot) -> torch.Tensor | None:
    module, name = place
    return module._parameters.get(name, module._buffers.get(name))


def set_tensor(place: TensorSlot, tensor: torch.Tensor) -> None:
    """Put a tensor into a slot."""
    module, name = place
    if isinstance(tensor, torch.nn.Parameter):
        module._parameters[name] = tensor
    else:
        module._buffers[name] = tensor


@dataclass(frozen=True)
class Weights:
    """A state dict split into tensors, aliases and other values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Aliases of tied weights, and the name under which each is stored."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values that are not tensors, tensors of dtypes that safetensors does not have, and layer versions other than 1."""


def split_state_dict(state_dict: Mapping[str, Any], where: str) -> Weights:
    """Split a state dict; the tensors are those of the model, not copies. `where` begins the messages.

    >>> shared = torch.ones(2)
    >>> split_state_dict({"embed": shared, "head": shared, "step": 3}, "the weights")
    Weights(tensors={'embed': tensor([1., 1.])}, aliases={'head': 'embed'}, extra={'step': 3})
    """
    weights = Weights()
    stored: dict[Any, str] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str) or name == "__metadata__" or not is_utf8(name):
            raise CheckpointError(f"{where} have the name {name!r}, which a weight file cannot store. Rename the weight.")
        if not isinstance(value, torch.Tensor):
            weights.extra[name] = value
            continue
        tensor = require_storable(value, f"{name!r} of {where}").detach()
        if tensor.dtype not in DTYPES:
            weights.extra[name] = tensor
            continue
        kept = stored.setdefault(memory_identity(value), name)
        if kept == name:
            weights.tensors[name] = tensor
        else:
            weights.aliases[name] = kept
    versions = getattr(state_dict, METADATA, None)
    if isinstance(versions, Mapping) and METADATA not in state_dict:
        changed = {path: dict(entry) for path, entry in versions.items() if entry and dict(entry) != {"version": 1}}
        weights.extra.update({METADATA: changed} if changed else {})
    return weights


def split_sharded_state_dict(model: torch.nn.Module, state_dict: Mapping[str, Any], where: str) -> Weights:
    """Return a state dict taken apart, with sharded tensors as they are; every rank gets the same names.

    A rank that holds no element of a tensor cannot see by its memory that it is tied, so that is known by its places in the model.
    """
    tied, order = tied_names(model), {name: place for place, name in enumerate(state_dict)}
    sharded = {name: value for name, value in state_dict.items() if is_sharded(value)}
    rest = copy.copy(state_dict)  # with its attributes, such as the versions of layers
    for name in sharded:
        del rest[name]  # type: ignore[attr-defined]
    weights = split_state_dict(rest, where)
    tensors: dict[str, Any] = dict(weights.tensors)
    for name, value in sharded.items():
        kept = min((name, *tied.get(name, ())), key=lambda other: order.get(other, len(order)))
        if kept == name:
            tensors[name] = value
        else:
            weights.aliases[name] = kept
    return replace(weights, tensors={name: tensors[name] for name in order if name in tensors})


def plan_shards(tensors: Mapping[str, torch.Tensor], max_shard_size: int | None, frozen: Collection[str] = frozenset()) -> list[list[str]]:
    """Return the names of the tensors in each file: at most `max_shard_size` bytes, unless a single tensor has more.

    Those in `frozen` get separate files, which do not change from save to save. In each file they are ordered by `file_order_key`.

    >>> plan_shards({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}, 32)
    [['a', 'b'], ['c']]
    """
    files: list[list[str]] = []
    for part in ([name for name in tensors if name in frozen], [name for name in tensors if name not in frozen]):
        taken = 0
        for position, name in enumerate(part):
            size = tensors[name].nbytes
            if position == 0 or (max_shard_size is not None and taken + size > max_shard_size and taken):
                files.append([])
                taken = 0
            files[-1].append(name)
            taken += size
    return [sorted(names, key=lambda name: file_order_key(tensors[name].nbytes, tensors[name].element_size())) for names in files] or [[]]


def shard_names(base: str, count: int, suffix: str = "safetensors") -> list[str]:
    """Return the names of the files.

    >>> shard_names("model", 1), shard_names("model", 2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1:
        return [f"{base}.{suffix}"]
    return [f"{base}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def index_bytes(files: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the index of weight files: the file of each name."""
    where = {name: file for file, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return strict_json.dump_lines({"metadata": {"total_size": total}, "weight_map": {name: where[name] for name in tensors}})


def write_weights(
    add: Callable[[str, Callable[[], EncodedFile]], object],
    base: str,
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    max_shard_size: int | None = None,
    frozen: Collection[str] = frozenset(),
    read: TensorReader = read_own_bytes,
) -> tuple[list[str], str | None]:
    """Write tensors through `add(name, encode)`, the index last; return the names of the files, and of the index if there are several.

    Aliases of tied weights are in the metadata of the file. `read` returns the bytes of a tensor, where they are not its memory.
    """
    groups = plan_shards(tensors, max_shard_size, frozen)
    names = shard_names(base, len(groups))
    for name, group in zip(names, groups, strict=True):
        tied = {other: kept for other, kept in aliases.items() if kept in group and other != "format"}
        add(name, partial(encode_tensors, {key: tensors[key] for key in group}, tied, read))
    if len(names) == 1:
        return names, None
    index, data = f"{base}.safetensors.index.json", index_bytes(dict(zip(names, groups, strict=True)), tensors)
    add(index, lambda: ([data], len(data)))
    return names, index
