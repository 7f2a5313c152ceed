"""Capture the state of a run for a save: the snapshot, and the settings of the run.

`capture_snapshot` takes the state of every prepared and registered object and flattens it at once. A value that cannot be stored is an
error in the call of `save_state`, and later changes of a dict have no effect. Tensors are those of the run until `arena` copies them for
async saving. The settings (effective batch size, data, schedule, precision; the key "receipt" of the manifest) are stored with
it, and `describe_changes` compares them on load.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from slipstream.checkpoint.optimizer_names import parameter_names
from slipstream.checkpoint.serialize import flatten
from slipstream.checkpoint.shard_layout import ShardPosition
from slipstream.checkpoint.sharded import LocalShard, local_shards
from slipstream.checkpoint.weights import split_sharded_state_dict, split_state_dict
from slipstream.data.fingerprint import describe_loader
from slipstream.devices import rng
from slipstream.observability.run_dir.environment import device_name
from slipstream.training.stepper import PreparedModel

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components

__all__ = [
    "ModelPart", "ShardedPart", "RunFacts", "Snapshot", "StatePart", "capture_snapshot", "count_updates", "current_settings",
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
    """Return the differences between the settings of a checkpoint and of this run, a sentence each.

    >>> describe_changes({"effective_batch": 64}, {"effective_batch": 32})
    ['the effective batch size is 32 now and was 64 when saved; learning rate and schedule may not fit']
    """
    differences = []
    before, now = saved.get("effective_batch"), present.get("effective_batch")
    if before != now and before is not None and now is not None:
        differences.append(f"the effective batch size is {now} now and was {before} when saved; learning rate and schedule may not fit")
    before, now = saved.get("mixed_precision"), present.get("mixed_precision")
    if before != now:
        differences.append(f"mixed_precision is {now!r} now and was {before!r} when saved; results will differ")
    before, now = saved.get("device"), present.get("device")
    if before != now and before is not None and now is not None:
        differences.append(f"the run is on a {now} device now and was on {before} when saved; results may differ in their last digits")
    differences += _loader_changes(_pairs(saved, present, "loaders"))
    differences += _setting_changes("optimizer", _pairs(saved, present, "optimizers"))
    differences += _setting_changes("scheduler", _pairs(saved, present, "schedulers"))
    return differences


_Pair: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]


def _pairs(saved: Mapping[str, Any], present: Mapping[str, Any], name: str) -> list[_Pair]:
    """Return the entries of a list in both settings, in pairs; entries of an unknown form, of a later version, are left out."""
    lists = [value if isinstance(value, list) else [] for value in (saved.get(name), present.get(name))]
    return [(before, now) for before, now in zip(*lists, strict=False) if isinstance(before, Mapping) and isinstance(now, Mapping)]


def _loader_changes(pairs: Sequence[_Pair]) -> Iterator[str]:
    for number, (before, now) in enumerate(pairs):
        names = [name for name in ("dataset", "length", "sampler", "drop_last", "even") if before.get(name) != now.get(name)]
        if names and before.get("order") != now.get("order"):
            different = "; ".join(f"{name} {now.get(name)!r} now, {before.get(name)!r} before" for name in names)
            yield f"loader {number} reads different data: {different}"


def _setting_changes(what: str, pairs: Sequence[_Pair]) -> Iterator[str]:
    """Yield the settings that differ in the script; those of the checkpoint replace them."""
    for number, (before, now) in enumerate(pairs):
        old, new = before.get("settings"), now.get("settings")
        if before.get("kind") != now.get("kind"):
            yield f"{what} {number} is {now.get('kind')} now and was {before.get('kind')} when saved"
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            names = [name for name in new if name in old and new[name] != old[name]]
            different = "; ".join(f"{name} {new[name]!r} in the script, {old[name]!r} in the checkpoint" for name in names)
            if different:
                yield f"{what} {number} ({now.get('kind')}) continues with the settings of the checkpoint: {different}"


@dataclass(frozen=True)
class StatePart:
    """A flattened state: the JSON tree, and the tensors by name."""

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
    """Whether some of its weights are sharded; those are in a `ShardedPart`."""


@dataclass(frozen=True)
class ShardedPart:
    """The shards that this rank stores of a model or of another part."""

    base: str
    """The name of the model or part."""
    tensors: Mapping[str, torch.Tensor]
    positions: Mapping[str, ShardPosition]
    shapes: Mapping[str, tuple[int, ...]]
    """The full shapes of all its sharded tensors, including those that only other ranks store."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunFacts:
    """The facts about the run that go into the manifest, under the same names."""

    stamp: str
    step: int
    world: int
    strategy: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    metric: float | None = None
    receipt: Mapping[str, Any] = field(default_factory=dict)
    savers: int | None = None
    site: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The state that a process writes: everything on the writing process, only `own` and `shards` on the others."""

    facts: RunFacts
    own: StatePart
    """The state of this rank: random states, gradients, positions of loaders."""
    models: tuple[ModelPart, ...] = ()
    optimizers: tuple[StatePart, ...] = ()
    training: StatePart | None = None
    objects: tuple[StatePart, ...] = ()
    shards: tuple[ShardedPart, ...] = ()
    """The shards that this rank stores, on every process."""
    ready: Callable[[], None] = lambda: None
    """Waits until its tensors have their values: copies from a device arrive late. Whoever reads them calls it first."""

    @property
    def rank(self) -> int:
        """The rank that captured it."""
        return int(self.own.tree["rank"])

    def parts(self) -> Iterator[StatePart | ModelPart | ShardedPart]:
        """Yield every part with tensors."""
        yield from self.models
        yield from self.shards
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
    """Flatten a state; `where` names it in errors. Sharded tensors are put into `sharded`, or are an error without it.

    >>> flatten_part("training", {"epoch": 3}, "loaders")
    StatePart(name='training', tree={'epoch': 3}, tensors={})
    """
    tree, tensors = flatten(state, where, sharded)
    return StatePart(name, tree, tensors)


_POSITIONS = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"})
"""Entries of a scheduler's state that are its position, not its settings."""
_IMPLEMENTATION_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of an optimizer that choose an implementation and not the result."""


def numbered_name(base: str, number: int) -> str:
    """Return the name of the nth of several; the first has no number.

    >>> numbered_name("model", 0), numbered_name("model", 2)
    ('model', 'model_2')
    """
    return f"{base}_{number}" if number else base


def count_updates(components: Components) -> int:
    """Return the largest number of updates that an optimizer has made."""
    return max((optimizer.updates for optimizer in components.registry.optimizers), default=0)


def model_state_dicts(components: Components) -> list[dict[str, Any]]:
    """Return the weights of every model, under plain names."""
    return [components.strategy.state(model.original) for model in components.stepper.models]


def capture_snapshot(
    components: Components,
    run_id: str,
    objects: Sequence[Any],
    weights: Mapping[int, dict[str, Any]] | None,
    metric: float | None,
    shards: list[ShardedPart] | None = None,
    *,
    in_shards: bool = False,
) -> Snapshot:
    """Return a snapshot of everything if `weights` (by model number) are given, else of the state of this rank alone.

    The shards that this rank stores are appended to `shards`; without it, sharded tensors are an error. `in_shards`: weights are in
    shards too, although the strategy saves whole weights.
    """
    loop = components.stepper.loop_state()  # first, because it settles the state of the loss scaler
    gradients = components.stepper.open_gradients()
    stamp = make_stamp(components, run_id)
    state = components.state
    facts = RunFacts(
        stamp=stamp,
        step=count_updates(components),
        world=state.num_processes,
        strategy=components.strategy.name,
        mesh=components.strategy.mesh_axes(state.num_processes),
        metric=metric,
        receipt=current_settings(components) if weights is not None else {},
    )
    own = flatten_part(
        f"rank_{state.process_index}",
        {
            "rank": state.process_index,
            "stamp": stamp,
            "random": rng.capture(),
            "gradients": gradients if components.strategy.replicated else None,  # sharded ones are in the state of the loop
            "loop": loop,
            "loaders": [loader.capture_position() for loader in components.registry.loaders],
        },
        f"the state of rank {state.process_index}",
    )
    if weights is None:
        return Snapshot(facts, own)
    capture_model = _whole_model if components.strategy.saves_whole_weights and not in_shards else _model
    return Snapshot(
        facts,
        own,
        models=tuple(capture_model(components.stepper.models[number], number, weight, shards) for number, weight in weights.items()),
        optimizers=tuple(
            _part(numbered_name("optimizer", number), optimizer.state_dict(), f"the state of {type(optimizer.optimizer).__name__}", shards)
            for number, optimizer in enumerate(components.registry.optimizers)
        ),
        training=_training(components, None if components.strategy.replicated else gradients, shards),
        objects=tuple(
            _part(f"custom_checkpoint_{number}", value.state_dict(), f"registered object {number} ({type(value).__name__})", shards)
            for number, value in enumerate(objects)
        ),
        shards=tuple(shards or ()),
    )


def _model(model: PreparedModel, number: int, state_dict: dict[str, Any], shards: list[ShardedPart] | None) -> ModelPart:
    base, kind = numbered_name("model", number), type(model.original).__name__
    where = f"the weights of {kind}"
    held = {} if shards is None else local_shards(state_dict, where)
    if held:
        state_dict = copy.copy(state_dict)  # with its attributes, such as the versions of layers
        state_dict.update({name: shard.tensor for name, shard in held.items()})
    weights = split_state_dict(state_dict, where)
    frozen = frozenset(name for name, parameter in model.original.named_parameters() if not parameter.requires_grad)
    extra = flatten_part(f"{base}_extra", dict(weights.extra), f"the state of {kind}") if weights.extra else None
    if held and shards is not None:
        shards.append(_sharded_part(base, held, {name: kept for name, kept in weights.aliases.items() if name in held}, frozen))
    whole = {name: tensor for name, tensor in weights.tensors.items() if name not in held}
    aliases = {name: kept for name, kept in weights.aliases.items() if name not in held}
    return ModelPart(number, base, kind, whole, aliases, extra, frozen, bool(held))


def _whole_model(model: PreparedModel, number: int, state_dict: dict[str, Any], shards: list[ShardedPart] | None) -> ModelPart:
    """Return the weights of a model with sharded tensors as they are: whoever writes them puts them together."""
    base, kind = numbered_name("model", number), type(model.original).__name__
    weights = split_sharded_state_dict(model.original, state_dict, f"the weights of {kind}")
    frozen = frozenset(name for name, parameter in model.original.named_parameters() if not parameter.requires_grad)
    extra = flatten_part(f"{base}_extra", dict(weights.extra), f"the state of {kind}") if weights.extra else None
    return ModelPart(number, base, kind, weights.tensors, weights.aliases, extra, frozen)


def _sharded_part(base: str, shards: Mapping[str, LocalShard], aliases: Mapping[str, str], frozen: frozenset[str]) -> ShardedPart:
    """Return the shards that this rank stores; aliases of tied tensors are not stored."""
    owned = {name: shard for name, shard in shards.items() if shard.owned and name not in aliases}
    return ShardedPart(
        base,
        {name: shard.tensor for name, shard in owned.items()},
        {name: shard.position for name, shard in owned.items()},
        {name: shard.position.shape for name, shard in shards.items()},
        aliases,
        frozen,
    )


def _part(name: str, state: Any, where: str, shards: list[ShardedPart] | None) -> StatePart:
    sharded: dict[str, Any] | None = None if shards is None else {}
    part = flatten_part(name, state, where, sharded)
    if shards is not None and sharded:
        shards.append(_sharded_part(name, local_shards(sharded, where), {}, frozenset()))
    return part


def _names_of(optimizer: Any, names: Mapping[int, Sequence[str]]) -> list[str | None]:
    """Return the names of an optimizer's parameters, in its order; None for one that belongs to no prepared model."""
    return [next(iter(names.get(id(parameter), ())), None) for group in optimizer.param_groups for parameter in group["params"]]


def _training(components: Components, gradients: Mapping[str, Any] | None, shards: list[ShardedPart] | None) -> StatePart:
    registry = components.registry
    names = parameter_names(model.original for model in components.stepper.models)
    state = {
        "step": count_updates(components),
        "optimizers": [
            {"updates": optimizer.updates, "skipped": optimizer.step_was_skipped, "parameters": _names_of(optimizer, names)}
            for optimizer in registry.optimizers
        ],
        "schedulers": [scheduler.state_dict() for scheduler in registry.schedulers],
        "scaler": components.precision.scaler.state_dict(),
        "clipping": components.clipper.state(),
        "loaders": [loader.capture_position() for loader in registry.loaders],
        **({} if gradients is None else {"gradients": dict(gradients)}),
    }
    return _part("training", state, "the state of the training loop", shards)


def make_stamp(components: Components, run_id: str) -> str:
    """Return the identity of a save, which all ranks compute without communication: the step, the run and a hash of its position."""
    positions = [[loader.capture_position()[name] for name in ("epoch", "batches")] for loader in components.registry.loaders]
    updates = [optimizer.updates for optimizer in components.registry.optimizers]
    text = json.dumps([components.state.num_processes, positions, updates, len(components.stepper.models)])
    return f"{count_updates(components)}-{run_id}{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


# -- settings ---------------------------------------------------------------------------------------------------------


def current_settings(components: Components) -> dict[str, Any]:
    """Return the settings that results of this run depend on, as plain data."""
    registry = components.registry
    steps = components.gradient_state.plugin.num_steps or 1
    batch = None
    if registry.loaders:
        first = registry.loaders[0]
        if first.batch_size is not None:  # else a batch sampler decides, and sizes are unknown until batches are read
            batch = first.total_batch_size * (first.steps_per_update or steps)
    return {
        "effective_batch": batch,
        "gradient_accumulation_steps": steps,
        "mixed_precision": components.state.mixed_precision,
        "device": components.state.device.type,
        "device_name": device_name(components.state.device),
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
    """Return the settings of a scheduler or an optimizer that are plain values."""
    found = {}
    for name, value in settings.items():
        if name.startswith("_") or name in left_out:
            continue
        values = [_plain_value(entry) for entry in value] if isinstance(value, (list, tuple)) else _plain_value(value)
        if values is not None and not (isinstance(values, list) and None in values):
            found[name] = values
    return found


def _plain_value(value: Any) -> Any:
    """Return a number or string that JSON can store; None for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str)) else None
