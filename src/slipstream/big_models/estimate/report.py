"""The estimate of a model's memory, for each dtype and training mode: weights, gradients, optimizer states, activations and cache.

A folder of weights with a config of a known architecture needs no torch: sizes come from headers, activations from formulas. Anything
else is built on the meta device and measured. Inference is weights + cache + activations. Training is weights + gradients + optimizer +
activations; all gradients are counted at the peak of activations, as with gradient accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slipstream.big_models.estimate import formula
from slipstream.big_models.estimate.rank_memory import ShardedMemory, estimate_ranks, group_by_name, group_by_policy
from slipstream.big_models.estimate.tensors import (
    OPTIMIZERS,
    WEIGHT_DTYPES,
    EstimatedTensors,
    TrainingMode,
    WeightDtype,
    has_weights,
    list_training_modes,
    read_config,
    read_tensors,
)
from slipstream.config import for_worker
from slipstream.devices.count import count_without_torch
from slipstream.devices.memory import available_memory
from slipstream.devices.table import CPU
from slipstream.distributed.progress_bar import waiting
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from slipstream.big_models.estimate.meta_model import MeasuredMemory, ModelInputs
    from slipstream.parallel.mesh import MeshSizes

__all__ = ["Estimate", "EstimateOptions", "InferenceMemory", "TrainingMemory", "estimate", "measure_free_memory"]


_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_ENTRY_POINT: Final = re.compile(r"[^:]+:[^\W\d]\w*(\.[^\W\d]\w*)*")
_DEFAULT_LENGTH: Final = 2048


class EstimateOptions(NamedTuple):
    """What to estimate."""

    dtypes: tuple[WeightDtype, ...]
    batch_size: int = 1
    sequence_length: int | None = None
    optimizer: str = "adamw"
    inference: bool = True
    training: bool = True
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    measure: bool = False
    mesh: MeshSizes | None = None
    """The ranks of sharded training; None: no figures for it."""


class InferenceMemory(NamedTuple):
    """Bytes to run a model; None means unknown."""

    dtype: str
    largest_layer: int
    weights: int
    cache: int | None
    activations: int | None
    total: int


class TrainingMemory(NamedTuple):
    """Bytes to train a model; None means unknown."""

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
    """How `model` was read: "folder", "config", "weights", "entry point" or "hub"."""
    parameters: int
    tensors: int
    stored: Mapping[str, int]
    largest_layer: str
    batch_size: int
    sequence_length: int | None
    optimizer: str
    inference: tuple[InferenceMemory, ...]
    training: tuple[TrainingMemory, ...]
    devices: Mapping[str, int]
    notes: tuple[str, ...]
    mesh: MeshSizes | None = None
    blocks: int = 0
    """How many blocks are sharded as units, beside the root."""
    blocks_reason: str = ""
    sharded: tuple[ShardedMemory, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the figures as data for JSON."""
        tables: dict[str, tuple[Any, ...]] = {"inference": self.inference, "training": self.training, "sharded": self.sharded}
        rows = {name: [row._asdict() for row in table] for name, table in tables.items()}
        mesh = None if self.mesh is None else {axis: self.mesh.size(axis) for axis in ("dp_replicate", "dp_shard")}
        return {**self._asdict(), **rows, "mesh": mesh}


class _EstimatedModel(NamedTuple):
    """The model that the user named: its tensors, and the inputs from which activations are computed."""

    kind: str
    tensors: EstimatedTensors
    config: Mapping[str, Any] | None = None
    model: torch.nn.Module | None = None
    inputs: ModelInputs | None = None
    length: int | None = None
    unknown_reason: str = ""
    """Why activations are not known."""


def estimate(name: str, settings: EstimateOptions, environ: Mapping[str, str]) -> Estimate:
    """Return the figures for a model: `name` is a folder, a config, weights, an entry point, or a name on the hub."""
    subject = _find_model(name, settings, environ)
    activations = _Activations(subject, settings)
    inference = tuple(_inference(subject.tensors, kind, activations) for kind in settings.dtypes) if settings.inference else ()
    modes = [mode for kind in settings.dtypes for mode in list_training_modes(kind)] if settings.training else []
    training = tuple(_training(subject.tensors, mode, settings.optimizer, activations) for mode in modes)
    widest = max(settings.dtypes, key=lambda kind: kind.bits)
    notes = [*subject.tensors.notes, *activations.notes, *_notes(settings, bool(training))]
    found = Estimate(
        name,
        subject.kind,
        subject.tensors.count,
        len(subject.tensors.tensors),
        subject.tensors.stored,
        subject.tensors.largest_layer(widest)[0],
        settings.batch_size,
        subject.length,
        settings.optimizer,
        inference,
        training,
        measure_free_memory(environ),
        tuple(dict.fromkeys(notes)),
    )
    if settings.mesh is None:
        return found
    groups = group_by_name(subject.tensors) if subject.model is None else group_by_policy(subject.model)
    sharded = estimate_ranks(groups, settings.mesh, modes, settings.optimizer)
    blocks = sum(bool(block) for block in groups.blocks)
    return found._replace(mesh=settings.mesh, blocks=blocks, blocks_reason=groups.reason, sharded=tuple(sharded))


def _notes(settings: EstimateOptions, trains: bool) -> list[str]:
    notes = []
    quantised = [kind.name for kind in settings.dtypes if kind.scales]
    if settings.training and quantised:
        notes.append(f"Weights in {' or '.join(quantised)} have no gradients: train adapters on top of them, or use a different type.")
    if trains and any(kind.bits == 16 for kind in settings.dtypes):
        notes.append(
            "mixed: weights, gradients and optimizer in float32, computing in 16 bits, as mixed_precision does; pure: all in 16 bits."
        )
    return notes


def measure_free_memory(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the free bytes of each device here, of the family that options name if they do; torch is imported if there are accelerators.

    >>> list(measure_free_memory({}))[-1]
    'cpu'
    """
    found: dict[str, int] = {}
    config = for_worker()
    if count_without_torch(environ, config.device.family, config.describe_device())[1]:
        from slipstream.devices.table import default_family, device_for

        family = default_family()
        devices = [str(device_for(family, rank)) for rank in range(family.count())] if family is not CPU else []
        found = {device: free for device in devices if (free := available_memory(device)) is not None}
    return {**found, CPU.type: available_memory(CPU.type) or 0}


def _inference(tensors: EstimatedTensors, kind: WeightDtype, activations: _Activations) -> InferenceMemory:
    weights = tensors.size(kind)
    cache, peak = activations.forward(kind)
    return InferenceMemory(kind.name, tensors.largest_layer(kind)[1], weights, cache, peak, weights + (cache or 0) + (peak or 0))


def _training(tensors: EstimatedTensors, mode: TrainingMode, optimizer: str, activations: _Activations) -> TrainingMemory:
    kind = WEIGHT_DTYPES[mode.weights]
    width = kind.bits // 8
    weights = tensors.size(kind)
    gradients = sum(part.count * width for part in tensors.trained)
    states = sum(OPTIMIZERS[optimizer](part.shape, width) for part in tensors.trained)
    peak = activations.step(mode)
    total = weights + gradients + states + (peak or 0)
    return TrainingMemory(mode.name, tensors.largest_layer(kind)[1], weights, gradients, states, peak, total)


class _Activations:
    """Memory of activations, by formula or measured; each run once."""

    def __init__(self, subject: _EstimatedModel, settings: EstimateOptions) -> None:
        self._subject = subject
        self._settings = settings
        self._shape = None if subject.model is not None else formula.parse_decoder_shape(subject.config, subject.length or 1)
        self._tokens = settings.batch_size * (subject.length or 1)
        self._measured: dict[tuple[str, bool, bool], MeasuredMemory | None] = {}
        self.notes: list[str] = []
        if self._shape is not None:
            self.notes.append("Activations and cache are computed by formula; --measure runs the model on shapes instead.")
        elif subject.inputs is None:
            self.notes.append(f"Activations are not counted: {subject.unknown_reason}")

    def forward(self, kind: WeightDtype) -> tuple[int | None, int | None]:
        """Return cache and peak of a forward pass."""
        width = WEIGHT_DTYPES[kind.computes].bits // 8
        if self._shape is not None:
            cache = formula.compute_cache_size(self._shape, self._tokens, width)
            return cache, formula.compute_forward_peak(self._shape, self._tokens, width)
        found = self._run(kind.computes, autocast=False, training=False)
        return (None, None) if found is None else (found.cache, found.peak)

    def step(self, mode: TrainingMode) -> int | None:
        """Return the peak of a training step."""
        checkpointing = self._settings.gradient_checkpointing
        if self._shape is not None:
            width = WEIGHT_DTYPES[mode.computes].bits // 8
            return formula.compute_step_peak(self._shape, self._tokens, width, mixed=mode.mixed, checkpointing=checkpointing)
        found = self._run(mode.computes, autocast=mode.mixed, training=True)
        return None if found is None else found.peak

    def _run(self, dtype: str, *, autocast: bool, training: bool) -> MeasuredMemory | None:
        model, inputs = self._subject.model, self._subject.inputs
        if model is None or inputs is None:
            return None
        dtype = "bfloat16" if dtype == "float16" else dtype  # of the same size, and supported by every operator
        key = (dtype, autocast, training)
        if key not in self._measured:
            self._measured[key] = self._measure(model, inputs, dtype, autocast=autocast, training=training)
        return self._measured[key]

    def _measure(
        self, model: torch.nn.Module, inputs: ModelInputs, dtype: str, *, autocast: bool, training: bool
    ) -> MeasuredMemory | None:
        import torch

        from slipstream.big_models.estimate.meta_model import measure, plain_transformers_paths

        options = {"autocast": autocast, "training": training, "checkpointing": self._settings.gradient_checkpointing}
        what = f"measuring {'a step' if training else 'a run'} in {dtype} (this can take a while)"
        try:
            with plain_transformers_paths(), waiting(what):
                return measure(model, inputs, dtype=getattr(torch, dtype), **options)
        except Exception as error:  # code of the model, which may need values that fake tensors do not have
            lines = str(error).strip().splitlines() or ["without a message"]
            raised = f"{type(error).__name__}: {lines[0]}"
            self.notes.append(f"Activations could not be measured in {dtype}, and are not counted: the model raised {raised}")
            return None


# --- finding the model --------------------------------------------------------------------------------------------------------------


def _find_model(name: str, settings: EstimateOptions, environ: Mapping[str, str]) -> _EstimatedModel:
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, settings)
    if path.is_file():
        return _from_file(path, settings)
    if _ENTRY_POINT.fullmatch(name) and "://" not in name:
        from slipstream.big_models.estimate.meta_model import from_entry_point, list_tensors

        model, inputs = from_entry_point(name, settings.batch_size, settings.sequence_length)
        reason = "the inputs of the model are unknown. Let the entry point return a pair (model, inputs)."
        return _EstimatedModel("entry point", list_tensors(model), None, model, inputs, settings.sequence_length, reason)
    if not _HUB_NAME.fullmatch(name) or name.startswith(".") or name.endswith((".json", ".py", ".safetensors", ".bin")):
        present = sorted(file.name for file in path.parent.iterdir())[:8] if path.parent.is_dir() else []
        near = f" In {path.parent} there are: {', '.join(present)}." if present else ""
        raise ConfigError(
            f"There is nothing at {name}.{near}\n"
            "Give a folder, a config.json, a file of weights, or an entry point such as package.module:function."
        )
    from slipstream.big_models.estimate.meta_model import from_hub, list_tensors

    length = settings.sequence_length or _DEFAULT_LENGTH
    model, inputs = from_hub(name, settings.batch_size, length, environ, trust_remote_code=settings.trust_remote_code)
    return _EstimatedModel("hub", list_tensors(model), model=model, inputs=inputs, length=length, unknown_reason="its inputs are unknown.")


def _from_folder(path: Path, settings: EstimateOptions) -> _EstimatedModel:
    config = read_config(path / "config.json") if (path / "config.json").is_file() else None
    if not has_weights(path):
        if config is None:
            present = sorted(file.name for file in path.iterdir())[:8]
            raise ConfigError(
                f"{path} holds neither a config.json nor weights; it holds {', '.join(present) or 'nothing'}.\n"
                "Give the folder of a model: with a config.json, model.safetensors, an index, or a checkpoint."
            )
        return _from_described_config(config, path, settings, None, "config")
    tensors = read_tensors(path, config)
    if config is None:
        why = f"{path} has no config.json. Give an entry point that builds the model."
        return _EstimatedModel("weights", tensors, length=settings.sequence_length, unknown_reason=why)
    return _from_described_config(config, path, settings, tensors, "folder")


def _from_file(path: Path, settings: EstimateOptions) -> _EstimatedModel:
    if path.suffix == ".py":
        raise ConfigError(f"{path} is a Python file.\nName the function that builds the model: {path}:function")
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _from_described_config(read_config(path), path, settings, None, "config")
    why = "a file of weights does not say how they are used. Give the folder with its config.json, or an entry point."
    return _EstimatedModel("weights", read_tensors(path), length=settings.sequence_length, unknown_reason=why)


def _from_described_config(
    config: Mapping[str, Any], path: Path, settings: EstimateOptions, tensors: EstimatedTensors | None, kind: str
) -> _EstimatedModel:
    """Return a model with a config: by formula if there is one, else built on the meta device."""
    length = _choose_length(config, settings.sequence_length)
    if not settings.measure and (shape := formula.parse_decoder_shape(config, length)) is not None:
        listed = tensors if tensors is not None else formula.list_decoder_tensors(config, shape)
        if listed is not None:
            return _EstimatedModel(kind, listed, config, length=length)
    from slipstream.big_models.estimate.meta_model import from_config, list_tensors

    try:
        model, inputs = from_config(config, path, settings.batch_size, length, trust_remote_code=settings.trust_remote_code)
    except ConfigError as error:
        if tensors is None or settings.measure:
            raise
        return _EstimatedModel(kind, tensors, config, length=length, unknown_reason=" ".join(str(error).split("\n")))
    return _EstimatedModel(kind, tensors or list_tensors(model), config, model, inputs, length, "the inputs of this model are unknown.")


def _choose_length(config: Mapping[str, Any], given: int | None) -> int:
    most = config.get("max_position_embeddings") or config.get("n_positions")
    return given or (min(_DEFAULT_LENGTH, most) if isinstance(most, int) and most > 0 else _DEFAULT_LENGTH)
