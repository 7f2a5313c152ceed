"""What an Accelerator is made of: built once from its arguments, each part with the settings of this one Accelerator alone."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.comm import ops
from slipstream.config.checks import said
from slipstream.config.handlers import GradientAccumulationPlugin, ProjectConfiguration
from slipstream.data.loader import PreparedLoader
from slipstream.data.options import DataLoaderConfiguration
from slipstream.data.place import Place
from slipstream.errors import ConfigError
from slipstream.facade.handlers import Handlers
from slipstream.facade.precision import Precision
from slipstream.logging import get_logger
from slipstream.parallel.compile import TorchDynamoPlugin, completed
from slipstream.precision.policy import policy_for
from slipstream.runtime.gradient_state import GradientState
from slipstream.runtime.state import AcceleratorState
from slipstream.step.clip import Clipper
from slipstream.step.ledger.ledger import Ledger
from slipstream.step.optimizer import AcceleratedOptimizer
from slipstream.step.scheduler import AcceleratedScheduler
from slipstream.step.stepper import Stepper
from slipstream.strategies.base import Strategy
from slipstream.strategies.ddp import DDP

__all__ = [
    "Parts",
    "Registry",
    "accumulation_of",
    "assemble",
    "dynamo_of",
    "loading_of",
    "project_of",
]


@dataclass
class Registry:
    """What was prepared, in order, besides models (which the stepper has)."""

    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)

    def find_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer | None:
        """The prepared form of an optimizer, newest first."""
        return next((one for one in reversed(self.optimizers) if optimizer is one or optimizer is one.optimizer), None)

    def forget(self) -> None:
        """Drops everything: nothing here keeps it alive afterwards."""
        self.optimizers, self.schedulers, self.loaders = [], [], []


@dataclass
class Parts:
    """The parts of one Accelerator."""

    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    precision: Precision
    stepper: Stepper
    clipper: Clipper
    registry: Registry
    ledger: Ledger
    loading: DataLoaderConfiguration
    dynamo: TorchDynamoPlugin | None
    place: Place
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_steps_per_process: bool
    effective_batch_size: int | None
    rng_types: list[str]


def assemble(
    state: AcceleratorState,
    handlers: Handlers,
    accumulation: GradientAccumulationPlugin,
    loading: DataLoaderConfiguration,
    dynamo: TorchDynamoPlugin | None,
    *,
    outputs_to_fp32: bool | None,
    rng_types: list[str],
    **settings: Any,
) -> Parts:
    """The parts, joined."""
    if handlers.ddp is not None and handlers.ddp.static_graph and (accumulation.num_steps or 1) > 1:
        raise ConfigError(
            f"DistributedDataParallelKwargs(static_graph=True) with {accumulation.num_steps} batches per update: torch cannot leave out "
            "the averaging of a static graph (it fails inside). Leave out static_graph, or accumulate over one batch."
        )
    gradient_state, registry, ledger = GradientState(accumulation), Registry(), _ledger(state, handlers)
    gradient_state.meter = ledger.meter
    gradient_state.count_updates = _counter(weakref.ref(registry))  # loaders hold this state: what it holds must not hold them
    distributed = state.use_distributed
    strategy = DDP(state.runtime, state.limits, state.device, handlers.ddp, ledger.meter) if distributed else Strategy()
    _check_fp8(state)
    precision = Precision(
        state.mixed_precision,
        strategy.realise(state.device),
        handlers,
        outputs_to_fp32=outputs_to_fp32,
        distributed=distributed,
        pad_inner_dim=state.compute.fp8_pad_inner_dim,
    )

    def total(numbers: list[float]) -> list[float]:
        return [float(number) for number in ops.reduce(state.channel(), state.limits, numbers, "sum", operation="backward")]

    stepper = Stepper(
        gradient_state, strategy, precision.scaler, rank=state.process_index, world_size=state.num_processes, total=total
    )
    return Parts(
        state=state,
        gradient_state=gradient_state,
        strategy=strategy,
        precision=precision,
        stepper=stepper,
        clipper=Clipper(stepper, lambda: registry.optimizers, strategy.clip),
        registry=registry,
        ledger=ledger,
        loading=loading,
        dynamo=dynamo,
        place=Place(state.process_index, state.num_processes, state.channel, state.limits, compares=True),
        rng_types=rng_types,
        **settings,
    )


def _check_fp8(state: AcceleratorState) -> None:
    """Options of fp8 without fp8 have no effect: that is said, and no error, since another Accelerator of the script may use it."""
    options = state.options
    given = [said(options, name) for name in ("fp8_backend", "fp8_pad_inner_dim") if options[name].value not in ("auto", False)]
    if given and state.mixed_precision != "fp8":
        get_logger(__name__).warning_once(
            f"{' and '.join(given)} has no effect with {said(options, 'mixed_precision')}: write mixed_precision fp8, or leave it out"
        )


def _counter(registry: weakref.ref[Registry]) -> Callable[[], int]:
    def count_updates() -> int:
        known = registry()
        return 0 if known is None else sum(optimizer.updates for optimizer in known.optimizers)

    return count_updates


def _ledger(state: AcceleratorState, handlers: Handlers) -> Ledger:
    runtime = state.runtime
    ledger = Ledger(
        handlers.ledger,
        rank=state.process_index,
        world_size=state.num_processes,
        store=lambda: state.runtime.store,
        number=next(runtime.ledgers),
        device=state.device,
        dtype=policy_for(state.mixed_precision).autocast_dtype,
    )
    if ledger.meter is not None:
        runtime.meters.add(ledger.meter)
    return ledger


# -- arguments that can be said in two ways ---------------------------------------------------------------------------


def accumulation_of(
    state: AcceleratorState, steps: int | None, plugin: GradientAccumulationPlugin | None, effective_batch_size: int | None
) -> GradientAccumulationPlugin:
    """The settings of accumulation, from the argument, the plugin or the configuration; an error where two of them contradict."""
    told = steps if steps not in (None, 1) else None
    if plugin is not None and plugin.num_steps is not None and told is not None:
        raise ConfigError(
            f"Accelerator(gradient_accumulation_steps={steps}, gradient_accumulation_plugin=...(num_steps={plugin.num_steps})): "
            "the number of batches per update was given twice; pass one of them"
        )
    chosen = dataclasses.replace(plugin or GradientAccumulationPlugin())
    if effective_batch_size is not None:
        _check_effective(effective_batch_size, chosen.num_steps or told)
    if chosen.num_steps is None:
        chosen.num_steps = state.compute.gradient_accumulation_steps
    return chosen


def _check_effective(size: int, steps: int | None) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"Accelerator(effective_batch_size={size!r}): write the number of samples per update, from 1")
    if steps not in (None, 1):
        raise ConfigError(
            f"Accelerator(effective_batch_size={size}) derives the batches per update from the loader's batch size and the number of "
            f"processes, and {steps} were asked for too: leave one of them out"
        )


def loading_of(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """A copy of the options of loaders, with `split_batches` where it was given to the Accelerator."""
    chosen = dataclasses.replace(config or DataLoaderConfiguration())
    if split_batches is not None:
        if config is not None and config.split_batches and not split_batches:
            raise ConfigError("Accelerator(split_batches=False) contradicts its dataloader_config, which says True: pass one of them")
        chosen.split_batches = split_batches
    return chosen


def dynamo_of(state: AcceleratorState, backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin | None:
    """How models are compiled; None for not at all."""
    if plugin is not None and backend is not None:
        raise ConfigError("Accelerator(dynamo_backend=..., dynamo_plugin=...): the plugin has a backend of its own; pass one of them")
    chosen = completed(plugin if backend is None else TorchDynamoPlugin(backend=backend), state.compute)
    return None if str(getattr(chosen.backend, "value", chosen.backend)).lower() == "no" else chosen


def project_of(project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Where the run keeps its files."""
    chosen = dataclasses.replace(config) if config is not None else ProjectConfiguration()
    if project_dir is not None:
        if chosen.project_dir not in (None, str(project_dir)):
            raise ConfigError(
                f"Accelerator(project_dir={str(project_dir)!r}) contradicts its project_config, which says {chosen.project_dir!r}: "
                "pass one of them"
            )
        chosen.set_directories(str(project_dir))
    return chosen
