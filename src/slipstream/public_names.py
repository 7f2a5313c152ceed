"""Public names: lazy namespaces, the module paths of Accelerate, and the names of Accelerate that are not available.

`lazy_attributes` gives `__init__.py` and `utils.py` a `__getattr__` that imports a name when it is first used. `register_module_paths`
makes the module paths in `MODULES` (`slipstream.state`, `slipstream.utils.operations`, ...) importable by a finder; they are not files.
`ABSENT` lists what Accelerate has and this version does not have: what it is for, whether it is planned, and what to write instead. A
missing name raises an error with that text. Importing this module imports nothing else of the package.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import FrameType, MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple

__all__ = [
    "ABSENT", "Absence", "AccelerateModuleFinder", "COMMANDS", "MODULES", "absence_message", "explain_missing", "find_home",
    "lazy_attributes", "names_of", "register_module_paths",
]

_PACKAGE: Final = "slipstream"

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "big_modeling": """attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights
            init_on_device load_checkpoint_and_dispatch""",
        "checkpointing": "",
        "commands": "",
        "commands.config": "",
        "commands.launch": "",
        "data_loader": "get_sampler prepare_data_loader skip_first_batches",
        "launchers": "PrepareForLaunch debug_launcher notebook_launcher",
        "local_sgd": "LocalSGD",
        "memory_utils": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
        "optimizer": "AcceleratedOptimizer move_to_device",
        "parallelism_config": "ParallelismConfig",
        "scheduler": "AcceleratedScheduler",
        "state": "AcceleratorState DistributedType GradientState PartialState is_initialized",
        "test_utils": "",
        "test_utils.testing": "",
        "test_utils.training": "",
        "utils.ao": """convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers find_first_last_linear_layers
            has_ao_layers""",
        "utils.bnb": """get_keys_to_not_convert get_parameter_device get_quantized_model_device_map has_4bit_bnb_layers
            load_and_quantize_model quantize_and_offload_8bit replace_with_bnb_layers""",
        "utils.constants": """MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME
            SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME
            WEIGHTS_PATTERN_NAME""",
        "utils.dataclasses": """AORecipeKwargs AutocastKwargs BnbQuantizationConfig CustomDtype DDPCommunicationHookType
            DataLoaderConfiguration DistributedDataParallelKwargs DistributedType DynamoBackend FP8BackendType FP8RecipeKwargs
            FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType
            MSAMPRecipeKwargs PrecisionType ProfileKwargs ProjectConfiguration RNGType TERecipeKwargs TensorInformation TorchDynamoPlugin
            get_module_class_from_name""",
        "utils.deepspeed": "",
        "utils.environment": """clear_environment get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment
            str_to_bool""",
        "utils.fsdp_utils": """disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
            fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_parameters_from_modules load_fsdp_model load_fsdp_optimizer
            merge_fsdp_weights save_fsdp_model save_fsdp_optimizer""",
        "utils.imports": """deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available
            is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available is_clearml_available
            is_comet_ml_available is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available
            is_fp8_available is_habana_gaudi1 is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available
            is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available
            is_neuron_available is_npu_available is_numpy_available is_pandas_available is_peft_available is_pippy_available
            is_pynvml_available is_pytest_available is_rich_available is_rocm_available is_sagemaker_available is_schedulefree_available
            is_sdaa_available is_swanlab_available is_tensorboard_available is_timm_available is_torch_distributed_available
            is_torch_xla_available is_torchao_available is_torchdata_available is_torchdata_stateful_dataloader_available
            is_torchvision_available is_tqdm_available is_trackio_available is_transformer_engine_available
            is_transformer_engine_mxfp8_available is_transformers_available is_triton_available is_wandb_available
            is_weights_only_available is_xccl_available is_xpu_available torchao_required""",
        "utils.launch": "PrepareForLaunch",
        "utils.megatron_lm": "",
        "utils.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
        "utils.modeling": """align_module_device calculate_maximum_sizes check_device_map check_device_same
            check_tied_parameters_in_config check_tied_parameters_on_same_device clean_device_map compute_module_sizes
            compute_module_total_buffer_size convert_file_size_to_int dtype_byte_size fallback_allocate find_tied_parameters
            get_balanced_memory get_grad_scaler get_max_layer_size get_max_memory get_mixed_precision_context_manager get_module_leaves
            get_module_size_with_ties get_non_persistent_buffers get_state_dict_from_offload get_state_dict_offloaded_model
            has_offloaded_params id_tensor_storage infer_auto_device_map is_peft_model load_checkpoint_in_model load_offloaded_weights
            load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device""",
        "utils.offload": """OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight offload_state_dict
            offload_weight save_offload_index""",
        "utils.operations": """CannotPadNestedTensorWarning ConvertOutputsToFp32 DistributedOperationException TensorInformation broadcast
            broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device
            gather gather_object gather_tensor_shape get_data_structure get_shape honor_type ignorant_find_batch_size initialize_tensors
            is_namedtuple is_tensor_information is_torch_tensor listify pad_across_processes pad_input_tensors recursively_apply reduce
            send_to_device slice_tensors""",
        "utils.other": """check_os_kernel clean_state_dict_for_safetensors clear_environment compile_regions compile_regions_fsdp2
            convert_bytes extract_model_from_parallel get_free_port get_module_children_bottom_up get_pretty_name has_compiled_regions
            has_repeated_blocks is_compiled_module is_port_in_use is_repeated_blocks load merge_dicts patch_environment recursive_getattr
            save wait_for_everyone write_basic_config""",
        "utils.random": "set_seed synchronize_rng_state synchronize_rng_states",
        "utils.torch_xla": "",
        "utils.tqdm": "tqdm",
        "utils.transformer_engine": "",
        "utils.versions": "compare_versions is_torch_version",
    }
)
"""Module paths below the package, with their names."""

_INNER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "slipstream.big_models.device_map.plan": "clean_device_map fallback_allocate",
        "slipstream.big_models.device_map.sizes": """compute_module_total_buffer_size get_module_leaves get_module_size_with_ties
            get_non_persistent_buffers""",
        "slipstream.big_models.hooks.module_tensors": "check_device_same get_state_dict_from_offload get_state_dict_offloaded_model",
        "slipstream.big_models.quantize": """get_keys_to_not_convert get_parameter_device get_quantized_model_device_map
            quantize_and_offload_8bit
            replace_with_bnb_layers""",
        "slipstream.distributed.state": "is_initialized",
        "slipstream.hooks": """AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook
            add_hook_to_module
            attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook attach_layerwise_casting_hooks
            remove_hook_from_module remove_hook_from_submodules""",
        "slipstream.inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
        "slipstream.logging": "MultiProcessAdapter get_logger",
        "slipstream.precision.fp8": "filter_linear_layers find_first_last_linear_layers",
        "slipstream.tracking": """AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker SwanLabTracker
            TensorBoardTracker TrackioTracker WandBTracker filter_trackers get_available_trackers on_main_process register_tracker_class""",
        "slipstream.training.optimizer": "AcceleratedOptimizer move_to_device",
        "slipstream.training.scheduler": "AcceleratedScheduler",
    }
)
"""Where names live that are neither in `slipstream` nor in `slipstream.utils`."""
_PUBLIC: Final = ("slipstream.hooks", "slipstream.tracking", "slipstream.logging", "slipstream.inference")


class Absence(NamedTuple):
    """A subject of Accelerate that this version does not have."""

    purpose: str
    """What its names are for, after "it is for"."""
    names: str
    instead: str
    """What to write, as sentences."""
    comes: bool = True
    """Whether it is planned; else there is a reason against it, which `instead` gives."""
    modules: str = ""
    """Module paths of which every name belongs here."""
    commands: str = ""


_REPLICAS: Final = "Without it, several processes train replicas of the model (DDP)."

ABSENT: Final = (
    Absence(
        "training with DeepSpeed",
        """DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper DummyOptim DummyScheduler
        GatheredParameters HfDeepSpeedConfig compile_regions_deepspeed get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed""",
        _REPLICAS,
        modules="utils.deepspeed",
    ),
    Absence(
        "tensor, context and sequence parallelism",
        """DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig
        TorchTensorParallelPlugin""",
        "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...) makes a mesh of replicas and shards.",
    ),
    Absence(
        "training with Megatron-LM",
        """AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
        MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep add_model_config_to_megatron_parser
        avg_losses_across_data_parallel_group gather_across_data_parallel_groups megatron_lm_initialize megatron_lm_prepare_data_loader
        megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
        _REPLICAS,
        modules="utils.megatron_lm",
    ),
    Absence(
        "fp8 through TransformerEngine",
        "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers",
        'fp8 runs through torchao: write Accelerator(mixed_precision="fp8"), with AORecipeKwargs for its settings.',
        comes=False,
        modules="utils.transformer_engine",
    ),
    Absence(
        "running on TPUs",
        "MpDeviceLoaderWrapper install_xla prepare_tpu",
        "Start the script on every host yourself, with the rank variables of torchrun.",
        modules="utils.torch_xla",
        commands="tpu-config",
    ),
    Absence(
        "the loaders and samplers inside of a prepared loader",
        """BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin IterableDatasetShard
        SeedableRandomSampler SkipBatchSampler SkipDataLoader""",
        "Slipstream shares out samples, not batches, and has other ones. Use accelerator.prepare(loader), prepare_data_loader and "
        "skip_first_batches; what they give back is a torch.utils.data.DataLoader.",
        comes=False,
    ),
    Absence(
        "the single steps of saving and loading a checkpoint",
        "load_accelerator_state load_custom_state save_accelerator_state save_custom_state",
        "A checkpoint is saved and loaded as a whole. Use accelerator.save_state() and load_state(), with register_for_checkpointing "
        "for objects of your own.",
        comes=False,
        modules="checkpointing",
    ),
    Absence(
        "the inside of the launcher and of the configuration files",
        """BaseConfig ClusterConfig TORCH_LAUNCH_PARAMS _filter_args env_var_path_add launch_command launch_command_parser
        load_config_from_file prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config prepare_multi_gpu_env
        prepare_simple_launcher_cmd_env setup_fp8_env test_launch""",
        "The launcher is a program of its own: start `slipstream launch` (`--show` prints what it would do), or call notebook_launcher. "
        "`slipstream config` and write_basic_config write files.",
        comes=False,
        modules="commands commands.launch commands.config",
    ),
    Absence(
        "submitting jobs to SageMaker",
        "ComputeEnvironment SageMakerConfig SageMakerDistributedType prepare_sagemager_args_inputs",
        "SageMaker's own tools submit jobs; a script that was started there finds its processes by itself.",
        comes=False,
    ),
    Absence(
        "questions about the hardware of this machine",
        """CPUInformation are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support get_cpu_distributed_information
        get_current_device_type get_driver_version get_gpu_info override_numa_affinity set_numa_affinity""",
        "PartialState() knows its device and rank, the is_..._available questions are in slipstream.utils, and `slipstream env` describes "
        "the machine.",
        comes=False,
    ),
    Absence(
        "variables of the launcher of Accelerate",
        "convert_dict_to_env_variables purge_accelerate_environment",
        "Slipstream sets no such variables. patch_environment and clear_environment change variables for the length of a block.",
        comes=False,
    ),
    Absence(
        "the inside of Accelerate",
        """BaseEnum EnumWithContains MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TORCH_DISTRIBUTED_OPERATION_TYPES ThreadLocalSharedDict
        XPU_PROFILING_AVAILABLE_PYTORCH_VERSION chained_operation do_nothing is_torch_xpu_tensor patch_optimizer_step verify_operation""",
        "Slipstream is built otherwise and needs none of it.",
        comes=False,
    ),
    Absence(
        "the tests of Accelerate",
        """AccelerateTestCase DEFAULT_LAUNCH_COMMAND MockingTestCase RegressionDataset RegressionModel TempDirTestCase are_the_same_tensors
        assert_exception capture_call_output device_count execute_subprocess_async get_backend get_launch_command
        get_torch_dist_unique_port memory_allocated_func path_in_accelerate_package pytest_xdist_worker_id run_command torch_device""",
        "slipstream.testing has what tests of distributed code need; its pytest plugin runs a function on several ranks.",
        comes=False,
        modules="test_utils test_utils.testing test_utils.training",
    ),
    Absence(
        "asking for TPUs in older versions of Accelerate",
        "is_tpu_available",
        "Write is_torch_xla_available(check_is_tpu=True).",
        comes=False,
    ),
)
"""What Accelerate has and this version has not."""

COMMANDS: Final[Mapping[str, Absence]] = MappingProxyType({name: absence for absence in ABSENT for name in absence.commands.split()})
"""The commands of Accelerate that are not here."""


def names_of(path: str) -> list[str]:
    """Return the names that a module path offers.

    >>> names_of("slipstream.local_sgd")
    ['LocalSGD']
    """
    return MODULES[path.removeprefix(f"{_PACKAGE}.")].split()


def find_home(name: str) -> str | None:
    """Return the module in which a public name lives; None for one that is not here.

    >>> find_home("set_seed"), find_home("AcceleratedOptimizer"), find_home("nothing")
    ('slipstream.utils', 'slipstream.training.optimizer', None)
    """
    for namespace in (_PACKAGE, f"{_PACKAGE}.utils"):
        if name in importlib.import_module(namespace).__all__:
            return namespace
    return next((home for home, names in _INNER.items() if name in names.split()), None)


def explain_missing(namespace: str, name: str) -> str | None:
    """Return why a module has no such name: where it lives instead, or that it is not here; None for a name that nobody knows.

    >>> print(explain_missing("slipstream", "set_seed"))
    slipstream has no set_seed: it is in slipstream.utils. Write: from slipstream.utils import set_seed
    >>> print(explain_missing("slipstream.utils", "DeepSpeedPlugin"))
    slipstream.utils has no DeepSpeedPlugin yet: it is for training with DeepSpeed, which is not in this version. Without it, ...
    """
    if name.startswith("__"):
        return None
    home = find_home(name)
    if home is not None:
        place = home if home in (_PACKAGE, f"{_PACKAGE}.utils", *_PUBLIC) else f"{_PACKAGE}.{_path_with(name)}"
        return f"{namespace} has no {name}: it is in {place}. Write: from {place} import {name}"
    path = namespace.removeprefix(f"{_PACKAGE}.")
    found = [absence for absence in ABSENT if name in absence.names.split()]
    found += [absence for absence in ABSENT if path in absence.modules.split()]
    return absence_message(f"{namespace} has no {name}", found[0]) if found else None


def absence_message(what: str, absence: Absence) -> str:
    """Return the text of an error: what is missing, what it would be for, and what to write."""
    when = " yet" if absence.comes else ""
    why = ", which is not in this version" if absence.comes else ""
    return f"{what}{when}: it is for {absence.purpose}{why}. {absence.instead}"


def _path_with(name: str) -> str:
    return next(path for path, names in MODULES.items() if name in names.split())


def _import_without_collections(path: str) -> ModuleType:
    """Import a module, and torch with it, while the garbage collector rests.

    The import makes some hundred thousand objects that stay. Each collection would look at all of them again and find nothing, which
    takes a tenth of the import.
    """
    pausing = gc.isenabled() and path not in sys.modules
    if pausing:
        gc.disable()
    try:
        return importlib.import_module(path)
    finally:
        if pausing:
            gc.enable()


def lazy_attributes(
    namespace: str, names: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a module whose names are imported on first use (PEP 562).

    `names` maps a module of this package to the names that it defines, separated by spaces. `submodules` are the modules below
    `namespace` that are found as attributes without having been imported.

    >>> exported, find, _ = lazy_attributes("example", {"errors": "ConfigError StateError"})
    >>> exported, find("StateError").__name__
    (['ConfigError', 'StateError'], 'StateError')
    """
    home = {name: f"{_PACKAGE}.{module}" for module, listed in names.items() for name in listed.split()}
    below = frozenset(submodules)

    def find(name: str) -> Any:
        if name in home:
            return getattr(_import_without_collections(home[name]), name)
        path = f"{namespace}.{name}"
        if name in below or path in sys.modules or path.removeprefix(f"{_PACKAGE}.") in MODULES:
            return importlib.import_module(path)
        raise _missing(namespace, name, sys._getframe(1))

    exported = sorted(home)
    return exported, find, lambda: exported


_NAMED_AS_A_FUNCTION: Final = ("slipstream.utils.tqdm",)
"""Module paths that are functions of their parent too. Importing a module sets it on its parent, which would hide the function; one that
stands in `sys.modules` from the beginning is not set."""


class AccelerateModuleFinder(MetaPathFinder, Loader):
    """Find the module paths of `MODULES` (`slipstream.state`, `slipstream.utils.operations`, ...), which are no files."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a path that is listed; None for any other."""
        name = fullname.removeprefix(f"{_PACKAGE}.")
        if name == fullname or name not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{name}.") for other in MODULES))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module whose names are found where they live."""
        return ModuleType(spec.name, f"Names of `{spec.name.replace(_PACKAGE, 'accelerate', 1)}`, found where they live in Slipstream.")

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its `__all__`, `__getattr__` and `__dir__`."""
        path, names = module.__name__, names_of(module.__name__)

        def find(name: str) -> Any:
            if name in names:
                home = find_home(name)
                assert home is not None, f"{path} offers {name}, which is nowhere"
                return getattr(importlib.import_module(home), name)
            if f"{path}.{name}".removeprefix(f"{_PACKAGE}.") in MODULES:
                return importlib.import_module(f"{path}.{name}")
            raise _missing(path, name, sys._getframe(1))

        vars(module).update(__all__=names, __getattr__=find, __dir__=lambda: names)


def register_module_paths() -> None:
    """Make the module paths of Accelerate importable below this package; nothing is imported before it is used."""
    if any(isinstance(finder, AccelerateModuleFinder) for finder in sys.meta_path):
        return
    finder = AccelerateModuleFinder()
    sys.meta_path.append(finder)
    for path in _NAMED_AS_A_FUNCTION:
        spec = finder.find_spec(path)
        assert spec is not None
        sys.modules[path] = module_from_spec(spec)
        finder.exec_module(sys.modules[path])


def _missing(namespace: str, name: str, caller: FrameType) -> AttributeError | ImportError:
    """The error for a name that a module does not have.

    It has to be an AttributeError, for `hasattr`. `from module import name` would replace that by a text of Python's own, so this
    statement gets an ImportError. It is told by the instruction that the calling frame is at: tried on CPython 3.10 to 3.13; where it is
    not recognised, Python's own text appears. `tests/test_names.py` notices. It can go when Python keeps the AttributeError as a cause.
    """
    text = explain_missing(namespace, name)
    if text is None:
        return AttributeError(f"module {namespace!r} has no attribute {name!r}", name=name, obj=sys.modules.get(namespace))
    if _is_import_from(caller):
        return ImportError(text, name=namespace)
    return AttributeError(text, name=name, obj=sys.modules.get(namespace))


def _is_import_from(frame: FrameType) -> bool:
    import opcode  # only here: names are right most of the time

    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opcode.opmap.get("IMPORT_FROM")
