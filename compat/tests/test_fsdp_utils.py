"""`accelerate.utils.fsdp_utils` on two processes: files of sharded runs, in both formats, and the single steps of sharding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


class Net(torch.nn.Module):
    """A model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.block = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(words)))


def begin(kind: str = SHARDED, seed: int = 0, model: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return a sharded run after one update."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, auto_wrap_policy="no_wrap", **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = Net() if model is None else model
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.5}]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.1))
    accelerator.backward(model(torch.arange(4) + accelerator.process_index).pow(2).mean() * (seed + 1))
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def look(accelerator: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    state = get_optimizer_state_dict(model, optimizer.optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    found = {f"{name}/{key}": value.tolist() for name, entries in state.items() for key, value in entries.items()}
    return found | {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


def save_and_load(folder: str, kind: str, form: str | None, other_kind: str) -> Any:
    """Save by the functions, load into another run, and return whether both are equal, and what the load returned."""
    if form is not None:
        os.environ["ACCELERATE_CHECKPOINT_FORMAT"] = form
    try:
        accelerator, model, optimizer = begin(kind)
        plugin = accelerator.state.fsdp_plugin
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)  # Trainer passes it for every model
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder, model_index=1)
        expected = look(accelerator, model, optimizer)
    finally:
        os.environ.pop("ACCELERATE_CHECKPOINT_FORMAT", None)
    accelerator, model, optimizer = begin(other_kind, seed=3)
    plugin = accelerator.state.fsdp_plugin
    before = look(accelerator, model, optimizer)
    keys = fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, adapter_only=True)
    found = look(accelerator, model, optimizer)
    tied = accelerator.unwrap_model(model).head.weight is accelerator.unwrap_model(model).embed.weight
    return before != expected, found == expected, list(keys.missing_keys), list(keys.unexpected_keys), tied, optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize(
    ("kind", "form", "other_kind"),
    [(SHARDED, None, SHARDED), (SHARDED, "accelerate", FULL), (FULL, None, SHARDED)],
)
def test_model_and_optimizer_in_files_of_their_own(ranks, tmp_path, kind, form, other_kind):
    """What one run saved another loads, whole or in shards, whatever it would write itself."""
    assert ranks(2).run(save_and_load, str(tmp_path), kind, form, other_kind) == [(True, True, [], [], True, 0.5)] * 2
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    if kind == FULL:
        assert names == {"pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin", "optimizer.bin"}
        assert torch.load(tmp_path / "pytorch_model_fsdp.bin", weights_only=True)["block.weight"].shape == (4, 4)
    elif form == "accelerate":
        assert {f"{folder}/.metadata" for folder in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1", "optimizer_0")} <= names
    else:
        assert all(name.endswith((".safetensors", ".json")) for name in names)
    assert {path.name.rstrip("01_") for path in tmp_path.iterdir()} <= {
        "pytorch_model_fsdp", "optimizer", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin", "optimizer.bin",
    }  # fmt: skip


def save_state_both_ways(folder: str) -> Any:
    accelerator, model, optimizer = begin(SHARDED)
    accelerator.save_state(f"{folder}/theirs", checkpoint_format="accelerate")
    accelerator.save_state(f"{folder}/own")
    expected = look(accelerator, model, optimizer)
    results = []
    for name in ("theirs", "own"):
        accelerator, model, optimizer = begin(SHARDED, seed=2)
        accelerator.load_state(f"{folder}/{name}")
        results.append(look(accelerator, model, optimizer) == expected)
    if accelerator.is_main_process:
        torch.save({name: torch.tensor(value) for name, value in expected.items() if "/" not in name}, f"{folder}/expected.pt")
    return results


@pytest.mark.parametrize("safe", [True, False])
def test_weights_are_merged(ranks, tmp_path, safe):
    """`save_state` in either format is loaded, and `merge_fsdp_weights` makes one file of its shards."""
    assert ranks(2).run(save_state_both_ways, str(tmp_path)) == [[True, True]] * 2
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    fsdp_utils.merge_fsdp_weights(str(tmp_path / "theirs" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"), safe_serialization=safe)
    target = Net()
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(target, tmp_path / "merged" / ("model.safetensors" if safe else "pytorch_model.bin"))
    assert all(torch.equal(value, expected[name]) for name, value in target.state_dict().items())


def single_steps() -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Linear"])
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_block = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    blocks = [name for name, module in model.named_modules() if is_block(module)]
    old = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    sharded = fsdp_utils.fsdp2_prepare_model(accelerator, fsdp_utils.fsdp2_apply_ac(accelerator, model))
    new = fsdp_utils.fsdp2_canonicalize_names(dict(sharded.named_parameters()))
    fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, {pointer: new[name] for pointer, name in old.items()})
    kinds = {type(parameter).__name__ for parameter in optimizer.param_groups[0]["params"]}
    full = {name: torch.full(tuple(value.shape), 0.25) for name, value in model.state_dict().items()}
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, sharded, full if accelerator.is_main_process else {})
    return blocks, sorted(kinds), {float(value.full_tensor().sum() / value.numel()) for value in sharded.state_dict().values()}


def test_single_steps_of_sharding(ranks):
    """The functions that `prepare` consists of, for scripts that call them themselves (axolotl)."""
    assert ranks(2).run(single_steps) == [(["0", "2"], ["DTensor"], {0.25})] * 2


def test_functions_without_processes():
    """Retied weights, parameters of modules, the loss scaler and the switch for loading on one process."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2, device="meta")])
    model[1].weight = model[0].weight
    initialize = fsdp_utils.ensure_weights_retied(lambda module: module.to_empty(device="cpu"), model, torch.device("cpu"))
    for module in model:
        initialize(module)
    assert model[1].weight is model[0].weight
    assert fsdp_utils.get_parameters_from_modules([model[0]], model, "cpu") == {model[0].weight, model[0].bias}
    assert fsdp_utils.get_parameters_from_modules("1", model, "cpu") == {model[1].weight, model[1].bias}
    assert fsdp_utils.get_fsdp2_grad_scaler(init_scale=4.0).get_scale() == 4.0
    fsdp_utils.enable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    assert os.environ["ACCELERATE_USE_FSDP"] == "True"
    fsdp_utils.disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"


def test_paths_may_be_paths(tmp_path: Path) -> None:
    """On one process the functions work as well."""
    accelerator, model, optimizer = begin(FULL)
    plugin = accelerator.state.fsdp_plugin
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, tmp_path / "made")
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "made")
    assert sorted(os.listdir(tmp_path / "made")) == ["optimizer.bin", "pytorch_model_fsdp.bin"]
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, tmp_path / "made")
