"""Accelerator, states, optimizer and scheduler of the drop-in on one process: what scripts written for Accelerate rely on."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  # scripts do that to optimizers
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from accelerate import Accelerator, utils
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState


def sgd(model: torch.nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


# -- states -------------------------------------------------------------------------------------------------------------


def test_states_are_one_for_the_process() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    assert AcceleratorState().__dict__ is accelerator.state.__dict__
    accelerator.state.distributed_type = utils.DistributedType.FSDP  # axolotl
    assert AcceleratorState().distributed_type == "FSDP"
    GradientState()._set_sync_gradients(False)
    assert not accelerator.sync_gradients


def test_a_state_that_was_reset_says_so() -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(AttributeError, match=r"`AcceleratorState` object has no attribute .*_reset_state"):
        _ = accelerator.num_processes
    with pytest.raises(AttributeError, match="nonsense"):
        _ = accelerator.nonsense
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16"


def test_a_failed_accelerator_leaves_no_settings() -> None:
    with pytest.raises(ValueError, match="handler"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=["no handler"])
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_one_process_gathers_nothing() -> None:
    accelerator, data = Accelerator(cpu=True), {"a": torch.tensor(1.0), "b": "text"}
    for collective in (accelerator.gather, accelerator.gather_for_metrics, utils.gather, utils.gather_object, utils.broadcast):
        assert collective(data) is data
    assert utils.pad_across_processes(data["a"]) is data["a"]
    with pytest.raises(TypeError, match="str"):
        utils.pad_across_processes(data)


def test_nested_tensors_are_not_padded() -> None:
    with pytest.warns(UserWarning, match="prototype|nested"):
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(utils.CannotPadNestedTensorWarning):
        assert utils.pad_across_processes(nested) is nested


# -- accumulation ---------------------------------------------------------------------------------------------------------


def test_a_model_that_was_not_prepared_can_be_accumulated() -> None:
    """Its loss is divided by the batches of a window, and the flag says where one ends."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, flags = torch.nn.Linear(1, 1, bias=False), []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            flags.append((accelerator.sync_gradients, model.weight.grad.item(), accelerator.step))
    assert flags == [(False, 0.5, 1), (True, 1.0, 2), (False, 1.5, 3), (True, 2.0, 4)]


def test_a_loader_that_ends_ends_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), torch.utils.data.DataLoader(torch.ones(4, 1)))
    flags = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        flags.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader, accelerator.step))
    assert flags == [(False, False, 1), (False, False, 2), (True, False, 3), (True, True, 0)]


@pytest.mark.parametrize(("options", "last"), [({}, 1.0), ({"mean_of_window": False}, 1 / 3)])
def test_short_last_window(options: dict[str, Any], last: float) -> None:
    """Four batches in windows of three: the last one is the mean of its batch; with the switch a third of it, as in Accelerate."""
    accelerator = pickle.loads(pickle.dumps(Accelerator(cpu=True, gradient_accumulation_steps=3, **options)))
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(model, sgd(model, 1.0), torch.utils.data.DataLoader(torch.ones(4, 1)))
    torch.nn.init.zeros_(model.weight)
    weights = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == pytest.approx([0.0, 0.0, -1.0, -1.0 - last])


def test_outside_of_accumulate_a_loss_is_divided() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 0.25


def test_the_flag_is_a_tensor_that_scripts_read() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert accelerator.flag_tensor.item() == 1
    assert accelerator.check_trigger()
    assert accelerator.flag_tensor.item() == 0
    assert not accelerator.check_trigger()


# -- optimizer and scheduler ------------------------------------------------------------------------------------------------


def test_an_optimizer_that_a_script_wraps_follows_the_shared_state() -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = AcceleratedOptimizer(sgd(model, 1.0))
    for closing, weight in ((False, 0.0), (True, -2.0)):
        accelerator.gradient_state._set_sync_gradients(closing)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert model.weight.item() == weight
        optimizer.zero_grad()
        assert (model.weight.grad is None) is closing


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_prepared_optimizer_can_be_copied(duplicate: Any) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    optimizer = duplicate(accelerator.prepare(sgd(model)))
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.step()


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    optimizer = accelerator.prepare(sgd(model, 1.0))
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5), [optimizer])
    optimizer.step()
    optimizer._is_overflow = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    optimizer._is_overflow = False
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


# -- models -----------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A block that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Tower(torch.nn.Module):
    """Repeated blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = True
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_regions_are_compiled_in_a_twin() -> None:
    """The model stays as it is, on the same parameters; a forward that a library replaced on the object runs on the twin."""
    model = Tower()
    model.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, model)
    twin = utils.compile_regions(model, backend="eager")
    assert [type(module).__name__ for module in (twin, *twin.blocks, twin.head)] == ["Tower", *["OptimizedModule"] * 3]
    with torch.no_grad():
        assert torch.equal(twin(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert twin.head._orig_mod is model.head
    assert twin.forward.__self__ is twin
    assert not any(utils.is_compiled_module(module) for module in model.modules())
    assert utils.extract_model_from_parallel(twin, keep_torch_compile=False) is model
    assert utils.extract_model_from_parallel(twin) is twin
    assert list(dict(twin.named_parameters()).values())[0] is next(model.parameters())
    torch._dynamo.reset()


def test_a_forward_that_was_replaced_is_put_back() -> None:
    model = Block()
    model._original_forward = model.forward
    model.forward = utils.convert_outputs_to_fp32(model.forward)
    unwrapped = Accelerator(cpu=True).unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(unwrapped)
    pickle.dumps(unwrapped)


def test_free_memory_forgets_everything() -> None:
    accelerator, model = Accelerator(cpu=True), Block()
    model, optimizer = accelerator.prepare(model, sgd(model))
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    assert not any((accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders, accelerator.step))


# -- what importing costs -----------------------------------------------------------------------------------------------------


def test_importing_adds_a_few_small_modules_and_nothing_else() -> None:
    """A count and not a time: `benchmarks/dropin_import.py` measures."""
    program = """
        import sys, accelerate
        assert "torch" not in sys.modules, "import accelerate alone imports torch"
        assert "importlib.metadata" not in sys.modules
        import slipstream; slipstream.Accelerator
        before = set(sys.modules)
        accelerate.Accelerator
        added = set(sys.modules) - before
        assert all(name.startswith("accelerate.") for name in added), added
        assert len(added) <= 20, sorted(added)
        assert not any(name.startswith(("accelerate.commands", "accelerate.test_utils", "accelerate.data_loader")) for name in added)
        accelerate.utils.operations.gather, accelerate.hooks.ModelHook, accelerate.state.PartialState  # attributes, as with the original
    """
    import textwrap

    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_a_state_of_one_process() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.is_main_process, state.is_last_process) == (1, 0, True, True)
    assert (state.use_distributed, state.distributed_type, state.backend, state.initialized) == (False, "NO", None, True)
    with state.split_between_processes({"a": [1, 2]}) as part:
        assert part == {"a": [1, 2]}
