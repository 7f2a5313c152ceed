"""`Accelerator`: the object that scripts use.

It assembles its components once (`components.py`) and delegates to them. Its methods are grouped by subject, one mixin per file:
processes, preparation, training loop, checkpoints, settings; trackers and the end of a run are here. A process can have any number of
Accelerators, each with its own settings; they share the process group and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from slipstream.accelerator.checkpoints import CheckpointsMixin
from slipstream.accelerator.components import (
    assemble_components,
    changed_arguments,
    check_arguments,
    check_rng_types,
    resolve_accumulation,
    resolve_dataloader_config,
    resolve_dynamo,
    resolve_project,
    resolve_sharding_setup,
    sort_handlers,
)
from slipstream.accelerator.preparation import PreparationMixin
from slipstream.accelerator.processes import ProcessesMixin
from slipstream.accelerator.settings import SettingsMixin
from slipstream.accelerator.training_loop import TrainingLoopMixin
from slipstream.checkpoint.saver import Saver
from slipstream.config.handlers import GradientAccumulationPlugin, ProjectConfiguration
from slipstream.data.options import DataLoaderConfiguration
from slipstream.devices.table import RNGType
from slipstream.distributed.gradient_state import GradientState
from slipstream.distributed.state import AcceleratorState
from slipstream.observability.options import ProfileKwargs
from slipstream.observability.recorder import RunRecorder, attach_guards
from slipstream.observability.timing.report import LedgerReport
from slipstream.parallel.compile import TorchDynamoPlugin

__all__ = ["Accelerator"]


class Accelerator(ProcessesMixin, PreparationMixin, TrainingLoopMixin, CheckpointsMixin, SettingsMixin):
    """Run a script on any number of processes: prepare objects, run the training loop, save, load, track.

    >>> import torch
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(4, 2)).mean())
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    Besides the arguments of Accelerate: `effective_batch_size` fixes the samples per update over all processes,
    `outputs_to_fp32=False` leaves outputs of models in the half precision in which they were computed (by default they are cast to
    float32), `async_save` saves checkpoints asynchronously, `scheduler_steps_per_process` moves schedulers as often per
    update as there are processes (which is the rule of Accelerate), and `device`, `debug`, `timeout`, `barrier_timeout` and
    `hang_warning` are those of `PartialState`.

    A pickled or copied Accelerator becomes a new one in the process that reads it, with the same settings and with the attributes that a
    script or a subclass added. Prepared and registered objects, running trackers and an open accumulation window are not part of it.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        effective_batch_size: int | None = None,
        outputs_to_fp32: bool | None = None,
        scheduler_steps_per_process: bool = False,
        async_save: bool = False,
        on_nan: str | None = None,
        **options: Any,
    ) -> None:
        check_arguments(locals(), Accelerator.__init__)
        told = self._given = changed_arguments(locals(), Accelerator.__init__)
        asked = sort_handlers(kwargs_handlers).with_on_nan(on_nan)
        if asked.init is not None:
            options = {**asked.init.to_kwargs(), **options}
        self.state = self._make_state(mixed_precision, cpu, gradient_accumulation_steps=gradient_accumulation_steps, **options)
        self.state.dynamo_plugin = resolve_dynamo(self.state, dynamo_backend, dynamo_plugin)
        self._handlers = asked.check_precision(self.state.mixed_precision)
        self.project_configuration = resolve_project(project_dir, project_config)
        accumulation = resolve_accumulation(self.state, gradient_accumulation_steps, gradient_accumulation_plugin, effective_batch_size)
        self._components = assemble_components(
            self.state,
            self._handlers,
            self._make_gradient_state(accumulation),
            resolve_dataloader_config(dataloader_config, split_batches),
            self.state.dynamo_plugin,
            resolve_sharding_setup(self.state, fsdp_plugin, parallelism_config),
            outputs_to_fp32=outputs_to_fp32,
            rng_types=check_rng_types(rng_types),
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_steps_per_process=scheduler_steps_per_process,
            effective_batch_size=effective_batch_size,
        )
        self._saver = Saver(self._components, self.project_configuration, async_save)
        self._saver.begin_numbering()
        self._guards = attach_guards(self._components, self._handlers.guards)
        self._recorder = RunRecorder(self._components, self.project_configuration, self._choose_trackers(log_with), told)
        self._own = frozenset(vars(self))

    # Factories, which the distribution that provides the name `accelerate` overrides: its states are shared by all Accelerators.

    def _make_state(self, mixed_precision: str | None, cpu: bool, **options: Any) -> AcceleratorState:
        return AcceleratorState(mixed_precision, cpu, **options)

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin) -> GradientState:
        return GradientState(plugin)

    def __reduce__(self) -> Any:
        added = {name: value for name, value in vars(self).items() if name not in self._own and name != "_own"}
        return _rebuild, (type(self), self.arguments(), added)

    def __repr__(self) -> str:
        return repr(self.state).replace(type(self.state).__name__, type(self).__name__, 1)

    # -- trackers (observability/trackers/) ----------------------------------------------------------------------------------------

    def _choose_trackers(self, log_with: Any) -> Any:
        """Return what `log_with` means; a subclass with tables of its own returns classes and instances."""
        return log_with

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers that were chosen."""
        return self._recorder.log_with

    @property
    def trackers(self) -> list[Any]:
        """The trackers that were started."""
        return self._recorder.trackers.started

    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None) -> None:
        """Start a run on the main process: its directory below `project_dir`, and the trackers of `log_with`.

        The directory is named after project and time; `init_kwargs={"local": {"name": "first"}}` names it, `"resume": True` appends to it.
        """
        self._recorder.begin(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; with `unwrap`, the package's own run object."""
        return self._recorder.trackers.get(name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Send values to every tracker, from the main process. Tensors of a device are fetched together: it waits for the device once."""
        self._recorder.trackers.log(values, step, log_kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Send images by name (one, a list, or a batch each) to every tracker that stores images."""
        self._recorder.trackers.log_images(values, step, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Send a table (rows with `columns`, a dict of columns, records, an array, a data frame) to every tracker that stores tables."""
        self._recorder.trackers.log_table(table_name, step, log_kwargs, columns=columns, data=data, dataframe=dataframe)

    @property
    def run_dir(self) -> Path | None:
        """The directory of the current run; None before it starts, without a `project_dir`, and on processes other than the main one."""
        return self._recorder.run_dir

    def ledger(self) -> LedgerReport:
        """Return where the time of the steps went so far: on the main process for all processes, elsewhere for this one. It never waits.

        >>> accelerator = Accelerator(cpu=True)
        >>> accelerator.ledger().steps
        0
        """
        return self._components.ledger.report()

    # -- the rest -------------------------------------------------------------------------------------------------

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a block that torch's profiler records; see `observability/profiler.py`."""
        from slipstream.observability.profiler import run_profiler

        return run_profiler(profile_handler or self._handlers.profile, self.state.runtime, self._recorder.trace)

    def end_training(self) -> None:
        """End a run: wait for an async save, close the trackers, print where the time went, write the report, close the process group."""
        try:
            self._saver.settle()
        finally:
            self._recorder.end()
            self.state.destroy_process_group()


def _rebuild(kind: type[Accelerator], arguments: dict[str, Any], added: dict[str, Any]) -> Accelerator:
    """Rebuild an Accelerator in this process from `Accelerator.__reduce__`; a subclass's own `__init__` is not called."""
    accelerator = kind.__new__(kind)
    Accelerator.__init__(accelerator, **arguments)
    vars(accelerator).update(added)
    return accelerator
