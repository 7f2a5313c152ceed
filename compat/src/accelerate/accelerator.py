"""`Accelerator`: the class of Slipstream with the constructor, attributes and deliberate behaviour of Accelerate's.

What differs from `slipstream.Accelerator` on purpose: the states are shared by all Accelerators of a process (`state.py`); schedulers
move once per process and update; arguments that have no effect in the chosen setting are warned about instead of refused, because scripts
written for Accelerate pass them everywhere. Further keyword arguments are those of `slipstream.Accelerator`, and `mean_of_window=False`:
losses of a last window with fewer batches are divided by the configured number, as in Accelerate, and not by that of its batches
(ACCELERATE_MEAN_OF_WINDOW=false says so for scripts that stay as they are).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from accelerate._accelerator_checkpoints import CheckpointsMixin
from accelerate._accelerator_data import DataMixin
from accelerate._accelerator_engines import EnginesMixin
from accelerate._accelerator_loop import EqualBatches, LoopMixin
from accelerate._accelerator_trackers import TrackersMixin
from accelerate._forwarding import forward_names
from accelerate._gradient_state import GradientState
from accelerate._installation import warn_of_newer_clients
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from slipstream.accelerator import Accelerator as _Accelerator
from slipstream.config.handlers import GradientAccumulationPlugin, InitProcessGroupKwargs
from slipstream.config.sources import environment, parse_flag_from_env
from slipstream.errors import ConfigError
from slipstream.precision.policy import AORecipeKwargs, AutocastKwargs, GradScalerKwargs
from slipstream.strategies.ddp_options import DistributedDataParallelKwargs

_split_batches = object()
"""The default of `split_batches`, which Accelerate tells apart from True and False."""
_WRAPPED_BY_FSDP = "models are sharded, and not wrapped in DistributedDataParallel"


class Accelerator(CheckpointsMixin, DataMixin, TrackersMixin, LoopMixin, EnginesMixin, _Accelerator):
    """Prepare and run a training loop on one or many processes, as scripts written for Accelerate expect it.

    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(4, 2)).mean())
    >>> optimizer.step()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _split_batches,  # type: ignore[assignment]
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        **options: Any,
    ) -> None:
        from accelerate.utils.dataclasses import DataLoaderConfiguration, TorchDynamoPlugin

        self._models: list[torch.nn.Module] = []
        self.rng_types: list[Any] = ["generator"] if rng_types is None else rng_types
        warn_of_newer_clients()
        self._mean_of_window = bool(options.pop("mean_of_window", parse_flag_from_env("ACCELERATE_MEAN_OF_WINDOW", True)))
        handlers = list(kwargs_handlers or ())
        self._refuse_engines(handlers, deepspeed_plugin, deepspeed_plugins, megatron_lm_plugin, torch_tp_plugin)
        init = next((handler for handler in handlers if isinstance(handler, InitProcessGroupKwargs)), None)
        state_options = {name: options[name] for name in ("backend", "init_method", "timeout", "debug") if name in options}
        first = not AcceleratorState._shared_state
        state = AcceleratorState(
            mixed_precision, cpu, _from_accelerator=True, **{**({} if init is None else init.to_kwargs()), **state_options}
        )
        if not first and fsdp_plugin is None:
            fsdp_plugin, parallelism_config = state.fsdp_plugin, parallelism_config or state.parallelism_config
        fsdp_plugin, parallelism_config = _told_by_launcher(fsdp_plugin, parallelism_config)
        self._ineffective: dict[str, Any] = {}
        handlers = self._leave_out_ineffective(handlers, state, fsdp_plugin)
        if dynamo_plugin is None:
            dynamo_plugin, dynamo_backend = TorchDynamoPlugin(backend=dynamo_backend), None
        try:
            super().__init__(
                device_placement=device_placement,
                split_batches=None if split_batches is _split_batches else split_batches,
                mixed_precision=mixed_precision,
                gradient_accumulation_steps=_choose_steps(gradient_accumulation_steps, gradient_accumulation_plugin),
                cpu=cpu,
                dataloader_config=dataloader_config or DataLoaderConfiguration(),
                fsdp_plugin=fsdp_plugin,
                rng_types=rng_types,
                log_with=log_with,
                project_dir=_choose_project(project_dir, project_config),
                project_config=project_config,
                gradient_accumulation_plugin=gradient_accumulation_plugin,
                step_scheduler_with_optimizer=step_scheduler_with_optimizer,
                kwargs_handlers=handlers or None,
                dynamo_backend=dynamo_backend,
                dynamo_plugin=dynamo_plugin,
                parallelism_config=parallelism_config,
                scheduler_steps_per_process=options.pop("scheduler_steps_per_process", True),
                **options,
            )
        except BaseException:
            if first:
                AcceleratorState._reset_state()  # else the next Accelerator would inherit the settings of one that was never made
            raise
        self._components.gradient_state.set_closing = self._components.stepper.set_closing
        if not self._mean_of_window:
            self._components.stepper.make_accumulation = EqualBatches
        self.step = 0
        """How many batches `accumulate` has seen since the beginning, or since a loader ended; scripts read it."""
        if self.state.dynamo_plugin is None:
            self.state.dynamo_plugin = TorchDynamoPlugin(backend="no")  # scripts print it
        self._own = frozenset(vars(self))

    # -- assembly -------------------------------------------------------------------------------------------------

    def _make_state(self, mixed_precision: str | None, cpu: bool, **options: Any) -> AcceleratorState:
        steps = options.pop("gradient_accumulation_steps", None)
        state = AcceleratorState(mixed_precision, cpu, _from_accelerator=True, **options)
        self._asked_steps = steps
        return state

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin) -> GradientState:
        if self._asked_steps is not None:
            plugin.num_steps = self._asked_steps
        return GradientState(plugin)

    def _leave_out_ineffective(self, handlers: list[Any], state: AcceleratorState, fsdp_plugin: Any) -> list[Any]:
        """Return the handlers that have an effect here, and warn about the others; the attributes still show them."""
        kept = []
        for handler in handlers:
            reason = _why_without_effect(handler, state, fsdp_plugin)
            if reason is None:
                kept.append(handler)
            else:
                self._ineffective[type(handler).__name__] = handler
                warnings.warn(f"{type(handler).__name__} has no effect here: {reason}.", stacklevel=3)
        return kept

    def __getattr__(self, name: str) -> Any:
        prepared = getattr(type(self), name, None)
        if isinstance(prepared, property) and prepared.fget is not None:
            return prepared.fget(self)  # it raised AttributeError, after a reset of the state: say so again, in its own words
        return super().__getattr__(name)

    def __reduce__(self) -> Any:
        kind, (_, arguments, added) = super().__reduce__()
        return _rebuild, (type(self), {**arguments, "mean_of_window": self._mean_of_window}, added, list(self._dataloaders))

    # -- what was prepared ----------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None, **slipstream: Any) -> Any:
        """Prepare objects for this run and return them in order. `device_map` and `offload_folder` are those of Slipstream."""
        results = super().prepare(*args, device_placement=device_placement, **slipstream)
        for given, result in zip(args, (results,) if len(args) == 1 else results, strict=True):
            if given is not result or isinstance(result, torch.nn.Module):
                _mark_prepared(result)
        return results

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> torch.nn.Module:
        """Move one model to the device, apply precision, compile and wrap it; with `evaluation_mode` it is not wrapped."""
        _check_quantized(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if not any(known is prepared for known in self._models):
            self._models.append(prepared)
        _mark_prepared(prepared)
        return prepared

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map dispatched the model, so that several processes cannot train it together.

        ACCELERATE_BYPASS_DEVICE_MAP=true says that they can: each process has a whole model of its own.
        """
        return not parse_flag_from_env("ACCELERATE_BYPASS_DEVICE_MAP") and super().verify_device_map(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer so that it steps where an update ends."""
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.stepper is not self._components.stepper:
            optimizer = optimizer.optimizer  # of another Accelerator, or made by the script
        prepared = super().prepare_optimizer(optimizer, device_placement)
        _mark_prepared(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler so that it follows the updates of its optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        _mark_prepared(prepared)
        return prepared

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        components = self._components
        check = components.strategy.step if components.strategy.averages else None
        return AcceleratedOptimizer(optimizer, components.device_placement, stepper=components.stepper, check=check)

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        components = self._components
        own = getattr(scheduler, "optimizer", None)
        found = own if isinstance(own, AcceleratedOptimizer) else components.registry.find_optimizer(own)
        once = components.loader_config.split_batches or not components.scheduler_steps_per_process
        guards = components.stepper.guards
        return AcceleratedScheduler(
            scheduler,
            self._optimizers if found is None else [found],
            components.step_scheduler_with_optimizer,
            once,
            moves=1 if once else components.data_rank.world_size,
            check_same=lambda value: self.state.verify_replicas(metric=float(value)),
            on_first_step=None if guards is None else guards.look_at_schedule,
            loaders_before=len(components.registry.loaders),
        )

    @property
    def _optimizers(self) -> list[Any]:
        return self._components.registry.optimizers

    @_optimizers.setter
    def _optimizers(self, value: list[Any]) -> None:
        self._components.registry.optimizers = value

    @property
    def _schedulers(self) -> list[Any]:
        return self._components.registry.schedulers

    @_schedulers.setter
    def _schedulers(self, value: list[Any]) -> None:
        self._components.registry.schedulers = value

    @property
    def _dataloaders(self) -> list[Any]:
        return self._components.registry.loaders

    @_dataloaders.setter
    def _dataloaders(self, value: list[Any]) -> None:
        self._components.registry.loaders = value

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and cached memory; assign the result to the names: `model, = free_memory(model)`."""
        self._models.clear()
        self.step = 0
        count = len(objects)
        del objects
        super().free_memory()
        return [None] * count

    def unwrap_model(self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> torch.nn.Module:
        """Return the user's model inside any wrappers; see `accelerate.utils.extract_model_from_parallel`."""
        from accelerate.utils.other import extract_model_from_parallel

        inner: torch.nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    @property
    def use_seedable_sampler(self) -> bool:
        """See `DataLoaderConfiguration.use_seedable_sampler`."""
        return bool(self._components.loader_config.use_seedable_sampler)

    @property
    def ddp_handler(self) -> Any:
        """The DistributedDataParallelKwargs that were given, or None."""
        return self._handlers.ddp or self._ineffective.get("DistributedDataParallelKwargs")

    @property
    def scaler_handler(self) -> Any:
        """The GradScalerKwargs that were given, or None."""
        return self._handlers.scaler or self._ineffective.get("GradScalerKwargs")

    @property
    def autocast_handler(self) -> Any:
        """The AutocastKwargs that were given, or None."""
        return self._handlers.autocast or self._ineffective.get("AutocastKwargs")


def _choose_steps(steps: int, plugin: GradientAccumulationPlugin | None) -> int | None:
    """Return the batches per update; the variable of the launcher is stronger than the argument, as in Accelerate."""
    told = environment().get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if plugin is not None:
        if steps != 1:
            raise ConfigError(
                f"Accelerator(gradient_accumulation_steps={steps}, gradient_accumulation_plugin=...): pass one of them, e.g. "
                f"GradientAccumulationPlugin(num_steps={steps})"
            )
        return None
    if told is not None:
        if not told.strip().isdigit():
            raise ConfigError(f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={told}: write a whole number of batches, from 1")
        steps = int(told)
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"Accelerator(gradient_accumulation_steps={steps!r}): write a whole number of batches, from 1")
    return None if steps == 1 else steps


def _told_by_launcher(fsdp_plugin: Any, parallelism_config: Any) -> tuple[Any, Any]:
    """Return the plugin and the mesh; where there is none, those that variables of `accelerate launch` ask for."""
    if fsdp_plugin is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

        fsdp_plugin = FullyShardedDataParallelPlugin()
    if parallelism_config is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        from accelerate.parallelism_config import ParallelismConfig

        parallelism_config = ParallelismConfig()
    return fsdp_plugin, parallelism_config


def _choose_project(project_dir: Any, project_config: Any) -> Any:
    """Return the folder of the run; that of the configuration is stronger than the argument, as in Accelerate."""
    told = getattr(project_config, "project_dir", None)
    if project_dir is None or told is None or str(told) == str(project_dir):
        return project_dir
    warnings.warn(f"project_dir={str(project_dir)!r} has no effect: project_config says {str(told)!r}.", stacklevel=3)
    return None


def _why_without_effect(handler: Any, state: AcceleratorState, fsdp_plugin: Any) -> str | None:
    precision = state.mixed_precision
    if isinstance(handler, GradScalerKwargs) and precision != "fp16":
        return f"only fp16 scales losses, and mixed_precision is {precision!r}"
    if isinstance(handler, AutocastKwargs) and precision == "no":
        return "mixed_precision is 'no', so models do not autocast; pass it to accelerator.autocast(...)"
    if isinstance(handler, AORecipeKwargs) and precision != "fp8":
        return f"it is for fp8, and mixed_precision is {precision!r}"
    if isinstance(handler, DistributedDataParallelKwargs) and fsdp_plugin is not None:
        return _WRAPPED_BY_FSDP
    return None


def _check_quantized(model: torch.nn.Module) -> None:
    """Raise for a model in 4 or 8 bits whose weights are partly in host memory or on disk: bitsandbytes cannot train it."""
    places = getattr(model, "hf_device_map", None)
    if not places or not (getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)):
        return
    here = globals()
    multi_backend = here.get("is_bitsandbytes_multi_backend_available") or __getattr__("is_bitsandbytes_multi_backend_available")
    xpu = here.get("is_xpu_available") or __getattr__("is_xpu_available")
    if any(str(place) in ("cpu", "disk") for place in places.values()) and not multi_backend() and not xpu():
        raise ConfigError(
            "a model in 8 or 4 bits with CPU or disk offload cannot be trained: its device map is "
            f"{places}. Load it with a device map that puts all of it on accelerators."
        )


def _mark_prepared(value: Any) -> None:
    """Set the mark by which Accelerate knows prepared objects."""
    try:
        value._is_accelerate_prepared = True
    except AttributeError:  # an object that takes no attributes
        return


def _rebuild(kind: type[Accelerator], arguments: dict[str, Any], added: dict[str, Any], loaders: list[Any]) -> Accelerator:
    """Rebuild an Accelerator in this process from `Accelerator.__reduce__`; a subclass's own `__init__` is not called."""
    accelerator = kind.__new__(kind)
    options = {name: value for name, value in arguments.items() if value is not None}
    Accelerator.__init__(accelerator, **options)
    vars(accelerator).update(added)
    accelerator._dataloaders.extend(loaders)
    return accelerator


_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.checkpointing": "load_accelerator_state load_custom_state save_accelerator_state save_custom_state",
        "accelerate.data_loader": "DataLoaderDispatcher prepare_data_loader skip_first_batches",
        "accelerate.logging": "get_logger",
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.state": "AcceleratorState GradientState PartialState",
        "accelerate.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers",
        "accelerate.utils.ao": "convert_model_to_fp8_ao",
        "accelerate.utils.constants": """DTENSOR_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION MODEL_NAME PROFILE_PATTERN_NAME
            SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SCALER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME
            WEIGHTS_PATTERN_NAME""",
        "accelerate.utils.dataclasses": """AORecipeKwargs AutocastKwargs DataLoaderConfiguration DeepSpeedPlugin
            DistributedDataParallelKwargs DistributedType DynamoBackend FP8BackendType FP8RecipeKwargs
            FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType MSAMPRecipeKwargs MegatronLMPlugin
            PrecisionType ProfileKwargs ProjectConfiguration RNGType TERecipeKwargs TorchDynamoPlugin
            TorchTensorParallelPlugin""",
        "accelerate.utils.environment": "parse_choice_from_env",
        "accelerate.utils.fsdp_utils": """ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer
            save_fsdp_model save_fsdp_optimizer""",
        "accelerate.utils.imports": """is_bf16_available is_bitsandbytes_multi_backend_available is_deepspeed_available
            is_lomo_available is_megatron_lm_available is_mlu_available is_msamp_available
            is_musa_available is_npu_available is_torch_xla_available is_torchao_available
            is_transformer_engine_available is_xpu_available""",
        "accelerate.utils.memory": "release_memory",
        "accelerate.utils.modeling": """get_grad_scaler get_mixed_precision_context_manager get_state_dict_offloaded_model
            has_offloaded_params""",
        "accelerate.utils.operations": "convert_outputs_to_fp32 gather gather_object pad_across_processes recursively_apply reduce",
        "accelerate.utils.other": """check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
            compile_regions_fsdp2 extract_model_from_parallel get_model_tp_size get_pretty_name
            is_compiled_module model_has_dtensor save wait_for_everyone""",
        "accelerate.utils.transformer_engine": "apply_fp8_autowrap convert_model",
        "accelerate.utils.versions": "compare_versions is_torch_version",
    },
)

__all__ = ["Accelerator", *_forwarded]
