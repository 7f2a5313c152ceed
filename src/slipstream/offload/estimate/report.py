"""The estimate: from what the user names to figures, for each type of weights and each way to train. Torch is imported if it must be.

A folder of weights with a config of a known architecture is answered without torch: sizes from headers, activations by formula. Anything
else is built without memory and measured. Total of inference: weights + cache + activations. Total of training: weights + gradients +
optimizer + activations; gradients are counted as if all of them were there at the time of most activations, as they are when steps
accumulate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slipstream.devices.memory import available_memory
from slipstream.devices.table import CPU, FAMILIES
from slipstream.errors import ConfigError
from slipstream.offload.estimate import formula, headers
from slipstream.offload.estimate.decoders import described_parts
from slipstream.offload.estimate.kinds import KINDS, Kind, Way, optimizer_size, ways_of
from slipstream.offload.estimate.parts import Parts
from slipstream.offload.estimate.waiting import telling

if TYPE_CHECKING:
    import torch

    from slipstream.offload.estimate.measure import Inputs, Measured

__all__ = ["Estimate", "Inference", "Settings", "Training", "estimate", "free_memory"]

_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_ENTRY_POINT: Final = re.compile(r"[^:]+:[^\W\d]\w*(\.[^\W\d]\w*)*")
_DEFAULT_LENGTH: Final = 2048


class Settings(NamedTuple):
    """What is asked for."""

    dtypes: tuple[Kind, ...]
    batch_size: int = 1
    sequence_length: int | None = None
    optimizer: str = "adamw"
    inference: bool = True
    training: bool = True
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    measure: bool = False


class Inference(NamedTuple):
    """Bytes to run a model; None: not known."""

    dtype: str
    largest_layer: int
    weights: int
    cache: int | None
    activations: int | None
    total: int


class Training(NamedTuple):
    """Bytes to train a model; None: not known."""

    precision: str
    largest_layer: int
    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    total: int


class Estimate(NamedTuple):
    """The figures for one model."""

    model: str
    kind: str
    """What it was taken for."""
    parameters: int
    tensors: int
    stored: Mapping[str, int]
    largest_layer: str
    batch_size: int
    sequence_length: int | None
    optimizer: str
    inference: tuple[Inference, ...]
    training: tuple[Training, ...]
    devices: Mapping[str, int]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        rows = {"inference": [row._asdict() for row in self.inference], "training": [row._asdict() for row in self.training]}
        return {**self._asdict(), **rows}


class _Subject(NamedTuple):
    """What the user named: its parts, and what activations can be found out from."""

    kind: str
    parts: Parts
    config: Mapping[str, Any] | None = None
    model: torch.nn.Module | None = None
    inputs: Inputs | None = None
    length: int | None = None
    why_not: str = ""
    """Why activations are not known."""


def estimate(given: str, settings: Settings, environ: Mapping[str, str]) -> Estimate:
    """The figures for what `given` names: a folder, a config, weights, an entry point, or a name on the hub."""
    subject = _subject(given, settings, environ)
    activations = _Activations(subject, settings)
    inference = tuple(_inference(subject.parts, kind, activations) for kind in settings.dtypes) if settings.inference else ()
    ways = [way for kind in settings.dtypes for way in ways_of(kind)] if settings.training else []
    training = tuple(_training(subject.parts, way, settings.optimizer, activations) for way in ways)
    widest = max(settings.dtypes, key=lambda kind: kind.bits)
    notes = [*subject.parts.notes, *activations.notes, *_notes(settings, bool(training))]
    return Estimate(
        given,
        subject.kind,
        subject.parts.count,
        len(subject.parts.parts),
        subject.parts.stored,
        subject.parts.largest_layer(widest)[0],
        settings.batch_size,
        subject.length,
        settings.optimizer,
        inference,
        training,
        free_memory(environ),
        tuple(dict.fromkeys(notes)),
    )


def _notes(settings: Settings, trains: bool) -> list[str]:
    notes = []
    quantised = [kind.name for kind in settings.dtypes if kind.scales]
    if settings.training and quantised:
        notes.append(f"Weights in {' or '.join(quantised)} have no gradients: train adapters on top of them, or in another type.")
    if trains and any(kind.bits == 16 for kind in settings.dtypes):
        notes.append(
            "mixed: weights, gradients and optimizer in float32, computing in 16 bits, as mixed_precision does; pure: all in 16 bits."
        )
    return notes


def free_memory(environ: Mapping[str, str]) -> dict[str, int]:
    """Bytes that are free on each device of this machine; torch is asked if there are others than the host.

    >>> list(free_memory({}))[-1]
    'cpu'
    """
    found: dict[str, int] = {}
    if any(family.count_files(environ) for family in FAMILIES if family is not CPU):
        from slipstream.devices.table import best_family, device_for

        family = best_family()
        devices = [str(device_for(family, rank)) for rank in range(family.count())] if family is not CPU else []
        found = {device: free for device in devices if (free := available_memory(device)) is not None}
    return {**found, CPU.type: available_memory(CPU.type) or 0}


def _inference(parts: Parts, kind: Kind, activations: _Activations) -> Inference:
    weights = parts.size(kind)
    cache, peak = activations.forward(kind)
    return Inference(kind.name, parts.largest_layer(kind)[1], weights, cache, peak, weights + (cache or 0) + (peak or 0))


def _training(parts: Parts, way: Way, optimizer: str, activations: _Activations) -> Training:
    kind = KINDS[way.weights]
    width = kind.bits // 8
    weights = parts.size(kind)
    gradients = sum(part.count * width for part in parts.trained)
    states = sum(optimizer_size(optimizer, part.shape, width) for part in parts.trained)
    peak = activations.step(way)
    total = weights + gradients + states + (peak or 0)
    return Training(way.name, parts.largest_layer(kind)[1], weights, gradients, states, peak, total)


class _Activations:
    """What runs take, by formula or measured; each run once."""

    def __init__(self, subject: _Subject, settings: Settings) -> None:
        self._subject = subject
        self._settings = settings
        self._shape = None if subject.model is not None else formula.known(subject.config, subject.length or 1)
        self._tokens = settings.batch_size * (subject.length or 1)
        self._measured: dict[tuple[str, bool, bool], Measured | None] = {}
        self.notes: list[str] = []
        if self._shape is not None:
            self.notes.append("Activations and cache are computed by formula; --measure runs the model on shapes instead.")
        elif subject.inputs is None:
            self.notes.append(f"Activations are not counted: {subject.why_not}")

    def forward(self, kind: Kind) -> tuple[int | None, int | None]:
        """Cache and peak of a forward pass."""
        width = KINDS[kind.computes].bits // 8
        if self._shape is not None:
            return formula.cache_size(self._shape, self._tokens, width), formula.forward_peak(self._shape, self._tokens, width)
        found = self._run(kind.computes, autocast=False, training=False)
        return (None, None) if found is None else (found.cache, found.peak)

    def step(self, way: Way) -> int | None:
        """Peak of a step of training."""
        checkpointing = self._settings.gradient_checkpointing
        if self._shape is not None:
            width = KINDS[way.computes].bits // 8
            return formula.step_peak(self._shape, self._tokens, width, mixed=way.mixed, checkpointing=checkpointing)
        found = self._run(way.computes, autocast=way.mixed, training=True)
        return None if found is None else found.peak

    def _run(self, dtype: str, *, autocast: bool, training: bool) -> Measured | None:
        if self._subject.model is None or self._subject.inputs is None:
            return None
        dtype = "bfloat16" if dtype == "float16" else dtype  # of the same size, and every operator has it
        key = (dtype, autocast, training)
        if key not in self._measured:
            self._measured[key] = self._try(dtype, autocast=autocast, training=training)
        return self._measured[key]

    def _try(self, dtype: str, *, autocast: bool, training: bool) -> Measured | None:
        import torch

        from slipstream.offload.estimate.building import undisturbed
        from slipstream.offload.estimate.measure import measure

        assert self._subject.model is not None
        assert self._subject.inputs is not None
        checkpointing = self._settings.gradient_checkpointing
        try:
            with undisturbed(), telling(f"measuring {'a step' if training else 'a run'} in {dtype} (this can take a while)"):
                return measure(
                    self._subject.model,
                    self._subject.inputs,
                    dtype=getattr(torch, dtype),
                    autocast=autocast,
                    training=training,
                    checkpointing=checkpointing,
                )
        except Exception as error:  # code of the model, which may need values that there are none of
            lines = str(error).strip().splitlines()
            what = f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
            self.notes.append(f"Activations could not be measured in {dtype}, and are not counted: the model raised {what}")
            return None


# --- what the user named ------------------------------------------------------------------------------------------------------------


def _subject(given: str, settings: Settings, environ: Mapping[str, str]) -> _Subject:
    path = Path(given).expanduser()
    if path.is_dir():
        return _folder(path, settings)
    if path.is_file():
        return _file(path, settings)
    if _ENTRY_POINT.fullmatch(given) and "://" not in given:
        from slipstream.offload.estimate.building import from_entry_point, parts_of

        model, inputs = from_entry_point(given, settings.batch_size, settings.sequence_length)
        why = "what the model is called with is not known. Let the entry point return a pair (model, inputs)."
        return _Subject("entry point", parts_of(model), model=model, inputs=inputs, length=settings.sequence_length, why_not=why)
    if not _HUB_NAME.fullmatch(given) or given.startswith(".") or given.endswith((".json", ".py", ".safetensors", ".bin")):
        there = sorted(one.name for one in path.parent.iterdir())[:8] if path.parent.is_dir() else []
        near = f" In {path.parent} there are: {', '.join(there)}." if there else ""
        raise ConfigError(
            f"There is nothing at {given}.{near}\n"
            "Give a folder, a config.json, a file of weights, or an entry point such as package.module:function."
        )
    from slipstream.offload.estimate.building import from_hub, parts_of

    length = settings.sequence_length or _DEFAULT_LENGTH
    model, inputs = from_hub(given, settings.batch_size, length, environ, trust_remote_code=settings.trust_remote_code)
    return _Subject("hub", parts_of(model), model=model, inputs=inputs, length=length, why_not="its inputs are not known.")


def _folder(path: Path, settings: Settings) -> _Subject:
    config = headers.read_config(path / "config.json") if (path / "config.json").is_file() else None
    if not headers.has_weights(path):
        if config is None:
            there = sorted(one.name for one in path.iterdir())[:8]
            raise ConfigError(
                f"{path} holds neither a config.json nor weights; it holds {', '.join(there) or 'nothing'}.\n"
                "Give the folder of a model: with a config.json, model.safetensors, an index, or a checkpoint."
            )
        return _described(config, path, settings, None, "config")
    parts = headers.read_parts(path, config)
    if config is None:
        why = f"{path} has no config.json. Give an entry point that builds the model."
        return _Subject("weights", parts, length=settings.sequence_length, why_not=why)
    return _described(config, path, settings, parts, "folder")


def _file(path: Path, settings: Settings) -> _Subject:
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a Python file.\nSay what in it builds the model: {path}:function")
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _described(headers.read_config(path), path, settings, None, "config")
    why = "a file of weights does not say how they are used. Give the folder with its config.json, or an entry point."
    return _Subject("weights", headers.read_parts(path), length=settings.sequence_length, why_not=why)


def _described(config: Mapping[str, Any], path: Path, settings: Settings, parts: Parts | None, kind: str) -> _Subject:
    """A model with a config: by formula where one is known, else built."""
    length = _length(config, settings.sequence_length)
    if not settings.measure and (shape := formula.known(config, length)) is not None:
        known = parts if parts is not None else described_parts(config, shape)
        if known is not None:
            return _Subject(kind, known, config, length=length)
    from slipstream.offload.estimate.building import from_config, parts_of

    try:
        model, inputs = from_config(config, path, settings.batch_size, length, trust_remote_code=settings.trust_remote_code)
    except ConfigError as error:
        if parts is None or settings.measure:
            raise
        return _Subject(kind, parts, config, length=length, why_not=" ".join(str(error).split("\n")))
    return _Subject(kind, parts or parts_of(model), config, model, inputs, length, "what this model is called with is not known here.")


def _length(config: Mapping[str, Any], given: int | None) -> int:
    most = config.get("max_position_embeddings") or config.get("n_positions")
    return given or (min(_DEFAULT_LENGTH, most) if isinstance(most, int) and most > 0 else _DEFAULT_LENGTH)
