"""The names that users of Accelerate write: importable, or an error that says where they are or that they are not here."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

import slipstream
import slipstream.utils
from slipstream import public_names
from slipstream.cli.main import main
from slipstream.public_names import ABSENT, MODULES, Absence, explain_missing, find_home, names_of

KNOWN = """
    AORecipeKwargs AbstractTrainStep AcceleratedOptimizer AcceleratedScheduler Accelerator AcceleratorState AimTracker
    AlignDevicesHook AutocastKwargs BaseEnum BatchSamplerShard BertTrainStep BnbQuantizationConfig CPUInformation
    CannotPadNestedTensorWarning ClearMLTracker CometMLTracker ComputeEnvironment ConvertOutputsToFp32 CpuOffload CustomDtype
    DDPCommunicationHookType DVCLiveTracker DataLoaderAdapter DataLoaderConfiguration DataLoaderDispatcher DataLoaderShard
    DataLoaderStateMixin DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper
    DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs DistributedOperationException DistributedType DummyOptim
    DummyScheduler DynamoBackend EnumWithContains FP8BackendType FP8RecipeKwargs FullyShardedDataParallelPlugin GPTTrainStep
    GatheredParameters GeneralTracker GradScalerKwargs GradientAccumulationPlugin GradientState HfDeepSpeedConfig
    InitProcessGroupKwargs IterableDatasetShard KwargsHandler LayerwiseCastingHook LocalSGD LoggerType MLflowTracker
    MSAMPRecipeKwargs MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMPlugin
    MegatronLMSchedulerWrapper ModelHook MpDeviceLoaderWrapper MultiProcessAdapter OffloadedWeightsLoader ParallelismConfig
    PartialState PrecisionType PrefixedDataset PrepareForLaunch ProfileKwargs ProjectConfiguration RNGType RegressionDataset
    SageMakerDistributedType SeedableRandomSampler SequentialHook SkipBatchSampler SkipDataLoader SwanLabTracker T5TrainStep
    TERecipeKwargs TempDirTestCase TensorBoardTracker TensorInformation ThreadLocalSharedDict TorchContextParallelConfig
    TorchDynamoPlugin TorchTensorParallelConfig TorchTensorParallelPlugin TrackioTracker UserCpuOffloadHook WandBTracker
    add_hook_to_module add_model_config_to_megatron_parser align_module_device apply_fp8_autowrap are_libraries_initialized
    attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook attach_layerwise_casting_hooks
    avg_losses_across_data_parallel_group broadcast broadcast_object_list build_pipeline calculate_maximum_sizes chained_operation
    check_cuda_fp8_capability check_cuda_p2p_ib_support check_device_map check_device_same check_os_kernel
    check_tied_parameters_in_config check_tied_parameters_on_same_device clean_device_map clean_state_dict_for_safetensors
    clear_device_cache clear_environment compare_versions compile_regions compile_regions_deepspeed compile_regions_fsdp2
    compute_module_sizes compute_module_total_buffer_size concatenate contextual_fp8_autocast convert_bytes
    convert_dict_to_env_variables convert_file_size_to_int convert_model convert_model_to_fp8_ao convert_outputs_to_fp32
    convert_to_fp32 copy_tensor_to_devices cpu_offload cpu_offload_with_hook debug_launcher deepspeed_required
    disable_fsdp_ram_efficient_loading disk_offload dispatch_model do_nothing dtype_byte_size enable_fsdp_ram_efficient_loading
    ensure_weights_retied env_var_path_add execute_subprocess_async extract_model_from_parallel extract_submodules_state_dict
    fallback_allocate filter_first_and_last_linear_layers filter_linear_layers filter_trackers find_batch_size find_device
    find_executable_batch_size find_first_last_linear_layers find_pippy_batch_size find_tied_parameters fsdp2_apply_ac
    fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model
    fsdp2_switch_optimizer_parameters gather gather_across_data_parallel_groups gather_object gather_tensor_shape
    generate_device_map get_active_deepspeed_plugin get_available_trackers get_balanced_memory get_cpu_distributed_information
    get_current_device_type get_data_structure get_driver_version get_free_port get_fsdp2_grad_scaler get_gpu_info get_grad_scaler
    get_int_from_env get_keys_to_not_convert get_logger get_max_layer_size get_max_memory get_mixed_precision_context_manager
    get_model_tp_size get_module_children_bottom_up get_module_class_from_name get_module_leaves get_module_size_with_ties
    get_non_persistent_buffers get_parameter_device get_parameters_from_modules get_pretty_name get_quantized_model_device_map
    get_sampler get_shape get_state_dict_from_offload get_state_dict_offloaded_model has_4bit_bnb_layers has_ao_layers
    has_compiled_regions has_offloaded_params has_repeated_blocks has_transformer_engine_layers honor_type id_tensor_storage
    ignorant_find_batch_size infer_auto_device_map init_empty_weights init_on_device initialize_tensors install_xla
    is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available is_bf16_available
    is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available
    is_compiled_module is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available
    is_fp8_available is_habana_gaudi1 is_hpu_available is_import_timer_available is_initialized is_lomo_available
    is_matplotlib_available is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available
    is_musa_available is_namedtuple is_neuron_available is_npu_available is_numpy_available is_pandas_available is_peft_available
    is_peft_model is_pippy_available is_port_in_use is_pynvml_available is_pytest_available is_repeated_blocks is_rich_available
    is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available is_tensor_information
    is_tensorboard_available is_timm_available is_torch_distributed_available is_torch_tensor is_torch_version
    is_torch_xla_available is_torch_xpu_tensor is_torchao_available is_torchdata_available
    is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available is_trackio_available
    is_transformer_engine_available is_transformer_engine_mxfp8_available is_transformers_available is_triton_available
    is_wandb_available is_weights_only_available is_xccl_available is_xpu_available listify load load_accelerator_state
    load_and_quantize_model load_checkpoint_and_dispatch load_checkpoint_in_model load_custom_state load_fsdp_model
    load_fsdp_optimizer load_offloaded_weight load_offloaded_weights load_state_dict map_pytorch_optim_to_deepspeed merge_dicts
    merge_fsdp_weights model_has_dtensor move_to_device named_module_tensors notebook_launcher offload_state_dict offload_weight
    on_main_process override_numa_affinity pad_across_processes pad_input_tensors parse_choice_from_env parse_flag_from_env
    patch_environment patch_optimizer_step pippy_forward prepare_data_loader prepare_deepspeed_cmd_env
    prepare_extend_env_parallelism_config prepare_multi_gpu_env prepare_pippy prepare_sagemager_args_inputs
    prepare_simple_launcher_cmd_env prepare_tpu purge_accelerate_environment quantize_and_offload_8bit recursive_getattr
    recursively_apply reduce register_tracker_class release_memory remove_hook_from_module remove_hook_from_submodules
    replace_with_bnb_layers retie_parameters save save_accelerator_state save_custom_state save_fsdp_model save_fsdp_optimizer
    save_offload_index send_to_device set_module_tensor_to_device set_numa_affinity set_seed setup_fp8_env should_reduce_batch_size
    skip_first_batches slice_tensors str_to_bool synchronize_rng_state synchronize_rng_states test_launch torchao_required tqdm
    verify_operation wait_for_everyone write_basic_config
"""
"""The public names of Accelerate 1.15, without those of methods, options and variables."""

OF_MEGATRON = """
    finish_mpu_init initialize model_provider_func parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config
    parse_t5_config prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler
"""


def imported(module: str, name: str) -> Any:
    """What `from module import name` binds."""
    found: dict[str, Any] = {}
    exec(f"from {module} import {name}", found)
    return found[name]


REAL = {
    "accelerator": ["Accelerator"],
    "hooks": ["ModelHook", "add_hook_to_module"],
    "inference": ["generate_device_map", "prepare_pippy"],
    "logging": ["get_logger"],
    "tracking": ["GeneralTracker", "WandBTracker"],
}
"""Paths that are files of ours."""


@pytest.mark.parametrize(("path", "names"), [*((path, names_of(path)) for path in MODULES), *REAL.items()], ids=[*MODULES, *REAL])
def test_paths(path: str, names: list[str]) -> None:
    """Every name of a module path can be imported from it, and is the very object that Slipstream has elsewhere."""
    module = importlib.import_module(f"slipstream.{path}")
    for name in names:
        found = imported(f"slipstream.{path}", name)
        assert getattr(module, name) is found
        assert name in dir(module)
        assert {getattr(space, name) is found for space in (slipstream, slipstream.utils) if name in space.__all__} <= {True}


@pytest.mark.parametrize("path", MODULES)
def test_modules(path: str) -> None:
    """A module path is found in every way in which Python looks for one."""
    full = f"slipstream.{path}"
    parent, _, last = full.rpartition(".")
    module = importlib.import_module(full)
    assert module.__name__ == full
    assert importlib.util.find_spec(full) is module.__spec__
    if last != "tqdm":  # the function of that name
        assert imported(parent, last) is module
        assert getattr(importlib.import_module(parent), last) is module
    everything: dict[str, Any] = {}
    exec(f"from {full} import *", everything)
    assert set(names_of(full)) <= set(everything)
    assert hasattr(module, "__path__") == any(other.startswith(f"{path}.") for other in MODULES)


def test_no_collection_during_import() -> None:
    """A public name is imported, and torch with it, without garbage collections; afterwards they go on, and one is due."""
    program = """
import gc
import slipstream
def count():
    return sum(generation["collections"] for generation in gc.get_stats())
before = count()
slipstream.Accelerator
assert count() <= before + 1, (before, count())
assert gc.isenabled()
gc.disable()
slipstream.ParallelismConfig
assert not gc.isenabled(), "switched off by the user"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_without_import() -> None:
    """The modules below `slipstream` are there as attributes after `import slipstream`, and nothing imports torch before it is used."""
    program = """
import sys
import slipstream
slipstream.state, slipstream.utils.operations
import slipstream.local_sgd, slipstream.utils.dataclasses
assert "torch" not in sys.modules
assert slipstream.hooks.ModelHook and slipstream.logging.get_logger and slipstream.inference.prepare_pippy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_known() -> None:
    """Every public name of Accelerate is here, or has an error that says why not; and is not both."""
    absent = {name for absence in ABSENT for name in absence.names.split()}
    assert [name for name in KNOWN.split() if (find_home(name) is None) != (name in absent)] == []


@pytest.mark.parametrize("absence", ABSENT, ids=lambda absence: absence.purpose)
@pytest.mark.parametrize("module", ["slipstream", "slipstream.utils", "slipstream.utils.dataclasses"])
def test_absent(module: str, absence: Absence) -> None:
    """A name that is not here is no attribute; asking for it, or importing it, says what it is for and what to do."""
    namespace = importlib.import_module(module)
    for name in absence.names.split():
        assert not hasattr(namespace, name)
        for ask, error in ((partial(getattr, namespace, name), AttributeError), (partial(imported, module, name), ImportError)):
            with pytest.raises(error) as told:
                ask()
            text = str(told.value)
            assert text.startswith(f"{module} has no {name}{' yet' if absence.comes else ''}: it is for {absence.purpose}")
            assert text.endswith(absence.instead)
            assert ("not in this version" in text) == absence.comes


def test_absent_module() -> None:
    """Whatever is asked of a module that is not here, the error says what the module is for."""
    for name in OF_MEGATRON.split():
        with pytest.raises(ImportError, match="it is for training with Megatron-LM, which is not in this version"):
            imported("slipstream.utils.megatron_lm", name)


@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        ("slipstream", "set_seed", "slipstream.utils"),
        ("slipstream", "get_logger", "slipstream.logging"),
        ("slipstream", "AlignDevicesHook", "slipstream.hooks"),
        ("slipstream", "GeneralTracker", "slipstream.tracking"),
        ("slipstream", "AcceleratedOptimizer", "slipstream.optimizer"),
        ("slipstream", "generate_device_map", "slipstream.inference"),
        ("slipstream.utils", "Accelerator", "slipstream"),
        ("slipstream.state", "set_seed", "slipstream.utils"),
        ("slipstream.utils.operations", "PartialState", "slipstream"),
    ],
)
def test_elsewhere(module: str, name: str, place: str) -> None:
    """A name that was looked for in the wrong module is an error with the line to write, which works."""
    with pytest.raises(ImportError) as told:
        imported(module, name)
    line = f"from {place} import {name}"
    assert str(told.value).endswith(f"Write: {line}")
    exec(line)
    assert not hasattr(importlib.import_module(module), name)


def test_unknown() -> None:
    """A name that nobody knows has Python's own error, with its suggestion."""
    with pytest.raises(ImportError, match="cannot import name 'Acelerator' from 'slipstream'"):
        imported("slipstream", "Acelerator")
    with pytest.raises(AttributeError, match="module 'slipstream.state' has no attribute 'PartialStat'"):
        importlib.import_module("slipstream.state").PartialStat  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"slipstream\.utils\.nothing"):
        importlib.import_module("slipstream.utils.nothing")
    assert explain_missing("slipstream", "Acelerator") is None


def test_many_names() -> None:
    """The error comes also where a statement imports so many names that its instructions are extended."""
    names = ", ".join(f"set_seed as s{number}" for number in range(300))
    with pytest.raises(ImportError, match="DeepSpeedPlugin yet"):
        exec(f"from slipstream.utils import {names}, DeepSpeedPlugin")


def test_tables() -> None:
    """No name is listed twice in the table of what is not here, and every path it speaks of exists."""
    names = [name for absence in ABSENT for name in absence.names.split()]
    assert [name for name in names if names.count(name) > 1] == []
    assert [path for absence in ABSENT for path in absence.modules.split() if MODULES.get(path) != ""] == []
    empty = {path for path, listed in MODULES.items() if not listed}
    assert empty == {path for absence in ABSENT for path in absence.modules.split()}
    for home, listed in public_names._INNER.items():
        assert set(listed.split()) <= set(importlib.import_module(home).__all__), home


def test_commands(capsys: Any) -> None:
    """A command of Accelerate that is not here says so, and what it would be for."""
    assert main(["tpu-config", "--config_file", "some.yaml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("slipstream: There is no command tpu-config yet: it is for running on TPUs, which is not in this version.")
