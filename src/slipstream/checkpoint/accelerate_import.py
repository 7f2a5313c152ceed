"""Read checkpoints of Accelerate 1.x without trusting them.

    model.safetensors, model_1.safetensors, ...      weights; or pytorch_model.bin, ...; or shards with an index
    pytorch_model_fsdp_0/, optimizer_0/, ...         under FSDP: folders of torch.distributed.checkpoint, or pytorch_model_fsdp.bin
    optimizer.bin, optimizer_1.bin, ...              state_dict() of optimizers; likewise scheduler.bin and scaler.pt
    sampler.bin, dl_state_dict.bin, ...              a pickled sampler, the position of a stateful loader: not read, because
                                                     Slipstream orders samples differently
    random_states_0.pkl, random_states_1.pkl, ...    one per process: random states and the step count
    custom_checkpoint_0.pkl, ...                     registered objects

All but safetensors files were written by torch.save, with pickle. Files are opened inside the folder only and read as data by
`pickle_reader.py`; nothing is unpickled unless `allow_pickle=True`, and then only files with more than data (never those of
torch.distributed.checkpoint, whose tensors stay placeholders until a rank knows its part). Random states are checked on unused
generators. `AccelerateCheckpoint.warnings` lists what could not be read. Neither the folder nor a live object is changed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy
import torch

from slipstream.checkpoint.dcp_metadata import DCP_METADATA, is_dcp_folder
from slipstream.checkpoint.dcp_reader import DcpFolder, open_dcp, read_shard_state
from slipstream.checkpoint.manifest import ACCELERATE_FILE, FSDP_MODEL_NAME, MANIFEST, OPTIMIZER_NAME
from slipstream.checkpoint.pickle_reader import TorchFileValues, read_values
from slipstream.checkpoint.pickle_records import NotPlainError
from slipstream.checkpoint.sharded import TensorPlaceholders
from slipstream.checkpoint.torch_archive import LegacyFormatError
from slipstream.checkpoint.weight_source import WeightSource, read_index
from slipstream.devices.table import CPU, FAMILIES
from slipstream.errors import CheckpointError
from slipstream.files.paths import ConfinedFolder
from slipstream.files.reader import read_whole

__all__ = [
    "AccelerateCheckpoint", "explain_bad_optimizer", "is_accelerate_checkpoint", "read_accelerate_checkpoint", "read_random_states",
]


_WORDS = 624
_LARGEST_STATE = 2**20
_OF_DEVICES = re.compile(r"torch_([a-z]+)_manual_seed", re.ASCII)


def read_random_states(value: Any, where: str, warnings: list[str]) -> tuple[dict[str, Any], int]:
    """Return the random states and the step in a random_states file; what is left out is added to `warnings`.

    >>> read_random_states({"step": 3, "random_state": None}, "random_states_0.pkl", [])
    Traceback (most recent call last):
    slipstream.errors.CheckpointError: random_states_0.pkl: its random_state is not a state of Python's generator
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} cannot be used: it is not a mapping")
    states: dict[str, Any] = {}
    for name, state in value.items():
        kind = _OF_DEVICES.fullmatch(name) if isinstance(name, str) else None
        if name == "random_state":
            states["python"] = _of_python(state, where)
        elif name == "numpy_random_seed":
            states["numpy"] = _of_numpy(state, where)
        elif name == "torch_manual_seed":
            states["torch"] = _of_host(state, where)
        elif kind and any(family.type == kind[1] and family is not CPU for family in FAMILIES):
            many = isinstance(state, (list, tuple))
            found = [_of_torch(entry, where) for entry in (state if many else [state])]
            states[kind[1]] = found if many else {"current": 0, "states": found}  # one is that of the current device
        elif name != "step":
            warnings.append(f"{where} has a random state {name!r:.80}, which has no counterpart here; it was left out")
    step = value.get("step", 0)
    if type(step) is not int or not 0 <= step < 2**60:
        raise CheckpointError(f"{where}: its step {step!r:.80} is not a count")
    return states, step


def _of_python(state: Any, where: str) -> dict[str, Any]:
    match state:
        case (3, tuple() as words, None | float() as gauss) if all(type(word) is int and 0 <= word < 2**32 for word in words):
            _try(random.Random().setstate, state, f"{where}: its random_state")
            return {"version": 3, "words": list(words), "gauss": gauss}
    raise CheckpointError(f"{where}: its random_state is not a state of Python's generator")


def _of_numpy(state: Any, where: str) -> dict[str, Any]:
    match state:
        case ("MT19937", numpy.ndarray() as key, int() as position, 0 | 1 as has_gauss, float() as gauss) if key.dtype == numpy.uint32:
            if key.shape != (_WORDS,) or not 0 <= position <= _WORDS:  # numpy does not check, and would read out of bounds
                raise CheckpointError(f"{where}: its numpy_random_seed has {key.size} words, not {_WORDS}, or the position {position}")
            words = {"key": key.tolist(), "pos": position}
            plain = {"bit_generator": "MT19937", "state": words, "has_gauss": has_gauss, "gauss": gauss}
            _try(numpy.random.RandomState().set_state, plain, f"{where}: its numpy_random_seed")
            return plain
    raise CheckpointError(f"{where}: its numpy_random_seed is not a state of numpy's generator")


def _of_torch(state: Any, where: str) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.dim() != 1 or not 0 < state.numel() <= _LARGEST_STATE:
        raise CheckpointError(f"{where}: one of its torch random states is not a one-dimensional tensor of bytes")
    return state.clone()


def _of_host(state: Any, where: str) -> torch.Tensor:
    tensor = _of_torch(state, where)
    _try(torch.Generator().set_state, tensor, f"{where}: its torch_manual_seed")
    return tensor


def _try(set_state: Callable[[Any], Any], state: Any, what: str) -> None:
    """Set the state of an unused generator."""
    try:
        set_state(state)
    except (TypeError, ValueError, RuntimeError, OverflowError, IndexError) as problem:
        raise CheckpointError(f"{what} is rejected by the generator: {problem!s:.200}") from None


_LARGEST_SMALL_FILE = 256 * 2**20
_SAFE, _TORCH = ".safetensors", ".bin"
_WEIGHTS: Final = (("model", _SAFE), ("pytorch_model", _TORCH), (FSDP_MODEL_NAME, _TORCH), (FSDP_MODEL_NAME, _SAFE))
_FSDP_PATTERN: Final = re.compile(rf"{FSDP_MODEL_NAME}(_\d{{1,9}})?(/|\.bin$|\.safetensors$)|{OPTIMIZER_NAME}_\d{{1,9}}/", re.ASCII)
_OTHER_LAYOUTS: Final = (
    (
        re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin$"),
        "of FSDP with a file for each rank",
        "Accelerate, on as many processes and with use_dcp=True,",
    ),
    (re.compile(r"pytorch_model(_\d+)?/|zero_to_fp32\.py$|(.*/)?mp_rank_\d+"), "of DeepSpeed or Megatron", "the script that came with it"),
)


@dataclass(frozen=True)
class AccelerateCheckpoint:
    """The content of a checkpoint of Accelerate. Tensors are on the CPU; those of models may be views of mapped files."""

    models: list[dict[str, Any]]
    """State dicts. Safetensors files have only one name of tied weights."""
    optimizers: list[dict[str, Any]]
    """States of optimizers; those of FSDP go by names of parameters instead of numbers."""
    schedulers: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    ranks: dict[int, dict[str, Any]]
    """Random states by rank, as arguments of `slipstream.devices.rng.restore`."""
    objects: dict[int, Any]
    """States of registered objects by number, without those that could not be read."""
    step: int
    """The batches that the accelerator of the first process counted for accumulation."""
    world: int
    """The number of processes that saved it."""
    warnings: list[str] = field(default_factory=list)
    """What could not be read, a sentence each."""
    unread: set[int] = field(default_factory=set)
    """Numbers of registered objects that could not be read."""
    placeholders: TensorPlaceholders = field(default_factory=TensorPlaceholders)
    """Placeholders in `models` and `optimizers` of tensors in folders of torch.distributed.checkpoint."""


def is_accelerate_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like a checkpoint of Accelerate, in any of its layouts, readable or not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     before = is_accelerate_checkpoint(folder)
    ...     torch.save({}, folder + "/optimizer.bin")
    ...     before, is_accelerate_checkpoint(folder)
    (False, True)
    """
    if not os.path.isdir(folder):
        return False
    with ConfinedFolder(folder) as opened:
        names = _names(opened)
    return MANIFEST not in names and (any(map(_marks_checkpoint, names)) or _other_layout(names) is not None)


def read_accelerate_checkpoint(
    folder: str | os.PathLike[str], *, allow_pickle: bool = False, scheduler_moves: int = 1, same_order: bool = False
) -> AccelerateCheckpoint:
    """Return the content of a checkpoint of Accelerate. `scheduler_moves` is how often schedulers of this run step per update.

    With `same_order` the loaders of this run order samples as Accelerate does, so there is nothing to warn about.
    With `allow_pickle=True`, files with objects of other classes are unpickled, which runs code that they name. Use it only for
    checkpoints from a source that you trust.
    """
    with ConfinedFolder(folder) as opened:
        names = _names(opened)
        _check_layout(opened, names)
        return _FolderReader(opened, names, allow_pickle, scheduler_moves, same_order).read()


def _names(folder: ConfinedFolder) -> frozenset[str]:
    """Return all names in a folder, also those of links, which cannot be opened."""
    refused: list[str] = []
    return frozenset([*folder.names(refused), *refused])


def _marks_checkpoint(name: str) -> bool:
    """Whether a name is one of a checkpoint of Accelerate, or of a folder of torch.distributed.checkpoint."""
    return bool(ACCELERATE_FILE.fullmatch(name) or _FSDP_PATTERN.match(name)) or name == DCP_METADATA


def _other_layout(names: frozenset[str]) -> tuple[str, str, str] | None:
    return next(((name, what, remedy) for pattern, what, remedy in _OTHER_LAYOUTS for name in sorted(names) if pattern.match(name)), None)


def _check_layout(folder: ConfinedFolder, names: frozenset[str]) -> None:
    if MANIFEST in names:
        raise CheckpointError(f"{folder.path} is a checkpoint of Slipstream (it has a {MANIFEST}), not one of Accelerate: use load_state")
    other = _other_layout(names)
    if other is not None:
        raise CheckpointError(
            f"{folder.path} is a checkpoint {other[1]} ({other[0]}), with sharded tensors, which are not read here. Merge the weights with "
            f"{other[2]} first and load them with load_checkpoint_in_model, or save the state again without sharding."
        )
    if not any(map(_marks_checkpoint, names)):
        there = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
        raise CheckpointError(
            f"{folder.path} is not a checkpoint: it has neither a {MANIFEST} (Slipstream) nor files like optimizer.bin and "
            f"random_states_0.pkl (Accelerate), but {there}. Load weights alone with load_checkpoint_in_model."
        )


class _FolderReader:
    """Reads one folder, and collects warnings about what it leaves out."""

    def __init__(
        self, folder: ConfinedFolder, names: frozenset[str], allow_pickle: bool, scheduler_moves: int, same_order: bool
    ) -> None:
        self._folder = folder
        self._same_order = same_order
        self._scheduler_moves = scheduler_moves
        self._names = names
        self._allow_pickle = allow_pickle
        self._warnings: list[str] = []
        self._placeholders = TensorPlaceholders()

    def read(self) -> AccelerateCheckpoint:
        models = [self._model(number) for number in range(self._count_of_models())]
        optimizers = [self._optimizer(name) for name in self._consecutive(OPTIMIZER_NAME, ".bin", folders=True)]
        if DCP_METADATA in self._names:
            models, optimizers = self._dcp_states()
        schedulers = [self._state(name) for name in self._consecutive("scheduler", ".bin")]
        scaler = self._state("scaler.pt", _check_scaler) if "scaler.pt" in self._names else None
        custom = self._numbered("custom_checkpoint", ".pkl", first=0)
        objects = {number: entry[0] for number, name in custom if (entry := self._object(name))}
        unread = {number for number, _ in custom} - set(objects)
        states, step, world = self._ranks()
        if not models:
            self._warnings.append(f"{self._folder.path} has no weights under the names that Accelerate uses; a hook may have written them")
        self._warn_differences(bool(schedulers), world)
        return AccelerateCheckpoint(
            models, optimizers, schedulers, scaler, states, objects, step, world, self._warnings, unread, self._placeholders
        )

    def _warn_differences(self, has_schedulers: bool, world: int) -> None:
        data_files = [name for stem in ("sampler", "dl_state_dict") for _, name in self._numbered(stem, ".bin")]
        if self._same_order:
            pass
        elif data_files:
            self._warnings.append(
                f"{', '.join(map(self._where, data_files))}: not read, because Slipstream orders samples differently. Loaders start from "
                "the beginning; skip_first_batches(loader, n) skips as many batches, with different samples."
            )
        else:
            self._warnings.append(
                "Accelerate saved no position in the data here: loaders start an epoch; use skip_first_batches if you know the position"
            )
        if has_schedulers and world > 1 and self._scheduler_moves != world:
            self._warnings.append(
                f"{self._folder.path} was saved by {world} processes of a library that steps schedulers {world} times per update: the "
                "schedule continues at its position. Pass Accelerator(scheduler_steps_per_process=True) to step it in that way."
            )

    # -- which files exist

    def _numbered(self, stem: str, suffix: str, first: int = 1) -> list[tuple[int, str]]:
        """Return number and name of `stem.suffix` (number 0), `stem_1.suffix`, ...; with `first=0` of `stem_0.suffix`, ..."""
        pattern = re.compile(rf"{stem}_(0|[1-9]\d{{0,5}}){re.escape(suffix)}", re.ASCII)
        found = [(int(match[1]), name) for name in self._names if (match := pattern.fullmatch(name)) and int(match[1]) >= first]
        return sorted([*found, *([(0, f"{stem}{suffix}")] if first and f"{stem}{suffix}" in self._names else [])])

    def _folders(self, stem: str) -> list[tuple[int, str]]:
        """Return number and name of the folders `stem_0`, `stem_1`, ..."""
        pattern = re.compile(rf"({stem}_(0|[1-9]\d{{0,5}}))/", re.ASCII)
        return sorted({(int(match[2]), match[1]) for name in self._names if (match := pattern.match(name))})

    def _consecutive(self, stem: str, suffix: str, *, folders: bool = False) -> list[str]:
        files = self._numbered(stem, suffix)
        taken = {number for number, _ in files}
        found = sorted([*files, *((number, name) for number, name in (self._folders(stem) if folders else []) if number not in taken)])
        for expected, (number, name) in enumerate(found):
            if number != expected:
                raise CheckpointError(f"{self._folder.path} has {name}, not {_numbered_name(stem, suffix, expected)}: a part is missing")
        return [name for _, name in found]

    def _count_of_models(self) -> int:
        numbers = {number for stem, suffix in _WEIGHTS for kind in ("", ".index.json") for number, _ in self._numbered(stem, suffix + kind)}
        numbers |= {number for number, _ in self._folders(FSDP_MODEL_NAME)}
        missing = set(range(len(numbers))) - numbers
        if missing:
            raise CheckpointError(f"{self._folder.path} has weights of model {max(numbers)}, not of {min(missing)}: a part is missing")
        return len(numbers)

    # -- reading a file

    def _where(self, name: str) -> str:
        return str(self._folder.path / name)

    def _buffer(self, name: str, largest: int | None = None) -> memoryview:
        fd = self._folder.open(name)
        try:
            size = os.fstat(fd).st_size
            if largest is not None and size > largest:
                raise CheckpointError(f"{self._where(name)} has {size:,} bytes, where a few thousand are usual. It is not read.")
            return read_whole(fd, size, digest=False, where=self._where(name))[0]
        finally:
            os.close(fd)

    def _values(self, name: str, largest: int | None = None) -> TorchFileValues:
        """Return the values in a file. One with more than data is unpickled if that is allowed, else `NotPlainError`."""
        try:
            values = read_values(self._buffer(name, largest), self._where(name))
        except (NotPlainError, LegacyFormatError) as problem:
            if not self._allow_pickle:
                raise NotPlainError(f"{problem}. To unpickle it, if you trust it, pass allow_pickle=True.") from None
            return self._unpickled(name)
        if values.unknown and self._allow_pickle:
            return self._unpickled(name)
        return values

    def _plain(self, name: str, largest: int | None = None, *, views: bool = False) -> Any:
        """Return the content of a file. Its tensors own their memory; with `views` they share that of the whole file."""
        values = self._values(name, largest)
        if values.unknown:
            raise NotPlainError(
                f"{self._where(name)} contains more than data: {_listed(values.unknown)}. Building those runs code that the file "
                "names; if you trust it, pass allow_pickle=True."
            )
        return values.value if views else values.owned()

    def _unpickled(self, name: str) -> TorchFileValues:
        with os.fdopen(self._folder.open(name), "rb") as file:
            try:
                value = torch.load(file, map_location="cpu", weights_only=False)
            except Exception as problem:  # its classes may raise anything
                raise CheckpointError(f"{self._where(name)} cannot be unpickled: {type(problem).__name__}: {problem!s:.500}") from problem
        return TorchFileValues(value, (), lambda: value)

    def _state(
        self, name: str, check: Callable[[dict[str, Any]], str | None] = lambda state: None, *, views: bool = False
    ) -> dict[str, Any]:
        value = self._plain(name, views=views)
        problem = "is not a mapping" if not isinstance(value, dict) else check(value)
        if problem:
            raise CheckpointError(f"{self._where(name)} cannot be used: it {problem}")
        return dict(value)

    # -- weights

    def _model(self, number: int) -> dict[str, Any]:
        found = [
            (name, suffix, bool(kind))
            for stem, suffix in _WEIGHTS
            for kind in ("", ".index.json")
            if (name := _numbered_name(stem, suffix + kind, number)) in self._names
        ]
        found += [(name, "/", False) for place, name in self._folders(FSDP_MODEL_NAME) if place == number]
        for name, _, _ in found[1:]:
            self._warnings.append(f"{self._where(name)} was not read, because {found[0][0]} has weights of the same model")
        name, suffix, is_index = found[0]
        return self._indexed_weights(name, suffix) if is_index else dict(self._weights(name, suffix))

    def _optimizer(self, name: str) -> dict[str, Any]:
        if name.endswith(".bin"):
            return self._state(name, explain_bad_optimizer)
        if is_dcp_folder(self._folder.path / name):
            return self._dcp_optimizer(self._open_dcp(name), OPTIMIZER_NAME)
        state, tensors = read_shard_state(self._folder.path / name, OPTIMIZER_NAME)
        self._placeholders.add(tensors)
        if problem := explain_bad_optimizer(state):
            raise CheckpointError(f"{self._where(name)} cannot be used: it {problem}")
        return dict(state)

    def _open_dcp(self, name: str) -> DcpFolder:
        return open_dcp(self._folder.path / name)

    def _dcp_optimizer(self, folder: DcpFolder, key: str) -> dict[str, Any]:
        """Return the state of an optimizer. Counts of steps are read now, other tensors when a rank knows which part it needs."""
        placeholders = self._placeholders.add(folder.tensors)
        small = {id(placeholder): folder.tensors[name] for name, placeholder in placeholders.items() if not placeholder.dim()}
        state = {"state": {}, **_replaced(folder.state(key), small)}
        if problem := explain_bad_optimizer(state):
            raise CheckpointError(f"{folder.tensors.where} cannot be used: it {problem}")
        return state

    def _dcp_weights(self, folder: DcpFolder) -> dict[str, Any]:
        weights = folder.weights()
        tensors = self._placeholders.add(weights.tensors)
        return {**tensors, **{other: tensors[kept] for other, kept in weights.aliases.items() if kept in tensors}, **weights.extra}

    def _dcp_states(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the model and the optimizer in a folder that is itself one of torch.distributed.checkpoint."""
        folder = self._open_dcp("")
        nested = {path[0] for path in folder.metadata.paths.values() if len(path) > 1}
        if not nested:
            return [self._dcp_weights(folder)], []
        optimizers = [key for key in ("optimizer", "optim") if key in nested]
        return [self._dcp_weights(folder)], [self._dcp_optimizer(folder, key) for key in optimizers[:1]]

    def _weights(self, name: str, suffix: str) -> Mapping[str, Any]:
        if suffix == "/":
            return self._dcp_weights(self._open_dcp(name))
        if suffix == _TORCH:
            return self._state(name, _check_weights, views=True)  # they are copied into a model
        return WeightSource(self._folder.path, (name,)).open(name).tensors

    def _indexed_weights(self, index: str, suffix: str) -> dict[str, Any]:
        where, source = self._where(index), read_index(self._folder.path, index)
        if foreign := [name for name in source.files if not name.endswith(suffix)]:
            raise CheckpointError(f"{self._where(foreign[0])} is listed in {where}, and is not a {suffix} file")
        files, locations = {name: self._weights(name, suffix) for name in source.files}, source.weight_map or {}
        if missing := [tensor for tensor, name in locations.items() if tensor not in files[name]]:
            raise CheckpointError(f"{where} lists {missing[0]!r:.200} in {locations[missing[0]]}, and it is not there: two saves are mixed")
        if extra := sum(map(len, files.values())) - len(locations):
            self._warnings.append(f"{where} does not list {extra} of the tensors in its files; they were left out")
        return {tensor: files[name][tensor] for tensor, name in locations.items()}

    # -- optional parts

    def _object(self, name: str) -> tuple[Any] | None:
        try:
            return (self._plain(name),)
        except NotPlainError as problem:
            self._warnings.append(f"{problem} This registered object was left out.")
            return None

    def _ranks(self) -> tuple[dict[int, dict[str, Any]], int, int]:
        files = self._numbered("random_states", ".pkl", first=0)
        states: dict[int, dict[str, Any]] = {}
        step = 0
        for rank, name in files:
            try:
                states[rank], count = read_random_states(self._plain(name, _LARGEST_SMALL_FILE), self._where(name), self._warnings)
            except NotPlainError as problem:
                self._warnings.append(f"{problem} The random states of rank {rank} were left out.")
                continue
            step = count if rank == 0 else step
        if not files:
            self._warnings.append(f"{self._folder.path} has no random_states_0.pkl: random states and the step count were not restored")
        return states, step, max((rank + 1 for rank, _ in files), default=1)


def _numbered_name(stem: str, suffix: str, number: int) -> str:
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name:.80}" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_weights(state: dict[str, Any]) -> str | None:
    return None if all(isinstance(name, str) for name in state) else "has weights whose names are not strings"


def explain_bad_optimizer(state: Any) -> str | None:
    """Return what is wrong with the state of an optimizer, as the end of a sentence; None if it can be loaded."""
    if not isinstance(state, dict):
        return "is not a mapping"
    groups, states = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        return "is not the state of an optimizer: it has no list param_groups or no mapping state"
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return "has a parameter group without a list of parameters"
    given = [key for group in groups for key in group["params"]]
    kind = str if any(type(key) is str for key in given) else int  # states of sharded models go by names
    keys = {key for key in given if type(key) is kind}
    if len(keys) != len(given):
        return "does not number its parameters, each once, nor name them"
    if not all(type(key) is kind and key in keys and isinstance(state, dict) for key, state in states.items()):
        return "has the state of a parameter that is in none of its groups"
    return None


def _replaced(value: Any, made: Mapping[int, torch.Tensor]) -> Any:
    """Return a state with tensors in the place of placeholders."""
    if isinstance(value, dict):
        return {key: _replaced(item, made) for key, item in value.items()}
    return [_replaced(item, made) for item in value] if isinstance(value, list) else made.get(id(value), value)


def _check_scaler(state: dict[str, Any]) -> str | None:
    wrong = [name for name, value in state.items() if type(value) not in (int, float) or not 0 <= value < float("inf")]
    return f"has no number for {wrong[0]!r:.80}" if wrong else None
