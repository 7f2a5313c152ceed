"""Capture the state of a run for a save: the snapshot, its copies for async saving, and the receipt of the run.

`capture_snapshot` asks every prepared and registered object for its state and flattens it at once, so what cannot be stored is an error
at the call of `save_state`, and later changes of a dict change nothing. Tensors are still those of the run until `Arena.keep` copies
them, which async saving does. The receipt records what decides the meaning of a run (effective batch size, data, schedule, precision);
`describe_changes` compares it on load.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy
import torch

from slipstream.checkpoint.serialize import flatten
from slipstream.checkpoint.shard_layout import PiecePosition
from slipstream.checkpoint.sharded import LocalShard, is_sharded, local_shards
from slipstream.checkpoint.weights import split_state_dict
from slipstream.data.fingerprint import describe_loader
from slipstream.devices import rng
from slipstream.devices.memory import available_cores
from slipstream.errors import CheckpointError
from slipstream.training.stepper import PreparedModel

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components

__all__ = [
    "Arena", "ModelPart", "PiecesPart", "RunFacts", "Snapshot", "StatePart", "capture_snapshot", "count_updates", "current_receipt",
    "describe_changes", "flatten_part", "make_stamp", "model_state_dicts", "numbered_name", "package_versions",
]


_PACKAGES = ("slipstream", "torch", "numpy")


def package_versions() -> dict[str, str]:
    """Return the versions that results may depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


@functools.lru_cache(maxsize=len(_PACKAGES))
def _version(package: str) -> str:
    """Return the version of a package; looking it up takes longer than the rest of a small save, so it is done once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def describe_changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return what means something else now than when it was saved, each as a sentence; empty if nothing does.

    >>> describe_changes({"effective_batch": 64}, {"effective_batch": 32})
    ['an update has 32 samples now, and had 64: learning rate and schedule were chosen for the other']
    """
    said = []
    before, now = saved.get("effective_batch"), present.get("effective_batch")
    if before != now and before is not None and now is not None:
        said.append(f"an update has {now} samples now, and had {before}: learning rate and schedule were chosen for the other")
    before, now = saved.get("mixed_precision"), present.get("mixed_precision")
    if before != now:
        said.append(f"mixed_precision is {now!r} now, and was {before!r}: results will not be the same")
    said += _loader_changes(_pairs(saved, present, "loaders"))
    said += _setting_changes("optimizer", _pairs(saved, present, "optimizers"))
    said += _setting_changes("scheduler", _pairs(saved, present, "schedulers"))
    return said


_Pair: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]


def _pairs(saved: Mapping[str, Any], present: Mapping[str, Any], name: str) -> list[_Pair]:
    """Return the entries of a list of two receipts, saved and present; a receipt of a later version may look otherwise."""
    lists = [value if isinstance(value, list) else [] for value in (saved.get(name), present.get(name))]
    return [(before, now) for before, now in zip(*lists, strict=False) if isinstance(before, Mapping) and isinstance(now, Mapping)]


def _loader_changes(pairs: Sequence[_Pair]) -> Iterator[str]:
    for number, (before, now) in enumerate(pairs):
        names = [name for name in ("dataset", "length", "sampler", "drop_last", "even") if before.get(name) != now.get(name)]
        if names and before.get("order") != now.get("order"):
            different = "; ".join(f"{name} {now.get(name)!r} now, {before.get(name)!r} before" for name in names)
            yield f"loader {number} reads other data: {different}"


def _setting_changes(what: str, pairs: Sequence[_Pair]) -> Iterator[str]:
    """Yield the settings that the script now gives otherwise; those of the checkpoint are loaded over them."""
    for number, (before, now) in enumerate(pairs):
        old, new = before.get("settings"), now.get("settings")
        if before.get("kind") != now.get("kind"):
            yield f"{what} {number} is {now.get('kind')} now, and was {before.get('kind')}"
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            names = [name for name in new if name in old and new[name] != old[name]]
            different = "; ".join(f"{name} {new[name]!r} in the script, {old[name]!r} in the checkpoint" for name in names)
            if different:
                yield f"{what} {number} ({now.get('kind')}) goes on with the settings of the checkpoint: {different}"


_PIECE: Final = 64 << 20
"""What a thread copies in one go: above half of the cache of a processor, copying bypasses the cache and is nearly twice as fast."""
_SMALL_COPY: Final = 8 << 20
_COPIERS: Final = 4
_Bytes: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass(frozen=True)
class StatePart:
    """A flattened state: what JSON holds, and the tensors by name."""

    name: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ModelPart:
    """The weights of one model."""

    number: int
    base: str
    kind: str
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    extra: StatePart | None = None
    frozen: frozenset[str] = frozenset()
    """Names of weights that are not trained."""
    sharded: bool = False
    """Whether some of its weights are sharded over ranks; those are not here."""


@dataclass(frozen=True)
class PiecesPart:
    """What this rank stores of the tensors of a model or a part that are sharded over ranks."""

    base: str
    """Whose they are: the name of the model or part."""
    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, PiecePosition]
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of all sharded tensors of it, also of those that other ranks store."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunFacts:
    """What the manifest says of the run, under the same names."""

    stamp: str
    step: int
    world: int
    strategy: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    metric: float | None = None
    receipt: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What a save writes: all of it on the process that writes, `own` alone on the others."""

    facts: RunFacts
    own: StatePart
    """What belongs to this rank."""
    models: tuple[ModelPart, ...] = ()
    optimizers: tuple[StatePart, ...] = ()
    training: StatePart | None = None
    objects: tuple[StatePart, ...] = ()
    pieces: tuple[PiecesPart, ...] = ()
    """Of strategies that shard: on every process."""

    @property
    def rank(self) -> int:
        """The rank that took it."""
        return int(self.own.tree["rank"])

    def parts(self) -> Iterator[StatePart | ModelPart | PiecesPart]:
        """Yield everything that holds tensors."""
        yield from self.models
        yield from self.pieces
        yield from (model.extra for model in self.models if model.extra is not None)
        yield from self.optimizers
        yield from () if self.training is None else (self.training,)
        yield from self.objects
        yield self.own

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors."""
        for part in self.parts():
            yield from part.tensors.values()


def flatten_part(name: str, state: Any, where: str, sharded: dict[str, Any] | None = None) -> StatePart:
    """Flatten a state; `where` names it in errors. Sharded tensors are put into `sharded`, and refused without it.

    >>> flatten_part("training", {"epoch": 3}, "loaders")
    StatePart(name='training', tree={'epoch': 3}, tensors={})
    """
    tree, tensors = flatten(state, where, sharded)
    return StatePart(name, tree, tensors)


_Part = TypeVar("_Part", StatePart, ModelPart, PiecesPart)


class Arena:
    """Memory for copies of a run's tensors, kept from one save to the next: fresh pages cost as much as the copy itself."""

    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._left: list[tuple[_Bytes, _Bytes]] = []
        """Where bytes are still to be copied to, and from."""

    def keep(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of all tensors; it is valid until the next call."""
        padded = sum(-(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT for tensor in snapshot.tensors())
        if self._memory is None or self._memory.numel() < padded:
            self._memory = None  # given back before more is taken
            self._memory = torch.empty(padded, dtype=torch.uint8, device="cpu")
        self._used = 0
        with torch.no_grad():
            kept = Snapshot(
                facts=snapshot.facts,
                own=self._part(snapshot.own),
                models=tuple(replace(self._part(model), extra=model.extra and self._part(model.extra)) for model in snapshot.models),
                optimizers=tuple(map(self._part, snapshot.optimizers)),
                training=snapshot.training and self._part(snapshot.training),
                objects=tuple(map(self._part, snapshot.objects)),
                pieces=tuple(map(self._part, snapshot.pieces)),
            )
        left, self._left = self._left, []
        _copy_bytes(left)
        return kept

    def _part(self, part: _Part) -> _Part:
        return replace(part, tensors={name: self._copy(tensor.detach()) for name, tensor in part.tensors.items()})

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._memory is not None
        size = tensor.nbytes
        room = self._memory[self._used : self._used + size]
        self._used += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        place = room.view(tensor.dtype).view(tensor.shape)
        if not size or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return place.copy_(tensor)
        into, data = room.numpy(), tensor.view(-1).view(torch.uint8).numpy()
        self._left += [(into[start : start + _PIECE], data[start : start + _PIECE]) for start in range(0, size, _PIECE)]
        return place


def _copy_bytes(left: list[tuple[_Bytes, _Bytes]]) -> None:
    """Copy everything, by several threads if it is much.

    They share no barrier as those of torch do after every tensor, so that one that has to wait for a core does not make the others wait.
    """
    tasks = iter(left)

    def copy() -> None:
        for into, data in tasks:
            numpy.copyto(into, data)

    if sum(data.nbytes for _, data in left) <= _SMALL_COPY:
        copy()
        return
    with ThreadPoolExecutor(min(_COPIERS, available_cores()), thread_name_prefix="slipstream: copying for a save") as copiers:
        for copier in [copiers.submit(copy) for _ in range(_COPIERS)]:
            copier.result()


_POSITIONS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "eps"})
"""What of a scheduler's state says where it stands, rather than how it was made."""
_IMPLEMENTATION_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""What of an optimizer's settings says how it computes, rather than what."""


def numbered_name(base: str, number: int) -> str:
    """Return the name of the nth of several: the first one has no number.

    >>> numbered_name("model", 0), numbered_name("model", 2)
    ('model', 'model_2')
    """
    return f"{base}_{number}" if number else base


def count_updates(components: Components) -> int:
    """Return the number of updates made, by the optimizer that made most."""
    return max((optimizer.updates for optimizer in components.registry.optimizers), default=0)


def model_state_dicts(components: Components) -> list[dict[str, Any]]:
    """Return the weights of every model, under plain names."""
    return [components.strategy.state(model.original) for model in components.stepper.models]


def capture_snapshot(
    components: Components,
    history: str,
    objects: Sequence[Any],
    weights: Mapping[int, dict[str, Any]] | None,
    metric: float | None,
    pieces: list[PiecesPart] | None = None,
) -> Snapshot:
    """Return a snapshot: of everything on the process that writes, which passes the `weights` by model number; else of this rank alone.

    What this rank holds of tensors that are sharded is put into `pieces`; without it, sharded tensors are refused.
    """
    loop = components.stepper.loop_state()  # first: it settles what the loss scaler's state depends on
    stamp = make_stamp(components, history)
    state = components.state
    facts = RunFacts(
        stamp=stamp,
        step=count_updates(components),
        world=state.num_processes,
        strategy=components.strategy.name,
        mesh={"dp_replicate" if components.strategy.replicated else "dp_shard": state.num_processes},
        metric=metric,
        receipt=current_receipt(components) if weights is not None else {},
    )
    own = flatten_part(
        f"rank_{state.process_index}",
        {
            "rank": state.process_index,
            "stamp": stamp,
            "random": rng.capture(),
            "gradients": _gradients(components),
            "loop": loop,
            "loaders": [loader.state_dict() for loader in components.registry.loaders],
        },
        f"what belongs to rank {state.process_index}",
    )
    if weights is None:
        return Snapshot(facts, own)
    return Snapshot(
        facts,
        own,
        models=tuple(_model(components.stepper.models[number], number, weight, pieces) for number, weight in weights.items()),
        optimizers=tuple(
            _part(numbered_name("optimizer", number), optimizer.state_dict(), f"the state of {type(optimizer.optimizer).__name__}", pieces)
            for number, optimizer in enumerate(components.registry.optimizers)
        ),
        training=_training(components),
        objects=tuple(
            _part(f"custom_checkpoint_{number}", thing.state_dict(), f"registered object {number} ({type(thing).__name__})", pieces)
            for number, thing in enumerate(objects)
        ),
        pieces=tuple(pieces or ()),
    )


def _model(model: PreparedModel, number: int, state_dict: dict[str, Any], pieces: list[PiecesPart] | None) -> ModelPart:
    base, kind = numbered_name("model", number), type(model.original).__name__
    where = f"the weights of {kind}"
    held = {} if pieces is None else local_shards(state_dict, where)
    if held:
        state_dict = copy.copy(state_dict)  # with its attributes: the versions of layers are one
        state_dict.update({name: shard.tensor for name, shard in held.items()})
    weights = split_state_dict(state_dict, where)
    frozen = frozenset(name for name, parameter in model.original.named_parameters() if not parameter.requires_grad)
    extra = flatten_part(f"{base}_extra", dict(weights.extra), f"the state of {kind}") if weights.extra else None
    if held and pieces is not None:
        pieces.append(_pieces_part(base, held, {name: kept for name, kept in weights.aliases.items() if name in held}, frozen))
    whole = {name: tensor for name, tensor in weights.tensors.items() if name not in held}
    aliases = {name: kept for name, kept in weights.aliases.items() if name not in held}
    return ModelPart(number, base, kind, whole, aliases, extra, frozen, bool(held))


def _gradients(components: Components) -> dict[str, torch.Tensor] | None:
    """Return gradients that belong to an update still to come."""
    gradients = components.stepper.open_gradients()
    if any(map(is_sharded, (gradients or {}).values())):
        raise CheckpointError(
            "save_state was called in the middle of an update, whose gradients so far are sharded over ranks and cannot be saved: call it "
            "where accelerator.sync_gradients is True, after optimizer.zero_grad()"
        )
    return gradients


def _pieces_part(base: str, shards: Mapping[str, LocalShard], aliases: Mapping[str, str], frozen: frozenset[str]) -> PiecesPart:
    """Return what this rank stores of sharded tensors; other names of tied ones are stored by no rank."""
    owned = {name: shard for name, shard in shards.items() if shard.owned and name not in aliases}
    return PiecesPart(
        base,
        {name: shard.tensor for name, shard in owned.items()},
        {name: shard.place for name, shard in owned.items()},
        {name: shard.place.shape for name, shard in shards.items()},
        aliases,
        frozen,
    )


def _part(name: str, state: Any, where: str, pieces: list[PiecesPart] | None) -> StatePart:
    sharded: dict[str, Any] | None = None if pieces is None else {}
    part = flatten_part(name, state, where, sharded)
    if pieces is not None and sharded:
        pieces.append(_pieces_part(name, local_shards(sharded, where), {}, frozenset()))
    return part


def _training(components: Components) -> StatePart:
    registry = components.registry
    state = {
        "step": count_updates(components),
        "optimizers": [{"updates": optimizer.updates, "skipped": optimizer.step_was_skipped} for optimizer in registry.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in registry.schedulers],
        "scaler": components.precision.scaler.state_dict(),
        "clipping": components.clipper.state(),
        "loaders": [loader.state_dict() for loader in registry.loaders],
    }
    return flatten_part("training", state, "the state of the training loop")


def make_stamp(components: Components, history: str) -> str:
    """Return what all ranks of a save agree on without asking each other: which run it is, and how far."""
    positions = [[loader.state_dict()[name] for name in ("epoch", "batches")] for loader in components.registry.loaders]
    updates = [optimizer.updates for optimizer in components.registry.optimizers]
    text = json.dumps([components.state.num_processes, positions, updates, len(components.stepper.models)])
    return f"{count_updates(components)}-{history}{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


# -- the receipt ------------------------------------------------------------------------------------------------------


def current_receipt(components: Components) -> dict[str, Any]:
    """Return what decides the meaning of this run, as plain data."""
    registry = components.registry
    steps = components.gradient_state.plugin.num_steps or 1
    batch = None
    if registry.loaders:
        first = registry.loaders[0]
        if first.batch_size is not None:  # else batches have sizes of their own, which are not known before they are read
            batch = first.total_batch_size * (first.steps_per_update or steps)
    return {
        "effective_batch": batch,
        "gradient_accumulation_steps": steps,
        "mixed_precision": components.state.mixed_precision,
        "seed": torch.initial_seed() % 2**63,
        "loaders": [describe_loader(loader) for loader in registry.loaders],
        "optimizers": [
            {
                "kind": type(optimizer.optimizer).__name__,
                "updates": optimizer.updates,
                "lr": [_plain_value(group.get("lr")) for group in optimizer.param_groups],
                "settings": _plain_settings(optimizer.optimizer.defaults, _IMPLEMENTATION_SETTINGS),
            }
            for optimizer in registry.optimizers
        ],
        "schedulers": [
            {
                "kind": type(scheduler.scheduler).__name__,
                "position": _plain_value(getattr(scheduler.scheduler, "last_epoch", None)),
                "settings": _plain_settings(scheduler.scheduler.state_dict(), _POSITIONS),
            }
            for scheduler in registry.schedulers
        ],
        "versions": package_versions(),
    }


def _plain_settings(settings: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """Return how a scheduler or an optimizer was made, as far as that is plain values."""
    found = {}
    for name, value in settings.items():
        if name.startswith("_") or name in left_out:
            continue
        values = [_plain_value(entry) for entry in value] if isinstance(value, (list, tuple)) else _plain_value(value)
        if values is not None and not (isinstance(values, list) and None in values):
            found[name] = values
    return found


def _plain_value(value: Any) -> Any:
    """Return a number or text that JSON holds; None for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    return value if isinstance(value, (bool, int, str)) else None
