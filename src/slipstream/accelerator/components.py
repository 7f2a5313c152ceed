"""The components of an Accelerator: arguments checked, handlers sorted, objects built and connected once.

`check_arguments` raises for names and values that the constructor cannot use. `sort_handlers` sorts `kwargs_handlers` by type, at most
one of each. The `resolve_*` functions settle arguments that can be given in two ways. `assemble_components` builds `Components`, which
the methods of the Accelerator and the checkpoint code work on. Every object here belongs to one Accelerator.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from slipstream.config.handlers import GradientAccumulationPlugin, InitProcessGroupKwargs, ProjectConfiguration, check_count
from slipstream.config.resolved_config import describe_option
from slipstream.config.schema import Parallelism, Sharding
from slipstream.data.loader import PreparedLoader
from slipstream.data.options import DataLoaderConfiguration, DataRank
from slipstream.devices import rng
from slipstream.devices.packages import require_torch
from slipstream.devices.table import RNGType
from slipstream.distributed import collectives
from slipstream.distributed.gradient_state import GradientState
from slipstream.distributed.state import AcceleratorState
from slipstream.errors import ConfigError
from slipstream.logging import get_logger
from slipstream.observability.options import GuardKwargs, LedgerKwargs, ProfileKwargs
from slipstream.observability.timing.ledger import Ledger
from slipstream.parallel.compile import TorchDynamoPlugin, complete_plugin
from slipstream.precision.model_precision import ModelPrecision
from slipstream.precision.policy import AORecipeKwargs, AutocastKwargs, GradScalerKwargs, make_policy
from slipstream.strategies.base import Strategy
from slipstream.strategies.ddp_options import DDPCommunicationHookType, DistributedDataParallelKwargs
from slipstream.training.clip import GradientClipper
from slipstream.training.optimizer import AcceleratedOptimizer
from slipstream.training.scheduler import AcceleratedScheduler
from slipstream.training.stepper import Stepper

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import Saver
    from slipstream.observability.recorder import RunRecorder
    from slipstream.parallel.mesh import MeshSizes
    from slipstream.strategies.fsdp_options import ShardingOptions

__all__ = [
    "AcceleratorBase", "Components", "HANDLER_TYPES", "HandlerSet", "PreparedObjects", "assemble_components",
    "changed_arguments", "check_arguments", "check_rng_types", "resolve_accumulation", "resolve_dataloader_config", "resolve_dynamo",
    "ShardingSetup", "resolve_project", "resolve_sharding_setup", "sort_handlers",
]


@dataclass
class HandlerSet:
    """One handler of each kind, or None."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: AORecipeKwargs | None = None
    ledger: LedgerKwargs | None = None
    guards: GuardKwargs | None = None

    def with_on_nan(self, on_nan: str | None) -> HandlerSet:
        """Return the set with `Accelerator(on_nan=...)` applied to the guards. Raise if a handler sets it too.

        >>> HandlerSet().with_on_nan("raise").guards.on_nan
        'raise'
        """
        if on_nan is None:
            return self
        if self.guards is not None:
            raise ConfigError(f"Accelerator(on_nan={on_nan!r}) and a GuardKwargs: write GuardKwargs(on_nan={on_nan!r}, ...) alone")
        return replace(self, guards=GuardKwargs(on_nan=on_nan))

    def check_precision(self, mixed_precision: str) -> HandlerSet:
        """Return the set. Raise for a handler that has no effect in this precision."""
        if self.scaler is not None and mixed_precision != "fp16":
            raise ConfigError(f"GradScalerKwargs was given with mixed_precision={mixed_precision!r}: only fp16 scales losses; leave it out")
        if self.autocast is not None and mixed_precision == "no":
            raise ConfigError("AutocastKwargs was given with mixed_precision='no', where there is no autocast: leave it out")
        if self.fp8 is not None and mixed_precision != "fp8":
            raise ConfigError(f"AORecipeKwargs was given with mixed_precision={mixed_precision!r}: it is for fp8; leave it out")
        return self


_HANDLER_FIELDS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallelKwargs, "ddp"),
    (GradScalerKwargs, "scaler"),
    (InitProcessGroupKwargs, "init"),
    (AutocastKwargs, "autocast"),
    (ProfileKwargs, "profile"),
    (AORecipeKwargs, "fp8"),
    (LedgerKwargs, "ledger"),
    (GuardKwargs, "guards"),
)
HANDLER_TYPES: tuple[type, ...] = tuple(kind for kind, _ in _HANDLER_FIELDS)
"""The classes that `kwargs_handlers` may have objects of."""


def sort_handlers(handlers: Sequence[Any] | None) -> HandlerSet:
    """Return the handlers by type. Raise for a second one of a type, and for anything else.

    >>> sort_handlers([AutocastKwargs(enabled=False)]).autocast.enabled
    False
    """
    found = HandlerSet()
    for handler in handlers or ():
        name = next((name for kind, name in _HANDLER_FIELDS if isinstance(handler, kind)), None)
        if name is None:
            known = ", ".join(kind.__name__ for kind, _ in _HANDLER_FIELDS)
            raise ConfigError(f"kwargs_handlers has a {type(handler).__name__}, which is not a handler: write one of {known}")
        if getattr(found, name) is not None:
            raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}: pass one, with all that you want to set")
        setattr(found, name, handler)
    return found


def _reduce_dtype(options: DistributedDataParallelKwargs | None) -> torch.dtype | None:
    """Return the dtype in which a communication hook sends gradients."""
    if options is None:
        return None
    formats = {DDPCommunicationHookType.FP16: torch.float16, DDPCommunicationHookType.BF16: torch.bfloat16}
    return formats.get(options.comm_wrapper) or formats.get(options.comm_hook)


@dataclass
class PreparedObjects:
    """The prepared objects, in order, except models (which the stepper holds)."""

    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)

    def find_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer | None:
        """Return the prepared form of an optimizer, newest first."""
        return next((entry for entry in reversed(self.optimizers) if optimizer is entry or optimizer is entry.optimizer), None)

    def forget(self) -> None:
        """Drop all references."""
        self.optimizers, self.schedulers, self.loaders = [], [], []


@dataclass
class Components:
    """What one Accelerator is made of."""

    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    precision: ModelPrecision
    stepper: Stepper
    clipper: GradientClipper
    registry: PreparedObjects
    ledger: Ledger
    loader_config: DataLoaderConfiguration
    dynamo: TorchDynamoPlugin | None
    data_rank: DataRank
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_steps_per_process: bool
    effective_batch_size: int | None
    rng_types: list[str]


class AcceleratorBase:
    """The attributes that the groups of methods of `Accelerator` share."""

    state: AcceleratorState
    project_configuration: ProjectConfiguration
    _components: Components
    _handlers: HandlerSet
    _given: dict[str, Any]
    """The arguments that were given and differ from their defaults."""
    _saver: Saver
    _recorder: RunRecorder


def assemble_components(
    state: AcceleratorState,
    handlers: HandlerSet,
    gradient_state: GradientState,
    loader_config: DataLoaderConfiguration,
    dynamo: TorchDynamoPlugin | None,
    sharding: ShardingSetup | None,
    *,
    outputs_to_fp32: bool | None,
    rng_types: list[str],
    **settings: Any,
) -> Components:
    """Build the components and connect them."""
    steps = gradient_state.num_steps
    if handlers.ddp is not None and handlers.ddp.static_graph and steps > 1:
        raise ConfigError(
            f"DistributedDataParallelKwargs(static_graph=True) with {steps} batches per update: torch cannot leave out "
            "the averaging of a static graph (it fails inside). Leave out static_graph, or accumulate over one batch."
        )
    registry, ledger = PreparedObjects(), _make_ledger(state, handlers)
    gradient_state.meter = ledger.meter
    # Loaders hold this state, so what it holds must not hold them.
    gradient_state.metrics.count_updates = _update_counter(weakref.ref(registry))
    strategy = _choose_strategy(state, handlers, ledger, sharding)
    _check_fp8(state)
    precision = ModelPrecision(
        state.mixed_precision,
        strategy.device_type(state.device),
        autocast=handlers.autocast,
        scaler=handlers.scaler,
        fp8=handlers.fp8 or AORecipeKwargs(pad_inner_dim=state.compute.fp8_pad_inner_dim or None),
        reduce_dtype=_reduce_dtype(handlers.ddp) if state.use_distributed else None,
        outputs_to_fp32=outputs_to_fp32,
    )

    def sum_numbers(numbers: list[float]) -> list[float]:
        return [float(number) for number in collectives.reduce(state.channel(), state.limits, numbers, "sum", operation="backward")]

    stepper = Stepper(
        gradient_state, strategy, precision.scaler, rank=state.process_index, world_size=state.num_processes, sum_numbers=sum_numbers
    )
    return Components(
        state=state,
        gradient_state=gradient_state,
        strategy=strategy,
        precision=precision,
        stepper=stepper,
        clipper=GradientClipper(stepper, lambda: registry.optimizers),
        registry=registry,
        ledger=ledger,
        loader_config=loader_config,
        dynamo=dynamo,
        data_rank=DataRank(state.process_index, state.num_processes, state.channel, state.limits, compares=True),
        rng_types=rng_types,
        **settings,
    )


def _choose_strategy(state: AcceleratorState, handlers: HandlerSet, ledger: Ledger, sharding: ShardingSetup | None) -> Strategy:
    if sharding is not None:
        require_torch("Sharded training (FSDP)")
        from slipstream.strategies.fsdp import FSDPStrategy, UnshardedStrategy  # imported where models are sharded

        if handlers.ddp is not None:
            raise ConfigError("DistributedDataParallelKwargs with a fsdp_plugin: models are sharded and not replicated; leave one out")
        if not state.use_distributed:
            return UnshardedStrategy(state.device, sharding.options)
        return FSDPStrategy(state.runtime, state.limits, state.device, sharding.options, sharding.sizes, ledger.meter)
    if not state.use_distributed:
        return Strategy()
    from slipstream.strategies.ddp import DDPStrategy  # imported where several processes train

    return DDPStrategy(state.runtime, state.limits, state.device, handlers.ddp, ledger.meter)


def _check_fp8(state: AcceleratorState) -> None:
    """Warn about fp8 options without fp8: no error, because another Accelerator of the script may use them."""
    options = state.options
    given = [describe_option(options, name) for name in ("fp8_backend", "fp8_pad_inner_dim") if options[name].value not in ("auto", False)]
    if given and state.mixed_precision != "fp8":
        get_logger(__name__).warning_once(
            f"{' and '.join(given)} has no effect with {describe_option(options, 'mixed_precision')}: write mixed_precision fp8, or "
            "leave it out"
        )


def _update_counter(registry: weakref.ref[PreparedObjects]) -> Callable[[], int]:
    def count_updates() -> int:
        known = registry()
        return 0 if known is None else sum(optimizer.updates for optimizer in known.optimizers)

    return count_updates


def _make_ledger(state: AcceleratorState, handlers: HandlerSet) -> Ledger:
    runtime = state.runtime
    ledger = Ledger(
        handlers.ledger,
        rank=state.process_index,
        world_size=state.num_processes,
        store=lambda: state.runtime.store,
        number=next(runtime.ledgers),
        device=state.device,
        dtype=make_policy(state.mixed_precision).autocast_dtype,
    )
    if ledger.meter is not None:
        runtime.meters.add(ledger.meter)
    return ledger


# -- arguments that can be given in two ways ---------------------------------------------------------------------------


def resolve_accumulation(
    state: AcceleratorState, steps: int | None, plugin: GradientAccumulationPlugin | None, effective_batch_size: int | None
) -> GradientAccumulationPlugin:
    """Return the accumulation settings from the argument, the plugin or the configuration. Raise where two of them contradict."""
    told = steps if steps not in (None, 1) else None
    if plugin is not None and plugin.num_steps is not None and told is not None:
        raise ConfigError(
            f"Accelerator(gradient_accumulation_steps={steps}, gradient_accumulation_plugin=...(num_steps={plugin.num_steps})): "
            "the number of batches per update was given twice; pass one of them"
        )
    chosen = dataclasses.replace(plugin or GradientAccumulationPlugin())
    if effective_batch_size is not None:
        _check_effective_batch_size(effective_batch_size, chosen.num_steps or told)
    if chosen.num_steps is None:
        chosen.num_steps = state.compute.gradient_accumulation_steps
    return chosen


def _check_effective_batch_size(size: int, steps: int | None) -> None:
    check_count(size, f"Accelerator(effective_batch_size={size!r}): write the number of samples per update, from 1")
    if steps not in (None, 1):
        raise ConfigError(
            f"Accelerator(effective_batch_size={size}) derives the batches per update from the loader's batch size and the number of "
            f"processes, and {steps} were asked for too: leave one of them out"
        )


def resolve_dataloader_config(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """Return a copy of the loader options, with `split_batches` if it was given to the Accelerator."""
    chosen = dataclasses.replace(config or DataLoaderConfiguration())
    if split_batches is not None:
        if config is not None and config.split_batches and not split_batches:
            raise ConfigError("Accelerator(split_batches=False) contradicts its dataloader_config, which says True: pass one of them")
        chosen.split_batches = split_batches
    return chosen


def resolve_dynamo(state: AcceleratorState, backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin | None:
    """Return how models are compiled; None for not at all."""
    if plugin is not None and backend is not None:
        raise ConfigError("Accelerator(dynamo_backend=..., dynamo_plugin=...): the plugin has a backend of its own; pass one of them")
    chosen = complete_plugin(plugin if backend is None else TorchDynamoPlugin(backend=backend), state.compute)
    return None if str(getattr(chosen.backend, "value", chosen.backend)).lower() == "no" else chosen


def resolve_project(project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Return where the run keeps its files."""
    chosen = dataclasses.replace(config) if config is not None else ProjectConfiguration()
    if project_dir is not None:
        if chosen.project_dir not in (None, str(project_dir)):
            raise ConfigError(
                f"Accelerator(project_dir={str(project_dir)!r}) contradicts its project_config, which says {chosen.project_dir!r}: "
                "pass one of them"
            )
        chosen.set_directories(str(project_dir))
    return chosen


@dataclass(frozen=True)
class ShardingSetup:
    """How models are sharded, and over which mesh."""

    options: Callable[[], ShardingOptions]
    """Reads the plugin, which a script may change until models are prepared."""
    sizes: MeshSizes


def resolve_sharding_setup(state: AcceleratorState, plugin: Any, parallelism: Any) -> ShardingSetup | None:
    """Return how models are sharded, from the plugin, the mesh and the configuration; None for not at all."""
    if plugin is None and parallelism is None and state.sharding == Sharding() and state.parallelism == Parallelism():
        return None  # and nothing is imported for it
    from slipstream.parallel.parallelism_config import ParallelismConfig, resolve_mesh
    from slipstream.strategies.fsdp_options import FullyShardedDataParallelPlugin, resolve_sharding

    if parallelism is not None and not isinstance(parallelism, ParallelismConfig):
        raise ConfigError(f"Accelerator(parallelism_config={parallelism!r}): write parallelism_config=ParallelismConfig(...)")
    if plugin is None and state.sharding.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
    options = resolve_sharding(plugin, state.sharding, state.mixed_precision)
    sizes = resolve_mesh(
        parallelism,
        state.parallelism,
        world_size=state.num_processes,
        local_world_size=state.runtime.process.local_world_size,
        sharded=options is not None,
        hybrid=options is not None and options.hybrid,
    )
    state.parallelism_config = parallelism
    if options is None:
        return None
    if sizes.dp_shard == 1 and state.use_distributed:
        raise ConfigError(
            f"a fsdp_plugin with the mesh {sizes}: no axis shards the model. Write ParallelismConfig(dp_shard_size=...), or leave out the "
            "plugin to train with replicas (DDP)."
        )
    state.fsdp_plugin = plugin
    return ShardingSetup(lambda: resolve_sharding(plugin, state.sharding, state.mixed_precision) or options, sizes)


_OPTIONS = ("backend", "barrier_timeout", "debug", "hang_warning", "init_method", "timeout")


_FLAGS = (
    "device_placement",
    "split_batches",
    "step_scheduler_with_optimizer",
    "outputs_to_fp32",
    "scheduler_steps_per_process",
    "async_save",
)
_ENGINES = ("deepspeed_plugin", "torch_tp_plugin", "megatron_lm_plugin", "deepspeed_plugins")
_RECORDS: tuple[tuple[str, type], ...] = (
    ("dataloader_config", DataLoaderConfiguration),
    ("project_config", ProjectConfiguration),
    ("gradient_accumulation_plugin", GradientAccumulationPlugin),
    ("dynamo_plugin", TorchDynamoPlugin),
)


def check_arguments(given: Mapping[str, Any], constructor: Any) -> None:
    """Raise for unknown names, for engines that this version does not have, and for values of a wrong type."""
    _check_names(given["options"], constructor)
    for name in _ENGINES:
        if given[name] is not None:
            raise ConfigError(
                f"Accelerator({name}={type(given[name]).__name__}(...)): this engine is not in this version, and nothing else is put in "
                "its place. Leave it out to train on one process or with replicas (DDP)."
            )
    for name in _FLAGS:
        if given[name] is not None and not isinstance(given[name], bool):
            raise ConfigError(f"Accelerator({name}={given[name]!r}): write True or False")
    for name, kind in _RECORDS:
        if given[name] is not None and not isinstance(given[name], kind):
            raise ConfigError(f"Accelerator({name}={given[name]!r}): write {name}={kind.__name__}(...)")
    handlers = given["kwargs_handlers"]
    if handlers is not None and not isinstance(handlers, list | tuple):
        raise ConfigError(f"Accelerator(kwargs_handlers={type(handlers).__name__}(...)): write a list, [{type(handlers).__name__}(...)]")


def changed_arguments(given: Mapping[str, Any], constructor: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, for the record of the run."""
    parameters = inspect.signature(constructor).parameters
    changed = {
        name: given[name]
        for name, parameter in parameters.items()
        if name not in ("self", "options") and given[name] is not parameter.default
    }
    return {**changed, **given["options"]}


def _check_names(options: Mapping[str, Any], constructor: Any) -> None:
    known = [*(name for name in inspect.signature(constructor).parameters if name not in ("self", "options")), *_OPTIONS]
    for name, value in options.items():
        if name not in known:
            places = _where_it_belongs(name, value)
            if places:
                raise TypeError(f"Accelerator({name}={value!r}): there is no such argument; write {' or '.join(places)}")
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"Accelerator({name}=...): there is no such argument; {hint}")


def _where_it_belongs(name: str, value: Any) -> list[str]:
    """Return how to write an option that belongs to a plugin or handler, for each that has it."""
    found = [f"{argument}={kind.__name__}({name}={value!r})" for argument, kind in _RECORDS if name in _fields(kind)]
    found += [f"kwargs_handlers=[{kind.__name__}({name}={value!r})]" for kind in HANDLER_TYPES if name in _fields(kind)]
    return [f"Accelerator({place})" for place in found]


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def check_rng_types(rng_types: Iterable[str | RNGType] | None) -> list[str]:
    """Return the kinds of random state that are synchronised from rank 0 when a loader starts.

    >>> check_rng_types(["torch", "generator"])
    ['torch']
    """
    if isinstance(rng_types, str):
        raise ConfigError(f"Accelerator(rng_types={rng_types!r}): write a list, [{rng_types!r}]")
    kinds = [str(getattr(kind, "value", kind)) for kind in rng_types or ()]
    known = (*rng.default_kinds(), *(kind.value for kind in RNGType))
    for kind in kinds:
        if kind not in known:
            choices = ", ".join(dict.fromkeys(known))
            raise ConfigError(f"Accelerator(rng_types={kinds}): {kind!r} is not a random state; write some of {choices}")
    # The generator of a loader is ours, and the same on every rank anyway.
    return [kind for kind in kinds if kind != RNGType.GENERATOR.value]
