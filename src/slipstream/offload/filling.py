"""Weights from files put into a model by a device map: each tensor once, where it belongs, and in as few copies as there can be.

What stays in main memory becomes the mapped pages of its file (nothing is read; changes stay in this process), what goes to an
accelerator is copied there, and what goes to the disk stays in the file that the user has: an index says where. Only what the file does
not have in the right type, or in safetensors, is written to an offload folder. Everything is decided before the model changes.

Mapped weights begin where the file has them, not at the multiples of 64 bytes at which torch's own tensors begin. In files of `save_model`
and `save_state` all do whose size allows it (`files/tensors.py`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from slipstream.checkpoint.fit import (
    METADATA,
    LoadReport,
    Place,
    Placed,
    arranged,
    check_fit,
    may_translate,
    places_of,
    put,
    tied_names,
)
from slipstream.checkpoint.raw import dtype_name, identity
from slipstream.checkpoint.shares import is_sharded
from slipstream.checkpoint.sources import File, Source
from slipstream.devices.memory import convert_bytes
from slipstream.errors import CheckpointError, ConfigError
from slipstream.logging import get_logger
from slipstream.offload.hooking.parts import dressed_like
from slipstream.offload.store.written import Entry, Value, entry, write
from slipstream.offload.targets import HOST, Targets
from slipstream.runtime.progress import bar

__all__ = ["Filling", "Wishes", "fill"]

_LARGEST_FILE: Final = 1 << 30


@dataclass(frozen=True)
class Wishes:
    """What the caller wants of the weights."""

    dtype: torch.dtype | None = None
    keep: tuple[str, ...] = ()
    """Names of modules whose weights stay float32."""
    offload_buffers: bool = False
    strict: bool = False
    folder: Path | None = None
    """Where weights for the disk are written, if the files of the checkpoint cannot be used as they are."""

    def dtype_of(self, names: Iterable[str], held: torch.Tensor, value: torch.Tensor) -> torch.dtype:
        """The type that a tensor is to have: that of the model, if nothing else was said."""
        if self.dtype is None or not (value.is_floating_point() and held.is_floating_point()):
            return held.dtype
        kept = any(f".{one}." in f".{name}." for name in names for one in self.keep)
        return torch.float32 if kept else self.dtype


@dataclass(frozen=True)
class Filling:
    """What came of it."""

    report: LoadReport
    index: dict[str, Entry] = field(default_factory=dict)
    """Where the weights are that are on the disk; files are named by their whole paths."""
    written: dict[str, Entry] = field(default_factory=dict)
    """Those of them that were written to the folder, with names of files within it."""


class _Origin(NamedTuple):
    file: File
    name: str


class _Step(NamedTuple):
    held: torch.Tensor
    names: list[str]
    places: list[Place]
    value: torch.Tensor
    dtype: torch.dtype
    target: torch.device | None
    origin: _Origin | None
    again: bool
    """The value is that of another weight too, to which this one is not tied."""

    @property
    def is_copied(self) -> bool:
        return self.target is not None and (self.again or self.dtype is not self.value.dtype or self.target != self.value.device)

    @property
    def is_written(self) -> bool:
        """For the disk, and not there as it is wanted."""
        if self.target is not None:
            return False
        return self.origin is None or self.origin.file.layout is None or self.dtype is not self.value.dtype or self._is_reshaped

    @property
    def _is_reshaped(self) -> bool:
        return self.value.shape != self.held.shape


@torch.inference_mode(False)  # weights of that mode could not be used outside of it
def fill(model: torch.nn.Module, source: Source, where: str, targets: Targets, wishes: Wishes) -> Filling:
    """Loads the weights of `source`; `where` names it in messages. If there is an error, the model has not changed."""
    files = _opened(source, where)
    aliases = {**source.aliases, **{other: kept for file in files for other, kept in file.aliases.items()}}
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    extra = source.read_extra()
    places = places_of(model)
    _check_undivided(places)
    tied = tied_names(model, places)
    report = check_fit(model, tensors, aliases, extra, tied=tied)
    report.demand_values(model, where)
    report.demand(where, type(model).__name__, strict=wishes.strict)
    state: Mapping[str, Any] = arranged(model, tensors, aliases, extra, report, strict=wishes.strict, tied=tied)
    known: Callable[[torch.Tensor], Any] = id
    if _must_ask(model, report, extra):
        state, known = _asked(model, state, places), identity
    origins = {known(tensors[name]): _Origin(file, name) for file in files for name in file.tensors}
    steps = [*_steps(places, state, targets, wishes, lambda value: origins.get(known(value)))]
    to_write = [step for step in steps if step.is_written]
    if to_write and wishes.folder is None:
        raise ConfigError(_needs_folder(to_write[0], len(to_write), where))
    _tell_conversions(steps, where, wishes)
    with _progress(steps) as done, torch.no_grad():
        written = _written(to_write, wishes.folder, done) if to_write and wishes.folder else {}
        index = {name: _entry_of(step, written, wishes) for step in steps if step.target is None for name in step.names}
        for step in steps:
            _settle(step)
            if step.is_copied:
                _let_go(step)
                done(step.value.nbytes)
    return Filling(report, index, written)


def _opened(source: Source, where: str) -> list[File]:
    """All files, mapped. Sizes and headers are checked; checksums are not, as that would read everything."""
    files = [source.open(name, verify=False) for name in source.files]
    homes: dict[str, str] = {}
    for name, file in zip(source.files, files, strict=True):
        for one in file.tensors:
            if homes.setdefault(one, name) != name:
                raise CheckpointError(f"{where} has {one!r} in two files, {homes[one]} and {name}. Save it again, or remove one of them.")
    return files


def _check_undivided(places: Iterable[Placed]) -> None:
    if divided := next((where for held, where in places if is_sharded(held)), None):
        raise ConfigError(f"device_map cannot place {divided[0][0]}: it is divided over processes already. Load it without device_map.")


def _must_ask(model: torch.nn.Module, report: LoadReport, extra: Mapping[str, Any]) -> bool:
    """Whether only the model itself knows what becomes of the weights: it renames them, keeps other state, or makes up what is missing."""
    if may_translate(model) or extra.keys() - {METADATA}:
        return True
    plain = torch.nn.Module._load_from_state_dict
    owners = {name.rpartition(".")[0] for name in report.missing}
    return any(type(model.get_submodule(owner))._load_from_state_dict is not plain for owner in owners)


def _asked(model: torch.nn.Module, state: Mapping[str, Any], places: Sequence[Placed]) -> dict[str, Any]:
    """The weights as the model itself places them, under the names that they have in it; the model keeps what it has for now."""
    found: dict[str, Any] = {}
    try:
        model.load_state_dict(state, strict=False, assign=True)
        for held, where in places:
            for name, (module, key) in where:
                now = module._parameters.get(key, module._buffers.get(key))
                if now is not None and now is not held:
                    found[name] = now.detach()
    except (RuntimeError, TypeError) as error:  # a load_state_dict of its own may not know `assign`
        raise CheckpointError(
            f"{type(model).__name__} refused to load: {error}. Load it without device_map, and give it to dispatch_model then."
        ) from error
    finally:
        for held, where in places:
            for _, place in where:
                put(place, held)
    return found


def _steps(
    places: Iterable[Placed],
    state: Mapping[str, Any],
    targets: Targets,
    wishes: Wishes,
    origin_of: Callable[[torch.Tensor], _Origin | None],
) -> Iterator[_Step]:
    taken: dict[Any, Any] = {}
    for held, where in places:
        names = [name for name, _ in where]
        value = next((state[name] for name in names if name in state), None)
        if not isinstance(value, torch.Tensor):
            continue
        target = _target(held, where, targets, wishes.offload_buffers)
        dtype = wishes.dtype_of(names, held, value)
        weight = identity(held)
        again = taken.setdefault(identity(value), weight) != weight
        yield _Step(held, names, [place for _, place in where], value, dtype, target, origin_of(value), again)


def _target(held: torch.Tensor, where: Sequence[tuple[str, Place]], targets: Targets, offload_buffers: bool) -> torch.device | None:
    """A tied weight that one of its modules keeps in memory is there for all of them; buffers are in memory unless they are offloaded."""
    found = None
    for name, _ in where:
        if not targets.is_away(name):
            return targets[name]
        found = found or targets[name]
    if found is None and not isinstance(held, torch.nn.Parameter):
        saved = all(key not in module._non_persistent_buffers_set for _, (module, key) in where)
        return None if offload_buffers and saved else HOST
    return found


def _settle(step: _Step) -> None:
    if step.target is None:
        if not step.held.is_meta or step.held.dtype is not step.dtype:
            _replace(step, torch.empty(step.held.shape, dtype=step.dtype, device="meta"))
        return
    value = step.value
    if step.is_copied:
        value = value.to(step.target, step.dtype, copy=True)
    if value.shape != step.held.shape:
        value = value.reshape(step.held.shape)
    plain = type(step.held) in (torch.Tensor, torch.nn.Parameter) and not step.held.is_inference()
    if plain and step.held.device == value.device:
        step.held.data = value  # the same object, so whoever holds it has the weights too
    else:
        _replace(step, value)


def _replace(step: _Step, value: torch.Tensor) -> None:
    held = step.held
    if type(held) is torch.nn.Parameter and not held.__dict__:  # the usual case of what follows
        made: torch.Tensor = torch.nn.Parameter(value, held.requires_grad)
    else:
        made = dressed_like(held, value)
    for place in step.places:
        put(place, made)


def _let_go(step: _Step) -> None:
    """The pages that a copy was made from need not stay in memory."""
    layout = step.origin.file.layout if step.origin else None
    if step.origin is None or layout is None or not isinstance(step.origin.file.buffer, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    one = layout.entries[step.origin.name]
    start = -(-(layout.data_start + one.start) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (layout.data_start + one.end) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        step.origin.file.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)


# --- what the disk gets -----------------------------------------------------------------------------------------------------


def _written(steps: Sequence[_Step], folder: Path, done: Callable[[int], object]) -> dict[str, Entry]:
    total = sum(step.value.numel() * step.dtype.itemsize for step in steps)
    get_logger(__name__).warning(f"{len(steps)} tensors ({convert_bytes(total)}) are written to {folder}: {_why(steps[0])}.")
    files: list[dict[str, Value]] = []
    room = 0
    for step in steps:
        size = step.value.numel() * step.dtype.itemsize
        if size > room:
            files.append({})
            room = max(_LARGEST_FILE, size)
        files[-1][step.names[0]] = Value(step.value.reshape(step.held.shape), step.dtype)
        room -= size
    by_name = {step.names[0]: step for step in steps}

    def finished(name: str, size: int) -> None:
        _let_go(by_name[name])
        done(size)

    return write(folder, files, done=finished, argument="offload_folder")


def _entry_of(step: _Step, written: Mapping[str, Entry], wishes: Wishes) -> Entry:
    if step.is_written:
        assert wishes.folder is not None
        found = written[step.names[0]]
        return {**found, "safetensors_file": str(wishes.folder.absolute() / found["safetensors_file"])}
    assert step.origin is not None
    return entry(str(Path(step.origin.file.where).absolute()), step.origin.name, step.dtype, step.value.shape)


def _why(step: _Step) -> str:
    if step.dtype is not step.value.dtype:
        return f"{step.names[0]} is {dtype_name(step.value.dtype)} in the checkpoint and is to be {dtype_name(step.dtype)}"
    return f"{step.names[0]} does not lie in a safetensors file as the model has it, and only such files are used in place"


def _needs_folder(step: _Step, count: int, where: str) -> str:
    more = f" (and {count - 1} others)" if count > 1 else ""
    remedy = "Give offload_folder, a folder on a disk with room for them"
    if step.dtype is not step.value.dtype:
        remedy += f", or leave them as they are with dtype={dtype_name(step.value.dtype)!r}"
    return f"device_map puts {step.names[0]}{more} of {where} on the disk, but {_why(step)}. {remedy}."


def _tell_conversions(steps: Iterable[_Step], where: str, wishes: Wishes) -> None:
    changed = [step for step in steps if step.target is not None and step.dtype is not step.value.dtype]
    if changed and wishes.dtype is None:
        total = sum(step.value.numel() * step.dtype.itemsize for step in changed)
        old, new = dtype_name(changed[0].value.dtype), dtype_name(changed[0].dtype)
        get_logger(__name__).warning(
            f"{where}: {len(changed)} tensors are {old} in the file and {new} in the model; they are converted, which takes "
            f"{convert_bytes(total)} of memory. Pass dtype={old!r} to use them in place."
        )


@contextmanager
def _progress(steps: Collection[_Step]) -> Iterator[Callable[[int], object]]:
    """Says how many bytes have been copied."""
    total = sum(
        step.value.nbytes if step.is_copied else step.value.numel() * step.dtype.itemsize
        for step in steps
        if step.is_copied or step.is_written
    )
    with bar(total, "loading", "B") as shown:
        yield shown.update
