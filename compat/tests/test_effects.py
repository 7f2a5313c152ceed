"""Parameters of the drop-in, each with a value other than its default: it has an effect, or a warning or an error says that it has none."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator, utils
from accelerate._unsupported import UnsupportedError
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

from slipstream.errors import ConfigError


def make(**arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, **arguments)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2, bias=False)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def rate_without_update(accelerator: Accelerator) -> float:
    """The learning rate after a step of the scheduler in a batch that does not end an update."""
    model = linear()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the order of steps
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
    return float(scheduler.get_last_lr()[0])


ACCELERATOR: dict[str, Callable[[Path], bool]] = {
    "split_batches": lambda folder: make(split_batches=True).split_batches,
    "mixed_precision": lambda folder: make(mixed_precision="bf16").prepare(linear())(torch.ones(1, 2)).grad_fn.name() == "ToCopyBackward0",
    "gradient_accumulation_steps": lambda folder: make(gradient_accumulation_steps=4).gradient_accumulation_steps == 4,
    "cpu": lambda folder: Accelerator(cpu=True).device.type == "cpu",
    "dataloader_config": lambda folder: not make(dataloader_config=DataLoaderConfiguration(even_batches=False)).even_batches,
    "rng_types": lambda folder: make(rng_types=["torch"]).rng_types == ["torch"],
    "log_with": lambda folder: make(log_with="tensorboard", project_dir=str(folder)).log_with[0] == "tensorboard",
    "project_dir": lambda folder: make(project_dir=str(folder)).logging_dir == str(folder),
    "project_config": lambda folder: make(project_config=ProjectConfiguration(str(folder), iteration=3)).save_iteration == 3,
    "gradient_accumulation_plugin": lambda folder: make(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)
    ).gradient_accumulation_steps == 3,
    "step_scheduler_with_optimizer": lambda folder: rate_without_update(
        make(step_scheduler_with_optimizer=False, gradient_accumulation_steps=2)
    ) == 0.5 != rate_without_update(make(gradient_accumulation_steps=2)),
    "kwargs_handlers": lambda folder: make(kwargs_handlers=[ProfileKwargs(record_shapes=True)]).profile_handler.record_shapes,
    "dynamo_backend": lambda folder: utils.is_compiled_module(make(dynamo_backend="eager").prepare(linear())),
    "dynamo_plugin": lambda folder: utils.is_compiled_module(make(dynamo_plugin=TorchDynamoPlugin(backend="eager")).prepare(linear())),
    "fsdp_plugin": lambda folder: make(fsdp_plugin=FullyShardedDataParallelPlugin()).state.fsdp_plugin is not None,
    "parallelism_config": lambda folder: make(parallelism_config=accelerate.ParallelismConfig()).parallelism_config is not None,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", ACCELERATOR)
def test_an_argument_of_the_accelerator_has_its_effect(name: str, tmp_path: Path) -> None:
    assert ACCELERATOR[name](tmp_path)


def test_device_placement_decides_who_moves() -> None:
    moves, stays = make(), make(device_placement=False)
    moves.state.device = torch.device("meta")  # the state of both
    assert moves.prepare(linear()).weight.device.type == "meta"
    for prepare in (
        lambda: stays.prepare(linear()),
        lambda: moves.prepare_model(linear(), device_placement=False),
        lambda: moves.prepare(linear(), linear(), device_placement=[True, False]),
    ):
        with pytest.raises(ConfigError, match="is on cpu, but this process computes on meta"):
            prepare()


@pytest.mark.parametrize("name", ["deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"])
def test_an_engine_that_is_not_there_raises(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"instead|Leave"):
        make(**{name: object()})
    assert AcceleratorState._shared_state == {}


def test_every_argument_of_the_accelerator_is_tried_here() -> None:
    import inspect

    tried = {*ACCELERATOR, "device_placement", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"}
    assert set(inspect.signature(Accelerator).parameters) - {"options"} == tried


INEFFECTIVE: dict[str, Callable[[], object]] = {
    "GradScalerKwargs": lambda: make(kwargs_handlers=[GradScalerKwargs(init_scale=2.0)]),
    "AutocastKwargs": lambda: make(kwargs_handlers=[AutocastKwargs(enabled=False)]),
    "DistributedDataParallelKwargs": lambda: make(
        kwargs_handlers=[DistributedDataParallelKwargs()], fsdp_plugin=FullyShardedDataParallelPlugin()
    ),
    "check_reduction": lambda: DistributedDataParallelKwargs(check_reduction=True),
    "dim": lambda: DistributedDataParallelKwargs(dim=1),
    "buffer_autocast": lambda: FullyShardedDataParallelPlugin().set_mixed_precision("bf16", buffer_autocast=True),
    "project_dir": lambda: make(project_dir="a", project_config=ProjectConfiguration("b")),
    "fsdp_version": lambda: FullyShardedDataParallelPlugin(fsdp_version=1),
}


@pytest.mark.parametrize("name", INEFFECTIVE)
def test_what_has_no_effect_is_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=name):
        INEFFECTIVE[name]()


REFUSED: dict[str, Callable[[], object]] = {
    "precision": lambda: make(mixed_precision="fp12"),
    "another precision": lambda: [make(mixed_precision="bf16"), make(mixed_precision="no")],
    "a handler that is none": lambda: make(kwargs_handlers=[3]),
    "two handlers of a kind": lambda: make(kwargs_handlers=[ProfileKwargs(), ProfileKwargs()]),
    "two ways to accumulate": lambda: make(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(3)),
    "two ways to compile": lambda: make(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager")),
    "a backend that is none": lambda: TorchDynamoPlugin(backend="bogus"),
    "an unknown argument": lambda: make(nonsense=1),
    "an unknown reduction": lambda: utils.reduce(torch.ones(1), "median"),
    "tensor parallelism": lambda: make(parallelism_config=accelerate.ParallelismConfig(tp_size=2)),
    "async tensor parallelism": lambda: utils.TorchTensorParallelConfig(enable_async_tp=True),
    "context and sequence parallelism": lambda: accelerate.ParallelismConfig(cp_size=2, sp_size=2),
    "a state before an Accelerator": AcceleratorState,
    "a random state that is none": lambda: utils.synchronize_rng_states(["dice"]),
    "an accumulation of a word": lambda: make(gradient_accumulation_steps="two"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_and_leaves_no_state(name: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        REFUSED[name]()
    AcceleratorState._reset_state(True)
    assert make().num_processes == 1


VARIABLES: dict[str, tuple[str, Callable[[], object], object]] = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("4", lambda: make(gradient_accumulation_steps=2).gradient_accumulation_steps, 4),
    "ACCELERATE_MIXED_PRECISION": ("bf16", lambda: make().mixed_precision, "bf16"),
    "ACCELERATE_USE_CPU": ("true", lambda: Accelerator().device.type, "cpu"),
    "ACCELERATE_DEBUG_MODE": ("true", lambda: PartialState().debug, True),
    "ACCELERATE_TORCH_DEVICE": ("meta", lambda: PartialState().device.type, "meta"),
    "ACCELERATE_LOG_LEVEL": ("ERROR", lambda: get_logger("effects.level").isEnabledFor(logging.WARNING), False),
    "ACCELERATE_DYNAMO_BACKEND": ("eager", lambda: make().state.dynamo_plugin.backend, "EAGER"),
    "ACCELERATE_DYNAMO_MODE": ("max-autotune", lambda: TorchDynamoPlugin(backend="inductor").mode, "max-autotune"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": ("1", lambda: TorchDynamoPlugin(backend="eager").fullgraph, True),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": ("1", lambda: TorchDynamoPlugin(backend="eager").dynamic, True),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": ("1", lambda: TorchDynamoPlugin(backend="eager").use_regional_compilation, True),
    "ACCELERATE_USE_FSDP": ("true", lambda: type(make().state.fsdp_plugin), FullyShardedDataParallelPlugin),
    "ACCELERATE_MEAN_OF_WINDOW": ("false", lambda: make()._mean_of_window, False),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true", lambda: type(make().parallelism_config), accelerate.ParallelismConfig),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": ("3", lambda: accelerate.ParallelismConfig().dp_replicate_size, 3),
    "PARALLELISM_CONFIG_CP_SIZE": ("2", lambda: accelerate.ParallelismConfig().cp_size, 2),
    "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT", lambda: FullyShardedDataParallelPlugin().state_dict_type.name, "FULL_STATE_DICT"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true", lambda: FullyShardedDataParallelPlugin().activation_checkpointing, True),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_of_the_launcher_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, read, expected = VARIABLES[name]
    level = logging.root.level
    monkeypatch.setenv(name, text)
    try:
        assert read() == expected
    finally:
        logging.root.setLevel(level)


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM", "SAGEMAKER"])
def test_a_variable_for_an_engine_that_is_not_there_raises(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(UnsupportedError):
        make()


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS=many"):
        make()


def grows() -> Callable[[], int]:
    sizes = iter((7, 3))
    return lambda: next(sizes)


def fitting(**options: Any) -> list[int]:
    tried: list[int] = []

    @utils.find_executable_batch_size(**options)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    train()
    return tried


T = torch.arange(6.0).reshape(3, 2)


class Movable:
    """Says how it was moved."""

    def to(self, device: Any, non_blocking: bool = False) -> tuple[str, bool]:
        return str(device), non_blocking


FUNCTIONS: dict[str, tuple[Callable[[], object], object]] = {
    "find_executable_batch_size(starting_batch_size)": (lambda: fitting(starting_batch_size=5), [5, 4]),
    "find_executable_batch_size(reduce_batch_size_fn)": (lambda: fitting(starting_batch_size=9, reduce_batch_size_fn=grows()), [9, 7, 3]),
    "send_to_device(skip_keys)": (lambda: utils.send_to_device({"a": T, "b": T}, "meta", skip_keys="a")["a"].device.type, "cpu"),
    "send_to_device(non_blocking)": (lambda: utils.send_to_device(Movable(), "cpu", non_blocking=True), ("cpu", True)),
    "concatenate(dim)": (lambda: utils.concatenate([T, T], dim=1).shape, (3, 4)),
    "pad_input_tensors(dim)": (lambda: utils.pad_input_tensors(T, 2, 3, dim=1).shape, (3, 3)),
    "recursively_apply(test_type)": (lambda: utils.recursively_apply(str, [1, "a"], test_type=lambda value: value == 1), ["1", "a"]),
    "recursively_apply(args)": (lambda: utils.recursively_apply(torch.mul, [T], 0)[0].sum().item(), 0.0),
    "reduce(scale)": (lambda: utils.reduce(torch.ones(1), scale=3.0).item(), 3.0),
    "extract_model_from_parallel(keep_torch_compile)": (
        lambda: type(utils.extract_model_from_parallel(torch.compile(linear(), backend="eager"), keep_torch_compile=False)).__name__,
        "Linear",
    ),
    "extract_model_from_parallel(recursive)": (
        lambda: type(utils.extract_model_from_parallel(torch.nn.Sequential(torch.nn.DataParallel(linear())), recursive=True)[0]).__name__,
        "Linear",
    ),
    "get_module_children_bottom_up(return_fqns)": (
        lambda: [name for name, _ in utils.get_module_children_bottom_up(torch.nn.Sequential(linear(), linear()), return_fqns=True)],
        ["0", "1", ""],
    ),
    "str_to_bool(to_bool)": (lambda: utils.str_to_bool("yes", to_bool=True) is True, True),
    "parse_flag_from_env(default)": (lambda: utils.parse_flag_from_env("NO_SUCH_VARIABLE", True), True),
    "parse_choice_from_env(default)": (lambda: utils.parse_choice_from_env("NO_SUCH_VARIABLE", "fp8"), "fp8"),
    "is_port_in_use(port)": (lambda: utils.is_port_in_use(1), False),
    "get_logger(log_level)": (lambda: get_logger("effects.argument", log_level="ERROR").isEnabledFor(logging.WARNING), False),
    "tqdm(main_process_only)": (lambda: list(utils.tqdm([1, 2], main_process_only=False, disable=True)), [1, 2]),
    "PartialState.on_process(process_index)": (lambda: PartialState().on_process(lambda: 1, process_index=3)(), None),
    "PartialState.on_local_process(local_process_index)": (lambda: PartialState().on_local_process(lambda: 1, local_process_index=0)(), 1),
    "InitProcessGroupKwargs(timeout)": (
        lambda: make(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=9))]).state.limits.timeout, 9.0,
    ),
    "ProfileKwargs(record_shapes)": (lambda: ProfileKwargs(activities=["cpu"], record_shapes=True).build().record_shapes, True),
    "ProfileKwargs(with_stack)": (lambda: ProfileKwargs(activities=["cpu"], with_stack=True).build().with_stack, True),
    "GradientState(plugin)": (lambda: GradientState(GradientAccumulationPlugin(num_steps=2)).num_steps, 2),
    "GradientAccumulationPlugin(sync_with_dataloader)": (
        lambda: GradientState(GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)).sync_with_dataloader, False,
    ),
    "GradientAccumulationPlugin(adjust_scheduler)": (
        lambda: GradientState(GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)).adjust_scheduler, False,
    ),
    "ProjectConfiguration.set_directories": (lambda: ProjectConfiguration().set_directories("x"), None),
    "TorchDynamoPlugin(disable)": (
        lambda: utils.is_compiled_module(make(dynamo_plugin=TorchDynamoPlugin(backend="eager", disable=True)).prepare(linear())), False,
    ),
    "Accelerator.autocast(handler)": (lambda: autocast_dtype(AutocastKwargs(enabled=False)), torch.float32),
    "Accelerator.prepare_model(evaluation_mode)": (lambda: type(make().prepare_model(linear(), evaluation_mode=True)).__name__, "Linear"),
    "Accelerator.get_state_dict(unwrap)": (
        lambda: list(make().get_state_dict(torch.nn.DataParallel(linear()), unwrap=False)), ["module.weight"],
    ),
    "Accelerator.clip_grad_norm_(norm_type)": (lambda: clipped(norm_type=float("inf")), 3.0),
}  # fmt: skip


def autocast_dtype(handler: AutocastKwargs) -> torch.dtype:
    with make(mixed_precision="bf16").autocast(handler):
        return (T.t() @ T).dtype


def clipped(**options: Any) -> float:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3.0)
    return float(make().clip_grad_norm_([parameter], 1.0, **options))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_parameter_of_a_function_has_its_effect(name: str) -> None:
    call, expected = FUNCTIONS[name]
    level = logging.root.level
    try:
        assert call() == expected
    finally:
        logging.root.setLevel(level)
        torch._dynamo.reset()


def test_save_takes_its_format_and_its_place(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    utils.save({"a": T}, tmp_path / "plain.bin")
    assert torch.equal(torch.load(tmp_path / "plain.bin", weights_only=True)["a"], T)
    utils.save({"a": T}, tmp_path / "safe.safetensors", safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "safe.safetensors")["a"], T)
    utils.save({"a": T}, tmp_path / "each.bin", save_on_each_node=True)
    assert os.path.exists(tmp_path / "each.bin")
